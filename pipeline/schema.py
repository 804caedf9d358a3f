"""The trajectory table: one row for each step of each schedule at each decoding state.

Documented column by column in ``data/README.md``. The schema's version is in the Parquet files'
metadata and in the folder's ``provenance.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from treegraft_core import InputError
from treegraft_core.signals import SIGNALS

SCHEMA_VERSION = 1
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
}
COLUMNS = {**IDS, **STEP, **FEATURES, **OUTCOME, **COUNTS}
SCHEMA = pa.schema(list(COLUMNS.items()), metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})


def check_rules(path: Path, metadata: dict[bytes, bytes], rules: dict[str, Any] | None) -> None:
    """Compare the drafting rules in a file's metadata with ``rules``."""
    if rules is None or RULES_KEY not in metadata:
        return
    for name, value in json.loads(metadata[RULES_KEY]).items():
        if rules.get(name) != value:
            raise InputError(
                f"drafting.{name}={rules.get(name)}: {path} was collected with {value}; give "
                f"drafting.{name}={value} or collect again"
            )


def read_trajectories(
    folder: Path, columns: list[str] | None = None, rules: dict[str, Any] | None = None
) -> pd.DataFrame:
    """Read every Parquet file below ``folder``, with ``pair`` and ``task`` as columns.

    ``rules`` are the drafting rules that the files must have been collected with.

    Raises
    ------
    InputError
        If there is none (collect has not run), a file is damaged, or the schema is of another
        version.
    """
    files = sorted(folder.rglob("*.parquet")) if folder.is_dir() else []
    if not files:
        raise InputError(
            f"trajectories={folder}: no trajectories there; run "
            "python -m pipeline.run stage=collect first"
        )
    frames = []
    for path in files:
        try:
            source = ds.dataset(path, format="parquet")
            metadata = source.schema.metadata or {}
            version = metadata.get(VERSION_KEY, b"none").decode()
            if version != str(SCHEMA_VERSION):
                raise InputError(
                    f"trajectories={path}: schema version {version}, this version reads "
                    f"{SCHEMA_VERSION}; collect again into an empty folder"
                )
            check_rules(path, metadata, rules)
            wanted = None if columns is None else [c for c in columns if c not in PARTITIONS]
            frame = source.to_table(columns=wanted).to_pandas()
        except InputError:
            raise
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"trajectories={path}: damaged Parquet file ({reason[:120]}); delete it and run "
                "python -m pipeline.run stage=collect again"
            ) from error
        for part in path.relative_to(folder).parts[:-1]:
            name, _, value = part.partition("=")
            if name in PARTITIONS and (columns is None or name in columns):
                frame[name] = unquote(value)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)
