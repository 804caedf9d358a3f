"""Collections as processes: started, killed at chosen instants, gone on with, and compared."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from pipeline.manifest import read_manifest
from pipeline.store import LocalStore
from tests.pipeline.conftest import overrides
from tests.processes import Template

STATE_ROWS = 24  # D · 2^D at the depth of these tests
QUICK = (
    "stage=collect",
    "collect.replay_rounds=0",
    "collect.prompts_per_task=0",
    "collect.states_per_turn=0",
    "collect.max_new_tokens=10",
    "drafting.depth=3",
    "drafting.width=3",
    "engine.start_method=fork",
)


@dataclass
class Bench:
    """A tiny pair, a template, and a folder for one test's datasets."""

    template: Template
    home: Path
    folder: Path
    output: str = ""

    @property
    def dataset(self) -> Path:
        return self.folder / "data" / "trajectories" / "collect" / "pair=tiny"

    def arguments(self, *extra: str) -> list[str]:
        places = (
            f"paths.data={self.folder / 'data'}",
            f"paths.profile={self.home / 'data' / 'profiles' / 'tiny'}",
        )
        return overrides(self.home, *places, *QUICK, *extra)

    def collect(
        self,
        *extra: str,
        faults: dict[str, Any] | None = None,
        kill: Any = None,
    ) -> int:
        """Run a collection; ``kill`` is called with its process id while it runs."""
        log = self.folder / "output.txt"
        log.unlink(missing_ok=True)
        pid = self.template.start(self.arguments(*extra), log, faults)
        if kill is not None:
            kill(pid)
        code = self.template.wait(pid)
        self.output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return code

    def until(self, pid: int, what: Any, seconds: float = 60.0) -> None:
        """Wait until ``what()`` holds or the collection has ended."""
        end = time.monotonic() + seconds
        while not what() and time.monotonic() < end:
            if not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie":
                return
            time.sleep(0.005)

    def started(self) -> bool:
        """Tell whether the collection has said what it is going to do."""
        log = self.folder / "output.txt"
        return log.exists() and "prompts to collect" in log.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of the collection's log."""
        log = self.folder / "data" / "trajectories" / "meta" / "tiny" / "log.jsonl"
        return [json.loads(x) for x in log.read_text().splitlines()] if log.exists() else []

    def parts(self) -> dict[str, str]:
        """Return the SHA-256 of every visible part file."""
        return {
            str(path.relative_to(self.dataset)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.dataset.rglob("*.parquet"))
            if not path.name.startswith(".")
        }

    def hidden(self) -> list[str]:
        """Return what is left of unfinished work."""
        return [str(p) for p in self.dataset.rglob(".*.tmp")]

    def units(self) -> dict[tuple[str, str], str]:
        """Return the status of each unit by the manifest; its lines must all be whole."""
        found = read_manifest(LocalStore(self.dataset))
        assert not found.faults
        return {key: record["status"] for key, record in found.units.items()}

    def records(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's records of finished units by prompt."""
        found = read_manifest(LocalStore(self.dataset))
        return {key[1]: record for key, record in found.units.items()}


@dataclass
class Reader:
    """Reads whatever is visible in a dataset, all the time, as another user would."""

    dataset: Path
    torn: list[str] = field(default_factory=list)
    reads: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Reader:
        self.thread = threading.Thread(target=self._poll)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def _poll(self) -> None:
        seen: dict[str, int] = {}
        while not self.done.wait(0.02):
            before = self._place()
            try:
                self._look(seen)
            except FileNotFoundError as error:
                if self._place() == before:  # a new dataset may have been begun beside it
                    self.torn.append(str(error))

    def _place(self) -> int | None:
        return self.dataset.stat().st_ino if self.dataset.exists() else None

    def _look(self, seen: dict[str, int]) -> None:
        for path in self.dataset.rglob("*.parquet"):
            if path.name.startswith("."):
                continue
            stamp = path.stat().st_mtime_ns
            if seen.get(str(path)) != stamp:
                seen[str(path)] = stamp
                self._read(path)
        self._manifest()

    def _read(self, path: Path) -> None:
        self.reads += 1
        try:
            file = pq.ParquetFile(io.BytesIO(path.read_bytes()), page_checksum_verification=True)
            rows = file.read().num_rows
        except FileNotFoundError:
            raise
        except Exception as error:  # whatever a reader would see
            self.torn.append(f"{path}: {error}")
            return
        if rows == 0 or rows % STATE_ROWS:
            self.torn.append(f"{path}: {rows} rows")

    def _manifest(self) -> None:
        # What the manifest calls done must be there, whole, at that very moment.
        store = LocalStore(self.dataset)
        for name, record in read_manifest(store).files().items():
            if store.digest(name) != (record["bytes"], record["sha256"]):
                self.torn.append(f"{name}: not what the manifest says")
