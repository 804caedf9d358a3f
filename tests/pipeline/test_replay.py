"""Replay: the vectorised walk, decisions and oracles against obvious ones, and the whole stage."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from pipeline import collect, evaluate, replaying
from pipeline.hardware import Outcomes, outcomes
from pipeline.planning import OnlinePlanner
from pipeline.profile import random_artifact
from pipeline.replay import (
    Judged,
    Replayed,
    Texts,
    bits_of,
    bootstrap,
    follow,
    gain_decisions,
    gain_oracle,
    planned_decisions,
    rate_oracle,
    reference_runs,
    replay,
    resamples,
    scheduler_decisions,
    texts_of,
)
from pipeline.tries import NEVER, Tries, join, prefix_bits, prefix_steps, schedules
from tests.pipeline.conftest import assert_refused, conf, overrides, random_value, write_fit
from treegraft_core import SIGNALS, DistilledScheduler, InputError, StepState
from treegraft_core.tree import FloatArray

LONGEST = 4


def random_tries(
    rng: np.random.Generator, depth: int, lengths: Sequence[int], sampled: bool = False
) -> Tries:
    """Return states of texts of these lengths, two a prompt, in the order of `Tries`."""
    rows = [
        {
            "pair": "p",
            "task": f"task{text // 8}",
            "prompt_id": f"{text // 2:02d}",
            "turn": text % 2,
            "position": at + 1 + sampled,
            "state_id": f"{text}/{at}",
            "prompt_tokens": 5 + text,
            "context_tokens": 6 + text + at,
            "target_ms": 8.0 + text,
            "mid_ms": 3.0,
        }
        for text, length in enumerate(lengths)
        for at in range(length)
    ]
    count, leaves = len(rows), 1 << depth
    accepted = rng.integers(0, LONGEST + 1, (count, leaves)).astype(np.int16)
    ranks = np.sort(rng.integers(0, 20, (count, leaves, LONGEST)), axis=2).astype(np.int16)
    ranks[np.arange(LONGEST) >= accepted[..., None]] = NEVER
    made = Tries(
        depth,
        pd.DataFrame(rows),
        rng.normal(scale=2, size=(count, leaves - 1, len(SIGNALS))),
        rng.integers(0, 9, (count, leaves - 1, 5)).astype(np.int32),
        accepted,
        rng.uniform(1, 30, (count, leaves)),
        rng.uniform(5, 9, (count, leaves)),
        rng.integers(5, 20, (count, leaves)).astype(np.int16),
        ranks,
    )
    return join([made])


def slow_schedule(wanted: Any, depth: int) -> int:
    """Walk one trie by the decisions ``wanted`` at its prefixes."""
    bits = ""
    names = [format(n, f"0{k}b") if k else "" for k in range(depth) for n in range(1 << k)]
    while len(bits) < depth:
        bits += "1" if wanted[names.index(bits)] else "0"
    return int(bits, 2)


def slow_text(accepted: Any, ms: Any, leaf: Sequence[int], whole: bool) -> list[float]:
    """Decode one text round by round: tokens, ms, rounds, accepted, calls."""
    state, totals = 0, [0, 0.0, 0, 0, 0]
    while state < len(leaf):
        n = leaf[state]
        step = int(accepted[state][n]) + 1
        if whole:
            step = min(step, len(leaf) - state)
        rounds = (step, float(ms[state][n]), 1, int(accepted[state][n]), bin(n).count("1"))
        totals = [total + new for total, new in zip(totals, rounds, strict=True)]
        state += step if whole else 1
    return totals


def columns(run: Replayed) -> FloatArray:
    return np.stack([run.tokens, run.ms, run.rounds, run.accepted, run.calls], axis=1)


cases = st.tuples(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_walking_all_texts_together_equals_one_after_the_other(case: Any) -> None:
    """Random tries, random decisions, whole or sampled."""
    seed, depth, lengths, sampled = case
    rng = np.random.default_rng(seed)
    tries = random_tries(rng, depth, lengths, sampled)
    texts, found = texts_of(tries), outcomes(tries)
    assert texts.whole is not sampled
    assert texts.length.tolist() == lengths and len(texts.turns) == len(lengths)
    wanted = rng.random((len(tries), (1 << depth) - 1)) < 0.5
    leaf = follow(wanted, depth)
    assert leaf.tolist() == [slow_schedule(row, depth) for row in wanted]
    run = replay(texts, found, leaf)
    expected = [
        slow_text(tries.accepted[at:], (tries.draft_ms + tries.verify_ms)[at:], part, not sampled)
        for at, part in parts(leaf, lengths)
    ]
    np.testing.assert_allclose(columns(run), expected, rtol=1e-12)
    assert run.with_cost(2.0).ms.tolist() == (run.ms + 2 * run.rounds).tolist()


def parts(leaf: Any, lengths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return first state and schedules of each text."""
    ends = np.cumsum(lengths)
    return [(int(e - n), leaf[e - n : e].tolist()) for e, n in zip(ends, lengths, strict=True)]


def test_texts_with_a_missing_state_are_not_walked() -> None:
    tries = random_tries(np.random.default_rng(0), 2, [5, 6])
    assert texts_of(tries).whole
    for missing in (0, 2, 7):
        texts = texts_of(tries.take(np.arange(len(tries)) != missing))
        assert not texts.whole and texts.length.sum() == 10


# Decisions ------------------------------------------------------------------------------------


def states_of(tries: Tries, at: int) -> list[StepState]:
    """Return what a scheduler sees at every prefix of a state."""
    row = tries.states.iloc[at]
    steps, bits = prefix_steps(tries.depth), prefix_bits(tries.depth)
    return [
        StepState(
            int(k),
            tuple(bits[p, : k - 1].tolist()),
            tries.depth,
            int(row["prompt_tokens"]),
            float(row["target_ms"]),
            float(row["mid_ms"]),
            tries.signals[at, p],
        )
        for p, k in enumerate(steps)
    ]


@pytest.mark.parametrize("max_calls", [None, 0, 2])
def test_the_scheduler_decides_as_in_the_runtime(max_calls: int | None) -> None:
    tries = random_tries(np.random.default_rng(1), 4, [5, 7])
    taken = set()
    for seed in range(4):
        artifact = random_artifact(4, seed)
        scheduler = DistilledScheduler(artifact, max_calls)
        wanted = scheduler_decisions(artifact, tries, outcomes(tries), max_calls)
        for at in range(len(tries)):
            expected = [scheduler.decide(state) for state in states_of(tries, at)]
            assert wanted[at].tolist() == [bool(d) for d in expected]
            taken |= set(expected)
    assert taken == ({0} if max_calls == 0 else {0, 1})


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = random_tries(np.random.default_rng(2), 3, [9, 9])
    found, artifact = outcomes(tries), random_artifact(3, 0)
    together = scheduler_decisions(artifact, tries, found)
    monkeypatch.setattr("pipeline.replay.BLOCK_STATES", 4)
    assert (scheduler_decisions(artifact, tries, found) == together).all()


@pytest.mark.parametrize("rate", [None, 0.05, 0.3])
@pytest.mark.parametrize("numerator", ["committed", "accepted"])
def test_planning_decides_as_in_the_runtime(rate: float | None, numerator: str) -> None:
    tries = random_tries(np.random.default_rng(3), 3, [4, 5])
    taken = set()
    for seed in range(6):
        model = random_value(3, seed)
        for module in model.modules:
            module.double()
        planner = OnlinePlanner(model, numerator, rate)
        wanted = planned_decisions(planner, tries, outcomes(tries))
        for at in range(len(tries)):
            expected = [planner.decide(state) for state in states_of(tries, at)]
            assert wanted[at].tolist() == [bool(d) for d in expected]
            taken |= set(expected)
    assert taken == {0, 1}


class Clairvoyant:
    """A value network that knows what will happen."""

    signals = SIGNALS[:2]

    def __init__(self, tries: Tries, found: Outcomes):
        self.depth, self._found, self._at = tries.depth, found, 0

    def outcomes(self, z: FloatArray) -> tuple[FloatArray, FloatArray]:
        at = slice(self._at, self._at + len(z))
        self._at += len(z)
        shape = (len(z), self.depth, 1 << self.depth)
        each = (self._found.accepted + 1.0)[at], self._found.ms[at]
        tokens, ms = (np.broadcast_to(v[:, None], shape) for v in each)
        return tokens, ms


@pytest.mark.parametrize("seed", range(5))
def test_planning_by_gain_with_the_truth_is_the_oracle(seed: int) -> None:
    """Where every state counts once, Dinkelbach's iteration ends at the highest ratio."""
    rng = np.random.default_rng(seed)
    tries = random_tries(rng, 3, rng.integers(10, 30, 8).tolist(), sampled=True)
    texts, found = texts_of(tries), outcomes(tries)
    planner = OnlinePlanner(Clairvoyant(tries, found), "committed")  # type: ignore[arg-type]
    by_gain = follow(gain_decisions(planner, tries, found, texts), 3)
    best = replay(texts, found, gain_oracle(texts, found)).rate("committed")
    assert replay(texts, found, by_gain).rate("committed") == pytest.approx(best, rel=1e-9)
    planner = OnlinePlanner(Clairvoyant(tries, found), "committed")  # type: ignore[arg-type]
    by_rate = follow(planned_decisions(planner, tries, found), 3)
    assert (by_rate == rate_oracle(found, 3)).all()


# Oracles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_faster_than_the_gain_oracle(seed: int, depth: int, sampled: bool) -> None:
    """Not a fixed schedule, not the best rate of each state, not random ones."""
    rng = np.random.default_rng(seed)
    tries = random_tries(rng, depth, rng.integers(1, 20, 9).tolist(), sampled)
    texts, found = texts_of(tries), outcomes(tries)
    runs = reference_runs(texts, found, depth)
    best = runs["gain_oracle"].rate("committed")
    assert len(runs) == (1 << depth) + 2
    for name, run in runs.items():
        assert run.rate("committed") <= best * (1 + 1e-12), name
    for _ in range(20):
        leaf = rng.integers(0, 1 << depth, len(tries))
        assert replay(texts, found, leaf).rate("committed") <= best * (1 + 1e-12)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_gain_oracle_is_the_best_of_all_choices(depth: int, sampled: bool) -> None:
    """Every combination of schedules at four states is tried."""
    for seed in range(5):
        tries = random_tries(np.random.default_rng(seed), depth, [3, 1], sampled)
        texts, found = texts_of(tries), outcomes(tries)
        rates = [
            replay(texts, found, np.array(leaf)).rate("committed")
            for leaf in product(range(1 << depth), repeat=4)
        ]
        best = replay(texts, found, gain_oracle(texts, found)).rate("committed")
        assert best == pytest.approx(max(rates), rel=1e-12)


def test_the_best_rate_of_each_state_can_be_slower_than_a_fixed_schedule() -> None:
    """Short rounds of a high rate beside long ones that bring more: why it is no bound."""
    tries = random_tries(np.random.default_rng(0), 1, [4, 4], sampled=True)
    texts, found = texts_of(tries), outcomes(tries)
    found.verify_ms[:] = 0.0
    # In the first text a token in 1 ms, or four in 4.5 ms; in the second, a token in 10 ms.
    found.accepted[:4], found.draft_ms[:4] = [[0, 3]], [[1.0, 4.5]]
    found.accepted[4:], found.draft_ms[4:] = 0, 10.0
    eta = {name: run.rate("committed") for name, run in reference_runs(texts, found, 1).items()}
    assert eta["oracle"] == eta["0"] == pytest.approx(2 / 11)
    assert eta["gain_oracle"] == eta["1"] == pytest.approx(5 / 14.5)


def test_the_oracle_by_rate_keeps_to_a_cap() -> None:
    tries = random_tries(np.random.default_rng(4), 3, [9])
    found, calls = outcomes(tries), schedules(3).sum(1)
    for most in range(4):
        leaf = rate_oracle(found, 3, most)
        rate = (found.accepted + 1) / found.ms
        assert (calls[leaf] <= most).all()
        assert (rate[np.arange(9), leaf] == rate[:, calls <= most].max(1)).all()


# Intervals ------------------------------------------------------------------------------------


def judged(seed: int, prompts: int = 12, draws: int = 400) -> tuple[Judged, Texts]:
    rng = np.random.default_rng(seed)
    tries = random_tries(rng, 2, rng.integers(3, 12, 2 * prompts).tolist())
    texts = texts_of(tries)
    return Judged(reference_runs(texts, outcomes(tries), 2), texts.groups, 2, draws, 0), texts


def test_resamples_are_those_drawn_one_by_one() -> None:
    """The draws of earlier versions, and of `pipeline.results`."""
    rng = np.random.default_rng(7)
    slow = [np.bincount(rng.integers(5, size=5), minlength=5).tolist() for _ in range(30)]
    assert resamples(5, 30, 7).tolist() == slow
    assert resamples(1, 30, 7).shape == (0, 1)


def test_intervals_are_those_of_resampled_texts() -> None:
    """Figure by figure, with the texts of every resample summed anew."""
    found, texts = judged(0)
    run, base = found.runs["gain_oracle"], found.runs[found.endpoint]

    def eta(done: Replayed, at: Any) -> float:
        return float(1e3 * done.tokens[at].sum() / done.ms[at].sum())

    def statistics(at: Any) -> list[float]:
        return [eta(run, at), eta(run, at) / eta(base, at)]

    groups = texts.groups.tolist()
    figures = found.figures(run)
    slow = [
        bootstrap(groups, lambda at, i=i: statistics(at)[i], 400, 0)  # type: ignore[misc]
        for i in range(2)
    ]
    assert (figures["low"], figures["high"]) == pytest.approx(slow[0], rel=1e-12)
    ratio = found.ratio("gain_oracle", found.endpoint)
    assert found.interval(ratio) == pytest.approx(slow[1], rel=1e-12)
    assert slow[1][0] <= ratio() <= slow[1][1] and ratio() >= 1
    assert found.interval(found.ratio("oracle", "oracle")) == (1.0, 1.0)
    low, high = found.interval(found.gap("gain_oracle", "gain_oracle"))
    assert (low, high) == pytest.approx((1.0, 1.0))


def test_one_prompt_has_no_interval_and_no_room_no_gap() -> None:
    found, _ = judged(1, prompts=1)
    assert all(math.isnan(v) for v in found.interval(found.ratio("oracle", "00")))
    found.runs["oracle"] = found.runs[found.endpoint]
    flat = Judged(found.runs, found.groups, 2, 20, 0)
    assert math.isnan(flat.gap("gain_oracle", "oracle")())


# The stage ------------------------------------------------------------------------------------


EVALUATED = (
    "collect.split=evaluate",
    "collect.states_per_turn=0",
    "collect.replay_rounds=0",
    "collect.max_new_tokens=12",
    "collect.prompts_per_task=4",
)


@pytest.fixture(scope="module")
def data(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fit with random weights, and trajectories of held-out prompts."""
    folder = write_fit(tmp_path_factory.mktemp("replay"))
    collect.run(conf(home, "collect", f"paths.data={folder}", *EVALUATED))
    return folder


def composed(home: Path, data: Path, *extra: str) -> DictConfig:
    return conf(home, "replay", f"paths.data={data}", "replay.bootstrap=50", *extra)


def replayed(home: Path, data: Path, *extra: str) -> dict[str, Any]:
    """Run the stage; return ``replay.json``."""
    settings = composed(home, data, *extra)
    replaying.run(settings)
    path = data / "replay" / str(settings.replay.name) / "replay.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def of_all_tasks(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of every policy in the first cell of all tasks, by name."""
    cell = next(c for c in found["cells"] if c["task"] is None)
    return {entry["policy"]: entry for entry in cell["policies"]}


def test_evaluation_and_replay_give_the_same_figures(home: Path, data: Path) -> None:
    """The same prompts, enumerated anew and read from disk."""
    evaluate.run(conf(home, "evaluate", f"paths.data={data}", "evaluate.decode=false"))
    there = json.loads((data / "evaluation" / "tiny" / "replay.json").read_text())
    found = replayed(home, data, "replay.policies=[scheduler,online:rate,10101]")
    assert found["replayed"][0]["how"] == "texts walked, exact"
    ours = of_all_tasks(found)
    theirs = {row["policy"]: row for row in there["policies"]}
    cell = found["cells"][0]
    names = {
        "scheduler": "scheduler",
        "00000": "All Small",
        "11111": "All Mid",
        "10101": "fixed 10101 (the paper's)",
        cell["best_fixed"]: f"best fixed ({cell['best_fixed']}, chosen in hindsight)",
        "oracle": "oracle (best schedule of each state)",
        "gain_oracle": "oracle (best for the whole text)",
        "online:rate": "online planning",
    }
    for name, label in names.items():
        row, entry = theirs[label], ours[name]
        assert [entry["A"], entry["calls"]] == [row["mean A"], row["mid calls a round"]], name
        if name != "online:rate":  # its decisions are timed each time
            assert entry["eta"][0] == pytest.approx(row["η tokens/s"], rel=1e-9), name
            low, high = entry["eta"][1:]
            assert f"{low:.2f} … {high:.2f}" == row["95 % interval"], name
    scheduler = ours["scheduler"]
    for key in ("endpoint", "best_fixed"):
        value, *bounds = scheduler[f"over_{key}"]
        assert value == pytest.approx(there[f"scheduler_over_{key}"], rel=1e-9)
        assert bounds == pytest.approx(there[f"scheduler_over_{key}_interval"], rel=1e-9)
    closed = there["gain_oracle_gap_closed"]
    assert scheduler["gap_closed"][0] == pytest.approx(closed, rel=1e-6)
    assert there["gain_oracle_over_endpoint"] >= there["oracle_over_endpoint"]
    assert scheduler["eta_without_decisions"] > scheduler["eta"][0]
    assert ours["10101"]["eta_without_decisions"] == pytest.approx(ours["10101"]["eta"][0])


def test_held_out_trajectories_have_a_folder_of_their_own(home: Path, data: Path) -> None:
    assert (data / "trajectories" / "evaluate" / "pair=tiny").is_dir()
    assert not (data / "trajectories" / "collect").exists()
    assert (data / "trajectories" / "meta" / "evaluate" / "tiny" / "metrics.json").is_file()
    with pytest.raises(InputError, match=r"collect\.split=both: choose one of collect, evaluate"):
        collect.run(conf(home, "collect", f"paths.data={data}", "collect.split=both"))


def test_policies_by_name_file_and_function(
    home: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, a literal and a function replay as what they are copies of."""
    artifact = random_artifact(5, 0)
    artifact.save_literal(tmp_path / "literal.py")
    (tmp_path / "own_policies.py").write_text(
        "import numpy as np\n"
        "def never(tries, outcomes):\n"
        "    return np.zeros(tries.signals.shape[:2], bool)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = data / "schedulers" / "tiny"
    specs = [
        "scheduler",
        f"{{folder: {folder}}}",
        f"{{literal: {tmp_path / 'literal.py'}}}",
        "'python:own_policies:never'",
        "{mine: '01010'}",
        "online",
        "online:gain",
    ]
    policies = [f"replay.policies=[{','.join(specs)}]", "replay.trust_python=true"]
    found = replayed(home, data, *policies, "replay.name=specs")
    ours = of_all_tasks(found)
    for name in ("folder", "literal"):
        assert ours[name] == ours["scheduler"] | {"policy": name}
    keys = ("eta", "A", "calls", "over_endpoint")
    assert [ours["python:own_policies:never"][k] for k in keys] == [ours["00000"][k] for k in keys]
    assert ours["mine"]["eta"][0] == pytest.approx(found["cells"][0]["fixed"]["01010"])
    assert ours["online"]["A"] == ours["online:gain"]["A"]  # label.objective's default
    tables = (data / "replay" / "specs" / "tables.txt").read_text()
    assert "η without deciding" in tables and "the worst of task x pair x hardware" in tables


def test_machines_and_budgets(home: Path, data: Path) -> None:
    """The pair's own profile is as logged; a smaller budget and other costs are not."""
    path = data / "profiles" / "tiny" / "profile.json"
    own = f"replay.hardware=[logged,{{own: {path}}}]"
    logged, by_profile = (
        {e["policy"]: e["eta"][0] for e in cell["policies"]}
        for cell in replayed(home, data, "replay.policies=[scheduler]", own)["cells"]
        if cell["task"] is None
    )
    assert logged == pytest.approx(by_profile, rel=1e-9)
    smaller = replayed(home, data, "replay.policies=[scheduler]", own, "replay.verify_nodes=2")
    first, second = (c for c in smaller["cells"] if c["task"] is None)
    assert first["policies"] == second["policies"]
    assert first["policies"][0]["eta"][0] != logged["00000"]
    paper = replayed(home, data, "replay=paper", "replay.bootstrap=20", "replay.policies=[10101]")
    cells = [c for c in paper["cells"] if c["task"] is not None]
    assert len(cells) == 10 and len({c["hardware"] for c in cells}) == 10
    metrics = json.loads((data / "replay" / "tiny-paper" / "metrics.json").read_text())
    ratios = [e["over_endpoint"][0] for c in cells for e in c["policies"] if e["policy"] == "10101"]
    assert metrics["least_over_endpoint_10101"] == min(ratios)


def test_without_a_profile_deciding_counts_without_its_time(
    home: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = (f"paths.profile={tmp_path}", "replay.policies=[scheduler]", "replay.name=bare")
    entry = of_all_tasks(replayed(home, data, *bare))["scheduler"]
    assert "count without their time" in capsys.readouterr().out
    assert entry["eta"][0] == pytest.approx(entry["eta_without_decisions"])
    with pytest.raises(InputError, match=r"replay\.verify_nodes=2.*stage=profile"):
        replayed(home, data, *bare, "replay.verify_nodes=2")


def test_sampled_states_count_once_each(
    home: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = f"paths.trajectories={tmp_path}"
    sampled = ("collect.states_per_turn=3", "collect.split=collect")
    collect.run(conf(home, "collect", f"paths.data={data}", there, *EVALUATED, *sampled))
    few = ("replay.policies=[10000]", "replay.name=few", f"replay.split={tmp_path / 'collect'}")
    found = replayed(home, data, *few)
    assert found["replayed"][0]["how"] == "sampled states, each once"
    assert found["replayed"][0]["states"] == 3 * found["replayed"][0]["turns"]
    assert "note: replay.split" in capsys.readouterr().out


BAD = {
    "replay.policies=[101]": "replay.policies=101: has 3 bits, drafting.depth is 5",
    "replay.policies=[magic]": "replay.policies=magic: no such file or folder",
    "replay.policies=[]": "replay.policies=[]",
    "replay.policies=[null]": "replay.policies=None",
    "replay.policies=[{a: 10101, b: 10101}]": "replay.policies=",
    "replay.policies=[[10101]]": "replay.policies=",
    "replay.policies=[10101,10101]": "the name 10101 is taken",
    "replay.policies=[{oracle: 10101}]": "the name oracle is taken",
    "replay.policies=[{00000: 10101}]": "the name 00000 is taken",
    "replay.trust_python=false replay.policies=['python:json:loads']": "trust_python=true",
    "replay.policies=['python:no_such_module:f']": "No module named 'no_such_module'",
    "replay.policies=['python:json:nothing']": "nothing",
    "replay.policies=['python:json:__name__']": "is no function",
    "replay.policies=['python:json']": "replay.policies=python:json",
    "replay.policies=[online:best]": "replay.policies=online:best: no such file",
    "label.objective=speed": "label.objective=speed",
    "replay.policies=[tests]": "scheduler=tests",
    "paths.scheduler=nowhere": "nowhere",
    "paths.value=nowhere": "nowhere",
    "replay.hardware=[fast.json]": "replay.hardware=fast.json: no such file",
    "replay.hardware=[{a: {target_ms: 3}}]": "replay.hardware.a=",
    "replay.hardware=[logged,logged]": "the name logged is taken",
    "replay.hardware=[README.md]": "README.md",
    "replay.pairs=[]": "replay.pairs=[]",
    "replay.pairs=tiny": "replay.pairs=tiny",
    "replay.pairs=[tiny,tiny]": "each once",
    "replay.pairs=[a/b]": "replay.pairs=a/b",
    "replay.pairs=[other]": "collect.split=evaluate collect.states_per_turn=0",
    "replay.split=collect": "replay.split=collect: no trajectories",
    "replay.split=elsewhere": "replay.split=elsewhere: no trajectories",
    "replay.verify_nodes=0": "replay.verify_nodes=0",
    "replay.verify_nodes=many": "replay.verify_nodes=many",
    "replay.bootstrap=2": "replay.bootstrap=2",
    "replay.name=a/b": "replay.name=a/b",
    "drafting.depth=4": "drafting.depth=4",
    "replay.policies=5": "replay.policies=5: must be a list",
    "replay.colour=red": "replay.colour",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_values_are_one_line_and_leave_nothing(
    home: Path,
    data: Path,
    override: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Through the command line's own function; its status is 2."""
    given = ["replay.trust_python=true", *override.split(" replay.")[:1]]
    given += [f"replay.{rest}" for rest in override.split(" replay.")[1:]]
    arguments = overrides(home, f"paths.data={data}", *given)
    assert_refused("replay", arguments, data, BAD[override], monkeypatch, capfd)


@pytest.mark.parametrize(
    ("key", "value"),
    [("target_ms", 0), ("mid_ms", -1), ("tree_ms", "x"), ("small_ms", True), ("mid_slope", 1e400)],
)
def test_costs_are_numbers(key: str, value: Any) -> None:
    costs = dict.fromkeys(replaying.COSTS, 1)
    assert replaying.check_costs("a", costs) == costs
    with pytest.raises(InputError, match=rf"replay\.hardware\.a\.{key}={value}"):
        replaying.check_costs("a", costs | {key: value})


RETURNS: dict[str, Callable[[Tries], Any]] = {
    "float64": lambda tries: np.zeros(tries.signals.shape[:2]),
    "shape [9]": lambda tries: np.zeros(len(tries), bool),
    "shape []": lambda tries: None,
}


@pytest.mark.parametrize("said", RETURNS)
def test_what_a_function_returns_is_checked(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = random_tries(np.random.default_rng(0), 3, [4, 5])
    function = RETURNS[said]
    monkeypatch.setattr(replaying, "returned", lambda t, o: function(t), raising=False)
    policy = replaying.written("mine", "python:pipeline.replaying:returned", True)
    with pytest.raises(InputError, match=r"python:pipeline\.replaying:returned: returned") as error:
        policy.decide(tries, outcomes(tries), texts_of(tries))
    assert said in str(error.value) and "[9, 7]" in str(error.value)


def test_bits_are_the_same_schedule_at_every_state() -> None:
    tries = random_tries(np.random.default_rng(0), 4, [6])
    for number in range(16):
        policy = replaying.fixed("x", bits_of(number, 4), 4)
        wanted = policy.decide(tries, outcomes(tries), texts_of(tries))
        assert follow(wanted, 4).tolist() == [number] * 6
