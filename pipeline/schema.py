"""The trajectory table: one row for each step of each schedule at each decoding state.

Documented column by column in ``data/README.md``. The schema's version is in the Parquet files'
metadata and in the manifest of their dataset.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.parts import REPAIR, finished_files
from treegraft_core import InputError
from treegraft_core.signals import SIGNALS

SCHEMA_VERSION = 2
VERSION_KEY = b"treegraft.schema_version"
RULES_KEY = b"treegraft.drafting"
PARTITIONS = ("pair", "task")

IDS = {
    "prompt_id": pa.string(),
    "turn": pa.int16(),
    "position": pa.int32(),
    "state_id": pa.string(),
}
STEP = {
    "step": pa.int16(),
    "schedule": pa.string(),
    "prefix": pa.string(),
    "action": pa.int8(),
    "future": pa.string(),
}
FEATURES = {
    "prompt_tokens": pa.int32(),
    "context_tokens": pa.int32(),
    "target_ms": pa.float64(),
    "mid_ms": pa.float64(),
    **{name: pa.float64() for name in SIGNALS},
}
OUTCOME = {
    "accepted": pa.int16(),
    "committed": pa.int16(),
    "t_draft_ms": pa.float64(),
    "t_verify_ms": pa.float64(),
    "step_ms": pa.float64(),
    "accepted_ranks": pa.list_(pa.int16()),
}
COUNTS = {
    "tree_nodes": pa.int32(),
    "kept_nodes": pa.int16(),
    "refresh_nodes": pa.int32(),
    "expand_nodes": pa.int32(),
    "all_nodes": pa.int32(),
    "pool_nodes": pa.int32(),
    "earlier_picks": pa.int16(),
    "refresh_levels": pa.int16(),
    "all_levels": pa.int16(),
}
COLUMNS = {**IDS, **STEP, **FEATURES, **OUTCOME, **COUNTS}
BAD_PARQUET = (OSError, pa.ArrowException, ValueError, TypeError, RecursionError, MemoryError)
"""What reading damaged bytes as Parquet may raise; `MemoryError` for a length that was changed."""
MOST_ROWS_PER_BYTE = 100
"""A row takes about 20 bytes, and never so little, whatever a damaged footer says."""
SCHEMA = pa.schema(list(COLUMNS.items()), metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})


def check_rules(path: Path, metadata: dict[bytes, bytes], rules: dict[str, Any] | None) -> None:
    """Compare the drafting rules in a file's metadata with ``rules``.

    B_ver may have been larger: what a smaller one would have kept follows from the log.
    """
    if rules is None:
        return
    for name, value in logged_rules(metadata).items():
        smaller = name == "verify_nodes" and rules.get(name, value) < value
        if rules.get(name) != value and not smaller:
            most = " or less" if name == "verify_nodes" else ""
            raise InputError(
                f"drafting.{name}={rules.get(name)}: {path} was collected with {value}; give "
                f"drafting.{name}={value}{most}, or collect again"
            )


def logged_rules(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """Return the drafting rules in a file's metadata; nothing if it has none."""
    rules: dict[str, Any] = json.loads((metadata or {}).get(RULES_KEY, b"{}"))
    return rules


def logged_budgets(folder: Path) -> set[int]:
    """Return the B_ver that the files below ``folder`` were collected with, where they say so."""
    rules = [logged_rules(open_part(path).schema_arrow.metadata) for path in part_files(folder)]
    return {int(each["verify_nodes"]) for each in rules if "verify_nodes" in each}


def check_logged(rules: Any) -> None:
    """Raise `ValueError` if drafting rules in a file are none that collection writes."""
    known = isinstance(rules, dict) and all(
        isinstance(value, str) or type(value) is int for value in rules.values()
    )
    if not known or type(rules.get("verify_nodes", 1)) is not int:
        raise ValueError(f"{RULES_KEY.decode()} in its metadata are no drafting rules")


def part_files(folder: Path) -> list[Path]:
    """Return the Parquet files below ``folder`` that are to be read, sorted.

    Raises
    ------
    InputError
        If there is none, or one is not what its dataset's manifest says.
    """
    files = finished_files(folder) if folder.is_dir() else []
    if not files:
        raise InputError(
            f"trajectories={folder}: no trajectories there; run "
            "python -m pipeline.run stage=collect first"
        )
    return files


def open_part(path: Path, rules: dict[str, Any] | None = None) -> pq.ParquetFile:
    """Open a file of trajectories; check its version and the rules that it was collected with.

    Raises
    ------
    InputError
        If it is damaged, of another version, or of other rules.
    """
    if path.exists() and not path.is_file():
        raise damaged_part(path, "not a file: a folder, a pipe or a device")
    try:
        part = pq.ParquetFile(path, page_checksum_verification=True)
        metadata = part.schema_arrow.metadata or {}
        version = metadata.get(VERSION_KEY, b"none").decode()
        check_logged(logged_rules(metadata))
    except BAD_PARQUET as error:
        raise damaged_part(path, error) from error
    if version != str(SCHEMA_VERSION):
        raise InputError(
            f"trajectories={path}: schema version {version}, this version reads "
            f"{SCHEMA_VERSION}; collect again into an empty folder"
        )
    check_rules(path, metadata, rules)
    for field in part.schema_arrow:
        if COLUMNS.get(field.name, field.type) != field.type:
            wanted = COLUMNS[field.name]
            raise damaged_part(path, f"column {field.name} is {field.type}, not {wanted}")
    rows, size = part.metadata.num_rows, path.stat().st_size
    if not 0 <= rows <= MOST_ROWS_PER_BYTE * size:
        raise damaged_part(path, f"{rows} rows in {size} bytes")
    return part


def damaged_part(path: Path, error: BaseException | str) -> InputError:
    """Return the error for a file that has to be collected again."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return InputError(f"trajectories={path}: damaged Parquet file ({reason[:120]}); run {REPAIR}")


def partition(path: Path, folder: Path, key: str) -> str | None:
    """Return the value of ``key=`` in the folders between ``folder`` and the file."""
    for part in path.relative_to(folder).parts[:-1]:
        name, _, value = part.partition("=")
        if name == key:
            return unquote(value)
    return None


def read_trajectories(folder: Path, columns: list[str] | None = None) -> pd.DataFrame:
    """Read every Parquet file below ``folder``, with ``pair`` and ``task`` as columns.

    All rows at once, to look at; the stages read `pipeline.tries.Tries`.

    Raises
    ------
    InputError
        If there is none (collect has not run), a file is damaged, or the schema is of another
        version.
    """
    frames = []
    for path in part_files(folder):
        part = open_part(path)
        wanted = None if columns is None else [c for c in columns if c not in PARTITIONS]
        try:
            frame = part.read(columns=wanted).to_pandas()
        except BAD_PARQUET as error:
            raise damaged_part(path, error) from error
        for name in PARTITIONS:
            value = partition(path, folder, name)
            if value is not None and (columns is None or name in columns):
                frame[name] = value
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)
