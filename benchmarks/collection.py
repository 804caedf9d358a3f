"""How much faster stage=collect gets with more workers, start-up left out.

python -m benchmarks.collection 1 2 -- pair=smollm2-135m collect.prompts_per_task=2

Each count of workers collects into an empty folder, with no texts decoded before (so do not give it
a paths.cache). The rate is of states from when the last worker was ready to the last prompt.
Processors that others use at the same time bound it, so their share is shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from pipeline.report import table

SAMPLE_S = 5.0
"""How long the use of the processors by others is watched before each run."""
LINKED = ("prompts", "drafters", "profiles", "cache/models")


def seconds_of(event: dict[str, Any]) -> float:
    """Return when a line of a log was written."""
    return datetime.fromisoformat(str(event["at"]).replace("Z", "+00:00")).timestamp()


def rate(log: Path) -> dict[str, float]:
    """Return states a second after start-up, and how long that took, s."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    done = [line for line in lines if line["event"] == "unit_done"]
    ready = max(seconds_of(line) for line in lines if line["event"] == "worker_ready")
    took = max(seconds_of(line) for line in done) - ready
    return {
        "prompts": len(done),
        "seconds": took,
        "states a second": sum(line["states"] for line in done) / took,
        "share of workers busy": sum(line["seconds"] for line in done) / took,
    }


def measure(workers: int, arguments: list[str], folder: Path) -> dict[str, Any]:
    """Collect with so many workers; return a row of the table."""
    # A data folder of its own: nobody else's run writes into its log.
    data = folder / "data"
    (data / "cache").mkdir(parents=True)
    for name in LINKED:
        if Path("data", name).exists():
            (data / name).symlink_to(Path("data", name).resolve())
    others = psutil.cpu_percent(SAMPLE_S) / 100 * (os.cpu_count() or 1)
    command = [sys.executable, "-m", "pipeline.run", "stage=collect", f"paths.data={data}"]
    command += ["collect.replay_rounds=0", f"engine.workers={workers}", "tracker=disabled"]
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
    own = next((data / "trajectories" / "meta").rglob("log.jsonl"))
    found = rate(own)
    found["share of workers busy"] /= workers
    return {"workers": workers, **found, "cores others used before": others}


def main() -> None:
    """Measure each count of workers on the command line and print a table."""
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    counts, arguments = [int(count) for count in sys.argv[1:split]], sys.argv[split + 1 :]
    rows = []
    for workers in counts or [1, 2]:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(workers, arguments, Path(folder)))
        rows[-1]["times the first"] = rows[-1]["states a second"] / rows[0]["states a second"]
    print(table(rows, f"stage=collect by workers, {os.cpu_count()} cores"))


if __name__ == "__main__":
    main()
