"""The module that the paper's runtime loads: one literal, which is read without executing it."""

from __future__ import annotations

import ast
import pprint
from pathlib import Path
from typing import Any

from treegraft_core.files import write_text

LITERAL_NAME = "SCHEDULER_ARTIFACTS"


def write_literal(path: Path | str, value: dict[str, Any]) -> None:
    """Write a module that holds ``value`` and nothing else; floats keep every bit."""
    body = pprint.pformat(value, width=100, compact=True, sort_dicts=False)
    write_text(
        path, f'"""TreeGraft scheduler for the paper\'s runtime."""\n\n{LITERAL_NAME} = {body}\n'
    )


def read_literal(text: str) -> Any:
    """Return the literal of a module's text; what else stands in it is not looked at.

    Raises
    ------
    SyntaxError, ValueError, LookupError, RecursionError, MemoryError
        If it is no Python, or holds no such literal.
    """
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == LITERAL_NAME for target in node.targets
        ):
            return ast.literal_eval(node.value)
    raise LookupError("none in it")
