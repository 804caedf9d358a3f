"""Trajectories in compact form: at every state, the binary trie of all 2^D schedules.

The rows of a state repeat themselves: signals and a mid step's counts depend on the prefix alone,
A and t on the schedule alone. Without the repetitions a row takes about 20 bytes, and twenty
million rows fit in half a GiB. The Parquet files are read batch by batch, in any order of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.schema import BAD_PARQUET, damaged_part, open_part, part_files, partition
from treegraft_core import SIGNALS, InputError
from treegraft_core.latency import PASS_COUNTS
from treegraft_core.tree import FloatArray, IntArray

BATCH_ROWS = 65_536
NEVER = np.iinfo(np.int16).max
"""Place in the pruning order of a token that was not accepted."""
COUNTS = PASS_COUNTS
TEXTS = ("state_id", "prompt_id", "schedule", "prefix", "future")
NUMBERS = (
    "turn",
    "position",
    "step",
    "action",
    "prompt_tokens",
    "context_tokens",
    "target_ms",
    "mid_ms",
    *SIGNALS,
    "accepted",
    "t_draft_ms",
    "t_verify_ms",
    "kept_nodes",
    *COUNTS,
)
STATE_COLUMNS = ("pair", "task", "prompt_id", "turn", "position", "state_id")


@dataclass(frozen=True)
class Tries:
    """Every schedule's outcome at S decoding states.

    Schedules are in binary order, τ_1 first. Prefixes are by step, then in binary order: that of
    the bits b before step k has the number 2^(k−1) − 1 + b.

    Attributes
    ----------
    depth : int
        D.
    states : DataFrame, S rows
        ``pair``, ``task``, ``prompt_id``, ``turn``, ``position``, ``state_id``, by which they are
        sorted; ``prompt_tokens``, ``context_tokens``; ``target_ms`` and ``mid_ms`` as logged.
    signals : float64 array, shape ``[S, 2^D − 1, 10]``
        The ten signals at each prefix.
    counts : int32 array, shape ``[S, 2^D − 1, 5]``
        `COUNTS` of a mid step at each prefix.
    accepted : int16 array, shape ``[S, 2^D]``
        A.
    draft_ms, verify_ms : float64 array, shape ``[S, 2^D]``
        t_D and t_V as logged, without the scheduler's own cost.
    kept : int16 array, shape ``[S, 2^D]``
        Nodes sent to verification.
    ranks : int16 array, shape ``[S, 2^D, most accepted]``
        Place in the pruning order of each accepted node; `NEVER` after the last.
    """

    depth: int
    states: pd.DataFrame
    signals: FloatArray
    counts: NDArray[np.int32]
    accepted: NDArray[np.int16]
    draft_ms: FloatArray
    verify_ms: FloatArray
    kept: NDArray[np.int16]
    ranks: NDArray[np.int16]

    def __len__(self) -> int:
        """Return S."""
        return len(self.states)

    @property
    def pairs(self) -> tuple[str, ...]:
        """The pairs that the states are of, sorted."""
        return tuple(sorted(set(self.states["pair"])))

    @property
    def rows(self) -> int:
        """Trajectory rows that the states stand for: D · 2^D each."""
        return len(self) * self.depth * (1 << self.depth)

    def take(self, at: Any) -> Tries:
        """Return the states ``at``: a mask or numbers."""
        at = np.flatnonzero(at) if np.asarray(at).dtype == bool else np.asarray(at)
        arrays = {name: getattr(self, name)[at] for name in ARRAYS}
        return Tries(self.depth, self.states.iloc[at].reset_index(drop=True), **arrays)

    def within(self, verify_nodes: int) -> tuple[IntArray, IntArray]:
        """Return A and kept nodes under a smaller B_ver, exactly; both ``[S, 2^D]``.

        The nodes that a smaller budget keeps are the first of the pruning order.
        """
        kept = np.minimum(self.kept, verify_nodes).astype(np.int64)
        return (self.ranks < verify_nodes).sum(-1), kept


ARRAYS = ("signals", "counts", "accepted", "draft_ms", "verify_ms", "kept", "ranks")


def join(parts: Sequence[Tries]) -> Tries:
    """Return the states of several as one, in order of their ids."""
    if len({t.depth for t in parts}) != 1:
        raise ValueError(f"depths {[t.depth for t in parts]}: must be one")
    deepest = max(t.ranks.shape[2] for t in parts)
    states = pd.concat([t.states for t in parts], ignore_index=True)
    order = states.sort_values(list(STATE_COLUMNS), kind="stable").index.to_numpy()
    arrays = {}
    for name in ARRAYS:
        values = [getattr(t, name) for t in parts]
        if name == "ranks":
            values = [_widen(v, deepest) for v in values]
        arrays[name] = (values[0] if len(parts) == 1 else np.concatenate(values))[order]
    return Tries(parts[0].depth, states.iloc[order].reset_index(drop=True), **arrays)


def _widen(ranks: NDArray[np.int16], deepest: int) -> NDArray[np.int16]:
    room = ((0, 0), (0, 0), (0, deepest - ranks.shape[2]))
    return np.pad(ranks, room, constant_values=NEVER)


def prefix_steps(depth: int) -> IntArray:
    """Return k of every prefix, shape ``[2^D − 1]``."""
    return np.repeat(np.arange(1, depth + 1), 1 << np.arange(depth))


def prefix_bits(depth: int) -> IntArray:
    """Return the bits of every prefix, shape ``[2^D − 1, D]``; 0 from its own step on."""
    steps = prefix_steps(depth)
    code = np.arange(len(steps)) - ((1 << (steps - 1)) - 1)
    shifts = (steps[:, None] - 2) - np.arange(depth)
    return np.where(shifts >= 0, code[:, None] >> np.maximum(shifts, 0) & 1, 0)


def prefixes_of(depth: int) -> IntArray:
    """Return the number of the prefix before every step of every schedule, ``[2^D, D]``."""
    steps = np.arange(1, depth + 1)
    before = np.arange(1 << depth)[:, None] >> (depth + 1 - steps)
    return (1 << (steps - 1)) - 1 + before


def schedules(depth: int) -> IntArray:
    """Return the bits of every schedule, shape ``[2^D, D]``."""
    return np.arange(1 << depth)[:, None] >> np.arange(depth)[::-1] & 1


class _Reader:
    # Fills the arrays of one pair from batches of rows.

    def __init__(self, folder: Path, depth: int, rows: int):
        self.folder, self.depth, self.given = folder, depth, rows
        self.per_state = depth << depth
        self.room = room = -(-rows // self.per_state)
        leaves, prefixes = 1 << depth, (1 << depth) - 1
        self.index: dict[tuple[str, str], int] = {}
        self.ids: list[tuple[str, str, str]] = []
        self.seen = np.zeros((room, self.per_state), np.uint8)
        self.numbers = {
            name: np.zeros(room, np.int64)
            for name in ("turn", "position", "prompt_tokens", "context_tokens")
        } | {name: np.zeros(room) for name in ("target_ms", "mid_ms")}
        self.signals = np.zeros((room, prefixes, len(SIGNALS)))
        self.counts = np.zeros((room, prefixes, len(COUNTS)), np.int32)
        self.accepted = np.zeros((room, leaves), np.int16)
        self.draft_ms, self.verify_ms = np.zeros((room, leaves)), np.zeros((room, leaves))
        self.kept = np.zeros((room, leaves), np.int16)
        self.ranks = np.full((room, leaves, 1), NEVER, np.int16)

    def add(self, batch: pa.RecordBatch, task: str) -> None:
        ranks = batch.column("accepted_ranks")
        if any(column.null_count for column in (*batch.columns, ranks.values)):
            raise bad_rows(self.folder, "have rows with missing values")
        numbers = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in NUMBERS}
        if not all(np.isfinite(values).all() for values in numbers.values()):
            raise bad_rows(self.folder, "have values that are not finite")
        if any((numbers[name] <= 0).any() for name in ("target_ms", "mid_ms", "t_verify_ms")):
            raise bad_rows(self.folder, "have a time of 0 ms or less")
        leaf, step = self._schedule(batch, numbers)
        state = self._state(batch, task)
        np.add.at(self.seen, (state, (step - 1) * (1 << self.depth) + leaf), 1)
        left = self.depth - step
        after = leaf & ((1 << left) - 1)
        first = step == 1
        self._outcomes(batch, numbers, state, leaf, first)
        prefix = (1 << (step - 1)) - 1 + (leaf >> (left + 1))
        at = (numbers["action"] == 0) & (after == 0)
        values = np.stack([numbers[name][at] for name in SIGNALS], axis=1)
        self.signals[state[at], prefix[at]] = values
        at = (numbers["action"] == 1) & (after == 0)
        values = np.stack([numbers[name][at] for name in COUNTS], axis=1)
        self.counts[state[at], prefix[at]] = values

    def _schedule(
        self, batch: pa.RecordBatch, numbers: dict[str, Any]
    ) -> tuple[IntArray, IntArray]:
        """Return the schedule's number and the step of each row."""
        codes, texts = _coded(batch.column("schedule"))
        found = sorted({len(text) for text in texts})
        if found != [self.depth]:
            raise InputError(
                f"drafting.depth={self.depth}: {self.folder} holds schedules of {found[0]} steps; "
                f"give drafting.depth={found[0]} or collect again"
            )
        step = numbers["step"].astype(np.int64)
        whole = set("".join(texts)) <= {"0", "1"}
        if whole and ((step >= 1) & (step <= self.depth)).all():
            leaf = np.array([int(text, 2) for text in texts])[codes]
            left = self.depth - step
            parts = {"prefix": (leaf >> (left + 1), step - 1), "future": (leaf, left)}
            for name, (value, length) in parts.items():
                codes, texts = _coded(batch.column(name))
                whole &= set("".join(texts)) <= {"0", "1"}
                if not whole:
                    break
                value = value & ((1 << length) - 1)
                given = np.array([int(text or "0", 2) for text in texts])[codes]
                whole &= bool((given == value).all())
                whole &= bool((np.array([len(text) for text in texts])[codes] == length).all())
            if whole and (numbers["action"] == (leaf >> left & 1)).all():
                return leaf, step
        raise bad_rows(self.folder, "have a schedule that is not prefix + action + future")

    def _state(self, batch: pa.RecordBatch, task: str) -> IntArray:
        """Return the number of each row's state."""
        codes, names = _coded(batch.column("state_id"))
        fresh = [(task, name) for name in names if (task, name) not in self.index]
        for key in fresh:
            self.index[key] = len(self.index)
        if len(self.index) > self.room:
            raise bad_rows(
                self.folder,
                f"hold {self.given} rows of more than {self.room} states, not each of the "
                f"{self.per_state} combinations of step and schedule once",
            )
        state = np.array([self.index[task, name] for name in names])[codes]
        if fresh:
            row = np.zeros(len(names), np.int64)
            row[codes] = np.arange(len(codes))  # one row of each state
            prompts = batch.column("prompt_id").take(pa.array(row)).to_pylist()
            of = {
                name: (prompt, int(at))
                for name, prompt, at in zip(names, prompts, row, strict=True)
            }
            for _, name in fresh:
                prompt, at = of[name]
                self.ids.append((task, prompt, name))
                for column, values in self.numbers.items():
                    values[self.index[task, name]] = batch.column(column)[at].as_py()
        return state

    def _outcomes(
        self, batch: pa.RecordBatch, numbers: dict[str, Any], state: Any, leaf: Any, at: Any
    ) -> None:
        where = state[at], leaf[at]
        self.accepted[where] = numbers["accepted"][at]
        self.draft_ms[where] = numbers["t_draft_ms"][at]
        self.verify_ms[where] = numbers["t_verify_ms"][at]
        self.kept[where] = numbers["kept_nodes"][at]
        ranks = batch.column("accepted_ranks").filter(pa.array(at))
        flat, offsets = ranks.values.to_numpy(), ranks.offsets.to_numpy()
        lengths = np.diff(offsets)
        if (lengths != numbers["accepted"][at]).any():
            raise bad_rows(self.folder, "have accepted_ranks of another length than accepted")
        most = int(lengths.max(initial=0))
        if most > self.ranks.shape[2]:
            self.ranks = _widen(self.ranks, most)
        inside = np.arange(self.ranks.shape[2]) < lengths[:, None]
        values = np.full(inside.shape, NEVER, np.int16)
        values[inside] = flat[offsets[0] : offsets[-1]]
        self.ranks[where] = values

    def done(self, pair: str) -> Tries:
        count = len(self.index)
        if not count:
            raise bad_rows(self.folder, "hold no rows")
        wrong = np.flatnonzero((self.seen[:count] != 1).any(axis=1))
        if len(wrong):
            seen = self.seen[wrong[0]]
            raise bad_rows(
                self.folder,
                f"have {seen.sum()} rows ({(seen > 0).sum()} distinct) of state "
                f"{self.ids[wrong[0]][2]}, not each of the {self.per_state} combinations of step "
                "and schedule once",
            )
        columns = dict(
            zip(("task", "prompt_id", "state_id"), zip(*self.ids, strict=True), strict=True)
        )
        values = {name: values[:count] for name, values in self.numbers.items()}
        states = pd.DataFrame({"pair": pair, **columns, **values})
        arrays = {name: getattr(self, name)[:count] for name in ARRAYS}
        return join([Tries(self.depth, states, **arrays)])


def _coded(column: pa.Array) -> tuple[IntArray, list[str]]:
    """Return a text column as codes ``[n]`` into its distinct values."""
    encoded = column.dictionary_encode()
    codes: IntArray = encoded.indices.to_numpy().astype(np.int64)
    return codes, encoded.dictionary.to_pylist()


def bad_rows(folder: Path, what: str) -> InputError:
    """Return the error for trajectories that have to be collected again."""
    return InputError(
        f"trajectories={folder}: {what}; python -m pipeline.run stage=verify says where, and "
        "verify.repair=true collects that again"
    )


def read_tries(
    folder: Path, pair: str, task: str, depth: int, rules: dict[str, Any] | None = None
) -> Tries:
    """Read and check the trajectories of one pair, batch by batch.

    Parameters
    ----------
    folder : Path
        The pair's folder.
    pair, task : str
        Its name; the task of files that are in no ``task=`` folder.
    depth : int
        D of the schedules.
    rules : dict, optional
        The drafting rules that the files must have been collected with.

    Raises
    ------
    InputError
        If there are none, a file is damaged or of another version or other rules, a value is
        missing or not finite, a time is not positive, the schedules are of another depth, or a
        state does not have each of its D · 2^D rows once.
    """
    files = part_files(folder)
    parts = [(path, open_part(path, rules)) for path in files]
    rows = sum(part.metadata.num_rows for _, part in parts)
    reader = _Reader(folder, depth, rows)
    for path, part in parts:
        for batch in _batches(path, part):
            reader.add(batch, partition(path, folder, "task") or task)
    return reader.done(pair)


def _batches(path: Path, part: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    columns = [*TEXTS, *NUMBERS, "accepted_ranks"]
    lacking = [name for name in columns if name not in part.schema_arrow.names]
    if lacking:
        raise damaged_part(path, f"no column {lacking[0]}")
    try:
        yield from part.iter_batches(BATCH_ROWS, columns=columns)
    except BAD_PARQUET as error:
        raise damaged_part(path, error) from error
