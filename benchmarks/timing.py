"""What the benchmarks share: alternate timing, medians with their spread, one result format."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.report import git_sha, machine, table
from treegraft_core.files import write_json
from treegraft_core.tree import FloatArray

PACKAGES = ("torch", "transformers", "numpy", "numba", "pyarrow")


@dataclass
class Measured:
    """What one benchmark found.

    Attributes
    ----------
    values : dict
        Everything that goes into its JSON file.
    tables : dict
        Title and rows of each table to print.
    notes : list of str
        Lines below the tables.
    failures : list of str
        What must not happen (records that differ, memory over the budget); exit status 1.
    """

    values: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def show(self) -> None:
        """Print tables, notes and failures."""
        for title, rows in self.tables.items():
            print("\n" + table(rows, title))
        for line in self.notes:
            print(line)
        sys.stdout.flush()
        for line in self.failures:
            print(f"FAILED: {line}", file=sys.stderr, flush=True)

    def write(self, path: Path, command: Sequence[str]) -> None:
        """Write the values as JSON, with what they depend on."""
        provenance = {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": list(command),
            "git_sha": git_sha(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in PACKAGES},
            "machine": machine(),
        }
        write_json(path, {**provenance, **self.values, "failures": self.failures})


def synchronize() -> None:
    """Wait for the GPU, so that a clock read next is honest; nothing to do without one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of a call, device included."""
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started


def alternate(calls: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, FloatArray]:
    """Time every call once a repeat, after one untimed run of each; seconds, shape ``[repeats]``.

    Every other repeat goes backwards, so that drift and what a call leaves in the caches hit all.
    """
    names = list(calls)
    for name in names:
        calls[name]()
    samples: dict[Any, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            samples[name].append(seconds(calls[name]))
    return {name: np.array(values) for name, values in samples.items()}


def spread(samples: FloatArray) -> dict[str, float]:
    """Return median and quartiles."""
    low, median, high = np.percentile(samples, [25, 50, 75])
    return {"median": float(median), "q25": float(low), "q75": float(high), "n": len(samples)}


def cell(samples: FloatArray) -> str:
    """Return median and quartiles as text, three significant digits."""
    s = spread(samples)
    return f"{short(s['median'])} ({short(s['q25'])} … {short(s['q75'])})"


def short(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
