"""Folders of heads: this project's own, and the published layouts of EAGLE-3 and speculators."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from treegraft_core.errors import InputError
from treegraft_core.files import atomic_path, write_json
from treegraft_core.head import HeadConfig, TrainedHead
from treegraft_core.hidden import HiddenStates
from treegraft_core.student import META_NAME, DraftVocabulary

HEAD_FORMAT = 1
HEAD_KIND = "head"
WEIGHTS_NAME = "head.safetensors"


def save_head(
    folder: Path | str, head: TrainedHead, vocabulary: DraftVocabulary, meta: dict[str, Any]
) -> None:
    """Write ``head.safetensors`` (bf16) and ``drafter.json``; not what the target has, too."""
    folder = Path(folder)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
        if not name.startswith("lm_head.")
    }
    tensors["draft_vocabulary"] = vocabulary.tokens.to(torch.int32).contiguous()
    with atomic_path(folder / WEIGHTS_NAME) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_json(
        folder / META_NAME,
        {
            "format": HEAD_FORMAT,
            "kind": HEAD_KIND,
            "floor_log_p": vocabulary.floor_log_p,
            "config": asdict(head.config),
            **meta,
        },
    )


def is_head(folder: Path | str) -> bool:
    """Whether ``folder`` holds a head, in any of the layouts that :func:`load_head` reads."""
    folder = Path(folder)
    if (folder / META_NAME).is_file():
        return _json(folder / META_NAME).get("kind") == HEAD_KIND
    return (folder / "config.json").is_file() and _layout(_json(folder / "config.json")) != ""


def load_head(
    folder: Path | str, target: PreTrainedModel
) -> tuple[TrainedHead, DraftVocabulary | None]:
    """Load a head beside its target, in the target's precision and on its device.

    Read are folders of ``stage=drafter drafter=head``, and those of EAGLE-3 and of speculators as
    published: ``config.json`` and safetensors.

    Raises
    ------
    InputError
        If the folder is incomplete or damaged, or does not fit the target; the message names the
        tensor.
    """
    folder = Path(folder)
    load = _load_own if (folder / META_NAME).is_file() else _load_published
    head, vocabulary = load(folder, target)
    head = head.to(device=target.device, dtype=target.dtype)
    return head.eval().requires_grad_(False), vocabulary


def _error(folder: Path, reason: object, remedy: str) -> InputError:
    return InputError(f"pair.mid.path={folder}: {reason}; {remedy}")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _layout(config: dict[str, Any]) -> str:
    if str(config.get("speculators_model_type", "")).lower() == "eagle3":
        return "speculators"
    names = " ".join(map(str, config.get("architectures") or []))
    return "eagle3" if "eagle3" in names.lower() else ""


def _tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _error(
            folder,
            "holds no safetensors file",
            "weights are not read from pickles, which can run code; convert them to safetensors",
        )
    found: dict[str, Tensor] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as reader:
                found |= {name: reader.get_tensor(name) for name in list(reader.keys())}
    except (OSError, SafetensorError, ValueError) as error:
        raise _error(folder, f"{file.name} cannot be read ({error})", "copy it again") from error
    return found


def _fill(folder: Path, head: TrainedHead, tensors: dict[str, Tensor]) -> None:
    """Put tensors into a head; all but the output head's must be there and of its shape."""
    for name, place in head.state_dict().items():
        given = tensors.get(name)
        if given is None:
            raise _error(folder, f"lacks the tensor {name}", "give a complete head")
        if given.shape != place.shape:
            raise _error(
                folder,
                f"the tensor {name} has shape {list(given.shape)}, not {list(place.shape)}",
                "give a head made for this target",
            )
    with torch.no_grad():
        head.load_state_dict({name: tensors[name].float() for name in head.state_dict()})


def _check_target(folder: Path, config: HeadConfig, target: PreTrainedModel) -> None:
    width = int(target.config.get_text_config().hidden_size)
    if config.target_hidden_size != width:
        raise _error(
            folder,
            f"made for a target with hidden size {config.target_hidden_size}, this one has {width}",
            "give a head made for this target",
        )
    HiddenStates(target, config.layers)


def _load_own(folder: Path, target: PreTrainedModel) -> tuple[TrainedHead, DraftVocabulary]:
    meta, tensors = _json(folder / META_NAME), _tensors(folder)
    try:
        if meta["format"] != HEAD_FORMAT:
            raise ValueError(f"format {meta['format']}, not {HEAD_FORMAT}")
        tokens = tensors.pop("draft_vocabulary").to(torch.int64)
        values = dict(meta["config"])
        config = HeadConfig(**{**values, "layers": tuple(int(i) for i in values["layers"])})
        vocabulary = DraftVocabulary(tokens, float(meta["floor_log_p"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _error(
            folder, f"not a complete head folder ({error})", "make it with stage=drafter"
        ) from error
    _check_target(folder, config, target)
    weight = output_rows(target)
    if int(tokens.max()) >= len(weight) or len(tokens) != config.vocabulary:
        raise _error(
            folder,
            f"the tensor draft_vocabulary holds {len(tokens)} tokens up to {int(tokens.max())}, "
            f"the target's head has {len(weight)} rows",
            "give a head made for this target",
        )
    head = _empty(config, target.get_input_embeddings(), False, folder)
    tensors["lm_head.weight"] = weight[tokens.to(weight.device)]
    _fill(folder, head, tensors)
    return head, vocabulary


def output_rows(target: PreTrainedModel) -> Tensor:
    """Return the weight of the target's output head, ``[rows, hidden]``; packed or not."""
    head = target.get_output_embeddings()
    packed = getattr(head, "packed", None)
    weight: Tensor = head.weight if packed is None else packed.to_dense()
    return weight.detach()


def _empty(config: HeadConfig, embedding: nn.Module, own: bool, folder: Path) -> TrainedHead:
    try:
        return TrainedHead(config, embedding, own)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise _error(folder, f"no head of such a shape ({error})", "repair its config") from error


# Published layouts ------------------------------------------------------------------------------

UNKNOWN_FLOOR_LOG_P = -5.0
"""Log p of a token outside a published head's vocabulary, which does not tell that mass, nats."""
UNREAD = ("norm_before_fc", "fc_norm", "norm_output", "sliding_window")
"""Options of some published heads that change what they compute, not read here."""


def default_layers(layers: int) -> tuple[int, ...]:
    """Return the layers that EAGLE-3 reads of a target of ``layers`` layers."""
    return 2, layers // 2, layers - 3


def _load_published(
    folder: Path, target: PreTrainedModel
) -> tuple[TrainedHead, DraftVocabulary | None]:
    given = _json(folder / "config.json")
    speculators = _layout(given) == "speculators"
    shape = given.get("transformer_layer_config", {}) if speculators else given
    options = {**shape, **given}
    unread = [name for name in UNREAD if options.get(name)]
    if unread:
        raise _error(
            folder, f"config.json sets {unread[0]}, which is not read here", "give another head"
        )
    tensors = {_name(name): tensor for name, tensor in _tensors(folder).items()}
    t2d, d2t = tensors.pop("t2d", None), tensors.pop("d2t", None)
    own = "embed_tokens.weight" in tensors
    config = _published_config(folder, shape, given, tensors, target, speculators)
    _check_target(folder, config, target)
    embedding = target.get_input_embeddings()
    if own:
        embedding = nn.Embedding(*tensors["embed_tokens.weight"].shape)
    elif int(embedding.weight.shape[1]) != config.hidden_size:
        raise _error(folder, "lacks the tensor embed_tokens.weight", "give a complete head")
    if "lm_head.weight" not in tensors and d2t is None:
        tensors["lm_head.weight"] = output_rows(target)
    head = _empty(config, embedding, own, folder)
    extra = sorted(set(tensors) - set(head.state_dict()))
    if extra:
        raise _error(folder, f"the tensor {extra[0]} is not of this layout", "give another head")
    _fill(folder, head, tensors)
    return head, _vocabulary(folder, d2t, t2d, config.vocabulary, target)


def _name(name: str) -> str:
    """Return a tensor's name as EAGLE-3 has it."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _published_config(
    folder: Path,
    shape: dict[str, Any],
    given: dict[str, Any],
    tensors: dict[str, Tensor],
    target: PreTrainedModel,
    speculators: bool,
) -> HeadConfig:
    text = target.config.get_text_config()
    layers = given.get("eagle_aux_hidden_state_layer_ids")
    head = tensors.get("lm_head.weight")
    rows = len(output_rows(target)) if head is None else len(head)
    try:
        if int(shape.get("num_hidden_layers", 1)) != 1:
            raise ValueError(f"num_hidden_layers={shape['num_hidden_layers']}, not 1")
        size, heads = int(shape["hidden_size"]), int(shape["num_attention_heads"])
        rope = dict(shape.get("rope_parameters") or shape.get("rope_scaling") or {})
        if "type" in rope:
            rope.setdefault("rope_type", rope.pop("type"))
        rope.setdefault("rope_theta", float(shape.get("rope_theta", 10_000.0)))
        return HeadConfig(
            hidden_size=size,
            intermediate_size=int(shape["intermediate_size"]),
            target_hidden_size=int(given.get("target_hidden_size") or text.hidden_size),
            heads=heads,
            kv_heads=int(shape.get("num_key_value_heads") or heads),
            head_dim=int(shape.get("head_dim") or size // heads),
            layers=tuple(map(int, layers or default_layers(int(text.num_hidden_layers)))),
            vocabulary=rows,
            rms_norm_eps=float(shape.get("rms_norm_eps", 1e-6)),
            rope=rope,
            max_positions=int(shape.get("max_position_embeddings") or 1 << 30),
            bias=bool(shape.get("attention_bias", False)),
            # As speculators does unless its config says otherwise, and EAGLE-3 does not.
            norm_before_residual=bool(given.get("norm_before_residual", speculators)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _error(
            folder, f"config.json is not that of such a head ({error})", "repair it"
        ) from error


def _vocabulary(
    folder: Path, d2t: Tensor | None, t2d: Tensor | None, rows: int, target: PreTrainedModel
) -> DraftVocabulary | None:
    """Return the tokens of the output head's rows: row i stands for token i + d2t[i]."""
    if d2t is None:
        return None
    tokens = torch.arange(len(d2t)) + d2t.to(torch.int64)
    vocab = len(output_rows(target))
    if len(d2t) != rows or int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise _error(
            folder,
            f"the tensor d2t maps {len(d2t)} rows to tokens {int(tokens.min())} … "
            f"{int(tokens.max())}; the output head has {rows} rows, the target {vocab} tokens",
            "give a head made for this target",
        )
    if len(tokens.unique()) != len(tokens):
        raise _error(folder, "the tensor d2t names a token twice", "repair it")
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], tokens.sort().values):
        raise _error(folder, "the tensors d2t and t2d name different tokens", "repair them")
    return DraftVocabulary(tokens, UNKNOWN_FLOOR_LOG_P)
