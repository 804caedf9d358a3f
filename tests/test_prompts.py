"""The shipped prompts: numbers, kinds, layout, and nothing shared between the splits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from treegraft_core.prompts import read_prompts

PROMPTS = Path(__file__).resolve().parent.parent / "data" / "prompts"
KINDS = {"math", "instruction", "code", "qa", "summarization", "chat"}


@pytest.mark.parametrize(("split", "least"), [("train", 60), ("collect", 24), ("evaluate", 16)])
def test_each_kind_has_enough(split: str, least: int) -> None:
    counts = Counter(p.category for p in read_prompts(PROMPTS / f"{split}.jsonl"))
    assert set(counts) == KINDS
    assert min(counts.values()) >= least


@pytest.mark.parametrize("split", ["train", "collect", "evaluate"])
def test_chat_has_two_turns_and_the_rest_one(split: str) -> None:
    for p in read_prompts(PROMPTS / f"{split}.jsonl"):
        assert len(p.turns) == (2 if p.category == "chat" else 1)


def words(text: str) -> frozenset[str]:
    return frozenset(text.lower().split())


def test_splits_share_no_prompt() -> None:
    seen = {s: read_prompts(PROMPTS / f"{s}.jsonl") for s in ("train", "collect", "evaluate")}
    for a, b in (("train", "collect"), ("train", "evaluate"), ("collect", "evaluate")):
        theirs = [words(q.turns[0]) for q in seen[b]]
        for p in seen[a]:
            ours = words(p.turns[0])
            for other in theirs:
                overlap = len(ours & other) / len(ours | other)
                assert overlap < 0.8, (a, b, p.turns[0])
