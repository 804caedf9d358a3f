"""Shards: runs that share a dataset, each with its part of the prompts."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from pipeline.manifest import read_manifest
from pipeline.store import LocalStore
from tests.faults.conftest import PROMPTS
from tests.faults.harness import Bench
from tests.processes import children


def shard(number: int, count: int = 2) -> tuple[str, ...]:
    return f"collect.shard={number}", f"collect.shards={count}", "engine.workers=0"


def beside(run: Bench, *arguments: str, log: Path) -> threading.Thread:
    """Start a collection; its exit status and output are in ``codes`` of the thread."""
    pid = run.template.start(run.arguments(*arguments), log, {"units_take": [0.1]})
    thread = threading.Thread(target=lambda: codes.append(run.template.wait(pid)))
    codes: list[int] = []
    thread.codes = codes  # type: ignore[attr-defined]
    thread.start()
    return thread


def test_shards_at_once_make_one_dataset(
    bench: Bench, whole: dict[str, str], tmp_path: Path
) -> None:
    other = beside(bench, *shard(1), log=tmp_path / "other.txt")
    assert bench.collect(*shard(0), faults={"units_take": [0.1]}) == 0, bench.output
    other.join()
    assert other.codes == [0], (tmp_path / "other.txt").read_text()  # type: ignore[attr-defined]
    assert bench.parts() == whole and not bench.hidden()
    assert bench.collect("engine.workers=0") == 0
    assert f"all {PROMPTS + 1} prompts are collected already" in bench.output


def test_shards_of_two_configs_do_not_mix(bench: Bench, tmp_path: Path) -> None:
    """Begun in the same instant: one says what the dataset is, the other is refused."""
    other = beside(bench, *shard(1), "seed=1", log=tmp_path / "other.txt")
    code = bench.collect(*shard(0), "seed=0", faults={"units_take": [0.1]})
    other.join()
    codes = [code, *other.codes]  # type: ignore[attr-defined]
    output = bench.output + (tmp_path / "other.txt").read_text()
    assert sorted(codes) == [0, 2], output
    assert "seed: " in output and "collect.force=true" in output
    found = read_manifest(LocalStore(bench.dataset))
    assert not found.faults and found.header is not None
    assert found.header["config"]["seed"] == codes.index(0)


def test_a_shard_leaves_the_unfinished_files_of_another_alone(
    bench: Bench, whole: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "other.txt"
    extra = ("collect.shard=1", "collect.shards=2", "engine.workers=1")
    pid = bench.template.start(bench.arguments(*extra), log, {"units_take": [0.2]})
    bench.until(pid, lambda: len(bench.parts()) >= 1)
    try:
        for _ in range(20):
            os.kill(pid, signal.SIGSTOP)  # its worker leaves a file that nobody renames
            time.sleep(0.7)
            if bench.hidden():
                break
            os.kill(pid, signal.SIGCONT)  # it was between two units
            time.sleep(0.03)
        assert bench.hidden() and children(pid)
        assert bench.collect(*shard(0)) == 0, bench.output
        assert bench.hidden()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert bench.template.wait(pid) == 0, log.read_text()
    assert bench.parts() == whole and not bench.hidden()


def test_runs_that_divide_otherwise_or_not_at_all_are_refused(
    bench: Bench, whole: dict[str, str], tmp_path: Path
) -> None:
    refused: list[tuple[int, str]] = []

    def others(pid: int) -> None:
        bench.until(pid, lambda: len(bench.parts()) >= 1)
        for arguments in (shard(1, 3), shard(0, 2), ("engine.workers=0",)):
            log = tmp_path / f"refused-{len(refused)}.txt"
            other = bench.template.start(bench.arguments(*arguments), log)
            refused.append((bench.template.wait(other), log.read_text()))

    assert bench.collect(*shard(0), faults={"units_take": [1.0]}, kill=others) == 0, bench.output
    assert [code for code, _ in refused] == [2, 2, 2], refused
    assert (
        "collect.shards=3" in refused[0][1] and "collect.shards=2; give the same" in refused[0][1]
    )
    for _, output in refused[1:]:
        assert "is collecting into it" in output
    assert bench.collect("engine.workers=0") == 0, bench.output
    assert bench.parts() == whole
