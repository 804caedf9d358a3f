"""Lossless verification by the target: one pass with tree attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treegraft_core import kernels
from treegraft_core.context import table_log_p
from treegraft_core.models import CachedModel, Visibility
from treegraft_core.tree import DraftTree, IntArray


@dataclass
class Verdict:
    """What the target accepted.

    Attributes
    ----------
    path : list of int
        Accepted nodes, top down; A is its length.
    tokens : list of int
        The accepted tokens and the bonus token: A + 1 tokens.
    log_p : list of float
        The target's log-probability of each of ``tokens`` from its top-W table, nats.
    ranks : list of int
        Place in the pruning order of each accepted node.
    """

    path: list[int]
    tokens: list[int]
    log_p: list[float]
    ranks: list[int]


def token_log_p(logits: Tensor, tokens: Sequence[int], width: int) -> list[float]:
    """Return the top-W table's log p of ``tokens[i]`` under row i of ``logits`` ``[n, V]``."""
    values, indices = logits.log_softmax(-1).topk(min(width, logits.shape[-1]), dim=-1)
    return [
        table_log_p(row, value, token)
        for row, value, token in zip(indices.tolist(), values.tolist(), tokens, strict=True)
    ]


def argmaxes(logits: Tensor) -> Callable[[int], int]:
    """Return a function from a row of ``logits`` to its likeliest token.

    On a CPU only the rows asked for are searched; elsewhere all at once, in one transfer.
    """
    if logits.device.type == "cpu":
        table = logits.numpy()
        return lambda row: int(table[row].argmax())
    choice = logits.argmax(-1).tolist()
    return lambda row: int(choice[row])


def log_p_of(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return log p of ``tokens[i]``, the likeliest of row i of ``logits``, nats.

    It heads the top-W table, so its log p there needs no table.
    """
    index = torch.tensor(tokens, device=logits.device)[:, None]
    return (logits.gather(1, index)[:, 0] - logits.logsumexp(-1)).tolist()


def verify_greedy(target: CachedModel, tree: DraftTree, kept: IntArray, length: int) -> Verdict:
    """Verify root + kept nodes greedily and keep the accepted path in the target's cache.

    Parameters
    ----------
    target : CachedModel
        Its cache holds the committed tokens but the root: ``length - 1`` of them.
    tree, kept
        The finished tree and the nodes that pruning kept, in its order.
    length : int
        Committed tokens, the root included.

    Returns
    -------
    Verdict
        Afterwards the cache holds the context, the root and the accepted nodes.
    """
    start = target.length
    order, visible = verification_pass(tree, kept, start)
    logits = target.run(tree.token[order], length - 1 + tree.depth[order], visible)
    kept = np.asarray(kept, np.int64)
    place = np.full(tree.size, -1, np.int64)
    place[order] = np.arange(len(order))
    path: list[int] = []
    rows, tokens = [0], []
    best = argmaxes(logits)
    while True:
        tokens.append(best(rows[-1]))
        node = tree.child(path[-1] if path else 0, tokens[-1])
        if node < 0 or place[node] < 0:
            break
        path.append(node)
        rows.append(int(place[node]))
    rank = np.empty(tree.size, np.int64)
    rank[kept] = np.arange(len(kept))
    log_p = log_p_of(logits[torch.tensor(rows, device=logits.device)], tokens)
    target.keep(start + 1, [start + row for row in rows[1:]])
    return Verdict(path, tokens, log_p, rank[path].tolist())


def verification_pass(tree: DraftTree, kept: IntArray, start: int) -> tuple[IntArray, Visibility]:
    """Return root + kept nodes, ascending, and what each sees in a pass after ``start`` tokens."""
    order = np.concatenate([np.zeros(1, np.int64), np.sort(kept)])
    slots = kernels.ancestor_slots(tree.node, np.empty(tree.size, np.int32), order, start)
    return order, Visibility(np.full(len(order), start + 1), slots)
