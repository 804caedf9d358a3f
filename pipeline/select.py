"""stage=select: which of the ten signals the scheduler reads (design section 4, step 2).

A set of signals is judged by what matters downstream: η of the policy that it induces, replayed
exactly. The policy is fitted backward, from step D to step 1, on logged outcomes: a ridge
regression of what a mid step gains over a small one, both followed by the policy's own later steps
and, after the round, by a fixed policy to the end of the text (`pipeline.episodes`), on context and
signals and their pairwise products. A candidate's products are a block of those of the widest
design, which are summed once. It is fitted on all folds but one, and decodes the texts of that one.

Every seed draws prompts, the machines of their turns (`pipeline.hardware`) and folds anew. Tokens
are committed ones: a text has a given number of them, so that η of two policies is as their times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from omegaconf import DictConfig
from sklearn.model_selection import GroupKFold
from tqdm import tqdm

from pipeline.episodes import Worth, rounds_at, turn_settings, worth
from pipeline.features import (
    GROUPS,
    advantage,
    group_keys,
    load_tries,
    note,
    prompt_keys,
    scheduler_inputs,
    table_order,
)
from pipeline.hardware import Outcomes, Setting, outcomes, outcomes_in, settings
from pipeline.plots import plot_selection
from pipeline.replay import Texts, texts_of
from pipeline.report import stage_run
from pipeline.training import column_stats
from pipeline.tries import Tries, prefix_steps
from treegraft_core import PAPER_SIGNALS, SIGNALS, InputError
from treegraft_core.files import write_json
from treegraft_core.signals import context_names
from treegraft_core.tree import FloatArray, IntArray

SingleArray = NDArray[np.float32]

RIDGE = 0.5
CLIP = 4.0
CHUNK = 8192
SHUFFLES = 3
DRAWS = 2000
NESTED = "chosen without the fold"
PAPER = "the paper's six"


@dataclass(frozen=True)
class Sample:
    """Decoding states of whole prompts, each on one machine.

    Attributes
    ----------
    tries : Tries
        The S states.
    texts : Texts
        Their turns.
    drawn : list of Setting
        The M machines.
    number : int64 array, shape ``[S]``
        Each state's machine; a turn that is whole has one.
    found : Outcomes
        Of the states, each on its machine.
    z : float64 array, shape ``[S, 2^D − 1, 6 + D + 10]``
        z* with all ten signals.
    prompt : int64 array, shape ``[S]``
        Each state's prompt, by number.
    prompts : list of str
        Their keys.
    fixed : list of float64 array, shape ``[3, turns, 2^D]``
        For each machine, rounds, tokens and t of every fixed schedule on all turns of its pair.
    """

    tries: Tries
    texts: Texts
    drawn: Sequence[Setting]
    number: IntArray
    found: Outcomes
    z: FloatArray
    prompt: IntArray
    prompts: Sequence[str]
    fixed: Sequence[FloatArray]

    def totals(self, fold: IntArray, folds: int) -> FloatArray:
        """Return `fixed` by fold, ``[3, M, folds, 2^D]``."""
        of_turn, pair = fold[self.texts.first], self.texts.turns["pair"].to_numpy()
        sums = np.zeros((3, len(self.drawn), folds, 1 << self.tries.depth))
        for i, (setting, fixed) in enumerate(zip(self.drawn, self.fixed, strict=True)):
            mine = of_turn[pair == setting.pair]
            for f in range(folds):
                sums[:, i, f] = fixed[:, mine == f].sum(1)
        return sums


def some_states(prompts: NDArray[np.object_], most: int, rng: np.random.Generator) -> IntArray:
    """Return at most ``most`` states (0: all) of whole prompts, drawn at random; one at least."""
    names, index, sizes = np.unique(prompts.astype(str), return_inverse=True, return_counts=True)
    order = rng.permutation(len(names))
    count = len(names) if most == 0 else max(1, int((sizes[order].cumsum() <= most).sum()))
    return np.flatnonzero(np.isin(index, order[:count]))


def fixed_totals(tries: Tries, texts: Texts, drawn: Sequence[Setting]) -> list[FloatArray]:
    """Return `Sample.fixed`."""
    steps = np.minimum(tries.accepted.astype(np.int64) + 1, texts.left[:, None])
    rounds = np.stack([rounds_at(texts, each) for each in steps.T], axis=1)
    pair, of_turn = (frame["pair"].to_numpy() for frame in (tries.states, texts.turns))
    totals = []
    for setting in drawn:
        mine, first = np.flatnonzero(pair == setting.pair), texts.first[of_turn == setting.pair]
        ms = outcomes(tries.take(mine), setting.profile).ms
        each = np.stack([np.ones_like(ms), steps[mine], ms]) * rounds[mine]
        totals.append(np.add.reduceat(each, first - mine[0], axis=1))
    return totals


def draw_sample(tries: Tries, conf: DictConfig, seed: int) -> Sample:
    """Draw at most ``select.states`` states of whole prompts and a machine for each turn."""
    rng = np.random.default_rng(seed)
    some = tries.take(some_states(prompt_keys(tries), int(conf.select.states), rng))
    texts, drawn = texts_of(some), settings(some, conf.hardware, seed)
    number = turn_settings(some, texts, drawn, float(conf.hardware.logged_share), rng)
    found = outcomes_in(some, drawn, number)
    names, prompt = np.unique(prompt_keys(some).astype(str), return_inverse=True)
    return Sample(
        some,
        texts,
        drawn,
        number,
        found,
        scheduler_inputs(some, SIGNALS, found.target_ms, found.mid_ms),
        prompt,
        [str(name) for name in names],
        fixed_totals(some, texts, drawn),
    )


def chosen_group(tries: Tries, conf: DictConfig) -> str:
    """Return what may not be on both sides of a split; ``auto`` is task if there are enough."""
    group = str(conf.select.group)
    if group == "auto":
        return "task" if tries.states["task"].nunique() >= int(conf.select.folds) else "prompt"
    return group


def fold_numbers(tries: Tries, group: str, folds: int, seed: int) -> IntArray:
    """Return each state's fold, shape ``[S]``: whole groups, shuffled."""
    keys = group_keys(tries, group)
    groups = len(set(keys))
    if folds < 2:
        raise InputError(f"select.folds={folds}: give 2 or more")
    if groups < folds:
        raise InputError(
            f"select.group={group}: the trajectories hold {groups}, fewer than "
            f"select.folds={folds}; give select.group=prompt, fewer folds, more select.states, or "
            "collect more"
        )
    number = np.zeros(len(keys), dtype=np.int64)
    splits = GroupKFold(folds, shuffle=True, random_state=seed).split(keys, groups=keys)
    for fold, (_, test) in enumerate(splits):
        number[test] = fold
    return number


def products(u: SingleArray, y: SingleArray) -> SingleArray:
    """Return the sums of u_i u_j y over rows, i ≤ j: ``[n, q]``, ``[m, n]`` → ``[m, p]``."""
    first, second = np.triu_indices(u.shape[1])
    return np.stack([(u.T @ (u * each[:, None]))[first, second] for each in y])


def predict(u: SingleArray, w: SingleArray) -> SingleArray:
    """Return Σ w_ij u_i u_j, i ≤ j: ``[n, q]``, ``[m, p]`` → ``[m, n]``."""
    first, second = np.triu_indices(u.shape[1])
    square = np.zeros((len(w), u.shape[1], u.shape[1]), u.dtype)
    square[:, first, second] = w
    return np.stack([np.einsum("ij,ij->i", u @ each, u) for each in square])


@dataclass(frozen=True)
class Step:
    """The prefixes before one step.

    The design has the p products u_i u_j, i ≤ j; as u_0 = 1, linear terms and an intercept too.

    Attributes
    ----------
    u : float32 array, shape ``[n, q]``
        Ones, context with T_mid / T_tgt for T_mid, the ten signals: standardised, clipped at
        `CLIP` standard deviations. A row is a state and one of its prefixes.
    rows : float64 array, shape ``[folds]``
        Weight of the rows that each fold's policy is fitted on.
    xx : float64 array, shape ``[2, folds, p, p]``
        Weighted sums of products of the design: of all folds but each one, and of that one.
    xy, yy : float64 array, shape ``[2, folds, p, 4]`` and ``[2, folds, 4]``
        With tokens after a small and a mid step, t / T_tgt after either: means over futures, less
        the mean of all rows.
    """

    u: SingleArray
    rows: FloatArray
    xx: FloatArray
    xy: FloatArray
    yy: FloatArray

    def kept(self, signals: Iterable[str]) -> IntArray:
        """Return the columns of u that a set of signals reads."""
        base = self.u.shape[1] - len(SIGNALS)
        return np.array([*range(base), *(base + SIGNALS.index(name) for name in signals)])

    def solve(self, kept: IntArray, gain_xy: SingleArray) -> tuple[FloatArray, FloatArray]:
        """Fit on all folds but each one.

        Parameters
        ----------
        kept : int64 array
            Columns of u, ascending.
        gain_xy : float32 array, shape ``[folds, p']``
            Weighted sums of products of their design with the gain, over all folds but each one.

        Returns
        -------
        w : float64 array, shape ``[folds, p']``
            Weights for the gain.
        squared : float64 array, shape ``[folds, 4]``
            Squared errors of tokens and t / T_tgt in the fold itself.
        """
        block = design_block(self.u.shape[1], kept)
        xx, xy = self.xx[..., block[:, None], block], self.xy[:, :, block]
        gains, squared = np.zeros(gain_xy.shape), np.zeros(self.yy[1].shape)
        for f, rows in enumerate(self.rows):
            penalty = np.full(len(block), RIDGE * rows)
            penalty[0] = 0.0  # the intercept
            given = np.hstack([gain_xy[f][:, None], xy[0, f]])
            w = np.linalg.solve(xx[0, f] + np.diag(penalty), given)
            gains[f], w = w[:, 0], w[:, 1:]
            errors = self.yy[1, f] - 2 * (w * xy[1, f]).sum(0)
            squared[f] = errors + (w * (xx[1, f] @ w)).sum(0)
        return gains, squared


def design_block(q: int, kept: IntArray) -> IntArray:
    """Return the products of q columns that those of ``kept`` make, in order."""
    first, second = np.triu_indices(q)
    return np.flatnonzero(np.isin(first, kept) & np.isin(second, kept))


def design_inputs(sample: Sample, k: int) -> SingleArray:
    """Return `Step.u` before step ``k``."""
    depth = sample.tries.depth
    z = sample.z[:, prefix_steps(depth) == k].reshape(-1, sample.z.shape[2]).copy()
    names = [*context_names(depth), *SIGNALS]
    z[:, names.index("mid_ms")] /= z[:, names.index("target_ms")]  # a gain's unit is a round
    # calls_fraction is the sum of the bits
    varies = (z.max(0) > z.min(0)) & (np.array(names) != "calls_fraction")
    z = z[:, varies | np.isin(names, SIGNALS)]
    mean, std = column_stats(z)
    u = np.ones((len(z), z.shape[1] + 1), np.float32)
    u[:, 1:] = np.clip((z - mean) / std, -CLIP, CLIP)
    return u


def make_step(sample: Sample, k: int, fold: IntArray, weight: FloatArray) -> Step:
    """Standardise the inputs before step ``k`` and sum their products.

    Parameters
    ----------
    sample : Sample
        The states.
    k : int
        From 1.
    fold : int64 array, shape ``[S]``
        Each state's fold.
    weight : float64 array, shape ``[folds, S]``
        What it weighs for each fold's policy.
    """
    depth, prefixes, folds = sample.tries.depth, 1 << (k - 1), len(weight)
    u, found = design_inputs(sample, k), sample.found
    shape = (len(fold), prefixes, 2, 1 << (depth - k))  # [S, prefixes, action, futures]
    outcome = (found.tokens("committed"), found.ms / found.target_ms[:, None])
    y = np.concatenate([v.reshape(shape).mean(3).reshape(-1, 2) for v in outcome], axis=1)
    of_row, row_fold = np.repeat(weight, prefixes, axis=1), np.repeat(fold, prefixes)
    y = y - np.average(y, 0, of_row[row_fold, np.arange(len(y))])
    first, second = np.triu_indices(u.shape[1])
    xx = np.zeros((2, folds, len(first), len(first)))
    xy, yy = np.zeros((2, folds, len(first), 4)), np.zeros((2, folds, 4))
    for g in range(folds):
        members = np.flatnonzero(row_fold == g)
        for part in np.split(members, range(CHUNK, len(members), CHUNK)):
            x = u[part][:, first] * u[part][:, second]
            for f in range(folds):
                root = np.sqrt(of_row[f, part])[:, None]
                own, x_root, y_root = int(f == g), x * root.astype(np.float32), y[part] * root
                xx[own, f] += x_root.T @ x_root
                xy[own, f] += x_root.T @ y_root
                yy[own, f] += (y_root**2).sum(0)
    rows = prefixes * (weight * (fold != np.arange(folds)[:, None])).sum(1)
    return Step(u, rows, xx, xy, yy)


@dataclass(frozen=True)
class Judged:
    """What a set of signals is worth, out of fold.

    Attributes
    ----------
    leaf : int64 array, shape ``[S]``
        The schedule that the induced policy follows at each state.
    squared : float64 array, shape ``[folds, 2]``
        Squared errors of tokens and of t / T_tgt, weighted.
    wrong : float64 array, shape ``[folds]``
        Hindsight's advantage, weighted, summed where the policy decides against its sign.
    weights : list of float64 array, shape ``[folds, p']``
        The policy, by step.
    """

    leaf: IntArray
    squared: FloatArray
    wrong: FloatArray
    weights: Sequence[FloatArray]


class Judge:
    """Judges sets of signals on one sample, split into folds.

    Parameters
    ----------
    sample : Sample
        States and machines.
    fold : int64 array, shape ``[S]``
        Each state's fold.
    """

    def __init__(self, sample: Sample, fold: IntArray):
        self.sample, self.fold, self.folds = sample, fold, int(fold.max()) + 1
        self.depth = sample.tries.depth
        totals = sample.totals(fold, self.folds)
        self._normalise(totals.sum(2))
        others = fold != np.arange(self.folds)[:, None]
        each = [self._worth(totals, f) for f in range(self.folds)]
        weight = np.stack([one.weight for one in each])
        self.gain = np.stack([one.gain for one in each]).astype(np.float32)
        self.fitted = (weight * others).astype(np.float32)
        own = fold, np.arange(len(fold))
        shape = (len(fold), self.depth, 1 << self.depth)
        gain = np.broadcast_to(self.gain[own][:, None].astype(np.float64), shape)
        self.hindsight = weight[own][:, None] * advantage(gain)
        self.steps = [make_step(sample, k, fold, weight) for k in range(1, self.depth + 1)]
        self.variance = sum(step.yy[1].sum(0) for step in self.steps).reshape(2, 2).sum(1)
        self.last_xy = products(self.steps[-1].u, self._differences(self.gain))
        self._judged: dict[tuple[str, ...], Judged] = {}

    def _normalise(self, totals: FloatArray) -> None:
        """Find the better endpoint on each machine: its rate is the unit of time."""
        number = self.sample.number
        ends = np.array([0, totals.shape[2] - 1])
        rates = (totals[1] / totals[2])[:, ends]
        self.rate, self.end = rates.max(1)[number], ends[rates.argmax(1)][number]
        self.due = self._time(self.end, 0)

    def _worth(self, totals: FloatArray, fold: int) -> Worth:
        """Return what schedules are worth if the best fixed one of all folds but one goes on."""
        sample, number = self.sample, self.sample.number
        some = totals[:, :, np.arange(self.folds) != fold].sum(2)
        bare = some[0, :, 0] == 0  # all states of the pair are in this fold
        some[:, bare] = totals[:, bare].sum(2)
        rounds, tokens, ms = some
        best = (tokens / ms).argmax(1)
        at = np.arange(len(best)), best
        rate, length = (tokens / ms)[at], (tokens / rounds)[at]
        leaf = best[number]
        return worth(sample.texts, sample.found, leaf, rate[number], length[number], self.depth)

    def _time(self, leaf: IntArray, decisions: int) -> FloatArray:
        """Return the time of the rounds at each state if schedules ``leaf`` decode, ``[S]``.

        In tokens at the rate of the better endpoint on the state's machine.
        """
        found, texts, states = self.sample.found, self.sample.texts, np.arange(len(leaf))
        steps = np.minimum(found.accepted[states, leaf] + 1, texts.left)
        spent = found.ms[states, leaf] + decisions * found.decision_ms
        return rounds_at(texts, steps) * self.rate * spent

    def _differences(self, value: SingleArray) -> SingleArray:
        """Return what a mid step gains by weight, ``[folds, rows]``; 0 in the fold left out."""
        value = value.reshape(self.folds, len(self.fold), -1, 2)
        gained: SingleArray = (value[..., 1] - value[..., 0]) * self.fitted[:, :, None]
        return gained.reshape(self.folds, -1)

    def judge(self, signals: Iterable[str]) -> Judged:
        """Fit the policy of a set of signals and let it decide out of fold; remembered."""
        key = table_order(signals)
        if key not in self._judged:
            self._judged[key] = self._induce(key)
        return self._judged[key]

    def _induce(self, signals: tuple[str, ...]) -> Judged:
        """Fit the policy backward; design of the steps as in `Step`."""
        value, decisions, weights = self.gain, [], []
        squared = np.zeros((self.folds, 4))
        for step in reversed(self.steps):
            kept = step.kept(signals)
            u = step.u[:, kept]
            if step is self.steps[-1]:
                gain_xy = self.last_xy[:, design_block(step.u.shape[1], kept)]
            else:
                gain_xy = products(u, self._differences(value))
            w, errors = step.solve(kept, gain_xy)
            calls = predict(u, w.astype(np.float32)).reshape(self.folds, len(self.fold), -1) > 0
            value = value.reshape(*calls.shape, 2)
            value = np.where(calls, value[..., 1], value[..., 0])
            decisions.append(calls[self.fold, np.arange(len(self.fold))])
            weights.append(w)
            squared += errors
        decided = decisions[::-1]
        against = np.abs(self.hindsight) * (np.hstack(decided) != (self.hindsight > 0))
        wrong = np.zeros(self.folds)
        np.add.at(wrong, self.fold, against.sum(1))
        squared = squared.reshape(self.folds, 2, 2).sum(2)
        return Judged(walk(decided), squared, wrong, weights[::-1])

    def spliced(self, sets: Sequence[Iterable[str]]) -> Judged:
        """Return what another set of signals for each fold is worth."""
        each = [self.judge(signals) for signals in sets]
        leaf = np.stack([judged.leaf for judged in each])[self.fold, np.arange(len(self.fold))]
        squared = np.stack([judged.squared[f] for f, judged in enumerate(each)])
        wrong = np.array([judged.wrong[f] for f, judged in enumerate(each)])
        return Judged(leaf, squared, wrong, ())

    def times(self, leaf: IntArray) -> FloatArray:
        """Return the time at each state of the better endpoint and of a policy, ``[2, S]``.

        Over the states of a text, or of a prompt, both sum to what decoding it takes: in tokens at
        the endpoint's rate on the state's machine, so that machines weigh alike.
        """
        return np.stack([self.due, self._time(leaf, self.depth)])

    def permuted(self, signal: str, rng: np.random.Generator) -> IntArray:
        """Return the schedules that all ten induce if ``signal`` is another state's, same fold."""
        source = np.arange(len(self.fold))
        for f in range(self.folds):
            members = np.flatnonzero(self.fold == f)
            source[members] = rng.permutation(members)
        decided = []
        for step, w in zip(self.steps, self.judge(SIGNALS).weights, strict=True):
            u = step.u.reshape(len(source), -1, step.u.shape[1]).copy()
            column = step.kept([signal])[-1]
            u[..., column] = u[source, :, column]
            calls = np.zeros(u.shape[:2], bool)
            for f in range(self.folds):
                mine = self.fold == f
                rows = u[mine].reshape(-1, u.shape[2])
                margin = predict(rows, w[f : f + 1].astype(np.float32))
                calls[mine] = margin.reshape(mine.sum(), -1) > 0
            decided.append(calls)
        return walk(decided)


def positive(values: FloatArray) -> FloatArray:
    """Return ``values``, with 1 for 0: a unit of measure."""
    return np.where(values > 0, values, 1.0)


def walk(decided: Sequence[NDArray[np.bool_]]) -> IntArray:
    """Return the schedule that decisions ``[S, 2^(k−1)]`` of the steps lead to, shape ``[S]``."""
    states = np.arange(len(decided[0]))
    leaf = np.zeros(len(states), np.int64)
    for calls in decided:
        leaf = 2 * leaf + calls[states, leaf]
    return leaf


def eta_ratio(times: FloatArray) -> float:
    """Return η of the policy over that of the better endpoint, from sums of `Judge.times`."""
    return float(times[0] / times[1])


def scored(
    judges: Sequence[Judge], leaves: Sequence[IntArray], without: int | None = None
) -> float:
    """Return `eta_ratio` over the texts of all judges, without those of one fold."""
    times = np.zeros(2)
    for judge, leaf in zip(judges, leaves, strict=True):
        times += judge.times(leaf)[:, judge.fold != without].sum(1)
    return eta_ratio(times)


def forward(judges: Sequence[Judge], count: int, without: int | None = None) -> tuple[str, ...]:
    """Choose ``count`` signals, each time the one that takes η highest; ties by the table.

    Parameters
    ----------
    judges : sequence of Judge
        Their states count together.
    count : int
        How many.
    without : int, optional
        A fold that does not count.

    Returns
    -------
    tuple of str
        In the order in which they were chosen.
    """
    chosen: tuple[str, ...] = ()
    while len(chosen) < count:
        left = [name for name in SIGNALS if name not in chosen]
        etas = [
            scored(judges, [judge.judge((*chosen, name)).leaf for judge in judges], without)
            for name in left
        ]
        chosen = (*chosen, left[int(np.argmax(etas))])
    return chosen


def figures(judges: Sequence[Judge], judged: Sequence[Judged]) -> dict[str, float]:
    """Return η ratio, R² of tokens and t, and label error of one set, over all judges."""
    squared = np.sum([each.squared.sum(0) for each in judged], axis=0)
    variance = np.sum([judge.variance for judge in judges], axis=0)
    total = sum(float(np.abs(judge.hindsight).sum()) for judge in judges)
    tokens, time = 1.0 - squared / positive(variance)
    return {
        "eta_ratio": scored(judges, [each.leaf for each in judged]),
        "r2_tokens": float(tokens),
        "r2_time": float(time),
        "label_error": sum(float(each.wrong.sum()) for each in judged) / max(total, 1e-12),
    }


def order_rows(judges: Sequence[Judge], order: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for no signal, and one for each that was added."""
    rows = []
    for place, label in enumerate(("(none)", *order)):
        judged = [judge.judge(order[:place]) for judge in judges]
        rows.append({"order": str(place), "signal": label, **figures(judges, judged)})
    return rows


def comparison(
    judges: Sequence[Judge], chosen: Sequence[str], without: Sequence[Sequence[Sequence[str]]]
) -> list[dict[str, Any]]:
    """Compare sets of signals on the same states, machines and folds.

    Parameters
    ----------
    judges : sequence of Judge
        One a seed.
    chosen : sequence of str
        The set that was chosen.
    without : sequence of sequence
        For each seed and fold, the set chosen without that fold.

    Returns
    -------
    list of dict
        `figures` and the spread of η over seeds; η less that of the paper's six, with a 95 %
        interval over prompts, the fitted policies given.
    """
    sets: dict[str, list[Judged]] = {
        name: [judge.judge(signals) for judge in judges]
        for name, signals in (("no signal", ()), (PAPER, PAPER_SIGNALS), ("chosen", chosen))
    }
    sets[NESTED] = [judge.spliced(s) for judge, s in zip(judges, without, strict=True)]
    sets[f"all {len(SIGNALS)}"] = [judge.judge(SIGNALS) for judge in judges]
    names = sorted({name for judge in judges for name in judge.sample.prompts})
    draws = np.random.default_rng(0).multinomial(
        len(names), np.full(len(names), 1 / len(names)), DRAWS
    )
    paper = prompt_times(judges, sets[PAPER], names)
    rows = []
    for name, judged in sets.items():
        each = [scored([j], [one.leaf]) for j, one in zip(judges, judged, strict=True)]
        mine = prompt_times(judges, judged, names)
        ahead = [eta_ratio(mine @ w) - eta_ratio(paper @ w) for w in (np.ones(len(names)), *draws)]
        low, high = np.percentile(ahead[1:], [2.5, 97.5])
        against = {"ahead_of_paper": ahead[0], "low": float(low), "high": float(high)}
        spread = {"seeds_std": float(np.std(each))}
        rows.append({"signals": name, **figures(judges, judged), **spread, **against})
    return rows


def prompt_times(
    judges: Sequence[Judge], judged: Sequence[Judged], names: Sequence[str]
) -> FloatArray:
    """Return `Judge.times` summed over all judges by prompt, ``[2, prompts]``."""
    sums = np.zeros((2, len(names)))
    for judge, one in zip(judges, judged, strict=True):
        at = np.searchsorted(names, judge.sample.prompts)[judge.sample.prompt]
        for total, each in zip(sums, judge.times(one.leaf), strict=True):
            total += np.bincount(at, each, len(names))
    return sums


def importance(judges: Sequence[Judge], seed: int) -> dict[str, dict[str, float]]:
    """Return by how much η ratio of all ten falls if one signal is permuted, mean and spread."""
    rng = np.random.default_rng(seed)
    full = scored(judges, [judge.judge(SIGNALS).leaf for judge in judges])
    found = {}
    for name in SIGNALS:
        drops = [
            full - scored(judges, [judge.permuted(name, rng) for judge in judges])
            for _ in range(SHUFFLES)
        ]
        found[name] = {"mean": float(np.mean(drops)), "std": float(np.std(drops))}
    return found


def stability(
    selections: Mapping[str, Sequence[Sequence[Sequence[str]]]], count: int
) -> list[dict[str, Any]]:
    """Count how often each signal is chosen.

    Parameters
    ----------
    selections : mapping
        For each kind of group, seed and fold left out, the signals in the order of choice.
    count : int
        How many are chosen.

    Returns
    -------
    list of dict
        For each signal: share of the selections by each kind of group, and the mean place in
        all; one that is not chosen has the place after the last.
    """
    flat = {group: [one for each in seeds for one in each] for group, seeds in selections.items()}
    rows = []
    for name in SIGNALS:
        shares = {group: float(np.mean([name in one for one in of])) for group, of in flat.items()}
        every = [one for of in flat.values() for one in of]
        places = [one.index(name) + 1 if name in one else count + 1 for one in every]
        rows.append({"signal": name, **shares, "mean_place": float(np.mean(places))})
    return rows


def correlation(sample: Sample) -> FloatArray:
    """Return Spearman's correlations of the signals over states and prefixes, ``[10, 10]``.

    0 beside the diagonal for a signal that never varies.
    """
    frame = pd.DataFrame(sample.tries.signals.reshape(-1, len(SIGNALS)), columns=list(SIGNALS))
    ranks = frame.rank().to_numpy()
    mean, std = column_stats(ranks)
    scaled = (ranks - mean) / std
    found: FloatArray = scaled.T @ scaled / len(scaled)
    np.fill_diagonal(found, 1.0)
    return found


def seeds_of(conf: DictConfig) -> list[int]:
    """Return the seeds of the repetitions, from ``seed``."""
    count = int(conf.select.seeds)
    if count < 1:
        raise InputError(f"select.seeds={count}: give 1 or more")
    return [
        int(np.random.SeedSequence([int(conf.seed), i]).generate_state(1)[0]) for i in range(count)
    ]


def check(tries: Tries, conf: DictConfig) -> str:
    """Check the choices of ``select``; return the kind of group."""
    count, states = int(conf.select.signals), int(conf.select.states)
    if not 1 <= count <= len(SIGNALS):
        raise InputError(f"select.signals={count}: choose 1 to {len(SIGNALS)}")
    if states < 0:
        raise InputError(f"select.states={states}: give 0 for all, or how many")
    group = chosen_group(tries, conf)
    for seed in seeds_of(conf):
        rng = np.random.default_rng(seed)
        some = tries.take(some_states(prompt_keys(tries), states, rng))
        fold_numbers(some, group, int(conf.select.folds), seed)
    return group


def make_judges(
    samples: Sequence[Sample], group: str, folds: int, seeds: Sequence[int]
) -> list[Judge]:
    """Return a judge for each seed, split by ``group``; none if there are too few groups."""
    if any(len(set(group_keys(sample.tries, group))) < folds for sample in samples):
        return []
    return [
        Judge(sample, fold_numbers(sample.tries, group, folds, seed))
        for sample, seed in zip(samples, seeds, strict=True)
    ]


def nested(judges: Sequence[Judge], count: int, group: str) -> list[list[tuple[str, ...]]]:
    """Return what each seed chooses alone without each fold, in the order of choice.

    The fold does not count when sets are compared; policies that decide in other folds are fitted
    on it as always.
    """
    each = [(judge, f) for judge in judges for f in range(judge.folds)]
    found = [forward([judge], count, f) for judge, f in tqdm(each, desc=f"select by {group}")]
    folds = judges[0].folds
    return [found[at : at + folds] for at in range(0, len(found), folds)]


@dataclass(frozen=True)
class Study:
    """All that ``selection.json`` and the picture are made of.

    Attributes
    ----------
    order : tuple of str
        The chosen signals in the order of choice.
    steps, compared, stable : list of dict
        `order_rows`, `comparison`, `stability`.
    drops : dict
        `importance`.
    samples : list of Sample
        One a seed.
    """

    order: tuple[str, ...]
    steps: list[dict[str, Any]]
    compared: list[dict[str, Any]]
    stable: list[dict[str, Any]]
    drops: dict[str, dict[str, float]]
    samples: Sequence[Sample]


def study(tries: Tries, conf: DictConfig, group: str) -> Study:
    """Choose on all seeds together, and look at the choice from all sides."""
    seeds, folds, count = seeds_of(conf), int(conf.select.folds), int(conf.select.signals)
    samples = [draw_sample(tries, conf, seed) for seed in seeds]
    judges = make_judges(samples, group, folds, seeds)
    selections = {group: nested(judges, count, group)}
    order = forward(judges, count)
    steps = order_rows(judges, order)
    compared = comparison(judges, order, selections[group])
    drops = importance(judges, int(conf.seed))
    for other in (kind for kind in GROUPS if kind != group):
        if judges := make_judges(samples, other, folds, seeds):
            selections[other] = nested(judges, count, other)
    return Study(order, steps, compared, stability(selections, count), drops, samples)


def selection(found: Study, tries: Tries, conf: DictConfig, group: str) -> dict[str, Any]:
    """Return the content of ``selection.json``."""
    cv = {
        "group": group,
        "groups": len(set(group_keys(tries, group))),
        "folds": int(conf.select.folds),
        "seeds": len(found.samples),
        "states": [len(sample.tries) for sample in found.samples],
        "rows": sum(sample.tries.rows for sample in found.samples),
        "score": "eta_ratio: η of the induced policy, replayed, over that of the better endpoint",
        "texts_whole": all(sample.texts.whole for sample in found.samples),
        "regressor": f"ridge {RIDGE} on pairwise terms, by step, backward",
        "order": found.steps,
        "eta_ratio": found.steps[-1]["eta_ratio"],
    }
    return {
        "signals": list(table_order(found.order)),
        "pairs": list(tries.pairs),
        "cv": cv,
        "comparison": found.compared,
        "stability": found.stable,
        "importance": found.drops,
    }


def run(conf: DictConfig) -> None:
    """Choose the signals; write ``selection.json`` and a picture to ``paths.selection``."""
    tries = load_tries(conf)
    group = check(tries, conf)
    folder = Path(conf.paths.selection)
    with stage_run(conf, "select", folder) as stage:
        note(tries, conf, stage)
        found = study(tries, conf, group)
        chosen = selection(found, tries, conf, group)
        related = correlation(found.samples[0])
        stage.show("Forward selection, out of fold; η over the better endpoint's", found.steps)
        stage.show("Sets of signals on the same states, machines and folds", found.compared)
        stage.show(
            "Signals: share of the selections that choose it, by group; η that goes if permuted",
            [{**row, "importance": found.drops[row["signal"]]["mean"]} for row in found.stable],
        )
        write_json(folder / "selection.json", chosen)
        stage.wrote(folder / "selection.json", ", ".join(chosen["signals"]))
        plot_selection(folder / "selection.png", chosen, related)
        stage.picture("selection", folder / "selection.png")
        shown = ("group", "groups", "folds", "seeds", "rows", "texts_whole", "eta_ratio")
        stage.metrics.update({name: chosen["cv"][name] for name in shown})
        most = max(chosen["cv"]["states"])
        stage.metrics["states"] = f"{most:,} of {len(tries):,} for each seed (select.states)"
        stage.metrics |= {
            f"eta_ratio, {row['signals']}": row["eta_ratio"] for row in found.compared
        }
        stage.metrics["shared_with_paper"] = len(set(chosen["signals"]) & set(PAPER_SIGNALS))
        stage.metrics["correlation"] = dict(zip(SIGNALS, related.tolist(), strict=True))
