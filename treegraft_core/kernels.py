"""Compiled inner loops over tree nodes: one tree at a time, on its record array.

All of them are in this one file because numba's cache of a function knows only the file that it is
in: a change of what it inlines from another file would go unnoticed.

The rules are loops with early exits over short linked lists (children of a node, earlier
occurrences of a token), for which numpy has no vectorised form: the same steps took 0.15 ms (small
step) and 0.75 ms (mid step) in numpy and plain Python, and 5 to 20 µs here. ``make bench`` prints
the present figures. Every function has its slow twin in ``tests/reference``.

A tree is a one-dimensional array of `NODE` records, parents before children, of which the first
``size`` count. A node's children are a linked list: ``first_child``, then ``next_sibling``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

NODE = np.dtype(
    [
        ("log_p", np.float64),
        ("log_s", np.float64),
        ("mid_log_p", np.float64),
        ("token", np.int32),
        ("parent", np.int32),
        ("depth", np.int32),
        ("first_child", np.int32),
        ("next_sibling", np.int32),
        ("n_children", np.int32),
        ("row", np.int32),
        ("slot", np.int32),
        ("match", np.int32),
        ("proposals", np.int32),
        ("evidence", np.int32),
        ("proposed", np.bool_),
        ("seen", np.bool_),
        ("seen_all", np.bool_),
        ("expanded", np.bool_),
        ("alive", np.bool_),
    ],
    align=True,
)
"""One node; the fields are described at :class:`treegraft_core.tree.DraftTree`."""

N_SIGNALS = 10
N_COUNTS = 7

_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True}


@njit(**_OPTIONS)
def reserve(array, capacity):
    """Return the array, or a larger copy with room for ``capacity`` entries at least."""
    if capacity <= len(array):
        return array
    grown = np.empty(max(capacity, 2 * len(array)), array.dtype)
    grown[: len(array)] = array
    return grown


@njit(**_OPTIONS)
def find_child(node, parent, token):
    """Return the child of ``parent`` with ``token``, or −1."""
    child = node[parent].first_child
    while child >= 0 and node[child].token != token:
        child = node[child].next_sibling
    return child


@njit(**_OPTIONS)
def _write(new, token, parent, depth, next_sibling, log_p, log_s, mid_log_p):
    # A living node without children that no drafter has touched.
    new.token = token
    new.parent = parent
    new.depth = depth
    new.next_sibling = next_sibling
    new.log_p = log_p
    new.log_s = log_s
    new.mid_log_p = mid_log_p
    new.first_child = -1
    new.n_children = 0
    new.row = -1
    new.slot = -1
    new.match = -1
    new.proposals = 0
    new.evidence = 0
    new.proposed = False
    new.seen = False
    new.seen_all = False
    new.expanded = False
    new.alive = True


@njit(**_OPTIONS)
def add_child(node, size, parent, token, log_p):
    """Write record ``size`` as a new child; the caller has made room."""
    above = node[parent]
    log_s = above.log_s + log_p
    _write(node[size], token, parent, above.depth + 1, above.first_child, log_p, log_s, np.nan)
    above.first_child = size
    above.n_children += 1


@njit(**_OPTIONS)
def make_root(node, token):
    """Write record 0 as the root of a new tree."""
    _write(node[0], token, -1, 0, -1, 0.0, 0.0, 0.0)


@njit(**_OPTIONS)
def rescore(node, size):
    """Recompute log s of every node from log p; parents come before children."""
    for i in range(1, size):
        node[i].log_s = node[node[i].parent].log_s + node[i].log_p


@njit(**_OPTIONS)
def _before(node, a, b):
    # The order of frontiers and of pruning: log s descending; ties: shallower, then older.
    if node[a].log_s != node[b].log_s:
        return node[a].log_s > node[b].log_s
    if node[a].depth != node[b].depth:
        return node[a].depth < node[b].depth
    return a < b


@njit(**_OPTIONS)
def _first(node, a, b):
    # The order of a small step's first tokens: match length, then as above.
    if node[a].match != node[b].match:
        return node[a].match > node[b].match
    return _before(node, a, b)


@njit(**_OPTIONS)
def _insert(node, best, count, candidate, by_match):
    # Insert a candidate into the sorted best; return how many there are.
    limit = len(best)
    if limit == 0:
        return 0
    if count == limit:
        last = best[count - 1]
        if not (_first(node, candidate, last) if by_match else _before(node, candidate, last)):
            return count
        count -= 1
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        other = best[middle]
        if _first(node, candidate, other) if by_match else _before(node, candidate, other):
            high = middle
        else:
            low = middle + 1
    for i in range(count, low, -1):
        best[i] = best[i - 1]
    best[low] = candidate
    return count + 1


@njit(**_OPTIONS)
def best_of(node, candidates, limit):
    """Return the ``limit`` best of ``candidates`` by log s; ties: shallower, then older."""
    best = np.empty(min(limit, len(candidates)), np.int64)
    count = 0
    for candidate in candidates:
        count = _insert(node, best, count, candidate, False)
    return best


# n-grams --------------------------------------------------------------------------------------


@njit(**_OPTIONS)
def suffix(node, leaf, tokens, length, max_ngram):
    """Return the last ``max_ngram`` tokens of context + path to ``leaf``, last first."""
    tail = np.empty(max_ngram, np.int64)
    n = 0
    while leaf > 0 and n < max_ngram:
        tail[n] = node[leaf].token
        leaf = node[leaf].parent
        n += 1
    at = length - 1
    while at >= 0 and n < max_ngram:
        tail[n] = tokens[at]
        at -= 1
        n += 1
    return tail[:n]


@njit(**_OPTIONS)
def occurrence(before, last, token, length):
    """Return the last place of ``token`` that a token of the context follows, or −1."""
    if token >= len(last):
        return -1
    at = last[token]
    while at > length - 2:
        at = before[at]
    return at


@njit(**_OPTIONS)
def match_length(tokens, tail, at):
    """Return how many tokens ending at ``at`` equal the suffix."""
    n = 0
    while n < len(tail) and n <= at and tokens[at - n] == tail[n]:
        n += 1
    return n


@njit(**_OPTIONS)
def link(tokens, before, last, start, end):
    """Link the tokens from ``start`` to ``end`` to the previous place of the same token."""
    for at in range(start, end):
        before[at] = last[tokens[at]]
        last[tokens[at]] = at


@njit(**_OPTIONS)
def matches(tokens, before, last, tail, length):
    """Return the longest match of the suffix and the places after it, most recent first."""
    if len(tail) == 0:
        return 0, np.empty(0, np.int64)
    longest, count = longest_match(tokens, before, last, tail, length)
    found = np.empty(count, np.int64)
    n = 0
    at = occurrence(before, last, tail[0], length)
    while at >= 0 and n < count:
        if match_length(tokens, tail, at) == longest:
            found[n] = at + 1
            n += 1
        at = before[at]
    return longest, found


@njit(**_OPTIONS)
def longest_match(tokens, before, last, tail, length):
    """Return the longest match of the suffix and how often it occurs."""
    best = 0
    count = 0
    at = occurrence(before, last, tail[0], length)
    while at >= 0:
        n = match_length(tokens, tail, at)
        if n > best:
            best, count = n, 1
        elif n == best:
            count += 1
        at = before[at]
    return best, count


@njit(**_OPTIONS)
def most_frequent(tokens, length, counts):
    """Return the last place of the most frequent token (ties: the most recent one).

    ``counts`` is all zeros and as long as the largest token id; it is left so.
    """
    for at in range(length):
        counts[tokens[at]] += 1
    best = -1
    for at in range(length - 1, -1, -1):
        # Backwards, the first place met of a token is its last one.
        if best < 0 or counts[tokens[at]] > counts[tokens[best]]:
            best = at
    for at in range(length):
        counts[tokens[at]] = 0
    return best


@njit(**_OPTIONS)
def small_step(
    node, size, max_depth, frontier, tokens, log_p, before, last, counts, length, step, width,
    max_ngram, outside,
):  # fmt: skip
    """Grow one tree by the n-gram drafter; return the (grown) array, its size and N_{k+1}."""
    chain = max(1, max_ngram - (step - 1))
    room_for = 1
    for leaf in frontier:
        tail = suffix(node, leaf, tokens, length, max_ngram)
        room_for += longest_match(tokens, before, last, tail, length)[1] * chain
    node = reserve(node, size + room_for)
    for i in range(size):
        node[i].match = -1
        node[i].proposals = 0
        node[i].proposed = False
    touched = found = False
    for leaf in frontier:
        tail = suffix(node, leaf, tokens, length, max_ngram)
        longest, _ = longest_match(tokens, before, last, tail, length)
        if longest == 0:
            continue
        deepest = min(chain, max_depth - node[leaf].depth)
        at = occurrence(before, last, tail[0], length)
        while at >= 0:
            if match_length(tokens, tail, at) == longest:
                parent = leaf
                for j in range(at + 1, min(at + 1 + deepest, length)):
                    token, value = tokens[j], log_p[j]
                    child = find_child(node, parent, token)
                    if child < 0 or not node[child].proposed:
                        if node[parent].proposals == width:
                            break
                        node[parent].proposals += 1
                    if child < 0:
                        child = size
                        add_child(node, child, parent, token, value)
                        size += 1
                    elif value > node[child].log_p:
                        node[child].log_p = value
                        touched = True
                    node[child].proposed = True
                    node[child].evidence = max(longest + j - at - 1, node[child].evidence)
                    if j == at + 1:
                        found = True
                        node[child].match = max(longest, node[child].match)
                    parent = child
            at = before[at]
    if not found and step == 1 and max_depth > 0:
        at = most_frequent(tokens, length, counts)
        child = find_child(node, 0, tokens[at])
        if child < 0:
            child = size
            add_child(node, child, 0, tokens[at], log_p[at] if at > 0 else outside)
            size += 1
        node[child].match = 0
    if touched:
        rescore(node, size)
    best = np.empty(width, np.int64)
    count = 0
    for i in range(1, size):
        if node[i].match >= 0:
            count = _insert(node, best, count, i, True)
    return node, size, best[:count].copy()


# The mid step ---------------------------------------------------------------------------------


@njit(**_OPTIONS)
def unscored(node, size):
    """Return the living nodes that the mid drafter has not scored."""
    found = np.empty(size, np.int64)
    n = 0
    for i in range(1, size):
        if node[i].alive and np.isnan(node[i].mid_log_p):
            found[n] = i
            n += 1
    return found[:n]


@njit(**_OPTIONS)
def parents_to_refresh(node, size):
    """Return the parents of living nodes that the mid drafter has not scored, ascending."""
    wanted = np.zeros(size, np.bool_)
    for i in unscored(node, size):
        wanted[node[i].parent] = True
    return np.flatnonzero(wanted)


@njit(**_OPTIONS)
def longest_chain(node, size, nodes):
    """Return the nodes of the longest path downwards among ``nodes`` (ascending); 0 for none."""
    level = np.zeros(size, np.int64)
    deepest = 0
    for i in nodes:
        above = node[i].parent
        level[i] = 1 if above < 0 else level[above] + 1
        deepest = max(deepest, level[i])
    return deepest


@njit(**_OPTIONS)
def begin_mid_step(node, size):
    """Mark what a mid call evaluates; return the needed nodes and all unseen nodes, ascending."""
    parents = parents_to_refresh(node, size)
    needed = np.empty(len(parents), np.int64)
    n = 0
    for i in parents:
        if not node[i].seen:
            node[i].seen = True
            needed[n] = i
            n += 1
    unseen = np.empty(size, np.int64)
    m = 0
    for i in range(size):
        if node[i].alive and not node[i].seen_all:
            node[i].seen_all = True
            unseen[m] = i
            m += 1
    return needed[:n], unseen[:m]


@njit(**_OPTIONS)
def refresh(node, size, scored, values):
    """Take over the mid drafter's scores, new ones for ``scored``, and recompute log s."""
    for i in range(len(scored)):
        node[scored[i]].mid_log_p = values[i]
    for i in range(1, size):
        if node[i].alive:
            node[i].log_p = node[i].mid_log_p
    rescore(node, size)


@njit(**_OPTIONS)
def pool_of(node, size, max_depth, frontier, whole_tree):
    """Return C_k: living nodes not expanded that may have children, ascending."""
    pool = np.empty(size, np.int64)
    n = 0
    if whole_tree:
        for i in range(size):
            if node[i].alive and not node[i].expanded and node[i].depth < max_depth:
                pool[n] = i
                n += 1
    else:
        for i in frontier:
            if not node[i].expanded and node[i].depth < max_depth:
                pool[n] = i
                n += 1
    return pool[:n]


@njit(**_OPTIONS)
def pick(node, size, max_depth, frontier, whole_tree, width):
    """Return F_k, those of it not evaluated yet (ascending, now marked), |C_k|, earlier picks."""
    pool = pool_of(node, size, max_depth, frontier, whole_tree)
    picked = best_of(node, pool, width)
    missing = np.empty(len(picked), np.int64)
    n = earlier = 0
    shallowest = -1
    for i in frontier:
        if shallowest < 0 or node[i].depth < shallowest:
            shallowest = node[i].depth
    for i in picked:
        if not node[i].seen:
            node[i].seen = True
            missing[n] = i
            n += 1
        if len(frontier) == 0 or node[i].depth < shallowest:
            earlier += 1
    return picked, np.sort(missing[:n]), len(pool), earlier


@njit(**_OPTIONS)
def remove_below(node, size, top):
    """Remove every descendant of ``top``; return how many."""
    doomed = np.zeros(size, np.bool_)
    removed = 0
    for i in range(top + 1, size):
        above = node[i].parent
        if node[i].alive and (above == top or doomed[above]):
            doomed[i] = True
            node[i].alive = False
            removed += 1
    node[top].first_child = -1
    node[top].n_children = 0
    return removed


@njit(**_OPTIONS)
def graft(node, size, picked, top_tokens, top_log_p, replace, width):
    """Expand F_k by rows of likeliest tokens; return array, size, nodes removed and N_{k+1}."""
    node = reserve(node, size + top_tokens.size)
    order = np.argsort(picked) if replace else np.arange(len(picked))
    children = np.empty(top_tokens.size, np.int64)
    n = removed = 0
    for row in order:
        parent = picked[row]
        if not node[parent].alive:
            continue
        if replace:
            removed += remove_below(node, size, parent)
        node[parent].expanded = True
        for j in range(top_tokens.shape[1]):
            child = find_child(node, parent, top_tokens[row, j])
            if child < 0:
                child = size
                add_child(node, child, parent, top_tokens[row, j], top_log_p[row, j])
                node[child].mid_log_p = top_log_p[row, j]
                size += 1
            children[n] = child
            n += 1
    return node, size, removed, best_of(node, children[:n], width)


# Reading a tree -------------------------------------------------------------------------------


@njit(**_OPTIONS)
def prune(node, size, limit):
    """Return the first ``limit`` living non-root nodes by log s; ties: shallower, then older."""
    best = np.empty(min(limit, size), np.int64)
    count = 0
    for i in range(1, size):
        if node[i].alive:
            count = _insert(node, best, count, i, False)
    return best[:count].copy()


@njit(**_OPTIONS)
def accepted(node, size, kept, continuation):
    """Return the kept nodes along ``continuation`` and their places in the pruning order."""
    rank = np.full(size, -1, np.int64)
    for place in range(len(kept)):
        rank[kept[place]] = place
    path = np.empty(len(continuation), np.int64)
    ranks = np.empty(len(continuation), np.int64)
    at = n = 0
    for token in continuation:
        at = find_child(node, at, token)
        if at < 0 or rank[at] < 0:
            break
        path[n] = at
        ranks[n] = rank[at]
        n += 1
    return path[:n], ranks[:n]


@njit(**_OPTIONS)
def path_of(node, leaf):
    """Return the nodes from below the root down to ``leaf``."""
    nodes = np.empty(node[leaf].depth, np.int64)
    while leaf > 0:
        nodes[node[leaf].depth - 1] = leaf
        leaf = node[leaf].parent
    return nodes


@njit(**_OPTIONS)
def ancestor_slots(node, slot, nodes, first):
    """Return for each of ``nodes`` (ascending) the cache places of its path, ``[n, deepest]``.

    The nodes get the places ``first``, ``first + 1``, …, written to ``slot``, from which those of
    ancestors outside ``nodes`` are read. The root's place is not listed. Rows are filled up with
    the node's own place.
    """
    deepest = 1
    for i in range(len(nodes)):
        slot[nodes[i]] = first + i
        deepest = max(deepest, node[nodes[i]].depth)
    slots = np.empty((len(nodes), deepest), np.int64)
    for i in range(len(nodes)):
        slots[i, :] = first + i
        at = nodes[i]
        j = 0
        while at > 0:
            slots[i, j] = slot[at]
            at = node[at].parent
            j += 1
    return slots


@njit(**_OPTIONS)
def signals(node, size, removed, max_depth, frontier, whole_tree, width):
    """Return the ten signals before a step, in the order of the design's table."""
    pool = pool_of(node, size, max_depth, frontier, whole_tree)
    selected = best_of(node, pool, width)
    depth_n = leaves = score_n = 0.0
    finite_n = 0
    for i in frontier:
        depth_n += node[i].depth
        leaves += node[i].n_children == 0
        if np.isfinite(node[i].log_s):
            score_n += node[i].log_s
            finite_n += 1
    depth_r = past = overlap = score_r = 0.0
    finite_r = 0
    for i in selected:
        depth_r += node[i].depth
        same_depth = same_node = False
        for j in frontier:
            same_depth |= node[j].depth == node[i].depth
            same_node |= j == i
        past += not same_depth
        overlap += same_node
        if np.isfinite(node[i].log_s):
            score_r += node[i].log_s
            finite_r += 1
    n, r = max(1, len(frontier)), max(1, len(selected))
    values = np.empty(N_SIGNALS)
    values[0] = depth_n / n
    values[1] = leaves / n
    values[2] = max(0.0, depth_n / n - depth_r / r)
    values[3] = past / r
    values[4] = overlap / r
    values[5] = score_r / max(1, finite_r)
    values[6] = len(frontier)
    values[7] = score_n / max(1, finite_n)
    values[8] = size - removed
    values[9] = len(pool)
    return values


# Masks, rows of logits, the classifier ---------------------------------------------------------


@njit(**_OPTIONS)
def additive_mask(mask, end, slots, hidden):
    """Fill ``mask`` ``[q, keys]`` with 0 where :class:`Visibility` says seen, else ``hidden``."""
    for i in range(mask.shape[0]):
        mask[i, : end[i]] = 0.0
        mask[i, end[i] :] = hidden
        for j in range(slots.shape[1]):
            mask[i, slots[i, j]] = 0.0


@njit(**_OPTIONS)
def hide_far(mask, positions, keys, window, hidden):
    """Hide keys at ``window`` positions or more before the token."""
    for i in range(mask.shape[0]):
        for j in range(mask.shape[1]):
            if positions[i] - keys[j] >= window:
                mask[i, j] = hidden


@njit(**_OPTIONS)
def largest(logits, width):
    """Return the ``width`` largest entries of each row, best first, and their columns.

    Ties go to the lower column.
    """
    rows, columns = logits.shape
    values = np.empty((rows, width), logits.dtype)
    places = np.empty((rows, width), np.int64)
    for i in range(rows):
        n = 0
        least = -np.inf
        for j in range(columns):
            value = logits[i, j]
            if n == width and not value > least:
                continue
            at = n if n < width else width - 1
            while at > 0 and values[i, at - 1] < value:
                values[i, at] = values[i, at - 1]
                places[i, at] = places[i, at - 1]
                at -= 1
            values[i, at] = value
            places[i, at] = j
            n = min(width, n + 1)
            least = values[i, n - 1]
    return values, places


@njit(**_OPTIONS)
def margin(x, layers):
    """Return the classifier's output before standardisation; ReLU between layers."""
    for k in range(len(layers)):
        weight, bias = layers[k]
        y = bias.copy()
        for i in range(weight.shape[0]):
            for j in range(weight.shape[1]):
                y[i] += weight[i, j] * x[j]
            if k < len(layers) - 1 and y[i] < 0.0:
                y[i] = 0.0
        x = y
    return x[0]


# The mid drafter's rows -----------------------------------------------------------------------


@njit(**_OPTIONS)
def followers(tokens, before, last, counts, lengths, path_tokens, is_root):
    """Return the tokens that a small step may propose under paths that end in ``path_tokens``.

    Those are the distinct tokens that follow such a token in the context, since a chain passes
    through a node only along the context; under a root without any, the fallback child. Path i
    reads the first ``lengths[i]`` tokens of the context.

    Returns
    -------
    start : int64 array, shape ``[n + 1]``
        Where each one's followers begin.
    found : int64 array
        The followers.

    ``counts`` is all zeros and as long as the largest token id; it is left so.
    """
    start = np.zeros(len(path_tokens) + 1, np.int64)
    found = np.empty(64, np.int64)
    n = 0
    for i in range(len(path_tokens)):
        at = occurrence(before, last, path_tokens[i], lengths[i])
        while at >= 0:
            token = tokens[at + 1]
            if counts[token] == 0:
                counts[token] = 1
                found = reserve(found, n + 1)
                found[n] = token
                n += 1
            at = before[at]
        for j in range(start[i], n):
            counts[found[j]] = 0
        if is_root[i] and n == start[i]:
            found = reserve(found, n + 1)
            found[n] = tokens[most_frequent(tokens, lengths[i], counts)]
            n += 1
        start[i + 1] = n
    return start, found[:n]


@njit(**_OPTIONS)
def look_up(start, found, values, rows, tokens):
    """Return the value of ``tokens[i]`` among the entries of row ``rows[i]``; NaN: it has none."""
    result = np.empty(len(rows))
    for i in range(len(rows)):
        result[i] = np.nan
        for j in range(start[rows[i]], start[rows[i] + 1]):
            if found[j] == tokens[i]:
                result[i] = values[j]
                break
    return result


# The runtime's guard --------------------------------------------------------------------------

LOG_P_BINS = 8
EVIDENCE_BINS = 7
EDGE_BINS = LOG_P_BINS + 3 * EVIDENCE_BINS


@njit(**_OPTIONS)
def edge_bin(record):
    """Return the bin of an edge's acceptance rate.

    By the mid drafter's log p where it scored the edge, else by the tokens that the n-gram matched
    so far along its chain and, coarsely, by log p.
    """
    log_p = record.log_p
    if not np.isnan(record.mid_log_p):
        if log_p > -0.02:
            return 0
        if log_p > -0.1:
            return 1
        if log_p > -0.3:
            return 2
        if log_p > -0.7:
            return 3
        if log_p > -1.4:
            return 4
        if log_p > -2.5:
            return 5
        if log_p > -4.5:
            return 6
        return 7
    coarse = 0 if log_p > -0.3 else 1 if log_p > -1.5 else 2
    return LOG_P_BINS + 3 * min(record.evidence, EVIDENCE_BINS - 1) + coarse


@njit(**_OPTIONS)
def reach_of(node, size, rate):
    """Return each node's probability of being accepted, from the rates of the edges above it."""
    reach = np.zeros(size)
    reach[0] = 1.0
    for i in range(1, size):
        if node[i].alive:
            reach[i] = reach[node[i].parent] * rate[edge_bin(node[i])]
    return reach


@njit(**_OPTIONS)
def count_edges(node, continuation, tried, taken):
    """Count, by bin, the edges below accepted nodes and those that the target took."""
    at = 0
    for token in continuation:
        following = -1
        child = node[at].first_child
        while child >= 0:
            place = edge_bin(node[child])
            tried[place] += 1
            if node[child].token == token:
                taken[place] += 1
                following = child
            child = node[child].next_sibling
        if following < 0:
            break
        at = following


# Many trees: one level of the trie of schedules ------------------------------------------------

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


@njit(**_OPTIONS)
def read_signals(
    node, start, size, state, frontier, n_frontier, max_depth, removed, whole_tree, width, step, out
):  # fmt: skip
    """Write the signals of every tree before step ``step`` to ``out``."""
    for i in range(len(start)):
        tree = node[start[i] : start[i] + size[i]]
        out[i, step - 1] = signals(
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
        scratch = reserve(scratch, size[i])
        scratch[: size[i]] = node[start[i] : start[i] + size[i]]
        scratch, grown, best = small_step(
            scratch, size[i], max_depth[state[i]], frontier[i, : n_frontier[i]], tokens, log_p,
            before, last, counts, lengths[state[i]], step, width, max_ngram, outside,
        )  # fmt: skip
        out = reserve(out, used + grown)
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
        needed, unseen = begin_mid_step(tree, size[i])
        new = unscored(tree, size[i])
        rows = np.empty(len(new), np.int64)
        tokens = np.empty(len(new), np.int64)
        for j in range(len(new)):
            rows[j] = tree[tree[new[j]].parent].row
            tokens[j] = tree[new[j]].token
        values = look_up(row_start, row_found, row_values, rows, tokens)
        lost += np.isnan(values).sum()
        refresh(tree, size[i], new, values)
        best, late, pool, earlier = pick(
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
        counts[i, step - 1, 5] = longest_chain(tree, size[i], needed)
        counts[i, step - 1, 6] = longest_chain(tree, size[i], unseen)
    return picked, n_picked, missing, n_missing, lost


@njit(**_OPTIONS)
def _give_row(path, n_paths, state_root, state, tree, at):
    # Give a node that has none the row of its path; a new path is appended.
    if tree[at].row >= 0:
        return path, n_paths
    above, token = tree[at].parent, tree[at].token
    row = state_root[state] if at == 0 else path[tree[above].row].first_child
    while row >= 0 and at > 0 and path[row].token != token:
        row = path[row].next_sibling
    if row < 0:
        row = n_paths
        path = reserve(path, n_paths + 1)
        new = path[row]
        new.token = token
        new.depth = tree[at].depth
        new.state = state
        new.first_child = -1
        new.next_sibling = -1
        new.parent = -1
        if at == 0:
            state_root[state] = row
        else:
            parent = tree[above].row
            new.parent = parent if above > 0 else -1
            new.next_sibling = path[parent].first_child
            path[parent].first_child = row
        n_paths += 1
    tree[at].row = row
    return path, n_paths


@njit(**_OPTIONS)
def request(node, start, state, wanted, n_wanted, path, n_paths, state_root):
    """Give the wanted nodes (ascending) of every tree their rows; return the paths."""
    for i in range(len(start)):
        tree = node[start[i] :]
        for at in wanted[i, : n_wanted[i]]:
            path, n_paths = _give_row(path, n_paths, state_root, state[i], tree, at)
    return path, n_paths


@njit(**_OPTIONS)
def request_refresh(node, start, size, state, path, n_paths, state_root):
    """Give the nodes of every tree that the next mid step refreshes from their rows."""
    for i in range(len(start)):
        tree = node[start[i] : start[i] + size[i]]
        for at in parents_to_refresh(tree, size[i]):
            path, n_paths = _give_row(path, n_paths, state_root, state[i], tree, at)
    return path, n_paths


@njit(**_OPTIONS)
def pass_inputs(path, first, end, roots, text, state_root, from_root):
    """Return what one pass over the paths ``first`` … ``end − 1`` reads.

    Path r lies at place ``text + r`` of the cache, after the text. A path of depth 0 stands for
    the root itself and reads what precedes it. With ``from_root`` the others read the root there,
    else in the text.

    Returns
    -------
    tokens, positions, visible : int64 array, shape ``[q]``
        ``visible``: the text before it is seen.
    slots : int64 array, shape ``[q, m]``
        Places of its path and of itself, filled up with its own.
    """
    q = end - first
    tokens = np.empty(q, np.int64)
    positions = np.empty(q, np.int64)
    visible = np.empty(q, np.int64)
    deepest = 1
    for row in range(first, end):
        deepest = max(deepest, path[row].depth)
    slots = np.empty((q, deepest + from_root), np.int64)
    for i in range(q):
        row = first + i
        tokens[i] = path[row].token
        root = roots[path[row].state]
        positions[i] = root + path[row].depth
        visible[i] = root + 1 if path[row].depth and not from_root else root
        slots[i, :] = text + row
        if from_root:
            slots[i, deepest] = text + state_root[path[row].state]
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
        scratch = reserve(scratch, size[i])
        scratch[: size[i]] = node[start[i] : start[i] + size[i]]
        for j in range(n_picked[i]):
            row = scratch[picked[i, j]].row
            tokens[j] = top_tokens[row]
            log_p[j] = top_log_p[row]
        scratch, grown, gone, best = graft(
            scratch, size[i], picked[i, : n_picked[i]], tokens[: n_picked[i]],
            log_p[: n_picked[i]], replace, width,
        )  # fmt: skip
        out = reserve(out, used + grown)
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
    lengths = np.empty(n, np.int64)
    ranks = np.full((n, reach), -1, np.int64)
    for i in range(n):
        tree = node[start[i] : start[i] + size[i]]
        order = prune(tree, size[i], verify_nodes)
        root = roots[state[i]]
        path, places = accepted(tree, size[i], order, tokens[root + 1 : root + 1 + reach])
        kept[i] = len(order)
        lengths[i] = len(path)
        ranks[i, : len(places)] = places
    return kept, lengths, ranks
