"""Stand-ins that need no file: random models, random texts with repetition, a flat profile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from treegraft_core import LatencyProfile
from treegraft_core.latency import Grid
from treegraft_core.tree import FloatArray

ENTROPY_NATS = 2.5
"""Of a random model's next token: about that of a language model on ordinary text."""
COPY_RATE = 0.15
"""Share of steps of a random text at which an earlier span of 3 to 10 tokens is repeated."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a random Llama; the default is the shipped student's (head of 8,192 tokens)."""

    layers: int = 4
    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    inner: int = 1536
    vocab: int = 8192
    positions: int = 8192

    def config(self) -> LlamaConfig:
        """Return it as a ``transformers`` config."""
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.positions,
            tie_word_embeddings=False,
        )


def random_model(
    config: PretrainedConfig, dtype: torch.dtype, device: str, seed: int = 0
) -> PreTrainedModel:
    """Create a model on its device; its head is scaled so that its outputs are peaked."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval().requires_grad_(False)
    head = model.get_output_embeddings().weight
    # Normal logits of variance v have an entropy of about log V − v / 2.
    variance = 2 * max(0.5, math.log(head.shape[0]) - ENTROPY_NATS)
    head.normal_(0, math.sqrt(variance / head.shape[1]))
    return model


def random_text(length: int, vocab: int, seed: int = 0) -> tuple[list[int], FloatArray]:
    """Return tokens and made-up log p of each.

    Tokens follow a Zipf law over the vocabulary, with earlier spans repeated, since n-gram matches
    are what a uniformly random text does not have.
    """
    rng = np.random.default_rng(seed)
    chances = 1.0 / np.arange(1, vocab + 1)
    names = rng.permutation(vocab)
    fresh = names[rng.choice(vocab, size=length, p=chances / chances.sum())].tolist()
    text: list[int] = []
    while len(text) < length:
        if len(text) > 10 and rng.random() < COPY_RATE:
            start = int(rng.integers(len(text) - 10))
            text += text[start : start + int(rng.integers(3, 11))]
        else:
            text.append(fresh[len(text)])
    return text[:length], -rng.exponential(2.0, length)


def flat_profile(points: int = 5, contexts: int = 3) -> LatencyProfile:
    """Return a profile of the usual shape, so that t costs what it costs; its times are made up."""
    axis, ms = tuple(range(1, points + 1)), ((1.0,) * contexts,) * points
    grid = Grid(axis, tuple(64 * (i + 1) for i in range(contexts)), ms, ms)
    return LatencyProfile(grid, grid, *(1.0,) * 9, evaluation="needed")
