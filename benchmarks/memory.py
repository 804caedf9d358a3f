"""Is the memory of a collecting worker flat? A long collection, and what its log says.

``python -m benchmarks.memory [--prompts N] [Hydra overrides]`` collects one state of each of N
training prompts (nothing is fitted on them) with one worker, into a folder that is removed, and
prints the worker's resident memory by the number of prompts that it had done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from pipeline.report import table

ROOT = Path(__file__).resolve().parent.parent
FEW = (
    "stage=collect",
    "engine.workers=1",
    "collect.states_per_turn=1",
    "collect.max_new_tokens=4",
    "collect.replay_rounds=0",
    "tracker=disabled",
    "task=file",
    "task.name=memory",
)


def memory_by_prompts(log: Path, prompts: int, blocks: int = 10) -> list[dict[str, float]]:
    """Return the worker's resident memory, MiB, in equal blocks of the prompts that it has done."""
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    # Other runs of the pair write to the same log, before it and beside it.
    mine = [e for e in events if str(e.get("unit", "")).startswith("task=memory,")]
    done = [e["memory_mib"] for e in mine if e["event"] in ("unit_done", "unit_empty")][-prompts:]
    return [
        {
            "prompts": int(part[-1]) + 1,
            "median MiB": float(np.median([done[i] for i in part])),
            "most MiB": max(done[i] for i in part),
        }
        for part in np.array_split(np.arange(len(done)), min(blocks, len(done)))
    ]


def main() -> int:
    """Collect, and print the table; exit status of the collection."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=260, help="characters of a prompt's line")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = ROOT / "data" / "prompts" / "train.jsonl"
        lines = source.read_text(encoding="utf-8").splitlines()
        lines = [x for x in lines if len(x) < options.longest][: options.prompts]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pipeline.run", *FEW]
        command += [f"task.path={folder / 'prompts.jsonl'}", "collect.prompts_per_task=0"]
        command += [f"paths.trajectories={folder / 'trajectories'}", *overrides]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        logs = ROOT.glob("data/trajectories/meta/*/log.jsonl")
        rows = memory_by_prompts(max(logs, key=lambda path: path.stat().st_mtime), len(lines))
        print(table(rows, f"resident memory of the worker over {len(lines)} prompts"))
    return code


if __name__ == "__main__":
    sys.exit(main())
