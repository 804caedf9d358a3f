"""Loops over the chains that a small drafter proposes, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from treegraft_core.kernels import _insert, add_child, find_child, rescore, reserve

_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True}


@njit(**_OPTIONS)
def paths_to(node, nodes):
    """Return the token paths from below the root to ``nodes``, padded by −1, ``[n, deepest]``."""
    deepest = 1
    for i in range(len(nodes)):
        deepest = max(deepest, node[nodes[i]].depth)
    paths = np.full((len(nodes), deepest), -1, np.int64)
    for i in range(len(nodes)):
        at = nodes[i]
        while at > 0:
            paths[i, node[at].depth - 1] = node[at].token
            at = node[at].parent
    return paths


@njit(**_OPTIONS)
def paths_in(path, first, end):
    """Return the tokens of the paths ``first`` … ``end`` of a table, padded by −1."""
    deepest = 1
    for i in range(first, end):
        deepest = max(deepest, path[i].depth)
    paths = np.full((end - first, deepest), -1, np.int64)
    for i in range(first, end):
        at = i
        while at >= 0 and path[at].depth > 0:  # the path above one of depth 1 is −1
            paths[i - first, path[at].depth - 1] = path[at].token
            at = path[at].parent
    return paths


@njit(**_OPTIONS)
def hang(
    node, size, max_depth, frontier, start, tokens, log_p, match, chain, step, width,
    fallback, fallback_log_p,
):  # fmt: skip
    """Grow one tree by the chains proposed for its frontier; return array, size and N_{k+1}.

    Parameters
    ----------
    start : int64 array, shape ``[n + 1]``
        Where the chains of each frontier node begin.
    tokens, log_p : arrays, shape ``[chains, longest]``
        Chains, padded by −1, and the log-probability of each edge.
    match : int64 array, shape ``[chains]``
        Tokens matched, by which first tokens are ordered before log s.
    chain : int
        Most tokens of a chain at this step.
    fallback, fallback_log_p
        Child of the root if nothing at all is proposed at the first step; −1: none.
    """
    longest = min(chain, tokens.shape[1])
    node = reserve(node, size + 1 + len(tokens) * longest)
    for i in range(size):
        node[i].match = -1
        node[i].proposals = 0
        node[i].proposed = False
    touched = found = False
    for f in range(len(frontier)):
        deepest = min(longest, max_depth - node[frontier[f]].depth)
        for c in range(start[f], start[f + 1]):
            parent = frontier[f]
            for j in range(deepest):
                token, value = tokens[c, j], log_p[c, j]
                if token < 0:
                    break
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
                node[child].evidence = max(match[c] + j, node[child].evidence)
                if j == 0:
                    found = True
                    node[child].match = max(match[c], node[child].match)
                parent = child
    if not found and step == 1 and max_depth > 0 and fallback >= 0:
        child = find_child(node, 0, fallback)
        if child < 0:
            child = size
            add_child(node, child, 0, fallback, fallback_log_p)
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


@njit(**_OPTIONS)
def last_tokens(paths, tokens, lengths):
    """Return the last token of context + path, and whether the path is empty."""
    last = np.empty(len(paths), np.int64)
    is_root = np.empty(len(paths), np.bool_)
    for i in range(len(paths)):
        last[i] = tokens[lengths[i] - 1]
        is_root[i] = paths.shape[1] == 0 or paths[i, 0] < 0
        for j in range(paths.shape[1]):
            if paths[i, j] < 0:
                break
            last[i] = paths[i, j]
    return last, is_root


@njit(**_OPTIONS)
def frontier_paths(node, start, size, state, frontier, n_frontier):
    """Return the paths to all frontier nodes of all trees, in order, and whose state each is."""
    total = n_frontier.sum()
    deepest = 1
    for b in range(len(start)):
        for f in range(n_frontier[b]):
            deepest = max(deepest, node[start[b] + frontier[b, f]].depth)
    paths = np.full((total, deepest), -1, np.int64)
    of = np.empty(total, np.int64)
    n = 0
    for b in range(len(start)):
        for f in range(n_frontier[b]):
            at = frontier[b, f]
            of[n] = state[b]
            while at > 0:
                record = node[start[b] + at]
                paths[n, record.depth - 1] = record.token
                at = record.parent
            n += 1
    return paths, of


@njit(**_OPTIONS)
def hang_all(
    node, start, size, state, frontier, n_frontier, max_depth, chain_start, tokens, log_p, match,
    chain, step, width, fallback, fallback_log_p,
):  # fmt: skip
    """Copy every tree and grow the copy by chains; as `kernels.small_steps`."""
    n = len(start)
    out = np.empty(2 * max(1, size.sum()), node.dtype)
    out_start = np.empty(n, np.int64)
    out_size = np.empty(n, np.int64)
    out_frontier = np.zeros((n, width), np.int64)
    out_n = np.empty(n, np.int64)
    scratch = np.empty(512, node.dtype)
    used = 0
    leaf = 0
    for i in range(n):
        scratch = reserve(scratch, size[i])
        scratch[: size[i]] = node[start[i] : start[i] + size[i]]
        begin, end = chain_start[leaf], chain_start[leaf + n_frontier[i]]
        own = chain_start[leaf : leaf + n_frontier[i] + 1] - begin
        leaf += n_frontier[i]
        scratch, grown, best = hang(
            scratch, size[i], max_depth[state[i]], frontier[i, : n_frontier[i]], own,
            tokens[begin:end], log_p[begin:end], match[begin:end], chain, step, width,
            fallback[state[i]], fallback_log_p[state[i]],
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
def prefixes_of(paths, lengths):
    """Return the distinct prefixes of paths, the empty and the whole ones included.

    Returns
    -------
    prefixes : int64 array, shape ``[m, deepest]``
        Padded by −1.
    their : int64 array, shape ``[m]``
        Context length of each: prefixes of two lengths are not the same.
    row : int64 array, shape ``[n, deepest + 1]``
        ``row[i, d]`` is the first d tokens of path i; −1 beyond its end.
    """
    n, deepest = paths.shape
    prefixes = np.full((n * (deepest + 1), deepest), -1, np.int64)
    their = np.empty(n * (deepest + 1), np.int64)
    row = np.full((n, deepest + 1), -1, np.int64)
    size = 1
    while size < 4 * n * (deepest + 1):
        size *= 2
    table = np.full(size, -1, np.int64)
    m = 0
    for i in range(n):
        code = np.uint64(lengths[i]) * np.uint64(0x9E3779B97F4A7C15)
        for d in range(deepest + 1):
            if d and paths[i, d - 1] < 0:
                break
            if d:
                code = (code ^ np.uint64(paths[i, d - 1] + 1)) * np.uint64(0x100000001B3)
                code ^= code >> np.uint64(29)
            at = np.int64(code % np.uint64(size))
            while table[at] >= 0 and not _same(
                prefixes[table[at]], their[table[at]], paths[i], d, lengths[i]
            ):
                at = (at + 1) % size
            if table[at] < 0:
                table[at] = m
                prefixes[m, :d] = paths[i, :d]
                their[m] = lengths[i]
                m += 1
            row[i, d] = table[at]
    return prefixes[:m], their[:m], row


@njit(**_OPTIONS)
def _same(prefix, its_length, path, d, length):
    if its_length != length or (d < len(prefix) and prefix[d] >= 0):
        return False
    same = True
    for j in range(d):
        same = same and prefix[j] == path[j]
    return same


@njit(**_OPTIONS)
def passing(paths, row, start, tokens, fallback):
    """Return the distinct tokens by which chains go on after each path.

    Parameters
    ----------
    paths : int64 array, shape ``[n, deepest]``
        Padded by −1.
    row : int64 array, shape ``[n, deepest + 1]``
        The row of ``start`` of each of its prefixes, −1 beyond its end.
    start, tokens
        Chains, as in `hang`.
    fallback : int64 array, shape ``[n]``
        What follows an empty path without chains.
    """
    n, deepest = paths.shape
    longest = tokens.shape[1]
    begin = np.zeros(n + 1, np.int64)
    found = np.empty(64, np.int64)
    count = 0
    for i in range(n):
        end = 0
        while end < deepest and paths[i, end] >= 0:
            end += 1
        for d in range(max(0, end - longest + 1), end + 1):
            for c in range(start[row[i, d]], start[row[i, d] + 1]):
                along = 0
                while along < end - d and tokens[c, along] == paths[i, d + along]:
                    along += 1
                if along < end - d or tokens[c, along] < 0:
                    continue
                token = tokens[c, along]
                known = False
                for j in range(begin[i], count):
                    known = known or found[j] == token
                if not known:
                    found = reserve(found, count + 1)
                    found[count] = token
                    count += 1
        if end == 0 and count == begin[i]:
            found = reserve(found, count + 1)
            found[count] = fallback[i]
            count += 1
        begin[i + 1] = count
    return begin, found[:count]
