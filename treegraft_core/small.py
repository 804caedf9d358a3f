"""The small drafter's protocol: what proposes tokens almost for free (design section 2).

A drafter of your own is a class with one method, :meth:`SmallDrafter.propose`; everything else
(the runtime decoder, enumeration of all schedules, profile, replay, reports) follows from it::

    class Repeat(SmallDrafter):
        name = "repeat"

        def propose(self, context, path, length):
            text = [*context.tokens[:length].tolist(), *path]
            return [Chain((text[-1],), (-1.0,), match=1)]

    DraftingConfig(small=Repeat())
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treegraft_core import chain_kernels, kernels
from treegraft_core.context import OUTSIDE_TABLE_PENALTY, Context
from treegraft_core.errors import InputError
from treegraft_core.tree import DraftTree, FloatArray, IntArray, NodeArray, on_grid

Grown = tuple[NodeArray, IntArray, IntArray, IntArray, IntArray, int]
"""Trees one after the other: records, start, size, frontiers ``[B, W]``, their numbers, used."""
MOST_KNOWN = 200_000
"""Paths whose proposals are kept, before they are forgotten."""


@dataclass(frozen=True)
class Chain:
    """Tokens proposed one after the other under a node.

    Attributes
    ----------
    tokens : tuple of int
        At least one.
    log_p : tuple of float
        Log-probability of each given what precedes it, nats, at most 0.
    match : int
        How much speaks for it, such as tokens matched; the new frontier is ordered by the match of
        first tokens, then by log s. 0 or more.
    """

    tokens: tuple[int, ...]
    log_p: tuple[float, ...]
    match: int = 0

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.log_p) or min(self.tokens) < 0:
            raise InputError(
                f"small: a chain of tokens {self.tokens[:8]} with {len(self.log_p)} "
                "log-probabilities; give one for each of at least one token id"
            )
        if not all(value <= 0 for value in self.log_p) or self.match < 0:
            raise InputError(
                f"small: a chain with log_p={self.log_p[:8]}, match={self.match}; give "
                "log-probabilities of at most 0 and a match of at least 0"
            )


@dataclass(frozen=True)
class Chains:
    """The chains proposed under several paths.

    Attributes
    ----------
    start : int64 array, shape ``[paths + 1]``
        Where the chains of each path begin.
    tokens : int64 array, shape ``[chains, longest]``
        Padded by −1; the best chain of a path first.
    log_p : float64 array, shape ``[chains, longest]``
        Of each edge, nats, on the grid.
    match : int64 array, shape ``[chains]``
        As in :class:`Chain`.
    """

    start: IntArray
    tokens: IntArray
    log_p: FloatArray
    match: IntArray

    @classmethod
    def of(cls, proposals: Sequence[Sequence[Chain]]) -> Chains:
        """Return lists of chains as arrays."""
        flat = [chain for chains in proposals for chain in chains]
        longest = max((len(chain.tokens) for chain in flat), default=1)
        tokens = np.full((len(flat), longest), -1, np.int64)
        log_p = np.zeros((len(flat), longest))
        for i, chain in enumerate(flat):
            tokens[i, : len(chain.tokens)] = chain.tokens
            log_p[i, : len(chain.tokens)] = chain.log_p
        start = np.concatenate([[0], np.cumsum([len(chains) for chains in proposals])])
        match = np.array([chain.match for chain in flat], np.int64)
        return cls(start.astype(np.int64), tokens, on_grid(log_p), match)


class SmallDrafter(ABC):
    """What a small step (τ_k = 0) asks.

    A subclass gives `name` and `propose`. Proposals depend on context and path alone, so that
    schedules that share a path share them; state that outlives a request comes in by `remember`
    only.

    Attributes
    ----------
    name : str
        The drafter's family, which logs and schedulers carry.
    chain : int or None
        Most tokens of a chain at the first step; step k takes ``max(1, chain − (k − 1))``. None:
        n_max of the configuration.
    learns : bool
        Proposals depend on earlier requests (`remember`), so that states cannot be enumerated.
    largest_token : int
        The largest token id that it may propose from texts of its own; −1: none.
    """

    name: str
    chain: int | None = None
    learns: bool = False
    largest_token: int = -1
    _last: tuple[Context, int, dict[Any, Sequence[Chain]]] | None = None

    @abstractmethod
    def propose(self, context: Context, path: Sequence[int], length: int) -> Sequence[Chain]:
        """Return the chains proposed after a path, the best first.

        Parameters
        ----------
        context : Context
            Committed tokens, the root last.
        path : sequence of int
            Draft tokens from below the root to the node.
        length : int
            Read only the first ``length`` tokens of the context.

        Returns
        -------
        sequence of Chain
            A step cuts them to its length, and takes at most W distinct children of any node.
        """

    def settings(self) -> dict[str, Any]:
        """Return what decides the proposals besides context and path, as plain data."""
        return {}

    def remember(self, tokens: Sequence[int]) -> None:
        """Take note of a finished answer, if the drafter learns from them."""
        return None

    def check_stateless(self) -> None:
        """Raise `InputError` if what is proposed depends on earlier requests."""
        if self.learns:
            raise InputError(
                f"small.name={self.name}: what it proposes depends on earlier requests, so that "
                "the order of prompts would decide the log; set small.remember_tokens=0 to "
                "collect, and remember when decoding"
            )

    def check_vocabulary(self, target_vocab: int) -> None:
        """Raise `InputError` if its own texts hold tokens that the target does not have."""
        if self.largest_token >= target_vocab:
            raise InputError(
                f"small.name={self.name}: its texts hold token {self.largest_token}, the target "
                f"has {target_vocab}; make them with this target's tokenizer"
            )

    def rule(self) -> str:
        """Return name and settings as text, for logs that must not mix."""
        chain = {} if self.chain is None else {"chain": self.chain}
        settings = {**chain, **self.settings()}
        return f"{self.name} {json.dumps(settings, sort_keys=True)}" if settings else self.name

    def proposals(self, context: Context, paths: IntArray, lengths: IntArray) -> Chains:
        """Return the chains under each of ``paths`` (``[n, deepest]``, padded by −1)."""
        known = self._known(context)
        found = []
        for path, length in zip(paths.tolist(), lengths.tolist(), strict=True):
            tokens = tuple(token for token in path if token >= 0)
            key = (length, tokens)
            if key not in known:
                known[key] = self.propose(context, tokens, length)
            found.append(known[key])
        return Chains.of(found)

    def _known(self, context: Context) -> dict[Any, Sequence[Chain]]:
        # Of one context as long as it does not grow.
        last = self._last
        if (
            last is None
            or last[0] is not context
            or last[1] != len(context)
            or len(last[2]) > MOST_KNOWN
        ):
            last = self._last = (context, len(context), {})
        return last[2]

    def step(
        self,
        tree: DraftTree,
        frontier: IntArray,
        context: Context,
        length: int,
        step: int,
        width: int,
        max_ngram: int,
    ) -> IntArray:
        """Grow a tree in place by the chains proposed for its frontier; return N_{k+1}."""
        paths = chain_kernels.paths_to(tree.node, frontier)
        chains = self.proposals(context, paths, np.full(len(paths), length))
        tree.node, tree.size, best = chain_kernels.hang(
            tree.node,
            tree.size,
            tree.max_depth,
            frontier,
            chains.start,
            chains.tokens,
            chains.log_p,
            chains.match,
            chain_length(self, step, max_ngram),
            step,
            width,
            *fallback(context, length),
        )
        return best

    def steps(
        self,
        trees: tuple[NodeArray, IntArray, IntArray, IntArray, IntArray, IntArray],
        max_depth: IntArray,
        lengths: IntArray,
        context: Context,
        step: int,
        width: int,
        max_ngram: int,
    ) -> Grown:
        """Copy every tree of a level and grow the copy (:class:`treegraft_core.forest.Level`)."""
        paths, of = chain_kernels.frontier_paths(*trees)
        chains = self.proposals(context, paths, lengths[of])
        other = [fallback(context, int(length)) for length in lengths]
        return chain_kernels.hang_all(
            *trees,
            max_depth,
            chains.start,
            chains.tokens,
            chains.log_p,
            chains.match,
            chain_length(self, step, max_ngram),
            step,
            width,
            np.array([token for token, _ in other]),
            np.array([log_p for _, log_p in other]),
        )

    def followers(
        self, context: Context, paths: IntArray, lengths: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return every token that any small step may propose under each path.

        A chain passes through a node if it was proposed under the node or under one above it. A
        mid step reads the mid drafter's log-probability of these tokens only.

        Returns
        -------
        start : int64 array, shape ``[n + 1]``
            Where each path's tokens begin.
        tokens : int64 array
            Distinct for each path.
        """
        prefixes, their, row = chain_kernels.prefixes_of(paths, lengths)
        chains = self.proposals(context, prefixes, their)
        other = np.array([fallback(context, int(length))[0] for length in lengths])
        return chain_kernels.passing(paths, row, chains.start, chains.tokens, other)


def chain_length(small: SmallDrafter, step: int, max_ngram: int) -> int:
    """Return the most tokens of a chain that step ``step`` takes."""
    return max(1, (small.chain or max_ngram) - (step - 1))


def fallback(context: Context, length: int) -> tuple[int, float]:
    """Return what is drafted at k = 1 if nothing is proposed: the most frequent token."""
    token, at = context.most_frequent(length)
    return token, float(context.log_p[at]) if at > 0 else -OUTSIDE_TABLE_PENALTY


class NGramDrafter(SmallDrafter):
    """The paper's small drafter: n-grams of the context, the longest match alone.

    Edge log-probability is the target's own of that token at its matched position. Its loops are
    compiled as a whole (:func:`treegraft_core.kernels.small_step`); `propose` says the same in
    Python, and a test compares the two.
    """

    name = "ngram"

    def propose(self, context: Context, path: Sequence[int], length: int) -> list[Chain]:
        """Return the tokens that followed each occurrence, the most recent first."""
        match, positions = context.matches(path, length)
        tokens, log_p = context.tokens, context.log_p
        chains = []
        for at in positions:
            end = min(at + context.max_ngram, length)
            chains.append(
                Chain(tuple(tokens[at:end].tolist()), tuple(log_p[at:end].tolist()), match)
            )
        return chains

    def step(
        self,
        tree: DraftTree,
        frontier: IntArray,
        context: Context,
        length: int,
        step: int,
        width: int,
        max_ngram: int,
    ) -> IntArray:
        """Grow a tree in place; return N_{k+1}."""
        tree.node, tree.size, best = kernels.small_step(
            tree.node,
            tree.size,
            tree.max_depth,
            frontier,
            *context.index,
            length,
            step,
            width,
            max_ngram,
            -OUTSIDE_TABLE_PENALTY,
        )
        return best

    def steps(
        self,
        trees: tuple[NodeArray, IntArray, IntArray, IntArray, IntArray, IntArray],
        max_depth: IntArray,
        lengths: IntArray,
        context: Context,
        step: int,
        width: int,
        max_ngram: int,
    ) -> Grown:
        """Copy every tree of a level and grow the copy."""
        return kernels.small_steps(
            *trees,
            max_depth,
            lengths,
            *context.index,
            step,
            width,
            max_ngram,
            -OUTSIDE_TABLE_PENALTY,
        )

    def followers(
        self, context: Context, paths: IntArray, lengths: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return the tokens that follow each path's last token anywhere in the context."""
        last, is_root = chain_kernels.last_tokens(paths, context.tokens, lengths)
        return context.followers(last, is_root, lengths)


NGRAM = NGramDrafter()
"""The default."""
