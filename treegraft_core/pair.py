"""A target and its mid drafter, loaded and checked."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from treegraft_core.architectures import check_path
from treegraft_core.embedded import EMBEDDED_TARGET, embedded_target
from treegraft_core.errors import InputError
from treegraft_core.head import TrainedHead
from treegraft_core.head_layouts import is_head, load_head
from treegraft_core.mid import OWN, MidCache, hidden_layers, own_mid
from treegraft_core.models import CachedModel, check_tree_attention, max_context
from treegraft_core.packed import head_size, pack_linears
from treegraft_core.student import DraftVocabulary, is_student, load_student
from treegraft_core.tokenizers import check_same_tokenizer

log = logging.getLogger(__name__)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass
class Pair:
    """A target, its mid drafter and their tokenizer.

    Attributes
    ----------
    name : str
        The pair's name in paths and tables.
    target : PreTrainedModel
        An unmodified ``transformers`` causal LM in evaluation mode.
    mid : PreTrainedModel or another mid drafter
        The same, on the target's device, or an object as :mod:`treegraft_core.mid` describes, such
        as a :class:`treegraft_core.head.TrainedHead`.
    tokenizer : PreTrainedTokenizerBase
        The target's.
    vocabulary : DraftVocabulary or None
        Of a student whose head covers only part of the vocabulary.
    eos_token_ids : tuple of int
        Tokens that end an answer.
    """

    name: str
    target: PreTrainedModel
    mid: Any
    tokenizer: PreTrainedTokenizerBase
    vocabulary: DraftVocabulary | None = None
    eos_token_ids: tuple[int, ...] = field(default=())

    @property
    def target_vocab(self) -> int:
        """Rows of the target's head."""
        return head_size(self.target)

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return self.target.device

    @property
    def max_context(self) -> int:
        """Tokens that both models have positions for."""
        return min(max_context(self.target), max_context(self.mid))

    def open_target(self, compile: bool = False) -> CachedModel:
        """Return a new cache of the target, which keeps the hidden states that ``mid`` reads."""
        return CachedModel(self.target, compile, hidden_layers(self.mid))

    def open_mid(self, target: CachedModel | None = None, compile: bool = False) -> MidCache:
        """Return a new cache of the mid drafter.

        Parameters
        ----------
        target : CachedModel, optional
            The target's cache of the same request (default: a new one, which the result has as
            ``target`` if it reads it).
        compile : bool
            As in `RuntimeConfig`; for a ``transformers`` model.
        """
        if isinstance(self.mid, PreTrainedModel):
            return CachedModel(self.mid, compile)
        opened: MidCache = self.mid.open(target or self.open_target())
        return opened

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next is honest; nothing to do on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


def fast_bfloat16(device: str) -> bool:
    """Whether matrix products in bfloat16 are faster than in float32 on this device."""
    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device == "cpu":
        # Without AMX or AVX-512 BF16 a bfloat16 pass over many tokens is several times slower.
        probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        return any(getattr(torch.cpu, name, lambda: False)() for name in probes)
    return False


def resolve_device(device: str) -> str:
    """Return ``device``, with ``auto`` as CUDA, then MPS, then CPU.

    Raises
    ------
    InputError
        If the device is not there.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    kind = device.split(":")[0]
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(kind, False):
        raise InputError(f"engine.device={device}: not on this machine; choose auto or cpu")
    return device


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """Return a torch dtype; ``auto`` is bfloat16 where that is fast, else float32.

    Raises
    ------
    InputError
        If the name is unknown.
    """
    if dtype == "auto":
        return torch.bfloat16 if fast_bfloat16(device) else torch.float32
    if dtype not in DTYPES:
        raise InputError(f"engine.dtype={dtype}: choose auto or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_weights(path: str, role: str) -> None:
    """Raise `InputError` if a local folder holds its weights as pickles only.

    Reading a pickle can run code, so weights come from safetensors alone.
    """
    folder = Path(path)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLED)
    if pickles:
        raise InputError(
            f"pair.{role}.path={path}: {pickles[0]} is a pickle, which can run code when it is "
            "read; convert the weights to safetensors (model.save_pretrained(FOLDER))"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _load(path: str, role: str, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    check_weights(path, role)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except Exception as error:  # hub, config and weight errors share no base class
        raise InputError(
            f"pair.{role}.path={path}: cannot be loaded ({_first_line(error)}); "
            f"{_remedy(error, 'give a local folder of a transformers causal LM')} or a hub id that "
            "can be reached"
        ) from error
    return model.eval().requires_grad_(False)


def _remedy(error: BaseException, otherwise: str) -> str:
    if "trust_remote_code" in str(error):
        return "set engine.trust_remote_code=true if you trust its Python files, or give another"
    return otherwise


def load_tokenizer(
    path: str, role: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer; errors name the role."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exception on damaged files
        raise InputError(
            f"pair.{role}.path={path}: its tokenizer cannot be loaded ({_first_line(error)}); "
            f"{_remedy(error, 'the folder needs the tokenizer files')}"
        ) from error


def resolve_path(path: str, cache: Path | None = None) -> str:
    """Return a model path, converting the embedded target on first use."""
    if path == EMBEDDED_TARGET:
        return str(embedded_target(cache))
    if path.startswith("embedded:"):
        raise InputError(f"pair.target.path={path}: the only embedded model is {EMBEDDED_TARGET}")
    return path


def load_target(
    path: str,
    device: str = "auto",
    dtype: str = "auto",
    cache: Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target and its tokenizer; arguments as in `load_pair`."""
    device = resolve_device(device)
    resolved = resolve_path(path, cache)
    check_path(resolved, "target", trust_remote_code)
    tokenizer = load_tokenizer(resolved, "target", trust_remote_code)
    model = _load(resolved, "target", resolve_dtype(dtype, device), trust_remote_code)
    return model.to(device), tokenizer


def load_mid(
    mid: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, DraftVocabulary | None]:
    """Load the mid drafter of a loaded target, and its vocabulary if it has its own."""
    if mid.startswith(OWN):
        return own_mid(mid, target, tokenizer, trust_remote_code), None
    if is_head(mid):
        return load_head(mid, target)
    if is_student(mid):
        drafter, vocabulary = load_student(mid, target, trust_remote_code)
        return drafter.to(device=target.device, dtype=target.dtype), vocabulary
    resolved = resolve_path(mid, cache)
    check_path(resolved, "mid", trust_remote_code)
    check_same_tokenizer(tokenizer, load_tokenizer(resolved, "mid", trust_remote_code))
    return _load(resolved, "mid", target.dtype, trust_remote_code).to(target.device), None


def load_pair(
    target: str,
    mid: str,
    name: str = "pair",
    device: str = "auto",
    dtype: str = "auto",
    cache: Path | str | None = None,
    pack: bool = True,
    trust_remote_code: bool = False,
) -> Pair:
    """Load a pair and check that both models speak the same tokens.

    Parameters
    ----------
    target : str
        Local folder or hub id of the target, or ``embedded:smollm2-135m-instruct``.
    mid : str
        Local folder or hub id of the mid drafter, a folder written by ``stage=drafter``, or one of
        a published EAGLE-3 or speculators head.
    name : str
        The pair's name in paths and tables.
    device : str
        ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps``.
    dtype : str
        ``auto``, ``float32``, ``bfloat16``, ``float16``, ``float64``.
    cache : path, optional
        Where the embedded target is converted to (default ``~/.cache/treegraft``).
    pack : bool
        On a CPU in float32, keep the weights of linear layers in oneDNN's layout, in which passes
        over a few tokens cost half (:mod:`treegraft_core.packed`).
    trust_remote_code : bool
        Run Python files that come with a model. Without it, code from nobody; weights are read
        from safetensors either way, never from pickles.

    Raises
    ------
    InputError
        If a model cannot be loaded or the tokenizers differ; the message names the first token
        that differs.
    """
    home = Path(cache) if cache else None
    if not (mid.startswith(OWN) or is_head(mid) or is_student(mid)):
        check_path(resolve_path(mid, home), "mid", trust_remote_code)  # before the target is read
    model, tokenizer = load_target(target, device, dtype, home, trust_remote_code)
    drafter, vocabulary = load_mid(mid, model, tokenizer, home, trust_remote_code)
    for role, loaded in (("target", model), ("mid", drafter)):
        if pack and isinstance(loaded, PreTrainedModel | TrainedHead):
            pack_linears(loaded)
        if isinstance(loaded, PreTrainedModel):
            check_tree_attention(loaded, role)
    eos = eos_tokens(model, tokenizer)
    plain_generation(model)
    return Pair(
        name=name,
        target=model,
        mid=drafter,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        eos_token_ids=eos,
    )


HARMLESS = (
    "transformers_version",
    "_from_model_config",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
)
"""Generation settings that do not change which tokens come."""


def plain_generation(model: PreTrainedModel) -> None:
    """Drop the sampling defaults and penalties that a model ships; say which.

    Greedy decoding here is the argmax of the model's own logits, also in ``model.generate``.
    """
    old = model.generation_config
    keep = ("eos_token_id", "bos_token_id", "pad_token_id")
    new = GenerationConfig(**{name: getattr(old, name) for name in keep})
    changed = sorted(
        name
        for name, value in old.to_diff_dict().items()
        if name not in (*keep, *HARMLESS) and value != getattr(new, name, None)
    )
    if changed:
        log.warning("the model's own generation defaults are not used: %s", ", ".join(changed))
    model.generation_config = new


def eos_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end an answer: the generation config's, else the tokenizer's."""
    value = getattr(model.generation_config, "eos_token_id", None)
    if value is None:
        value = tokenizer.eos_token_id
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
