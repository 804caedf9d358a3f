"""The table of faults: what goes wrong, what the run says, and what is there after it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.dataset import WHOLE
from pipeline.store import LocalStore
from tests.faults.conftest import PROMPTS
from tests.faults.harness import Bench
from tests.processes import INT, ROOT, send

WORKERS = pytest.mark.parametrize("workers", ["0", "2"])


def same_but(bench: Bench, whole: dict[str, str], *lost: str) -> bool:
    """Tell whether all files but those of some prompts are there, and no others."""
    names = {f"task=file/part-{name}.parquet" for name in lost}
    return bench.parts() == {k: v for k, v in whole.items() if k not in names}


def one_line(bench: Bench, *words: str) -> str:
    """Return the one error line of the output; it holds all words."""
    assert "Traceback" not in bench.output, bench.output
    lines = [x for x in bench.output.splitlines() if x.startswith("error: ")]
    assert len(lines) == 1, bench.output
    for word in words:
        assert word in lines[0], lines[0]
    return lines[0]


def went_on(bench: Bench, whole: dict[str, str], *extra: str) -> None:
    """Run the same command without the fault: everything is there then."""
    assert bench.collect("engine.workers=0", *extra) == 0, bench.output
    assert bench.parts() == whole and not bench.hidden()


@WORKERS
def test_the_disk_fills(bench: Bench, whole: dict[str, str], workers: str) -> None:
    each = 120_000 // max(1, int(workers))
    code = bench.collect(f"engine.workers={workers}", faults={"disk_fills": [each]})
    assert code == 1
    one_line(bench, "No space left on device", "free space")
    assert 0 < len(bench.parts()) < PROMPTS and not bench.hidden()
    assert bench.parts().items() <= whole.items()
    went_on(bench, whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 120 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_real_disk_fills(bench: Bench, whole: dict[str, str], small_disk: Path) -> None:
    """Until the trajectories are moved to a larger one."""
    where = f"paths.trajectories={small_disk}"
    code = bench.collect("engine.workers=0", where)
    assert code == 1
    one_line(bench, "No space left on device", "free space")
    found = small_disk / "collect" / "pair=tiny"
    assert 0 < len(list(found.rglob("part-*.parquet"))) < PROMPTS
    assert not list(found.rglob(".*.tmp"))
    shutil.copytree(found, bench.dataset)
    went_on(bench, whole)
    assert "are there already" in bench.output


@pytest.mark.parametrize("place", ["cache/texts", "data/trajectories/meta/tiny"])
def test_a_disk_beside_the_dataset_fills(
    bench: Bench, whole: dict[str, str], tmp_path: Path, small_disk: Path, place: str
) -> None:
    """Texts are not kept, or the log is not: the dataset is whole all the same."""
    (small_disk / "full").write_bytes(bytes(1 << 17)[: 118 << 10])
    if place.startswith("cache"):
        extra = f"paths.cache={small_disk}"
    else:
        where = bench.folder / place
        where.parent.mkdir(parents=True)
        where.symlink_to(small_disk)
        extra = "engine.retries=2"
    code = bench.collect("engine.workers=0", extra)
    assert "Traceback" not in bench.output, bench.output
    assert code == (0 if place.startswith("cache") else 1), bench.output
    said = "is decoded again" if place.startswith("cache") else "no space left"
    assert said in bench.output
    assert bench.parts() == whole and "failed" not in bench.units().values()


@WORKERS
def test_memory_runs_out_for_a_pack(bench: Bench, whole: dict[str, str], workers: str) -> None:
    """The prompt is tried again, one state a pack; in float64 its rows are the same."""
    faults = {"memory_runs_out": ["p3", False]}
    assert bench.collect(f"engine.workers={workers}", faults=faults) == 0, bench.output
    record = bench.records()["p3"]
    assert (record["attempt"], record["pack"]) == (2, 1)
    assert "question_id=p3" in bench.output and "MemoryError" in bench.output
    assert bench.parts() == whole


@WORKERS
def test_memory_runs_out_for_a_prompt(bench: Bench, whole: dict[str, str], workers: str) -> None:
    """It is recorded as failed, and the run goes on."""
    faults = {"memory_runs_out": ["p3", True]}
    assert bench.collect(f"engine.workers={workers}", faults=faults) == 0, bench.output
    assert bench.units()["file", "p3"] == "failed"
    assert "failed: the same command tries them again" in bench.output
    assert same_but(bench, whole, "p3")
    went_on(bench, whole)


def test_too_little_address_space(bench: Bench, whole: dict[str, str]) -> None:
    """A limit of the operating system: nothing is allocated, prompts fail, the run says so."""
    code = bench.collect("engine.workers=2", "engine.retries=1", faults={"address_space": [0]})
    assert code in (0, 1)
    assert "Traceback" not in bench.output, bench.output
    assert bench.parts().items() <= whole.items() and not bench.hidden()
    statuses = set(bench.units().values()) if bench.dataset.exists() else set()
    assert "failed" in statuses, bench.output
    went_on(bench, whole)


@pytest.mark.parametrize("role", ["target", "mid"])
@WORKERS
def test_logits_that_are_not_numbers(bench: Bench, tmp_path: Path, workers: str, role: str) -> None:
    """A poisoned model: prompts that meet it fail by name, the others are as with the sound one."""
    word = 41  # no prompt has it but the one below
    lines = (bench.home / "prompts.jsonl").read_text().splitlines()
    odd = {"question_id": "odd", "category": "words", "turns": [f"w3 w9 w{word} w3 w9"]}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join([*lines[:4], json.dumps(odd), *lines[4:8]]) + "\n")
    model = tmp_path / role
    shutil.copytree(bench.home / role, model)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][word] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    extra = (f"task.path={prompts}", f"pair.{role}.path={model}", "collect.failures=1")
    assert bench.collect(f"engine.workers={workers}", *extra) == 0, bench.output
    assert bench.units()["file", "odd"] == "failed"
    reason = bench.records()["odd"]["reason"]
    assert "question_id=odd" in reason and "not finite" in reason and "position" in reason
    if role == "target":
        assert "at position 2" in reason
    assert "part-odd" not in " ".join(bench.parts())
    assert sum(status == "done" for status in bench.units().values()) >= 1


@WORKERS
@pytest.mark.parametrize("fault", ["tokenizer_panics", "tokenizer_crashes"])
def test_a_prompt_that_crashes_the_tokenizer(
    bench: Bench, tmp_path: Path, whole: dict[str, str], workers: str, fault: str
) -> None:
    if fault == "tokenizer_crashes" and workers == "0":
        pytest.skip("the process itself would end")
    lines = (bench.home / "prompts.jsonl").read_text().splitlines()
    odd = {"question_id": "odd", "category": "words", "turns": ["w3 w47 w3"]}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join([*lines[:5], json.dumps(odd), *lines[5:]]) + "\n")
    extra = (f"engine.workers={workers}", f"task.path={prompts}", "engine.retries=1")
    assert bench.collect(*extra, faults={fault: ["w47"]}) == 0, bench.output
    assert bench.units()["file", "odd"] == "failed"
    assert "question_id=odd" in bench.records()["odd"]["reason"]
    assert bench.parts() == whole


def test_a_worker_is_lost_in_a_prompt(bench: Bench, whole: dict[str, str], tmp_path: Path) -> None:
    faults = {"worker_dies": ["p6", str(tmp_path / "died"), 2]}
    assert bench.collect("engine.workers=2", faults=faults) == 0, bench.output
    assert bench.records()["p6"]["attempt"] == 3
    assert bench.output.count("worker_lost") == 2 and "signal 9" in bench.output
    assert bench.parts() == whole


def test_a_prompt_that_always_loses_its_worker(
    bench: Bench, whole: dict[str, str], tmp_path: Path
) -> None:
    faults = {"worker_dies": ["p6", str(tmp_path / "died"), 99]}
    assert bench.collect("engine.workers=2", "engine.retries=1", faults=faults) == 0, bench.output
    assert bench.units()["file", "p6"] == "failed"
    assert "signal 9" in bench.records()["p6"]["reason"]
    assert same_but(bench, whole, "p6")
    went_on(bench, whole)


def test_a_straggler_does_not_hold_the_run(
    bench: Bench, whole: dict[str, str], tmp_path: Path
) -> None:
    faults = {
        "worker_hangs": ["p13", str(tmp_path / "hung"), 60.0],
        "impatient": [2.0, 0.5],
    }
    started = time.monotonic()
    assert bench.collect("engine.workers=2", faults=faults) == 0, bench.output
    assert time.monotonic() - started < 50, "it waited for the straggler"
    assert any(e["event"] == "unit_again" and e["why"] == "slow" for e in bench.events())
    assert bench.parts() == whole and not bench.hidden()


def test_a_worker_that_hangs_is_ended(bench: Bench, whole: dict[str, str], tmp_path: Path) -> None:
    faults = {"worker_hangs": ["p2", str(tmp_path / "hung"), 60.0]}
    extra = ("engine.workers=1", "engine.unit_timeout_s=3")
    assert bench.collect(*extra, faults=faults) == 0, bench.output
    assert "unit_overdue" in bench.output
    assert bench.parts() == whole


@WORKERS
def test_the_clock_jumps(bench: Bench, whole: dict[str, str], workers: str) -> None:
    assert bench.collect(f"engine.workers={workers}", faults={"clock_jumps": [4]}) == 0
    assert bench.parts() == whole


def test_two_runs_on_one_dataset(bench: Bench, whole: dict[str, str]) -> None:
    """The second refuses in one line, or waits if asked to."""
    codes = []

    def start(name: str, *extra: str) -> int:
        log = bench.folder / name
        return bench.template.start(bench.arguments("engine.workers=0", *extra), log)

    def second(pid: int) -> None:
        bench.until(pid, lambda: len(bench.parts()) > 0)
        before = bench.parts()
        codes.append(bench.template.wait(start("second.txt")))
        assert bench.parts().items() >= before.items()
        waiting.append(start("third.txt", "collect.wait=true"))

    waiting: list[int] = []
    code = bench.collect("engine.workers=0", faults={"units_take": [0.4]}, kill=second)
    assert code == 0, bench.output
    assert [*codes, bench.template.wait(waiting[0])] == [2, 0]
    refused, waited = ((bench.folder / f"{n}.txt").read_text() for n in ("second", "third"))
    line = next(x for x in refused.splitlines() if x.startswith("error: "))
    assert "is collecting into it" in line and "collect.wait=true" in line
    assert "Traceback" not in refused
    assert "waiting: " in waited and "collected already" in waited
    assert bench.parts() == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("collect.max_new_tokens=9", "collect.max_new_tokens: 10 in the dataset, 9 now"),
        ("seed=5", "seed: 0 in the dataset, 5 now"),
        ("drafting.width=4", "drafting.width: 3 in the dataset, 4 now"),
        ("engine.dtype=float32", "models.dtype: 'float64' in the dataset, 'float32' now"),
        ("pair.mid.path={home}/target", "models.mid: "),
    ],
)
def test_another_config_does_not_mix(
    bench: Bench, whole: dict[str, str], change: str, named: str
) -> None:
    some = "collect.prompts_per_task=6"
    assert bench.collect("engine.workers=0", some) == 0, bench.output
    before = bench.parts()
    change = change.format(home=bench.home)
    assert bench.collect("engine.workers=0", change) == 2
    one_line(bench, named, "collect.force=true")
    assert bench.parts() == before and len(before) == 6
    went_on(bench, whole)


def test_the_dataset_is_removed_while_a_run_collects(
    bench: Bench, whole: dict[str, str], tmp_path: Path
) -> None:
    """It says so and leaves nothing that the next run would stumble over."""

    def remove(pid: int) -> None:
        bench.until(pid, lambda: len(bench.parts()) >= 2)
        bench.dataset.rename(tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone")

    code = bench.collect("engine.workers=0", faults={"units_take": [0.2]}, kill=remove)
    assert code == 1
    one_line(bench, "removed or moved the dataset")
    assert not bench.parts()
    went_on(bench, whole)


def test_a_lock_that_is_removed_keeps_nobody_out(bench: Bench, whole: dict[str, str]) -> None:
    """The run whose lock has gone stops before it records anything more."""

    def remove(pid: int) -> None:
        bench.until(pid, lambda: len(bench.parts()) >= 2)
        (bench.dataset.parent / ".pair=tiny.lock").unlink()

    assert bench.collect("engine.workers=0", faults={"units_take": [0.2]}, kill=remove) == 2
    one_line(bench, "its lock", "has been removed")
    assert bench.parts().items() <= whole.items()
    assert len(bench.units()) < PROMPTS
    went_on(bench, whole)


def test_stdout_is_closed(bench: Bench, whole: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pipeline.run", *bench.arguments("engine.workers=0")]
    run = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None and run.stderr is not None
    run.stdout.readline()
    run.stdout.close()
    error = run.stderr.read()
    assert run.wait() == 1
    assert "error: stdout was closed" in error and "Traceback" not in error
    went_on(bench, whole)


def test_a_run_that_waits_can_be_stopped(bench: Bench) -> None:
    def interrupt(pid: int) -> None:
        log = bench.folder / "output.txt"
        bench.until(pid, lambda: log.exists() and "waiting: " in log.read_text())
        send(pid, INT)

    with LocalStore(bench.dataset).lock(WHOLE):
        code = bench.collect("engine.workers=0", "collect.wait=true", kill=interrupt)
    assert code == 130 and "stopped" in bench.output and "Traceback" not in bench.output
    assert "give collect.wait=true" not in bench.output


def test_a_smaller_budget_follows_from_the_dataset(bench: Bench, whole: dict[str, str]) -> None:
    """What is missing is collected with the dataset's own B_ver; a larger one does not mix."""
    assert bench.collect("engine.workers=0", "collect.prompts_per_task=6") == 0
    assert bench.collect("engine.workers=0", "drafting.verify_nodes=7") == 0, bench.output
    assert "has drafting.verify_nodes=20, from which 7 follows" in bench.output
    assert bench.parts() == whole
    assert bench.collect("engine.workers=0", "drafting.verify_nodes=21") == 2
    one_line(bench, "drafting.verify_nodes: 20 in the dataset, 21 now")


def test_force_begins_a_new_dataset_beside_the_old_one(bench: Bench, whole: dict[str, str]) -> None:
    assert bench.collect("engine.workers=0") == 0
    fewer = ("engine.workers=0", "collect.max_new_tokens=9", "collect.force=true")
    assert bench.collect(*fewer) == 0, bench.output
    assert bench.parts().keys() == whole.keys() and bench.parts() != whole
    old = bench.dataset.parents[1] / "old" / "collect-pair=tiny-1"
    assert str(old) in bench.output
    moved = Bench(bench.template, bench.home, bench.folder)
    kept = {str(p.relative_to(old)): p for p in old.rglob("part-*.parquet")}
    assert kept.keys() == whole.keys()
    assert moved.collect("engine.workers=0", "collect.force=true") == 0
    assert moved.parts() == whole
    assert (old.parent / "collect-pair=tiny-2").is_dir()


def test_files_without_a_manifest_are_not_mixed_with(bench: Bench) -> None:
    assert bench.collect("engine.workers=0") == 0
    shutil.rmtree(bench.dataset / "_manifest")
    before = bench.parts()
    assert bench.collect("engine.workers=0") == 2
    one_line(bench, "no manifest", "collect.force=true")
    assert bench.parts() == before
