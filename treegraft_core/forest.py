"""Many draft trees at once: one level of the trie of schedules, in arrays.

A level holds T_k of every schedule prefix of length k − 1 at every state of a pack. All trees lie
one after the other in one array of `kernels.NODE` records. The loops over trees are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from treegraft_core import kernels
from treegraft_core.tree import FloatArray, IntArray, NodeArray

PATH = np.dtype(
    [
        ("token", np.int32),
        ("parent", np.int32),
        ("depth", np.int32),
        ("state", np.int32),
        ("first_child", np.int32),
        ("next_sibling", np.int32),
    ],
    align=True,
)
"""A distinct path that the mid drafter has evaluated; its record's number is its row.

``parent`` is the row of the path above, −1 for a path of depth 0 or 1; children are a linked list.
"""

_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True}


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
    counts : int32 array, shape ``[B, D, 5]``
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


@njit(**_OPTIONS)
def read_signals(
    node, start, size, removed, state, frontier, n_frontier, max_depth, whole_tree, width, step, out
):  # fmt: skip
    """Write the signals of every tree before step ``step`` to ``out``."""
    for i in range(len(start)):
        tree = node[start[i] : start[i] + size[i]]
        out[i, step - 1] = kernels.signals(
            tree,
            size[i],
            removed[i],
            max_depth[state[i]],
            frontier[i, : n_frontier[i]],
            whole_tree,
            width,
        )


@njit(**_OPTIONS)
def small_steps(
    node, start, size, state, frontier, n_frontier, max_depth, lengths,
    tokens, log_p, before, last, counts, step, width, max_ngram, outside,
):  # fmt: skip
    """Copy every tree and grow the copy by the n-gram drafter.

    Returns
    -------
    node : array of records
        The grown copies, one after the other, with spare capacity.
    start, size, frontier, n_frontier
        As in :class:`Level`.
    used : int
        Records in use.
    """
    n = len(start)
    out = np.empty(2 * max(1, size.sum()), node.dtype)
    out_start = np.empty(n, np.int64)
    out_size = np.empty(n, np.int64)
    out_frontier = np.zeros((n, width), np.int64)
    out_n = np.empty(n, np.int64)
    scratch = np.empty(512, node.dtype)
    used = 0
    for i in range(n):
        scratch = kernels.reserve(scratch, size[i])
        scratch[: size[i]] = node[start[i] : start[i] + size[i]]
        scratch, grown, best = kernels.small_step(
            scratch, size[i], max_depth[state[i]], frontier[i, : n_frontier[i]], tokens, log_p,
            before, last, counts, lengths[state[i]], step, width, max_ngram, outside,
        )  # fmt: skip
        out = kernels.reserve(out, used + grown)
        out[used : used + grown] = scratch[:grown]
        out_start[i] = used
        out_size[i] = grown
        out_frontier[i, : len(best)] = best
        out_n[i] = len(best)
        used += grown
    return out, out_start, out_size, out_frontier, out_n, used


@njit(**_OPTIONS)
def select_frontiers(
    node, start, size, state, frontier, n_frontier, max_depth, whole_tree, width,
    row_start, row_found, row_values, step, counts,
):  # fmt: skip
    """Refresh every tree in place and pick F_k.

    Returns
    -------
    picked : int64 array, shape ``[B, W]``, and their numbers
    missing : int64 array, shape ``[B, W]``, and their numbers
        Those of F_k that the mid drafter has not evaluated, ascending.
    lost : int
        Refreshed nodes whose score is missing; 0 unless there is a defect.
    """
    n = len(start)
    picked = np.zeros((n, width), np.int64)
    n_picked = np.zeros(n, np.int64)
    missing = np.zeros((n, width), np.int64)
    n_missing = np.zeros(n, np.int64)
    lost = 0
    for i in range(n):
        tree = node[start[i] : start[i] + size[i]]
        needed, unseen = kernels.begin_mid_step(tree, size[i])
        new = kernels.unscored(tree, size[i])
        rows = np.empty(len(new), np.int64)
        tokens = np.empty(len(new), np.int64)
        for j in range(len(new)):
            rows[j] = tree[tree[new[j]].parent].row
            tokens[j] = tree[new[j]].token
        values = kernels.look_up(row_start, row_found, row_values, rows, tokens)
        lost += np.isnan(values).sum()
        kernels.refresh(tree, size[i], new, values)
        best, late, pool, earlier = kernels.pick(
            tree, size[i], max_depth[state[i]], frontier[i, : n_frontier[i]], whole_tree, width
        )
        picked[i, : len(best)] = best
        n_picked[i] = len(best)
        missing[i, : len(late)] = late
        n_missing[i] = len(late)
        counts[i, step - 1, 0] = len(needed)
        counts[i, step - 1, 1] = len(late)
        counts[i, step - 1, 2] = len(unseen)
        counts[i, step - 1, 3] = pool
        counts[i, step - 1, 4] = earlier
    return picked, n_picked, missing, n_missing, lost


@njit(**_OPTIONS)
def _row_of(path, n_paths, state_root, state, tree, at):
    # The row of a node's path; a new one is appended.
    above = tree[at].parent
    row = state_root[state] if at == 0 else path[tree[above].row].first_child
    token = tree[at].token
    while row >= 0 and at > 0 and path[row].token != token:
        row = path[row].next_sibling
    if row >= 0:
        return path, n_paths, row
    if n_paths == len(path):
        grown = np.empty(2 * len(path), path.dtype)
        grown[:n_paths] = path
        path = grown
    new = path[n_paths]
    new.token = token
    new.depth = tree[at].depth
    new.state = state
    new.first_child = -1
    new.next_sibling = -1
    new.parent = -1
    if at == 0:
        state_root[state] = n_paths
    else:
        parent = tree[above].row
        new.parent = parent if above > 0 else -1
        new.next_sibling = path[parent].first_child
        path[parent].first_child = n_paths
    return path, n_paths + 1, n_paths


@njit(**_OPTIONS)
def request(node, start, state, wanted, n_wanted, path, n_paths, state_root):
    """Give the wanted nodes (ascending) of every tree their rows; return the paths."""
    for i in range(len(start)):
        tree = node[start[i] :]
        for j in range(n_wanted[i]):
            at = wanted[i, j]
            if tree[at].row < 0:
                path, n_paths, tree[at].row = _row_of(path, n_paths, state_root, state[i], tree, at)
    return path, n_paths


@njit(**_OPTIONS)
def request_refresh(node, start, size, state, path, n_paths, state_root):
    """Give the nodes of every tree that the next mid step refreshes from their rows."""
    for i in range(len(start)):
        tree = node[start[i] : start[i] + size[i]]
        for at in kernels.parents_to_refresh(tree, size[i]):
            if tree[at].row < 0:
                path, n_paths, tree[at].row = _row_of(path, n_paths, state_root, state[i], tree, at)
    return path, n_paths


@njit(**_OPTIONS)
def pass_inputs(path, first, end, roots, text):
    """Return what one pass over the paths ``first`` … ``end − 1`` reads.

    Path r lies at place ``text + r`` of the cache, after the text. A path of depth 0 stands for
    the root itself and reads what precedes it.

    Returns
    -------
    tokens, positions, visible : int64 array, shape ``[q]``
        ``visible``: the text before it is seen.
    slots : int64 array, shape ``[q, m]``
        Places of its path below the root and of itself, filled up with its own.
    """
    q = end - first
    tokens = np.empty(q, np.int64)
    positions = np.empty(q, np.int64)
    visible = np.empty(q, np.int64)
    deepest = 1
    for row in range(first, end):
        deepest = max(deepest, path[row].depth)
    slots = np.empty((q, deepest), np.int64)
    for i in range(q):
        row = first + i
        tokens[i] = path[row].token
        root = roots[path[row].state]
        positions[i] = root + path[row].depth
        visible[i] = root + 1 if path[row].depth else root
        slots[i, :] = text + row
        j = 0
        while row >= 0:
            slots[i, j] = text + row
            row = path[row].parent
            j += 1
    return tokens, positions, visible, slots


@njit(**_OPTIONS)
def expand(
    node, start, size, removed, picked, n_picked, top_tokens, top_log_p, replace, width, out, used
):  # fmt: skip
    """Copy every tree behind the ``used`` records of ``out`` and graft F_k's children.

    Returns
    -------
    out, start, size, removed, frontier, n_frontier, used
        As in :func:`small_steps`.
    """
    n = len(start)
    out_start = np.empty(n, np.int64)
    out_size = np.empty(n, np.int64)
    out_removed = np.empty(n, np.int64)
    out_frontier = np.zeros((n, width), np.int64)
    out_n = np.empty(n, np.int64)
    scratch = np.empty(512, node.dtype)
    tokens = np.empty((width, top_tokens.shape[1]), np.int64)
    log_p = np.empty((width, top_tokens.shape[1]))
    for i in range(n):
        scratch = kernels.reserve(scratch, size[i])
        scratch[: size[i]] = node[start[i] : start[i] + size[i]]
        for j in range(n_picked[i]):
            row = scratch[picked[i, j]].row
            tokens[j] = top_tokens[row]
            log_p[j] = top_log_p[row]
        scratch, grown, gone, best = kernels.graft(
            scratch, size[i], picked[i, : n_picked[i]], tokens[: n_picked[i]],
            log_p[: n_picked[i]], replace, width,
        )  # fmt: skip
        out = kernels.reserve(out, used + grown)
        out[used : used + grown] = scratch[:grown]
        out_start[i] = used
        out_size[i] = grown
        out_removed[i] = removed[i] + gone
        out_frontier[i, : len(best)] = best
        out_n[i] = len(best)
        used += grown
    return out, out_start, out_size, out_removed, out_frontier, out_n, used


@njit(**_OPTIONS)
def finish(node, start, size, state, roots, tokens, verify_nodes, reach):
    """Prune every tree and walk it along the known continuation of its state.

    Returns
    -------
    kept, accepted : int64 array, shape ``[B]``
    ranks : int64 array, shape ``[B, reach]``
        Place in the pruning order of each accepted node, −1 after the last.
    """
    n = len(start)
    kept = np.empty(n, np.int64)
    accepted = np.empty(n, np.int64)
    ranks = np.full((n, reach), -1, np.int64)
    for i in range(n):
        tree = node[start[i] : start[i] + size[i]]
        order = kernels.prune(tree, size[i], verify_nodes)
        root = roots[state[i]]
        path, places = kernels.accepted(tree, size[i], order, tokens[root + 1 : root + 1 + reach])
        kept[i] = len(order)
        accepted[i] = len(path)
        ranks[i, : len(places)] = places
    return kept, accepted, ranks
