"""Depth-pruned students: a mid drafter made of a few of the target's own layers.

A student is an ordinary ``transformers`` causal LM of the target's class with fewer layers. Its
embedding is the target's, its head holds the target's head rows of a *draft vocabulary* (the
tokens that the target really uses, as in FR-Spec, arXiv 2502.14856), so a student's folder holds
only what differs: the layers, the final norm and the list of tokens.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from treegraft_core.errors import InputError
from treegraft_core.files import atomic_path, write_json

STUDENT_FORMAT = 1
WEIGHTS_NAME = "student.safetensors"
META_NAME = "drafter.json"


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens a student's head can propose.

    Attributes
    ----------
    tokens : Tensor
        Target token id of each row of the student's head, ascending, int64, shape ``[n]``.
    floor_log_p : float
        Log-probability given to a token outside the vocabulary: the log of the probability mass
        that the target itself puts outside, averaged over held-out generations. In nats.
    """

    tokens: Tensor
    floor_log_p: float


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the dotted name and the module list of a model's decoder layers.

    Raises
    ------
    InputError
        If the model has no list of ``config.num_hidden_layers`` modules.
    """
    n_layers = int(model.config.get_text_config().num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers and n_layers > 0:
            return name, module
    raise InputError(
        f"target={type(model).__name__}: found no list of {n_layers} decoder layers; "
        "stage=drafter needs a decoder-only model with a plain layer list"
    )


def student_config(target: PreTrainedModel, layers: Sequence[int]) -> Any:
    """Return the target's config cut down to ``layers`` (indices into the target's layers)."""
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    n_layers = int(text.num_hidden_layers)
    wrong = [i for i in layers if not 0 <= i < n_layers]
    if wrong or not layers:
        raise InputError(
            f"drafter.layers={list(layers)}: choose indices from 0 to {n_layers - 1} of the "
            f"target's {n_layers} layers"
        )
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[i] for i in layers]
    config.tie_word_embeddings = False
    return config


def build_student(
    target: PreTrainedModel, layers: Sequence[int], vocabulary: Tensor
) -> PreTrainedModel:
    """Start a student from the target's own layers.

    Parameters
    ----------
    target : PreTrainedModel
        The target; any decoder-only ``transformers`` causal LM.
    layers : sequence of int
        Which of the target's layers to start from, in order.
    vocabulary : Tensor
        Target token ids of the student's head rows, int64, shape ``[n]``.

    Returns
    -------
    PreTrainedModel
        Float32, on the target's device. The embedding is shared with the target (not copied) when
        the target is float32; embedding and head do not require gradients.
    """
    student = AutoModelForCausalLM.from_config(student_config(target, layers), dtype=torch.float32)
    prefix, _ = layer_list(target)
    source = target.state_dict()
    state: dict[str, Tensor] = {}
    for name in student.state_dict():
        if name.startswith(prefix + "."):
            index, rest = name[len(prefix) + 1 :].split(".", 1)
            state[name] = source[f"{prefix}.{layers[int(index)]}.{rest}"].float()
        elif name in source:
            state[name] = source[name].float()
    student.load_state_dict(state, strict=False)
    return _attach_shared(student, target, vocabulary)


def _attach_shared(
    student: PreTrainedModel, target: PreTrainedModel, vocabulary: Tensor
) -> PreTrainedModel:
    head = target.get_output_embeddings()
    rows = head.weight.detach()[vocabulary.to(head.weight.device)].float().clone()
    bias = getattr(head, "bias", None)
    small = nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None)
    small.weight = nn.Parameter(rows, requires_grad=False)
    if bias is not None:
        small.bias = nn.Parameter(
            bias.detach()[vocabulary.to(bias.device)].float().clone(), requires_grad=False
        )
    student.set_output_embeddings(small)
    student.get_input_embeddings().weight = nn.Parameter(
        target.get_input_embeddings().weight.detach().float(), requires_grad=False
    )
    return student.to(head.weight.device)


def own_state(student: PreTrainedModel) -> dict[str, Tensor]:
    """Return what a student does not share with its target: every weight but embedding and head."""
    shared = {
        id(p)
        for module in (student.get_input_embeddings(), student.get_output_embeddings())
        for p in module.parameters()
    }
    parameters = dict(student.named_parameters(remove_duplicate=False))
    return {n: t for n, t in student.state_dict().items() if id(parameters.get(n)) not in shared}


def save_student(
    folder: Path | str,
    student: PreTrainedModel,
    vocabulary: DraftVocabulary,
    meta: dict[str, Any],
) -> None:
    """Write ``student.safetensors`` (bf16), ``config.json`` and ``drafter.json`` to ``folder``."""
    folder = Path(folder)
    tensors = {n: t.detach().to(torch.bfloat16).contiguous() for n, t in own_state(student).items()}
    tensors["draft_vocabulary"] = vocabulary.tokens.to(torch.int32).contiguous()
    with atomic_path(folder / WEIGHTS_NAME) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    config = student.config.to_dict()
    config.pop("_name_or_path", None)
    write_json(folder / "config.json", config)
    write_json(
        folder / META_NAME,
        {"format": STUDENT_FORMAT, "floor_log_p": vocabulary.floor_log_p, **meta},
    )


def is_student(folder: Path | str) -> bool:
    """Whether ``folder`` holds a student written by :func:`save_student`."""
    return (Path(folder) / META_NAME).is_file()


def load_student(
    folder: Path | str, target: PreTrainedModel, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, DraftVocabulary]:
    """Load a student beside the target it was made from; float32, evaluation mode.

    Raises
    ------
    InputError
        If the folder is incomplete, damaged, or made for another target.
    """
    folder = Path(folder)
    try:
        meta = json.loads((folder / META_NAME).read_text(encoding="utf-8"))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with safe_open(folder / WEIGHTS_NAME, framework="pt") as reader:
            tensors = {name: reader.get_tensor(name) for name in list(reader.keys())}
        tokens = tensors.pop("draft_vocabulary").to(torch.int64)
        floor_log_p = float(meta["floor_log_p"])
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise InputError(
            f"pair.mid.path={folder}: not a complete student folder ({error}); "
            "make it with stage=drafter"
        ) from error
    table = target.get_input_embeddings().weight
    hidden = config.get_text_config().hidden_size
    if table.shape[1] != hidden or int(tokens.max()) >= table.shape[0]:
        raise InputError(
            f"pair.mid.path={folder}: made for a target with hidden size {hidden}, the target has "
            f"{table.shape[1]} and {table.shape[0]} tokens; train one with stage=drafter"
        )
    student = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing = set(own_state(student)) - set(tensors) - set(_shared_names(student))
    if missing:
        raise InputError(
            f"pair.mid.path={folder}: {WEIGHTS_NAME} lacks {sorted(missing)[0]}; "
            "make it again with stage=drafter"
        )
    student.load_state_dict({n: t.float() for n, t in tensors.items()}, strict=False)
    student = _attach_shared(student, target, tokens)
    student.eval().requires_grad_(False)
    return student, DraftVocabulary(tokens=tokens, floor_log_p=floor_log_p)


def _shared_names(model: PreTrainedModel) -> list[str]:
    shared = (model.get_input_embeddings(), model.get_output_embeddings())
    return [
        f"{name}.{p}"
        for name, module in model.named_modules()
        if module in shared
        for p, _ in module.named_parameters()
    ]
