"""Prompts: the FastChat JSON-lines layout and the tokenizer's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from treegraft_core.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """One prompt: a list of user turns.

    Attributes
    ----------
    question_id : str
        Unique within a file.
    category : str
        The kind of task.
    turns : tuple of str
        User turns; the second is asked after the model's answer to the first.
    """

    question_id: str
    category: str
    turns: tuple[str, ...]


def read_prompts(path: Path | str) -> list[Prompt]:
    """Read a JSON-lines file of ``question_id, category, turns``.

    Raises
    ------
    InputError
        If the file is missing or empty, a line is not JSON (a truncated file), a field is missing,
        an id repeats or a turn is empty. The message names the file and the line.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"task.path={path}: no such file; give a JSON-lines prompt file")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"task.path={path}: not UTF-8 text ({error.reason})") from error
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"task.path={path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{where}: not valid JSON ({error.msg}); the file may be truncated"
            ) from error
        if not isinstance(row, dict) or "question_id" not in row or "turns" not in row:
            raise InputError(f"{where}: needs the fields question_id and turns")
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise InputError(f"{where}: turns must be a list of one or more strings")
        if any(0xD800 <= ord(c) <= 0xDFFF for t in turns for c in t):
            raise InputError(f"{where}: holds half of a surrogate pair; write the character itself")
        if not all(t.strip() for t in turns):
            raise InputError(f"{where}: empty prompt; write a text or remove the line")
        key = str(row["question_id"])
        if key in seen:
            raise InputError(f"{where}: question_id={key} repeats; make ids unique")
        seen.add(key)
        prompts.append(Prompt(key, str(row.get("category", "")), tuple(turns)))
    if not prompts:
        raise InputError(f"task.path={path}: no prompts; the file is empty")
    return prompts


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to the start of the next answer.

    Uses the tokenizer's own chat template; a tokenizer without one (a base model) gets the turns
    as plain text, one a paragraph.
    """
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    text = "\n\n".join(m["content"] for m in messages) + "\n\n"
    return list(tokenizer(text)["input_ids"])
