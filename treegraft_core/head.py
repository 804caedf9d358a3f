"""A trained head as mid drafter: one transformer layer on the target's hidden states (EAGLE-3).

The layout is that of EAGLE-3 (arXiv 2503.01840). A token's entry reads its embedding and a
*feature* of the token before it, side by side. Where the target has read the token before, that is
the target's hidden states of a few layers, fused to one width; in a draft, where it has not, it is
the head's own output there, so that a path of drafts is read level by level. The first token of a
text has no token before it; its entry is seen by no other.

Embedding and output head are the target's, the latter cut to a draft vocabulary, unless a
checkpoint has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from treegraft_core.mid import predecessors
from treegraft_core.models import MIN_CAPACITY, SCRATCH, CachedModel, Visibility, additive
from treegraft_core.tree import BoolArray, IntArray


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head.

    Attributes
    ----------
    hidden_size, intermediate_size : int
        Width of the head and of its MLP.
    target_hidden_size : int
        Width of the target's layers.
    heads, kv_heads, head_dim : int
        Of its attention.
    layers : tuple of int
        Layers of the target whose inputs it reads; see :class:`HiddenStates`.
    vocabulary : int
        Rows of its output head.
    rms_norm_eps : float
        Added to the mean square in a norm.
    rope : dict
        ``rope_theta`` and what else :class:`LlamaConfig` takes as ``rope_parameters``.
    max_positions : int
        Positions that it was made for.
    bias : bool
        Whether the attention's projections have a bias.
    norm_before_residual : bool
        Whether the feature is normed before it goes past the attention.
    """

    hidden_size: int
    intermediate_size: int
    target_hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
    vocabulary: int
    rms_norm_eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 10_000.0})
    max_positions: int = 1 << 30
    bias: bool = False
    norm_before_residual: bool = False


class Norm(nn.Module):
    """A root mean square norm, as Llama's."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed input."""
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """The projections of the attention: queries, keys and values read twice the head's width."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        wide, bias = 2 * config.hidden_size, config.bias
        self.q_proj = nn.Linear(wide, config.heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(wide, config.kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(wide, config.kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden_size, bias=bias)


class Mlp(nn.Module):
    """The gated MLP, as Llama's."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(*sizes, bias=False)
        self.up_proj = nn.Linear(*sizes, bias=False)
        self.down_proj = nn.Linear(*sizes[::-1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output."""
        y: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys ``[…, heads, head_dim]`` turned by their positions."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos[..., None, :] + turned * sin[..., None, :]


class HeadLayer(nn.Module):
    """The one transformer layer, in parts, so that a caller keeps keys and values where it likes.

    Parameters
    ----------
    config : HeadConfig
        Its shape.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = Norm(size, eps)
        self.input_layernorm = Norm(size, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = Mlp(config)

    def enter(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the projections read, ``[…, 2 H]``, and what goes past the attention."""
        normed = self.hidden_norm(features)
        past = normed if self.config.norm_before_residual else features
        return torch.cat([self.input_layernorm(embeddings), normed], -1), past

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the queries, shape ``[…, heads, head_dim]``."""
        q = self.self_attn.q_proj(x).unflatten(-1, (self.config.heads, self.config.head_dim))
        return rotated(q, cos, sin)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, shape ``[…, kv_heads, head_dim]``."""
        shape = (self.config.kv_heads, self.config.head_dim)
        k = self.self_attn.k_proj(x).unflatten(-1, shape)
        return rotated(k, cos, sin), self.self_attn.v_proj(x).unflatten(-1, shape)

    def leave(self, attended: Tensor, past: Tensor) -> Tensor:
        """Return the layer's output for attended values ``[…, heads, head_dim]``."""
        y = past + self.self_attn.o_proj(attended.flatten(-2))
        out: Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return out


class TrainedHead(nn.Module):
    """A head beside its target; weights as EAGLE-3 names them.

    Parameters
    ----------
    config : HeadConfig
        Its shape.
    embedding : nn.Module
        From token ids to embeddings of the head's width: the target's, or a checkpoint's own.
    own_embedding : bool
        Whether the embedding belongs to the head.
    """

    family = "head"

    def __init__(self, config: HeadConfig, embedding: nn.Module, own_embedding: bool = False):
        super().__init__()
        self.config = config
        fused = len(config.layers) * config.target_hidden_size
        self.fc = nn.Linear(fused, config.hidden_size, bias=False)
        self.midlayer = HeadLayer(config)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocabulary, bias=False)
        if own_embedding:
            self.embed_tokens = embedding
        self._embedding = [embedding]  # in a list: a shared one is no part of this module
        rope = {"rope_type": "default", **config.rope}
        self._rotary = [
            LlamaRotaryEmbedding(
                LlamaConfig(
                    hidden_size=config.hidden_size,
                    num_attention_heads=config.heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=min(config.max_positions, 1 << 30),
                    rope_parameters=rope,
                )
            )
        ]

    family = "head"

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the head reads."""
        return self.config.layers

    @property
    def max_positions(self) -> int:
        """Positions that the head was made for."""
        return self.config.max_positions

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.norm.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of token ids, in the head's precision."""
        embedding: Any = self._embedding[0]
        rows = int(embedding.weight.shape[0])
        # Only padding of a wider head lies beyond the embedding.
        found: Tensor = embedding(tokens.clamp(max=rows - 1))
        return found.to(device=self.device, dtype=self.dtype)

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions ``[…]``, shape ``[…, head_dim]``."""
        rotary = self._rotary[0].to(positions.device)
        like = torch.empty(0, dtype=self.dtype, device=positions.device)
        cos, sin = rotary(like, positions.reshape(1, -1))
        shape = (*positions.shape, self.config.head_dim)
        return cos.reshape(shape), sin.reshape(shape)

    def logits(self, output: Tensor) -> Tensor:
        """Return the logits of the layer's output, one a token of the draft vocabulary."""
        found: Tensor = self.lm_head(self.norm(output))
        return found

    def open(self, target: CachedModel) -> CachedHead:
        """Return the head in a request of ``target``, whose cache keeps what the head reads."""
        return CachedHead(self, target)


class CachedHead:
    """A head in one request, a :class:`treegraft_core.mid.MidCache`.

    Committed tokens are those read causally from the first one on; they take the target's hidden
    states, all others the head's own output at the token before. So a distribution depends on text
    and path alone, whatever was drafted before.

    Parameters
    ----------
    head : TrainedHead
        The weights.
    target : CachedModel
        The target's cache of the same request, with ``keep_hidden=head.hidden_layers``.
    """

    sequential = True
    keeps_drafts = False

    def __init__(self, head: TrainedHead, target: CachedModel):
        if target.hidden is None or target.hidden.layers != head.hidden_layers:
            raise ValueError(
                f"target: its cache must keep the hidden states of layers {head.hidden_layers}"
            )
        self.head, self.target = head, target
        config = head.config
        self._keys = torch.zeros(
            0, 2, config.kv_heads, config.head_dim, dtype=head.dtype, device=head.device
        )
        self._outputs = torch.zeros(0, config.hidden_size, dtype=head.dtype, device=head.device)
        self.reset()

    @property
    def length(self) -> int:
        """Tokens read."""
        return len(self.positions)

    def reset(self) -> None:
        """Forget everything read; the buffers stay."""
        self.positions: IntArray = np.zeros(0, np.int64)
        self.committed = 0
        self._known: BoolArray = np.zeros(0, np.bool_)

    def run(
        self,
        tokens: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        visible: Visibility | None = None,
        rows: IntArray | None = None,
    ) -> Tensor:
        """Read tokens; return the logits after each, or after those of ``rows``.

        As :meth:`CachedModel.run`; the columns are the draft vocabulary's. The output is computed
        for ``rows`` only, so the tokens of other rows must have no draft below them later on.

        Raises
        ------
        ValueError
            If the target has not read a committed token's predecessor, or an output is missing.
        """
        q, start = len(tokens), self.length
        ids = np.asarray(tokens, np.int64)
        places = np.concatenate([self.positions, np.asarray(positions, np.int64)])
        visible = Visibility.causal(start, q) if visible is None else visible
        wanted = np.ones(q, np.bool_)
        if rows is not None:
            wanted[:] = False
            wanted[np.asarray(rows, np.int64)] = True
        before, theirs, committed = self._features_of(visible, q)
        level = self._levels(before, theirs, wanted)
        with torch.inference_mode():
            self._reserve(start + q)
            mask = self._mask(visible, places, wanted)
            for number in range(int(level.max(initial=-1)) + 1):
                here = np.flatnonzero(level == number)
                self._read(here, ids, places, before, theirs, wanted, mask)
            order = np.flatnonzero(wanted) if rows is None else np.asarray(rows, np.int64)
            found = self.head.logits(self._outputs[self._index(start + order)])
        self.positions, self.committed = places, committed
        self._known = np.concatenate([self._known, wanted])
        return found if found.dtype == torch.float64 else found.float()

    def _features_of(self, visible: Visibility, q: int) -> tuple[IntArray, BoolArray, int]:
        # The place of the token before each token, whether its feature is the target's, and the
        # number of committed tokens after the pass.
        start = self.length
        before = predecessors(visible, start)
        causal = visible.end == start + 1 + np.arange(q)
        lead = int(np.logical_and.accumulate(causal).sum()) if self.committed == start else 0
        committed = self.committed + lead
        if lead and before[lead - 1] >= self.target.length:
            raise ValueError(
                f"tokens: the target has read {self.target.length}, not the one before each"
            )
        return before, before < min(self.target.length, committed), committed

    def _levels(self, before: IntArray, theirs: BoolArray, wanted: BoolArray) -> IntArray:
        # 0 where the feature is known before the pass, else one more than the token before.
        start = self.length
        own = ~theirs & (before >= 0)
        inside = own & (before >= start)
        known = np.concatenate([self._known, wanted])
        if not known[before[own]].all():
            raise ValueError("rows: a draft needs the output at a token that was no row")
        above = np.where(inside, before - start, 0)
        level = np.zeros(len(before), np.int64)
        while True:
            deeper = np.where(inside, level[above] + 1, 0)
            if (deeper == level).all():
                return level
            level = deeper

    def _mask(self, visible: Visibility, places: IntArray, wanted: BoolArray) -> Tensor:
        # Of the wanted tokens. The first token's entry has no feature: only it sees itself.
        rows = np.flatnonzero(wanted)
        head = self.head
        mask = additive(
            Visibility(visible.end[rows], visible.slots[rows]),
            places,
            places[self.length + rows],
            None,
            head.dtype,
            head.device,
        )[0, 0]
        mask[:, self._index(np.flatnonzero(places == 0))] = torch.finfo(head.dtype).min
        mask[self._index(np.arange(len(rows))), self._index(self.length + rows)] = 0.0
        return mask

    def _read(
        self,
        here: IntArray,
        ids: IntArray,
        places: IntArray,
        before: IntArray,
        theirs: BoolArray,
        wanted: BoolArray,
        mask: Tensor,
    ) -> None:
        # One level: the tokens ``here`` of the pass.
        head, layer, start = self.head, self.head.midlayer, self.length
        features = self._outputs.new_zeros(len(here), head.config.hidden_size)
        known, own = theirs[here] & (before[here] >= 0), ~theirs[here]
        if known.any():
            assert self.target.hidden is not None
            states = self.target.hidden.at(self._index(before[here[known]]))
            features[self._index(np.flatnonzero(known))] = head.fc(states)
        if own.any():
            at = self._index(before[here[own]])
            features[self._index(np.flatnonzero(own))] = self._outputs[at]
        x, past = layer.enter(head.embed(self._index(ids[here])), features)
        cos, sin = head.turns(self._index(places[start + here]))
        keys, values = layer.keys(x, cos, sin)
        slots = self._index(start + here)
        self._keys[slots] = torch.stack([keys, values], 1)
        now = wanted[here]
        if not now.any():
            return
        chosen = self._index(np.flatnonzero(now))
        queries = layer.queries(x[chosen], cos[chosen], sin[chosen])
        rows = self._index((np.cumsum(wanted) - 1)[here[now]])
        stored = self._keys[: len(places)]
        attended = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            stored[:, 0].transpose(0, 1)[None],
            stored[:, 1].transpose(0, 1)[None],
            attn_mask=mask[rows],
            enable_gqa=True,
        )[0].transpose(0, 1)
        self._outputs[slots[chosen]] = layer.leave(attended, past[chosen])

    def _index(self, numbers: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(self.head.device)

    def _reserve(self, capacity: int) -> None:
        if capacity > len(self._keys):
            room = max(capacity, 2 * len(self._keys), MIN_CAPACITY)
            self._resize(room)

    def _resize(self, room: int) -> None:
        # Zeros, not what memory holds: a hidden entry's value still counts, times 0.
        keys = self._keys.new_zeros(room, *self._keys.shape[1:])
        outputs = self._outputs.new_zeros(room, self._outputs.shape[1])
        keys[: self.length] = self._keys[: self.length]
        outputs[: self.length] = self._outputs[: self.length]
        self._keys, self._outputs = keys, outputs

    def keep(self, prefix: int, slots: Sequence[int] = ()) -> None:
        """Keep the first ``prefix`` tokens and, after them, those at places ``slots``.

        What comes after the prefix are drafts' entries, with the head's own outputs as features.
        """
        places = np.asarray(slots, np.int64)
        end = prefix + len(places)
        if len(places):
            index = self._index(places)
            with torch.inference_mode():
                self._keys[prefix:end] = self._keys[index]
                self._outputs[prefix:end] = self._outputs[index]
        self.positions = np.concatenate([self.positions[:prefix], self.positions[places]])
        self._known = np.concatenate([self._known[:prefix], self._known[places]])
        self.committed = min(self.committed, prefix)

    def shrink(self) -> None:
        """Give back the buffers' room beyond the tokens read."""
        if len(self._keys) > max(self.length, MIN_CAPACITY):
            with torch.inference_mode():
                self._resize(max(self.length, MIN_CAPACITY))

    def bytes_of_pass(self, q: int) -> int:
        """Estimate the memory that a pass of ``q`` tokens takes, bytes, weights left out.

        Keys, values and outputs, twice while the buffers grow; mask, logits and activations.
        """
        config, size = self.head.config, self.head.dtype.itemsize
        keys, capacity = self.length + q, len(self._keys)
        each = 2 * config.kv_heads * config.head_dim + config.hidden_size
        if keys > capacity:
            capacity += max(keys, 2 * capacity)
        hidden = len(config.layers) * config.target_hidden_size
        return (
            SCRATCH
            + each * capacity * size
            + q * keys * (2 + 2 * size)
            + q * config.vocabulary * (size + 8)
            + q * (hidden + 12 * config.hidden_size + 3 * config.intermediate_size) * size
        )
