"""Measuring: which run it is, going on with it, what is said beforehand, what is counted after."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pipeline import evaluate
from pipeline.collate import calls_by_step, collate, cost_of_round, predict, where_picked
from pipeline.engine import open_pair, open_profile
from pipeline.evaluate import warm_up_turns
from pipeline.measure import (
    CALL_FIELDS,
    Turn,
    clocked_ms,
    digest,
    expected_minutes,
    measure,
    sampling_config,
    seed_of,
    settings,
    units,
)
from pipeline.systems import Bench, Output, System
from pipeline.tasks import TaskPrompt
from pipeline.texts import Text, fingerprint
from tests.pipeline.conftest import conf, overrides, random_value, write_fit
from tests.processes import CommandLine, Template
from tests.test_inputs import profile
from treegraft_core import InputError, LatencyProfile, Pair, Sampling, load_scheduler
from treegraft_core.drafting import MidCall
from treegraft_core.prompts import Prompt

Jobs = list[list[Turn]]
JOBS: Jobs = [
    [Turn("math", "1", 0, (5, 7)), Turn("math", "1", 1, (5, 7, 9, 4))],
    [Turn("code", "1", 0, (3, 14, 15))],
    [Turn("code", "2", 0, (8,))],
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fit(tmp_path_factory.mktemp("measure"))


def make_bench(home: Path, data: Path, *extra: str) -> Bench:
    settings = conf(home, "evaluate", f"paths.data={data}", *extra)
    artifact = load_scheduler(data / "schedulers" / "tiny")
    return Bench(settings, open_pair(settings), open_profile(settings), artifact, random_value(5))


@pytest.fixture(scope="module")
def bench(home: Path, data: Path) -> Bench:
    return make_bench(home, data)


def on(bench: Bench, *extra: str) -> Bench:
    """Return the bench under other settings; models and fits are the same."""
    home = Path(str(bench.conf.pair.target.path)).parent
    composed = conf(home, "evaluate", f"paths.data={bench.conf.paths.data}", *extra)
    return Bench(composed, bench.pair, bench.profile, bench.artifact, bench.value)


# Which run it is ------------------------------------------------------------------------------


def run_of(bench: Bench, jobs: Jobs = JOBS) -> str:
    return digest(settings(bench, fakes(["plain", "generate"]), jobs))


@pytest.mark.parametrize(
    "override",
    [
        "drafting.width=3",
        "drafting.verify_nodes=19",
        "drafting.pool=frontier",
        "runtime.guard=false",
        "runtime=as_defined",
        "evaluate.max_new_tokens=11",
        "evaluate.ablation_tasks=[math]",
        "sampling.temperature=0.5",
        "sampling.top_p=0.9",
        "sampling.top_k=7",
        "sampling.repetition_penalty=1.2",
        "seed=1",
        "engine.pack=false",
        "value.numerator=accepted",
        "system=[plain,generate,scheduler]",
        "systems.fixed.schedule=[0,0,1,0,1]",
        "systems.without_nd.drafting.graft=add",
        "systems.fixed.ablation=false",
        "systems.assisted.draft_tokens=[2,4]",
        "systems.fastest.candidates=[same]",
        "systems.guarded.guard=false",
    ],
)
def test_settings_that_change_results_make_another_run(bench: Bench, override: str) -> None:
    assert run_of(on(bench, override)) != run_of(bench)


@pytest.mark.parametrize(
    "override",
    [
        "paths.evaluation=/elsewhere",
        "paths.cache=/elsewhere",
        "tracker=offline",
        "evaluate.bootstrap=77",
        "evaluate.restart=true",
        "evaluate.warmup_prompts=1",
        "collect.pack=3",
        "evaluate.decode_prompts_per_task=9",  # it counts by the prompts it gives
    ],
)
def test_others_go_on_with_the_same_run(bench: Bench, override: str) -> None:
    assert run_of(on(bench, override)) == run_of(bench)


def changed_models(bench: Bench) -> Iterator[tuple[str, Bench]]:
    """Yield the bench with one thing changed that is not in the configuration."""
    pair, artifact, value = bench.pair, bench.artifact, bench.value
    assert value is not None

    def other(**change: Any) -> Bench:
        parts = {"pair": pair, "profile": bench.profile, "artifact": artifact, "value": value}
        return Bench(bench.conf, **{**parts, **change})

    weights = (artifact.weights[0] + 1e-9, *artifact.weights[1:])
    yield "a weight of the scheduler", other(artifact=replace(artifact, weights=weights))
    yield "its standardisation", other(artifact=replace(artifact, x_mean=artifact.x_mean + 1))
    yield "its mean", other(artifact=replace(artifact, y_mean=0.5))
    yield "the value network", other(value=random_value(5, seed=1))
    yield "its bounds", other(value=replace(value, low=value.low + 0.5))
    yield "no value network", other(value=None)
    yield "the clock", other(profile=replace(bench.profile, plain_ms=6.0))
    yield "how mid calls evaluate", other(profile=replace(bench.profile, evaluation="all"))
    yield "what ends an answer", other(pair=replace(pair, eos_token_ids=(2,)))
    for name in ("target", "mid"):
        model = type(pair.target)(pair.target.config).double()
        model.load_state_dict(getattr(pair, name).state_dict())
        model.requires_grad_(False)
        model.lm_head.weight[3, 3] += 1e-6
        yield f"a weight of the {name}", other(pair=replace(pair, **{name: model}))
        yield f"the dtype of the {name}", other(pair=replace(pair, **{name: model.float()}))


def test_models_that_change_results_make_another_run(bench: Bench) -> None:
    found = {what: run_of(other) for what, other in changed_models(bench)}
    assert run_of(bench) not in found.values()
    assert len(set(found.values())) == len(found), found


def test_the_profiles_notes_do_not_matter(bench: Bench) -> None:
    noted = replace(bench.profile, meta={"seconds": 3})
    assert run_of(replace(bench, profile=noted)) == run_of(bench)


def test_other_prompts_make_another_run(bench: Bench) -> None:
    runs = [
        JOBS,
        JOBS[:2],
        [JOBS[1], JOBS[0], JOBS[2]],
        [*JOBS[:2], [Turn("code", "2", 0, (9,))]],
        [*JOBS[:2], [Turn("code", "3", 0, (8,))]],
        [*JOBS[:2], [Turn("math", "2", 0, (8,))]],
    ]
    assert len({run_of(bench, jobs) for jobs in runs}) == len(runs)


# Measuring --------------------------------------------------------------------------------------


Asked = tuple[str, tuple[int, ...], int, Sampling]


def fakes(
    names: Sequence[str],
    asked: list[Asked] | None = None,
    variants: dict[str, Sequence[str]] | None = None,
    ablations: Sequence[str] = (),
) -> dict[str, System]:
    """Return systems that note what they are asked for; each answer is the prompt's last token."""

    def way(name: str) -> Callable[[Sequence[int], int, Sampling], Output]:
        def decode(ids: Sequence[int], n: int, sampling: Sampling) -> Output:
            if asked is not None:
                asked.append((name, tuple(ids), n, sampling))
            return Output([ids[-1]] * n, n - 1, 5.0)

        return decode

    found = {}
    for name in names:
        ways = {v: way(f"{name}/{v}") for v in (variants or {}).get(name, ())}
        found[name] = System(
            name, name.title(), "other", way(name), ways, ablation=name in ablations
        )
    return found


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("run-*/0*.json"))


def test_a_prompt_is_one_file_with_all_its_turns(bench: Bench, tmp_path: Path) -> None:
    records = measure(bench, fakes(["plain", "generate"]), JOBS, [], tmp_path)
    assert [p.name for p in parts(tmp_path)] == ["00000.json", "00001.json", "00002.json"]
    first, second, _ = (json.loads(p.read_text())["turns"] for p in parts(tmp_path))
    assert [r["turn"] for r in first] == [0, 1] and [r["prompt_tokens"] for r in first] == [2, 4]
    assert len(second) == 1
    keys = [(r["task"], r["prompt_id"], r["turn"]) for r in records]
    assert keys == [(t.task, t.prompt_id, t.turn) for unit in JOBS for t in unit]
    assert records[0]["outputs"]["plain"] == {
        "tokens": [7] * 12,
        "counted": 11,
        "ms": 5.0,
        "rounds": [],
    }


def test_every_system_begins_in_turn(bench: Bench, tmp_path: Path) -> None:
    names = ["plain", "generate", "a", "b", "c"]
    jobs = [[Turn("math", str(i), 0, (5, i))] for i in range(12)]
    asked: list[Asked] = []
    measure(bench, fakes(names, asked), jobs, [], tmp_path)
    warm, real = asked[: len(names)], [name for name, *_ in asked[len(names) :]]
    assert [name for name, *_ in warm] == names
    rows = [real[i : i + len(names)] for i in range(0, len(real), len(names))]
    assert [row[0] for row in rows] == [names[i % len(names)] for i in range(12)]
    assert all(sorted(row) == sorted(names) for row in rows)
    for place in range(len(names)):
        assert len({row[place] for row in rows}) == len(names)
    records = [json.loads(p.read_text())["turns"][0] for p in parts(tmp_path)]
    assert all(list(r["outputs"]) == names for r in records)  # as configured, whatever the order


def test_seeds_differ_by_turn_and_not_by_system(home: Path, data: Path, tmp_path: Path) -> None:
    asked: list[Asked] = []
    bench = make_bench(home, data, "seed=3", "sampling.temperature=0.7", "sampling.top_k=5")
    measure(bench, fakes(["plain", "generate", "x"], asked), JOBS, [], tmp_path)
    seeds: dict[tuple[int, ...], set[int]] = {}
    for _, ids, _, sampling in asked[3:]:
        assert replace(sampling, seed=0) == Sampling(0.7, 1.0, 5, 1.0, 0)
        seeds.setdefault(ids, set()).add(sampling.seed)
    assert [len(found) for found in seeds.values()] == [1] * 4
    assert len(set.union(*seeds.values())) == 4
    turn = JOBS[0][0]
    assert seeds[turn.ids] == {seed_of(3, turn)}
    others = [replace(turn, task="code"), replace(turn, prompt_id="2"), replace(turn, turn=1)]
    assert len({seed_of(3, t) for t in (turn, *others)} | {seed_of(4, turn)}) == 5
    assert seed_of(3, replace(turn, ids=(1,))) == seed_of(3, turn)


def test_ablations_run_on_their_tasks_only(bench: Bench, tmp_path: Path) -> None:
    names = ["plain", "generate", "scheduler", "fixed"]
    systems = fakes(names, ablations=["fixed"])
    few = on(bench, "evaluate.ablation_tasks=[math]")
    records = measure(few, systems, JOBS, [], tmp_path)
    ran = {(r["task"], r["prompt_id"], r["turn"]): list(r["outputs"]) for r in records}
    assert ran[("math", "1", 0)] == ran[("math", "1", 1)] == names
    assert ran[("code", "1", 0)] == ran[("code", "2", 0)] == names[:3]
    found = collate(few, systems, records, {}, None)["runs"]
    assert [run is None for run in found["fixed"]] == [False, False, True, True]
    assert all(run is not None for name in names[:3] for run in found[name])
    everywhere = measure(bench, systems, JOBS, [], tmp_path)
    assert all(list(r["outputs"]) == names for r in everywhere)


def chosen(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(next(folder.glob("run-*/run.json")).read_text())["chosen"]
    return found


VARIANTS = {"fastest": ["a", "b"], "lookup": ["2", "4"]}
NAMES = ["plain", "generate", "fastest", "lookup"]


def test_the_fastest_variant_is_taken_and_kept(bench: Bench, tmp_path: Path) -> None:
    def rated(speed: dict[str, float], asked: list[str]) -> dict[str, System]:
        systems = fakes(NAMES, variants=VARIANTS)
        for system in systems.values():
            for name in system.variants:

                def decode(ids: Any, n: int, sampling: Any, name: str = name) -> Output:
                    asked.append(name)
                    return Output([1] * n, n - 1, (n - 1) / speed[name])

                system.variants[name] = decode
        return systems

    asked: list[str] = []
    systems = rated({"a": 1, "b": 2, "2": 2, "4": 1}, asked)
    measure(bench, systems, JOBS, JOBS[1], tmp_path)
    assert chosen(tmp_path) == {"fastest": "b", "lookup": "2"}
    assert [s.label for s in systems.values()] == ["Plain", "Generate", "Fastest (b)", "Lookup (2)"]
    assert asked[8:] == [] or set(asked[8:]) == {"b", "2"}
    parts(tmp_path)[1].unlink()
    # Others are faster now, but a run keeps its choice, and its labels.
    again = rated({"a": 2, "b": 1, "2": 1, "4": 2}, asked := [])
    measure(bench, again, JOBS, JOBS[1], tmp_path)
    assert set(asked) == {"b", "2"}
    assert chosen(tmp_path) == {"fastest": "b", "lookup": "2"}
    assert [s.label for s in again.values()] == [s.label for s in systems.values()]
    whole = rated({"a": 2, "b": 1, "2": 1, "4": 2}, asked := [])
    measure(bench, whole, JOBS, JOBS[1], tmp_path)
    assert asked == []
    assert [s.label for s in whole.values()] == [s.label for s in systems.values()]


def test_only_what_is_missing_is_measured(bench: Bench, tmp_path: Path) -> None:
    first = measure(bench, fakes(NAMES[:2]), JOBS, [], tmp_path)
    files = parts(tmp_path)
    kept = {p: p.read_bytes() for p in (files[0], files[2])}
    files[1].unlink()
    asked: list[Asked] = []
    second = measure(bench, fakes(NAMES[:2], asked), JOBS, JOBS[0], tmp_path)
    assert [ids for _, ids, n, _ in asked if n == 12] == [JOBS[1][0].ids] * 2
    assert {p: p.read_bytes() for p in kept} == kept
    assert first == second


def test_restart_measures_everything_again(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(bench, fakes(NAMES, variants=VARIANTS), JOBS, [], tmp_path)
    parts(tmp_path)[1].write_text("{")  # what is damaged goes, too
    asked: list[Asked] = []
    again = on(bench, "evaluate.restart=true")
    measure(again, fakes(NAMES, asked, VARIANTS), JOBS, [], tmp_path)
    assert sum(n == 12 for _, _, n, _ in asked) == 4 * len(NAMES)
    assert "measured before" not in capsys.readouterr().out
    assert len(list(tmp_path.glob("run-*"))) == 1
    measure(bench, fakes(NAMES, asked := [], VARIANTS), JOBS, [], tmp_path)
    assert asked == []
    assert "3 of 3 prompts were measured before" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        "7",
        '{"turns": 5}',
        '{"turns": []}',
        '{"turns": [1]}',
        '{"turns": [{"task": "code", "prompt_id": "1", "turn": 0}]}',
        '{"turns": [{"task": "code", "prompt_id": "1", "turn": 0, "outputs": 3}]}',
        '{"turns": [{"task": "code", "prompt_id": "1", "turn": 0, "outputs": {"plain": {}}}]}',
        '{"turns": [{"task": "math", "prompt_id": "1", "turn": 0, "outputs": {}}]}',
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_part_is_named_before_anything_is_measured(
    bench: Bench, tmp_path: Path, content: str | bytes
) -> None:
    measure(bench, fakes(NAMES[:2]), JOBS, [], tmp_path)
    path = parts(tmp_path)[1]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    parts(tmp_path)[2].unlink()
    asked: list[Asked] = []
    with pytest.raises(InputError, match=rf"{path.name}: damaged.*delete it"):
        measure(bench, fakes(NAMES[:2], asked), JOBS, [], tmp_path)
    assert not asked
    path.unlink()
    measure(bench, fakes(NAMES[:2]), JOBS, [], tmp_path)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[]",
        "{}",
        '{"chosen": []}',
        '{"chosen": {}}',
        '{"chosen": {"fastest": "a"}}',
        '{"chosen": {"fastest": "a", "lookup": "8"}}',
        '{"chosen": {"fastest": "a", "lookup": ["2"]}}',
        '{"chosen": {"fastest": "a", "lookup": "2", "plain": "c"}}',
    ],
)
def test_a_damaged_choice_is_named(
    bench: Bench, tmp_path: Path, content: str | None, whole: bool
) -> None:
    measure(bench, fakes(NAMES, variants=VARIANTS), JOBS, [], tmp_path)
    path = next(tmp_path.glob("run-*/run.json"))
    path.unlink()
    if content is not None:
        path.write_text(content)
    if not whole:
        parts(tmp_path)[2].unlink()
    asked: list[Asked] = []
    with pytest.raises(InputError, match=r"run\.json: damaged.*evaluate\.restart=true"):
        measure(bench, fakes(NAMES, asked, VARIANTS), JOBS, [], tmp_path)
    assert not asked
    again = on(bench, "evaluate.restart=true")
    measure(again, fakes(NAMES, variants=VARIANTS), JOBS, [], tmp_path)


# What it will cost, and on what -----------------------------------------------------------------


def prompts(*turns: int) -> list[TaskPrompt]:
    return [
        TaskPrompt("math", Prompt(str(i), "math", ("w3 w4 " * 10,) * n))
        for i, n in enumerate(turns)
    ]


def test_expected_minutes_grow_with_the_work(bench: Bench) -> None:
    clock = bench.profile

    def minutes(asked: list[TaskPrompt], *extra: str) -> float:
        return expected_minutes(on(bench, *extra).conf, clock, asked)

    base = minutes(prompts(1, 1))
    assert minutes([]) == 0 < base < 60
    assert minutes(prompts(1, 1, 1)) == pytest.approx(1.5 * base)
    assert minutes(prompts(2, 1)) == pytest.approx(1.5 * base)
    assert minutes(prompts(1, 1), "evaluate.max_new_tokens=24") > 1.5 * base
    few = minutes(prompts(1, 1), "system=[plain,generate,scheduler]")
    fewer = minutes(prompts(1, 1), "system=[plain,generate]")
    assert fewer < few < base
    assert minutes(prompts(1, 1), "evaluate.ablation_tasks=[code]") < base
    assert minutes(prompts(1, 1), "evaluate.ablation_tasks=[math]") == base
    slow = replace(clock, plain_ms=2 * clock.plain_ms, mid_ms=2 * clock.mid_ms)
    assert expected_minutes(bench.conf, slow, prompts(1, 1)) > base


def text(task: str, prompt: str, turn: int) -> Text:
    return Text(task, prompt, turn, [1, 2, 3, len(prompt), 5, 6], 3, 2, [0.0] * 6)


def test_turns_of_the_prompts_to_decode() -> None:
    texts = [text("a", "1", 0), text("b", "1", 0), text("a", "1", 1), text("a", "2", 0)]
    asked = [
        TaskPrompt(task, Prompt(number, "", ("w",) * 2))
        for task, number in (("a", "2"), ("a", "1"), ("a", "left out"))
    ]
    found = units(texts, asked)
    assert [[(t.task, t.prompt_id, t.turn) for t in unit] for unit in found] == [
        [("a", "2", 0)],
        [("a", "1", 0), ("a", "1", 1)],
    ]
    assert found[0][0].ids == (1, 2, 3)


def test_warm_up_turns_are_spread_and_not_measured() -> None:
    texts = [text("a" if i < 6 else "b", str(i), 0) for i in range(12)]
    decoded = [TaskPrompt("a", Prompt("0", "", ("w",))), TaskPrompt("b", Prompt("6", "", ("w",)))]

    def warm(texts: list[Text], count: int) -> list[str]:
        return [t.prompt_id for t in warm_up_turns(texts, decoded, count)]

    assert warm(texts, 2) == ["1", "7"]
    assert warm(texts, 100) == ["1", "2", "3", "4", "5", "7", "8", "9", "10", "11"]
    assert warm(texts[:3], 5) == ["1", "2"]
    assert warm([texts[0], texts[6]], 5) == ["0", "6"]  # there are no others


@pytest.mark.parametrize("value", ["math", "5", "{a: 1}"])
def test_ablation_tasks_are_a_list(bench: Bench, value: str) -> None:
    odd = on(bench)
    OmegaConf.update(odd.conf, "evaluate.ablation_tasks", OmegaConf.create(f"x: {value}").x)
    with pytest.raises(InputError, match=r"evaluate\.ablation_tasks=.*\[math\]"):
        expected_minutes(odd.conf, odd.profile, prompts(1))


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 1e-300), ("temperature", 1e-5), ("repetition_penalty", 1e-9)],
)
def test_sampling_that_would_overflow(bench: Bench, name: str, value: float) -> None:
    odd = on(bench, f"sampling.{name}={value}")
    with pytest.raises(InputError, match=rf"sampling\.{name}="):
        sampling_config(odd.conf)


# What is counted --------------------------------------------------------------------------------


def call(*counts: int) -> list[int]:
    return [*counts, 0, 0]


ROUNDS: list[dict[str, Any]] = [
    {
        "schedule": [1, 0, 1],
        "accepted": 2,
        "committed": 3,
        "context": 110,
        "tree": 9,
        "kept": 8,
        "caught_up": 1,
        "mode": "scheduled",
        "ms": {"small": 1.0, "mid": 4.0, "verify": 7.0},
        "calls": [call(0, 4, 4, 1, 0), call(1, 4, 6, 8, 2)],
        "frontiers": [1, 4, 3],
        "picks": [[[0], 1, 1], [[-1, 0, -1, 1], 8, 3]],
    },
    {
        "schedule": [0, 0, 0],
        "accepted": 0,
        "committed": 1,
        "context": 113,
        "tree": 5,
        "kept": 5,
        "caught_up": 0,
        "mode": "scheduled",
        "ms": {"small": 3.0, "verify": 5.0},
        "calls": [],
        "frontiers": [1, 1, 1],
        "picks": [],
    },
    {
        "schedule": [0, 0, 1],
        "accepted": 1,
        "committed": 1,
        "context": 114,
        "tree": 6,
        "kept": 6,
        "caught_up": 0,
        "mode": "small",
        "ms": {"small": 2.0, "mid": 2.0, "verify": 6.0},
        "calls": [call(0, 2, 2, 5, 2)],
        "frontiers": [1, 1, 0],  # N_k was empty: picks have no offset
        "picks": [[[], 5, 0]],
    },
]


def record(task: str, **rounds: list[dict[str, Any]]) -> dict[str, Any]:
    outputs = {
        name: {"tokens": [1, 2], "counted": 4, "ms": 10.0, "rounds": found}
        for name, found in rounds.items()
    }
    return {"task": task, "prompt_id": "1", "turn": 0, "prompt_tokens": 9, "outputs": outputs}


RECORDS = [
    record("math", tree=ROUNDS[:2], other=[]),
    record("code", tree=ROUNDS[2:], other=[]),
    record("news", other=[]),  # an ablation that did not run here
]


def test_calls_by_step_by_hand() -> None:
    assert calls_by_step("tree", RECORDS) == {
        "all": pytest.approx([1 / 3, 0, 2 / 3]),
        "math": [0.5, 0.0, 0.5],
        "code": [0.0, 0.0, 1.0],
    }
    assert calls_by_step("other", RECORDS) == {}


def test_cost_of_a_round_by_hand() -> None:
    """Parts that a round lacks count as 0 ms in it."""
    assert cost_of_round("tree", RECORDS) == pytest.approx({"small": 2, "mid": 2, "verify": 6})
    assert cost_of_round("other", RECORDS) == {}


def test_where_mid_calls_picked_by_hand() -> None:
    found = where_picked(ROUNDS, 4)
    assert found == {
        "calls": 3,
        "picks": 1 + 4 + 4,  # with an empty N_k, the W best of the pool
        "earlier_share": pytest.approx((0 + 2 + 2) / 9),
        "by_offset": {"-1": 2, "0": 2, "1": 1},
        "pool": pytest.approx((1 + 8 + 5) / 3),
        "frontier": pytest.approx((1 + 3 + 0) / 3),
        "usual_pool": pytest.approx((1 + 3 + 0) / 3),
    }
    assert where_picked(ROUNDS, 10)["picks"] == 1 + 4 + 5  # type: ignore[index]
    assert where_picked([], 4) is None
    assert where_picked([{**r, "picks": []} for r in ROUNDS], 4) is None


def random_rounds(rng: random.Random, depth: int, width: int) -> list[dict[str, Any]]:
    found = []
    for _ in range(rng.randint(1, 30)):
        schedule = [rng.randint(0, 1) for _ in range(depth)]
        calls, picks, frontiers = [], [], []
        for bit in schedule:
            frontiers.append(rng.randint(0, width))
            if bit:
                pool = rng.randint(1, 20)
                n = min(width, pool)
                offsets = [rng.randint(-3, 1) for _ in range(n)] if frontiers[-1] else []
                picks.append([offsets, pool, rng.randint(0, pool)])
                calls.append([0, n, n, pool, rng.randint(0, n)])
        parts = {p: rng.random() for p in ("small", "mid", "verify") if rng.random() < 0.8}
        found.append({**ROUNDS[0], "schedule": schedule, "calls": calls, "picks": picks,
                      "frontiers": frontiers, "ms": parts})  # fmt: skip
    return found


@pytest.mark.parametrize("seed", range(5))
def test_counts_equal_those_made_one_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    records = [record(task, tree=random_rounds(rng, 4, 3)) for task in "aab"]
    rounds = [r for rec in records for r in rec["outputs"]["tree"]["rounds"]]
    for task, shares in calls_by_step("tree", records).items():
        of_task = [r for rec in records if task in ("all", rec["task"])
                   for r in rec["outputs"]["tree"]["rounds"]]  # fmt: skip
        for step, share in enumerate(shares):
            calls = sum(1 for r in of_task if r["schedule"][step] == 1)
            assert share == pytest.approx(calls / len(of_task))
    for part, ms in cost_of_round("tree", records).items():
        assert ms == pytest.approx(sum(r["ms"].get(part, 0) for r in rounds) / len(rounds))
    found = where_picked(rounds, 3)
    assert found is not None
    n_calls, n_picks, earlier, pools, frontiers = 0, 0, 0, 0, 0
    offsets: Counter[str] = Counter()
    for r in rounds:
        at = 0
        for step, bit in enumerate(r["schedule"]):
            if bit:
                n_calls += 1
                frontiers += r["frontiers"][step]
                pools += r["calls"][at][CALL_FIELDS.index("pool_nodes")]
                earlier += r["calls"][at][CALL_FIELDS.index("earlier_picks")]
                n_picks += r["calls"][at][CALL_FIELDS.index("expand_nodes")]
                offsets.update(map(str, r["picks"][at][0]))
                at += 1
    assert (found["calls"], found["picks"]) == (n_calls, n_picks)
    assert found["earlier_share"] == pytest.approx(earlier / n_picks)
    assert found["by_offset"] == dict(offsets)
    assert found["pool"] == pytest.approx(pools / n_calls)
    assert found["frontier"] == pytest.approx(frontiers / n_calls)


def slow_ms(clock: LatencyProfile, r: dict[str, Any], decision_ms: float) -> float:
    """Return a round's time by the profile, part by part."""
    calls = iter(r["calls"])
    ms = clock.prune_ms + clock.accept_ms + clock.verify_ms(r["kept"], r["context"])
    for bit in r["schedule"]:
        ms += decision_ms
        if bit:
            counts = dict(zip(CALL_FIELDS, next(calls), strict=True))
            ms += clock.mid_call_ms(MidCall(**counts), r["context"])
        else:
            ms += clock.small_ms
    return ms


@pytest.mark.parametrize("decision_ms", [0.0, 0.7])
def test_rounds_are_timed_by_the_profile(decision_ms: float) -> None:
    clock = profile()
    for r in ROUNDS:
        assert clocked_ms(clock, r, decision_ms) == pytest.approx(slow_ms(clock, r, decision_ms))


def test_other_trees_are_predicted_from_their_own_rounds(bench: Bench) -> None:
    """A system with drafting rules of its own has no enumerated outcomes, whatever its role."""
    config = on(bench).build()["all_mid"].config
    assert config is not None
    systems = fakes(["plain", "generate", "tree", "own"])
    systems["tree"] = replace(systems["tree"], role="fixed", bits="10101", config=config)
    smaller = replace(config, verify_nodes=3)
    systems["own"] = replace(systems["own"], role="fixed", bits="10101", config=smaller)
    records = [record("math", plain=[], generate=[], tree=ROUNDS, own=ROUNDS)]
    found = predict(bench, systems, records, None)
    ms = sum(slow_ms(bench.profile, r, 0.0) for r in ROUNDS)
    assert found == {"own": (pytest.approx(4 / ms * bench.profile.plain_ms), "counts")}


# Cut short --------------------------------------------------------------------------------------


CUT = (
    "tracker=disabled",
    "systems.fastest.candidates=[same,generate]",
    # With one length, what assisted generation does does not depend on the clock.
    "systems.assisted.draft_tokens=[4]",
    "systems.prompt_lookup.draft_tokens=[4]",
    "evaluate.max_new_tokens=16",
    "evaluate.decode_prompts_per_task=4",
)


class Run:
    """The command line in a process of its own."""

    def __init__(self, template: Template, home: Path, data: Path, *extra: str):
        self.evaluation = data / "evaluation" / "tiny"
        arguments = overrides(home, f"paths.data={data}", *CUT, *extra)
        self.process = CommandLine(template, data / "printed", "stage=evaluate", *arguments)

    def stop_at(self, part: int, how: signal.Signals) -> tuple[int, str]:
        """Send a signal as soon as a part is there; return the status and what was said."""
        deadline = time.monotonic() + 300
        while not list(self.evaluation.glob(f"run-*/{part:05d}.json")):
            assert self.process.poll() is None, self.process.printed()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(self.process.pid, how)
        return self.end()

    def end(self) -> tuple[int, str]:
        ran = self.process.end()
        self.out = ran.stdout
        return ran.returncode, ran.stderr


def measured(evaluation: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(evaluation.glob("run-*/0*.json"))}


def without_the_clock(evaluation: Path) -> dict[str, Any]:
    """Return what does not depend on the clock, of ``results.json``."""
    found = json.loads((evaluation / "results.json").read_text())
    clocked = {"guarded"}
    counts = ("tokens", "rounds", "accepted", "calls", "same")
    return {
        "turns": found["turns"],
        "systems": [(s["name"], s["role"], s["bits"]) for s in found["systems"]],
        "predicted": {s["name"]: s["predicted"] for s in found["systems"] if s["role"] != "online"},
        "runs": {
            name: [{key: run[key] for key in counts} for run in runs]
            for name, runs in found["runs"].items()
            if name not in clocked
        },
        "guarded": [run["same"] for run in found["runs"]["guarded"]],
        "calls": {k: v for k, v in found["calls_by_step"].items() if k not in clocked},
        "picks": {k: v for k, v in found["picks"].items() if k not in clocked},
        "replay": [p for p in found["replay"]["policies"] if p["name"] != "online"],
        "fixed": found["replay"]["fixed"],
        "by_calls": found["replay"]["by_calls"],
    }


def tokens_and_rounds(evaluation: Path) -> list[Any]:
    """Return what every system said on every turn, and the rounds that do not depend on a clock."""
    keys = ("schedule", "accepted", "committed", "kept", "tree", "calls", "picks", "frontiers")
    found = []
    for part in measured(evaluation).values():
        for turn in json.loads(part)["turns"]:
            for name, output in turn["outputs"].items():
                rounds = [[r[k] for k in keys] for r in output["rounds"]]
                found.append((name, output["tokens"], None if name == "guarded" else rounds))
    return found


def test_a_run_that_is_killed_goes_on(home: Path, tmp_path: Path, template: Template) -> None:
    """Killed, then interrupted, then to the end: the same as a run that nobody touched."""
    cut, whole = write_fit(tmp_path / "cut"), write_fit(tmp_path / "whole")
    status, _ = (first := Run(template, home, cut)).stop_at(0, signal.SIGKILL)
    assert status == -signal.SIGKILL
    before = measured(first.evaluation)
    assert before and not (first.evaluation / "results.json").exists()

    status, said = (second := Run(template, home, cut)).stop_at(len(before), signal.SIGINT)
    assert status == 130
    lines = [line for line in said.splitlines() if line.strip() and "|" not in line]
    assert [line for line in lines if "stopped" in line] == lines[-1:], said
    assert "Traceback" not in said + second.out and "Error" not in said
    after = measured(second.evaluation)
    assert len(before) < len(after) < 4
    assert not (second.evaluation / "results.json").exists()

    status, said = (third := Run(template, home, cut)).end()
    assert status == 0, said
    assert f"{len(after)} of 4 prompts were measured before" in third.out
    final = measured(third.evaluation)
    assert len(final) == 4
    for found in (before, after):
        assert {name: final[name] for name in found} == found
    assert len(list(third.evaluation.glob("run-*"))) == 1

    evaluate.run(conf(home, "evaluate", f"paths.data={whole}", *CUT))
    untouched = whole / "evaluation" / "tiny"
    assert tokens_and_rounds(third.evaluation) == tokens_and_rounds(untouched)
    ours = without_the_clock(third.evaluation)
    for key, value in without_the_clock(untouched).items():
        assert ours[key] == value, key


def test_settings_are_plain_data(bench: Bench) -> None:
    """They are written beside the parts, and read back as they were."""
    what = settings(bench, fakes(["plain", "generate"]), JOBS)
    assert json.loads(json.dumps(what)) == what


def test_a_model_of_another_config_is_another_model(tiny_pair: Pair) -> None:
    """The same weights attend otherwise under another window or rope."""
    other = copy.deepcopy(tiny_pair.target)
    assert fingerprint(other) == fingerprint(tiny_pair.target)
    other.config.rope_theta = 7.0
    assert fingerprint(other) != fingerprint(tiny_pair.target)
