"""Loops of the suffix drafter, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from treegraft_core.kernels import match_length, occurrence

_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True}


@njit(**_OPTIONS)
def tail_of(path, tokens, length, longest):
    """Return the last ``longest`` tokens of context + path (padded by −1), last first."""
    tail = np.empty(longest, np.int64)
    n = 0
    end = 0
    while end < len(path) and path[end] >= 0:
        end += 1
    while end > 0 and n < longest:
        end -= 1
        tail[n] = path[end]
        n += 1
    at = length - 1
    while at >= 0 and n < longest:
        tail[n] = tokens[at]
        at -= 1
        n += 1
    return tail[:n]


@njit(**_OPTIONS)
def _bound(tokens, order, low, high, back, token, after):
    # First place in order[low:high] whose token ``back`` before it is >= token (> with ``after``).
    while low < high:
        middle = (low + high) // 2
        at = order[middle] - back
        value = tokens[at] if at >= 0 else -2
        if value < token or (after and value == token):
            low = middle + 1
        else:
            high = middle
    return low


@njit(**_OPTIONS)
def _take(place, match, count, at, n, most):
    # Insert by match length, longest first; among equals the earlier found stays first.
    if count == most:
        if match[count - 1] >= n:
            return count
        count -= 1
    i = count
    while i > 0 and match[i - 1] < n:
        place[i] = place[i - 1]
        match[i] = match[i - 1]
        i -= 1
    place[i] = at
    match[i] = n
    return count + 1


@njit(**_OPTIONS)
def in_context(tail, tokens, before, last, length, most):
    """Return where the tail occurs in the context: the longest matches, most recent first.

    Returns
    -------
    place : int64 array
        Positions of the tokens that follow, at most ``most``.
    match : int64 array
        Tokens matched.
    """
    place = np.empty(most, np.int64)
    match = np.empty(most, np.int64)
    count = 0
    at = occurrence(before, last, tail[0], length)
    while at >= 0:
        count = _take(place, match, count, at + 1, match_length(tokens, tail, at), most)
        at = before[at]
    return place[:count], match[:count]


@njit(**_OPTIONS)
def in_corpus(tail, tokens, order, segments, most):
    """Return where the tail occurs in indexed texts: the longest matches first.

    Parameters
    ----------
    tail : int64 array
        Last token first.
    tokens, order : int32 array
        The texts, −1 between two; and in each segment the positions, sorted by what precedes them.
    segments : int64 array, shape ``[n + 1]``
        Where each segment begins in ``order``.
    most : int
        Places returned; where more match equally well, evenly spaced ones.
    """
    place = np.empty(most, np.int64)
    match = np.empty(most, np.int64)
    count = 0
    low = np.empty(len(tail) + 1, np.int64)
    high = np.empty(len(tail) + 1, np.int64)
    for s in range(len(segments) - 1):
        low[0], high[0] = segments[s], segments[s + 1]
        n = 0
        while n < len(tail):
            low[n + 1] = _bound(tokens, order, low[n], high[n], n, tail[n], False)
            high[n + 1] = _bound(tokens, order, low[n + 1], high[n], n, tail[n], True)
            if low[n + 1] == high[n + 1]:
                break
            n += 1
        taken = 0
        inner_low = inner_high = np.int64(-1)
        while n > 0 and taken < most:
            size = high[n] - low[n] - max(0, inner_high - inner_low)
            wanted = min(size, most - taken)
            for j in range(wanted):
                at = low[n] + (j * size) // wanted
                if inner_low >= 0 and at >= inner_low:
                    at += inner_high - inner_low
                count = _take(place, match, count, order[at] + 1, n, most)
            taken += wanted
            inner_low, inner_high = low[n], high[n]
            n -= 1
    return place[:count], match[:count]


@njit(**_OPTIONS)
def _groups(group, token):
    # Chains of one group that go on with the same token stay one: the number of its first chain.
    # ``token[i]`` is −1 where chain i has ended.
    new = np.empty(len(token), np.int64)
    for i in range(len(token)):
        new[i] = i
        if token[i] < 0:
            continue
        for j in range(i):
            if new[j] == j and token[j] == token[i] and group[j] == group[i]:
                new[i] = j
                break
    return new


@njit(**_OPTIONS)
def weigh(tokens, weight, doubt, log_p):
    """Write the log-probability of each edge of chains that start at one node into ``log_p``.

    It is the weight of the chains that go on with the token, over that of all that reach the node
    and ``doubt``, the weight of what has not been seen.
    """
    n, longest = tokens.shape
    group = np.zeros(n, np.int64)
    for depth in range(longest):
        token = tokens[:, depth]
        new = _groups(group, token)
        mass = np.zeros(n)
        above = np.zeros(n)
        for i in range(n):
            if token[i] >= 0:
                mass[new[i]] += weight[i]
                above[group[i]] += weight[i]
        for i in range(n):
            if token[i] >= 0:
                log_p[i, depth] = np.log(mass[new[i]] / (above[group[i]] + doubt))
        group = new


@njit(**_OPTIONS)
def cut(tokens, log_p, least):
    """End each chain before its probability falls below ``exp(least)``.

    The first token of the best chain stays. Chains of which nothing is left have −1 first.
    """
    for i in range(len(tokens)):
        total = 0.0
        for k in range(tokens.shape[1]):
            total += log_p[i, k]
            if total < least and (i or k):
                tokens[i, k:] = -1
                break


@njit(**_OPTIONS)
def copy_chain(source, at, end, chain):
    """Write what stands from ``at`` on into ``chain``, up to ``end`` or −1."""
    for k in range(min(len(chain), end - at)):
        if source[at + k] < 0:
            break
        chain[k] = source[at + k]


@njit(**_OPTIONS)
def propose(
    paths, lengths, tokens, before, last, corpus, order, segments,
    longest_match, places, chain, doubt, corpus_weight, least,
):  # fmt: skip
    """Return the chains under each path: `treegraft_core.suffix.SuffixDrafter` says which.

    Returns
    -------
    start : int64 array, shape ``[n + 1]``
    tokens, log_p : arrays, shape ``[chains, chain]``
    match : int64 array, shape ``[chains]``
    """
    n = len(paths)
    start = np.zeros(n + 1, np.int64)
    most = 2 * places
    out = np.full((n * most, chain), -1, np.int64)
    out_log_p = np.zeros((n * most, chain))
    out_match = np.empty(n * most, np.int64)
    count = 0
    for i in range(n):
        length = lengths[i]
        tail = tail_of(paths[i], tokens, length, longest_match)
        near, near_match = in_context(tail, tokens, before, last, length, places)
        far, far_match = in_corpus(tail, corpus, order, segments, places)
        weight = np.empty(len(near) + len(far))
        a = b = 0
        for j in range(len(near) + len(far)):
            # The longer match first; among equals the context.
            if b == len(far) or (a < len(near) and near_match[a] >= far_match[b]):
                out_match[count + j], weight[j] = near_match[a], near_match[a] ** 2
                copy_chain(tokens, near[a], length, out[count + j])
                a += 1
            else:
                out_match[count + j] = far_match[b]
                weight[j] = corpus_weight * far_match[b] ** 2
                copy_chain(corpus, far[b], len(corpus), out[count + j])
                b += 1
        end = count + len(weight)
        weigh(out[count:end], weight, doubt, out_log_p[count:end])
        cut(out[count:end], out_log_p[count:end], least)
        count = end
        start[i + 1] = count
    return start, out[:count], out_log_p[:count], out_match[:count]
