"""stage=select on trajectories with a planted rule, against a slow, obvious twin.

Sampled states and whole texts both: the first weigh by what a round covers, the second are walked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from pipeline import report
from pipeline.episodes import turn_settings
from pipeline.features import load_tries, prompt_keys
from pipeline.hardware import outcomes
from pipeline.run import CONF
from pipeline.select import (
    CLIP,
    RIDGE,
    Judge,
    Sample,
    check,
    comparison,
    correlation,
    draw_sample,
    figures,
    fold_numbers,
    forward,
    importance,
    nested,
    run,
    scored,
    some_states,
)
from pipeline.tries import Tries, prefix_steps
from tests.pipeline.synthetic import DEPTH, RULE_SIGNAL, TASKS, write_texts, write_trajectories
from treegraft_core import PAPER_SIGNALS, SIGNALS, InputError

QUICK = ("select.seeds=2", "select.states=96", "hardware=range", "hardware.profiles=3")
Worth = tuple[list[list[float]], list[float]]


def config(data: Path, *overrides: str) -> DictConfig:
    fixed = ["stage=select", f"paths.data={data}", "tracker=disabled", *QUICK]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=[*fixed, *overrides])


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "git_sha", lambda: "test")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampled")
    write_trajectories(folder, "smollm2-135m", 120)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_texts(folder, "smollm2-135m", 18, 8)
    return folder


@pytest.fixture(scope="module")
def conf(data: Path) -> DictConfig:
    return config(data)


@pytest.fixture(scope="module")
def tries(conf: DictConfig) -> Tries:
    return load_tries(conf)


@pytest.fixture(scope="module")
def sample(tries: Tries, conf: DictConfig) -> Sample:
    return draw_sample(tries, conf, 1)


@pytest.fixture(scope="module")
def judge(sample: Sample) -> Judge:
    return Judge(sample, fold_numbers(sample.tries, "prompt", 4, 1))


@pytest.fixture(scope="module")
def walked(whole: Path) -> Judge:
    conf = config(whole)
    sample = draw_sample(load_tries(conf), conf, 1)
    return Judge(sample, fold_numbers(sample.tries, "prompt", 4, 1))


@pytest.fixture(params=["judge", "walked"])
def either(request: pytest.FixtureRequest) -> Judge:
    found: Judge = request.getfixturevalue(request.param)
    assert found.sample.texts.whole == (request.param == "walked")
    return found


def read(data: Path) -> dict[str, Any]:
    selection: dict[str, Any] = json.loads(
        (data / "selection" / "smollm2-135m" / "selection.json").read_text()
    )
    return selection


# --- the slow twin -------------------------------------------------------------------------------


def design(sample: Sample, k: int, signals: tuple[str, ...]) -> np.ndarray:
    """Return intercept, linear and pairwise terms of every state and prefix before step k."""
    z = sample.z[:, prefix_steps(DEPTH) == k]
    prompt, target_ms, mid_ms, log_ratio = (z[..., i] for i in range(4))
    columns = [prompt, target_ms, mid_ms / target_ms, log_ratio]
    columns += [z[..., 6 + j] for j in range(k - 1)]
    columns += [z[..., 6 + DEPTH + SIGNALS.index(name)] for name in signals]
    standard = [np.clip((c - c.mean()) / c.std(), -CLIP, CLIP).ravel() for c in columns]
    terms = [np.ones_like(standard[0]), *standard]
    terms += [a * b for i, a in enumerate(standard) for b in standard[i:]]
    return np.stack(terms, axis=1).reshape(*z.shape[:2], -1)


def turns(sample: Sample) -> list[list[int]]:
    """Return the states of each turn, in order."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for state, row in enumerate(sample.tries.states.itertuples()):
        found.setdefault((row.pair, row.task, row.prompt_id, row.turn), []).append(state)
    return list(found.values())


def decode(
    sample: Sample, turn: list[int], leaf: Sequence[int]
) -> Iterator[tuple[int, int, float]]:
    """Yield state, committed tokens and number of every round."""
    if not sample.texts.whole:
        for state in turn:
            tokens = int(sample.tries.accepted[state, leaf[state]]) + 1
            yield state, tokens, 1 / tokens
        return
    at = 0
    while at < len(turn):
        tokens = min(int(sample.tries.accepted[turn[at], leaf[turn[at]]]) + 1, len(turn) - at)
        yield turn[at], tokens, 1.0
        at += tokens


def fixed(sample: Sample, among: list[list[int]]) -> list[list[list[float]]]:
    """Return rounds, tokens and t of every schedule on every machine."""
    found = []
    for setting in sample.drawn:
        ms, sums = outcomes(sample.tries, setting.profile).ms, []
        for at in range(1 << DEPTH):
            total = [0.0, 0.0, 0.0]
            for turn in among:
                for state, tokens, rounds in decode(sample, turn, [at] * len(ms)):
                    total[0] += rounds
                    total[1] += rounds * tokens
                    total[2] += rounds * ms[state, at]
            sums.append(total)
        found.append(sums)
    return found


def slow_worth(sample: Sample, train: np.ndarray) -> Worth:
    """Return gain and weight of every state if the best schedule of other folds goes on."""
    sums = fixed(sample, [turn for turn in turns(sample) if train[turn[0]]])
    best = [max(range(1 << DEPTH), key=lambda at: of[at][1] / of[at][2]) for of in sums]
    count = len(sample.tries)
    leaf = [best[n] for n in sample.number]
    spent = sample.found.ms + DEPTH * sample.found.decision_ms[:, None]
    gain, weight = [[0.0] * (1 << DEPTH) for _ in range(count)], [0.0] * count
    for turn in turns(sample):
        to_end = [0.0] * (len(turn) + 1)
        for at in reversed(range(len(turn))):
            tokens = min(int(sample.tries.accepted[turn[at], leaf[turn[at]]]) + 1, len(turn) - at)
            to_end[at] = spent[turn[at], leaf[turn[at]]] + to_end[at + tokens]
        for at, state in enumerate(turn):
            rounds, tokens, ms = sums[sample.number[state]][leaf[state]]
            for each in range(1 << DEPTH):
                step, left = int(sample.tries.accepted[state, each]) + 1, len(turn) - at
                if sample.texts.whole:
                    later = to_end[at + min(step, left)] - to_end[at]
                    left_over = -tokens / ms * (spent[state, each] + later)
                else:
                    left_over = step - tokens / ms * spent[state, each]
                gain[state][each] = left_over / (tokens / rounds)
        if sample.texts.whole:
            starts = min(8, len(turn))
            for state in turn:
                weight[state] = 0.05
            for start in range(starts):
                for state, _, _ in decode(sample, turn[start:], leaf):
                    weight[state] += 1 / starts
        else:
            for state, _, rounds in decode(sample, turn, leaf):
                weight[state] = rounds
    return gain, [each * count / sum(weight) for each in weight]


def slow_leaves(judge: Judge, signals: tuple[str, ...]) -> list[int]:
    """Return the schedule of every state: one fold, step, prefix and state at a time."""
    sample, fold = judge.sample, judge.fold
    designs = {k: design(sample, k, signals) for k in range(1, DEPTH + 1)}
    leaves = [0] * len(fold)
    for f in range(judge.folds):
        train = fold != f
        gains, weight = slow_worth(sample, train)
        value = {
            (s, bits): gains[s][int("".join(map(str, bits)), 2)]
            for s in range(len(fold))
            for bits in product((0, 1), repeat=DEPTH)
        }
        call: dict[tuple[int, tuple[int, ...]], bool] = {}
        for k in range(DEPTH, 0, -1):
            prefixes = list(product((0, 1), repeat=k - 1))
            rows, y, weights = [], [], []
            for s in np.flatnonzero(train):
                for i, bits in enumerate(prefixes):
                    rows.append(designs[k][s, i])
                    y.append(value[s, (*bits, 1)] - value[s, (*bits, 0)])
                    weights.append(weight[s])
            x = np.array(rows)
            penalty = RIDGE * sum(weights) * np.eye(x.shape[1])
            penalty[0, 0] = 0
            weighted = x.T * np.array(weights)
            w = np.linalg.solve(weighted @ x + penalty, weighted @ np.array(y))
            for s in range(len(fold)):
                for i, bits in enumerate(prefixes):
                    call[s, bits] = bool(designs[k][s, i] @ w > 0)
                    value[s, bits] = value[s, (*bits, int(call[s, bits]))]
        for s in np.flatnonzero(~train):
            bits = ()
            while len(bits) < DEPTH:
                bits = (*bits, int(call[int(s), bits]))
            leaves[s] = int("".join(map(str, bits)), 2)
    return leaves


@pytest.mark.parametrize("signals", [(), (RULE_SIGNAL,), PAPER_SIGNALS])
def test_the_induced_policy_equals_the_slow_twin(either: Judge, signals: tuple[str, ...]) -> None:
    assert either.judge(signals).leaf.tolist() == slow_leaves(either, signals)


def slow_score(sample: Sample, leaf: Sequence[int], among: list[list[int]]) -> float:
    """Return the time of the better endpoint over that of ``leaf``, at the endpoint's rates."""
    ends = []
    for sums in fixed(sample, turns(sample)):
        ends.append(max((tokens / ms, at) for at in (0, 31) for _, tokens, ms in [sums[at]]))
    due = spent = 0.0
    for turn in among:
        for state, _, rounds in decode(sample, turn, [ends[n][1] for n in sample.number]):
            rate, at = ends[sample.number[state]]
            due += rounds * rate * sample.found.ms[state, at]
        for state, _, rounds in decode(sample, turn, leaf):
            ms = sample.found.ms[state, leaf[state]] + DEPTH * sample.found.decision_ms[state]
            spent += rounds * ends[sample.number[state]][0] * ms
    return due / spent


def test_the_score_is_that_of_a_plain_walk(either: Judge) -> None:
    sample, leaf = either.sample, either.judge(PAPER_SIGNALS).leaf
    every = turns(sample)
    some = [turn for turn in every if either.fold[turn[0]] != 2]
    for among, without in ((every, None), (some, 2)):
        expected = slow_score(sample, leaf.tolist(), among)
        assert scored([either], [leaf], without) == pytest.approx(expected)


def test_endpoints_are_not_charged_for_decisions(either: Judge) -> None:
    due, spent = either.times(either.end)
    assert (spent >= due).all() and spent.sum() > due.sum()


def test_a_turn_that_is_whole_is_on_one_machine(either: Judge) -> None:
    sample = either.sample
    number = turn_settings(sample.tries, sample.texts, sample.drawn, 0.3, np.random.default_rng(0))
    assert set(number) == set(range(len(sample.drawn)))
    each = [len(set(part)) for part in np.split(number, sample.texts.first[1:])]
    assert max(each) == 1 if sample.texts.whole else max(each) > 1


def test_label_error_counts_wrong_signs_by_what_they_cost(judge: Judge) -> None:
    """The planted rule is far less wrong than always calling, or never."""
    y = judge.hindsight
    error = figures([judge], [judge.judge((RULE_SIGNAL,))])["label_error"]
    never = np.abs(y[y > 0]).sum() / np.abs(y).sum()
    assert 0 <= error < 0.6 * min(never, 1 - never)


def test_r2_is_that_of_rows_left_out(either: Judge) -> None:
    """Each fold's rows weigh as the policy that decides there has them weigh."""
    sample, fold = either.sample, either.fold
    weights = np.array([slow_worth(sample, fold != f)[1] for f in range(either.folds)])
    own = weights[fold, np.arange(len(fold))]
    squared, total = np.zeros(2), np.zeros(2)
    for k in range(1, DEPTH + 1):
        x, prefixes = design(sample, k, (RULE_SIGNAL,)), 1 << (k - 1)
        shape = (len(fold), prefixes, 2, 1 << (DEPTH - k))
        tokens, time = sample.found.tokens("committed"), sample.found.ms
        for i, outcome in enumerate((tokens, time / sample.found.target_ms[:, None])):
            y = outcome.reshape(shape).mean(3)
            y = y - np.average(y.reshape(-1, 2), 0, np.repeat(own, prefixes))
            total[i] += (own[:, None, None] * y**2).sum()
            for f in range(either.folds):
                train, held = x[fold != f].reshape(-1, x.shape[2]), x[fold == f]
                weight = np.repeat(weights[f, fold != f], prefixes)
                penalty = RIDGE * weight.sum() * np.eye(x.shape[2])
                penalty[0, 0] = 0
                given = train.T * weight @ y[fold != f].reshape(-1, 2)
                w = np.linalg.solve(train.T * weight @ train + penalty, given)
                squared[i] += (own[fold == f, None, None] * (y[fold == f] - held @ w) ** 2).sum()
    found = figures([either], [either.judge((RULE_SIGNAL,))])
    expected = 1 - squared / total
    assert [found["r2_tokens"], found["r2_time"]] == pytest.approx(expected.tolist(), abs=1e-4)


# --- choosing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["task", "prompt"])
def test_the_planted_signal_comes_first(tries: Tries, conf: DictConfig, group: str) -> None:
    samples = [draw_sample(tries, conf, seed) for seed in (1, 2)]
    judges = [Judge(s, fold_numbers(s.tries, group, 5, i)) for i, s in enumerate(samples)]
    assert forward(judges, 1) == (RULE_SIGNAL,)
    best, none = ([judge.judge(s) for judge in judges] for s in ((RULE_SIGNAL,), ()))
    assert figures(judges, best)["eta_ratio"] > figures(judges, none)["eta_ratio"] + 0.05


def test_permuting_the_planted_signal_costs_most(judge: Judge) -> None:
    drops = {name: drop["mean"] for name, drop in importance([judge], 0).items()}
    assert set(drops) == set(SIGNALS)
    assert max(drops, key=drops.__getitem__) == RULE_SIGNAL
    others = [abs(drop) for name, drop in drops.items() if name != RULE_SIGNAL]
    assert drops[RULE_SIGNAL] > 5 * max(others)


def test_a_set_chosen_without_a_fold_is_judged_on_it(judge: Judge) -> None:
    sets = [(SIGNALS[f],) for f in range(judge.folds)]
    spliced = judge.spliced(sets)
    for f, signals in enumerate(sets):
        mine = judge.fold == f
        np.testing.assert_array_equal(spliced.leaf[mine], judge.judge(signals).leaf[mine])
        assert spliced.wrong[f] == judge.judge(signals).wrong[f]


def test_what_is_chosen_without_a_fold_does_not_depend_on_its_score(either: Judge) -> None:
    other = Judge(either.sample, either.fold)
    held = either.fold == 2
    other.due = either.due * np.where(held, 7.0, 1.0)
    other.rate = either.rate * np.where(held, np.linspace(1, 9, len(held)), 1.0)
    assert forward([other], 3, without=2) == forward([either], 3, without=2)


def test_comparison_of_a_set_with_itself_is_even(judge: Judge) -> None:
    rows = comparison([judge], PAPER_SIGNALS, [[PAPER_SIGNALS] * judge.folds])
    even = [r for r in rows if r["signals"] not in ("no signal", "all 10")]
    assert len(even) == 3
    for row in even:
        assert (row["ahead_of_paper"], row["low"], row["high"]) == (0.0, 0.0, 0.0)
    assert rows[0]["high"] < 0


def test_every_fold_and_seed_chooses_once(judge: Judge) -> None:
    found = nested([judge, judge], 2, "prompt")
    assert [len(each) for each in found] == [judge.folds] * 2
    assert all(len(set(one)) == 2 for each in found for one in each)
    assert found[0] == found[1]


def test_correlation_is_that_of_ranks(sample: Sample) -> None:
    found = correlation(sample)
    np.testing.assert_allclose(found, found.T)
    np.testing.assert_allclose(np.diag(found), 1.0)
    a, b = (sample.tries.signals[..., i].ravel() for i in (0, 5))
    ranks = [np.argsort(np.argsort(v)) for v in (a, b)]
    assert found[0, 5] == pytest.approx(np.corrcoef(ranks)[0, 1], abs=1e-3)


def test_states_are_drawn_by_whole_prompts(tries: Tries) -> None:
    prompts = prompt_keys(tries)
    at = some_states(prompts, 30, np.random.default_rng(0))
    assert len(at) == 28  # prompts have four states
    assert not set(prompts[at]) & set(np.delete(prompts, at))
    assert len(some_states(prompts, 0, np.random.default_rng(0))) == len(prompts)
    assert len(some_states(prompts, 1, np.random.default_rng(0))) == 4


# --- the stage -----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes(data: Path) -> None:
    folder, read_bytes = data / "selection" / "smollm2-135m", []
    for seed in (3, 3, 4):
        run(config(data, f"seed={seed}", "select.signals=2"))
        read_bytes.append((folder / "selection.json").read_bytes())
    assert read_bytes[0] == read_bytes[1] != read_bytes[2]


def test_what_the_stage_writes(data: Path) -> None:
    run(config(data, "select.signals=2"))
    found = read(data)
    cv = found["cv"]
    assert RULE_SIGNAL in found["signals"] and len(found["signals"]) == 2
    assert (cv["group"], cv["groups"], cv["seeds"]) == ("task", len(TASKS), 2)
    assert max(cv["states"]) <= 96 and cv["rows"] == sum(cv["states"]) * 160
    assert [row["signal"] for row in cv["order"]][:2] == ["(none)", RULE_SIGNAL]
    names = [row["signals"] for row in found["comparison"]]
    assert names[:3] == ["no signal", "the paper's six", "chosen"]
    rule = next(row for row in found["stability"] if row["signal"] == RULE_SIGNAL)
    assert rule == {"signal": RULE_SIGNAL, "task": 1.0, "prompt": 1.0, "mean_place": 1.0}
    assert (data / "selection" / "smollm2-135m" / "selection.png").stat().st_size > 10_000


def test_whole_texts_are_chosen_on_by_walking_them(whole: Path) -> None:
    run(config(whole, "select.signals=1", "select.group=prompt", "select.seeds=1"))
    cv = read(whole)["cv"]
    assert cv["texts_whole"] and cv["eta_ratio"] > cv["order"][0]["eta_ratio"]


def test_choosing_by_pair_and_by_prompt(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        write_trajectories(tmp_path, name, 48, seed)
    few = ("select.signals=1", "select.folds=2", "select.seeds=1")
    both = ("fit.name=smollm2-135m", "fit.pairs=[one,two]", *few)
    for group, groups in (("pair", 2), ("prompt", 12)):
        run(config(tmp_path, *both, f"select.group={group}"))
        found = read(tmp_path)
        assert found["signals"] == [RULE_SIGNAL]
        assert (found["cv"]["group"], found["cv"]["groups"]) == (group, groups)
        assert {"task", "pair", "prompt"} < set(found["stability"][0])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("select.group=pair", "select.group=pair: .* hold 1, fewer .* select.folds=5"),
        ("select.group=state", "select.group=state: choose one of task, pair, prompt"),
        ("select.folds=1", "select.folds=1: give 2 or more"),
        ("select.states=8", "select.group=task: .* hold [12], fewer .* more select.states"),
        ("select.states=-1", "select.states=-1: give 0"),
        ("select.seeds=0", "select.seeds=0: give 1 or more"),
        ("select.signals=0", "select.signals=0: choose 1 to 10"),
    ],
)
def test_bad_choices_name_their_key(data: Path, tries: Tries, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(tries, config(data, override))
