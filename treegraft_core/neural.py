"""The neural ("mid") drafter in one decoding request."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treegraft_core.models import CachedModel, tree_mask
from treegraft_core.student import DraftVocabulary
from treegraft_core.tree import DraftTree, FloatArray, IntArray, on_grid

NO_ROW_LOG_P = -20.0
"""Log p of a token of the target for which the drafter's narrower (unpadded) head has no row."""


class ScoreRows:
    """The mid drafter's distributions at the paths it has evaluated, one row a path.

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
        self._log_p = torch.empty(0, 0)
        self._top_tokens = np.zeros((0, width), np.int64)
        self._top_log_p = np.zeros((0, width))
        self._column: Tensor | None = None
        if vocabulary is not None:
            self._column = torch.full((target_vocab,), -1, dtype=torch.long)
            self._column[vocabulary.tokens] = torch.arange(len(vocabulary.tokens))
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.size = 0

    def append(self, logits: Tensor) -> IntArray:
        """Add one row for each row of ``logits`` ``[n, columns]``; return the rows' numbers."""
        if self.vocabulary is None:
            logits = logits[:, : self.target_vocab]
        log_p = logits.log_softmax(-1)
        values, columns = log_p.topk(min(self.width, log_p.shape[-1]), dim=-1)
        tokens = columns.cpu()
        if self.vocabulary is not None:
            tokens = self.vocabulary.tokens[tokens]
        first, end = self.size, self.size + len(log_p)
        self._reserve(end, log_p, tokens.shape[1])
        self._log_p[first:end] = log_p
        self._top_tokens[first:end] = tokens.numpy()
        self._top_log_p[first:end] = on_grid(values.double().cpu().numpy())
        self.size = end
        return np.arange(first, end)

    def _reserve(self, rows: int, like: Tensor, width: int) -> None:
        have = len(self._top_tokens)
        if rows <= have:
            return
        capacity = max(rows, 2 * have)
        log_p = like.new_empty(capacity, like.shape[1])
        top_tokens = np.zeros((capacity, width), np.int64)
        top_log_p = np.zeros((capacity, width))
        if self.size:
            log_p[: self.size] = self._log_p[: self.size]
            top_tokens[: self.size] = self._top_tokens[: self.size]
            top_log_p[: self.size] = self._top_log_p[: self.size]
        self._log_p, self._top_tokens, self._top_log_p = log_p, top_tokens, top_log_p

    def gather(self, rows: IntArray, tokens: IntArray) -> FloatArray:
        """Return log p of ``tokens[i]`` in row ``rows[i]``, nats; the floor outside the table."""
        columns = torch.as_tensor(tokens)
        if self._column is not None:
            columns = self._column[columns]
        columns = columns.masked_fill(columns >= self._log_p.shape[1], -1)
        device = self._log_p.device
        table_rows = torch.as_tensor(rows, device=device)
        found = self._log_p[table_rows, columns.clamp_min(0).to(device)]
        result = found.double().cpu().numpy()
        return on_grid(np.where((columns < 0).numpy(), self.floor_log_p, result))

    def log_p(self, tree: DraftTree, parents: IntArray, tokens: IntArray) -> FloatArray:
        """Return log p(token | context, path to parent), nats, shape ``[n]``."""
        return self.gather(tree.row[parents], tokens)

    def top(self, tree: DraftTree, nodes: IntArray) -> tuple[IntArray, FloatArray]:
        """Return the W likeliest tokens at each node and their log p: two arrays ``[n, W]``."""
        rows = tree.row[nodes]
        return self._top_tokens[rows], self._top_log_p[rows]


class MidDrafter:
    """The mid drafter's cache and distributions in one request.

    It evaluates each node at most once in a round. Its cache holds committed tokens and catches up
    on those committed in rounds in which it was not called, together with the first nodes of the
    next call.

    Parameters
    ----------
    model : CachedModel
        The drafter, with a cache of its own.
    width : int
        W.
    vocabulary : DraftVocabulary, optional
        Of a student with a restricted head.
    target_vocab : int
        Tokens of the target's head.
    """

    def __init__(
        self,
        model: CachedModel,
        width: int,
        vocabulary: DraftVocabulary | None,
        target_vocab: int,
    ):
        self.model = model
        self.rows = ScoreRows(width, vocabulary, target_vocab)
        self.caught_up = 0
        self.pass_ms = 0.0
        self._context: Sequence[int] = ()
        self._slot: dict[int, int] = {}

    def reset(self) -> None:
        """Forget the request."""
        self.model.reset()
        self.rows.clear()

    def prefill(self, tokens: Sequence[int]) -> None:
        """Read committed tokens ahead of the first round, outside any round's time."""
        start = self.model.length
        if len(tokens) > start:
            self.model.run(
                tokens[start:], np.arange(start, len(tokens)), rows=np.zeros(0, np.int64)
            )

    def begin_round(self, context: Sequence[int]) -> None:
        """Start a round whose root is the last token of ``context``."""
        self._context = context
        self._slot = {}
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
        started = time.perf_counter()
        context, start = self._context, self.model.length
        base = len(context)
        first_call = not self._slot
        pending = list(context[start:]) if first_call else []
        fresh = nodes[1:] if first_call else nodes
        if first_call and nodes[0] != 0:
            raise ValueError("nodes: the first evaluation of a round must hold the root")
        q = len(pending) + len(fresh)
        for i, node in enumerate(fresh.tolist()):
            self._slot[node] = start + len(pending) + i
        tokens = np.concatenate([np.array(pending, np.int64), tree.token[fresh]])
        positions = np.concatenate(
            [np.arange(start, start + len(pending)), base - 1 + tree.depth[fresh]]
        )
        ancestors = [[self._slot[a] for a in tree.path(int(n))[:-1]] for n in fresh]
        visible = np.zeros((q, start + q), bool)
        visible[: len(pending), :start] = True
        visible[: len(pending), start : start + len(pending)] = np.tri(len(pending), dtype=bool)
        visible[len(pending) :] = tree_mask(start + len(pending), base, ancestors, len(fresh))
        rows = np.arange(max(0, len(pending) - 1), q)
        logits = self.model.run(tokens, positions, visible, rows)
        if first_call:
            self._slot[0] = base - 1
            self.caught_up = len(pending) - 1
        tree.row[nodes] = self.rows.append(logits)
        self.pass_ms += 1e3 * (time.perf_counter() - started)

    def end_round(self, path: Sequence[int]) -> None:
        """Keep the cache of committed tokens: the context and the evaluated part of ``path``."""
        if not self._slot:
            return
        slots = []
        for node in path:
            if node not in self._slot:
                break
            slots.append(self._slot[node])
        self.model.keep(len(self._context), slots)
