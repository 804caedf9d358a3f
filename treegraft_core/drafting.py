"""The two drafting steps and the pruning: paper section 3, design section 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from treegraft_core.context import OUTSIDE_TABLE_PENALTY, Context
from treegraft_core.errors import InputError
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
    """

    depth: int = 5
    width: int = 10
    verify_nodes: int = 63
    max_ngram: int = 5
    pool: Literal["tree", "frontier"] = "tree"
    graft: Literal["add", "replace"] = "add"
    evaluation: Literal["needed", "all", "auto"] = "auto"

    def __post_init__(self) -> None:
        for name in ("depth", "width", "verify_nodes", "max_ngram"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"drafting.{name}={value}: must be an integer of at least 1")
        allowed = {
            "pool": ("tree", "frontier"),
            "graft": ("add", "replace"),
            "evaluation": ("needed", "all", "auto"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise InputError(
                    f"drafting.{name}={getattr(self, name)}: choose one of {', '.join(values)}"
                )


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
    """

    refresh_nodes: int = 0
    expand_nodes: int = 0
    all_nodes: int = 0
    pool_nodes: int = 0
    earlier_picks: int = 0


@dataclass
class MidStep:
    """What a mid step did: F_k, N_{k+1}, and its counts."""

    picked: IntArray
    frontier: IntArray
    call: MidCall = field(default_factory=MidCall)


def _empty() -> IntArray:
    return np.zeros(0, np.int64)


def small_step(
    tree: DraftTree,
    frontier: IntArray,
    context: Context,
    step: int,
    config: DraftingConfig,
    length: int | None = None,
) -> SmallStep:
    """Grow the tree by the n-gram drafter (τ_k = 0), in place.

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
        Widths and lengths.
    length : int, optional
        Read only the first ``length`` context tokens (collection shares one context).

    Returns
    -------
    SmallStep
        N_{k+1}: the best W first tokens proposed, by (match length, log s).
    """
    chain = max(1, config.max_ngram - (step - 1))
    end = len(context) if length is None else length
    width = config.width
    before = tree.size
    firsts: dict[int, int] = {}
    touched = False
    tokens, values = context.tokens, context.log_p
    index, log_p = tree.index, tree.log_p
    proposed: dict[int, set[int]] = {}
    for node in frontier.tolist():
        n, positions = context.matches(tree.path_tokens(node), length)
        for at in positions:
            parent = node
            room = tree.max_depth - int(tree.depth[node])
            for j in range(at, min(at + min(chain, room), end)):
                token, value = tokens[j], values[j]
                children = proposed.setdefault(parent, set())
                if token not in children:
                    if len(children) == width:
                        break
                    children.add(token)
                child = index.get((parent, token), -1)
                if child < 0:
                    child = tree.add(parent, token, value)
                    log_p = tree.log_p
                elif value > log_p[child]:
                    log_p[child] = value
                    touched = True
                if j == at:
                    firsts[child] = max(n, firsts.get(child, 0))
                parent = child
    if not firsts and step == 1 and tree.max_depth > 0:
        token, at = context.most_frequent(length)
        value = values[at] if at > 0 else -OUTSIDE_TABLE_PENALTY
        child = tree.child(0, token)
        firsts[child if child >= 0 else tree.add(0, token, value)] = 0
    if touched:
        tree.update_scores()
    nodes = np.fromiter(firsts, np.int64, len(firsts))
    lengths = np.fromiter(firsts.values(), np.int64, len(firsts))
    order = np.lexsort((nodes, tree.depth[nodes], -tree.log_s[nodes], -lengths))
    return SmallStep(nodes[order[:width]], tree.size - before)


def mid_pool(tree: DraftTree, frontier: IntArray, config: DraftingConfig) -> IntArray:
    """Return C_k: living nodes that the mid drafter has not expanded and that may have children."""
    nodes = tree.nodes() if config.pool == "tree" else frontier
    return nodes[~tree.expanded[nodes] & (tree.depth[nodes] < tree.max_depth)]


def begin_mid_step(tree: DraftTree, call: MidCall, everything: bool) -> IntArray:
    """Return the nodes that the mid drafter evaluates before the refresh, and count them.

    Those are the unevaluated parents of nodes that it has not scored, or with ``everything`` all
    nodes that it has not evaluated.
    """
    nodes = tree.nodes()
    parents = np.unique(tree.parent[nodes[np.isnan(tree.mid_log_p[nodes])]])
    needed = parents[~tree.seen[parents]]
    unseen = nodes[~tree.seen_all[nodes]]
    tree.seen[needed] = True
    tree.seen_all[unseen] = True
    call.refresh_nodes, call.all_nodes = len(needed), len(unseen)
    return unseen if everything else needed


def select_frontier(
    tree: DraftTree,
    frontier: IntArray,
    scores: MidScores,
    call: MidCall,
    config: DraftingConfig,
) -> tuple[IntArray, IntArray]:
    """Refresh all scores, then pick F_k: the best W of C_k.

    Returns
    -------
    picked : int64 array
        F_k.
    missing : int64 array
        Those of F_k that the mid drafter has yet to evaluate when it evaluates only needed nodes.
    """
    refresh(tree, scores)
    pool = mid_pool(tree, frontier, config)
    picked = tree.best(pool, config.width)
    missing = np.sort(picked[~tree.seen[picked]])
    tree.seen[missing] = True
    call.expand_nodes, call.pool_nodes = len(missing), len(pool)
    call.earlier_picks = earlier_picks(tree, picked, frontier)
    return picked, missing


def refresh(tree: DraftTree, scores: MidScores) -> None:
    """Replace every node's log p by the mid drafter's and recompute log s, in place.

    The mid drafter must have evaluated the parents of all nodes that it has not scored.
    """
    nodes = tree.nodes()
    unscored = nodes[np.isnan(tree.mid_log_p[nodes])]
    if len(unscored):
        tree.mid_log_p[unscored] = scores.log_p(tree, tree.parent[unscored], tree.token[unscored])
    tree.log_p[nodes] = tree.mid_log_p[nodes]
    tree.update_scores()


def expand(
    tree: DraftTree, picked: IntArray, scores: MidScores, config: DraftingConfig
) -> IntArray:
    """Graft the mid drafter's top W tokens under each node of F_k and return N_{k+1}, in place.

    A token that is already a child keeps its subtree and takes the new score; with
    ``graft="replace"`` the old subtree goes first.
    """
    children: list[int] = []
    if len(picked):
        tokens, log_p = scores.top(tree, picked)
        order = np.argsort(picked) if config.graft == "replace" else np.arange(len(picked))
        for row in order.tolist():
            node = int(picked[row])
            if not tree.alive[node]:
                continue
            if config.graft == "replace":
                tree.remove_below(node)
            tree.expanded[node] = True
            for token, value in zip(tokens[row].tolist(), log_p[row].tolist(), strict=True):
                child = tree.child(node, token)
                if child < 0:
                    child = tree.add(node, token, value)
                    tree.mid_log_p[child] = value
                children.append(child)
    nodes = np.array(children, np.int64)
    return tree.best(nodes[tree.alive[nodes]], config.width)


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
    return tree.best(tree.nodes()[1:], config.verify_nodes)


def accepted_path(
    tree: DraftTree, kept: IntArray, continuation: Sequence[int]
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
    rank = {int(node): place for place, node in enumerate(kept)}
    node, path, ranks = 0, [], []
    for token in continuation:
        node = tree.child(node, token)
        if node not in rank:
            break
        path.append(node)
        ranks.append(rank[node])
    return path, ranks


def earlier_picks(tree: DraftTree, picked: IntArray, frontier: IntArray) -> int:
    """Count picks of F_k at an earlier depth than every node of N_k."""
    if not len(frontier):
        return len(picked)
    return int((tree.depth[picked] < tree.depth[frontier].min()).sum())
