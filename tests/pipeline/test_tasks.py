"""Prompt sources: local files, and public sets through ``datasets`` from local folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from pipeline.run import CONF
from pipeline.tasks import load_prompts
from treegraft_core import InputError

ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gsm8k": ({"question": "How many?", "answer": "3"}, ["How many?"]),
    "alpaca": (
        {"instruction": "Sort these.", "input": "b a", "output": "a b", "text": ""},
        ["Sort these.\n\nb a"],
    ),
    "humaneval": (
        {"task_id": "0", "prompt": "def f():\n", "test": ""},
        ["Complete the code I provided.\n\ndef f():\n"],
    ),
    "qa": ({"question": "who wrote it", "answer": ["me"]}, ["Who wrote it?"]),
    "cnn_dm": ({"article": "It rained.", "highlights": "Rain."}, ["Summarize: It rained."]),
    "mt_bench": ({"prompt": ["First.", "Second."], "category": "x"}, ["First.", "Second."]),
}


def conf(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", ["stage=collect", *overrides])


@pytest.mark.parametrize("name", sorted(ROWS))
def test_public_sets_are_read_by_their_columns(name: str, tmp_path: Path) -> None:
    row, turns = ROWS[name]
    folder = tmp_path / "set"
    folder.mkdir()
    split = str(conf(f"task={name}").task.hub.split)
    (folder / f"{split}.jsonl").write_text("\n".join([json.dumps(row)] * 3) + "\n")
    found = load_prompts(
        conf(f"task={name}", f"task.hub.id={folder}", "task.hub.config=null"), "evaluate", 2
    )
    assert [list(p.prompt.turns) for p in found] == [turns, turns]
    assert {p.task for p in found} == {name}
    assert len({p.prompt.question_id for p in found}) == 2


def test_a_set_with_other_columns_is_named(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"q": "x"}) + "\n")
    with pytest.raises(InputError, match="row 0 lacks"):
        load_prompts(
            conf("task=gsm8k", f"task.hub.id={tmp_path}", "task.hub.config=null"), "evaluate", 1
        )


def test_a_set_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(InputError, match=r"task\.hub\.id"):
        load_prompts(conf("task=gsm8k", f"task.hub.id={missing}"), "evaluate", 1)


def test_shipped_splits_and_limits() -> None:
    found = load_prompts(conf(), "evaluate", 2)
    assert len(found) == 12
    assert len({p.task for p in found}) == 6
    with pytest.raises(InputError, match="prompts_per_task=-1"):
        load_prompts(conf(), "evaluate", -1)


def test_local_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question_id": 1, "category": "a", "turns": ["x", "y"]}\n')
    found = load_prompts(conf("task=file", f"task.path={path}", "task.name=mine"), "collect", 0)
    assert [(p.task, p.prompt.turns) for p in found] == [("mine", ("x", "y"))]
