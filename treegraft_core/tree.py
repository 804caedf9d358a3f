"""The shared draft tree: one object on one array of node records."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treegraft_core import kernels

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
NodeArray = NDArray[Any]

LOG_P_STEP = 2.0**-20
"""Edge log-probabilities are multiples of this (10⁻⁶ nats), so that sums along paths are exact.

Paths over the same edges in another order have equal scores, and repetitive text is full of them;
with rounding in the sums, which one is kept would depend on the order of additions.
"""
UNLIMITED = 1 << 30

_GROW = 128


def on_grid(log_p: FloatArray) -> FloatArray:
    """Round log-probabilities to multiples of `LOG_P_STEP`."""
    return np.round(log_p / LOG_P_STEP) * LOG_P_STEP


def grown(array: np.ndarray, rows: int, fill: int = 0) -> np.ndarray:
    """Return the array, or a larger copy with ``rows`` rows at least, the new ones ``fill``."""
    if rows <= len(array):
        return array
    larger = np.full((max(rows, 2 * len(array)), *array.shape[1:]), fill, array.dtype)
    larger[: len(array)] = array
    return larger


class DraftTree:
    """The tree T_k that both drafters grow in one round.

    Node 0 is the root: the last committed token, at depth 0 with log s = 0. A node's index is its
    age: children come after their parent. The array of records has spare capacity; the first
    ``size`` count. Each field can be read as an attribute, for example ``tree.log_s[node]``.

    Attributes
    ----------
    node : array of `kernels.NODE` records
        The nodes.
    size, removed : int
        Records in use, and how many of them are not alive.
    max_depth : int
        No node is deeper: what the model's context has room for.
    token, parent, depth : int32 array
        Token id, index of the parent (−1 for the root), distance from the root.
    log_p : float64 array
        Log-probability of the edge into the node, nats; 0 for the root.
    log_s : float64 array
        Sum of ``log_p`` along the path from the root.
    mid_log_p : float64 array
        The mid drafter's log-probability of the edge, NaN while it has not scored the node.
    seen : bool array
        The mid drafter evaluated the node when only the needed nodes are evaluated.
    seen_all : bool array
        The node existed at a mid call: what one pass over every unseen node has evaluated.
    expanded : bool array
        The node is in P_k: the mid drafter has grown children under it.
    alive : bool array
        False only for nodes that the ablation ``graft="replace"`` removed.
    n_children, first_child, next_sibling : int32 array
        Living children: their number, and a linked list of them (−1 ends it).
    row : int32 array
        Where the mid drafter keeps its distribution at the node, −1 if it has none.
    slot : int32 array
        The node's place in the key-value cache of the model that evaluated it last.
    """

    __slots__ = ("max_depth", "node", "removed", "size")

    def __init__(self, node: NodeArray, size: int, removed: int = 0, max_depth: int = UNLIMITED):
        self.node, self.size, self.removed, self.max_depth = node, size, removed, max_depth

    def __getattr__(self, name: str) -> Any:
        if name in kernels.NODE.fields:  # type: ignore[operator]
            return self.node[name]
        raise AttributeError(name)

    @classmethod
    def from_root(cls, token: int, max_depth: int = UNLIMITED) -> DraftTree:
        """Return T_1: the root alone."""
        node = np.zeros(_GROW, kernels.NODE)
        kernels.make_root(node, token)
        return cls(node, 1, 0, max_depth)

    def __len__(self) -> int:
        """Return |V(T)|: living nodes, the root included."""
        return self.size - self.removed

    def copy(self) -> DraftTree:
        """Return an independent copy."""
        return DraftTree(self.node.copy(), self.size, self.removed, self.max_depth)

    def nodes(self) -> IntArray:
        """Return the living nodes, oldest first."""
        return np.flatnonzero(self.node["alive"][: self.size])

    def child(self, node: int, token: int) -> int:
        """Return the child of ``node`` with ``token``, or −1."""
        return int(kernels.find_child(self.node, node, token))

    def add(self, node: int, token: int, log_p: float) -> int:
        """Add a child and return its index. The caller knows that there is none with this token."""
        new = self.size
        self.node = kernels.reserve(self.node, new + 1)
        kernels.add_child(self.node, new, node, token, log_p)
        self.size = new + 1
        return new

    def update_scores(self) -> None:
        """Recompute ``log_s`` of every node as the sum of ``log_p`` along its path."""
        kernels.rescore(self.node, self.size)

    def path(self, node: int) -> list[int]:
        """Return the nodes from below the root down to ``node``."""
        return kernels.path_of(self.node, node).tolist()

    def path_tokens(self, node: int) -> list[int]:
        """Return the tokens from below the root down to ``node``."""
        return self.node["token"][kernels.path_of(self.node, node)].tolist()

    def remove_below(self, node: int) -> None:
        """Remove every descendant of ``node`` (ablation ``w/o ND`` only)."""
        self.removed += int(kernels.remove_below(self.node, self.size, node))

    def best(self, nodes: IntArray, count: int) -> IntArray:
        """Return the ``count`` best of ``nodes`` by log s; ties: shallower, then older."""
        return kernels.best_of(self.node, np.asarray(nodes, np.int64), count)
