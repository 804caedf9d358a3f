"""Collecting units again, elsewhere, to compare them with what a dataset holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from pipeline.checks import ranks_of, read_part
from pipeline.collect import worker_conf
from pipeline.manifest import UnitKey, differences
from pipeline.schema import COLUMNS
from pipeline.store import Store
from pipeline.units import Unit, settings
from pipeline.worker import Collector, Order, Setup
from treegraft_core import InputError

FLOAT_TOLERANCE = 1e-6
"""Relative and absolute: log p is rounded to 10⁻⁶ nats."""
ROUNDING_SHARE = 0.05
"""Most states that may differ where the models are not in float64."""


@dataclass
class Compared:
    """States computed again.

    Attributes
    ----------
    states : int
        How many.
    exact : bool
        Whether they have to be equal: the models are in float64.
    differing : dict of (task, prompt id) to dict of str to list of str
        The states that differ, with the columns in which they do.
    failed : dict of (task, prompt id) to str
        Units that could not be computed again, and why.
    """

    states: int
    exact: bool
    differing: dict[UnitKey, dict[str, list[str]]]
    failed: dict[UnitKey, str]

    @property
    def rounding(self) -> bool:
        """Whether so few states differ that rounding explains it.

        The same machine and versions give the same bytes. Elsewhere float32 and less round
        otherwise, and where two nodes' scores nearly tie a state's trees, and A, may differ.
        """
        differing = sum(map(len, self.differing.values()))
        return not self.exact and differing <= ROUNDING_SHARE * self.states


def draw(
    units: Sequence[Unit], records: Mapping[UnitKey, Mapping[str, Any]], states: int, seed: int
) -> list[Unit]:
    """Return units at random with ``states`` states in all, or a few more."""
    order = np.random.default_rng(seed).permutation(len(units))
    chosen: list[Unit] = []
    have = 0
    for number in order:
        if have >= states:
            break
        chosen.append(units[number])
        have += int(records[units[number].key]["states"])
    return chosen


def recompute(
    conf: DictConfig,
    store: Store,
    header: Mapping[str, Any],
    records: Mapping[UnitKey, Mapping[str, Any]],
    units: Sequence[Unit],
) -> Compared:
    """Collect units again with the configured models, and compare all their rows.

    Every text is decoded anew, and every turn goes through the mid drafter in the packs that
    collecting it took, so that on the same machine the rows are equal to the last bit.

    Raises
    ------
    InputError
        If the models are not those of the dataset, or cannot be loaded.
    """
    threads = torch.get_num_threads()
    with TemporaryDirectory(prefix="treegraft-verify-") as folder:
        setup = Setup(worker_conf(conf), dict(header["profile"]), f"{folder}/again")
        try:
            collector = Collector(setup)
            _check_models(conf, header, collector, store)
            collector.cache = Path(folder) / "texts"  # what is cached is not taken on trust
            found = Compared(0, str(collector.about()["models.dtype"]) == "float64", {}, {})
            for unit in tqdm(units, desc="compute again", unit="prompt"):
                _compare_unit(collector, store, unit, records[unit.key], found)
        finally:
            torch.set_num_threads(threads)
    return found


def _check_models(
    conf: DictConfig, header: Mapping[str, Any], collector: Collector, store: Store
) -> None:
    changed = differences(header["config"], settings(conf, collector.about()))
    if changed:
        raise InputError(
            f"trajectories={store.url}: collected with other models ({'; '.join(changed)}); give "
            "the same, or verify.states=0, which computes nothing again"
        )


def _compare_unit(
    collector: Collector, store: Store, unit: Unit, record: Mapping[str, Any], found: Compared
) -> None:
    result = collector.collect(Order(unit, smaller=record.get("pack") == 1))
    if result.status != "done" or result.temporary is None:
        found.failed[unit.key] = str(result.record.get("reason", result.status))
        return
    found.states += int(record["states"])
    if result.record["sha256"] != record["sha256"]:
        new = read_part(collector.store.read(result.temporary))
        differing = differing_states(read_part(store.read(str(record["file"]))), new)
        if differing:
            found.differing[unit.key] = differing
    collector.store.remove(result.temporary)


def differing_states(old: pa.Table, new: pa.Table) -> dict[str, list[str]]:
    """Return the states of two tables that differ, with the columns in which they do.

    Text and whole numbers have to be equal, other numbers up to 10⁻⁶.
    """
    keys = [("state_id", "ascending"), ("schedule", "ascending"), ("step", "ascending")]
    old, new = old.sort_by(keys), new.sort_by(keys)
    old_ids, new_ids = (t.column("state_id").to_numpy() for t in (old, new))
    if len(old) != len(new) or (old_ids != new_ids).any():
        return {name: ["state_id"] for name in sorted({*old_ids} ^ {*new_ids} or {*old_ids})}
    found: dict[str, list[str]] = {}
    for name, kind in COLUMNS.items():
        for state in np.unique(old_ids[_unequal(old, new, name, kind)]):
            found.setdefault(str(state), []).append(name)
    return found


def _unequal(old: pa.Table, new: pa.Table, name: str, kind: pa.DataType) -> Any:
    if pa.types.is_list(kind):
        (_, a), (_, b) = ranks_of(old), ranks_of(new)
        width = min(a.shape[1], b.shape[1])
        lengths = ranks_of(old)[0] != ranks_of(new)[0]
        return lengths | (a[:, :width] != b[:, :width]).any(1)
    a, b = old.column(name).to_numpy(), new.column(name).to_numpy()
    if pa.types.is_floating(kind):
        return ~np.isclose(a, b, rtol=FLOAT_TOLERANCE, atol=FLOAT_TOLERANCE)
    return a != b
