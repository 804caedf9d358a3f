"""A long run as one live table: on the terminal, for other terminals, and in the tracker."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text as RichText

from pipeline.dispatch import Tally
from pipeline.logs import event
from pipeline.manifest import FOLDER, now
from pipeline.report import Stage
from pipeline.secrets import redact
from pipeline.store import Store, is_url

STATUS = f"{FOLDER}/status.json"
LINE_S = 30.0
"""Between two lines where the output is no terminal."""
TRACKER_S = 5.0


class Progress:
    """Shows and records the state of a run while it goes on.

    Parameters
    ----------
    stage : Stage
        Whose tracker gets the rates.
    store : Store
        The dataset; ``_manifest/status.json`` in it is what ``stage=status`` reads.
    engine : str
        Who works, in words.
    before, total : int
        Units of this run's plan that were finished before it, and all of them.
    name : str
        The file in the dataset; a shard has one of its own.
    """

    def __init__(
        self, stage: Stage, store: Store, engine: str, before: int, total: int, name: str = STATUS
    ):
        self.name = name
        self.stage, self.store, self.engine = stage, store, engine
        self.before, self.total = before, total
        self.started = time.monotonic()
        self.file_s = 15.0 if is_url(store.url) else 1.0
        self.next_file = self.next_line = self.next_tracker = self.started
        self.console = Console()
        self.live = Live(console=self.console, auto_refresh=False) if sys.stdout.isatty() else None
        self.ready: float | None = None
        self.beats = 0
        self.ended = False

    def terminal(self) -> logging.Handler | None:
        """Return the handler for warnings that does not disturb the live table."""
        return RichHandler(console=self.console, show_path=False) if self.live else None

    def __enter__(self) -> Progress:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, tally: Tally) -> None:
        """Show the tally, as often as each place wants it."""
        at = time.monotonic()
        state = self.state(tally)
        last = tally.ended == tally.total
        if self.live is not None:
            self.live.update(render(state), refresh=True)
        elif at >= self.next_line or (last and not self.ended):
            self.next_line = at + LINE_S
            print(one_line(state), flush=True)
        if at >= self.next_file or last:
            self.next_file = at + self.file_s
            self.write(state)
        if at >= self.next_tracker or last:
            self.next_tracker = at + TRACKER_S
            self.stage.log({f"collect/{k}": state[k] for k in TRACKED if state[k] is not None})
        self.ended = last

    def write(self, state: Mapping[str, Any]) -> None:
        """Write the state for ``stage=status``."""
        self.beats += 1
        data = json.dumps(redact({**state, "beat": self.beats}), indent=1).encode()
        try:
            self.store.write(self.name, data)
        except OSError as error:  # the run's own writes decide whether it can go on
            event("status_not_written", "warning", reason=str(error))

    def state(self, tally: Tally) -> dict[str, Any]:
        """Return the figures that are shown."""
        elapsed = time.monotonic() - self.started
        if self.ready is None and any(w["state"] != "starting" for w in tally.workers.values()):
            self.ready = time.monotonic()
        # By the time since there are models: loading them says nothing about the rest.
        working = 0.0 if self.ready is None else time.monotonic() - self.ready
        worked = tally.ended / working if working > 0 else 0.0
        left = tally.total - tally.ended
        return {
            "engine": self.engine,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "updated": now(),
            "elapsed_s": round(elapsed, 1),
            "prompts": self.total,
            "finished": self.before + tally.finished["done"] + tally.finished["empty"],
            "failed": tally.finished["failed"],
            "left": left,
            "retries": tally.retries,
            "workers_lost": tally.lost,
            "done_twice": tally.again,
            "states": tally.states,
            "rows": tally.rows,
            "prompts_per_min": round(60 * worked, 2),
            "rows_per_s": round(tally.rows / working, 1) if working > 0 else 0.0,
            "eta_s": round(left / worked) if worked and left else (0 if not left else None),
            "memory_mib": max(
                (w.get("memory_mib", 0.0) for w in tally.workers.values()), default=0.0
            ),
            "failures": [f["reason"] for f in tally.failures[-5:]],
            "workers": {str(number): dict(w) for number, w in tally.workers.items()},
        }


TRACKED = (
    "finished",
    "failed",
    "left",
    "retries",
    "workers_lost",
    "states",
    "rows",
    "prompts_per_min",
    "rows_per_s",
    "eta_s",
    "memory_mib",
)


def duration(seconds: float | None) -> str:
    """Return a duration as 1 h 02 min, 3 min 04 s or 5 s; a dash if it is not known."""
    if seconds is None:
        return "–"
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 60} min {seconds % 60:02d} s" if seconds >= 60 else f"{seconds} s"


def one_line(state: Mapping[str, Any]) -> str:
    """Return the state as one line."""
    return (
        f"collect: {state['finished']} of {state['prompts']} prompts, {state['failed']} failed, "
        f"{state['rows']:,} rows, {state['prompts_per_min']:g} prompts/min, "
        f"ETA {duration(state['eta_s'])}, {len(state['workers'])} workers, "
        f"{state['memory_mib']:,.0f} MiB"
    )


def figures(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the state's names and values, in words."""
    return [
        ("prompts", f"{state['finished']} of {state['prompts']}"),
        ("failed", str(state["failed"])),
        ("tried again", str(state["retries"])),
        ("workers lost", str(state["workers_lost"])),
        ("rows", f"{state['rows']:,}"),
        ("rate", f"{state['prompts_per_min']:g} prompts/min, {state['rows_per_s']:,.0f} rows/s"),
        ("elapsed", duration(state["elapsed_s"])),
        ("ETA", duration(state["eta_s"])),
        ("largest worker", f"{state['memory_mib']:,.0f} MiB"),
    ]


def worker_rows(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row a worker."""
    return [
        {
            "worker": number,
            "where": w.get("where", ""),
            "state": w.get("state", ""),
            "prompts": w.get("units", 0),
            "MiB": w.get("memory_mib", 0.0),
            "at": w.get("unit", ""),
        }
        for number, w in state["workers"].items()
    ]


def render(state: Mapping[str, Any]) -> Group:
    """Return the state as a table for a terminal."""
    top = Table(title=f"collect, {state['engine']}", show_header=False, title_justify="left")
    for name, value in figures(state):
        top.add_row(name, value)
    return Group(top, _grid(worker_rows(state)), *map(RichText, state["failures"]))


def _grid(rows: Sequence[Mapping[str, Any]]) -> Table:
    grid = Table(*(rows[0] if rows else ()))
    for row in rows:
        grid.add_row(*(RichText(str(value)) for value in row.values()))
    return grid
