"""stage=status: what is collected, and how the runs that collect now get on. It only reads."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.dataset import WHOLE
from pipeline.manifest import Manifest, read_manifest
from pipeline.parts import run_states
from pipeline.progress import figures, worker_rows
from pipeline.report import table
from pipeline.secrets import redact
from pipeline.store import Store, below, open_store
from pipeline.verify import command
from treegraft_core import InputError

DATASET = re.compile(r"(collect|evaluate)/pair=([^/]+)/")
COLLECT = "python -m pipeline.run stage=collect"
MOST_FAILURES = 5


@dataclass(frozen=True)
class Seen:
    """One dataset as it is at this moment.

    Attributes
    ----------
    split, pair : str
        Which.
    manifest : Manifest
        What is finished.
    holder : str or None
        Who collects into it now.
    states : list of dict
        What its last runs wrote of themselves, each under ``figures`` and ``workers`` in words.
    """

    split: str
    pair: str
    manifest: Manifest
    holder: str | None
    states: list[dict[str, Any]]

    @property
    def live(self) -> list[dict[str, Any]]:
        """The figures of the run that goes on; none if it has not written any yet."""
        # Shards share the lock, whose file does not name them.
        shards = [s for s in self.states if len(self.states) > 1 and s.get("left", 0) > 0]
        mine = [
            s for s in self.states if f"{s.get('pid')} on {s.get('host')}" in (self.holder or "")
        ]
        return (mine or shards) if self.holder else []

    @property
    def left(self) -> int:
        """Prompts that the last runs did not get to."""
        return sum(int(state.get("left", 0)) for state in self.states)


def look(conf: DictConfig) -> list[Seen]:
    """Return all datasets below ``paths.trajectories``, those of the configured pair first."""
    home = str(conf.paths.trajectories)
    found = {m.groups() for name in open_store(home).names() if (m := DATASET.match(name))}
    ours = str(conf.pair.name)
    seen = []
    for split, pair in sorted(found, key=lambda each: (each[1] != ours, each[1], each[0])):
        store = open_store(below(home, f"{split}/pair={pair}"))
        try:
            seen.append(_look(store, split, pair))
        except FileNotFoundError:  # a run has just moved it aside
            continue
    return seen


def _look(store: Store, split: str, pair: str) -> Seen:
    holder = store.held(WHOLE)
    states = [_in_words(state) for state in run_states(store)]
    return Seen(split, pair, read_manifest(store), holder, states)


def _in_words(state: dict[str, Any]) -> dict[str, Any]:
    try:
        return {**state, "figures": figures(state), "workers": worker_rows(state)}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {"damaged": state.get("damaged", "of another version")}


def summary(seen: Seen) -> dict[str, Any]:
    """Return a dataset as a row."""
    records = seen.manifest.units.values()
    count = Counter(record["status"] for record in records)
    done = [record for record in records if record["status"] == "done"]
    last = max(seen.states, key=lambda s: str(s.get("updated", "")), default={})
    return {
        "pair": seen.pair,
        "split": seen.split,
        "done": count["done"],
        "empty": count["empty"],
        "failed": count["failed"],
        "to repair": count["discarded"],
        "rows": sum(record["rows"] for record in done),
        "MiB": round(sum(record["bytes"] for record in done) / 2**20, 2),
        "last run": str(last.get("engine", "–")),
        "at": str(last.get("updated", "–")),
        "now": "running" if seen.holder else "not running",
    }


def go_on(conf: DictConfig, seen: Seen) -> str:
    """Return the command that goes on with a dataset."""
    if seen.pair == str(conf.pair.name) and seen.split == str(conf.collect.split):
        return command(COLLECT)
    split = " collect.split=evaluate" if seen.split == "evaluate" else ""
    return f"{COLLECT} pair={seen.pair}{split}, and the overrides that it was begun with"


def details(conf: DictConfig, seen: Seen) -> list[str]:
    """Return what else there is to say of a dataset: its run, or what it lacks."""
    name = f"{seen.pair}, {seen.split}"
    lines = [f"{name}: {f.where}: {f.what}" for f in seen.manifest.faults[-MOST_FAILURES:]]
    if seen.manifest.header is None:
        lines.append(f"{name}: no manifest that says what it is; stage=verify says what to do")
    damaged = [str(state["damaged"]) for state in seen.states if "damaged" in state]
    lines += [f"{name}: the figures of a run cannot be read ({which})" for which in damaged]
    if seen.holder:
        lines.append(f"{name}: {seen.holder} is collecting")
        if not seen.live:
            lines.append("  it has not written figures yet")
        for state in seen.live:
            rows = [{"figure": key, "value": value} for key, value in state["figures"]]
            lines += ["", table(rows, f"{state['engine']}, {state['updated']}")]
            lines += ["", table(state["workers"], "workers")]
            lines += [f"  failed: {reason}" for reason in state.get("failures", [])]
        return lines
    failed = [r for r in seen.manifest.units.values() if r["status"] == "failed"]
    lines += [f"{name}: failed: {r.get('reason', '')}" for r in failed[-MOST_FAILURES:]]
    again = sum(r["status"] in ("failed", "discarded") for r in seen.manifest.units.values())
    if seen.left or again:
        left = f"{seen.left} prompts were left when the last run ended; " if seen.left else ""
        lines.append(f"{name}: not running; {left}go on with: {go_on(conf, seen)}")
    return lines


def text(conf: DictConfig) -> str:
    """Return everything as text."""
    seen, home = look(conf), str(conf.paths.trajectories)
    if not seen:
        return str(redact(f"no trajectories in {home}; {COLLECT} collects them"))
    parts = [table([summary(each) for each in seen], f"trajectories in {home}")]
    parts += ["\n".join(lines) for each in seen if (lines := details(conf, each))]
    shown = str(redact("\n\n".join(parts)))
    # Names and reasons come from files: no escape sequence of theirs reaches the terminal.
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in shown)


def run(conf: DictConfig) -> None:
    """Print what is collected; with ``status.watch`` again and again, until Ctrl-C."""
    watch = float(conf.status.watch)
    if watch < 0:
        raise InputError(f"status.watch={watch:g}: must be seconds, or 0 to look once")
    if not watch:
        print(text(conf), flush=True)
        return
    try:
        _watch(conf, watch)
    except KeyboardInterrupt:
        return


def _watch(conf: DictConfig, seconds: float) -> None:
    if not sys.stdout.isatty():
        while True:
            print(text(conf), end="\n\n", flush=True)
            time.sleep(seconds)
    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            live.update(Text(text(conf), no_wrap=True, overflow="ellipsis"), refresh=True)
            time.sleep(seconds)
