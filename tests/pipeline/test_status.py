"""stage=status: it says what is there and what goes on, and changes nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from pipeline import status
from pipeline.manifest import COUNTS, FOLDER, config_hash, part_name, seal
from pipeline.store import LocalStore
from tests.pipeline.conftest import conf, overrides, write_home
from tests.processes import CommandLine, Template
from tests.test_inputs import GRID, profile
from treegraft_core import InputError

HEADER = {"kind": "dataset", "format": 1, "config": {}}
STATE = {
    "engine": "2 local processes",
    "host": "there",
    "pid": 7,
    "updated": "2026-01-01T00:00:00Z",
    "elapsed_s": 61.0,
    "prompts": 9,
    "finished": 3,
    "failed": 1,
    "left": 5,
    "retries": 2,
    "workers_lost": 1,
    "rows": 1234,
    "prompts_per_min": 3.0,
    "rows_per_s": 20.0,
    "eta_s": 100,
    "memory_mib": 512.0,
    "failures": ["task=t, question_id=3: no luck"],
    "workers": {"0": {"state": "collecting", "unit": "task=t, question_id=4", "where": "there:8"}},
}


def record(prompt: str, state: str, **more: Any) -> dict[str, Any]:
    found = {"kind": "unit", "config": config_hash(HEADER["config"]), "task": "t"}
    found |= {"prompt": prompt, "status": state, "reason": "so it is", **more}
    if state == "done":
        numbers = {"bytes": 2**20, "rows": 160, "states": 1, "turns": 1, "sha256": "0" * 64}
        numbers |= dict.fromkeys(COUNTS, 0)
        found |= {"file": part_name("t", prompt), **numbers}
    return found


def write(folder: Path, *records: dict[str, Any], state: Any = None) -> Path:
    """Write a dataset as far as this stage looks."""
    (folder / FOLDER).mkdir(parents=True)
    lines = b"".join(map(seal, [HEADER, *records]))
    (folder / FOLDER / "00001-a.jsonl").write_bytes(lines)
    if state is not None:
        (folder / FOLDER / "status.json").write_text(
            state if isinstance(state, str) else json.dumps(state)
        )
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_home(tmp_path_factory.mktemp("status"))


@pytest.fixture(scope="module")
def base(home: Path) -> DictConfig:
    return conf(home, "status")


def at(base: DictConfig, root: Path, **more: Any) -> Any:
    return OmegaConf.merge(base, {"paths": {"trajectories": str(root)}, **more})


def snapshot(root: Path) -> dict[str, Any]:
    return {str(p): (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in root.rglob("*")}


def test_nothing_there(base: DictConfig, tmp_path: Path) -> None:
    place = tmp_path / "nowhere"
    assert "no trajectories in" in status.text(at(base, place))
    assert not place.exists()


def test_all_datasets_the_configured_pair_first(
    base: DictConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "collect" / "pair=alpha", record("1", "done"))
    done = [
        record("1", "done"),
        record("2", "done"),
        record("5", "empty"),
        record("6", "discarded"),
    ]
    failed = record("3", "failed", reason="task=t, question_id=3: no \x1b[31mluck")
    write(tmp_path / "collect" / "pair=tiny", *done, failed, state=STATE)
    write(tmp_path / "evaluate" / "pair=tiny", record("9", "done"))
    write(tmp_path / "old" / "collect-pair=tiny-1", record("9", "done"))
    before = snapshot(tmp_path)
    status.run(at(base, tmp_path))
    shown = capsys.readouterr().out
    assert snapshot(tmp_path) == before
    rows = [line.split() for line in shown.splitlines()[3:6]]
    assert [row[:8] for row in rows] == [
        ["tiny", "collect", "2", "1", "1", "1", "320", "2"],
        ["tiny", "evaluate", "1", "0", "0", "0", "160", "1"],
        ["alpha", "collect", "1", "0", "0", "0", "160", "1"],
    ]
    assert shown.count("not running") == 4 and "2 local processes" in shown
    assert "5 prompts were left" in shown and "stage=collect" in shown
    assert "no \\x1b[31mluck" in shown and "\x1b" not in shown and "old" not in shown


HALF: dict[str, tuple[Any, str]] = {
    "no status": (None, "not written figures yet"),
    "torn": ('{"engine": "x", "le', "cannot be read (_manifest/status.json)"),
    "of another version": ({"left": 3, "workers": [1]}, "cannot be read (of another version)"),
    "not an object": ([1, 2], "cannot be read (_manifest/status.json)"),
    "of the run before": (STATE, "not written figures yet"),
}


@pytest.mark.parametrize("case", HALF)
def test_half_states_of_a_run(base: DictConfig, tmp_path: Path, case: str) -> None:
    state, says = HALF[case]
    folder = write(tmp_path / "collect" / "pair=tiny", record("1", "done"), state=state)
    with LocalStore(folder).lock("lock"):
        shown = status.text(at(base, tmp_path))
    assert says in shown and f"process {os.getpid()} on" in shown
    with (folder / FOLDER / "00001-a.jsonl").open("ab") as segment:
        segment.write(b'{"kind": "unit", "ta')  # it is being written
    assert "00001-a.jsonl, line 3: cut off" in status.text(at(base, tmp_path))


def test_the_figures_of_a_run(base: DictConfig, tmp_path: Path) -> None:
    folder = tmp_path / "collect" / "pair=tiny"
    store = LocalStore(folder)
    with store.lock("lock"):
        mine = {"pid": os.getpid(), "host": str(store.held("lock")).split(" on ")[1]}
        write(folder, record("1", "done"), state={**STATE, **mine})
        shown = status.text(at(base, tmp_path))
    for says in ("3 of 9", "1 min 01 s", "1 min 40 s", "there:8", "question_id=4", "no luck"):
        assert says in shown
    assert "running" in shown and "not running" not in shown


def test_watching(
    base: DictConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    status.run(at(base, tmp_path, status={"watch": 3.0}))
    assert waits == [3.0, 3.0] and capsys.readouterr().out.count("no trajectories in") == 2
    with pytest.raises(InputError, match=r"status\.watch=-1"):
        status.run(at(base, tmp_path, status={"watch": -1.0}))


@pytest.fixture
def collecting(home: Path, template: Template, tmp_path: Path) -> Iterator[CommandLine]:
    """Yield a collection that goes on for long."""
    profile(verify=GRID).save(home / "data" / "profiles" / "tiny" / "profile.json")
    much = ["drafting.depth=8", "collect.states_per_turn=0", "collect.max_new_tokens=150"]
    lines = overrides(home, "stage=collect", "engine.workers=0", "collect.batch=1", *much)
    process = CommandLine(template, tmp_path, *lines)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.end()


def test_a_real_run_and_one_that_was_killed(
    base: DictConfig, home: Path, collecting: CommandLine
) -> None:
    root = home / "data" / "trajectories"
    end = time.monotonic() + 240
    shown = ""
    while not (" 1 of 6" in shown and "this process" in shown):
        assert collecting.poll() is None, collecting.printed()
        assert time.monotonic() < end, shown
        time.sleep(0.3)
        shown = status.text(at(base, root))
    assert f"process {collecting.pid} on" in shown and "not running" not in shown
    assert "collecting" in shown and "prompts/min" in shown
    os.killpg(collecting.pid, signal.SIGKILL)
    assert collecting.end().returncode == -signal.SIGKILL
    before = snapshot(root)
    shown = status.text(at(base, root))
    assert snapshot(root) == before
    assert "not running" in shown and "5 prompts were left when the last run ended" in shown
    assert "go on with: python -m pipeline.run stage=collect" in shown
