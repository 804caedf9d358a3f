"""How the cost of a state grows with depth, width, context and packing, and what memory it takes.

Random-weight drafter, random text (see ``benchmarks/shapes.py``). Times are taken alternately over
all rows in this process; memory in a fresh process a row, which no other row's allocations touch.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from benchmarks.shapes import Shape, random_model, random_text
from benchmarks.timing import Measured, alternate, cell, spread
from pipeline.rows import pack_memory
from treegraft_core import Context, DraftingConfig, InputError
from treegraft_core.enumeration import Enumeration, enumerate_states
from treegraft_core.models import CachedModel
from treegraft_core.pair import resolve_device, resolve_dtype
from treegraft_core.tree import FloatArray

STATES = 8
PACKS = (1, 4, 16, 64)
MARGIN = 24
"""Tokens of the text after the last root."""


@dataclass(frozen=True)
class Row:
    """One measurement: ``states`` states in packs of at most ``pack`` (0: as many as fit)."""

    depth: int = 5
    width: int = 10
    context: int = 128
    states: int = STATES
    pack: int = 0

    def drafting(self) -> DraftingConfig:
        """Return its drafting configuration."""
        return DraftingConfig(depth=self.depth, width=self.width)


@dataclass(frozen=True)
class Setting:
    """What all rows share; memory in bytes, threads as in ``engine.threads``."""

    shape: Shape
    device: str
    dtype: str
    memory: int
    threads: int = 0

    def model(self) -> Any:
        """Create the drafter."""
        if self.threads:
            torch.set_num_threads(self.threads)
        return random_model(
            self.shape.config(), resolve_dtype(self.dtype, self.device), self.device
        )


def groups(states: int) -> dict[str, list[Row]]:
    """Return the rows of each table; the first is what the others are compared with."""
    return {
        "depth": [Row(depth=d, states=states) for d in range(3, 9)],
        "width": [Row(width=w, states=states) for w in (5, 10, 20)],
        "context": [Row(context=c, states=states) for c in (128, 1024, 4096)],
        "pack": [Row(states=max(p, 2 * states), pack=p) for p in PACKS],
    }


class Prepared:
    """A drafter that has read a text, at which rows of one context length are enumerated."""

    def __init__(self, model: Any, context: int, states: int):
        vocab = model.get_input_embeddings().weight.shape[0]
        tokens, log_p = random_text(context + states + MARGIN, vocab)
        self.context = Context(tokens, log_p)
        self.vocab = vocab
        self.model = CachedModel(model)
        read = context + states
        self.model.run(tokens[:read], np.arange(read), rows=np.zeros(0, np.int64))

    def enumerate(self, row: Row, memory: int) -> Enumeration:
        """Enumerate the row's states."""
        roots = range(row.context, row.context + row.states)
        return enumerate_states(
            self.model,
            self.context,
            roots,
            row.drafting(),
            None,
            self.vocab,
            memory=memory,
            pack=row.pack,
        )


def resident(field: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (most since the mark was reset), bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise InputError(f"/proc/self/status: has no {field}; growth measures memory on Linux only")


def peak_of(call: Any, device: str) -> int:
    """Return the memory that a call takes at most beyond what there was, bytes."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return resident("VmHWM") - before


def measure_peak(row: Row, setting: Setting) -> int | None:
    """Return the peak of a row in this process, None if one state alone exceeds the budget."""
    model = setting.model()
    # Loads the compiled loops and the libraries' own buffers, which are no part of a pack.
    Prepared(model, 32, 1).enumerate(Row(2, 2, 32, 1), setting.memory)
    ready = Prepared(model, row.context, row.states)
    try:
        return peak_of(lambda: ready.enumerate(row, setting.memory), setting.device)
    except InputError:
        return None


def measure_peaks(rows: Iterable[Row], setting: Setting) -> dict[Row, int | None]:
    """Return `measure_peak` of each row, each in a fresh process (imports are made once)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return {row: pool.submit(measure_peak, row, setting).result() for row in rows}


@dataclass(frozen=True)
class Result:
    """What one row cost: seconds a state of each repeat; counts a state; peak in bytes."""

    s: FloatArray
    paths: float
    nodes: float
    passes: float
    peak: int


def measure_rows(rows: Sequence[Row], setting: Setting, repeats: int) -> dict[Row, Result | None]:
    """Measure every row: memory alone, times alternately; None if a state exceeds the budget."""
    peaks = measure_peaks(rows, setting)
    fitting = [row for row in rows if peaks[row] is not None]
    model = setting.model()
    most = {c: max(r.states for r in rows if r.context == c) for c in {r.context for r in rows}}
    ready = {context: Prepared(model, context, states) for context, states in most.items()}
    found: dict[Row, Enumeration] = {}

    def enumerate_row(row: Row) -> None:
        found[row] = ready[row.context].enumerate(row, setting.memory)

    times = alternate({row: partial(enumerate_row, row) for row in fitting}, repeats)
    results: dict[Row, Result | None] = dict.fromkeys(rows)
    for row, f in found.items():
        n = row.states
        nodes, peak = float(f.tree_nodes.sum()) / n, peaks[row]
        results[row] = Result(times[row] / n, f.paths / n, nodes, f.passes / n, peak or 0)
    return results


def line(name: str, row: Row, result: Result, base: tuple[Row, Result], memory: int) -> dict:
    """Return one line of a table, with ratios to its first row."""
    ms = 1e3 * float(np.median(result.s))
    return {
        name: getattr(row, name),
        "ms a state": cell(1e3 * result.s),
        "states/s": 1e3 / ms,
        "paths": result.paths,
        "nodes": result.nodes,
        "passes": result.passes,
        "ms a path": ms / result.paths,
        "cost ×": float(np.median(result.s / base[1].s)),
        "paths ×": result.paths / base[1].paths,
        "2^D ×": 2.0 ** (row.depth - base[0].depth),
        "peak GiB": result.peak / 2**30,
        "budget GiB": memory / 2**30,
        "within": "yes" if result.peak <= memory else "NO",
    }


def measure(tables: dict[str, list[Row]], setting: Setting, repeats: int) -> Measured:
    """Measure the rows of all tables and lay them out; a row over the budget is a failure."""
    rows = list(dict.fromkeys(row for group in tables.values() for row in group))
    results = measure_rows(rows, setting, repeats)
    done = Measured(values={"setting": asdict(setting), "rows": []})
    for name, group in tables.items():
        there = [(row, result) for row in group if (result := results[row])]
        done.tables[f"growth with {name}; counts a state"] = [
            line(name, row, result, there[0], setting.memory) for row, result in there
        ]
    for row, result in results.items():
        if result is None:
            done.notes.append(f"{row}: one state alone exceeds the budget, so it is refused")
            continue
        values = {**asdict(result), "s": spread(result.s)}
        done.values["rows"].append({**asdict(row), **values})
        if result.peak > setting.memory:
            done.failures.append(
                f"{row}: took {result.peak / 2**30:.3f} GiB, the budget (collect.memory_gb) is "
                f"{setting.memory / 2**30:g}"
            )
    return done


def run(conf: DictConfig, states: int | None, repeats: int) -> Measured:
    """Measure on the configured device, dtype and budget."""
    device = resolve_device(str(conf.engine.device))
    setting = Setting(
        Shape(), device, str(conf.engine.dtype), pack_memory(conf), int(conf.engine.threads)
    )
    done = measure(groups(states or STATES), setting, repeats)
    done.notes.append(
        f"random-weight drafter ({setting.shape}), Zipf text with repeated spans; cost, paths and "
        "2^D are relative to each table's first row; nodes: of all 2^D trees of a state; peak: "
        f"beyond weights and text, {'device' if device.startswith('cuda') else 'resident'} memory"
    )
    return done
