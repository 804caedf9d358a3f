"""Every small drafter with every mid drafter: the output is the target's own, in float32."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from pipeline.check import check_states
from pipeline.texts import Text
from tests.conftest import tiny_llama, word_tokenizer
from tests.drafters import MID, SMALL, small_of, with_mid
from tests.test_sampling import PROMPTS
from treegraft_core import (
    AS_DEFINED,
    DraftingConfig,
    FixedSchedule,
    InputError,
    Pair,
    RandomSchedule,
    RuntimeConfig,
    Scheduler,
    SuffixDrafter,
    TreeGraftDecoder,
)
from treegraft_core.verify import token_log_p

NEW = 12
SCHEDULERS: dict[str, Scheduler] = {
    "all_small": FixedSchedule([0] * 4),
    "fixed": FixedSchedule([1, 0, 1, 0]),
    "late": FixedSchedule([0, 0, 1, 1]),
    "random": RandomSchedule(1),
}


@cache
def pair_of(mid: str, dtype: torch.dtype) -> Pair:
    target, model = tiny_llama(0, dtype=dtype), tiny_llama(0, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return with_mid(Pair("tiny", target, model, word_tokenizer(), None, ()), mid)


@cache
def greedy(prompt: tuple[int, ...], dtype: torch.dtype, new: int) -> list[int]:
    ids = torch.tensor([prompt])
    found = pair_of("model", dtype).target.generate(
        ids, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def config_of(small: str, vocabulary: int) -> DraftingConfig:
    return DraftingConfig(depth=4, width=3, verify_nodes=12, small=small_of(small, vocabulary))


@pytest.mark.parametrize(("small", "mid"), product(SMALL, MID))
def test_the_output_is_the_targets(small: str, mid: str) -> None:
    pair = pair_of(mid, torch.float32)
    config = config_of(small, pair.target_vocab)
    for name, scheduler in SCHEDULERS.items():
        evaluation = "all" if name == "fixed" else "needed"
        rules = replace(config, evaluation=evaluation)
        decoder = TreeGraftDecoder(pair, scheduler, rules, runtime=AS_DEFINED)
        for prompt in PROMPTS[2:]:
            found = decoder.generate(prompt, NEW, ())
            assert found.tokens == greedy(tuple(prompt), torch.float32, NEW), name
            assert found.rounds
    guarded = TreeGraftDecoder(pair, SCHEDULERS["fixed"], config, runtime=RuntimeConfig())
    assert guarded.generate(PROMPTS[2], NEW, ()).tokens == greedy(
        tuple(PROMPTS[2]), torch.float32, NEW
    )


@pytest.mark.parametrize("mid", MID)
@pytest.mark.parametrize("small", [name for name in SMALL if name != "corpus"])
def test_logs_are_rounds_run_alone(small: str, mid: str) -> None:
    """All 16 schedules, enumerated together and each alone through the decoder, in float64."""
    pair = pair_of(mid, torch.float64)
    config = config_of(small, pair.target_vocab)
    prompt = PROMPTS[2]
    tokens = [*prompt, *greedy(tuple(prompt), torch.float64, 8 + config.deepest)]
    logits = pair.target(torch.tensor([tokens])).logits[0]
    log_p = [0.0, *token_log_p(logits[:-1], tokens[1:], config.width)]
    text = Text("task", "0", 0, tokens, len(prompt), 8, log_p)
    found = check_states(pair, [text], config, 2, 0)
    assert found.rounds == 2 * 16
    for name in ("accepted", "target_pass", "kept_tree", "counts", "signals"):
        assert getattr(found, name) == found.rounds, (name, found.examples)


def test_a_corpus_of_another_vocabulary_is_refused() -> None:
    pair = pair_of("model", torch.float32)
    config = DraftingConfig(small=SuffixDrafter(corpus=[[1, pair.target_vocab]]))
    with pytest.raises(InputError, match=r"its texts hold token 48, the target has 48; make them"):
        TreeGraftDecoder(pair, SCHEDULERS["fixed"], config)
