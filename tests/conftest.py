"""Tiny models that exercise the real code paths in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from tests.processes import Template
from treegraft_core.pair import Pair

VOCAB = 48


def tiny_llama(seed: int, layers: int = 2, vocab: int = VOCAB, dtype: torch.dtype = torch.float64):
    """Return a random Llama with peaked outputs, so that drafters sometimes agree."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=0,
        pad_token_id=1,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def word_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the words w0, w1, …"""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1")


@pytest.fixture(scope="session")
def tiny_pair() -> Pair:
    """Return a pair whose mid drafter is a noisy copy of its target."""
    target = tiny_llama(0)
    mid = tiny_llama(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in mid.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return Pair("tiny", target, mid, word_tokenizer(), None, (1,))


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """Return the process that command lines are forked from."""
    made = Template()
    yield made
    made.close()
