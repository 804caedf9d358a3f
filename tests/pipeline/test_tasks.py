"""Prompt sources: local files, and public sets through ``datasets`` from local folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from pipeline.run import CONF
from pipeline.tasks import load_prompts, prompt_source
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


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    """Return a folder with three prompts of each of the six sets, ids as numbers."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name, (_, turns) in ROWS.items():
        lines = [
            json.dumps({"question_id": i, "category": "any", "turns": turns, "reference": ["r"]})
            for i in range(3)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_six_sets_from_a_folder(benchmarks: Path) -> None:
    given = conf("task=benchmarks", f"task.folder={benchmarks}")
    found = load_prompts(given, "evaluate", 2)
    assert [p.task for p in found] == [name for name in given.task.sets for _ in range(2)]
    assert set(given.task.sets) == set(ROWS)
    assert {p.prompt.question_id for p in found} == {"0", "1"}
    assert all(list(p.prompt.turns) == ROWS[p.task][1] for p in found)
    assert prompt_source(given, "evaluate").count(str(benchmarks)) == 6


def test_to_collect_the_held_out_set_is_not_even_read(benchmarks: Path) -> None:
    (benchmarks / "mt_bench.jsonl").unlink()
    given = conf("task=benchmarks", f"task.folder={benchmarks}")
    assert {p.task for p in load_prompts(given, "collect", 0)} == set(ROWS) - {"mt_bench"}
    assert "mt_bench" not in prompt_source(given, "collect")
    with pytest.raises(InputError, match=r"task\.folder=.*: no mt_bench\.jsonl in it; give"):
        load_prompts(given, "evaluate", 0)


def test_some_sets_and_wrong_ones(benchmarks: Path, tmp_path: Path) -> None:
    here = ("task=benchmarks", f"task.folder={benchmarks}")
    found = load_prompts(conf(*here, "task.sets=[qa,gsm8k]"), "evaluate", 0)
    assert [p.task for p in found] == ["qa"] * 3 + ["gsm8k"] * 3
    for sets in ("[]", "[qa,qa]", "[qa,spec]"):
        with pytest.raises(InputError, match=r"task\.sets=.*: choose from gsm8k, alpaca"):
            load_prompts(conf(*here, f"task.sets={sets}"), "evaluate", 0)
    with pytest.raises(InputError, match=r"task\.folder=.*nowhere: not there; give .*folder=null"):
        load_prompts(conf("task=benchmarks", f"task.folder={tmp_path}/nowhere"), "evaluate", 0)


def test_without_a_folder_each_set_comes_as_its_own_task_says(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps(ROWS["gsm8k"][0]) + "\n")
    given = conf(
        "task=benchmarks",
        "task.folder=null",
        "task.sets=[gsm8k]",
        f"task.each.gsm8k.hub.id={tmp_path}",
        "task.each.gsm8k.hub.config=null",
    )
    found = load_prompts(given, "evaluate", 0)
    assert [(p.task, list(p.prompt.turns)) for p in found] == [("gsm8k", ROWS["gsm8k"][1])]
    assert prompt_source(given, "evaluate") == str(tmp_path)


def test_the_source_of_the_shipped_task() -> None:
    assert prompt_source(conf(), "evaluate") == "data/prompts/evaluate.jsonl"
    assert prompt_source(conf("task=gsm8k"), "evaluate") == "openai/gsm8k"


def test_nothing_of_a_held_out_task_is_collected(benchmarks: Path, tmp_path: Path) -> None:
    path = benchmarks / "mt_bench.jsonl"
    own = tmp_path / "own.jsonl"
    own.write_text('{"question_id": 1, "category": "mt_bench", "turns": ["x"]}\n')
    for given in (
        conf("task=mt_bench"),
        conf("task=mt_bench", f"task.path={own}"),
        conf("task=file", f"task.path={path}"),
        conf("task=file", f"task.path={own}"),
        conf("task=file", f"task.path={benchmarks}/qa.jsonl", "task.name=mt_bench"),
    ):
        with pytest.raises(InputError, match=r"held_out_tasks=\['mt_bench'\]: leaves no prompt"):
            load_prompts(given, "collect", 0)
    assert load_prompts(conf("task=file", f"task.path={path}"), "evaluate", 0)
    assert load_prompts(conf("task=file", f"task.path={path}", "held_out_tasks=[]"), "collect", 0)


def test_a_shipped_kind_can_be_held_out() -> None:
    kinds = {p.task for p in load_prompts(conf(), "evaluate", 1)}
    kind = min(kinds)
    found = load_prompts(conf(f"held_out_tasks=[{kind}]"), "collect", 1)
    assert {p.task for p in found} == kinds - {kind}
