"""Datasets of the tiny pair, and what is in them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.test_inputs import GRID, profile

WAIT_S = 120.0
"""Until something has to have happened; what happens sooner is not waited for."""


def write_prompts(path: Path, count: int, first: int = 0) -> Path:
    """Write prompts of eight words, the first of two turns."""
    lines = []
    for i in range(first, first + count):
        rng = np.random.default_rng(i)
        turns = [
            " ".join(f"w{t}" for t in rng.integers(2, 48, size=8)) for _ in range(1 + (i == 0))
        ]
        lines.append(json.dumps({"question_id": i, "category": "words", "turns": turns}))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_place(folder: Path, prompts: int) -> Path:
    """Write what a collection of the tiny pair reads beside its models: prompts and a profile."""
    profile(verify=GRID).save(folder / "data" / "profiles" / "tiny" / "profile.json")
    write_prompts(folder / "prompts.jsonl", prompts)
    return folder


def part_sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each part file below a folder, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.parquet"))
        if not path.name.startswith(".")
    }


def events(log: Path) -> list[dict[str, object]]:
    """Return the lines of a run's log."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that has to come."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"still waiting for {what}"
        time.sleep(0.05)
