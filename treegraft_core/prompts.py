"""Prompts: the FastChat JSON-lines layout and the tokenizer's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        prompt = read_prompt(line, where)
        if prompt.question_id in seen:
            raise InputError(f"{where}: question_id={prompt.question_id} repeats; make ids unique")
        seen.add(prompt.question_id)
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"task.path={path}: no prompts; the file is empty")
    return prompts


def read_prompt(line: str, where: str) -> Prompt:
    """Return the prompt of one line; errors start with ``where``."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}: not valid JSON ({error.msg}); the file may be truncated"
        ) from error
    except (ValueError, RecursionError) as error:  # numbers and nesting beyond Python's limits
        raise InputError(f"{where}: not valid JSON ({error}); write it flatter") from error
    if not isinstance(row, dict) or "question_id" not in row or "turns" not in row:
        raise InputError(f"{where}: needs the fields question_id and turns")
    key, category = row["question_id"], row.get("category")
    category = "" if category is None else category
    for name, value in (("question_id", key), ("category", category)):
        if not isinstance(value, (str, int, float)):
            raise InputError(f"{where}: {name} must be a text or a number")
        check_text(str(value), f"{where}: {name}")
    if not str(key).strip():
        raise InputError(f"{where}: question_id is empty; give each prompt its own")
    return Prompt(str(key), str(category), check_turns(row["turns"], where))


def check_turns(turns: Any, where: str) -> tuple[str, ...]:
    """Return the turns of a prompt, checked; errors start with ``where``."""
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise InputError(f"{where}: turns must be a list of one or more strings")
    for turn in turns:
        check_text(turn, where)
        if not turn.strip():
            raise InputError(f"{where}: empty prompt; write a text or remove the line")
    return tuple(turns)


def check_text(text: str, where: str) -> None:
    """Raise `InputError` if ``text`` cannot be written as UTF-8."""
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise InputError(f"{where}: holds half of a surrogate pair; write the character itself")


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
