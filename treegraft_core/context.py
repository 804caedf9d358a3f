"""The committed tokens of a request, with what the small drafter needs of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from treegraft_core.tree import LOG_P_STEP

OUTSIDE_TABLE_PENALTY = 5.0


class Context:
    """Committed tokens, the target's log-probability of each, and an n-gram index over them.

    Parameters
    ----------
    tokens : sequence of int
        Committed tokens, prompt first.
    log_p : sequence of float
        ``log_p[i]`` is the target's log-probability of ``tokens[i]`` given what precedes it, in
        nats, read from its top-W table (:func:`table_log_p`). The first token has no distribution;
        its entry is not read except by the fallback child.
    max_ngram : int
        Longest n-gram indexed (n_max).
    """

    def __init__(self, tokens: Sequence[int], log_p: Sequence[float], max_ngram: int = 5):
        self.tokens: list[int] = []
        self.log_p: list[float] = []
        self.max_ngram = max_ngram
        self._followers: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(max_ngram)]
        self._counts: Counter[int] = Counter()
        self._last: dict[int, int] = {}
        self.extend(tokens, log_p)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int], log_p: Sequence[float]) -> None:
        """Append committed tokens; the index grows by them alone."""
        if len(tokens) != len(log_p):
            raise ValueError(f"log_p: {len(log_p)} values for {len(tokens)} tokens")
        for token, value in zip(tokens, log_p, strict=True):
            at = len(self.tokens)
            for n in range(1, min(self.max_ngram, at) + 1):
                key = tuple(self.tokens[at - n : at])
                self._followers[n - 1].setdefault(key, []).append(at)
            self.tokens.append(int(token))
            self.log_p.append(round(float(value) / LOG_P_STEP) * LOG_P_STEP)
            self._counts[int(token)] += 1
            self._last[int(token)] = at

    def matches(self, path: Sequence[int], length: int | None = None) -> tuple[int, list[int]]:
        """Find where the longest suffix of context + ``path`` occurs earlier in the context.

        Parameters
        ----------
        path : sequence of int
            Draft tokens after the context.
        length : int, optional
            Read only the first ``length`` tokens of the context (default: all).

        Returns
        -------
        n : int
            Tokens matched, 0 if none.
        positions : list of int
            Context positions of the tokens that followed each occurrence, most recent first.
        """
        length = len(self.tokens) if length is None else length
        tail = [*self.tokens[max(0, length - self.max_ngram) : length], *path][-self.max_ngram :]
        for n in range(len(tail), 0, -1):
            found = self._followers[n - 1].get(tuple(tail[-n:]))
            if found:
                stop = bisect_left(found, length)
                if stop:
                    return n, found[stop - 1 :: -1]
        return 0, []

    def most_frequent(self, length: int | None = None) -> tuple[int, int]:
        """Return the most frequent token and its last position (ties: the most recent one)."""
        if length is None or length == len(self.tokens):
            counts, last = self._counts, self._last
        else:
            counts = Counter(self.tokens[:length])
            last = {token: at for at, token in enumerate(self.tokens[:length])}
        token = max(counts, key=lambda t: (counts[t], last[t]))
        return token, last[token]


def table_log_p(tokens: Sequence[int], log_p: Sequence[float], token: int) -> float:
    """Log-probability of ``token`` from a top-W table (tokens and values, best first).

    A token outside the table gets the table's last value minus 5 nats.
    """
    for t, value in zip(tokens, log_p, strict=True):
        if t == token:
            return float(value)
    return float(log_p[-1]) - OUTSIDE_TABLE_PENALTY
