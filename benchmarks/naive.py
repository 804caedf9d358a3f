"""The 2^D schedules of a state without sharing: what collection costs with the runtime alone.

Both ways return the same records as :func:`treegraft_core.enumeration.enumerate_states`, or there
is a defect; `first_difference` says where.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.check import SCORE_TOLERANCE, SCORES
from pipeline.evaluate import schedule_bits
from pipeline.texts import Text
from treegraft_core import (
    AS_DEFINED,
    SIGNALS,
    Context,
    DraftingConfig,
    DraftTree,
    FixedSchedule,
    Pair,
    TreeGraftDecoder,
)
from treegraft_core.drafting import (
    MidCall,
    begin_mid_step,
    expand,
    prune,
    select_frontier,
    small_step,
)
from treegraft_core.enumeration import Outcome
from treegraft_core.models import CachedModel
from treegraft_core.neural import ScoreRows
from treegraft_core.signals import signals
from treegraft_core.tree import IntArray
from treegraft_core.verify import verification_pass, verify


def all_schedules(depth: int) -> list[tuple[int, ...]]:
    """Return the 2^D schedules in binary order."""
    return [schedule_bits(number, depth) for number in range(1 << depth)]


def context_at(text: Text, root: int, config: DraftingConfig) -> Context:
    """Return the committed tokens of the state whose root is at ``root``."""
    return Context(text.tokens[: root + 1], text.log_p[: root + 1], config.max_ngram)


class WholeTree:
    """As the paper's runtime: each schedule on its own, the tree read again at every mid call.

    The context's keys and values are kept in both models. A mid call reads the root and all nodes
    of the tree in one pass, gathers one distribution a node in one transfer, and drops the tree's
    keys and values. The target reads the pruned tree of each schedule.
    """

    def __init__(self, pair: Pair, config: DraftingConfig, keep_trees: bool = False):
        self.config, self.keep_trees = config, keep_trees
        self.max_context = pair.max_context
        self.target, self.mid = CachedModel(pair.target), CachedModel(pair.mid)
        self.rows = ScoreRows(config.width, pair.vocabulary, pair.target_vocab)

    def outcomes(
        self, text: Text, root: int, schedules: Iterable[Sequence[int]] | None = None
    ) -> list[Outcome]:
        """Run the schedules (default: all) at one state; the context is read once."""
        for model in (self.target, self.mid):
            model.reset()
            model.run(text.tokens[:root], np.arange(root), rows=np.zeros(0, np.int64))
        context = context_at(text, root, self.config)
        chosen = all_schedules(self.config.depth) if schedules is None else schedules
        return [self._round(tuple(bits), context) for bits in chosen]

    def _round(self, bits: tuple[int, ...], context: Context) -> Outcome:
        config = self.config
        tree = DraftTree.from_root(int(context.tokens[-1]), self.max_context - len(context))
        frontier = np.zeros(1, np.int64)
        calls: list[MidCall | None] = []
        states = []
        for step, bit in enumerate(bits, 1):
            states.append(signals(tree, frontier, config))
            if bit:
                frontier, call = self._mid_step(tree, frontier, context)
                calls.append(call)
            else:
                frontier = small_step(tree, frontier, context, step, config).frontier
                calls.append(None)
        kept = prune(tree, config)
        verdict = verify(self.target, tree, kept, context.tokens)
        self.target.keep(len(context) - 1)
        paths = [tuple(tree.path_tokens(int(i))) for i in kept] if self.keep_trees else []
        return Outcome(
            bits,
            len(verdict.path),
            verdict.ranks,
            len(tree),
            len(kept),
            tuple(calls),
            tuple(states),
            paths,
        )

    def _mid_step(
        self, tree: DraftTree, frontier: IntArray, context: Context
    ) -> tuple[IntArray, MidCall]:
        call = MidCall()
        begin_mid_step(tree, call, everything=True)  # for its counts
        length = self.mid.length
        order, visible = verification_pass(tree, tree.nodes()[1:], length)
        tokens = tree.token[order].astype(np.int64)
        logits = self.mid.run(tokens, length + tree.depth[order], visible)
        self.rows.clear()
        tree.node["row"][order] = self.rows.append(logits, *context.followers(tokens, order == 0))
        self.mid.keep(length)
        picked, _ = select_frontier(tree, frontier, self.rows, call, self.config)
        return expand(tree, picked, self.rows, self.config), call


class CachedTree:
    """Each schedule alone in our decoder, which keeps the tree's keys and values in a round."""

    def __init__(self, pair: Pair, config: DraftingConfig, keep_trees: bool = False):
        self.config = replace(config, evaluation="needed")
        self.decoder = TreeGraftDecoder(
            pair,
            FixedSchedule([0] * config.depth),
            self.config,
            keep_trees=keep_trees,
            log_signals=True,
            runtime=AS_DEFINED,
        )

    def outcomes(
        self, text: Text, root: int, schedules: Iterable[Sequence[int]] | None = None
    ) -> list[Outcome]:
        """Run the schedules (default: all) at one state; the context is read once."""
        self.decoder.resume(text.tokens[: root + 1])
        chosen = all_schedules(self.config.depth) if schedules is None else schedules
        return [self._round(tuple(bits), text, root) for bits in chosen]

    def _round(self, bits: tuple[int, ...], text: Text, root: int) -> Outcome:
        self.decoder.scheduler = FixedSchedule(bits)
        self.decoder.rewind(root)
        context = context_at(text, root, self.config)
        done, _ = self.decoder.round(context, text.prompt_tokens)
        calls = iter(done.calls)
        return Outcome(
            bits,
            done.accepted,
            done.ranks,
            done.tree_nodes,
            done.kept_nodes,
            tuple(next(calls) if bit else None for bit in bits),
            tuple(done.signals),
            done.kept,
        )


def first_difference(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> str | None:
    """Return the first field in which two ways disagree, or None.

    Mean scores may differ by `SCORE_TOLERANCE`, everything else not at all. Kept paths are
    compared where both have them.
    """
    for a, b in zip(ours, theirs, strict=True):
        where = f"schedule {''.join(map(str, a.bits))}"
        for name in ("bits", "accepted", "ranks", "tree_nodes", "kept_nodes", "calls"):
            if getattr(a, name) != getattr(b, name):
                return f"{where}: {name} is {getattr(a, name)} and {getattr(b, name)}"
        difference = signal_difference(np.array(a.signals), np.array(b.signals))
        if difference:
            return f"{where}: {difference}"
        if a.kept and b.kept and a.kept != b.kept:
            at = next(i for i, (x, y) in enumerate(zip(a.kept, b.kept, strict=True)) if x != y)
            return f"{where}: kept node {at} is {a.kept[at]} and {b.kept[at]}"
    return None


def signal_difference(a: Any, b: Any) -> str | None:
    """Return the first signal (arrays ``[D, 10]``) that differs, or None."""
    allowed = np.zeros(len(SIGNALS))
    allowed[SCORES] = SCORE_TOLERANCE
    wrong = np.argwhere(np.abs(a - b) > allowed)
    if not len(wrong):
        return None
    step, i = wrong[0]
    return f"step {step + 1}: {SIGNALS[i]} is {a[step, i]:.7g} and {b[step, i]:.7g}"
