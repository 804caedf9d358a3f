"""Collections killed at random instants, again and again, and gone on with: nothing is lost."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.conftest import KILLS, PROMPTS
from tests.faults.harness import Bench, Reader
from tests.processes import INT, KILL, ROOT, TERM, children, gone, send

STORMS = list(itertools.product(("0", "2"), ("KILL", "TERM"), ("driver", "group")))
EACH = -(-KILLS // len(STORMS))


@pytest.mark.parametrize(("workers", "kind", "whom"), STORMS)
def test_killed_again_and_again(
    bench: Bench, whole: dict[str, str], workers: str, kind: str, whom: str
) -> None:
    rng = random.Random(f"{workers} {kind} {whom}")
    number = getattr(signal, f"SIG{kind}")
    kills, reached = 0, [0]
    extra = (f"engine.workers={workers}", f"collect.batch={rng.choice([1, 3, 24])}")
    with Reader(bench.dataset) as reader:
        while kills < EACH:
            orphans: list[int] = []

            def strike(pid: int, orphans: list[int] = orphans) -> None:
                if rng.random() < 0.8:  # the rest strike while it starts
                    bench.until(pid, bench.started)
                time.sleep(rng.uniform(0.0, 1.0))
                orphans += children(pid)
                if whom == "group":
                    try:
                        os.killpg(pid, number)
                    except ProcessLookupError:
                        return
                else:
                    send(pid, number)

            # Once it is done there is nothing left to kill: a new dataset is begun beside it.
            force = ["collect.force=true"] if reached[-1] >= PROMPTS else []
            code = bench.collect(*extra, *force, kill=strike)
            assert gone(orphans), "workers outlive their driver"
            assert code in (0, -number, 128 + number), bench.output
            kills += code != 0
            if code == 128 + number:
                assert not bench.hidden(), "a run that ends in order leaves nothing half done"
            reached.append(len(bench.parts()))
            assert bench.parts().items() <= whole.items()
        assert bench.collect(*extra) == 0, bench.output
    assert not reader.torn
    assert reader.reads >= PROMPTS
    assert bench.parts() == whole
    assert not bench.hidden()
    assert sorted(bench.units().values()) == ["done"] * PROMPTS + ["empty"]


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("number", [TERM, INT])
def test_a_signal_finishes_the_unit_and_says_how_to_go_on(
    bench: Bench, whole: dict[str, str], workers: str, number: int
) -> None:
    slow = {"units_take": [0.2]}
    extra = f"engine.workers={workers}"

    def strike(pid: int) -> None:
        bench.until(pid, lambda: len(bench.parts()) >= 3)
        send(pid, number)

    code = bench.collect(extra, faults=slow, kill=strike)
    assert code == 128 + number
    assert "the same command goes on" in bench.output
    done = [status for status in bench.units().values() if status in ("done", "empty")]
    assert f"stopped; {len(done)} of {PROMPTS + 1} prompts are collected" in bench.output
    assert len(bench.parts()) in (len(done), len(done) - 1)  # one unit has no states
    assert 0 < len(done) < PROMPTS + 1 and not bench.hidden()
    assert "Traceback" not in bench.output
    assert bench.collect(extra) == 0, bench.output
    assert f"{len(done)} are there already" in bench.output
    assert bench.parts() == whole


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_second_signal_ends_it_at_once(bench: Bench, whole: dict[str, str], workers: str) -> None:
    orphans: list[int] = []

    def strike(pid: int) -> None:
        bench.until(pid, lambda: any(e["event"] == "worker_ready" for e in bench.events()))
        time.sleep(1.0)
        orphans.extend(children(pid))
        send(pid, INT)
        time.sleep(0.3)
        send(pid, INT)

    endless = {"units_take": [30.0]}
    started = time.monotonic()
    code = bench.collect(f"engine.workers={workers}", faults=endless, kill=strike)
    assert code == -INT
    assert gone(orphans)
    assert time.monotonic() - started < 25, "it waited for the unit"
    assert bench.collect(f"engine.workers={workers}") == 0
    assert bench.parts() == whole


def test_workers_killed_while_the_driver_lives(bench: Bench, whole: dict[str, str]) -> None:
    rng = random.Random(3)
    killed = []

    def strike(pid: int) -> None:
        bench.until(pid, bench.started)
        for _ in range(4):
            time.sleep(0.6)
            found = children(pid)
            if found:
                killed.append(rng.choice(found))
                send(killed[-1], KILL)

    code = bench.collect("engine.workers=2", faults={"units_take": [0.3]}, kill=strike)
    assert code == 0, bench.output
    assert killed and "worker_lost" in bench.output
    assert bench.parts() == whole and not bench.hidden()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_the_command_line_itself_is_killed(
    bench: Bench, whole: dict[str, str], start_method: str
) -> None:
    """As a user runs it: workers that are started anew, a driver that imports everything."""
    workers = {"forkserver": 2, "spawn": 1}[start_method]  # each spawned one imports everything
    extra = (f"engine.workers={workers}", f"engine.start_method={start_method}")
    command = [sys.executable, "-m", "pipeline.run", *bench.arguments(*extra)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    log = bench.folder / "log.txt"
    with log.open("w") as output:
        driver = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, text=True
        )
        bench.until(driver.pid, lambda: len(bench.parts()) >= 2, seconds=120)
        assert driver.poll() is None, log.read_text()
        orphans = children(driver.pid)
        send(driver.pid, KILL)
        assert driver.wait(timeout=30) == -KILL
    assert len(orphans) >= 2 and gone(orphans), "workers outlive their driver"
    assert bench.parts().items() <= whole.items()
    assert bench.collect("engine.workers=0") == 0, bench.output
    assert bench.parts() == whole


@pytest.mark.parametrize("number", [1, 2, 7])
def test_killed_between_a_file_and_its_record(
    bench: Bench, whole: dict[str, str], number: int
) -> None:
    """The file is there and does not count; the first is no other case than any."""
    assert bench.collect("engine.workers=0", faults={"dies_before_record": [number]}) == -KILL
    assert len(bench.parts()) == number and len(bench.units()) == number - 1
    assert bench.collect("engine.workers=0") == 0, bench.output
    assert bench.parts() == whole


def test_finished_collections_do_nothing(bench: Bench, whole: dict[str, str]) -> None:
    assert bench.collect("engine.workers=0") == 0
    stamps = {p: p.stat().st_mtime_ns for p in bench.dataset.rglob("*.parquet")}
    assert bench.collect("engine.workers=2") == 0
    assert f"all {PROMPTS + 1} prompts are collected already" in bench.output
    assert {p: p.stat().st_mtime_ns for p in bench.dataset.rglob("*.parquet")} == stamps
    assert bench.parts() == whole


def test_part_of_a_dataset_is_its_missing_units(bench: Bench, whole: dict[str, str]) -> None:
    assert bench.collect("engine.workers=0", "collect.prompts_per_task=5") == 0
    first = bench.parts()
    assert len(first) == 5
    for name in sorted(first)[:2]:
        (bench.dataset / name).unlink()
    assert bench.collect("engine.workers=0") == 0
    assert "3 are there already" in bench.output
    assert bench.parts() == whole


def test_order_and_workers_do_not_matter(
    bench: Bench, whole: dict[str, str], tmp_path: Path
) -> None:
    lines = (bench.home / "prompts.jsonl").read_text().splitlines()
    random.Random(0).shuffle(lines)
    other = tmp_path / "shuffled.jsonl"
    other.write_text("\n".join(lines) + "\n")
    assert bench.collect(f"task.path={other}", "engine.workers=3", "collect.batch=2") == 0
    assert bench.parts() == whole
