"""A small drafter that matches suffixes of any length: context, finished answers, a corpus.

The idea is SuffixDecoding's (arXiv 2411.04975): frequencies in a suffix tree as probabilities. The
tree is kept as what a suffix tree is compressed to, positions sorted by what precedes them (a
suffix array), 8 bytes a token; the context itself is read through the links of
:class:`treegraft_core.Context`, so that it can be read as of any earlier position. That is why no
library does it: Arctic Inference's cache grows with the text and cannot look back, but enumeration
asks for many positions of one text at once (`benchmarks.suffix` compares the two).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treegraft_core import suffix_kernels
from treegraft_core.context import Context
from treegraft_core.errors import InputError
from treegraft_core.small import Chain, Chains, SmallDrafter
from treegraft_core.tree import IntArray, on_grid

Int32Array = NDArray[np.int32]
MOST_SEGMENTS = 8
"""Segments of an index; then the smallest neighbours are sorted anew as one."""
DEPTH = 64
"""Tokens by which positions are sorted; no match is longer."""
END = -1


def sorted_positions(tokens: Int32Array, depth: int = DEPTH) -> Int32Array:
    """Return the positions that a token follows, sorted by what precedes them, last token first.

    Prefix doubling: ranks by 1, 2, 4, … tokens.

    Parameters
    ----------
    tokens : int32 array
        Texts, each ended by −1.
    depth : int
        Tokens by which they are sorted; equal ones stay in order.
    """
    n = len(tokens)
    if n < 2:
        return np.zeros(0, np.int32)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    reach = 1
    while reach < depth:
        earlier = np.full(n, -1, np.int64)
        earlier[reach:] = rank[:-reach]
        rank = np.unique(rank * (n + 1) + earlier + 1, return_inverse=True)[1].astype(np.int64)
        reach *= 2
    order = np.argsort(rank, kind="stable")
    inside = order[order < n - 1]
    return inside[(tokens[inside] >= 0) & (tokens[inside + 1] >= 0)].astype(np.int32)


class TextIndex:
    """Texts in which suffixes are looked up; 8 bytes a token.

    Parameters
    ----------
    most_tokens : int
        When there are more, the oldest texts go; a text longer than this keeps its end.

    Attributes
    ----------
    tokens, order : int32 array
        The texts, −1 after each, and in each segment the sorted positions.
    segments : int64 array
        Where each segment begins in ``order``.
    """

    def __init__(self, most_tokens: int):
        self.most_tokens = most_tokens
        self._segments: deque[tuple[list[Int32Array], Int32Array]] = deque()
        self._size = 0
        self._flatten()

    def __len__(self) -> int:
        return self._size

    @property
    def bytes(self) -> int:
        """Memory of the index."""
        return int(self.tokens.nbytes + self.order.nbytes + self.segments.nbytes)

    def texts(self) -> list[list[int]]:
        """Return the texts, the oldest first."""
        return [text.tolist() for texts, _ in self._segments for text in texts]

    def add(self, texts: Iterable[Sequence[int]]) -> None:
        """Add texts, the newest last; evict the oldest beyond the limit."""
        new = [np.asarray(text, np.int32)[-self.most_tokens :] for text in texts]
        new = [text for text in new if len(text) > 1]
        if not new:
            return
        self._put(len(self._segments), new)
        self._size += sum(len(text) for text in new)
        self._evict()
        while len(self._segments) > MOST_SEGMENTS:
            sizes = [len(order) for _, order in self._segments]
            pair = min(range(len(sizes) - 1), key=lambda i: sizes[i] + sizes[i + 1])
            self._put(pair, [*self._segments[pair][0], *self._segments[pair + 1][0]])
            del self._segments[pair + 1], self._segments[pair + 1]
        self._flatten()

    def _put(self, at: int, texts: list[Int32Array]) -> None:
        flat = np.concatenate([part for text in texts for part in (text, [END])]).astype(np.int32)
        self._segments.insert(at, (texts, sorted_positions(flat)))

    def _evict(self) -> None:
        while self._size > self.most_tokens:
            texts = self._segments.popleft()[0]
            while texts and self._size > self.most_tokens:
                self._size -= len(texts.pop(0))
            if texts:
                self._put(0, texts)

    def _flatten(self) -> None:
        parts: list[Int32Array] = []
        orders: list[Int32Array] = []
        begin = 0
        for texts, order in self._segments:
            for text in texts:
                parts += [text, np.array([END], np.int32)]
            orders.append(order + np.int32(begin))
            begin = sum(len(part) for part in parts)
        empty = np.zeros(0, np.int32)
        self.tokens = np.concatenate([empty, *parts])
        self.order = np.concatenate([empty, *orders])
        self.segments = np.cumsum([0, *(len(order) for order in orders)], dtype=np.int64)


class SuffixDrafter(SmallDrafter):
    """Continues what stood after the longest suffixes of context + path.

    Of the places where the last token occurs, in the context and in the indexed texts, those with
    the longest matches are taken, `places` of each. What followed them is a trie of chains; a place
    weighs its match squared, and an edge's probability is the weight that goes along it over the
    weight at its node and `doubt`. So long matches lead, and shorter ones fill up.

    Parameters
    ----------
    longest_match : int
        Most tokens matched, from 1 to 64.
    places : int
        Places taken in the context, and as many in the indexed texts.
    chain : int
        Most tokens of a chain at the first step; step k takes ``chain − (k − 1)``.
    doubt : float
        Weight of what was never seen, above 0.
    min_probability : float
        A chain ends before its probability falls below this, from 0 to 1: a mid step has to score
        every node of a tree. The first token of the best chain is always there.
    corpus : sequence of sequence of int
        Texts to look up suffixes in, as token ids.
    corpus_weight : float
        Weight of a place there beside one in the context.
    corpus_tokens : int
        Most tokens of the corpus; of a larger one the last are kept. 8 bytes a token.
    remember_tokens : int
        Most tokens of finished answers that are kept, the oldest evicted; 0: none. With it what is
        drafted depends on earlier requests (the output does not).
    """

    name = "suffix"

    def __init__(
        self,
        longest_match: int = 32,
        places: int = 16,
        chain: int = 12,
        doubt: float = 4.0,
        min_probability: float = 0.05,
        corpus: Iterable[Sequence[int]] = (),
        corpus_weight: float = 0.5,
        corpus_tokens: int = 10_000_000,
        remember_tokens: int = 0,
    ):
        counts = {
            "longest_match": (longest_match, 1, DEPTH),
            "places": (places, 1, 1024),
            "chain": (chain, 1, 64),
            "corpus_tokens": (corpus_tokens, 0, 1 << 30),
            "remember_tokens": (remember_tokens, 0, 1 << 30),
        }
        for name, (value, low, high) in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InputError(
                    f"small.{name}={value}: must be a whole number from {low} to {high}"
                )
        shares = {
            "doubt": doubt,
            "min_probability": min_probability,
            "corpus_weight": corpus_weight,
        }
        for name, share in shares.items():
            if not isinstance(share, int | float) or not 0 < share < 1e6:
                raise InputError(f"small.{name}={share}: must be a number above 0")
        if min_probability > 1:
            raise InputError(f"small.min_probability={min_probability}: must be at most 1")
        self.longest_match, self.places, self.chain = longest_match, places, chain
        self.doubt, self.corpus_weight = float(doubt), float(corpus_weight)
        self.min_probability = float(min_probability)
        self.corpus, self.answers = TextIndex(corpus_tokens), TextIndex(remember_tokens)
        self.learns = remember_tokens > 0
        if corpus_tokens:
            self.corpus.add(corpus)
        self.largest_token = int(self.corpus.tokens.max(initial=-1))
        self._merge()

    def _merge(self) -> None:
        # One index for the kernels: the answers' segments after the corpus's.
        one, two = self.corpus, self.answers
        self._index = (
            np.concatenate([one.tokens, two.tokens]),
            np.concatenate([one.order, two.order + np.int32(len(one.tokens))]),
            np.concatenate([one.segments, two.segments[1:] + len(one.order)]),
        )

    def settings(self) -> dict[str, Any]:
        """Return the parameters, and of the corpus its size and checksum."""
        found: dict[str, Any] = {
            "longest_match": self.longest_match,
            "places": self.places,
            "doubt": self.doubt,
            "min_probability": self.min_probability,
        }
        if len(self.corpus):
            found["corpus_tokens"] = len(self.corpus)
            found["corpus_crc32"] = zlib.crc32(self.corpus.tokens.tobytes())
            found["corpus_weight"] = self.corpus_weight
        if self.answers.most_tokens:
            found["remember_tokens"] = self.answers.most_tokens
        return found

    def remember(self, tokens: Sequence[int]) -> None:
        """Index a finished answer, if `remember_tokens` allows."""
        if self.answers.most_tokens:
            self.answers.add([tokens])
            self._merge()

    def proposals(self, context: Context, paths: IntArray, lengths: IntArray) -> Chains:
        """Return the chains under each of ``paths``."""
        tokens, _, before, last, _ = context.index
        start, found, log_p, match = suffix_kernels.propose(
            paths,
            lengths,
            tokens,
            before,
            last,
            *self._index,
            self.longest_match,
            self.places,
            self.chain,
            self.doubt,
            self.corpus_weight,
            float(np.log(self.min_probability)),
        )
        return Chains(start, found, on_grid(log_p), match)

    def propose(self, context: Context, path: Sequence[int], length: int) -> list[Chain]:
        """Return the chains under one path."""
        paths = np.array([[*path, -1]], np.int64)
        found = self.proposals(context, paths, np.array([length]))
        return [
            Chain(tuple(row[row >= 0].tolist()), tuple(p[row >= 0].tolist()), int(m))
            for row, p, m in zip(found.tokens, found.log_p, found.match, strict=True)
            if row[0] >= 0
        ]
