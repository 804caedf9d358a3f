"""Where states lie: prompts that do not fit, and texts shared by pairs with one target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import texts
from pipeline.tasks import TaskPrompt
from pipeline.texts import greedy_texts, left_out
from tests.conftest import tiny_llama
from treegraft_core import DraftingConfig, InputError, Pair
from treegraft_core.errors import NonFiniteError
from treegraft_core.models import CachedModel
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
    assert len(list(tmp_path.iterdir())) == len(prompts)


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


@pytest.fixture(scope="module")
def flat_pair(tiny_pair: Pair) -> Pair:
    """Return a pair whose target ties often: in bfloat16, each token with a near twin."""
    target = tiny_llama(0, layers=6).to(torch.bfloat16)
    weight = target.lm_head.weight
    weight[1::2] = weight[::2] + 0.02 * torch.randn(weight[::2].shape, dtype=weight.dtype)
    return replace(tiny_pair, target=target)


def test_texts_do_not_depend_on_what_is_decoded_beside_them(flat_pair: Pair) -> None:
    """Where tokens tie within rounding, too."""
    prompts = [prompt("a", str(i), 3 + 5 * i) for i in range(8)]
    alone = [greedy_texts(flat_pair, [p], 24, 1, CONFIG)[0][0] for p in prompts]
    ties = 0
    for batch in (2, 8):
        together, settled = greedy_texts(flat_pair, prompts, 24, batch, CONFIG)
        assert together == alone
        ties += settled
    assert ties, "no tie: the test shows nothing"


def test_a_text_is_what_its_own_reading_says(flat_pair: Pair) -> None:
    for text in greedy_texts(flat_pair, [prompt("a", "0", 9)], 24, 1, CONFIG)[0]:
        logits = CachedModel(flat_pair.target).run(text.tokens, np.arange(len(text.tokens)))
        choice = logits.argmax(-1).tolist()
        at = range(text.prompt_tokens, len(text.tokens))
        assert [text.tokens[i] for i in at] == [choice[i - 1] for i in at]


@pytest.mark.parametrize("at", [9, 200, -1])
def test_a_damaged_cache_is_named_and_decoded_again(
    tiny_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    prompts = [prompt("a", "0", 5)]
    first, _ = greedy_texts(tiny_pair, prompts, NEW, 4, CONFIG, tmp_path)
    file = next(tmp_path.iterdir())
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(bytes(data))
    assert greedy_texts(tiny_pair, prompts, NEW, 4, CONFIG, tmp_path)[0] == first
    assert file.name in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_named(tiny_pair: Pair, value: float) -> None:
    target = tiny_llama(0)
    target.model.embed_tokens.weight[5] = value
    broken = replace(tiny_pair, target=target)
    words = TaskPrompt("a", Prompt("p", "", ("w2 w3 w5 w2",)))
    with pytest.raises(NonFiniteError, match=r"task=a, question_id=p, turn 1: .*position 2"):
        greedy_texts(broken, [words], NEW, 4, CONFIG)
