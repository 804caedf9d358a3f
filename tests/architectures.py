"""What model families do with trees of drafts, found by running tiny random models of each.

``make architectures`` writes what is found as ``docs/architectures.md``; a test compares it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from tests.conftest import VOCAB, word_tokenizer
from tests.test_decoder import as_defined, greedy, noisy
from treegraft_core import (
    DraftingConfig,
    FixedSchedule,
    InputError,
    Pair,
    RandomSchedule,
    all_mid,
    all_small,
    decode_plain,
)
from treegraft_core.architectures import check_architecture, class_name, layer_kinds, refusal
from treegraft_core.models import CachedModel, Visibility, check_tree_attention

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
ATTENTION = ("eager", "sdpa")
WINDOW = 8
DEPTH = 3
NEW_TOKENS = 12
TEXTS = (WINDOW - 2, 3 * WINDOW + 1)
"""Lengths: the window's edge comes to lie inside the tree, and the text is longer than it."""

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "pad_token_id": 1,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {**MIXED, "query_pre_attn_scalar": 8},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": WINDOW},
    "olmo2": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "mixtral": {**EXPERTS, "num_local_experts": 4, "sliding_window": None},
}
"""Decoded losslessly, with what their tiny configurations have beside `SMALL`."""
REFUSED: dict[str, dict[str, object]] = {
    "mamba": {},
    "mamba2": {},
    "falcon_mamba": {},
    "rwkv": {},
    "recurrent_gemma": {},
    "jamba": {},
    "falcon_h1": {},
    "qwen3_next": {},
    "minimax": {},
    "gpt_neo": {},
    "llama4_text": {},
    "bloom": {},
    "mpt": {},
    "falcon": {"alibi": True},
    "t5": {},
    "bart": {},
}
"""Refused by name, with what makes their configurations those that are meant."""


@dataclass(frozen=True)
class Found:
    """What a family's tiny pair did with one way of attention.

    Attributes
    ----------
    gap : float
        Largest difference between a branch's logits in a tree and alone, over their range.
    lossless : bool
        Every decoder gave the tokens of ``model.generate``.
    accepted : int
        Drafts that the target agreed with, over all decoders.
    """

    gap: float
    lossless: bool
    accepted: int

    @property
    def passes(self) -> bool:
        """Whether the family is lossless with trees of which something was accepted."""
        return self.gap < 1e-4 and self.lossless and self.accepted > 0


def config_of(family: str, **others: object) -> PretrainedConfig:
    """Return the configuration of a family's tiny model, with ``others`` in place of its own."""
    return AutoConfig.for_model(family, **(SMALL | FAMILIES[family] | others))


def tiny_model(family: str, attention: str) -> PreTrainedModel:
    """Return a family's tiny model with random weights, float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config_of(family), dtype=torch.float32, attn_implementation=attention
    )
    assert model.config._attn_implementation == attention
    return model.eval().requires_grad_(False)


def tree_gap(model: PreTrainedModel, length: int) -> float:
    """Return how far branches read in one pass are from each read alone, over their range."""
    rng = np.random.default_rng(length)
    text = rng.integers(2, VOCAB, size=length).tolist()
    branches = rng.integers(2, VOCAB, size=(3, DEPTH + 1)).tolist()
    each = DEPTH + 1
    first = length + each * np.arange(len(branches))
    steps = np.tril(np.ones((each, each), int)).cumsum(1) - 1  # what a node sees of its branch
    seen = np.minimum(steps, np.arange(each)[:, None])
    slots = np.concatenate([start + seen for start in first])
    cached = CachedModel(model)
    cached.run(text, np.arange(length))
    together = cached.run(
        [t for branch in branches for t in branch],
        np.tile(length + np.arange(each), len(branches)),
        Visibility(np.full(len(slots), length), slots),
    )
    with torch.no_grad():
        alone = torch.cat(
            [
                model(torch.tensor([text + branch]), use_cache=False).logits[0, length:]
                for branch in branches
            ]
        )
    return float((together - alone).abs().max() / alone.abs().max())


def offered(family: str, attention: str) -> bool:
    """Tell whether ``transformers`` has this way of attention for a family."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config_of(family))]
    return attention == "eager" or bool(kind._supports_sdpa)


@cache
def found(family: str, attention: str) -> Found:
    """Run every check of a family with one way of attention."""
    target = tiny_model(family, attention)
    pair = Pair(family, target, noisy(target, 0.02), word_tokenizer(), None, ())
    for role, model in (("target", pair.target), ("mid", pair.mid)):
        check_architecture(model.config, role)
        check_tree_attention(model, role)
    gap = max(tree_gap(model, n) for model in (pair.target, pair.mid) for n in TEXTS)
    lossless, accepted = True, 0
    config = DraftingConfig(DEPTH, 3, 8)
    for length in TEXTS:
        prompt = np.random.default_rng(length).integers(2, VOCAB, size=length).tolist()
        expected = greedy(target, prompt, NEW_TOKENS, eos=None)
        lossless &= decode_plain(pair, prompt, NEW_TOKENS, ()).tokens == expected
        fixed = FixedSchedule([1, 0, 1])
        for scheduler in (all_small(DEPTH), all_mid(DEPTH), fixed, RandomSchedule(length)):
            result = as_defined(pair, scheduler, config).generate(prompt, NEW_TOKENS)
            lossless &= result.tokens == expected
            accepted += sum(r.accepted for r in result.rounds)
    return Found(gap, lossless, accepted)


def refused_config(family: str) -> PretrainedConfig:
    """Return a configuration of a family that is refused."""
    return AutoConfig.for_model(family, **REFUSED[family])


def refused_line(family: str) -> str | None:
    """Return what a user of a refused family reads; None if it is let through."""
    try:
        check_architecture(refused_config(family), "target")
    except InputError as error:
        return str(error)
    return None


# The page ---------------------------------------------------------------------------------------

HEAD = """# Model families

Which `transformers` models draft and verify trees: written by `make architectures` from what the
test suite finds with tiny random models (transformers {version}, float32, target and mid both of
the family); a test fails if this page says anything else.

A family is *lossless* here if, within {gap} of the logits' range, the branches of a tree read in
one pass are what each is alone, and if greedy decoding under All Small, All Mid, a fixed schedule,
random schedules and without drafts gives the tokens of `model.generate`: for texts longer than the
sliding window, and where the window's edge lies inside the tree. Experts are chosen token by token,
so a tree changes nothing about them. –: `transformers` does not offer it for the family.

| family | class | layers | eager | sdpa |
|---|---|---|---|---|
"""
BETWEEN = """
A family that is not in the table is not refused: `load_pair` reads two short branches in one pass
and each alone, and takes the model if they agree. So does a variant of a refused family whose
configuration has none of what it is refused for.

Refused by name, before weights are read, in one line:

| family | class | why |
|---|---|---|
"""


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |\n"


def page(
    verdict: Callable[[str, str], Found] = found, version: str = transformers.__version__
) -> str:
    """Return the page that the findings make."""
    text = HEAD.format(version=version, gap="1e-4")
    for family in FAMILIES:
        config = config_of(family)
        window = getattr(config.get_text_config(), "sliding_window", None)
        kinds = layer_kinds(config) or (["sliding_attention"] if window else ["full_attention"])
        results = (
            ("lossless" if verdict(family, a).passes else "fails") if offered(family, a) else "–"
            for a in ATTENTION
        )
        text += row(family, class_name(config), ", ".join(kinds), *results)
    text += BETWEEN
    for family in REFUSED:
        config = refused_config(family)
        text += row(family, class_name(config), refusal(config) or "not refused")
    return text


def without_version(text: str) -> str:
    """Return a page without the number of the version that it was found with."""
    return re.sub(r"transformers \d[\w.]*", "transformers", text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
