"""Trajectories with a planted rule, in exactly the schema that stage=collect writes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.schema import SCHEMA
from treegraft_core import SIGNALS

DEPTH = 5
TASKS = ("math", "code", "chat", "news", "facts", "story")
RULE_SIGNAL = "pre_reselect_score"
THRESHOLD = -2.0
SMALL_MS, MID_MS, VERIFY_MS = 1.0, 40.0, 80.0


def node_signals(rng: np.random.Generator, level: float) -> dict[str, float]:
    """Return the ten signals of one tree: noise, but for the one that the rule reads."""
    values = rng.normal(size=len(SIGNALS)).round(4).tolist()
    signals = dict(zip(SIGNALS, values, strict=True))
    signals[RULE_SIGNAL] = level + float(rng.normal(scale=0.02))
    return signals


def state_rows(rng: np.random.Generator, place: dict[str, Any], depth: int) -> list[dict[str, Any]]:
    """Return the D · 2^D rows of one state, whose ids and token counts are ``place``.

    A mid call costs 39 ms more than a small step. Where the rule's signal is above the threshold
    it brings one token more, which is worth it at every prefix; below, nothing.
    """
    level = float(rng.uniform(-4.0, 0.0))
    prefixes = ["".join(p) for k in range(depth) for p in product("01", repeat=k)]
    signals = {prefix: node_signals(rng, level) for prefix in prefixes}
    rows = []
    for bits in product((0, 1), repeat=depth):
        schedule, calls = "".join(map(str, bits)), sum(bits)
        accepted = calls if level > THRESHOLD else 0
        draft_ms = MID_MS * calls + SMALL_MS * (depth - calls)
        outcome = {
            **place,
            "schedule": schedule,
            "target_ms": 82.0,
            "mid_ms": 40.0,
            "accepted": accepted,
            "committed": accepted + 1,
            "t_draft_ms": draft_ms,
            "t_verify_ms": VERIFY_MS + 0.1 * calls,
            "accepted_ranks": list(range(accepted)),
            "tree_nodes": 50,
            "kept_nodes": 40,
            "refresh_nodes": 0,
            "expand_nodes": 10,
            "all_nodes": 10,
            "pool_nodes": 10,
            "earlier_picks": 0,
            "refresh_levels": 0,
            "all_levels": 1,
        }
        for k in range(1, depth + 1):
            step = {
                "step": k,
                "prefix": schedule[: k - 1],
                "action": bits[k - 1],
                "future": schedule[k:],
                "step_ms": MID_MS if bits[k - 1] else SMALL_MS,
            }
            rows.append({**outcome, **step, **signals[schedule[: k - 1]]})
    return rows


def place_of(
    task: str, prompt: int, turn: int, position: int, prompt_tokens: int
) -> dict[str, Any]:
    """Return ids and token counts of a state, as stage=collect writes them."""
    return {
        "prompt_id": f"p{prompt:04d}",
        "turn": turn,
        "position": position,
        "state_id": f"{task}/p{prompt:04d}/{turn}/{position}",
        "prompt_tokens": prompt_tokens,
        "context_tokens": prompt_tokens + position,
    }


def write_parts(folder: Path, by_task: dict[str, list[dict[str, Any]]]) -> list[Path]:
    """Write one file a task below the folder of a pair."""
    paths = []
    for task, rows in by_task.items():
        (folder / f"task={task}").mkdir(parents=True)
        paths.append(folder / f"task={task}" / "part-0.parquet")
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), paths[-1])
    return paths


def write_trajectories(data: Path, pair: str, states: int, seed: int = 0) -> list[Path]:
    """Write ``states`` sampled states, four a prompt, one file a task, as stage=collect would."""
    rng = np.random.default_rng(seed)
    by_task: dict[str, list[dict[str, Any]]] = {}
    for state in range(states):
        prompt = state // 4
        task = TASKS[prompt % len(TASKS)]
        place = place_of(task, prompt, 0, 2 + 3 * (state % 4), int(rng.integers(20, 200)))
        by_task.setdefault(task, []).extend(state_rows(rng, place, DEPTH))
    return write_parts(data / "trajectories" / "collect" / f"pair={pair}", by_task)


def write_texts(
    data: Path,
    pair: str,
    prompts: int,
    length: int,
    seed: int = 0,
    split: str = "collect",
    depth: int = DEPTH,
    tasks: tuple[str, ...] = TASKS,
) -> list[Path]:
    """Write whole texts: all positions of every turn, two turns for every third prompt."""
    rng = np.random.default_rng(seed)
    by_task: dict[str, list[dict[str, Any]]] = {}
    for prompt in range(prompts):
        task, prompt_tokens = tasks[prompt % len(tasks)], int(rng.integers(20, 200))
        for turn in range(2 if prompt % 3 == 0 else 1):
            for position in range(1, length + prompt % 3 + 1):
                place = place_of(task, prompt, turn, position, prompt_tokens + 50 * turn)
                by_task.setdefault(task, []).extend(state_rows(rng, place, depth))
    return write_parts(data / "trajectories" / split / f"pair={pair}", by_task)
