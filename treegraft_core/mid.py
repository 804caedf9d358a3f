"""The protocol of a mid drafter: what a round of drafting asks of it.

A mid drafter is an object with a method ``open(target)`` that returns a `MidCache`: the drafter in
one request. Optionally it has the attributes ``max_positions`` (tokens that it has positions for;
default: any number), ``family`` (a name that schedulers carry: one that was distilled for another
family is refused; default: the class's), ``fingerprint`` (a text that changes with its weights, for
logs that must not mix) and ``hidden_layers`` (layers of the target whose inputs it reads, which the
target's cache then keeps: :class:`treegraft_core.hidden.HiddenStates`; default: none). A
``transformers`` causal LM is one as it is; :mod:`treegraft_core.head` is one that reads the
target's hidden states; `MidCacheBase` leaves an author one method to write.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from treegraft_core.errors import InputError
from treegraft_core.tree import IntArray, grown

if TYPE_CHECKING:
    from treegraft_core.models import CachedModel, Visibility


class MidCache(Protocol):
    """A mid drafter in one request: tokens that it has read, in places 0, 1, ….

    Attributes
    ----------
    positions : int64 array, shape ``[length]``
        Position in the text of each token read.
    sequential : bool
        A token's input is the drafter's own output at the token before it, so that a pass over a
        tree takes a part of a pass for each of its levels.
    keeps_drafts : bool
        The entry of a draft token that is accepted is that of a committed token. Otherwise
        accepted tokens are read again.
    target : CachedModel or None
        The target's cache that the drafter reads; it must hold every committed token before the
        drafter's last one.
    """

    positions: IntArray
    sequential: bool
    keeps_drafts: bool
    target: CachedModel | None

    @property
    def length(self) -> int:
        """Tokens read."""
        ...

    def reset(self) -> None:
        """Forget everything read."""
        ...

    def run(
        self,
        tokens: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        visible: Visibility | None = None,
        rows: IntArray | None = None,
    ) -> Tensor:
        """Read tokens; return the logits after each, or after those of ``rows``.

        As :meth:`treegraft_core.models.CachedModel.run`. The distribution after a token depends on
        the tokens before it alone: on the text, and for a draft on its path.
        """
        ...

    def keep(self, prefix: int, slots: Sequence[int] = ()) -> None:
        """Keep the first ``prefix`` tokens and, after them, those at places ``slots``."""
        ...

    def shrink(self) -> None:
        """Give back memory beyond what the tokens read take."""
        ...

    def bytes_of_pass(self, q: int) -> int:
        """Estimate the memory that a pass of ``q`` tokens takes, bytes, weights left out."""
        ...


def predecessors(visible: Visibility, length: int) -> IntArray:
    """Return the place of the token before each token of a pass that begins at place ``length``.

    That is the last place that it sees before its own: the tokens of a path lie in order. −1: none.
    """
    own = length + np.arange(len(visible.end))
    listed = np.where(visible.slots < own[:, None], visible.slots, -1).max(1, initial=-1)
    return np.maximum(listed, np.minimum(visible.end, own) - 1)


class MidCacheBase:
    """The bookkeeping of a `MidCache`, for a drafter whose distributions follow from tokens.

    A subclass writes `predict`; it may read `tokens` and `text`.

    Attributes
    ----------
    tokens : int64 array, shape ``[length]``
        Tokens read.
    before : int64 array, shape ``[length]``
        Place of the token before each, −1 for the first of the text.
    """

    sequential = False
    keeps_drafts = True
    target: CachedModel | None = None

    def __init__(self) -> None:
        self._tokens: IntArray = np.zeros(256, np.int64)
        self._before: IntArray = np.zeros(256, np.int64)
        self.reset()

    def predict(self, places: IntArray) -> Tensor:
        """Return the logits after the tokens at ``places``, shape ``[places, vocabulary]``."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Tokens read."""
        return len(self.positions)

    @property
    def tokens(self) -> IntArray:
        """Tokens read, a view."""
        return self._tokens[: self.length]

    @property
    def before(self) -> IntArray:
        """Place of the token before each, a view."""
        return self._before[: self.length]

    def text(self, place: int, most: int) -> list[int]:
        """Return the last ``most`` tokens of the path that ends at ``place``, oldest first."""
        found: list[int] = []
        while place >= 0 and len(found) < most:
            found.append(int(self._tokens[place]))
            place = int(self._before[place])
        return found[::-1]

    def reset(self) -> None:
        """Forget everything read."""
        self.positions: IntArray = np.zeros(0, np.int64)

    def run(
        self,
        tokens: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        visible: Visibility | None = None,
        rows: IntArray | None = None,
    ) -> Tensor:
        """Read tokens; return the logits after each, or after those of ``rows``."""
        first, end = self.length, self.length + len(tokens)
        self._tokens, self._before = grown(self._tokens, end), grown(self._before, end)
        self._tokens[first:end] = tokens
        if visible is None:
            self._before[first:end] = np.arange(first - 1, end - 1)
        else:
            self._before[first:end] = predecessors(visible, first)
        self.positions = np.concatenate([self.positions, np.asarray(positions, np.int64)])
        wanted = np.arange(len(tokens)) if rows is None else np.asarray(rows, np.int64)
        return self.predict(first + wanted) if len(wanted) else torch.empty(0, 0)

    def keep(self, prefix: int, slots: Sequence[int] = ()) -> None:
        """Keep the first ``prefix`` tokens and, after them, those at places ``slots``: a path."""
        places = np.asarray(slots, np.int64)
        end = prefix + len(places)
        self._tokens[prefix:end] = self._tokens[places]
        self._before[prefix:end] = np.arange(prefix - 1, end - 1)
        self.positions = np.concatenate([self.positions[:prefix], self.positions[places]])

    def shrink(self) -> None:
        """Keep the room: it is a few bytes a token."""

    def bytes_of_pass(self, q: int) -> int:
        """Return the bytes of two places a token and of the logits, about, for 2¹⁶ columns."""
        return q * (1 << 18) + 16 * (self.length + q)


def hidden_layers(mid: Any) -> tuple[int, ...]:
    """Return the layers of the target whose inputs a mid drafter reads."""
    return tuple(getattr(mid, "hidden_layers", ()))


OWN = "python:"
"""What the path of a mid drafter of one's own begins with."""


def own_mid(spec: str, target: Any, tokenizer: Any, trusted: bool) -> Any:
    """Return the mid drafter of ``python:package.module:Class``, made with target and tokenizer.

    Raises
    ------
    InputError
        If its code is not trusted, cannot be imported, or is no mid drafter.
    """
    if not trusted:
        raise InputError(
            f"pair.mid.path={spec}: imports and runs that module; set "
            "engine.trust_remote_code=true if you trust it"
        )
    module, _, attribute = spec.removeprefix(OWN).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)(target, tokenizer)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(
            f"pair.mid.path={spec}: {error}; give python:package.module:Class, importable from "
            "here, which takes target and tokenizer"
        ) from error
    if not callable(getattr(found, "open", None)):
        raise InputError(f"pair.mid.path={spec}: has no method open(target); see docs/drafters.md")
    return found
