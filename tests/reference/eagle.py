"""A head of the EAGLE-3 layout, read token by token from its published definition.

Every entry after a text's first token reads that token's embedding and a feature of the token
before: the fused hidden states of the target where it has read that token, else the head's own
output there. One entry after the other, with plain loops and no cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root of the mean square, then scale."""
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Turn the pairs (j, j + half) of a vector by position / θ^(2 j / size)."""
    half = len(x) // 2
    y = x.clone()
    for j in range(half):
        angle = position * theta ** (-2 * j / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        y[j] = x[j] * cos - x[j + half] * sin
        y[j + half] = x[j + half] * cos + x[j] * sin
    return y


def head_logits(
    weights: Mapping[str, Tensor],
    shape: Mapping[str, Any],
    states: Tensor,
    tokens: Sequence[int],
    committed: int,
) -> list[Tensor]:
    """Return the logits after each token but the first.

    Parameters
    ----------
    weights : mapping
        Float64, by the names of EAGLE-3, with ``embed_tokens.weight`` and ``lm_head.weight``.
    shape : mapping
        heads, kv_heads, head_dim, eps, theta, norm_first.
    states : Tensor, shape ``[n, k · H]``
        The target's hidden states of the tokens that it has read.
    tokens : sequence of int
        Context and path.
    committed : int
        Tokens of the context; the target has read all but the last of them.
    """
    w = {name.removeprefix("midlayer."): value for name, value in weights.items()}
    heads, kv_heads, size = shape["heads"], shape["kv_heads"], shape["head_dim"]
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    outputs: list[Tensor] = []
    logits: list[Tensor] = []
    for i in range(1, len(tokens)):
        feature = w["fc.weight"] @ states[i - 1] if i < committed else outputs[-1]
        normed = norm(feature, w["hidden_norm.weight"], shape["eps"])
        embedding = norm(
            w["embed_tokens.weight"][tokens[i]], w["input_layernorm.weight"], shape["eps"]
        )
        x = torch.cat([embedding, normed])
        q, k, v = (w[f"self_attn.{n}_proj.weight"] @ x for n in "qkv")
        # The first entry has position 0, as published; what counts are differences.
        keys.append([turn(part, i - 1, shape["theta"]) for part in k.split(size)])
        values.append(list(v.split(size)))
        parts = []
        for h, part in enumerate(q.split(size)):
            query, group = turn(part, i - 1, shape["theta"]), h // (heads // kv_heads)
            scores = torch.stack([query @ key[group] / math.sqrt(size) for key in keys])
            share = scores.softmax(0)
            parts.append(sum(p * value[group] for p, value in zip(share, values, strict=True)))
        past = normed if shape["norm_first"] else feature
        y = past + w["self_attn.o_proj.weight"] @ torch.cat(parts)  # type: ignore[arg-type]
        z = norm(y, w["post_attention_layernorm.weight"], shape["eps"])
        gate = w["mlp.gate_proj.weight"] @ z
        inner = gate * torch.sigmoid(gate) * (w["mlp.up_proj.weight"] @ z)
        outputs.append(y + w["mlp.down_proj.weight"] @ inner)
        logits.append(w["lm_head.weight"] @ norm(outputs[-1], w["norm.weight"], shape["eps"]))
    return logits
