"""Exact replay of policies on enumerated states: no model, no approximation but the clock.

Every state has its 2^D outcomes, so a policy is replayed by walking the trie by its decisions,
taking that leaf's A and t, and jumping A + 1 tokens on (design section 5). All texts advance
together. Where a text's states were sampled there is no next state to jump to: then every state
counts once, as one round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pipeline.features import scheduler_inputs
from pipeline.hardware import Outcomes
from pipeline.planning import OnlinePlanner
from pipeline.rows import state_id
from pipeline.texts import Text
from pipeline.tries import NEVER, Tries, prefix_bits, prefix_steps, schedules
from treegraft_core import LatencyProfile, SchedulerArtifact
from treegraft_core.enumeration import Enumeration
from treegraft_core.latency import PASS_COLUMNS
from treegraft_core.tree import FloatArray, IntArray

BLOCK_STATES = 512
RATE_ROUNDS = 3
TEXT = ["pair", "task", "prompt_id", "turn"]
BoolArray = NDArray[np.bool_]


# Enumerated texts as tries ------------------------------------------------------------------


def tries_of(pair: str, text: Text, found: Enumeration, profile: LatencyProfile) -> Tries:
    """Return the outcomes at each of ``text.roots()`` as `read_tries` reads them from disk.

    Parameters
    ----------
    pair : str
        The pair's name.
    text : Text
        One turn.
    found : Enumeration
        Its outcomes.
    profile : LatencyProfile
        Gives the times.
    """
    context = np.array(text.roots()) + 1
    depth = found.bits.shape[1]
    steps = prefix_steps(depth)
    # The first schedule through each prefix, with a small step and with a mid step.
    left = depth - steps
    code = np.arange(len(steps)) - ((1 << (steps - 1)) - 1)
    small, mid = code << (left + 1), (2 * code + 1) << left
    _, draft_ms, verify_ms = profile.times(found, context)
    position = context - text.prompt_tokens
    states = pd.DataFrame(
        {
            "pair": pair,
            "task": text.task,
            "prompt_id": text.prompt_id,
            "state_id": [state_id(text, int(at)) for at in position],
            "turn": text.turn,
            "position": position,
            "prompt_tokens": text.prompt_tokens,
            "context_tokens": context,
            "target_ms": profile.target_ms,
            "mid_ms": profile.mid_ms,
        }
    )
    return Tries(
        depth,
        states,
        signals=found.signals[:, small, steps - 1],
        counts=found.counts[:, mid, steps - 1][..., PASS_COLUMNS].astype(np.int32),
        accepted=found.accepted.astype(np.int16),
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        kept=found.kept_nodes.astype(np.int16),
        ranks=np.where(found.ranks >= 0, found.ranks, NEVER).astype(np.int16),
    )


@dataclass(frozen=True)
class Texts:
    """The turns that states are of, and how a replay goes through them.

    Attributes
    ----------
    turns : DataFrame, T rows
        ``pair``, ``task``, ``prompt_id``, ``turn``.
    first, length : int64 array, shape ``[T]``
        Number of each turn's first state, and how many it has.
    left : int64 array, shape ``[S]``
        Most tokens that a round may commit before the answer ends; without a limit if not whole.
    whole : bool
        Every position of every turn is there, so that texts are walked; else every state counts
        once.
    """

    turns: pd.DataFrame
    first: IntArray
    length: IntArray
    left: IntArray
    whole: bool

    @property
    def groups(self) -> NDArray[np.str_]:
        """The prompt of each turn, shape ``[T]``."""
        keys = self.turns["task"] + "\n" + self.turns["prompt_id"]
        return keys.to_numpy().astype(str)

    @property
    def tasks(self) -> NDArray[np.str_]:
        """The task of each turn, shape ``[T]``."""
        return self.turns["task"].to_numpy().astype(str)

    def visited(self, tokens: IntArray) -> BoolArray:
        """Return the states that rounds start at, ``[S]``, if they commit ``tokens`` (``[S]``)."""
        if not self.whole:
            return np.ones(len(tokens), bool)
        seen = np.zeros(len(tokens), bool)
        at, end = self.first, self.first + self.length
        while len(at):
            seen[at] = True
            at = at + tokens[at]
            inside = at < end
            at, end = at[inside], end[inside]
        return seen


def texts_of(tries: Tries) -> Texts:
    """Return the turns of states that are in the order of `Tries`."""
    keys = tries.states[TEXT]
    starts = (keys != keys.shift()).any(axis=1).to_numpy()
    first = np.flatnonzero(starts)
    length = np.diff(np.append(first, len(tries)))
    offset = np.arange(len(tries)) - np.repeat(first, length)
    # A turn's first token is the first root.
    whole = bool((tries.states["position"].to_numpy() == offset + 1).all())
    left = np.repeat(length, length) - offset if whole else np.full(len(tries), NEVER)
    return Texts(keys.iloc[first].reset_index(drop=True), first, length, left, whole)


# Decisions ----------------------------------------------------------------------------------


def follow(wanted: BoolArray, depth: int) -> IntArray:
    """Return the number of the schedule that decisions lead to at each state, ``[S]``.

    Parameters
    ----------
    wanted : bool array, shape ``[S, 2^D − 1]``
        Whether to call the mid drafter at each prefix.
    depth : int
        D.
    """
    states = np.arange(len(wanted))
    code = np.zeros(len(wanted), np.int64)
    for step in range(depth):
        code = 2 * code + wanted[states, (1 << step) - 1 + code]
    return code


def scheduler_decisions(
    artifact: SchedulerArtifact, tries: Tries, found: Outcomes, max_calls: int | None = None
) -> BoolArray:
    """Return where the scheduler calls the mid drafter, at every prefix: ``[S, 2^D − 1]``.

    It reads T_tgt and T_mid of ``found``. With ``max_calls`` it may call so often in a round.
    """
    wanted = np.empty(tries.signals.shape[:2], bool)
    for at in _blocks(len(tries)):
        z = scheduler_inputs(
            tries.take(at), artifact.selected_signals, found.target_ms[at], found.mid_ms[at]
        )
        wanted[at] = artifact.margins(z.reshape(-1, z.shape[-1])).reshape(z.shape[:2]) > 0
    return wanted if max_calls is None else at_most(wanted, tries.depth, max_calls)


def at_most(wanted: BoolArray, depth: int, max_calls: int) -> BoolArray:
    """Return the decisions ``[S, 2^D − 1]`` with so many mid calls a round at most."""
    allowed: BoolArray = prefix_bits(depth).sum(1) < max_calls
    return wanted & allowed


def planned_decisions(planner: OnlinePlanner, tries: Tries, found: Outcomes) -> BoolArray:
    """Return where online planning calls the mid drafter, at every prefix: ``[S, 2^D − 1]``."""
    wanted = np.empty(tries.signals.shape[:2], bool)
    for at, tokens, ms in _estimates(planner, tries, found):
        wanted[at] = planner.wanted(tokens, ms)
    return wanted


def gain_decisions(
    planner: OnlinePlanner, tries: Tries, found: Outcomes, texts: Texts
) -> BoolArray:
    """Return where online planning by gain calls the mid drafter: ``[S, 2^D − 1]``.

    λ is its own long-run rate in this replay (Dinkelbach's iteration, from the better endpoint's),
    without the time of its decisions, so that what it decides does not depend on the clock.
    """
    shape = (len(tries), tries.depth, 1 << tries.depth)
    tokens, ms = np.empty(shape), np.empty(shape)
    for at, *made in _estimates(planner, tries, found):
        tokens[at], ms[at] = made
    ends = (0, (1 << tries.depth) - 1)
    runs = [replay(texts, found, np.full(len(tries), n)) for n in ends]
    rate = max(run.rate(planner.numerator) for run in runs)
    for _ in range(RATE_ROUNDS):
        wanted = replace(planner, rate=rate).wanted(tokens, ms)
        rate = replay(texts, found, follow(wanted, tries.depth)).rate(planner.numerator)
    return wanted


def _estimates(
    planner: OnlinePlanner, tries: Tries, found: Outcomes
) -> Iterator[tuple[IntArray, FloatArray, FloatArray]]:
    for at in _blocks(len(tries)):
        z = scheduler_inputs(
            tries.take(at), planner.model.signals, found.target_ms[at], found.mid_ms[at]
        )
        yield at, *planner.model.outcomes(z)


def _blocks(count: int) -> Iterator[IntArray]:
    for low in range(0, count, BLOCK_STATES):
        yield np.arange(low, min(low + BLOCK_STATES, count))


def rate_oracle(found: Outcomes, depth: int, max_calls: int | None = None) -> IntArray:
    """Return the schedule with the most committed tokens per time at each state, ``[S]``.

    With ``max_calls``, of the schedules with so many mid calls at most. It is no bound: rounds of
    a high rate may be short, and what comes after them counts for more, so that over a text it can
    be slower than a fixed schedule. `gain_oracle` is the bound.
    """
    most = depth if max_calls is None else max_calls
    rate = (found.accepted + 1) / found.ms
    leaf: IntArray = np.where(schedules(depth).sum(1) <= most, rate, 0.0).argmax(1)
    return leaf


def gain_oracle(texts: Texts, found: Outcomes) -> IntArray:
    """Return the schedules of the highest throughput that any policy can have, ``[S]``.

    It maximises Σ tokens − λ t at its own long-run λ. A text that is walked has a given number of
    tokens, so that is the least time from its first state to its end, by dynamic programming.
    Where every state counts once, each takes the schedule of the highest gain at λ, which comes
    from Dinkelbach's iteration.
    """
    if texts.whole:
        return _fastest_walk(texts, found)
    tokens, ms, state = found.tokens("committed"), found.ms, np.arange(len(found.ms))
    leaf = np.full(len(ms), (tokens.sum(0) / ms.sum(0)).argmax())
    while True:
        rate = tokens[state, leaf].sum() / ms[state, leaf].sum()
        better = (tokens - rate * ms).argmax(1)
        if tokens[state, better].sum() / ms[state, better].sum() <= rate:
            return leaf
        leaf = better


def _fastest_walk(texts: Texts, found: Outcomes) -> IntArray:
    ms = found.ms
    steps = np.minimum(found.accepted + 1, texts.left[:, None])
    # Time from each state to the end of its text; each text has one place more, its end.
    to_end = np.zeros(len(ms) + len(texts.first))
    chosen = np.zeros(len(ms), np.int64)
    number = np.arange(len(texts.first))
    for offset in range(int(texts.length.max()) - 1, -1, -1):
        live = number[texts.length > offset]
        at = texts.first[live] + offset
        total = ms[at] + to_end[(at + live)[:, None] + steps[at]]
        chosen[at] = total.argmin(1)
        to_end[at + live] = total.min(1)
    return chosen


# Replay -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """Totals of one policy on each text.

    Attributes
    ----------
    tokens : int64 array, shape ``[T]``
        Tokens committed after the first; of sampled states, A + 1 of each.
    ms : float64 array, shape ``[T]``
        Time, ms.
    rounds, accepted, calls : int64 array, shape ``[T]``
        Rounds, their A in all (not cut at the end of the answer), mid calls in all.
    """

    tokens: IntArray
    ms: FloatArray
    rounds: IntArray
    accepted: IntArray
    calls: IntArray

    def take(self, at: Any) -> Replayed:
        """Return the texts ``at``: a mask or numbers."""
        return Replayed(*(values[at] for values in vars(self).values()))

    def with_cost(self, round_ms: float) -> Replayed:
        """Return the same with ``round_ms`` more for every round."""
        return replace(self, ms=self.ms + round_ms * self.rounds)

    def rate(self, numerator: str) -> float:
        """Return tokens/ms, ratio of sums; tokens are ``committed`` or ``accepted`` ones."""
        tokens = self.tokens if numerator == "committed" else self.accepted
        return float(tokens.sum() / self.ms.sum())


def replay(texts: Texts, found: Outcomes, leaf: IntArray) -> Replayed:
    """Decode every text with the schedules ``leaf`` (``[S]``, by number), without deciding time."""
    states = np.arange(len(leaf))
    accepted = found.accepted[states, leaf]
    tokens = np.minimum(accepted + 1, texts.left)
    ms = found.draft_ms[states, leaf] + found.verify_ms[states, leaf]
    seen = texts.visited(tokens)

    def total(values: Any) -> Any:
        return np.add.reduceat(np.where(seen, values, 0), texts.first)

    calls = schedules(found.accepted.shape[1].bit_length() - 1).sum(1)[leaf]
    return Replayed(total(tokens), total(ms), total(1), total(accepted), total(calls))


def bits_of(number: int, depth: int) -> str:
    """Return the bits of a schedule's number, τ_1 first."""
    return format(number, f"0{depth}b")


def reference_runs(texts: Texts, found: Outcomes, depth: int) -> dict[str, Replayed]:
    """Replay every fixed schedule (by its bits), ``oracle`` by rate and ``gain_oracle``."""
    leaves = {bits_of(n, depth): np.full(len(texts.left), n) for n in range(1 << depth)}
    leaves["oracle"] = rate_oracle(found, depth)
    leaves["gain_oracle"] = gain_oracle(texts, found)
    return {name: replay(texts, found, leaf) for name, leaf in leaves.items()}


# Intervals ----------------------------------------------------------------------------------


class Judged:
    """Policies side by side on the same texts: η, ratios, intervals over prompts.

    Parameters
    ----------
    runs : mapping of Replayed
        By name; `reference_runs` among them.
    groups : str array, shape ``[T]``
        The prompt of each text; the texts of one prompt are drawn together.
    depth : int
        D.
    draws, seed : int
        Of the bootstrap over prompts.

    Attributes
    ----------
    prompts : int
        How many there are.
    prompt : int64 array, shape ``[T]``
        The number of each text's prompt.
    """

    def __init__(
        self,
        runs: Mapping[str, Replayed],
        groups: NDArray[np.str_],
        depth: int,
        draws: int,
        seed: int,
    ):
        self.runs, self.groups, self.depth = dict(runs), groups, depth
        names, self.prompt = np.unique(groups, return_inverse=True)
        self.prompts = len(names)
        self._drawn = resamples(self.prompts, draws, seed)
        self._sums = {name: self._by_prompt(run) for name, run in runs.items()}
        self.small, self.mid = "0" * depth, "1" * depth
        self.fixed = [name for name in runs if set(name) <= {"0", "1"}]
        self.endpoint = max((self.small, self.mid), key=self.eta)
        self.best_fixed = max(self.fixed, key=self.eta)

    def _by_prompt(self, run: Replayed) -> FloatArray:
        columns = [np.bincount(self.prompt, v, self.prompts) for v in (run.tokens, run.ms)]
        return np.stack(columns, axis=1)

    def eta(self, name: str, weights: Any = None) -> Any:
        """Return η, tokens/s, ratio of sums.

        Parameters
        ----------
        name : str
            The policy.
        weights : array, shape ``[…, prompts]``, optional
            How often each prompt counts; default: once, which gives a float.
        """
        return rate_of(self._sums[name], weights)

    def ratio(self, name: str, other: str) -> Callable[..., Any]:
        """Return the statistic η of ``name`` over η of ``other``."""
        return lambda weights=None: self.eta(name, weights) / self.eta(other, weights)

    def gap(self, name: str, oracle: str) -> Callable[..., Any]:
        """Return the statistic (η − better endpoint's) / (``oracle``'s − better endpoint's).

        NaN where the oracle is not above the better endpoint.
        """

        def share(weights: Any = None) -> Any:
            base = self.eta(self.endpoint, weights)
            room = np.asarray(self.eta(oracle, weights) - base)
            above = np.where(room > 1e-9, room, np.nan)
            return (self.eta(name, weights) - base) / above

        return share

    def interval(self, statistic: Callable[[Any], Any]) -> tuple[float, float]:
        """Return the 95 % interval of ``statistic``, which takes weights ``[draws, prompts]``."""
        return interval(statistic(self._drawn))

    def figures(self, run: Replayed) -> dict[str, float]:
        """Return η of replayed texts with its interval, mean mid calls and A a round."""
        sums = self._by_prompt(run)
        low, high = self.interval(lambda weights: rate_of(sums, weights))
        rounds = run.rounds.sum()
        return {
            "eta": rate_of(sums),
            "low": low,
            "high": high,
            "calls": float(run.calls.sum() / rounds),
            "A": float(run.accepted.sum() / rounds),
        }


def rate_of(sums: FloatArray, weights: Any = None) -> Any:
    """Return tokens/s from tokens and ms of each prompt, ``[prompts, 2]``, ratio of sums.

    ``weights`` (``[…, prompts]``) say how often each counts; default: once, which gives a float.
    """
    if weights is None:
        tokens, ms = sums.sum(0)
        return float(1e3 * tokens / ms)
    tokens, ms = np.moveaxis(weights @ sums, -1, 0)
    return 1e3 * tokens / ms


def resamples(prompts: int, draws: int, seed: int) -> FloatArray:
    """Return how often each resample draws each prompt, ``[draws, prompts]``; none for one."""
    rng = np.random.default_rng(seed)
    draws = draws if prompts > 1 else 0
    picked = rng.integers(prompts, size=(draws, prompts))
    cells = picked + prompts * np.arange(draws)[:, None]
    counts = np.bincount(cells.ravel(), minlength=draws * prompts)
    return counts.reshape(draws, prompts).astype(np.float64)


def interval(samples: Any) -> tuple[float, float]:
    """Return the 95 % percentile interval of resampled figures; NaN without any."""
    if not len(samples):
        return float("nan"), float("nan")
    low, high = np.percentile(samples, [2.5, 97.5])
    return float(low), float(high)


def bootstrap(
    groups: Sequence[str], statistic: Callable[[IntArray], float], draws: int, seed: int
) -> tuple[float, float]:
    """Return a 95 % percentile interval of ``statistic`` over resampled prompts; NaN for one.

    Parameters
    ----------
    groups : sequence of str
        The prompt of each text; the texts of one prompt are drawn together.
    statistic : callable
        Takes indices of texts (with repeats).
    draws, seed : int
        Resamples, and where they start.
    """
    names, prompt = np.unique(np.asarray(groups, str), return_inverse=True)
    texts = np.arange(len(prompt))
    drawn = resamples(len(names), draws, seed).astype(np.int64)[:, prompt]
    return interval([statistic(np.repeat(texts, counts)) for counts in drawn])
