"""What is shown, written and tracked while a collection runs, and its structured log."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline import logs, progress
from pipeline.dispatch import Tally
from pipeline.progress import STATUS, TRACKED, Progress, duration, one_line, render
from pipeline.store import LocalStore


class FakeStage:
    """Keeps what goes to the tracker."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: at[0])
    return at


def tally(ended: int, total: int) -> Tally:
    found = Tally(total)
    found.finished["done"] = ended
    found.rows, found.states = 160 * ended, ended
    found.workers[0] = {"state": "collecting", "where": "host:7", "memory_mib": 512.0, "units": 3}
    found.failures = [{"reason": "task=a, question_id=7: broken"}]
    return found


def test_rates_and_what_is_left(clock: list[float], tmp_path: Path) -> None:
    """Loading the models does not count; what was there before is no rate."""
    stage = FakeStage()
    shown = Progress(stage, LocalStore(tmp_path), "2 workers", 4, 24)  # type: ignore[arg-type]
    loading = Tally(20)
    loading.workers[0] = {"state": "starting"}
    shown(loading)
    clock[0] += 500
    shown(tally(0, 20))
    clock[0] += 60
    state = shown.state(tally(10, 20))
    assert state["finished"] == 14 and state["prompts"] == 24 and state["left"] == 10
    assert state["prompts_per_min"] == 10.0 and state["eta_s"] == 60
    assert state["elapsed_s"] == 560.0
    assert "14 of 24 prompts" in one_line(state) and "ETA 1 min 00 s" in one_line(state)
    text = io.StringIO()
    Console(file=text, width=100).print(render(state))
    for word in ("14 of 24", "10 prompts/min", "host:7", "question_id=7: broken"):
        assert word in text.getvalue()


def test_each_place_gets_it_in_its_own_rhythm(
    clock: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = FakeStage()
    shown = Progress(stage, LocalStore(tmp_path), "1 worker", 0, 600)  # type: ignore[arg-type]
    for n in range(601):
        shown(tally(n, 600))
        clock[0] += 0.5
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("collect: ")]
    assert len(lines) == 11  # every 30 s, and the end
    assert len(stage.logged) == 61  # every 5 s
    assert set(stage.logged[-1]) == {f"collect/{name}" for name in TRACKED}
    assert stage.logged[-1]["collect/finished"] == 600
    state = json.loads((tmp_path / STATUS).read_text())
    assert state["finished"] == 600 and state["beat"] > 250
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_status_that_cannot_be_written_does_not_end_the_run(
    clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: LocalStore, name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device", name)

    monkeypatch.setattr(LocalStore, "write", full)
    shown = Progress(FakeStage(), LocalStore(tmp_path), "1 worker", 0, 2)  # type: ignore[arg-type]
    with logs.log_file(tmp_path / "log.jsonl") as path:
        shown(tally(1, 2))
    assert json.loads(path.read_text().splitlines()[0])["event"] == "status_not_written"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.4, "0 s"), (59.6, "1 min 00 s"), (61, "1 min 01 s"), (3725, "1 h 02 min")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_log_lines_are_objects_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    with logs.log_file(tmp_path / "log.jsonl") as path:
        logs.event("unit_done", unit="task=a", rows=160, seconds=0.5)
        logs.event("unit_failed", "error", reason="GET https://me:pw@host/x hf_0123456789abcdef")
    logs.event("after", unit="nowhere")
    lines: list[dict[str, Any]] = [json.loads(x) for x in path.read_text().splitlines()]
    assert [x["event"] for x in lines] == ["unit_done", "unit_failed"]
    assert lines[0]["rows"] == 160 and lines[0]["level"] == "info" and lines[0]["at"].endswith("Z")
    shown = capsys.readouterr().err
    assert "unit_failed" in shown and "unit_done" not in shown
    for text in (path.read_text(), shown):
        assert "hf_0123" not in text and ":pw@" not in text
