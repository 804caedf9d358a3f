"""Where states lie: prompts that do not fit, and texts shared by pairs with one target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import texts
from pipeline.tasks import TaskPrompt
from pipeline.texts import greedy_texts, left_out
from treegraft_core import DraftingConfig, InputError, Pair
from treegraft_core.prompts import Prompt

NEW = 8
CONFIG = DraftingConfig(3, 4, 8, 3)


def prompt(task: str, name: str, *lengths: int) -> TaskPrompt:
    """Return a prompt with a turn of each number of words."""
    turns = tuple(" ".join(f"w{2 + i % 8}" for i in range(n)) for n in lengths)
    return TaskPrompt(task, Prompt(name, "", turns))


def test_a_prompt_that_does_not_fit_is_left_out_of_its_set(
    tiny_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [
        prompt("a", "0", 300),
        prompt("a", "1", 5),
        prompt("b", "0", 6, 230, 4),
        prompt("b", "1", 6, 7),
    ]
    for _ in range(2):  # decoded, then read back
        found, _ = greedy_texts(tiny_pair, prompts, NEW, 4, CONFIG, tmp_path)
        assert [(t.task, t.prompt_id, t.turn) for t in found] == [
            ("a", "1", 0),
            ("b", "0", 0),
            ("b", "1", 0),
            ("b", "1", 1),
        ]
        assert left_out(prompts, found) == {prompts[0]: 0, prompts[2]: 1}
        notes = [x for x in capsys.readouterr().out.splitlines() if x.startswith("note: ")]
        assert len(notes) == 2
        assert "task=a, question_id=0, turn 1: left out" in notes[0]
        assert "task=b, question_id=0, turn 2: left out" in notes[1]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_task_of_which_nothing_fits_is_an_error(tiny_pair: Pair) -> None:
    prompts = [prompt("a", "0", 5), prompt("b", "7", 300), prompt("b", "8", 260)]
    with pytest.raises(InputError, match=r"task=b, question_id=7, turn 1: 300 tokens do not fit"):
        greedy_texts(tiny_pair, prompts, NEW, 4, CONFIG)


def test_pairs_with_one_target_share_texts(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt("a", "0", 5)]
    first, _ = greedy_texts(tiny_pair, prompts, NEW, 4, CONFIG, tmp_path)
    monkeypatch.setattr(texts, "_decode", None)
    other = replace(tiny_pair, name="other", mid=tiny_pair.target)
    assert greedy_texts(other, prompts, NEW, 4, CONFIG, tmp_path)[0] == first
    with pytest.raises(TypeError):
        greedy_texts(replace(other, target=tiny_pair.mid), prompts, NEW, 4, CONFIG, tmp_path)
