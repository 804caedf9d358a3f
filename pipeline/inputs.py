"""Reading what an earlier stage wrote: a missing or damaged file is one line that names the fix."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from treegraft_core import InputError

BAD_TABLE = (OSError, pa.ArrowException, ValueError, TypeError, RecursionError, MemoryError)
"""What reading damaged bytes as Parquet may raise; `MemoryError` for a length that was changed."""


def digest(value: Any, length: int = 16) -> str:
    """Return a short digest of plain data, to tell inputs apart."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:length]


def require(path: Path, stage: str) -> Path:
    """Return ``path``; raise `InputError` if ``stage`` has not written it yet."""
    if not path.is_file():
        raise InputError(f"{path}: not there; run python -m pipeline.run stage={stage} first")
    return path


def damaged(path: Path, stage: str, error: BaseException | str) -> InputError:
    """Return the error for a file that ``stage`` has to write again."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return InputError(
        f"{path}: damaged ({lines[0][:120]}); run python -m pipeline.run stage={stage} again"
    )


def read_json(path: Path, stage: str) -> dict[str, Any]:
    """Read a JSON object that ``stage`` wrote."""
    try:
        value = json.loads(require(path, stage).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or beyond Python's limits
        raise damaged(path, stage, error) from error
    if not isinstance(value, dict):
        raise damaged(path, stage, "not a JSON object")
    return value


def read_tensors(path: Path, stage: str) -> dict[str, Tensor]:
    """Read a safetensors file that ``stage`` wrote."""
    try:
        tensors: dict[str, Tensor] = load_file(require(path, stage))
    except (SafetensorError, OSError) as error:
        raise damaged(path, stage, error) from error
    return tensors


def read_table(path: Path, stage: str, key: bytes) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read a Parquet table that ``stage`` wrote, and the JSON object in its metadata."""
    try:
        table = pq.read_table(require(path, stage))
        header = json.loads((table.schema.metadata or {})[key])
        frame = table.to_pandas()
    except KeyError as error:
        raise damaged(path, stage, f"no {key.decode()} in its metadata") from error
    except BAD_TABLE as error:
        raise damaged(path, stage, error) from error
    if not isinstance(header, dict):
        raise damaged(path, stage, f"{key.decode()} in its metadata is no JSON object")
    return frame, header
