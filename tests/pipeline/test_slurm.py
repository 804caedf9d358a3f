"""Shards of one dataset as jobs: a killed one is gone on with, and two of the same are refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from pipeline import collect
from pipeline.run import CONF
from pipeline.store import DatasetBusyError
from tests.pipeline.conftest import conf, overrides
from tests.pipeline.datasets import part_sums, until, write_place
from tests.processes import CommandLine, Template

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="SLURM is an extra")

PROMPTS = 8


def test_the_experiment_asks_slurm_for_a_job_a_shard() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        chosen = ["stage=collect", "experiment=slurm", "collect.shards=3"]
        given = compose("config", chosen, return_hydra_config=True)
    assert given.hydra.sweeper.params["collect.shard"] == "range(3)"
    assert given.hydra.mode.name == "MULTIRUN"
    launcher = given.hydra.launcher
    assert launcher._target_.endswith(".SlurmLauncher")
    assert (launcher.timeout_min, launcher.gpus_per_node, launcher.mem_gb) == (720, 1, 64)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_place(tmp_path, PROMPTS)
    return tmp_path


def options(place: Path, name: str, *extra: str) -> list[str]:
    return [
        f"paths.data={place / 'data'}",
        f"paths.trajectories={place / name}",
        f"task.path={place / 'prompts.jsonl'}",
        f"collect.prompts_per_task={PROMPTS}",
        "collect.states_per_turn=0",
        "collect.max_new_tokens=30",
        "collect.replay_rounds=0",
        "engine.workers=0",
        *extra,
    ]


def start_jobs(template: Template, home: Path, place: Path) -> CommandLine:
    local = ["hydra/launcher=submitit_local", "hydra.launcher.gpus_per_node=0"]
    extra = options(place, "jobs", "collect.shards=2", *local)
    given = [o for o in overrides(home, *extra) if not o.startswith("collect.shard=")]
    command = ("-m", "stage=collect", "experiment=slurm", *given)
    faults = {"jobs_without_results": [1.0]}
    return CommandLine(template, place / "printed", *command, faults=faults)


def holder(place: Path, shard: int) -> int | None:
    """Return the process that has a shard."""
    path = place / "jobs" / "collect" / f".pair=tiny.lock-{shard}-of-2"
    try:
        return int(json.loads(path.read_text())["pid"])
    except (FileNotFoundError, ValueError):
        return None


def test_jobs_are_killed_refused_and_gone_on_with(
    home: Path, place: Path, template: Template, capsys: pytest.CaptureFixture[str]
) -> None:
    collect.run(conf(home, "collect", *options(place, "alone")))
    alone = part_sums(place / "alone")
    jobs = start_jobs(template, home, place)

    def under_way() -> bool:
        begun = holder(place, 0) is not None and len(part_sums(place / "jobs")) > 0
        return begun or jobs.poll() is not None

    until(under_way, "the first shard")
    first = holder(place, 0)
    assert first is not None and jobs.poll() is None, jobs.printed()
    os.kill(first, signal.SIGSTOP)  # so that it holds its shard while others ask for it
    for extra in ([], ["collect.shards=2", "collect.shard=0"]):
        with pytest.raises(DatasetBusyError, match="is collecting into it"):
            collect.run(conf(home, "collect", *options(place, "jobs", *extra)))
    os.kill(first, signal.SIGKILL)
    printed = jobs.end()
    assert printed.returncode == 1, printed
    assert 0 < len(part_sums(place / "jobs")) < len(alone)
    # The same command again.
    printed = start_jobs(template, home, place).end()
    assert printed.returncode == 0, printed
    assert part_sums(place / "jobs") == alone
    capsys.readouterr()
    collect.run(conf(home, "collect", *options(place, "jobs")))
    assert f"all {PROMPTS} prompts are collected already" in capsys.readouterr().out
