"""stage=leave_out and stage=ablate on whole texts of two pairs, and a sweep from the shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import DictConfig

from pipeline import ablate, leaving, report
from pipeline.fitting import some_states
from pipeline.hardware import linear_profile, outcomes
from pipeline.replay import replay, texts_of
from pipeline.tries import Tries, join, read_tries
from tests.pipeline.small import DEPTH, FEW, TASKS, config, write_selection
from tests.pipeline.synthetic import write_texts
from tests.processes import CommandLine, Template
from treegraft_core import InputError

PAIRS = ("one", "two")
COSTS = {
    "target_ms": 80.0,
    "mid_ms": 8.0,
    "small_ms": 0.3,
    "decision_ms": 0.1,
    "verify_slope": 0.001,
    "mid_slope": 0.001,
    "context_slope": 0.05,
    "tree_ms": 0.1,
}
FLAT = "{" + ",".join(f"{k}: {v}" for k, v in COSTS.items()) + "}"
HERE = (
    *(o for o in FEW if not o.startswith(("value.max", "distill.max", "distill.roll"))),
    "pair=local",
    "pair.name=one",
    "pair.target.path=t",
    "pair.mid.path=m",
    "fit.name=both",
    f"fit.pairs=[{','.join(PAIRS)}]",
    f"replay.hardware=[logged,{{flat: {FLAT}}}]",
    "replay.bootstrap=30",
    "value.max_epochs=2",
    "distill.max_epochs=8",
    "distill.rollout_epochs=2",
)


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(report, "git_sha", lambda: "test")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leaving")
    for seed, pair in enumerate(PAIRS):
        write_texts(folder, pair, 8, 6, seed, "collect", DEPTH, TASKS)
        write_texts(folder, pair, 4, 6, 9 + seed, "evaluate", DEPTH, TASKS)
    write_selection(folder, "both", list(PAIRS))
    return folder


def conf_of(data: Path, stage: str, *overrides: str) -> DictConfig:
    return config(data, stage, *HERE, *overrides)


def split_of(data: Path, split: str, pair: str) -> Tries:
    return read_tries(data / "trajectories" / split / f"pair={pair}", pair, "", DEPTH)


# --- leave_out ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def left_out(data: Path) -> dict[str, Any]:
    leaving.run(conf_of(data, "leave_out", "label=hindsight"))
    path = data / "leave_out" / "both" / "logged" / "leave_out.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_task_and_pair_is_left_out_once_on_every_machine(left_out: dict[str, Any]) -> None:
    cells = {(c["left_out"], c["hardware"], c["pair"], c["task"]) for c in left_out["cells"]}
    machines, expected = ("logged", "flat"), set()
    for hardware in machines:
        for pair in PAIRS:
            for task in (None, *TASKS):
                expected |= {(left, hardware, pair, task) for left in ("nothing", f"pair {pair}")}
            expected |= {(f"task {task}", hardware, pair, task) for task in TASKS}
    shown = {
        (left, hardware, pair, None if task == "all" else task)
        for left, hardware, pair, task in cells
    }
    # A task left out has one cell, with or without the one of all its tasks.
    assert expected <= shown
    assert {c for c in shown - expected if not (c[0].startswith("task") and c[3] is None)} == set()


def test_what_is_left_out_is_not_fitted_on(data: Path) -> None:
    tries = join([split_of(data, "collect", pair) for pair in PAIRS])
    found = leaving.splits(tries)
    names = ["nothing", *(f"task {t}" for t in sorted(TASKS)), *(f"pair {p}" for p in PAIRS)]
    assert [s.name for s in found] == names
    for split in found:
        train, test = split.train(tries), split.test(tries)
        if split.key is None:
            assert len(train) == len(test) == len(tries)
        else:
            assert set(test.states[split.key]) == {split.left_out}
            assert split.left_out not in set(train.states[split.key])
            assert len(train) + len(test) == len(tries)
    alone = leaving.splits(tries.take((tries.states["pair"] == "one").to_numpy()))
    assert [s.name for s in alone] == names[:3]


def test_figures_are_those_of_held_out_prompts(data: Path, left_out: dict[str, Any]) -> None:
    """The endpoint and the oracle of a cell, replayed here from the evaluate split alone."""
    tries = split_of(data, "evaluate", "two")
    for hardware in ("logged", "flat"):
        found = outcomes(tries, linear_profile(tries, COSTS) if hardware == "flat" else None)
        cell = next(
            c
            for c in left_out["cells"]
            if (c["left_out"], c["hardware"], c["pair"]) == ("pair two", hardware, "two")
            and c["task"] in (None, "all")
        )
        assert cell["prompts"] == 4 and cell["policy"] == "scheduler"
        rates = {
            name: replay(texts_of(tries), found, np.full(len(tries), leaf)).rate("committed")
            for name, leaf in (("All Small", 0), ("All Mid", (1 << DEPTH) - 1))
        }
        assert cell["endpoint"] == max(rates, key=rates.__getitem__)
        assert 1e3 * max(rates.values()) * cell["over_endpoint"][0] == pytest.approx(cell["eta"][0])
        assert 0 < cell["over_endpoint"][0] <= cell["oracle"] * (1 + 1e-9)
        assert cell["eta"][0] <= cell["eta_without_decisions"] * (1 + 1e-9)


def test_held_out_states_must_be_whole_texts(data: Path) -> None:
    sampled = data / "trajectories" / "sampled"
    for pair in PAIRS:
        part = data / "trajectories" / "evaluate" / f"pair={pair}" / "task=math" / "part-0.parquet"
        there = sampled / f"pair={pair}" / "task=math" / "part-0.parquet"
        there.parent.mkdir(parents=True, exist_ok=True)
        table = pq.ParquetFile(part).read()
        keep = [position != 2 for position in table["position"].to_pylist()]
        pq.write_table(table.filter(keep), there)
    with pytest.raises(InputError, match=r"states of one were sampled.*states_per_turn=0"):
        leaving.run(conf_of(data, "leave_out", f"replay.split={sampled}"))


def test_some_states_are_whole_prompts_of_every_pair_and_task(data: Path) -> None:
    tries = join([split_of(data, "collect", pair) for pair in PAIRS])
    some = some_states(tries, 30)
    assert some_states(tries, 0) is tries
    keys = ["pair", "task", "prompt_id"]
    sizes, wholes = some.states.groupby(keys).size(), tries.states.groupby(keys).size()
    assert (sizes == wholes[sizes.index]).all()
    assert len(sizes) < len(wholes)
    assert set(some.states["pair"]) == set(PAIRS) and set(some.states["task"]) == set(TASKS)


# --- ablate ---------------------------------------------------------------------------------------


@pytest.fixture
def ablations(data: Path, tmp_path: Path) -> Path:
    """Return a data folder of its own for the jobs, on the same trajectories."""
    write_selection(tmp_path, "both", list(PAIRS))
    (tmp_path / "trajectories").symlink_to(data / "trajectories")
    return tmp_path


def jobs_in(data: Path) -> list[Path]:
    return sorted((data / "ablation" / "both").glob("job-*.json"))


def test_a_job_is_judged_on_held_out_prompts_and_not_run_again(
    ablations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = conf_of(ablations, "ablate", "label=hindsight")
    ablate.run(conf)
    (path,) = jobs_in(ablations)
    job = json.loads(path.read_text())
    assert [(c["pair"], c["hardware"]) for c in job["cells"]] == [
        (pair, hardware) for pair in PAIRS for hardware in ("logged", "flat")
    ]
    tries = split_of(ablations, "evaluate", "one")
    run = replay(texts_of(tries), outcomes(tries), np.zeros(len(tries), np.int64))
    prompts = sorted(set(texts_of(tries).groups.tolist()))
    for name, (tokens, ms) in zip(prompts, job["cells"][0]["sums"]["All Small"], strict=True):
        mine = texts_of(tries).groups == name
        assert (tokens, ms) == pytest.approx((run.tokens[mine].sum(), run.ms[mine].sum()))
    for cell in job["cells"]:
        total = {name: np.sum(sums, axis=0) for name, sums in cell["sums"].items()}
        assert len({tokens for tokens, _ in total.values()}) == 1
        assert min(ms for _, ms in total.values()) == pytest.approx(total["oracle"][1])
        assert total["scheduler, free"][1] <= total["scheduler"][1]
    before = path.read_bytes()

    def never(*_: Any) -> Any:
        raise AssertionError("fitted again")

    monkeypatch.setattr(ablate, "fit_scheduler", never)
    ablate.run(conf)
    assert path.read_bytes() == before and jobs_in(ablations) == [path]
    assert "hindsight" in (ablations / "ablation" / "both" / "tables.txt").read_text()
    with pytest.raises(AssertionError, match="fitted again"):
        ablate.run(conf_of(ablations, "ablate", "label=hindsight", "seed=1"))
    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(InputError, match=rf"{path.name}: damaged .*delete it first") as error:
        ablate.run(conf)
    assert "\n" not in str(error.value)


def test_the_mean_over_seeds_and_the_gap() -> None:
    """Two seeds, one prompt twice as long: ratios of sums, by hand."""

    def job(seed: int, mine: float) -> dict[str, Any]:
        ms = {"All Small": 100.0, "All Mid": 150.0, "oracle": 50.0, "scheduler": mine}
        sums = {name: [[10, value], [20, 2 * value]] for name, value in ms.items()}
        cells = [{"pair": "p", "hardware": "h", "sums": sums}]
        return {"axes": {"label": "x"}, "seed": seed, "cells": cells, "metrics": {}}

    found = ablate.cell_figures([job(0, 80.0), job(1, 62.5)], 0, "scheduler", 40)
    assert found["ratio"] == pytest.approx((100 / 80 + 100 / 62.5) / 2)
    assert found["low"] == found["high"] == pytest.approx(found["ratio"])
    assert found["share"] == pytest.approx((0.25 + 0.6) / 2)
    assert found["seeds"] == pytest.approx((1.6 - 1.25) / 2)
    (row,) = ablate.ablation_rows([job(0, 80.0), job(1, 62.5)], "scheduler", 40)
    assert (row["label"], row["seeds"], row["least"]) == ("x", 2, pytest.approx(1.425))
    assert row["gap closed, %"] == pytest.approx(42.5)
    assert ablate.ablation_rows([job(0, 80.0)], "online", 40) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ablate.signals=best", r"ablate\.signals=best: choose one of chosen, paper, all"),
        ("distill.loss=hinge", r"distill\.loss=hinge"),
        ("replay.hardware=[fast.json]", r"replay\.hardware=fast\.json: no such file"),
    ],
)
def test_bad_choices_are_named_before_anything_is_fitted(
    ablations: Path, override: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ablate.run(conf_of(ablations, "ablate", override))
    assert jobs_in(ablations) == []


def test_a_sweep_from_the_command_line(ablations: Path, template: Template, tmp_path: Path) -> None:
    """experiment=ablation with fewer values of every axis: one file a job, a table of all."""
    few = (
        "{label: 'hindsight,hindsight_rate', seed: '0,1', distill.loss: regression, "
        "hardware: logged, ablate.signals: chosen}"
    )
    given = [o for o in HERE if not o.startswith("distill.rollout")]
    command = ("stage=ablate", "experiment=ablation", f"paths.data={ablations}", *given)
    done = CommandLine(
        template, tmp_path, *command, "ablate.states=40", f"hydra.sweeper.params={few}"
    ).end()
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    jobs = [json.loads(path.read_text()) for path in jobs_in(ablations)]
    ways = sorted((job["axes"]["label"], job["axes"]["rollouts"], job["seed"]) for job in jobs)
    assert ways == [
        (label, "no", seed) for label in ("hindsight", "hindsight_rate") for seed in (0, 1)
    ]
    assert "4 jobs" in done.stdout
