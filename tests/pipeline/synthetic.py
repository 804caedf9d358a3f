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


def state_rows(rng: np.random.Generator, state: int) -> list[dict[str, Any]]:
    """Return the 160 rows of one state.

    A mid call costs 39 ms more than a small step. Where the rule's signal is above the threshold
    it brings one token more, which is worth it at every prefix; below, nothing.
    """
    level = float(rng.uniform(-4.0, 0.0))
    prompt_tokens = int(rng.integers(20, 200))
    prefixes = ["".join(p) for k in range(DEPTH) for p in product("01", repeat=k)]
    signals = {prefix: node_signals(rng, level) for prefix in prefixes}
    rows = []
    for bits in product((0, 1), repeat=DEPTH):
        schedule, calls = "".join(map(str, bits)), sum(bits)
        accepted = calls if level > THRESHOLD else 0
        draft_ms = MID_MS * calls + SMALL_MS * (DEPTH - calls)
        outcome = {
            "prompt_id": f"p{state // 4:04d}",
            "turn": 0,
            "position": state,
            "state_id": f"{TASKS[state // 4 % len(TASKS)]}/p{state // 4:04d}/0/{state}",
            "schedule": schedule,
            "prompt_tokens": prompt_tokens,
            "context_tokens": prompt_tokens + state % 4,
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
        }
        for k in range(1, DEPTH + 1):
            step = {
                "step": k,
                "prefix": schedule[: k - 1],
                "action": bits[k - 1],
                "future": schedule[k:],
                "step_ms": MID_MS if bits[k - 1] else SMALL_MS,
            }
            rows.append({**outcome, **step, **signals[schedule[: k - 1]]})
    return rows


def write_trajectories(data: Path, pair: str, states: int, seed: int = 0) -> list[Path]:
    """Write ``states`` states, four a prompt, one file a task, as stage=collect would."""
    rng = np.random.default_rng(seed)
    by_task: dict[str, list[dict[str, Any]]] = {}
    for state in range(states):
        by_task.setdefault(TASKS[state // 4 % len(TASKS)], []).extend(state_rows(rng, state))
    paths = []
    for task, rows in by_task.items():
        folder = data / "trajectories" / "collect" / f"pair={pair}" / f"task={task}"
        folder.mkdir(parents=True)
        paths.append(folder / "part-0.parquet")
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), paths[-1])
    return paths
