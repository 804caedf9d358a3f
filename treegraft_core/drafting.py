"""The two drafting steps and the pruning: paper section 3, design section 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from treegraft_core import kernels
from treegraft_core.context import Context
from treegraft_core.errors import InputError
from treegraft_core.small import NGRAM, SmallDrafter, chain_length
from treegraft_core.tree import DraftTree, FloatArray, IntArray


@dataclass(frozen=True)
class DraftingConfig:
    """What a round of drafting may do.

    Attributes
    ----------
    depth : int
        D, drafting steps in a round.
    width : int
        W, frontier width and children per expanded node.
    verify_nodes : int
        B_ver, non-root nodes sent to verification.
    max_ngram : int
        n_max, longest n-gram matched.
    pool : {"tree", "frontier"}
        Where a mid step picks: the whole tree, or only N_k (ablation ``w/o EG``).
    graft : {"add", "replace"}
        How it grafts: beside what hangs there, or replacing it (ablation ``w/o ND``).
    evaluation : {"needed", "all", "auto"}
        Which unseen nodes a mid call evaluates: parents to refresh, then the frontier (two small
        passes), or every unseen node in one pass. Both give the same tree. ``auto`` takes the one
        that the latency profile says is cheaper.
    structure : {"tree", "sequence"}
        What both drafters work on: one tree, or one sequence that the mid drafter verifies and
        overwrites (ablation CSD, :mod:`treegraft_core.sequence`).
    expansion : tuple of int, "auto" or None
        A tree of fixed shape, as in SpecInfer (arXiv 2305.09781): step k expands every node of N_k
        by its ``expansion[k - 1]`` likeliest tokens, and all nodes are verified. ``auto`` raises
        the numbers by turns, first step first, while the tree fits in B_ver. Needs
        ``pool="frontier"``. None: the best W nodes by W tokens.
    small : SmallDrafter
        What proposes in a small step (default: n-grams of the context).
    """

    depth: int = 5
    width: int = 10
    verify_nodes: int = 63
    max_ngram: int = 5
    pool: Literal["tree", "frontier"] = "tree"
    graft: Literal["add", "replace"] = "add"
    evaluation: Literal["needed", "all", "auto"] = "auto"
    structure: Literal["tree", "sequence"] = "tree"
    expansion: tuple[int, ...] | Literal["auto"] | None = None
    small: SmallDrafter = NGRAM

    def __post_init__(self) -> None:
        for name in ("depth", "width", "verify_nodes", "max_ngram"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"drafting.{name}={value}: must be an integer of at least 1")
        allowed = {
            "pool": ("tree", "frontier"),
            "graft": ("add", "replace"),
            "evaluation": ("needed", "all", "auto"),
            "structure": ("tree", "sequence"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise InputError(
                    f"drafting.{name}={getattr(self, name)}: choose one of {', '.join(values)}"
                )
        if not isinstance(self.small, SmallDrafter):
            raise InputError(
                f"drafting.small={self.small!r}: must be a treegraft_core.SmallDrafter"
            )
        if self.expansion is not None:
            object.__setattr__(self, "expansion", self._fixed_shape())

    def _fixed_shape(self) -> tuple[int, ...]:
        if self.pool != "frontier" or self.structure != "tree":
            raise InputError(
                f"drafting.expansion={self.expansion}: needs drafting.pool=frontier and "
                "drafting.structure=tree"
            )
        if self.expansion == "auto":
            if self.depth > self.verify_nodes:
                raise InputError(
                    f"drafting.expansion=auto: a chain of drafting.depth={self.depth} nodes is "
                    f"more than drafting.verify_nodes={self.verify_nodes}; lower the depth"
                )
            return _widest_shape(self.depth, self.width, self.verify_nodes)
        given: Any = self.expansion
        shape = tuple(given) if isinstance(given, Sequence) else ()
        if len(shape) != self.depth or any(
            isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.width for k in shape
        ):
            raise InputError(
                f"drafting.expansion={self.expansion}: give auto, or drafting.depth={self.depth} "
                f"whole numbers from 1 to drafting.width={self.width}"
            )
        if nodes_of_shape(shape) > self.verify_nodes:
            raise InputError(
                f"drafting.expansion={self.expansion}: has {nodes_of_shape(shape)} nodes, more "
                f"than drafting.verify_nodes={self.verify_nodes}; give a smaller one or auto"
            )
        return shape

    @property
    def deepest(self) -> int:
        """Greatest depth that a draft path can have.

        A small step hangs a chain under a frontier node and its first token is the new frontier; a
        mid step may expand the end of a chain, and go on from there. In one sequence each step goes
        on from its end.
        """
        if self.structure == "sequence":
            return sum(self.chain_length(step) for step in range(1, self.depth + 1))
        reached = {(0, 0)}  # depth of the deepest frontier node and of the deepest node
        for step in range(1, self.depth + 1):
            chain = self.chain_length(step)
            small = {(front + 1, max(most, front + chain)) for front, most in reached}
            if self.pool == "tree":
                mid = {(most + 1, most + 1) for _, most in reached}
            else:
                mid = {(front + 1, max(most, front + 1)) for front, most in reached}
            reached = small | mid
        return max(most for _, most in reached)

    def chain_length(self, step: int) -> int:
        """Most tokens of a chain that a small step proposes."""
        return chain_length(self.small, step, self.max_ngram)


def nodes_of_shape(shape: Sequence[int]) -> int:
    """Return the non-root nodes of a tree whose step k expands all of its last layer by k_k."""
    return int(np.cumprod(shape, dtype=np.float64).sum())


def _widest_shape(depth: int, width: int, most: int) -> tuple[int, ...]:
    shape = [1] * depth
    raised = True
    while raised:
        raised = False
        for k in range(depth):
            wider = [*shape[:k], shape[k] + 1, *shape[k + 1 :]]
            if wider[k] <= width and nodes_of_shape(wider) <= most:
                shape, raised = wider, True
    return tuple(shape)


class MidScores(Protocol):
    """The mid drafter's distributions at nodes that it has evaluated."""

    def log_p(self, tree: DraftTree, parents: IntArray, tokens: IntArray) -> FloatArray:
        """Return log p(token | context, path to parent) for each pair, nats, shape ``[n]``."""
        ...

    def top(self, tree: DraftTree, nodes: IntArray) -> tuple[IntArray, FloatArray]:
        """Return the W likeliest tokens at each node, best first: two arrays ``[n, W]``."""
        ...


@dataclass
class SmallStep:
    """What a small step did: N_{k+1} and the number of nodes it added."""

    frontier: IntArray
    added: int = 0


@dataclass
class MidCall:
    """Counts of one mid call, from which its time follows on any hardware.

    Attributes
    ----------
    refresh_nodes, expand_nodes : int
        Nodes evaluated by the first and second pass when only the needed nodes are evaluated.
    all_nodes : int
        Nodes evaluated when one pass evaluates every unseen node.
    pool_nodes : int
        |C_k|.
    earlier_picks : int
        Picks of F_k at an earlier depth than every node of N_k.
    refresh_levels, all_levels : int
        Nodes of the longest path downwards among ``refresh_nodes`` and among ``all_nodes``: the
        passes, one after the other, of a drafter whose input is its own output at the parent.
        The parents of ``expand_nodes`` are evaluated before, so that they are one level.
    """

    refresh_nodes: int = 0
    expand_nodes: int = 0
    all_nodes: int = 0
    pool_nodes: int = 0
    earlier_picks: int = 0
    refresh_levels: int = 0
    all_levels: int = 0


def small_step(
    tree: DraftTree,
    frontier: IntArray,
    context: Context,
    step: int,
    config: DraftingConfig,
    length: int | None = None,
) -> SmallStep:
    """Grow the tree by the small drafter (τ_k = 0), in place.

    Parameters
    ----------
    tree : DraftTree
        T_k; grown in place to T_{k+1}.
    frontier : int64 array
        N_k.
    context : Context
        Committed tokens, of which the root is the last.
    step : int
        k, from 1.
    config : DraftingConfig
        The drafter, widths and lengths.
    length : int, optional
        Read only the first ``length`` context tokens (collection shares one context).

    Returns
    -------
    SmallStep
        N_{k+1}: the best W first tokens proposed, by (match length, log s).
    """
    size = tree.size
    frontier = config.small.step(
        tree,
        frontier,
        context,
        len(context) if length is None else length,
        step,
        config.width,
        config.max_ngram,
    )
    return SmallStep(frontier, tree.size - size)


def mid_pool(tree: DraftTree, frontier: IntArray, config: DraftingConfig) -> IntArray:
    """Return C_k: living nodes that the mid drafter has not expanded and that may have children."""
    return kernels.pool_of(tree.node, tree.size, tree.max_depth, frontier, config.pool == "tree")


def begin_mid_step(tree: DraftTree, call: MidCall, everything: bool) -> IntArray:
    """Return the nodes that the mid drafter evaluates before the refresh, and count them.

    Those are the unevaluated parents of nodes that it has not scored, or with ``everything`` all
    nodes that it has not evaluated.
    """
    needed, unseen = kernels.begin_mid_step(tree.node, tree.size)
    call.refresh_nodes, call.all_nodes = len(needed), len(unseen)
    call.refresh_levels = int(kernels.longest_chain(tree.node, tree.size, needed))
    call.all_levels = int(kernels.longest_chain(tree.node, tree.size, unseen))
    return unseen if everything else needed


def select_frontier(
    tree: DraftTree,
    frontier: IntArray,
    scores: MidScores,
    call: MidCall,
    config: DraftingConfig,
) -> tuple[IntArray, IntArray]:
    """Refresh all scores, then pick F_k: the best W of C_k, all of it for a fixed shape.

    Returns
    -------
    picked : int64 array
        F_k.
    missing : int64 array
        Those of F_k that the mid drafter has yet to evaluate when it evaluates only needed nodes.
    """
    refresh(tree, scores)
    most = config.width if config.expansion is None else config.verify_nodes
    picked, missing, call.pool_nodes, call.earlier_picks = kernels.pick(
        tree.node, tree.size, tree.max_depth, frontier, config.pool == "tree", most
    )
    call.expand_nodes = len(missing)
    return picked, missing


def refresh(tree: DraftTree, scores: MidScores) -> None:
    """Replace every node's log p by the mid drafter's and recompute log s, in place.

    The mid drafter must have evaluated the parents of all nodes that it has not scored.
    """
    unscored = kernels.unscored(tree.node, tree.size)
    values = np.empty(0)
    if len(unscored):
        new = tree.node[unscored]
        values = scores.log_p(tree, new["parent"].astype(np.int64), new["token"].astype(np.int64))
    kernels.refresh(tree.node, tree.size, unscored, values)


def expand(
    tree: DraftTree, picked: IntArray, scores: MidScores, config: DraftingConfig, step: int = 1
) -> IntArray:
    """Graft the mid drafter's top W tokens under each node of F_k and return N_{k+1}, in place.

    A token that is already a child keeps its subtree and takes the new score; with
    ``graft="replace"`` the old subtree goes first. A fixed shape takes its own number of tokens,
    and all of them are N_{k+1}.
    """
    if not len(picked):
        return np.zeros(0, np.int64)
    tokens, log_p = scores.top(tree, picked)
    most = config.width
    if config.expansion is not None:
        each = int(config.expansion[step - 1])
        tokens, log_p = (
            np.ascontiguousarray(tokens[:, :each]),
            np.ascontiguousarray(log_p[:, :each]),
        )
        most = tokens.size
    tree.node, tree.size, removed, frontier = kernels.graft(
        tree.node, tree.size, picked, tokens, log_p, config.graft == "replace", most
    )
    tree.removed += removed
    return frontier


def prune(tree: DraftTree, config: DraftingConfig) -> IntArray:
    """Return the nodes kept for verification, in the order in which pruning keeps them.

    Nodes by log s descending (ties: shallower, then older), each with its missing ancestors while
    the chain fits in B_ver. Since log p ≤ 0 an ancestor never comes after its descendant in that
    order, so the kept nodes are its first B_ver entries; a node's place in the result is the
    smallest budget, minus one, that keeps it.

    Parameters
    ----------
    tree : DraftTree
        The finished tree.
    config : DraftingConfig
        Holds B_ver.
    """
    return kernels.prune(tree.node, tree.size, config.verify_nodes)


def accepted_path(
    tree: DraftTree, kept: IntArray, continuation: Sequence[int] | IntArray
) -> tuple[list[int], list[int]]:
    """Walk the kept tree along the target's known greedy continuation.

    Returns
    -------
    path : list of int
        Accepted nodes; A is its length.
    ranks : list of int
        The place in the pruning order of each accepted node, so that A under a smaller B_ver is
        the number of leading ranks below it.
    """
    known = np.asarray(continuation, np.int64)
    path, ranks = kernels.accepted(tree.node, tree.size, np.asarray(kept, np.int64), known)
    return path.tolist(), ranks.tolist()
