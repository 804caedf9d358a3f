"""The command line: one clear line, status 2, and no file changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import tiny_llama, word_tokenizer
from tests.processes import ROOT, CommandLine, Ran, Template

Check = Callable[..., None]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    for name, seed in (("target", 0), ("mid", 1)):
        tiny_llama(seed).float().save_pretrained(folder / name)
        word_tokenizer().save_pretrained(folder / name)
    return folder


def pair(models: Path, mid: str = "mid") -> list[str]:
    return [
        "pair=local",
        "pair.name=tiny",
        f"pair.target.path={models / 'target'}",
        f"pair.mid.path={models / mid}",
        "tracker=disabled",
    ]


def refused(result: Ran, says: list[str]) -> None:
    message = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2, result.stderr
    assert len(message) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for text in says:
        assert text in message[0], message[0]


@pytest.fixture
def check(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Check:
    """Return what runs a command line that must be refused and must not change any file."""
    printed = tmp_path_factory.mktemp("printed")

    def run(data: Path, says: list[str], *overrides: str) -> None:
        before = snapshot(data)
        arguments = (f"paths.data={data}", "tracker=disabled", *overrides)
        refused(CommandLine(template, printed, *arguments).end(), says)
        assert snapshot(data) == before

    return run


def test_a_process_of_its_own(tmp_path: Path) -> None:
    """As a shell starts it; the other command lines here are forked from one that is there."""
    found = subprocess.run(
        [sys.executable, "-m", "pipeline.run", f"paths.data={tmp_path}", "stage=dance"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    refused(Ran(found.returncode, found.stdout, found.stderr), ["stage", "dance"])
    assert not list(tmp_path.iterdir())


def test_unknown_choices(check: Check, tmp_path: Path) -> None:
    check(tmp_path, ["pair", "gpt9"], "stage=collect", "pair=gpt9")
    check(tmp_path, ["task", "sudoku"], "stage=collect", "task=sudoku")
    check(tmp_path, ["stage", "dance"], "stage=dance")


def test_unknown_key(check: Check, tmp_path: Path) -> None:
    check(tmp_path, ["collect.colour"], "stage=collect", "collect.colour=red")


def test_stage_is_missing(check: Check, tmp_path: Path) -> None:
    check(tmp_path, ["stage"])


@pytest.mark.parametrize(
    ("stage", "first"),
    [
        ("collect", "profile"),
        ("select", "collect"),
        ("value", "select"),
        ("label", "value"),
        ("distill", "label"),
        ("export", "distill"),
        ("evaluate", "profile"),
    ],
)
def test_stage_before_its_prerequisite(
    check: Check, tmp_path: Path, stage: str, first: str
) -> None:
    check(tmp_path, ["python -m pipeline.run stage="], f"stage={stage}")


def test_prompt_files(check: Check, tmp_path: Path, models: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    base = ["stage=profile", "task=file", *pair(models)]
    check(data, ["task.path", "nowhere"], *base, f"task.path={tmp_path / 'nowhere.jsonl'}")
    cut = tmp_path / "cut.jsonl"
    cut.write_text(
        '{"question_id": 1, "category": "a", "turns": ["w2 w3"]}\n{"question_id": 2, "ca'
    )
    check(data, ["line 2", "truncated"], *base, f"task.path={cut}")
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"question_id": 1, "category": "a", "turns": ["  "]}\n')
    check(data, ["line 1", "empty prompt"], *base, f"task.path={empty}")


def test_mismatched_tokenizers(check: Check, tmp_path: Path, models: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    other = models / "other"
    tiny_llama(1).float().save_pretrained(other)
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"w17"', '"v17"'))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"question_id": 1, "category": "a", "turns": ["w2 w3"]}\n')
    check(
        data,
        ["token 17", "'w17'", "'v17'"],
        "stage=profile",
        "task=file",
        f"task.path={prompts}",
        *pair(models, "other"),
    )
