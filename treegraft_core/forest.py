"""Many draft trees at once: one level of the trie of schedules, in arrays.

A level holds T_k of every schedule prefix of length k − 1 at every state of a pack. All trees lie
one after the other in one array of `kernels.NODE` records. The loops over trees are in `kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from treegraft_core import kernels
from treegraft_core.tree import FloatArray, IntArray, NodeArray


@dataclass
class Level:
    """T_k of all schedule prefixes of length k − 1 at all states of a pack; B trees.

    Attributes
    ----------
    node : array of `kernels.NODE` records
        All trees, one after the other.
    start, size, removed, state : int64 array, shape ``[B]``
        Where each tree begins, its records, how many of them are not alive, whose it is.
    frontier : int64 array, shape ``[B, W]``
        N_k, best first.
    n_frontier : int64 array, shape ``[B]``
        |N_k|.
    bits : int8 array, shape ``[B, D]``
        The prefixes.
    signals : float64 array, shape ``[B, D, 10]``
        The signals before each step so far.
    counts : int32 array, shape ``[B, D, 7]``
        The counts of each mid call so far, in the order of :class:`MidCall`.
    """

    node: NodeArray
    start: IntArray
    size: IntArray
    removed: IntArray
    state: IntArray
    frontier: IntArray
    n_frontier: IntArray
    bits: Any
    signals: FloatArray
    counts: Any

    @property
    def trees(self) -> tuple[NodeArray, IntArray, IntArray, IntArray, IntArray, IntArray]:
        """What the kernels read: node, start, size, state, frontier, n_frontier."""
        return self.node, self.start, self.size, self.state, self.frontier, self.n_frontier

    def tree(self, i: int) -> NodeArray:
        """Return the records of tree ``i``."""
        return self.node[self.start[i] : self.start[i] + self.size[i]]


def first_level(root_tokens: IntArray, depth: int, width: int) -> Level:
    """Return T_1 of every state: its root alone."""
    n = len(root_tokens)
    node = np.zeros(n, kernels.NODE)
    for i in range(n):
        kernels.make_root(node[i : i + 1], root_tokens[i])
    frontier = np.zeros((n, width), np.int64)
    return Level(
        node,
        np.arange(n),
        np.ones(n, np.int64),
        np.zeros(n, np.int64),
        np.arange(n),
        frontier,
        np.ones(n, np.int64),
        np.zeros((n, depth), np.int8),
        np.zeros((n, depth, kernels.N_SIGNALS)),
        np.zeros((n, depth, kernels.N_COUNTS), np.int32),
    )
