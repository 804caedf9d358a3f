"""What drafting costs besides the models' passes: pieces in µs, and whole rounds.

The pieces run on stored rows and logits. A whole round's bookkeeping is its time less the time
within the two models' ``forward``, so it holds everything: masks, caches, transfers, Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from benchmarks.shapes import flat_profile, random_text
from benchmarks.timing import Measured, cell, seconds, synchronize
from pipeline.engine import drafting_config, open_pair
from pipeline.profile import random_artifact
from pipeline.rows import bits_text
from treegraft_core import (
    AS_DEFINED,
    Context,
    DistilledScheduler,
    DraftingConfig,
    DraftTree,
    FixedSchedule,
    Pair,
    Scheduler,
    StepState,
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
from treegraft_core.models import CachedModel
from treegraft_core.neural import ScoreRows
from treegraft_core.packed import head_size
from treegraft_core.signals import signals
from treegraft_core.tree import FloatArray, IntArray
from treegraft_core.verify import verification_pass, verify

PAPER_US = {"small step": 920.0, "scheduler decision": 318.0}
NODES, CONTEXTS = (64, 511), (256, 2048)
SAMPLES = 40
"""Samples of a piece for each of ``repeats``."""
REDRAFTED = 0.3
"""Share of nodes that the mid drafter has not scored yet when a mid step begins."""


def stored_tree(
    rng: np.random.Generator, nodes: int, depth: int, context: Context, vocab: int
) -> DraftTree:
    """Return a tree of ``nodes`` nodes, half of whose tokens continue an n-gram of the context."""
    tree = DraftTree.from_root(int(context.tokens[-1]))
    while tree.size < nodes:
        parent = int(rng.integers(tree.size))
        _, found = context.followers(tree.token[[parent]].astype(np.int64), np.zeros(1, bool))
        known = len(found) and rng.random() < 0.5
        token = int(rng.choice(found) if known else rng.integers(vocab))
        if tree.depth[parent] < depth and tree.child(parent, token) < 0:
            tree.add(parent, token, -float(rng.exponential()))
    scored = rng.random(tree.size) > REDRAFTED
    scored[0] = True
    tree.node["mid_log_p"][: tree.size] = np.where(scored, tree.log_p[: tree.size], np.nan)
    return tree


def stored_rows(tree: DraftTree, rows: ScoreRows, columns: int, device: torch.device) -> None:
    """Give every node a row of random logits that holds its children's tokens."""
    nodes, part = tree.nodes(), tree.node[: tree.size]
    children = [part["token"][part["parent"] == node] for node in nodes]
    start = np.concatenate([[0], np.cumsum([len(c) for c in children])])
    found = np.concatenate(children).astype(np.int64)
    logits = 4 * torch.randn(len(nodes), columns, device=device)
    tree.node["row"][nodes] = rows.append(logits, start, found)


class StoredTarget(CachedModel):
    """A target whose passes return stored logits at once and whose cache selects nothing."""

    def __init__(self, model: Any, logits: torch.Tensor):
        super().__init__(model)
        self.logits = logits

    def run(self, tokens: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Return the logits of the first ``len(tokens)`` rows."""
        return self.logits[: len(tokens)]

    def keep(self, *_: Any) -> None:
        """Do nothing: cache selection is timed by itself."""


def stored_target(pair: Pair, tree: DraftTree, kept: IntArray) -> StoredTarget:
    """Return a target that accepts the first three nodes of the deepest kept path."""
    order, _ = verification_pass(tree, kept, 0)
    logits = torch.randn(len(order), pair.target_vocab, device=pair.device)
    place = {int(node): i for i, node in enumerate(order)}
    deepest = max(kept.tolist(), key=lambda node: int(tree.depth[node]))
    for node in tree.path(deepest)[:3]:
        logits[place[int(tree.parent[node])], int(tree.token[node])] = 30.0
    return StoredTarget(pair.target, logits)


def stored_cache(pair: Pair, places: int) -> CachedModel:
    """Return a target's cache with ``places`` places in use, whatever they hold."""
    cache = CachedModel(pair.target)
    cache.run([1, 2], [0, 1])
    cache._reserve(places + 1)
    cache.positions = np.arange(places)
    return cache


UNCHANGING = ("signals", "scheduler decision", "prune", "verification mask and positions")
IN_A_ROW = 10


class Pieces:
    """One tree on one context, and a call for each piece of bookkeeping."""

    def __init__(self, pair: Pair, config: DraftingConfig, nodes: int, length: int):
        rng = np.random.default_rng(nodes)
        vocab, columns = pair.target_vocab, head_size(pair.mid)
        tokens, log_p = random_text(length, min(vocab, 8192), seed=1)
        self.config, self.context = config, Context(tokens, log_p, config.max_ngram)
        self.tree = stored_tree(rng, nodes, config.depth, self.context, vocab)
        self.rows, self.new_rows = (
            ScoreRows(config.width, pair.vocabulary, vocab) for _ in range(2)
        )
        stored_rows(self.tree, self.rows, columns, pair.device)
        self.frontier = np.arange(max(1, nodes - config.width), nodes)
        self.kept = prune(self.tree, config)
        self.logits = 4 * torch.randn(config.width, columns, device=pair.device)
        self.last = rng.choice(self.context.tokens, size=config.width)
        self.target = stored_target(pair, self.tree, self.kept)
        self.cache = stored_cache(pair, length + len(self.kept))
        self.places = self.cache.positions
        self.scheduler = DistilledScheduler(random_artifact(config.depth))
        values = signals(self.tree, self.frontier, config)
        bits = (1, 0, 1, 0, 1)[: min(2, config.depth - 1)]
        self.state = StepState(len(bits) + 1, bits, config.depth, 50, 80.0, 8.0, values)

    def calls(self) -> dict[str, Callable[[DraftTree], object]]:
        """Return the pieces by name; each takes a tree that it may grow."""
        config = self.config
        return {
            "small step": lambda t: small_step(t, self.frontier, self.context, 2, config),
            "mid step without its passes": self._mid_step,
            f"distribution rows, {config.width} nodes": self._append,
            "signals": lambda t: signals(t, self.frontier, config),
            "scheduler decision": lambda _: self.scheduler.decide(self.state),
            "prune": lambda t: prune(t, config),
            "verification mask and positions": self._mask,
            "acceptance": lambda t: verify(self.target, t, self.kept, self.context.tokens),
            "cache selection, 3 accepted": self._keep,
        }

    def _mid_step(self, tree: DraftTree) -> None:
        call = MidCall()
        begin_mid_step(tree, call, False)
        picked, _ = select_frontier(tree, self.frontier, self.rows, call, self.config)
        expand(tree, picked, self.rows, self.config)

    def _append(self, _: DraftTree) -> None:
        self.new_rows.clear()
        inner = np.zeros(len(self.last), bool)
        self.new_rows.append(self.logits, *self.context.followers(self.last, inner))

    def _mask(self, tree: DraftTree) -> None:
        length = len(self.context)
        order, visible = verification_pass(tree, self.kept, length - 1)
        keys = np.concatenate([self.places[: length - 1], length - 1 + tree.depth[order]])
        self.cache._mask(visible, keys)

    def _keep(self, _: DraftTree) -> None:
        length, most = len(self.context), len(self.places)
        self.cache.keep(length, [(length + most) // 2, most - 2, most - 1])

    def time(self, samples: int) -> dict[str, FloatArray]:
        """Time the pieces in turn, each on a copy of the tree made outside the time; µs.

        Pieces that leave the tree as it is are called several times in a row.
        """
        calls = self.calls()
        found: dict[str, list[float]] = {name: [] for name in calls}
        for sample in range(-3, samples):
            for name, call in calls.items():
                tree, self.cache.positions = self.tree.copy(), self.places
                times = IN_A_ROW if name in UNCHANGING else 1
                us = 1e6 * seconds(lambda: [call(tree) for _ in range(times)]) / times  # noqa: B023
                if sample >= 0:
                    found[name].append(us)
        return {name: np.array(values) for name, values in found.items()}


def measure_pieces(
    pair: Pair,
    config: DraftingConfig,
    samples: int,
    nodes: Sequence[int],
    contexts: Sequence[int],
) -> list[dict[str, Any]]:
    """Time all pieces at every tree size and context; one line a piece."""
    lines: dict[str, dict[str, Any]] = {}
    for length in contexts:
        for size in nodes:
            for name, us in Pieces(pair, config, size, length).time(samples).items():
                line = lines.setdefault(name, {"µs": name})
                line[f"{size} nodes, context {length}"] = cell(us)
    for name, line in lines.items():
        line["paper"] = PAPER_US.get(name, "")
    return list(lines.values())


class Decided:
    """A fixed schedule whose every step a scheduler decides first, to have its time in rounds."""

    reads_signals = True

    def __init__(self, bits: Sequence[int]):
        self.fixed = FixedSchedule(bits)
        self.scheduler = DistilledScheduler(random_artifact(len(bits)))

    def decide(self, state: StepState) -> int:
        """Decide, and return the fixed bit."""
        self.scheduler.decide(state)
        return self.fixed.decide(state)


class ForwardClock:
    """Sums the time within the ``forward`` of models."""

    def __init__(self) -> None:
        self.s = self._started = 0.0

    @contextmanager
    def watching(self, *models: Any) -> Iterator[None]:
        """Count while the block runs."""
        handles = [m.register_forward_pre_hook(self._enter) for m in models]
        handles += [m.register_forward_hook(self._leave) for m in models]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, *_: Any) -> None:
        synchronize()
        self._started = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        synchronize()
        self.s += time.perf_counter() - self._started


def schedules(depth: int) -> dict[str, Scheduler]:
    """Return the schedules whose rounds are timed."""
    alternating = [1 - k % 2 for k in range(depth)]
    name = bits_text(alternating)
    return {
        "All Small": FixedSchedule([0] * depth),
        "All Mid": FixedSchedule([1] * depth),
        name: FixedSchedule(alternating),
        f"{name}, each step decided by a scheduler": Decided(alternating),
    }


def measure_rounds(
    pair: Pair, config: DraftingConfig, length: int, repeats: int
) -> list[dict[str, Any]]:
    """Time rounds and plain steps alternately; return the rounds' bookkeeping, a line each."""
    tokens, log_p = random_text(length, min(pair.target_vocab, 8192))
    decoders = {
        name: TreeGraftDecoder(pair, scheduler, config, flat_profile(), runtime=AS_DEFINED)
        for name, scheduler in schedules(config.depth).items()
    }
    plain = CachedModel(pair.target)
    plain.run(tokens[:-1], np.arange(length - 1), rows=np.zeros(0, np.int64))
    for decoder in decoders.values():
        decoder.resume(tokens)
    clock, plain_s = ForwardClock(), []
    samples: dict[str, list[float]] = {name: [] for name in decoders}
    with clock.watching(pair.target, pair.mid):
        for repeat in range(-1, repeats):
            plain.keep(length - 1)
            step_s = seconds(lambda: plain.run(tokens[-1:], [length - 1]).argmax().item())
            plain_s += [step_s] * (repeat >= 0)
            for name, decoder in decoders.items():
                decoder.rewind(length - 1)
                context = Context(tokens, log_p, config.max_ngram)
                clock.s = 0.0
                round_s = seconds(partial(decoder.round, context, length))
                samples[name] += [round_s - clock.s] * (repeat >= 0)
    step = np.array(plain_s)
    return [
        {
            f"round at context {length}": name,
            "bookkeeping µs": cell(1e6 * np.array(values)),
            "% of a plain step": cell(100 * np.array(values) / step),
            "plain step ms": cell(1e3 * step),
        }
        for name, values in samples.items()
    ]


def measure(
    pair: Pair,
    config: DraftingConfig,
    repeats: int,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] = CONTEXTS,
) -> Measured:
    """Measure pieces and rounds."""
    pieces = measure_pieces(pair, config, SAMPLES * repeats, nodes, contexts)
    rounds = measure_rounds(pair, config, contexts[0], 4 * repeats)
    frontier = f"frontier {config.width}, median (quartiles) of {SAMPLES * repeats}"
    return Measured(
        values={"pieces_us": pieces, "rounds": rounds},
        tables={
            f"drafting without the models, µs; {frontier}": pieces,
            f"bookkeeping of a round, D = {config.depth}": rounds,
        },
        notes=["bookkeeping of a round: all its time outside the two models' forward"],
    )


def run(conf: DictConfig, states: int | None, repeats: int) -> Measured:
    """Measure the configured pair."""
    return measure(open_pair(conf), drafting_config(conf), repeats)
