"""All 2^D schedules at decoding states, with nothing computed twice: design section 5.

Schedules that share a prefix share its tree, so the schedules are the leaves of a binary trie with
2^D − 1 inner nodes. The mid drafter's distribution at a node depends only on context and path, so
each distinct path is evaluated once for the whole trie. A pack of states of one text goes through
the D levels together: one pass a level over a shared cache evaluates the frontiers that the mid
steps of this level expand and, for the trees that small steps have just grown, the parents that
the next level's refreshes read.

Results do not depend on the packing, except through the rounding of the model's passes: log p is
rounded to 10⁻⁶ nats, and passes of different shapes differ by about that in float32. Where two
nodes' scores are closer, their order, and with it a frontier's or the pruned tree's last place, may
differ; in float64 it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from treegraft_core import chain_kernels, forest, kernels
from treegraft_core.context import Context
from treegraft_core.drafting import DraftingConfig, MidCall
from treegraft_core.errors import InputError, NonFiniteError
from treegraft_core.forest import Level
from treegraft_core.mid import MidCache
from treegraft_core.models import Visibility, all_finite
from treegraft_core.neural import ScoreRows
from treegraft_core.small import SmallDrafter
from treegraft_core.student import DraftVocabulary
from treegraft_core.tree import UNLIMITED, FloatArray, IntArray

DEFAULT_MEMORY = 4 << 30
"""Bytes that a pack may take beyond the models' weights."""
FIRST_PACK = 8
"""States of the first pack of a text, from which the next ones' size follows."""


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
        Counts of each step; None for a small step.
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


@dataclass
class Enumeration:
    """The outcomes of all N = 2^D schedules at S states, schedules in binary order.

    Attributes
    ----------
    bits : int8 array, shape ``[N, D]``
        The schedules, 0…0 first.
    accepted, tree_nodes, kept_nodes : int64 array, shape ``[S, N]``
        A, |V(T)| after step D, nodes sent to verification.
    ranks : int64 array, shape ``[S, N, reach]``
        Place in the pruning order of each accepted node, −1 after the last.
    counts : int32 array, shape ``[S, N, D, 7]``
        The counts of each step in the order of :class:`MidCall`; zeros for a small step.
    signals : float64 array, shape ``[S, N, D, 10]``
        The ten signals before each step.
    paths, passes : int
        Distinct paths that the mid drafter evaluated, and the passes that it took.
    kept : list of list of list of (int, ...)
        For each state and schedule the token paths of the kept nodes, when asked for.
    """

    bits: np.ndarray
    accepted: IntArray
    tree_nodes: IntArray
    kept_nodes: IntArray
    ranks: IntArray
    counts: np.ndarray
    signals: FloatArray
    paths: int = 0
    passes: int = 0
    kept: list[list[list[tuple[int, ...]]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.accepted)

    def outcomes(self, state: int) -> list[Outcome]:
        """Return one state's outcomes as objects."""
        result = []
        for n, row in enumerate(self.bits.tolist()):
            calls = tuple(
                MidCall(*self.counts[state, n, k].tolist()) if bit else None
                for k, bit in enumerate(row)
            )
            ranks = self.ranks[state, n]
            result.append(
                Outcome(
                    bits=tuple(row),
                    accepted=int(self.accepted[state, n]),
                    ranks=ranks[ranks >= 0].tolist(),
                    tree_nodes=int(self.tree_nodes[state, n]),
                    kept_nodes=int(self.kept_nodes[state, n]),
                    calls=calls,
                    signals=tuple(self.signals[state, n]),
                    kept=self.kept[state][n] if self.kept else [],
                )
            )
        return result


class PackTooLargeError(Exception):
    """A pack needs more memory than the budget."""


class PathTable:
    """The distinct paths of a pack of states, each evaluated once by the mid drafter.

    A drafter whose input is its own output at the token before reads each state's root once more,
    as the runtime does: the target has not read it there, so that its child's input is the
    drafter's output, not the target's.

    Parameters
    ----------
    model : MidCache
        The mid drafter; its cache holds the whole text that the states are positions of.
    rows : ScoreRows
        Where what is needed of the distributions goes; cleared.
    context : Context
        The text.
    roots : int64 array
        Position of each state's root in the text.
    small : SmallDrafter
        Whose proposals a refresh asks the mid drafter about.
    memory : int
        Bytes that the pack may take.
    """

    def __init__(
        self,
        model: MidCache,
        rows: ScoreRows,
        context: Context,
        roots: IntArray,
        small: SmallDrafter,
        memory: int = DEFAULT_MEMORY,
    ):
        self.small = small
        self.model, self.rows, self.context, self.roots = model, rows, context, roots
        self.memory = memory
        self.text = model.length
        self.path = np.zeros(256, kernels.PATH)
        self.size = 0
        self.state_root = np.full(len(roots), -1, np.int64)
        self.passes = 0
        self.fixed = self.peak = model.bytes_of_pass(1)
        rows.clear()

    def evaluate(self, end: int, trees: int) -> None:
        """Evaluate the paths up to ``end``: one pass, or several where one exceeds the budget.

        Parameters
        ----------
        end : int
            Paths so far.
        trees : int
            Bytes that the trees take.

        Raises
        ------
        PackTooLargeError
            If not even one path fits.
        NonFiniteError
            If the drafter's logits are not finite.
        """
        while self.size < end:
            q = self._fitting(end - self.size, trees)
            first = self.size
            tokens, positions, visible, slots = kernels.pass_inputs(
                self.path,
                first,
                first + q,
                self.roots,
                self.text,
                self.state_root,
                self.model.sequential,
            )
            logits = self.model.run(tokens, positions, Visibility(visible, slots))
            if not all_finite(logits):
                raise NonFiniteError(
                    "the mid drafter's logits are not finite in a draft from position "
                    f"{positions.min()} on; try engine.dtype=float32, or repair the model's weights"
                )
            state = self.path["state"][first : first + q]
            paths = chain_kernels.paths_in(self.path, first, first + q)
            start, found = self.small.followers(self.context, paths, self.roots[state] + 1)
            self.rows.append(logits, start, found)
            self.size += q
            self.passes += 1

    def _fitting(self, q: int, trees: int) -> int:
        while True:
            need = trees + self.model.bytes_of_pass(q)
            if need <= self.memory:
                self.peak = max(self.peak, need)
                return q
            if q == 1:
                raise PackTooLargeError
            q = (q + 1) // 2


def enumerate_states(
    model: MidCache,
    context: Context,
    roots: Sequence[int],
    config: DraftingConfig,
    vocabulary: DraftVocabulary | None,
    target_vocab: int,
    keep_trees: bool = False,
    max_context: int = UNLIMITED,
    memory: int = DEFAULT_MEMORY,
    pack: int = 0,
) -> Enumeration:
    """Run all 2^D schedules at the states of one text.

    States are packed as the memory budget allows. A pass that would exceed it is split; a pack
    that does so all the same, or runs out of memory, is halved and tried again.

    Parameters
    ----------
    model : MidCache
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
    memory : int
        Bytes that a pack may take beyond the weights and the text's own cache.
    pack : int
        Most states in a pack; 0: as many as fit.

    Raises
    ------
    InputError
        If one state alone exceeds the budget or the memory, or no trees are grown by schedules.
    NonFiniteError
        If the drafter's logits are not finite.
    ValueError
        If there are no roots.
    """
    if not len(roots):
        raise ValueError("roots: give the position of at least one state's root")
    if config.structure != "tree" or config.expansion is not None:
        raise InputError(
            f"drafting.structure={config.structure}, drafting.expansion={config.expansion}: "
            "schedules are enumerated for structure=tree and expansion=null only"
        )
    config.small.check_stateless()
    config.small.check_vocabulary(target_vocab)
    rows = ScoreRows(config.width, vocabulary, target_vocab)
    text = model.length
    places = np.asarray(roots, np.int64)

    def attempt(first: int, count: int) -> tuple[Enumeration, int, int]:
        part = places[first : first + count]
        table = PathTable(model, rows, context, part, config.small, memory)
        try:
            found = _enumerate(table, config, keep_trees, max_context)
        except BaseException:
            model.keep(text)
            model.shrink()  # or the buffers of a pack that was too large count against the next
            raise
        model.keep(text)
        return found, table.fixed, table.peak

    parts = list(packs(len(places), memory, pack, attempt))
    return join(parts)


def packs(
    states: int,
    memory: int,
    pack: int,
    attempt: Callable[[int, int], tuple[Enumeration, int, int]],
) -> Iterator[Enumeration]:
    """Yield packs of states, as large as the memory budget allows by what the last one took.

    ``attempt(first, count)`` enumerates a pack and returns it with the bytes that it took at most,
    before those that any pack takes.
    """
    most = pack or states
    count, first = min(most, FIRST_PACK), 0
    while first < states:
        count = min(count, states - first)
        try:
            found, fixed, peak = attempt(first, count)
        except (PackTooLargeError, MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if count == 1:
                raise InputError(
                    f"collect.memory_gb={memory / 2**30:g}: one decoding state needs more, or the "
                    "machine has less; raise it, or lower drafting.depth or drafting.width"
                ) from error
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            most = count = count // 2
            continue
        yield found
        first += count
        # What grows with the states may be a third more for the next ones.
        each = 1.3 * max(peak - fixed, 1) / count
        count = max(1, min(most, int((memory - fixed) / each)))


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory, of the budget or the machine, ran out."""
    if isinstance(error, PackTooLargeError | MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text
    )


def join(parts: Sequence[Enumeration]) -> Enumeration:
    """Return the states of several packs as one."""
    if len(parts) == 1:
        return parts[0]

    def stack(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    return Enumeration(
        bits=parts[0].bits,
        accepted=stack("accepted"),
        tree_nodes=stack("tree_nodes"),
        kept_nodes=stack("kept_nodes"),
        ranks=stack("ranks"),
        counts=stack("counts"),
        signals=stack("signals"),
        paths=sum(part.paths for part in parts),
        passes=sum(part.passes for part in parts),
        kept=[state for part in parts for state in part.kept],
    )


def _enumerate(
    table: PathTable, config: DraftingConfig, keep_trees: bool, max_context: int
) -> Enumeration:
    context, roots = table.context, table.roots
    level = forest.first_level(context.tokens[roots], config.depth, config.width)
    max_depth = max_context - (roots + 1)
    for step in range(1, config.depth + 1):
        level = _advance(level, table, max_depth, step, config)
    reach = config.deepest
    kept, accepted, ranks = kernels.finish(
        *level.trees[:4],
        roots,
        context.tokens,
        config.verify_nodes,
        reach,
    )
    # Schedules in binary order within a state.
    code = level.bits.astype(np.int64) @ (1 << np.arange(config.depth)[::-1])
    order = np.lexsort((code, level.state))
    shape = (len(roots), 1 << config.depth)

    def by_state(values: np.ndarray) -> np.ndarray:
        return values[order].reshape(*shape, *values.shape[1:])

    found = Enumeration(
        bits=level.bits[order[: shape[1]]],
        accepted=by_state(accepted),
        tree_nodes=by_state(level.size - level.removed),
        kept_nodes=by_state(kept),
        ranks=by_state(ranks),
        counts=by_state(level.counts),
        signals=by_state(level.signals),
        paths=table.size,
        passes=table.passes,
    )
    if keep_trees:
        trees = [_kept_paths(level.tree(i), config.verify_nodes) for i in order]
        found.kept = [trees[i : i + shape[1]] for i in range(0, len(trees), shape[1])]
    return found


def _kept_paths(node: np.ndarray, verify_nodes: int) -> list[tuple[int, ...]]:
    return [
        tuple(node["token"][kernels.path_of(node, i)].tolist())
        for i in kernels.prune(node, len(node), verify_nodes)
    ]


def _advance(
    level: Level, table: PathTable, max_depth: IntArray, step: int, config: DraftingConfig
) -> Level:
    whole_tree = config.pool == "tree"
    lengths = table.roots + 1
    kernels.read_signals(
        *level.trees,
        max_depth,
        level.removed,
        whole_tree,
        config.width,
        step,
        level.signals,
    )
    small, starts, sizes, frontiers, n_frontiers, used = config.small.steps(
        level.trees, max_depth, lengths, table.context, step, config.width, config.max_ngram
    )
    counts = level.counts.copy()
    picked, n_picked, missing, n_missing, lost = kernels.select_frontiers(
        *level.trees,
        max_depth,
        whole_tree,
        config.width,
        *table.rows.table[2:],
        step,
        counts,
    )
    if lost:
        raise AssertionError(f"step {step}: {lost} nodes without the mid drafter's score")
    table.path, paths = kernels.request(
        level.node,
        level.start,
        level.state,
        missing,
        n_missing,
        table.path,
        table.size,
        table.state_root,
    )
    if step < config.depth:
        table.path, paths = kernels.request_refresh(
            small, starts, sizes, level.state, table.path, paths, table.state_root
        )
    table.evaluate(paths, level.node.nbytes + 2 * small.nbytes)
    node, more_starts, more_sizes, removed, more, n_more, used = kernels.expand(
        level.node,
        level.start,
        level.size,
        level.removed,
        picked,
        n_picked,
        *table.rows.table[:2],
        config.graft == "replace",
        config.width,
        small,
        used,
    )
    bits = level.bits.copy()
    bits[:, step - 1] = 1
    return Level(
        node=node,
        start=np.concatenate([starts, more_starts]),
        size=np.concatenate([sizes, more_sizes]),
        removed=np.concatenate([level.removed, removed]),
        state=np.concatenate([level.state, level.state]),
        frontier=np.concatenate([frontiers, more]),
        n_frontier=np.concatenate([n_frontiers, n_more]),
        bits=np.concatenate([level.bits, bits]),
        signals=np.concatenate([level.signals, level.signals]),
        counts=np.concatenate([level.counts, counts]),
    )
