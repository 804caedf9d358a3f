"""Unmodified ``transformers`` causal LMs with a KV cache and tree attention by a 4D mask."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from treegraft_core.errors import InputError

UNSUPPORTED_LAYERS = (
    "linear_attention",
    "mamba",
    "conv",
    "recurrent",
    "chunked_attention",
    "local",
)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which a model's forward takes its KV cache."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def max_context(model: PreTrainedModel) -> int:
    """Return the number of positions that a model has."""
    text = model.config.get_text_config()
    return int(getattr(text, "max_position_embeddings", 0) or 1 << 30)


class CachedModel:
    """A causal LM and the keys and values of the tokens that it has read.

    Parameters
    ----------
    model : PreTrainedModel
        Any decoder-only ``transformers`` model with softmax attention in every layer. The cache is
        kept at full length in sliding-window layers too; their window is applied by the mask.

    Attributes
    ----------
    length : int
        Tokens in the cache.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.device = model.device
        text = model.config.get_text_config()
        types = set(getattr(text, "layer_types", None) or [])
        for kind in types | set(getattr(text, "attention_layers", None) or []):
            if kind.startswith(UNSUPPORTED_LAYERS):
                raise InputError(
                    f"model={type(model).__name__}: has layers of type {kind}, which cannot attend "
                    "along a tree by a mask; use a model with full or sliding-window attention"
                )
        self._window = getattr(text, "sliding_window", None)
        self._types = types
        self._embeddings = int(model.get_input_embeddings().weight.shape[0])
        self._cache_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self.reset()

    def reset(self) -> None:
        """Forget everything read so far."""
        self.cache = DynamicCache()
        self.positions = np.zeros(0, np.int64)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.positions)

    def run(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        positions: Sequence[int] | NDArray[np.int64],
        visible: NDArray[np.bool_] | None = None,
        rows: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Read ``tokens`` in one pass and keep their keys and values.

        Parameters
        ----------
        tokens, positions : sequence of int, shape ``[q]``
            Token ids and their positions in the text.
        visible : bool array, shape ``[q, length + q]``, optional
            What each token attends to: the cache as it stands, then the pass itself. Default:
            everything cached, and causally within the pass.
        rows : int64 array, optional
            The tokens of the pass whose logits are wanted (default: all).

        Returns
        -------
        Tensor
            Logits, float32 (float64 for a float64 model), shape ``[rows, vocabulary]``.
        """
        q = len(tokens)
        # Only padding of the pair's wider head lies beyond the embedding of the other model.
        ids = np.minimum(np.asarray(tokens, np.int64), self._embeddings - 1)
        positions = np.asarray(positions, np.int64)
        keys = np.concatenate([self.positions, positions])
        if visible is None and (self._window is not None or (q > 1 and self.length)):
            visible = np.ones((q, len(keys)), bool)
            visible[:, self.length :] = np.tri(q, dtype=bool)
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor(ids[None], device=self.device),
            "position_ids": torch.tensor(positions[None], device=self.device),
            "attention_mask": None if visible is None else self._mask(visible, positions, keys),
            self._cache_argument: self.cache,
            "use_cache": True,
        }
        index = None if rows is None else torch.tensor(rows, device=self.device)
        if index is not None and self._keeps_logits:
            arguments["logits_to_keep"] = index
        with torch.inference_mode():
            logits = self.model(**arguments).logits[0]
        if index is not None and not self._keeps_logits:
            logits = logits[index]
        self.positions = keys
        return logits if logits.dtype == torch.float64 else logits.float()

    def _mask(
        self, visible: NDArray[np.bool_], positions: NDArray[np.int64], keys: NDArray[np.int64]
    ) -> Any:
        full = self._additive(visible)
        if self._window is None:
            return full
        near = visible & (positions[:, None] - keys[None, :] < self._window)
        sliding = full if near.all() else self._additive(near)
        if len(self._types) > 1:
            return {"full_attention": full, "sliding_attention": sliding}
        return full if self._types == {"full_attention"} else sliding

    def _additive(self, visible: NDArray[np.bool_]) -> Tensor:
        seen = torch.tensor(visible, device=self.device)[None, None]
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=self.device)
        return mask.masked_fill_(~seen, torch.finfo(self.model.dtype).min)

    def keep(self, prefix: int, slots: Sequence[int] = ()) -> None:
        """Keep the first ``prefix`` cached tokens and, after them, those at ``slots``."""
        length = prefix + len(slots)
        if length == self.length and not len(slots):
            return
        index = torch.tensor(list(slots), dtype=torch.long, device=self.device)
        with torch.inference_mode():
            for layer in self.cache.layers:
                for name in ("keys", "values"):
                    stored = getattr(layer, name)
                    if len(slots):
                        stored[:, :, prefix:length] = stored[:, :, index]
                    setattr(layer, name, stored[:, :, :length])
        self.positions = np.concatenate(
            [self.positions[:prefix], self.positions[np.asarray(slots, np.int64)]]
        )


def tree_mask(
    length: int, prefix: int, ancestors: Sequence[Sequence[int]], q: int
) -> NDArray[np.bool_]:
    """Return the visibility ``[q, length + q]`` of a pass over tree nodes.

    Every node sees the first ``prefix`` cached tokens, the columns listed in its ``ancestors``,
    and itself.
    """
    visible = np.zeros((q, length + q), bool)
    visible[:, :prefix] = True
    visible[np.arange(q), length + np.arange(q)] = True
    for row, columns in enumerate(ancestors):
        visible[row, list(columns)] = True
    return visible


def check_tree_attention(model: PreTrainedModel, role: str) -> None:
    """Check that a model reads two branches in one pass as it reads each text alone.

    A model that takes no position ids, or that ignores them or the mask (ALiBi, recurrent layers),
    would draft or verify wrongly without any error.

    Raises
    ------
    InputError
        If the logits differ by more than rounding, or the model refuses the mask.
    """
    vocab = int(model.get_input_embeddings().weight.shape[0])
    text = [(7 * i + 3) % vocab for i in range(5)]
    branches = [[11 % vocab, 5 % vocab], [13 % vocab, 2 % vocab]]
    try:
        cached = CachedModel(model)
        cached.run(text, np.arange(5))
        visible = tree_mask(5, 5, [[], [5], [], [7]], 4)
        together = cached.run([t for b in branches for t in b], [5, 6, 5, 6], visible)[[1, 3]]
        alone = []
        for branch in branches:
            cached.reset()
            alone.append(cached.run(text + branch, np.arange(7))[-1])
    except InputError:
        raise
    except Exception as error:  # a model's forward may fail in any way
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"pair.{role}={type(model).__name__}: cannot run tree attention ({reason[:120]}); use "
            "a decoder-only model that takes a 4D mask and position ids"
        ) from error
    expected = torch.stack(alone)
    gap = float((together - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
    allowed = 0.1 if model.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if not gap <= allowed:
        raise InputError(
            f"pair.{role}={type(model).__name__}: reads a branch of a tree otherwise than the same "
            f"text alone (logits differ by {gap:.2g} of their range); use a decoder-only model "
            "that takes a 4D mask and position ids"
        )
