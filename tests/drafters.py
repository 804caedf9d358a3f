"""Drafters of every kind beside any small target, for tests that go through all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.head_training import share_output_head
from treegraft_core import Chain, Context, MidCacheBase, NGramDrafter, SmallDrafter, SuffixDrafter
from treegraft_core.head import HeadConfig, TrainedHead
from treegraft_core.pair import Pair
from treegraft_core.student import DraftVocabulary, build_student
from treegraft_core.tree import IntArray


class Successor(SmallDrafter):
    """Proposes the token that follows a pair of tokens in a random table, and its successor."""

    name = "successor"

    def __init__(self, vocabulary: int, seed: int = 0):
        self.table = np.random.default_rng(seed).integers(vocabulary, size=(vocabulary, 3))

    def propose(self, context: Context, path: Sequence[int], length: int) -> list[Chain]:
        last = path[-1] if path else int(context.tokens[length - 1])
        firsts = dict.fromkeys(self.table[last % len(self.table)].tolist())
        return [
            Chain((first, int(self.table[first, 0])), (-1.0 - i, -0.5))
            for i, first in enumerate(firsts)
        ]


class TableCache(MidCacheBase):
    """Logits from a table of the last two tokens."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.table = table

    def predict(self, places: IntArray) -> Tensor:
        texts = [self.text(place, 2) for place in places.tolist()]
        return torch.stack([self.table[t[-1]] + 0.5 * self.table[t[0]].roll(1) for t in texts])


class Table:
    """A mid drafter of one's own."""

    family = "table"

    def __init__(self, vocabulary: int):
        generator = torch.Generator().manual_seed(4)
        self.table = 2 * torch.randn(vocabulary, vocabulary, generator=generator)

    def open(self, target: Any) -> TableCache:
        return TableCache(self.table)


def random_head(target: Any) -> TrainedHead:
    """Return a head with random weights."""
    size = int(target.config.hidden_size)
    config = HeadConfig(
        hidden_size=size,
        intermediate_size=2 * size,
        target_hidden_size=size,
        heads=2,
        kv_heads=1,
        head_dim=size // 2,
        layers=(0,),
        vocabulary=target.config.vocab_size,
        rms_norm_eps=1e-5,
        rope={"rope_theta": 1e4},
        max_positions=target.config.max_position_embeddings,
    )
    torch.manual_seed(5)
    head = TrainedHead(config, target.get_input_embeddings())
    for p in head.parameters():
        if p.ndim > 1 and p is not target.get_input_embeddings().weight:
            p.data = 0.4 * torch.randn(p.shape)
    share_output_head(head, target, torch.arange(target.config.vocab_size))
    return head.to(target.dtype).eval().requires_grad_(False)


def with_mid(pair: Pair, kind: str) -> Pair:
    """Return the pair with another mid drafter: model (its own), student, head, or table."""
    if kind == "model":
        return pair
    if kind == "head":
        return replace(pair, mid=random_head(pair.target), vocabulary=None)
    if kind == "table":
        return replace(pair, mid=Table(pair.target_vocab), vocabulary=None)
    assert kind == "student"
    tokens = torch.arange(0, pair.target_vocab, 2)
    student = build_student(pair.target, [0], tokens).to(pair.target.dtype)
    vocabulary = DraftVocabulary(tokens, -3.0)
    return replace(pair, mid=student.eval().requires_grad_(False), vocabulary=vocabulary)


def small_of(kind: str, vocabulary: int) -> SmallDrafter:
    """Return a small drafter: ngram, suffix, corpus (which also remembers), or successor."""
    if kind == "ngram":
        return NGramDrafter()
    if kind == "suffix":
        return SuffixDrafter(chain=4)
    if kind == "corpus":
        rng = np.random.default_rng(6)
        texts = [rng.integers(vocabulary, size=30).tolist() for _ in range(4)]
        return SuffixDrafter(chain=6, corpus=texts, remember_tokens=50)
    assert kind == "successor"
    return Successor(vocabulary)


SMALL = ("ngram", "suffix", "corpus", "successor")
MID = ("model", "student", "head", "table")
