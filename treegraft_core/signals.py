"""State signals and the scheduler's input: design section 3."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from treegraft_core import kernels
from treegraft_core.drafting import DraftingConfig
from treegraft_core.tree import DraftTree, FloatArray, IntArray

SIGNALS = (
    "depth_before",
    "leaf_ratio_before",
    "collapse_debt",
    "pre_reselect_past_ratio",
    "pre_reselect_overlap",
    "pre_reselect_score",
    "frontier_before",
    "score_before",
    "tree_nodes_before",
    "pre_reselect_cands",
)
"""The ten candidate signals, in the order of the design's table."""

PAPER_SIGNALS = SIGNALS[:6]
"""The six that the paper kept."""


def signals(tree: DraftTree, frontier: IntArray, config: DraftingConfig) -> FloatArray:
    """Return the ten signals before a step, float64, shape ``[10]``, in the order of `SIGNALS`.

    Read from T_k, N_k and R_k, the best W of the pool that a mid step would have under the scores
    as they stand; no model is called. Means and ratios over an empty set are 0.
    """
    return kernels.signals(
        tree.node,
        tree.size,
        tree.removed,
        tree.max_depth,
        frontier,
        config.pool == "tree",
        config.width,
    )


def context_features(
    prompt_tokens: int, target_ms: float, mid_ms: float, step: int, bits: Sequence[int], depth: int
) -> FloatArray:
    """Return the part of the scheduler's input that does not come from the tree.

    Parameters
    ----------
    prompt_tokens : int
        Tokens of the prompt.
    target_ms, mid_ms : float
        T_tgt and T_mid: mean verification pass and mean mid call, ms, from a warm-up.
    step : int
        k, from 1.
    bits : sequence of int
        τ_1 … τ_{k−1}.
    depth : int
        D.

    Returns
    -------
    float64 array, shape ``[6 + D]``
        log(1 + prompt tokens), T_tgt, T_mid, log(T_tgt / T_mid), k / D, calls so far / D, and D
        bits, bit j = 1 if step j called the mid drafter.
    """
    taken = [float(b) for b in bits] + [0.0] * (depth - len(bits))
    return np.array(
        [
            math.log1p(prompt_tokens),
            target_ms,
            mid_ms,
            math.log(target_ms / mid_ms),
            step / depth,
            sum(bits) / depth,
            *taken,
        ]
    )


def context_matrix(
    prompt_tokens: ArrayLike,
    target_ms: ArrayLike,
    mid_ms: ArrayLike,
    step: ArrayLike,
    bits: IntArray,
) -> FloatArray:
    """Return :func:`context_features` of many states at once.

    Parameters
    ----------
    prompt_tokens, target_ms, mid_ms, step : array
        Shapes that broadcast to ``[…]``.
    bits : int64 array, shape ``[…, D]``
        τ_1 … τ_{k−1}, then zeros.

    Returns
    -------
    float64 array, shape ``[…, 6 + D]``
    """
    depth = bits.shape[-1]
    single = np.broadcast_arrays(
        np.log1p(prompt_tokens),
        target_ms,
        mid_ms,
        np.log(np.divide(target_ms, mid_ms)),
        np.divide(step, depth),
        bits.sum(-1) / depth,
    )
    shape = single[0].shape
    return np.concatenate([np.stack(single, -1), np.broadcast_to(bits, (*shape, depth))], -1)


def context_names(depth: int) -> tuple[str, ...]:
    """Return the names of :func:`context_features`, in order."""
    return (
        "log_prompt_tokens",
        "target_ms",
        "mid_ms",
        "log_target_mid_ratio",
        "step_fraction",
        "calls_fraction",
        *(f"bit_{j}" for j in range(1, depth + 1)),
    )
