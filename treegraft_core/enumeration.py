"""All 2^D schedules at decoding states, with nothing computed twice: design section 5.

Schedules that share a prefix share its tree, so the schedules are the leaves of a binary trie with
2^D − 1 inner nodes. The mid drafter's distribution at a node depends only on context and path, so
each distinct path is evaluated once for the whole trie; the new paths of all tries at one depth,
and of several states of one text, go through the model in one packed pass over a shared cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from treegraft_core.context import Context
from treegraft_core.drafting import (
    DraftingConfig,
    MidCall,
    accepted_path,
    begin_mid_step,
    expand,
    prune,
    select_frontier,
    small_step,
)
from treegraft_core.models import CachedModel
from treegraft_core.neural import ScoreRows
from treegraft_core.signals import signals
from treegraft_core.student import DraftVocabulary
from treegraft_core.tree import UNLIMITED, BoolArray, DraftTree, FloatArray, IntArray


@dataclass
class Branch:
    """One node of the trie: the tree that a schedule prefix has grown.

    Attributes
    ----------
    tree : DraftTree
        T_{k+1} after the prefix.
    frontier : int64 array
        N_{k+1}.
    bits : tuple of int
        The prefix.
    calls : tuple of (MidCall or None)
        Counts of each step; None for a small step.
    signals : tuple of float64 array
        The ten signals before each step.
    """

    tree: DraftTree
    frontier: IntArray
    bits: tuple[int, ...] = ()
    calls: tuple[MidCall | None, ...] = ()
    signals: tuple[FloatArray, ...] = ()


@dataclass
class Outcome:
    """What one schedule does at one state.

    Attributes
    ----------
    bits : tuple of int
        τ.
    accepted : int
        A.
    ranks : list of int
        Place in the pruning order of each accepted node.
    tree_nodes, kept_nodes : int
        |V(T)| after step D, and nodes sent to verification.
    calls : tuple of (MidCall or None)
        Counts of each step.
    signals : tuple of float64 array
        The ten signals before each step.
    kept : list of (int, ...)
        Token paths of the kept nodes in pruning order; only when asked for.
    """

    bits: tuple[int, ...]
    accepted: int
    ranks: list[int]
    tree_nodes: int
    kept_nodes: int
    calls: tuple[MidCall | None, ...]
    signals: tuple[FloatArray, ...]
    kept: list[tuple[int, ...]] = field(default_factory=list)


class PathTable:
    """The distinct paths of a pack of states, each evaluated once by the mid drafter.

    Parameters
    ----------
    model : CachedModel
        The mid drafter; its cache holds the whole text that the states are positions of.
    rows : ScoreRows
        Where the distributions go.
    roots : sequence of int
        Position of each state's root in the text.
    """

    def __init__(self, model: CachedModel, rows: ScoreRows, roots: Sequence[int]):
        self.model, self.rows, self.roots = model, rows, list(roots)
        self.text = model.length
        self._row: dict[tuple[int, int], int] = {}
        self._state: list[int] = []
        self._depth: list[int] = []
        self._above: BoolArray = np.zeros((64, 64), bool)
        rows.clear()

    @property
    def size(self) -> int:
        """Distinct paths evaluated."""
        return len(self._state)

    def evaluate(self, requests: Sequence[tuple[int, DraftTree, IntArray]]) -> None:
        """Give every requested node its row; one packed pass over the paths not seen before.

        Parameters
        ----------
        requests : sequence of (state, tree, nodes)
            Nodes ascending, so that parents come before their children.
        """
        first = self.size
        new_tokens: list[int] = []
        for state, tree, nodes in requests:
            for node in nodes.tolist():
                token = int(tree.token[node])
                above = int(tree.row[tree.parent[node]]) if node else -1 - state
                row = self._row.get((above, token), -1)
                if row < 0:
                    row = self._add(state, above, token, int(tree.depth[node]))
                    new_tokens.append(token)
                tree.row[node] = row
        if new_tokens:
            self._run(first, new_tokens)

    def _add(self, state: int, above: int, token: int, depth: int) -> int:
        row = self.size
        if row == len(self._above):
            grown = np.zeros((2 * row, 2 * row), bool)
            grown[:row, :row] = self._above
            self._above = grown
        self._row[(above, token)] = row
        self._state.append(state)
        self._depth.append(depth)
        if above >= 0 and depth > 1:
            self._above[row] = self._above[above]
            self._above[row, above] = True
        return row

    def _run(self, first: int, tokens: list[int]) -> None:
        n = len(tokens)
        state = np.array(self._state[first:])
        depth = np.array(self._depth[first:])
        root = np.array(self.roots)[state]
        visible = np.zeros((n, self.text + first + n), bool)
        # A root attends to what precedes it and to itself; the others to the text up to the root.
        end = np.where(depth > 0, root + 1, root)
        visible[:, : self.text] = np.arange(self.text)[None, :] < end[:, None]
        visible[:, self.text :] = self._above[first : first + n, : first + n]
        visible[np.arange(n), self.text + first + np.arange(n)] = True
        self.rows.append(self.model.run(tokens, root + depth, visible))


def enumerate_states(
    model: CachedModel,
    context: Context,
    roots: Sequence[int],
    config: DraftingConfig,
    vocabulary: DraftVocabulary | None,
    target_vocab: int,
    keep_trees: bool = False,
    max_context: int = UNLIMITED,
) -> tuple[list[list[Outcome]], int]:
    """Run all 2^D schedules at several states of one text.

    Parameters
    ----------
    model : CachedModel
        The mid drafter, its cache holding the text up to the last root at least. It is cut back to
        its present length afterwards.
    context : Context
        The text: prompt, the target's own greedy output, and enough of it after every root that
        the deepest draft path has a known continuation.
    roots : sequence of int
        Positions of the states' roots in the text: the last committed tokens.
    config : DraftingConfig
        Widths and budgets.
    vocabulary, target_vocab
        As for :class:`MidDrafter`.
    keep_trees : bool
        Keep the token paths sent to verification.
    max_context : int
        The pair's context: no draft node lies beyond it.

    Returns
    -------
    outcomes : list of list of Outcome
        For each state the 2^D schedules in binary order, 0…0 first.
    paths : int
        Distinct paths that the mid drafter evaluated.
    """
    text = model.length
    table = PathTable(model, ScoreRows(config.width, vocabulary, target_vocab), roots)
    tokens = context.tokens
    level = [
        (
            state,
            Branch(
                DraftTree.from_root(tokens[root], max_context - (root + 1)), np.zeros(1, np.int64)
            ),
        )
        for state, root in enumerate(roots)
    ]
    for step in range(1, config.depth + 1):
        level = _advance(level, table, context, step, config)
    outcomes: list[list[Outcome]] = [[] for _ in roots]
    for state, branch in level:
        continuation = tokens[roots[state] + 1 :]
        outcomes[state].append(_finish(branch, continuation, config, keep_trees))
    for per_state in outcomes:
        per_state.sort(key=lambda outcome: outcome.bits)
    model.keep(text)
    return outcomes, table.size


def _advance(
    level: list[tuple[int, Branch]],
    table: PathTable,
    context: Context,
    step: int,
    config: DraftingConfig,
) -> list[tuple[int, Branch]]:
    small: list[tuple[int, Branch]] = []
    mid: list[tuple[int, Branch]] = []
    calls: list[MidCall] = []
    requests = []
    for state, branch in level:
        seen = (*branch.signals, signals(branch.tree, branch.frontier, config))
        tree = branch.tree.copy()
        grown = small_step(
            tree, branch.frontier, context, step, config, length=table.roots[state] + 1
        )
        small.append(
            (state, Branch(tree, grown.frontier, (*branch.bits, 0), (*branch.calls, None), seen))
        )
        call = MidCall()
        requests.append((state, branch.tree, begin_mid_step(branch.tree, call, False)))
        calls.append(call)
        mid.append(
            (state, Branch(branch.tree, branch.frontier, (*branch.bits, 1), branch.calls, seen))
        )
    table.evaluate(requests)
    picks, requests = [], []
    for (state, branch), call in zip(mid, calls, strict=True):
        picked, missing = select_frontier(branch.tree, branch.frontier, table.rows, call, config)
        picks.append(picked)
        requests.append((state, branch.tree, missing))
    table.evaluate(requests)
    for (_, branch), call, picked in zip(mid, calls, picks, strict=True):
        branch.frontier = expand(branch.tree, picked, table.rows, config)
        branch.calls = (*branch.calls, call)
    return small + mid


def _finish(
    branch: Branch, continuation: Sequence[int], config: DraftingConfig, keep_trees: bool
) -> Outcome:
    tree = branch.tree
    kept = prune(tree, config)
    path, ranks = accepted_path(tree, kept, continuation)
    return Outcome(
        bits=branch.bits,
        accepted=len(path),
        ranks=ranks,
        tree_nodes=len(tree),
        kept_nodes=len(kept),
        calls=branch.calls,
        signals=branch.signals,
        kept=[tuple(tree.path_tokens(int(n))) for n in kept] if keep_trees else [],
    )
