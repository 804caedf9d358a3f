"""The neural ("mid") drafter in one decoding request."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treegraft_core import chain_kernels, kernels
from treegraft_core.context import Context
from treegraft_core.mid import MidCache
from treegraft_core.models import Visibility
from treegraft_core.small import NGRAM, SmallDrafter
from treegraft_core.student import DraftVocabulary
from treegraft_core.tree import DraftTree, FloatArray, IntArray, grown, on_grid

NO_ROW_LOG_P = -20.0
"""Log p of a token of the target for which the drafter's narrower (unpadded) head has no row."""


class ScoreRows:
    """What drafting needs of the mid drafter's distributions, one row a path it has evaluated.

    That is the W likeliest tokens, and log p of the tokens that a small step may propose under the
    path (:meth:`Context.followers`), which a refresh asks for. Both are gathered on the device and
    come over in one transfer; no row of the vocabulary's size is kept.

    Parameters
    ----------
    width : int
        W, likeliest tokens kept for each row.
    vocabulary : DraftVocabulary, optional
        The tokens that the columns of the drafter's logits stand for (default: column = token id).
    target_vocab : int
        Tokens of the target's head; columns of a wider drafter's head are cut off.
    """

    def __init__(self, width: int, vocabulary: DraftVocabulary | None, target_vocab: int):
        self.width = width
        self.vocabulary = vocabulary
        self.target_vocab = target_vocab
        self.floor_log_p = NO_ROW_LOG_P if vocabulary is None else vocabulary.floor_log_p
        self._column: IntArray | None = None
        self._token: IntArray | None = None
        if vocabulary is not None:
            self._token = vocabulary.tokens.numpy().astype(np.int64)
            self._column = np.full(target_vocab, -1, np.int64)
            self._column[self._token] = np.arange(len(self._token))
        self._top_tokens: IntArray = np.zeros((0, width), np.int64)
        self._top_log_p: FloatArray = np.zeros((0, width))
        self._start: IntArray = np.zeros(1, np.int64)
        self._found: IntArray = np.zeros(0, np.int64)
        self._values: FloatArray = np.zeros(0)
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.size = 0

    def append(self, logits: Tensor, start: IntArray, found: IntArray) -> IntArray:
        """Add one row for each row of ``logits``; return the rows' numbers.

        Parameters
        ----------
        logits : Tensor, shape ``[n, columns]``
            The drafter's output.
        start, found : int64 array
            The tokens of each row whose log p is kept: ``found[start[i]:start[i + 1]]``.

        Raises
        ------
        FloatingPointError
            If a distribution is not a number.
        """
        if self.vocabulary is None:
            logits = logits[:, : self.target_vocab]
        n, columns = logits.shape
        wanted = found
        if self._column is not None:
            # A small drafter may propose what is no token of the target's.
            known = found < len(self._column)
            wanted = np.where(known, self._column[np.where(known, found, 0)], -1)
        inside = (wanted >= 0) & (wanted < columns)
        row = np.repeat(np.arange(n), np.diff(start))
        place = np.where(inside, row * columns + wanted, 0)
        width = min(self.width, columns)
        read = _read_on_cpu if logits.device.type == "cpu" else _read_on_device
        top_log_p, top_tokens, values = read(logits, width, place, row)
        if np.isnan(top_log_p).any():
            raise FloatingPointError("the mid drafter's logits are not numbers")
        if self._token is not None:
            top_tokens = self._token[top_tokens]
        self._store(
            on_grid(top_log_p),
            top_tokens,
            on_grid(np.where(inside, values, self.floor_log_p)),
            start,
            found,
        )
        return np.arange(self.size - n, self.size)

    def _store(
        self,
        top_log_p: FloatArray,
        top_tokens: IntArray,
        values: FloatArray,
        start: IntArray,
        found: IntArray,
    ) -> None:
        first, end = self.size, self.size + len(top_tokens)
        if top_tokens.shape[1] != self._top_tokens.shape[1]:
            self._top_tokens = np.zeros((0, top_tokens.shape[1]), np.int64)
            self._top_log_p = np.zeros((0, top_tokens.shape[1]))
        base = int(self._start[first]) if first else 0
        self._top_tokens = grown(self._top_tokens, end)
        self._top_log_p = grown(self._top_log_p, end)
        self._start = grown(self._start, end + 1)
        self._found = grown(self._found, base + len(found))
        self._values = grown(self._values, base + len(found))
        self._top_tokens[first:end] = top_tokens
        self._top_log_p[first:end] = top_log_p
        self._start[first : end + 1] = base + start
        self._found[base : base + len(found)] = found
        self._values[base : base + len(found)] = values
        self.size = end

    @property
    def table(self) -> tuple[IntArray, FloatArray, IntArray, IntArray, FloatArray]:
        """What the kernels read: likeliest tokens and their log p; start, tokens, log p."""
        return self._top_tokens, self._top_log_p, self._start, self._found, self._values

    def log_p(self, tree: DraftTree, parents: IntArray, tokens: IntArray) -> FloatArray:
        """Return log p(token | context, path to parent), nats, shape ``[n]``."""
        rows = tree.row[parents].astype(np.int64)
        values = kernels.look_up(self._start, self._found, self._values, rows, tokens)
        if np.isnan(values).any():
            raise ValueError("tokens: a small step does not propose them under these parents")
        return values

    def top(self, tree: DraftTree, nodes: IntArray) -> tuple[IntArray, FloatArray]:
        """Return the W likeliest tokens at each node and their log p: two arrays ``[n, W]``."""
        rows = tree.row[nodes]
        return self._top_tokens[rows], self._top_log_p[rows]


def _read_on_cpu(
    logits: Tensor, width: int, place: IntArray, row: IntArray
) -> tuple[FloatArray, IntArray, FloatArray]:
    """Return the likeliest columns of each row, best first, and log p of the flat ``place``."""
    total = logits.logsumexp(-1).numpy()
    table = logits.contiguous().numpy()
    top, columns = kernels.largest(table, width)
    values = table.reshape(-1)[place] - total[row]
    return (top - total[:, None]).astype(np.float64), columns, values.astype(np.float64)


def _read_on_device(
    logits: Tensor, width: int, place: IntArray, row: IntArray
) -> tuple[FloatArray, IntArray, FloatArray]:
    """Do the same elsewhere, in one transfer each way."""
    with torch.inference_mode():
        index, rows = torch.from_numpy(np.stack([place, row])).to(logits.device)
        total = logits.logsumexp(-1)
        top, columns = logits.topk(width, dim=-1)
        # Token ids are exact in float32 below 2²⁴.
        numbers = torch.cat(
            [
                (top - total[:, None]).flatten(),
                columns.to(logits.dtype).flatten(),
                logits.flatten()[index] - total[rows],
            ]
        )
    parts = numbers.cpu().double().numpy()
    shape, end = (len(logits), width), len(logits) * width
    tokens = parts[end : 2 * end].reshape(shape).astype(np.int64)
    return parts[:end].reshape(shape), tokens, parts[2 * end :]


class MidDrafter:
    """The mid drafter's cache and distributions in one request.

    It evaluates each node at most once in a round. Its cache holds committed tokens and catches up
    on those committed in rounds in which it was not called, together with the first nodes of the
    next call.

    Parameters
    ----------
    model : MidCache
        The drafter, with a cache of its own.
    width : int
        W.
    vocabulary : DraftVocabulary, optional
        Of a student with a restricted head.
    target_vocab : int
        Tokens of the target's head.
    small : SmallDrafter
        Whose proposals a refresh asks about.
    """

    def __init__(
        self,
        model: MidCache,
        width: int,
        vocabulary: DraftVocabulary | None,
        target_vocab: int,
        small: SmallDrafter = NGRAM,
    ):
        self.model, self.small = model, small
        self.rows = ScoreRows(width, vocabulary, target_vocab)
        self.caught_up = 0
        self.pass_ms = 0.0
        self._context: Context | None = None
        self._called = False

    def begin_round(self, context: Context) -> None:
        """Start a round whose root is the last token of ``context``."""
        self._context = context
        self._called = False
        self.rows.clear()
        self.caught_up = 0
        self.pass_ms = 0.0

    def evaluate(self, tree: DraftTree, nodes: IntArray) -> None:
        """Evaluate ``nodes`` (ascending, parents evaluated before or with them) in one pass.

        The root must be among the first nodes evaluated in a round: it is the last of the
        committed tokens, which the pass reads too when the cache lacks them.
        """
        if not len(nodes):
            return
        if self._context is None:
            raise ValueError("nodes: begin_round comes first")
        started = time.perf_counter()
        context, start = self._context, self.model.length
        base = len(context)
        first_call = not self._called
        if first_call and nodes[0] != 0:
            raise ValueError("nodes: the first evaluation of a round must hold the root")
        pending = context.tokens[start:] if first_call else context.tokens[:0]
        fresh = nodes[1:] if first_call else nodes
        behind = len(pending)
        end = np.full(behind + len(fresh), base)
        end[:behind] = start + 1 + np.arange(behind)
        slots = np.empty((0, 1), np.int64)
        if len(fresh):
            slots = kernels.ancestor_slots(tree.node, tree.node["slot"], fresh, start + behind)
        if behind:
            above = np.repeat(end[:behind, None] - 1, slots.shape[1], axis=1)
            slots = np.concatenate([above, slots])
        logits = self.model.run(
            np.concatenate([pending, tree.token[fresh]]),
            np.concatenate([start + np.arange(behind), base - 1 + tree.depth[fresh]]),
            Visibility(end, slots),
            np.arange(max(0, behind - 1), behind + len(fresh)),
        )
        if first_call:
            self._called = True
            self.caught_up = behind - 1
            tree.node["slot"][0] = base - 1
        tree.node["row"][nodes] = self.rows.append(logits, *self._followers(tree, nodes))
        self.pass_ms += 1e3 * (time.perf_counter() - started)

    def _followers(self, tree: DraftTree, nodes: IntArray) -> tuple[IntArray, IntArray]:
        assert self._context is not None
        paths = chain_kernels.paths_to(tree.node, nodes)
        lengths = np.full(len(nodes), len(self._context))
        return self.small.followers(self._context, paths, lengths)

    def end_round(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Keep the cache of committed tokens: the context and the evaluated part of ``path``.

        Of a drafter whose drafts' entries are no committed tokens' the context alone.
        """
        if not self._called or self._context is None:
            return
        slots = []
        for node in path:
            if tree.row[node] < 0 or not self.model.keeps_drafts:
                break
            slots.append(int(tree.slot[node]))
        self.model.keep(len(self._context), slots)
