"""Do two models speak the same tokens? Compared by content, not by name."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from treegraft_core.errors import InputError


def check_same_tokenizer(target: PreTrainedTokenizerBase, mid: PreTrainedTokenizerBase) -> None:
    """Compare vocabulary, merges and special tokens of two tokenizers.

    Raises
    ------
    InputError
        Naming the first token, by id, or the first merge that differs.
    """
    ours = {i: t for t, i in target.get_vocab().items()}
    theirs = {i: t for t, i in mid.get_vocab().items()}
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i):
            raise InputError(
                f"pair: tokenizers differ at token {i}: target has {ours.get(i)!r}, mid has "
                f"{theirs.get(i)!r}; choose a mid drafter that shares the target's tokenizer"
            )
    for a, b in zip(_merges(target), _merges(mid), strict=False):
        if a != b:
            raise InputError(
                f"pair: tokenizers differ at merge {' '.join(a)!r} against {' '.join(b)!r}; "
                "choose a mid drafter that shares the target's tokenizer"
            )
    if len(_merges(target)) != len(_merges(mid)):
        raise InputError(
            f"pair: target's tokenizer has {len(_merges(target))} merges, mid's "
            f"{len(_merges(mid))}; choose a mid drafter that shares the target's tokenizer"
        )
    special, other = set(target.all_special_tokens), set(mid.all_special_tokens)
    shared = {t for t in special ^ other if t in target.get_vocab()}
    # A pad token named by only one side changes no text, so only tokens in use count.
    for token in sorted(shared):
        if token not in {target.pad_token, mid.pad_token}:
            raise InputError(
                f"pair: tokenizers differ at special token {token!r}, which only one side treats "
                "as special; choose a mid drafter that shares the target's tokenizer"
            )


def _merges(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, ...]]:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    return [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]
