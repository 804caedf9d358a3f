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
from treegraft_core.sampling import ARGMAX, Chooser
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


def verify(
    target: CachedModel,
    tree: DraftTree,
    kept: IntArray,
    context: IntArray,
    chooser: Chooser = ARGMAX,
    width: int = 10,
) -> Verdict:
    """Verify root + kept nodes in one pass and keep the accepted path in the target's cache.

    From the root on, the target's token is chosen at each node; where a kept child carries it, the
    walk goes on there, else it is the bonus token. So the output is the target's own.

    Parameters
    ----------
    target : CachedModel
        Its cache holds the committed tokens but the root: ``length - 1`` of them.
    tree, kept
        The finished tree and the nodes that pruning kept, in its order.
    context : int64 array
        Committed tokens, the root included.
    chooser : Chooser
        Chooses the target's tokens (default: greedily).
    width : int
        W, tokens of the table that log-probabilities are read from.

    Returns
    -------
    Verdict
        Afterwards the cache holds the context, the root and the accepted nodes.
    """
    read = read_tree(target, tree, kept, context)
    path, rows, tokens = walk(tree, read.order, read.logits, context, chooser)
    return accept(target, read, path, rows, tokens, chooser, width)


@dataclass
class TreeRead:
    """What the target said about a tree in one pass; nobody has walked it yet.

    Attributes
    ----------
    tree : DraftTree
        The finished tree.
    kept : int64 array
        The nodes that pruning kept, in its order.
    order : int64 array, shape ``[n]``
        Root + kept nodes, ascending.
    start : int
        Tokens in the target's cache before the pass.
    logits : Tensor, shape ``[n, vocabulary]``
        The target's after each of ``order``.
    """

    tree: DraftTree
    kept: IntArray
    order: IntArray
    start: int
    logits: Tensor


def read_tree(target: CachedModel, tree: DraftTree, kept: IntArray, context: IntArray) -> TreeRead:
    """Let the target read root + kept nodes in one pass; arguments as in `verify`."""
    start = target.length
    order, visible = verification_pass(tree, kept, start)
    logits = target.run(tree.token[order], len(context) - 1 + tree.depth[order], visible)
    return TreeRead(tree, np.asarray(kept, np.int64), order, start, logits)


def accept(
    target: CachedModel,
    read: TreeRead,
    path: list[int],
    rows: list[int],
    tokens: list[int],
    chooser: Chooser = ARGMAX,
    width: int = 10,
) -> Verdict:
    """Keep a walked path in the cache; ``path``, ``rows`` and ``tokens`` as from `walk`."""
    rank = np.empty(read.tree.size, np.int64)
    rank[read.kept] = np.arange(len(read.kept))
    visited = read.logits[torch.tensor(rows, device=read.logits.device)]
    log_p = chosen_log_p(visited, tokens, chooser, width)
    target.keep(read.start + 1, [read.start + row for row in rows[1:]])
    return Verdict(path, tokens, log_p, rank[path].tolist())


def walk(
    tree: DraftTree, order: IntArray, logits: Tensor, context: IntArray, chooser: Chooser
) -> tuple[list[int], list[int], list[int]]:
    """Follow the target's tokens from the root on, as far as verified nodes carry them.

    Parameters
    ----------
    tree : DraftTree
        The finished tree.
    order : int64 array, shape ``[n]``
        Root + kept nodes, ascending.
    logits : Tensor, shape ``[n, vocabulary]``
        The target's after each of ``order``.
    context : int64 array
        Committed tokens, the root included.
    chooser : Chooser
        Chooses the target's tokens.

    Returns
    -------
    path : list of int
        Accepted nodes, top down.
    rows : list of int
        The row of ``logits`` that each token was chosen from.
    tokens : list of int
        The accepted tokens and the bonus token.
    """
    place = {node: row for row, node in enumerate(order.tolist())}
    best = argmaxes(logits) if chooser.sampling.untouched else None
    text = np.concatenate([context, np.zeros(len(order), np.int64)])
    path: list[int] = []
    rows, tokens = [0], []
    node, end = 0, len(context)
    while True:
        row = rows[-1]
        token = best(row) if best is not None else chooser.choose(text[:end], logits[row])
        tokens.append(token)
        node = tree.child(node, token)
        if node not in place:
            return path, rows, tokens
        path.append(node)
        rows.append(place[node])
        text[end] = token
        end += 1


def chosen_log_p(
    logits: Tensor, tokens: Sequence[int], chooser: Chooser, width: int
) -> list[float]:
    """Return the table's log p of ``tokens[i]``, chosen from row i of ``logits``, nats."""
    if chooser.sampling.untouched:
        return log_p_of(logits, tokens)
    return token_log_p(logits, tokens, width)


def verification_pass(tree: DraftTree, kept: IntArray, start: int) -> tuple[IntArray, Visibility]:
    """Return root + kept nodes, ascending, and what each sees in a pass after ``start`` tokens."""
    order = np.concatenate([np.zeros(1, np.int64), np.sort(kept)])
    slots = kernels.ancestor_slots(tree.node, np.empty(tree.size, np.int32), order, start)
    return order, Visibility(np.full(len(order), start + 1), slots)
