"""Unmodified ``transformers`` causal LMs with a KV cache and tree attention by a 4D mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from treegraft_core import kernels
from treegraft_core.architectures import layer_kinds, refused_layer
from treegraft_core.errors import InputError
from treegraft_core.hidden import HiddenStates
from treegraft_core.packed import head_size
from treegraft_core.tree import IntArray

MIN_CAPACITY = 512
"""Tokens that a cache has room for at least, once its first pass is over."""
SCRATCH = 32 << 20
"""Bytes that libraries take for themselves in a pass, about."""
FEW_SLOTS = 6
"""Places that move one by one, without an index."""
BUCKETS = (1, 8, 32, 64, 128, 256)
"""Tokens of a pass of fixed shape."""
MOST_SHAPES = 64
"""Shapes that are compiled before torch falls back to eager passes."""


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which a model's forward takes its KV cache."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def max_context(model: Any) -> int:
    """Return the number of positions that a model or another mid drafter has."""
    if not isinstance(model, PreTrainedModel):
        return int(getattr(model, "max_positions", None) or 1 << 30)
    text = model.config.get_text_config()
    return int(getattr(text, "max_position_embeddings", 0) or 1 << 30)


@dataclass(frozen=True)
class Visibility:
    """What each token of a pass attends to.

    Attributes
    ----------
    end : int64 array, shape ``[q]``
        It sees the places before ``end[i]``: cached tokens first, then those of the pass,
    slots : int64 array, shape ``[q, m]``
        and these places. Its own is among either.
    """

    end: IntArray
    slots: IntArray

    @classmethod
    def causal(cls, length: int, q: int) -> Visibility:
        """Everything cached, and causally within the pass."""
        end = length + 1 + np.arange(q)
        return cls(end, end[:, None] - 1)


def additive(
    visible: Visibility,
    keys: IntArray,
    own: IntArray,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the mask of a pass, added to attention scores, shape ``[1, 1, q, keys]``.

    Parameters
    ----------
    visible : Visibility
        What each token sees.
    keys, own : int64 array
        Positions in the text of all keys and of the tokens of the pass.
    window : int or None
        Keys so many positions or more before a token are hidden.
    dtype, device
        Of the mask.
    """
    hidden = torch.finfo(dtype).min
    if device.type == "cpu":
        exact = dtype == torch.float64
        table = np.empty((len(own), len(keys)), np.float64 if exact else np.float32)
        kernels.additive_mask(table, visible.end, visible.slots, table.dtype.type(hidden))
        if window is not None:
            kernels.hide_far(table, own, keys, window, table.dtype.type(hidden))
        return torch.from_numpy(table).to(dtype)[None, None]
    numbers = [visible.end[:, None], visible.slots, own[:, None]]
    read = torch.from_numpy(np.concatenate(numbers, axis=1)).to(device)
    column = torch.arange(len(keys), device=device)
    seen = column[None, :] < read[:, :1]
    seen.scatter_(1, read[:, 1:-1], True)
    if window is not None:
        place = torch.from_numpy(keys).to(device)
        seen &= read[:, -1:] - place[None, :] < window
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen, hidden)[None, None]


class TreeLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with spare capacity."""

    keys: Tensor
    values: Tensor
    is_initialized: bool

    def __init__(self, **_: Any):
        super().__init__()
        self.used = 0
        self.slots: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the pass's keys and values after those in use; return all of them."""
        if self.slots is not None:
            self.keys.index_copy_(2, self.slots, key_states)
            self.values.index_copy_(2, self.slots, value_states)
            return self.keys, self.values
        end = self.used + key_states.shape[2]
        if not self.is_initialized:
            # The first pass of the first request: the buffers become views of one store after it.
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values = key_states, value_states
            self.is_initialized = True
        else:
            self.keys[:, :, self.used : end] = key_states
            self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """Return the tokens in use."""
        return self.used


def compiled(model: PreTrainedModel) -> Callable[..., Any]:
    """Return a model's forward, compiled for fixed shapes; CUDA graphs on a GPU."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_SHAPES)
    mode = "reduce-overhead" if model.device.type == "cuda" else None
    return torch.compile(model.forward, dynamic=False, mode=mode)


class CachedModel:
    """A causal LM and the keys and values of the tokens that it has read.

    Parameters
    ----------
    model : PreTrainedModel
        Any decoder-only ``transformers`` model with softmax attention in every layer. The cache is
        kept at full length in sliding-window layers too; their window is applied by the mask.
    compile : bool
        Run passes of up to 256 tokens through ``torch.compile`` in few fixed shapes:
        tokens filled up to one of `BUCKETS`, keys to the buffers' capacity. On a GPU each shape is
        one CUDA graph. A shape's first pass takes a minute or more.
    keep_hidden : sequence of int
        Keep what these layers read, for a mid drafter that reads it.

    Attributes
    ----------
    length : int
        Tokens in the cache.
    hidden : HiddenStates or None
        What the layers ``keep_hidden`` read, by place in the cache.
    sequential, keeps_drafts, target
        As in :class:`treegraft_core.mid.MidCache`.
    """

    sequential = False
    keeps_drafts = True
    target: CachedModel | None = None

    def __init__(
        self, model: PreTrainedModel, compile: bool = False, keep_hidden: Sequence[int] = ()
    ):
        if compile and keep_hidden:
            raise InputError(
                "runtime.compile=true: compiled passes keep no hidden states, which this mid "
                "drafter reads; set runtime.compile=false"
            )
        self.model = model
        self.hidden = HiddenStates(model, keep_hidden) if keep_hidden else None
        self._compiled = compiled(model) if compile else None
        self.device = model.device
        text = model.config.get_text_config()
        types = set(getattr(text, "layer_types", None) or [])
        refused = refused_layer(layer_kinds(model.config))
        if refused is not None:
            raise InputError(
                f"model={type(model).__name__}: has layers of type {refused[0]}, which cannot "
                "attend along a tree by a mask; use a model with full or sliding-window attention"
            )
        self._window = getattr(text, "sliding_window", None)
        self._types = types
        self._embeddings = int(model.get_input_embeddings().weight.shape[0])
        self._cache_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self.cache = Cache(layer_class_to_replicate=TreeLayer)
        self._stores: list[Tensor] = []
        self._slots: dict[int, Tensor] = {}
        self._capacity = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything read so far; the buffers stay."""
        self.positions = np.zeros(0, np.int64)
        self._set_used(0)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.positions)

    def run(
        self,
        tokens: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        visible: Visibility | None = None,
        rows: IntArray | None = None,
    ) -> Tensor:
        """Read ``tokens`` in one pass and keep their keys and values.

        If the pass fails, for lack of memory for example, the cache is as before.

        Parameters
        ----------
        tokens, positions : sequence of int, shape ``[q]``
            Token ids and their positions in the text.
        visible : Visibility, optional
            What each token attends to. Default: everything cached, and causally within the pass.
        rows : int64 array, optional
            The tokens of the pass whose logits are wanted (default: all).

        Returns
        -------
        Tensor
            Logits, float32 (float64 for a float64 model), shape ``[rows, vocabulary]``.
        """
        q, length = len(tokens), self.length
        # Only padding of the pair's wider head lies beyond the embedding of the other model.
        ids = np.minimum(np.asarray(tokens, np.int64), self._embeddings - 1)
        positions = np.asarray(positions, np.int64)
        keys = np.concatenate([self.positions, positions])
        fixed = self._compiled is not None and q <= BUCKETS[-1] and bool(self.cache.layers)
        if visible is None and (fixed or self._window is not None or (q > 1 and length)):
            visible = Visibility.causal(length, q)
        with torch.inference_mode():
            try:
                if fixed and visible is not None:
                    logits = self._run_fixed(ids, positions, visible)[:q]
                    logits = logits if rows is None else logits[torch.from_numpy(rows)]
                else:
                    logits = self._run(ids, positions, visible, keys, rows)
                logits = logits if logits.dtype == torch.float64 else logits.float()
            except BaseException:
                if not self._stores and not length:
                    # The first pass of all: some layers have no buffers yet.
                    self.cache = Cache(layer_class_to_replicate=TreeLayer)
                self._set_used(length)
                raise
            self._set_used(length + q)
            self.positions = keys
            return logits

    def _run(
        self,
        ids: IntArray,
        positions: IntArray,
        visible: Visibility | None,
        keys: IntArray,
        rows: IntArray | None,
    ) -> Tensor:
        self._reserve(len(keys))
        read = torch.from_numpy(np.stack([ids, positions])).to(self.device)
        arguments = self._arguments(read, None if visible is None else self._mask(visible, keys))
        index = None if rows is None else torch.tensor(rows, device=self.device)
        if index is not None and self._keeps_logits:
            arguments["logits_to_keep"] = index
        with self.hidden.watching(self.length) if self.hidden else nullcontext():
            logits: Tensor = self.model(**arguments).logits[0]
        if index is not None and not self._keeps_logits:
            logits = logits[index]
        return logits

    def _run_fixed(self, ids: IntArray, positions: IntArray, visible: Visibility) -> Tensor:
        # Tokens that only fill the shape write to the last place, which nobody sees, and see the
        # first one.
        q, length = len(ids), self.length
        size = next(n for n in BUCKETS if n >= q)
        self._reserve(length + q + 1)
        last = self._capacity - 1
        fill = size - q

        def filled(values: IntArray, value: int) -> IntArray:
            return np.concatenate([values, np.full((fill, *values.shape[1:]), value)])

        keys = np.zeros(self._capacity, np.int64)
        keys[:length] = self.positions
        keys[length : length + q] = positions
        mask = self._mask(
            Visibility(filled(visible.end, 1), filled(visible.slots, 0)), keys, filled(positions, 0)
        )
        numbers = np.stack(
            [filled(ids, 0), filled(positions, 0), filled(length + np.arange(q), last)]
        )
        read = torch.from_numpy(numbers).to(self.device)
        slots = self._slots.setdefault(size, read[2].clone())
        slots.copy_(read[2])
        for layer in self.cache.layers:
            layer.slots, layer.used = slots, self._capacity
        try:
            torch.compiler.cudagraph_mark_step_begin()
            assert self._compiled is not None
            return self._compiled(**self._arguments(read, mask)).logits[0]
        finally:
            for layer in self.cache.layers:
                layer.slots = None

    def _arguments(self, read: Tensor, mask: Any) -> dict[str, Any]:
        # Row 0 of ``read`` are token ids, row 1 positions.
        return {
            "input_ids": read[:1],
            "position_ids": read[1:2],
            "attention_mask": mask,
            self._cache_argument: self.cache,
            "use_cache": True,
        }

    def _mask(self, visible: Visibility, keys: IntArray, queries: IntArray | None = None) -> Any:
        own = keys[-len(visible.end) :] if queries is None else queries
        full = self._additive(visible, keys, own, None)
        if self._window is None:
            return full
        sliding = self._additive(visible, keys, own, self._window)
        if len(self._types) > 1:
            return {"full_attention": full, "sliding_attention": sliding}
        return full if self._types == {"full_attention"} else sliding

    def _additive(
        self, visible: Visibility, keys: IntArray, own: IntArray, window: int | None
    ) -> Tensor:
        return additive(visible, keys, own, window, self.model.dtype, self.device)

    def _set_used(self, length: int) -> None:
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.used = length

    def _reserve(self, capacity: int) -> None:
        # All layers' buffers of one shape are views of one store, so that the accepted path moves
        # into place by one operation, not by two a layer.
        if not self.cache.layers or capacity <= self._capacity:
            return
        capacity = max(capacity, self._capacity + self._capacity // 2, MIN_CAPACITY)
        if self._compiled is not None:
            capacity = 1 << (capacity - 1).bit_length()
        groups: dict[tuple[Any, ...], list[TreeLayer]] = {}
        for layer in self.cache.layers:
            if layer.is_initialized:
                shape = (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
                alone = id(layer) if self._compiled is not None else 0  # a graph's inputs: no views
                groups.setdefault((*shape, layer.dtype, layer.device, alone), []).append(layer)
        # Nothing changes before everything is there: memory may run out on the way.
        stores: list[Tensor] = []
        views: list[tuple[TreeLayer, str, Tensor]] = []
        with torch.inference_mode():
            for layers in groups.values():
                for name in ("keys", "values"):
                    like = getattr(layers[0], name)
                    if self._compiled is None:
                        store = like.new_zeros(
                            len(layers), *like.shape[:2], capacity, like.shape[3]
                        )
                        parts = list(store)
                    else:
                        parts = [like.new_zeros(*like.shape[:2], capacity, like.shape[3])]
                        torch._dynamo.mark_static_address(parts[0])
                        store = parts[0][None]
                    stores.append(store)
                    for part, layer in zip(parts, layers, strict=True):
                        part[:, :, : layer.used] = getattr(layer, name)[:, :, : layer.used]
                        views.append((layer, name, part))
        for layer, name, part in views:
            setattr(layer, name, part)
        self._stores, self._capacity = stores, capacity

    def shrink(self) -> None:
        """Give back the buffers' room beyond the cached tokens."""
        if self._capacity > max(self.length, MIN_CAPACITY):
            self._capacity = 0
            self._reserve(self.length)
        if self.hidden is not None:
            self.hidden.shrink(self.length)

    def bytes_of_pass(self, q: int) -> int:
        """Estimate the memory that a pass of ``q`` tokens takes, bytes, weights left out.

        Keys and values of everything cached, twice while the buffers grow; mask, logits, the
        widest activations, and the attention scores where the kernel makes them.
        """
        text = self.model.config.get_text_config()
        size = self.model.dtype.itemsize
        keys = self.length + q
        heads = int(getattr(text, "num_attention_heads", 1))
        hidden = int(text.hidden_size)
        inner = int(getattr(text, "intermediate_size", 0) or 4 * hidden)
        layers = int(getattr(text, "num_hidden_layers", 1))
        kv_heads = int(getattr(text, "num_key_value_heads", 0) or heads)
        head = int(getattr(text, "head_dim", 0) or hidden // heads)
        cached = layers * 2 * kv_heads * head * size
        capacity = self._capacity
        if keys > capacity:
            capacity += max(keys, capacity + capacity // 2)
        columns = head_size(self.model)
        scores = 0 if self.model.config._attn_implementation == "sdpa" else 2 * heads * (size + 4)
        return (
            SCRATCH
            + cached * capacity
            + q * keys * (2 + 2 * size + scores)
            + 2 * heads * head * keys * size
            + q * columns * (size + 8)
            + q * (8 * hidden + 3 * inner) * size
        )

    def keep(self, prefix: int, slots: Sequence[int] = ()) -> None:
        """Keep the first ``prefix`` cached tokens and, after them, those at ``slots``."""
        places = list(slots)
        length = prefix + len(places)
        if places != list(range(prefix, length)):
            self._reserve(self.length + 1)
            # From left to right none is overwritten before it has moved.
            few = len(places) <= FEW_SLOTS and places == sorted(places) and places[0] >= prefix
            index = None if few else torch.tensor(places, device=self.device)
            with torch.inference_mode():
                for store in self._stores:
                    if index is not None:
                        store[:, :, :, prefix:length] = store[:, :, :, index]
                        continue
                    for to, place in enumerate(places, start=prefix):
                        store[:, :, :, to] = store[:, :, :, place]
                if self.hidden is not None:
                    self.hidden.keep(prefix, places)
        self._set_used(length)
        self.positions = np.concatenate(
            [self.positions[:prefix], self.positions[np.asarray(places, np.int64)]]
        )


def all_finite(logits: Tensor) -> bool:
    """Tell whether logits hold no NaN and no infinity; one pass over them, no copy."""
    return bool(torch.isfinite(logits.sum(-1)).all())


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
        visible = Visibility(np.full(4, 5), np.array([[5, 5], [5, 6], [7, 7], [7, 8]]))
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
    if not (all_finite(together) and all_finite(expected)):
        raise InputError(
            f"pair.{role}={type(model).__name__}: its logits are NaN or infinite on a short text; "
            "repair its weights, or try engine.dtype=float32"
        )
    gap = float((together - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
    allowed = 0.1 if model.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if not gap <= allowed:
        raise InputError(
            f"pair.{role}={type(model).__name__}: reads a branch of a tree otherwise than the same "
            f"text alone (logits differ by {gap:.2g} of their range); use a decoder-only model "
            "that takes a 4D mask and position ids"
        )
