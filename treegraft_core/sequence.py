"""CSD, the ablation without a tree: one drafted sequence, verified and overwritten.

The small drafter writes on at the end of the sequence; the mid drafter reads it, and where it would
have written another token than stands there, it puts its own in place and drops what followed (a
hierarchy of whole sequences, as in cascade speculative drafting, arXiv 2312.11462). The sequence is
kept as a `DraftTree` in which no node has two living children.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from treegraft_core.context import Context
from treegraft_core.drafting import DraftingConfig, MidCall
from treegraft_core.small import fallback
from treegraft_core.tree import DraftTree, FloatArray, IntArray


class Likeliest(Protocol):
    """The mid drafter's likeliest tokens at nodes that it has evaluated."""

    def top(self, tree: DraftTree, nodes: IntArray) -> tuple[IntArray, FloatArray]:
        """Return the W likeliest tokens at each node, best first: two arrays ``[n, W]``."""
        ...


def write_on(
    tree: DraftTree, end: IntArray, context: Context, step: int, config: DraftingConfig
) -> IntArray:
    """Let the small drafter write on at the end of the sequence, in place (τ_k = 0).

    It takes the first chain proposed (n-grams: the most recent place of the longest match), as far
    as the chain of a small step goes. If at the first step there is none even at the root, it
    writes the most frequent token.

    Parameters
    ----------
    tree : DraftTree
        The sequence.
    end : int64 array, shape ``[1]``
        Its last node.
    context : Context
        Committed tokens, of which the root is the last.
    step : int
        k, from 1.
    config : DraftingConfig
        The drafter, and the length of a chain.

    Returns
    -------
    int64 array, shape ``[1]``
        The new last node.
    """
    last = int(end[0])
    chains = config.small.propose(context, tree.path_tokens(last), len(context))
    if chains:
        length = config.chain_length(step)
        drafted = list(zip(chains[0].tokens[:length], chains[0].log_p[:length], strict=True))
    elif step == 1:
        drafted = [fallback(context, len(context))]
    else:
        return end
    for token, log_p in drafted:
        if tree.depth[last] >= tree.max_depth:
            break
        last = tree.add(last, token, log_p)
    tree.update_scores()
    return np.array([last])


def unread(tree: DraftTree, end: IntArray, call: MidCall) -> IntArray:
    """Return the nodes of the sequence that the mid drafter has yet to read, and count them."""
    nodes = np.array([0, *tree.path(int(end[0]))])
    missing = nodes[tree.row[nodes] < 0]
    call.refresh_nodes = call.all_nodes = len(missing)
    call.refresh_levels = call.all_levels = len(missing)
    call.pool_nodes = len(nodes)
    return missing


def overwrite(tree: DraftTree, scores: Likeliest, call: MidCall) -> IntArray:
    """Let the mid drafter verify the sequence and write one token, in place (τ_k = 1).

    From the root on, a token that is the mid drafter's own choice stays. The first one that is not
    goes, with all that follows it, and the mid drafter's stands in its place; if all stay, its next
    token comes at the end.

    Returns
    -------
    int64 array, shape ``[1]``
        The new last node.
    """
    node = 0
    while True:
        tokens, log_p = scores.top(tree, np.array([node]))
        child = tree.child(node, int(tokens[0, 0]))
        if child < 0:
            break
        tree.node["log_p"][child] = log_p[0, 0]
        node = child
    if tree.n_children[node]:
        call.earlier_picks = 1
        tree.remove_below(node)
    if tree.depth[node] < tree.max_depth:
        node = tree.add(node, int(tokens[0, 0]), float(log_p[0, 0]))
    tree.update_scores()
    return np.array([node])
