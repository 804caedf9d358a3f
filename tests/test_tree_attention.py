"""Which architectures are accepted: those that read a tree as its branches would be alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MptConfig,
    PretrainedConfig,
    Qwen3Config,
)

from tests.conftest import tiny_llama
from treegraft_core import AS_DEFINED, DraftingConfig, FixedSchedule, InputError, Pair
from treegraft_core.decoder import TreeGraftDecoder, decode_plain
from treegraft_core.models import check_tree_attention
from treegraft_core.pair import plain_generation
from treegraft_core.schedulers import all_mid
from treegraft_core.tree import IntArray

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GOOD = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "mistral": MistralConfig(**SMALL, sliding_window=4),
    "gemma2": Gemma2Config(**SMALL, sliding_window=4, head_dim=8),
    "gpt2": GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt-neox": GPTNeoXConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
}
BAD = {
    "gpt-neo": GPTNeoConfig(
        vocab_size=48,
        hidden_size=32,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        window_size=4,
        max_position_embeddings=64,
    ),
    "bloom": BloomConfig(vocab_size=48, hidden_size=32, n_layer=2, n_head=4),
    "mpt": MptConfig(vocab_size=48, d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    "mamba": MambaConfig(vocab_size=48, hidden_size=32, num_hidden_layers=2, state_size=4),
}


def build(config: PretrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", sorted(GOOD))
def test_accepted(name: str) -> None:
    check_tree_attention(build(GOOD[name]), "target")


@pytest.mark.parametrize("name", sorted(BAD))
def test_refused_with_one_line(name: str) -> None:
    with pytest.raises(InputError, match="use a") as caught:
        check_tree_attention(build(BAD[name]), "target")
    assert "\n" not in str(caught.value)


def test_a_mid_drafter_with_a_shorter_context_leaves_the_rest_to_small_steps(
    tiny_pair: Pair,
) -> None:
    mid = tiny_llama(0)
    mid.config.max_position_embeddings = 32
    pair = Pair("short", tiny_pair.target, mid, tiny_pair.tokenizer, None, ())
    prompt = [5, 9, 11, 30, 2, 7, 9, 11]
    done = TreeGraftDecoder(pair, all_mid(5), runtime=AS_DEFINED).generate(prompt, 60)
    assert done.tokens == decode_plain(pair, prompt, 60).tokens
    assert len(done.tokens) == 60
    assert done.rounds[0].schedule == (1,) * 5
    assert done.rounds[-1].schedule == (0,) * 5
    long = [5, 9, 11, 30] * 12
    again = TreeGraftDecoder(pair, all_mid(5), runtime=AS_DEFINED).generate(long, 20)
    assert again.tokens == decode_plain(pair, long, 20).tokens


def test_a_mid_drafter_never_reads_beyond_its_own_context(tiny_pair: Pair) -> None:
    """Not even where mid steps go on from the ends of n-gram chains, below D and n_max."""
    mid = tiny_llama(0)
    mid.config.max_position_embeddings = 24
    pair = Pair("short", tiny_pair.target, mid, tiny_pair.tokenizer, None, ())
    # So wide that every node is expanded.
    decoder = TreeGraftDecoder(
        pair, FixedSchedule([0, 1, 0, 1]), DraftingConfig(4, 400), runtime=AS_DEFINED
    )
    read: list[int] = []
    run = decoder._mid.model.run

    def spy(tokens: IntArray, positions: IntArray, *arguments: object) -> torch.Tensor:
        read.extend(np.asarray(positions).tolist())
        return run(tokens, positions, *arguments)

    deepest = 0
    for n in (3, 9, *range(13, 21), 27):
        context = decoder.resume(([7, 9] * 14)[:n])
        decoder._mid.model.run = spy  # type: ignore[method-assign]
        round_, _ = decoder.round(context, n)
        del decoder._mid.model.run
        assert max(read, default=0) < 24
        assert bool(read) == any(round_.schedule)
        deepest = max(deepest, max(read, default=0) - (n - 1))
        read.clear()
    assert deepest > 5


def test_a_models_own_penalties_are_dropped() -> None:
    model = tiny_llama(0)
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.top_k = 20
    model.generation_config.eos_token_id = [1, 7]
    plain_generation(model)
    assert model.generation_config.eos_token_id == [1, 7]
    assert model.generation_config.repetition_penalty in (None, 1.0)
