"""Decoding one token at a time, while somebody else chooses the tokens.

`Steps` drafts and verifies like the decoder, but asks outside which token the target's logits
give: ``transformers``' processors, a sampler, a person. Who chooses sees one row of logits for each
committed token, in order, as in plain decoding; rows of tokens that nobody committed are never
shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from treegraft_core.context import Context

if TYPE_CHECKING:
    from treegraft_core.decoder import Draft, TreeGraftDecoder


@dataclass
class _Walk:
    """A verified tree and how far its tokens were chosen; see `treegraft_core.verify.walk`."""

    draft: Draft
    place: dict[int, int]
    node: int = 0
    path: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=lambda: [0])
    tokens: list[int] = field(default_factory=list)

    def take(self, token: int) -> bool:
        """Choose a token; return whether a verified node carries it."""
        self.tokens.append(token)
        self.node = self.draft.read.tree.child(self.node, token)
        if self.node not in self.place:
            return False
        self.path.append(self.node)
        self.rows.append(self.place[self.node])
        return True


class Steps:
    """A request whose tokens are chosen outside, one at a time.

    Call `logits`, choose a token, `commit` it, and so on; `close` at the end.

    Parameters
    ----------
    decoder : TreeGraftDecoder
        Drafts and verifies; it serves one request at a time.
    prompt : sequence of int
        Token ids, at least one.
    max_new_tokens : int
        Most tokens that will be asked for, which the guard reads.

    Attributes
    ----------
    result : Generation
        Tokens and statistics so far.
    """

    def __init__(self, decoder: TreeGraftDecoder, prompt: Sequence[int], max_new_tokens: int):
        from treegraft_core.rounds import Generation

        self.decoder = decoder
        self.result = Generation()
        self._prompt = [int(token) for token in prompt]
        started = time.perf_counter()
        self._log_p, self._last = decoder.read_prompt(self._prompt)
        self.result.prefill_ms = 1e3 * (time.perf_counter() - started)
        self._request = decoder.requests
        self._context: Context | None = None
        self._walk: _Walk | None = None
        self._plain: tuple[Tensor, float] | None = None
        decoder.guard.begin(max_new_tokens)
        self.result.decisions = decoder.guard.decisions
        self._started = time.perf_counter()

    @property
    def open(self) -> bool:
        """Whether the next token's logits are there already, from an earlier pass."""
        return self._context is None or self._walk is not None or self._plain is not None

    def logits(self) -> Tensor:
        """Return the target's logits after everything committed, shape ``[vocabulary]``."""
        if self.decoder.requests != self._request:
            raise RuntimeError(
                "steps: another request has begun on this decoder; finish one before the next"
            )
        if self._context is None:
            return self._last[-1]
        if self._walk is None and self._plain is None:
            self._next_pass(self._context)
        if self._walk is not None:
            return self._walk.draft.read.logits[self._walk.rows[-1]]
        assert self._plain is not None
        return self._plain[0][-1]

    def commit(self, token: int) -> None:
        """Say which token follows."""
        if not self.open:
            raise ValueError(f"token={token}: ask for its logits first")
        self.result.tokens.append(token)
        if self._context is None:
            self._context = self.decoder.first_context(
                [*self._prompt, token], self._log_p, self._last
            )
        elif self._plain is not None:
            logits, seconds = self._plain
            self._plain = None
            # The guard compares ways of decoding: the time in which a token was chosen is no part.
            started = time.perf_counter() - seconds
            self.decoder.end_plain(self._context, logits, [token], started)
            self.result.plain_steps += 1
        elif self._walk is not None and not self._walk.take(token):
            self._end_round(self._walk)

    def close(self, stopped: str) -> None:
        """End the request after the last committed token; say why."""
        if self._walk is not None and self._walk.tokens:
            # The last token is the root of a next round, which no cache holds.
            self._walk.path.pop()
            self._walk.rows.pop()
            self._end_round(self._walk)
        self._walk = self._plain = None
        self.result.stopped = stopped
        self.decoder.config.small.remember(self.result.tokens)
        self.result.decode_ms = 1e3 * (time.perf_counter() - self._started)

    def _next_pass(self, context: Context) -> None:
        decoder = self.decoder
        # Beyond its positions a model has room for no tree, but may go on, as it does in
        # `transformers`: rotary embeddings have no end.
        room = len(context) < decoder.max_context
        mode = decoder.guard.choose(len(context)) if room else "plain"
        if mode == "plain":
            started = time.perf_counter()
            logits = decoder.plain_pass(context)
            decoder.pair.synchronize()
            self._plain = logits, time.perf_counter() - started
            return
        draft = decoder.begin_round(context, len(self._prompt), mode)
        decoder.pair.synchronize()
        draft.clock.lap("verify")
        place = {node: row for row, node in enumerate(draft.read.order.tolist())}
        self._walk = _Walk(draft, place)

    def _end_round(self, walk: _Walk) -> None:
        assert self._context is not None
        self._walk = None
        walk.draft.clock.resume()
        self.decoder.end_round(walk.draft, self._context, walk.path, walk.rows, walk.tokens)
        self.result.rounds.append(walk.draft.round_)
