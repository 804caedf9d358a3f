"""The shared draft tree: one object, a few arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

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


@dataclass
class DraftTree:
    """The tree T_k that both drafters grow in one round.

    Node 0 is the root: the last committed token, at depth 0 with log s = 0. A node's index is its
    age: children come after their parent. Arrays have spare capacity; the first ``size`` entries
    count.

    Attributes
    ----------
    token, parent, depth : int64 array
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
    n_children : int64 array
        Living children.
    row : int64 array
        Where the mid drafter keeps its distribution at the node, −1 if it has none.
    max_depth : int
        No node is deeper: what the model's context has room for.
    """

    token: IntArray
    parent: IntArray
    depth: IntArray
    log_p: FloatArray
    log_s: FloatArray
    mid_log_p: FloatArray
    seen: BoolArray
    seen_all: BoolArray
    expanded: BoolArray
    alive: BoolArray
    n_children: IntArray
    row: IntArray
    size: int = 1
    removed: int = 0
    max_depth: int = UNLIMITED
    index: dict[tuple[int, int], int] = field(default_factory=dict)

    _ARRAYS = (
        "token",
        "parent",
        "depth",
        "log_p",
        "log_s",
        "mid_log_p",
        "seen",
        "seen_all",
        "expanded",
        "alive",
        "n_children",
        "row",
    )

    @classmethod
    def from_root(cls, token: int, max_depth: int = UNLIMITED) -> DraftTree:
        """Return T_1: the root alone."""
        tree = cls(
            token=np.zeros(_GROW, np.int64),
            parent=np.full(_GROW, -1, np.int64),
            depth=np.zeros(_GROW, np.int64),
            log_p=np.zeros(_GROW),
            log_s=np.zeros(_GROW),
            mid_log_p=np.full(_GROW, np.nan),
            seen=np.zeros(_GROW, bool),
            seen_all=np.zeros(_GROW, bool),
            expanded=np.zeros(_GROW, bool),
            alive=np.zeros(_GROW, bool),
            n_children=np.zeros(_GROW, np.int64),
            row=np.full(_GROW, -1, np.int64),
            max_depth=max_depth,
        )
        tree.token[0] = token
        tree.alive[0] = True
        tree.mid_log_p[0] = 0.0
        return tree

    def __len__(self) -> int:
        """Return |V(T)|: living nodes, the root included."""
        return self.size - self.removed

    def copy(self) -> DraftTree:
        """Return an independent copy."""
        arrays = {name: getattr(self, name).copy() for name in self._ARRAYS}
        return DraftTree(
            **arrays,
            size=self.size,
            removed=self.removed,
            max_depth=self.max_depth,
            index=self.index.copy(),
        )

    def nodes(self) -> IntArray:
        """Return the living nodes, oldest first."""
        if not self.removed:
            return np.arange(self.size)
        return np.flatnonzero(self.alive[: self.size])

    def child(self, node: int, token: int) -> int:
        """Return the child of ``node`` with ``token``, or −1."""
        return self.index.get((node, token), -1)

    def add(self, node: int, token: int, log_p: float) -> int:
        """Add a child and return its index. The caller knows that there is none with this token."""
        new = self.size
        if new == len(self.token):
            self._reserve(2 * new)
        self.token[new] = token
        self.parent[new] = node
        self.depth[new] = self.depth[node] + 1
        self.log_p[new] = log_p
        self.log_s[new] = self.log_s[node] + log_p
        self.mid_log_p[new] = np.nan
        self.alive[new] = True
        self.row[new] = -1
        self.n_children[node] += 1
        self.index[(node, token)] = new
        self.size = new + 1
        return new

    def _reserve(self, capacity: int) -> None:
        for name in self._ARRAYS:
            old = getattr(self, name)
            new = np.zeros(capacity, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    def update_scores(self) -> None:
        """Recompute ``log_s`` of every node as the sum of ``log_p`` along its path."""
        n = self.size
        depth = self.depth[:n]
        for level in range(1, int(depth.max()) + 1):
            at = np.flatnonzero(depth == level)
            self.log_s[at] = self.log_s[self.parent[at]] + self.log_p[at]

    def path(self, node: int) -> list[int]:
        """Return the nodes from below the root down to ``node``."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Return the tokens from below the root down to ``node``."""
        return [int(self.token[i]) for i in self.path(node)]

    def remove_below(self, node: int) -> None:
        """Remove every descendant of ``node`` (ablation ``w/o ND`` only)."""
        n = self.size
        doomed = np.zeros(n, bool)
        for i in range(node + 1, n):
            above = int(self.parent[i])
            doomed[i] = self.alive[i] and (above == node or doomed[above])
        gone = np.flatnonzero(doomed)
        self.alive[gone] = False
        self.removed += len(gone)
        self.n_children[node] = 0
        for i in gone.tolist():
            del self.index[(int(self.parent[i]), int(self.token[i]))]

    def best(self, nodes: IntArray, count: int) -> IntArray:
        """Return the ``count`` best of ``nodes`` by log s; ties: shallower, then older."""
        order = np.lexsort((nodes, self.depth[nodes], -self.log_s[nodes]))
        return nodes[order[:count]]
