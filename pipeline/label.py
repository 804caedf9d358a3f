"""stage=label: what calling the mid drafter is worth at every prefix (design section 4, step 4)."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig

from pipeline.features import (
    OUTCOMES,
    Trajectories,
    bad_rows,
    check_fitted,
    check_numerator,
    input_names,
    load_trajectories,
    scheduler_inputs,
    throughput,
    value_inputs,
)
from pipeline.inputs import damaged, read_table
from pipeline.report import stage_run
from pipeline.value import ValueModel, load_value
from treegraft_core import InputError
from treegraft_core.files import atomic_path
from treegraft_core.tree import FloatArray

HEADER_KEY = b"treegraft.labels"
STATE = ["pair", "state_id"]
KEYS = (*STATE, "prompt_id", "task", "step", "prefix")
LABELS = ("y", "y_hindsight")


def sort_complete(rows: Trajectories) -> Trajectories:
    """Sort rows by state, step and schedule; check that every state has all D · 2^D of them.

    Raises
    ------
    InputError
        Naming the first state that lacks or repeats a row: its prefixes do not have all
        2^(D−k+1) combinations of action and future.
    """
    depth = rows.depth
    order = rows.frame.sort_values([*STATE, "step", "schedule"], kind="stable").index
    frame = rows.frame.loc[order].reset_index(drop=True)
    schedules = ["".join(bits) for bits in product("01", repeat=depth)]
    listing = pd.MultiIndex.from_product([range(1, depth + 1), schedules])
    repeated = frame.duplicated([*STATE, "step", "schedule"])
    seen = repeated.groupby([frame[key] for key in STATE]).agg(["size", "any"])
    short = seen.index[seen["size"].ne(len(listing)) | seen["any"]]
    if len(short):
        pair, state = short[0]
        found = frame[(frame["pair"] == pair) & (frame["state_id"] == state)]
        distinct = found.drop_duplicates(["step", "schedule"])
        raise bad_rows(
            rows.folders[pair],
            f"have {len(found)} rows ({len(distinct)} distinct) of state {state}, not each "
            f"of the {len(listing)} combinations of step and schedule once",
        )
    return Trajectories(frame, rows.bits[order.to_numpy()], rows.folders)


def advantage(eta: FloatArray, depth: int) -> FloatArray:
    """Return y of every prefix of every state, shape ``[states, 2^D − 1]``.

    y_k = max over futures of η at a = 1 minus the max at a = 0, tokens/s; prefixes by step, then
    in binary order. ``eta`` is ``[states · D · 2^D]`` in the order of `sort_complete`.
    """
    cube = eta.reshape(-1, depth, 2**depth)
    columns = []
    for k in range(1, depth + 1):
        # [states, prefixes, action, futures]
        best = cube[:, k - 1].reshape(len(cube), 2 ** (k - 1), 2, 2 ** (depth - k)).max(axis=3)
        columns.append(best[:, :, 1] - best[:, :, 0])
    return np.concatenate(columns, axis=1)


def label_rows(rows: Trajectories, model: ValueModel, numerator: str) -> pd.DataFrame:
    """Return one row for each prefix of each state: ids, z*, y and y from hindsight.

    ``rows`` as `sort_complete` returns them.
    """
    frame, depth = rows.frame, rows.depth
    logged = throughput(frame[list(OUTCOMES)].to_numpy(np.float64), numerator)
    first = frame.drop_duplicates([*STATE, "step", "prefix"])
    names = input_names(depth, model.signals)
    z = pd.DataFrame(scheduler_inputs(first, model.signals, depth), columns=list(names))
    table = pd.concat([first[list(KEYS)].reset_index(drop=True), z], axis=1)
    table["y"] = advantage(model.eta(value_inputs(rows, model.signals), numerator), depth).ravel()
    table["y_hindsight"] = advantage(logged, depth).ravel()
    return table


def step_table(labels: pd.DataFrame) -> list[dict[str, Any]]:
    """Return mean and spread of y, share of positive labels and agreement, by step."""
    rows = []
    steps = [(str(k), part) for k, part in labels.groupby("step")]
    for name, part in [*steps, ("all", labels)]:
        y, hindsight = part["y"].to_numpy(), part["y_hindsight"].to_numpy()
        agree = (y > 0) == (hindsight > 0)
        weight = np.abs(hindsight)
        rows.append(
            {
                "step": name,
                "labels": len(part),
                "y_mean": float(y.mean()),
                "y_std": float(y.std()),
                "positive": float((y > 0).mean()),
                "hindsight_positive": float((hindsight > 0).mean()),
                "sign_agreement": float(agree.mean()),
                "weighted_agreement": float(np.average(agree, weights=weight + 1e-12)),
            }
        )
    return rows


def write_labels(path: Path, labels: pd.DataFrame, header: dict[str, Any]) -> None:
    """Write the labels with their header in the file's metadata, atomically."""
    table = pa.Table.from_pandas(labels, preserve_index=False)
    table = table.replace_schema_metadata({HEADER_KEY: json.dumps(header).encode()})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary)


def load_labels(folder: Path) -> tuple[pd.DataFrame, int, tuple[str, ...], str]:
    """Return labels, depth, selected signals and numerator.

    Raises
    ------
    InputError
        If the file is missing, damaged or lacks a column.
    """
    path = folder / "labels.parquet"
    frame, header = read_table(path, "label", HEADER_KEY)
    try:
        depth, signals = int(header["depth"]), tuple(header["selected_signals"])
        numerator = str(header["numerator"])
        frame = frame[[*KEYS, *input_names(depth, signals), *LABELS]]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, "label", error) from error
    numbers = frame[[*input_names(depth, signals), *LABELS]].to_numpy(np.float64)
    if frame.empty or not np.isfinite(numbers).all():
        raise damaged(path, "label", "no rows, or values that are not finite")
    return frame, depth, signals, numerator


def run(conf: DictConfig) -> None:
    """Label every prefix state; write ``labels.parquet`` to ``paths.labels``."""
    numerator = check_numerator(conf)
    model = load_value(Path(conf.paths.value))
    check_fitted(conf, model.pairs, Path(conf.paths.value) / "value.json", "value")
    rows = load_trajectories(conf)
    if rows.depth != model.depth:
        raise InputError(
            f"drafting.depth={rows.depth}: {conf.paths.value} was fitted at depth {model.depth}; "
            "run python -m pipeline.run stage=select and stage=value first"
        )
    rows = sort_complete(rows)
    folder = Path(conf.paths.labels)
    with stage_run(conf, "label", folder) as stage:
        rows.note(stage)
        stage.read(Path(conf.paths.value) / "value.safetensors")
        labels = label_rows(rows, model, numerator)
        table = step_table(labels)
        stage.show(f"Labels, tokens/s ({numerator})", table)
        header = {
            "depth": model.depth,
            "selected_signals": list(model.signals),
            "numerator": numerator,
        }
        write_labels(folder / "labels.parquet", labels, header)
        stage.wrote(folder / "labels.parquet", f"{len(labels):,} rows")
        stage.metrics.update({k: v for k, v in table[-1].items() if k != "step"})
        stage.metrics.update(states=len(labels) // (2**rows.depth - 1), numerator=numerator)
