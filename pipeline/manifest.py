"""The manifest of a dataset: which units of work are finished, and what their files must be.

It is append-only: every run writes a segment of its own, ``_manifest/NUMBER-RUN.jsonl``, a JSON
object a line with a checksum in each. The first line says what the dataset is; the last line about
a unit counts. A line that is torn or changed is named and taken as not there, so its unit is
collected again.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from pipeline.store import Store

FORMAT = 1
FOLDER = "_manifest"
LONGEST_NAME = 120
LONGEST_LINE = 1 << 20
MOST_LINES = 512
STATUSES = ("done", "empty", "failed", "discarded")
NUMBERS = ("bytes", "rows", "states", "turns")
COUNTS = ("paths", "A small", "A mid", "A best", "ties")
HEADER = f"{FOLDER}/00000-dataset.jsonl"
"""A copy of the line that says what the dataset is, beside the ones that segments begin with."""
SEGMENT = re.compile(rf"{FOLDER}/(\d+)-\w+\.jsonl")

UnitKey = tuple[str, str]
"""Task and prompt id."""


def part_name(task: str, prompt_id: str) -> str:
    """Return the name of a unit's Parquet file inside the dataset of its pair."""
    return f"task={_short(task)}/part-{_short(prompt_id)}.parquet"


def _short(text: str) -> str:
    # A file system's names are limited. No quoted text has a "=": none is taken for a digest.
    quoted = quote(text, safe="")
    if len(quoted) <= LONGEST_NAME:
        return quoted
    return f"sha256={hashlib.sha256(quoted.encode()).hexdigest()[:32]}"


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a digest of a dataset's config, which every line about a unit carries."""
    return hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()[:16]


def seal(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line with its checksum."""
    text = json.dumps(dict(record), ensure_ascii=True, allow_nan=False)
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def unseal(line: bytes) -> dict[str, Any]:
    """Return the record of a line.

    Raises
    ------
    ValueError
        If the line is torn or changed.
    """
    if len(line) > LONGEST_LINE:
        raise ValueError("too long")
    if not line.endswith(b"\n"):
        raise ValueError("cut off")
    found = re.fullmatch(rb'(\{.*), "crc": "([0-9a-f]{8})"\}\n', line, re.DOTALL)
    if found is None:
        raise ValueError("not a line of a manifest")
    text = found[1] + b"}"
    if zlib.crc32(text) != int(found[2], 16):
        raise ValueError("its checksum differs")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(record, dict):
        raise ValueError("not an object")
    return record


def check_unit(record: Mapping[str, Any]) -> UnitKey:
    """Return the key of a unit's record; raise `ValueError` if a field cannot be right."""
    key = record.get("task"), record.get("prompt")
    if not all(isinstance(part, str) for part in key):
        raise ValueError("no task and prompt")
    if record.get("status") not in STATUSES:
        raise ValueError(f"status {record.get('status')!r} is not one of {', '.join(STATUSES)}")
    if record["status"] == "done":
        task, prompt = str(key[0]), str(key[1])
        # The name follows from the unit, so no manifest can name a file elsewhere.
        if record.get("file") != part_name(task, prompt):
            raise ValueError(f"file {record.get('file')!r} is not that of its unit")
        if not re.fullmatch("[0-9a-f]{64}", str(record.get("sha256"))):
            raise ValueError("no SHA-256")
        for name in (*NUMBERS, *COUNTS):
            value = record.get(name)
            least = int(name in NUMBERS)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} {value!r} is not a whole number from {least}")
    if not isinstance(record.get("reason", ""), str):
        raise ValueError("a reason that is no text")
    if record["status"] != "done" and "reason" not in record:
        raise ValueError("no reason")
    return str(key[0]), str(key[1])


@dataclass(frozen=True)
class Fault:
    """A line that does not count: where it is, and what is wrong with it."""

    where: str
    what: str


@dataclass
class Manifest:
    """What the segments of a dataset say.

    Attributes
    ----------
    header : dict or None
        The dataset's first line; None if there is no dataset.
    units : dict of (task, prompt id) to dict
        The last record of each unit.
    faults : list of Fault
        Lines that are torn or changed.
    segments : int
        The highest number of a segment.
    """

    header: dict[str, Any] | None = None
    units: dict[UnitKey, dict[str, Any]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    segments: int = 0
    _early: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def finished(self) -> dict[UnitKey, dict[str, Any]]:
        """Return the units that need not be collected again: done, or found to have no states."""
        return {k: r for k, r in self.units.items() if r["status"] in ("done", "empty")}

    def files(self) -> dict[str, dict[str, Any]]:
        """Return the records of the part files by name."""
        return {r["file"]: r for r in self.units.values() if r["status"] == "done"}

    def add(self, name: str, data: bytes) -> None:
        """Read one segment."""
        for number, line in enumerate(data.splitlines(keepends=True), start=1):
            where = f"{name}, line {number}"
            try:
                record = unseal(line)
                if record.get("kind") == "dataset":
                    self._header(record)
                elif record.get("kind") == "unit":
                    self._unit(where, record)
                else:
                    raise ValueError(f"kind {record.get('kind')!r} is unknown")
            except ValueError as error:
                self._fault(where, error)

    def _fault(self, where: str, error: ValueError) -> None:
        self.faults.append(Fault(where, f"{error}; its unit will be collected again"))

    def _header(self, record: dict[str, Any]) -> None:
        if record.get("format") != FORMAT:
            raise ValueError(f"format {record.get('format')!r}; this version reads {FORMAT}")
        if not isinstance(record.get("config"), dict):
            raise ValueError("no config")
        if self.header is None:
            self.header = record
            for where, early in self._early:
                try:
                    self._unit(where, early)
                except ValueError as error:
                    self._fault(where, error)
            self._early.clear()
        elif self.header["config"] != record["config"]:
            raise ValueError("another config than the segments before it")

    def _unit(self, where: str, record: dict[str, Any]) -> None:
        # The line of the dataset may be damaged where it stands first: another copy comes.
        key = check_unit(record)
        if self.header is None:
            self._early.append((where, record))
        elif record.get("config") != config_hash(self.header["config"]):
            raise ValueError("of a dataset with another config")
        else:
            self.units[key] = record


def manifest_of(files: Mapping[str, bytes]) -> Manifest:
    """Return what the segments among some files say, in order; a damaged line is a fault."""
    found = Manifest()
    segments = [(int(m[1]), name) for name in files if (m := SEGMENT.fullmatch(name))]
    for number, name in sorted(segments):
        found.segments = max(found.segments, number)
        found.add(name, files[name])
    return found


def read_manifest(store: Store) -> Manifest:
    """Read all segments of a dataset."""
    return manifest_of({n: store.read(n) for n in store.names() if SEGMENT.fullmatch(n)})


def header_record(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record that says what a dataset is."""
    known = {"hash": config_hash(header["config"]), "created": now()}
    return {"kind": "dataset", "format": FORMAT, **header, **known}


class Segment:
    """The segment that one run writes.

    Parameters
    ----------
    store : Store
        The dataset.
    number : int
        One more than the highest segment there.
    header : mapping
        The first line.
    """

    def __init__(self, store: Store, number: int, header: Mapping[str, Any]):
        self.store, self.number = store, number
        self.run = uuid.uuid4().hex[:8]
        self.header = header_record(header)
        self.hash = self.header["hash"]
        self._lines = 0

    @property
    def name(self) -> str:
        """The file that the next line goes to."""
        return f"{FOLDER}/{self.number:05d}-{self.run}.jsonl"

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a unit's record; it is on the disk on return.

        Raises
        ------
        FileNotFoundError
            If somebody has removed the segment since its last line.
        """
        line = seal({"kind": "unit", "config": self.hash, **record, "at": now()})
        if self._lines == MOST_LINES:  # an object is written anew for each of its lines
            self.number, self._lines = self.number + 1, 0
        if not self._lines:
            # One write for both: a segment without its first line says nothing.
            line = seal(self.header) + line
        self.store.append(self.name, line, new=not self._lines)
        self._lines += 1


def now() -> str:
    """Return the time, for people: nothing is decided by it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what differs between two configs of a dataset, key by key."""
    return [
        f"{name}: {old.get(name)!r} in the dataset, {new.get(name)!r} now"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def discard(segment: Segment, keys: Iterable[UnitKey], reason: str) -> None:
    """Record that units have to be collected again."""
    for task, prompt in keys:
        segment.add({"task": task, "prompt": prompt, "status": "discarded", "reason": reason})


def within(name: str) -> bool:
    """Tell whether a name is one of a part file, not of the manifest or a temporary file."""
    path = PurePosixPath(name)
    return path.suffix == ".parquet" and not any(p.startswith((".", "_")) for p in path.parts)
