"""The committed tokens of a request, with what the small drafter needs of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treegraft_core import kernels
from treegraft_core.tree import BoolArray, FloatArray, IntArray, grown, on_grid

OUTSIDE_TABLE_PENALTY = 5.0


class Context:
    """Committed tokens, the target's log-probability of each, and where each occurred before.

    An n-gram's earlier occurrences are among those of its last token, so the index is one link a
    token to the previous occurrence of the same token; it grows by the committed tokens alone.

    Parameters
    ----------
    tokens : sequence of int
        Committed tokens, prompt first.
    log_p : sequence of float
        ``log_p[i]`` is the target's log-probability of ``tokens[i]`` given what precedes it, in
        nats, read from its top-W table (:func:`table_log_p`). The first token has no distribution;
        its entry is not read except by the fallback child.
    max_ngram : int
        Longest n-gram matched (n_max).
    """

    def __init__(
        self,
        tokens: Sequence[int] | IntArray,
        log_p: Sequence[float] | FloatArray,
        max_ngram: int = 5,
    ):
        self.max_ngram = max_ngram
        self._length = 0
        self._tokens: IntArray = np.zeros(256, np.int64)
        self._log_p: FloatArray = np.zeros(256)
        self._before: IntArray = np.zeros(256, np.int64)
        self._last: IntArray = np.full(256, -1, np.int64)
        self._counts: IntArray = np.zeros(256, np.int64)
        self.extend(tokens, log_p)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> IntArray:
        """Committed tokens, int64, shape ``[length]``: a view."""
        return self._tokens[: self._length]

    @property
    def log_p(self) -> FloatArray:
        """The target's log-probability of each, nats, on the grid: a view."""
        return self._log_p[: self._length]

    @property
    def index(self) -> tuple[IntArray, FloatArray, IntArray, IntArray, IntArray]:
        """What the kernels read.

        Tokens, log-probabilities, the previous place of the same token (−1: none), the last place
        of each token id, and a scratch of zeros a token id.
        """
        return self._tokens, self._log_p, self._before, self._last, self._counts

    def extend(self, tokens: Sequence[int] | IntArray, log_p: Sequence[float] | FloatArray) -> None:
        """Append committed tokens; the index grows by them alone."""
        if len(tokens) != len(log_p):
            raise ValueError(f"log_p: {len(log_p)} values for {len(tokens)} tokens")
        if not len(tokens):
            return
        new = np.asarray(tokens, np.int64)
        if new.min() < 0:
            raise ValueError(f"tokens: {int(new.min())} is not a token id")
        end = self._length + len(new)
        for name in ("_tokens", "_log_p", "_before"):
            setattr(self, name, grown(getattr(self, name), end))
        self._last = grown(self._last, int(new.max()) + 1, fill=-1)
        self._counts = grown(self._counts, len(self._last))
        self._tokens[self._length : end] = new
        self._log_p[self._length : end] = on_grid(np.asarray(log_p, np.float64))
        kernels.link(self._tokens, self._before, self._last, self._length, end)
        self._length = end

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
        length = self._length if length is None else length
        text = [*self.tokens[max(0, length - self.max_ngram) : length].tolist(), *path]
        tail = np.array(text[: -self.max_ngram - 1 : -1], np.int64)
        n, positions = kernels.matches(self._tokens, self._before, self._last, tail, length)
        return int(n), positions.tolist()

    def most_frequent(self, length: int | None = None) -> tuple[int, int]:
        """Return the most frequent token and its last position (ties: the most recent one)."""
        length = self._length if length is None else length
        at = int(kernels.most_frequent(self._tokens, length, self._counts))
        return int(self._tokens[at]), at

    def followers(
        self, path_tokens: IntArray, is_root: BoolArray, lengths: IntArray | None = None
    ) -> tuple[IntArray, IntArray]:
        """Return what a small step may propose under paths that end in ``path_tokens``.

        Parameters
        ----------
        path_tokens : int64 array, shape ``[n]``
            Last token of each path.
        is_root : bool array, shape ``[n]``
            The path is empty: its last token is the root.
        lengths : int64 array, shape ``[n]``, optional
            Context tokens that each path reads (default: all).

        Returns
        -------
        start : int64 array, shape ``[n + 1]``
            Where each path's tokens begin.
        tokens : int64 array
            Those tokens, distinct for each path.
        """
        tokens, _, before, last, counts = self.index
        if lengths is None:
            lengths = np.full(len(path_tokens), self._length)
        start, found = kernels.followers(
            tokens, before, last, counts, lengths, path_tokens, is_root
        )
        return start, found


def table_log_p(tokens: Sequence[int], log_p: Sequence[float], token: int) -> float:
    """Log-probability of ``token`` from a top-W table (tokens and values, best first).

    A token outside the table gets the table's last value minus 5 nats.
    """
    for t, value in zip(tokens, log_p, strict=True):
        if t == token:
            return float(value)
    return float(log_p[-1]) - OUTSIDE_TABLE_PENALTY
