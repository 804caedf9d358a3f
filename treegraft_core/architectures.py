"""Model families: which cannot attend along a tree, told from the configuration alone.

A tree of drafts is read in one pass: a 4D mask says what each token sees, position ids where it
stands. What a configuration does not give away is found by running the model:
:func:`treegraft_core.models.check_tree_attention`.
"""

from __future__ import annotations

from collections.abc import Iterable

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from treegraft_core.errors import InputError

STATE = "keep one running state, which the branches of a tree cannot share"
CHUNKS = "see a part of the text that no mask can change"
LAYERS = {
    "linear_attention": STATE,
    "hybrid": STATE,
    "mamba": STATE,
    "conv": STATE,
    "recurrent": STATE,
    "chunked_attention": CHUNKS,
    "local": CHUNKS,
}
"""Beginnings of the kinds of layers that cannot attend along a tree, and why."""
RECURRENT = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma")
"""Families of such layers, some of which say nothing of layers in their configuration."""
ALIBI = ("bloom", "mpt")
"""Families whose only positions are distances between places in the cache."""
REMEDY = "use a decoder-only model with full or sliding-window attention and position ids"


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Return the kinds of a model's layers, sorted; nothing if its configuration names none."""
    text = config.get_text_config()
    names = ("layer_types", "attention_layers")
    return sorted({str(kind) for name in names for kind in getattr(text, name, None) or ()})


def refused_layer(kinds: Iterable[str]) -> tuple[str, str] | None:
    """Return the first kind of layer that cannot attend along a tree, and why; None if all can."""
    for kind in kinds:
        for beginning, reason in LAYERS.items():
            if kind.startswith(beginning):
                return kind, reason
    return None


def class_name(config: PretrainedConfig) -> str:
    """Return the name of the class that a configuration is of, else its family."""
    if config.architectures:
        return str(config.architectures[0])
    family = str(config.model_type)
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family) or MODEL_MAPPING_NAMES.get(family)
    return str(known or family)


def refusal(config: PretrainedConfig) -> str | None:
    """Return why a model cannot attend along a tree; None if its configuration names no reason."""
    text = config.get_text_config()
    family = str(text.model_type)
    layer = refused_layer(layer_kinds(config))
    if config.is_encoder_decoder:
        return "it reads the text in an encoder, not beside the drafts"
    if family in ALIBI or getattr(text, "alibi", False) is True:
        return "its ALiBi biases count places in the cache, which are no positions in a tree"
    if layer is not None:
        return f"its layers of kind {layer[0]} {layer[1]}"
    if family in RECURRENT:
        return f"its layers {STATE}"
    return None


def check_architecture(config: PretrainedConfig, role: str) -> None:
    """Check by its configuration that a model can attend along a tree.

    Raises
    ------
    InputError
        If it cannot; the message names the model's class, its family and the reason.
    """
    reason = refusal(config)
    if reason is not None:
        raise InputError(
            f"pair.{role}={class_name(config)}: the family {config.model_type} cannot draft or "
            f"verify trees ({reason}); {REMEDY}"
        )


def check_path(path: str, role: str, trust_remote_code: bool = False) -> None:
    """As `check_architecture`, of a local folder or hub id, before its weights are read."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception:  # what is wrong with it is said where the model is loaded
        return
    check_architecture(config, role)
