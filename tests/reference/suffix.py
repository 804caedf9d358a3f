"""The suffix drafter in plain Python: scan everything, count, divide."""

from __future__ import annotations

import math
from collections.abc import Sequence


def match_of(text: Sequence[int], end: int, tail: Sequence[int]) -> int:
    """Return how many tokens before ``text[end]`` equal the end of ``tail``."""
    n = 0
    while n < len(tail) and n < end and text[end - 1 - n] == tail[len(tail) - 1 - n]:
        n += 1
    return n


def occurrences(text: Sequence[int], tail: Sequence[int]) -> list[tuple[int, int]]:
    """Return (match, position of the next token) wherever a suffix of ``tail`` is followed."""
    found = [(match_of(text, end, tail), end) for end in range(1, len(text))]
    return [(match, end) for match, end in found if match]


def chains(
    context: Sequence[int],
    path: Sequence[int],
    corpus: Sequence[Sequence[int]],
    longest_match: int,
    places: int,
    chain: int,
    doubt: float,
    corpus_weight: float,
) -> list[tuple[tuple[int, ...], tuple[float, ...], int]]:
    """Return tokens, log p and match of each chain; all places, so ``places`` must not bind."""
    tail = [*context, *path][-longest_match:]
    near = [(m, context[at : at + chain], m**2) for m, at in occurrences(context, tail)]
    far = [
        (m, text[at : at + chain], corpus_weight * m**2)
        for text in corpus
        for m, at in occurrences(text, tail)
    ]
    assert len(near) <= places and len(far) <= places
    every = [(m, tuple(tokens), float(weight)) for m, tokens, weight in near + far]
    found = []
    for match, tokens, _ in every:
        log_p = []
        for k in range(len(tokens)):
            along = sum(w for _, t, w in every if t[: k + 1] == tokens[: k + 1])
            reach = sum(w for _, t, w in every if t[:k] == tokens[:k] and len(t) > k)
            log_p.append(math.log(along / (reach + doubt)))
        found.append((tokens, tuple(log_p), match))
    return found
