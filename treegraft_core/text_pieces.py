"""Text from tokens, piece by piece, never ending within a character."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

OVERLAP = 8
"""Tokens that are decoded again before new ones, for the spaces between them."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers decode an unfinished character to."""


class TextPieces:
    """Turns tokens into text piece by piece.

    A character of several tokens, which decodes to a replacement character until its last one, is
    held back until then. Only the last few tokens are decoded again for each piece, from a place
    where a character ended.

    Bytes that are no text decode as the whole decoding has them, save one case: a SentencePiece
    tokenizer with byte fallback spoils a whole run of byte tokens for one bad byte, and what was
    given out of that run before cannot be taken back.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Decodes.
    skip_special_tokens : bool
        Leave special tokens out of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens: list[int] = []
        self._ends = [0]
        """Tokens after which no character was open, the last of them being those given out."""

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that is complete with these tokens and was not before."""
        self._tokens += tokens
        return self._piece(final=False)

    def end(self) -> str:
        """Return what is left, a character that never ended included."""
        return self._piece(final=True)

    def _piece(self, final: bool) -> str:
        done = self._ends[-1]
        start = next(end for end in reversed(self._ends) if end <= max(0, done - OVERLAP))
        text = self._decode(start, len(self._tokens))
        if text.endswith(UNFINISHED) and not final:
            return ""
        before = self._decode(start, done)
        if not final and not text.startswith(before):
            return ""
        self._ends = [end for end in self._ends if end >= start] + [len(self._tokens)]
        return text[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        return str(
            self._tokenizer.decode(
                self._tokens[start:stop],
                skip_special_tokens=self._skip,
                clean_up_tokenization_spaces=False,
            )
        )
