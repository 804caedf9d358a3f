"""Memory and time of the stages that fit, by rows: ``python -m benchmarks.scale``.

Trajectories with a planted rule, of 2 and of 20 million rows, in the schema of stage=collect, are
written to a temporary folder; value, label and distill run on them for one epoch each, as on real
ones, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.report import table
from pipeline.schema import COLUMNS, SCHEMA
from pipeline.tries import COUNTS, prefixes_of, schedules
from treegraft_core import PAPER_SIGNALS, SIGNALS
from treegraft_core.files import write_json

DEPTH, TURN_STATES, TURNS_A_FILE = 5, 50, 40
LEAVES, ROWS_A_STATE = 1 << DEPTH, DEPTH << DEPTH
TASKS = ("math", "code", "chat", "news", "facts", "story")
PAIR = "synthetic"
STAGES = ("value", "label", "distill")
ONE_EPOCH = (
    "value.max_epochs=1",
    "distill.max_epochs=1",
    "distill.rollout_epochs=1",
)


def rows(rng: np.random.Generator, first_turn: int, turns: int) -> pa.Table:
    """Return the rows of whole turns: a mid call is worth it where one signal says so."""
    states, prefixes = turns * TURN_STATES, LEAVES - 1
    taken = schedules(DEPTH)
    signals = rng.normal(size=(states, prefixes, len(SIGNALS)))
    level = rng.uniform(-4, 0, size=states)
    signals[..., SIGNALS.index("pre_reselect_score")] = level[:, None]
    calls = taken.sum(1)
    accepted = np.where(level[:, None] > -2, calls, 0) + (rng.random((states, LEAVES)) < 0.3)
    turn = first_turn + np.repeat(np.arange(turns), TURN_STATES)
    position = np.tile(np.arange(1, TURN_STATES + 1), turns)
    prompt_tokens = 30 + turn % 170
    texts = ["".join(map(str, row)) for row in taken.tolist()]
    ahead = prefixes_of(DEPTH)

    def each_state(values: Any) -> Any:
        return np.repeat(np.asarray(values), ROWS_A_STATE)

    def each_leaf(values: Any) -> Any:
        return np.repeat(np.asarray(values).reshape(-1), DEPTH)

    def text(codes: Any, names: list[str]) -> pa.Array:
        return pa.DictionaryArray.from_arrays(
            pa.array(np.asarray(codes), pa.int32()), pa.array(names, pa.string())
        )

    step = np.tile(np.arange(1, DEPTH + 1), states * LEAVES)
    leaf = each_leaf(np.tile(np.arange(LEAVES), states))
    ranks = np.repeat(accepted.reshape(-1), DEPTH)
    offsets = np.concatenate([[0], np.cumsum(ranks)])
    kept = 20 + 8 * np.tile(calls, (states, 1))
    names = range(first_turn, first_turn + turns)
    columns: dict[str, Any] = {
        "prompt_id": text(each_state(turn - first_turn), [f"p{t}" for t in names]),
        "turn": np.zeros(len(step)),
        "position": each_state(position),
        "state_id": text(
            each_state(np.arange(states)),
            [f"p{t}/0/{p}" for t, p in zip(turn.tolist(), position.tolist(), strict=True)],
        ),
        "step": step,
        "schedule": text(leaf, texts),
        "prefix": text(leaf * DEPTH + step - 1, [t[:k] for t in texts for k in range(DEPTH)]),
        "action": taken[leaf, step - 1],
        "future": text(leaf * DEPTH + step - 1, [t[k + 1 :] for t in texts for k in range(DEPTH)]),
        "prompt_tokens": each_state(prompt_tokens),
        "context_tokens": each_state(prompt_tokens + position),
        "target_ms": np.full(len(step), 80.0),
        "mid_ms": np.full(len(step), 8.0),
        "accepted": each_leaf(accepted),
        "committed": each_leaf(accepted + 1),
        "t_draft_ms": each_leaf(np.tile(8.0 * calls + 0.3 * (DEPTH - calls), (states, 1))),
        "t_verify_ms": each_leaf(60.0 + 0.4 * kept),
        "step_ms": np.where(taken[leaf, step - 1] > 0, 8.0, 0.3),
        "accepted_ranks": pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()),
            pa.array(np.arange(offsets[-1]) - np.repeat(offsets[:-1], ranks), pa.int16()),
        ),
        "kept_nodes": each_leaf(kept),
        **{name: np.full(len(step), 10) for name in COUNTS},
        **{name: np.full(len(step), 50) for name in ("tree_nodes", "pool_nodes", "earlier_picks")},
    }
    flat = ahead[leaf, step - 1] + each_state(np.arange(states)) * prefixes
    for i, name in enumerate(SIGNALS):
        columns[name] = signals[..., i].reshape(-1)[flat]
    return pa.table(
        {name: pa.array(columns[name]).cast(kind) for name, kind in COLUMNS.items()}, schema=SCHEMA
    )


def write_rows(data: Path, count: int, seed: int = 0) -> int:
    """Write at least ``count`` rows below ``data``; return how many."""
    rng = np.random.default_rng(seed)
    written = file = 0
    while written < count:
        task = TASKS[file % len(TASKS)]
        folder = data / "trajectories" / "collect" / f"pair={PAIR}" / f"task={task}"
        folder.mkdir(parents=True, exist_ok=True)
        part = rows(rng, file * TURNS_A_FILE, TURNS_A_FILE)
        pq.write_table(part, folder / f"part-{file}.parquet", compression="zstd")
        written, file = written + part.num_rows, file + 1
    selection = {"signals": list(PAPER_SIGNALS), "pairs": [PAIR], "cv": {}}
    write_json(data / "selection" / PAIR / "selection.json", selection)
    return written


def measure(data: Path, stage: str, overrides: list[str]) -> dict[str, float]:
    """Run a stage in a process of its own; return its wall time and its peak memory."""
    command = [sys.executable, "-m", "pipeline.run", f"stage={stage}", f"paths.data={data}"]
    fixed = ["pair=local", f"pair.name={PAIR}", "pair.target.path=none", "pair.mid.path=none"]
    started = time.monotonic()
    subprocess.run(
        [*command, *fixed, "tracker=disabled", *ONE_EPOCH, *overrides],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    seconds = time.monotonic() - started
    names = {"value": "value", "label": "labels", "distill": "distill"}
    found = json.loads((data / names[stage] / PAIR / "metrics.json").read_text())
    return {"seconds": seconds, "GiB": float(found["peak_memory_gib"])}


def main() -> None:
    """Print time and memory of every stage by rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000_000, 20_000_000])
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, such as hardware=range")
    given = parser.parse_args()
    found = []
    for count in given.rows:
        with tempfile.TemporaryDirectory(dir=Path("data"), prefix="scale-") as name:
            written = write_rows(Path(name), count)
            for stage in STAGES:
                cost = measure(Path(name), stage, given.overrides)
                found.append(
                    {
                        "stage": stage,
                        "rows": written,
                        "wall s": round(cost["seconds"], 1),
                        "s per million rows": cost["seconds"] / written * 1e6,
                        "peak GiB": cost["GiB"],
                    }
                )
                print(table(found[-1:]), flush=True)
    print(table(found, "one epoch of each stage, import included"))


if __name__ == "__main__":
    main()
