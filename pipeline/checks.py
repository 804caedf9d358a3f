"""What the rows of one part file of trajectories must be: all that can be told without models."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.manifest import UnitKey
from pipeline.rows import COUNT_NAMES
from pipeline.schema import BAD_PARQUET, COLUMNS, SCHEMA_VERSION, VERSION_KEY, logged_rules
from pipeline.tries import NEVER
from pipeline.tries import schedules as all_schedules
from treegraft_core import SIGNALS, DraftingConfig, LatencyProfile
from treegraft_core.tree import IntArray

POSITIVE = float(np.nextafter(0.0, 1.0))
TIME_TOLERANCE = 1e-9
"""Relative: t is computed by the same function as it was, perhaps by another numpy."""
TIMES = ("step_ms", "t_draft_ms", "t_verify_ms")
OUTCOMES = ("accepted", "committed", "t_draft_ms", "t_verify_ms", "tree_nodes", "kept_nodes")
BY_PREFIX = SIGNALS
BY_STEP = (*COUNT_NAMES, "step_ms")
INTEGRAL = ("frontier_before", "tree_nodes_before", "pre_reselect_cands")


@dataclass(frozen=True)
class Problem:
    """What is wrong in a file, in how many rows or states, and the first of them."""

    what: str
    count: int = 1
    at: str = ""


@dataclass(frozen=True)
class Rules:
    """What the rows of a dataset have to agree with.

    Attributes
    ----------
    drafting : DraftingConfig
        The rules that trees were grown by.
    logged : mapping
        The same as in the files' metadata.
    profile : LatencyProfile
        That t was computed from.
    max_new_tokens, states_per_turn, max_context : int
        As collected with; states_per_turn 0: all.
    """

    drafting: DraftingConfig
    logged: Mapping[str, Any]
    profile: LatencyProfile
    max_new_tokens: int
    states_per_turn: int
    max_context: int

    @classmethod
    def of(cls, header: Mapping[str, Any], profile: LatencyProfile) -> Rules:
        """Return the rules that a dataset's manifest says; `InputError` if they are none."""
        config = header["config"]
        logged = {
            name.removeprefix("drafting."): value
            for name, value in config.items()
            if name.startswith("drafting.")
        }
        return cls(
            # What a row must be does not depend on who proposes in small steps.
            DraftingConfig(**{name: value for name, value in logged.items() if name != "small"}),
            logged,
            profile,
            int(config["collect.max_new_tokens"]),
            int(config["collect.states_per_turn"]),
            int(config.get("models.max_context", np.iinfo(np.int32).max)),
        )

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the least and the most of every column that is a number."""
        most = np.inf
        width, deepest = self.drafting.width, self.drafting.deepest
        return {
            "turn": (0, most),
            "position": (1, self.max_new_tokens - 1),
            "step": (1, self.drafting.depth),
            "action": (0, 1),
            "prompt_tokens": (1, most),
            "context_tokens": (2, self.max_context),
            "target_ms": (POSITIVE, most),
            "mid_ms": (POSITIVE, most),
            "depth_before": (0, deepest),
            "leaf_ratio_before": (0, 1),
            "collapse_debt": (0, deepest),
            "pre_reselect_past_ratio": (0, 1),
            "pre_reselect_overlap": (0, 1),
            "pre_reselect_score": (-most, 0),
            "frontier_before": (0, width),
            "score_before": (-most, 0),
            "tree_nodes_before": (1, most),
            "pre_reselect_cands": (0, most),
            "accepted": (0, deepest),
            "committed": (1, deepest + 1),
            "t_draft_ms": (POSITIVE, most),
            "t_verify_ms": (POSITIVE, most),
            "step_ms": (0, most),
            "tree_nodes": (1, most),
            "kept_nodes": (0, self.drafting.verify_nodes),
            "refresh_nodes": (0, most),
            "expand_nodes": (0, width),
            "all_nodes": (0, most),
            "pool_nodes": (0, most),
            "earlier_picks": (0, width),
            "refresh_levels": (0, deepest + 1),
            "all_levels": (0, deepest + 1),
        }


def read_part(data: bytes) -> pa.Table:
    """Return the rows of a file's bytes, page checksums checked; `ValueError` if it is damaged."""
    try:
        return pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read()
    except BAD_PARQUET as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"damaged Parquet file ({reason[:120]})") from error


def check_part(data: bytes, key: UnitKey, record: Mapping[str, Any], rules: Rules) -> list[Problem]:
    """Return what is wrong with the rows of a unit's file; nothing if they are sound.

    Checked are the schema and what is noted in the metadata; that the rows are of this unit; that
    every state has each of its D · 2^D combinations of step and schedule once; every column's
    range; what follows from other columns (t from the counts and the profile too); and that rows
    of one prefix, of one step and of one schedule say the same of it.

    Parameters
    ----------
    data : bytes
        The file.
    key : (str, str)
        Task and prompt id of its unit.
    record : mapping
        The unit's record in the manifest.
    rules : Rules
        The dataset's.
    """
    try:
        table = read_part(data)
    except ValueError as error:
        return [Problem(str(error))]
    if found := _schema(table, rules):
        return found
    lacking = [name for name in COLUMNS if table.column(name).null_count]
    if lacking:
        return [Problem(f"missing values in {', '.join(lacking)}")]
    rows = _Rows(table, rules.drafting.depth)
    rows.counted(record)
    rows.of_unit(key, rules)
    rows.in_range(rules)
    if rows.bits() and rows.finite:
        rows.each_row(rules)
        rows.each_state(rules)
    return rows.problems


def _schema(table: pa.Table, rules: Rules) -> list[Problem]:
    """Return what is wrong with columns and metadata."""
    metadata = table.schema.metadata or {}
    version = metadata.get(VERSION_KEY, b"none").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        return [Problem(f"schema version {version}, not {SCHEMA_VERSION}")]
    try:
        logged = logged_rules(metadata)
    except (ValueError, RecursionError):
        return [Problem("drafting rules in its metadata cannot be read")]
    if logged != dict(rules.logged):
        return [Problem("drafting rules in its metadata are not the dataset's")]
    types = {name: table.schema.field(name).type for name in table.column_names}
    if len(types) < len(table.column_names):
        return [Problem("a column twice")]
    return [
        Problem(f"column {name}: {types.get(name, 'missing')}, not {COLUMNS.get(name, 'expected')}")
        for name in {**COLUMNS, **types}
        if types.get(name) != COLUMNS.get(name)
    ]


def ranks_of(table: pa.Table) -> tuple[IntArray, NDArray[np.int16]]:
    """Return the number of accepted ranks of each row, and the ranks, `NEVER` after the last."""
    column = table.column("accepted_ranks").combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # of no rows
        column = pa.array([], COLUMNS["accepted_ranks"])
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    ranks = np.full((len(lengths), max(1, int(lengths.max(initial=0)))), NEVER, np.int16)
    ranks[np.arange(ranks.shape[1]) < lengths[:, None]] = pc.list_flatten(column).to_numpy(
        zero_copy_only=False
    )
    return lengths, ranks


def _coded(table: pa.Table, name: str) -> tuple[IntArray, list[str]]:
    """Return a text column as codes ``[rows]`` into its distinct values."""
    encoded = table.column(name).combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):  # of no rows
        return np.zeros(0, np.int64), []
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


@dataclass
class _Rows:
    # The columns of one file as arrays, and what is found wrong in them.

    table: pa.Table
    depth: int
    problems: list[Problem] = field(default_factory=list)
    finite: bool = True

    def __post_init__(self) -> None:
        self.number = {
            name: self.table.column(name).to_numpy()
            for name, kind in COLUMNS.items()
            if pa.types.is_integer(kind) or pa.types.is_floating(kind)
        }
        self.lengths, self.ranks = ranks_of(self.table)
        self.state, self.names = _coded(self.table, "state_id")
        self.leaf = np.zeros(len(self.table), np.int64)

    def add(self, wrong: Any, what: str) -> None:
        """Note a problem of the rows that are marked."""
        rows = np.flatnonzero(wrong)
        if len(rows):
            first = rows[0]
            schedule = self.table.column("schedule")[int(first)].as_py()
            at = f"{self.names[self.state[first]]}, schedule {schedule}"
            step = int(self.number["step"][first])
            self.problems.append(Problem(f"{what} (rows)", len(rows), f"{at}, step {step}"))

    def counted(self, record: Mapping[str, Any]) -> None:
        """Compare the numbers in the manifest."""
        turns = len(np.unique(self.number["turn"]))
        real = {"rows": len(self.table), "states": len(self.names), "turns": turns}
        for name, value in real.items():
            if record.get(name) != value:
                self.problems.append(Problem(f"{value} {name}, its manifest says {record[name]}"))

    def of_unit(self, key: UnitKey, rules: Rules) -> None:
        """Check that the rows are of this unit, and its states those that it can have."""
        task, prompt = key
        codes, prompts = _coded(self.table, "prompt_id")
        self.add(np.array([p != prompt for p in prompts], bool)[codes], "of another prompt")
        _, first = np.unique(self.state, return_index=True)
        turn, position = self.number["turn"], self.number["position"]
        place = f"{quote(task, safe='')}/{quote(prompt, safe='')}"
        real = np.array([f"{place}/{turn[i]}/{position[i]}" for i in first], object)
        names = np.array(self.names, object)
        self.add((names != real)[self.state], "state_id is not task/prompt_id/turn/position")
        for name in ("turn", "position", "prompt_tokens", "context_tokens"):
            values = self.number[name]
            self.add(values != values[first][self.state], f"{name} differs within a state")
        self.add(
            self.number["context_tokens"] != self.number["prompt_tokens"] + position,
            "context_tokens is not prompt_tokens + position",
        )
        for each in np.unique(turn):
            mine = turn == each
            tokens = self.number["prompt_tokens"]
            self.add(mine & (tokens != tokens[mine][0]), "prompt_tokens differ within a turn")
            states = len(np.unique(self.state[mine]))
            if 0 < rules.states_per_turn < states:
                self.add(mine, f"{states} states of a turn, not {rules.states_per_turn} or fewer")

    def in_range(self, rules: Rules) -> None:
        """Check every column alone."""
        for name, (low, high) in rules.ranges().items():
            values = self.number[name]
            wrong = ~np.isfinite(values)
            if wrong.any():
                self.finite = False
                self.add(wrong, f"{name} is not finite")
            below = f"{'above 0' if low == POSITIVE else f'from {low:g}'}"
            upto = "" if high == np.inf else f" to {high:g}"
            self.add(~wrong & ((values < low) | (values > high)), f"{name} is not {below}{upto}")
        for name in INTEGRAL:
            values = self.number[name]
            self.add(np.isfinite(values) & (values != np.rint(values)), f"{name} is not whole")
        for name in ("target_ms", "mid_ms"):
            wanted = getattr(rules.profile, name)
            self.add(self.number[name] != wanted, f"{name} is not the profile's")

    def bits(self) -> bool:
        """Read the schedules; return whether they, and what follows from them, are sound."""
        before = len(self.problems)
        codes, texts = _coded(self.table, "schedule")
        good = np.array([len(t) == self.depth and set(t) <= {"0", "1"} for t in texts], bool)
        self.add(~good[codes], f"schedule is not {self.depth} bits")
        step = self.number["step"].astype(np.int64)
        if len(self.problems) > before or ((step < 1) | (step > self.depth)).any():
            return False
        self.leaf = np.array([int(text, 2) for text in texts], np.int64)[codes]
        parts = {}
        for name in ("prefix", "future"):
            part, known = _coded(self.table, name)
            # A leading 1 keeps leading zeros apart.
            read = [int(f"1{t}", 2) if set(t) <= {"0", "1"} else -1 for t in known]
            parts[name] = np.array(read, np.int64)[part]
        left = self.depth - step
        prefix = (1 << (step - 1)) | (self.leaf >> (left + 1))
        future = (1 << left) | (self.leaf & ((1 << left) - 1))
        whole = (parts["prefix"] == prefix) & (parts["future"] == future)
        whole &= self.number["action"] == (self.leaf >> left & 1)
        self.add(~whole, "schedule is not prefix + action + future")
        return len(self.problems) == before

    def each_row(self, rules: Rules) -> None:
        """Check what a row's columns say of each other."""
        n, accepted = self.number, self.number["accepted"]
        self.add(n["committed"] != accepted + 1, "committed is not accepted + 1")
        self.add(self.lengths != accepted, "accepted_ranks are not as many as accepted")
        kept = n["kept_nodes"]
        inside = self.ranks != NEVER
        far = (self.ranks < 0) | (self.ranks >= kept[:, None])
        self.add((inside & far).any(1), "accepted_ranks are not below kept_nodes")
        rising = np.diff(self.ranks.astype(np.int64), axis=1) > 0
        self.add((inside[:, 1:] & ~rising).any(1), "accepted_ranks do not rise")
        self.add(kept >= n["tree_nodes"], "kept_nodes are not fewer than tree_nodes")
        self.add(
            n["pre_reselect_cands"] > n["tree_nodes_before"],
            "pre_reselect_cands are more than tree_nodes_before",
        )
        small = n["action"] == 0
        some = np.stack([n[name] for name in COUNT_NAMES]).any(0)
        self.add(small & some, "counts of a small step are not 0")
        self.add(
            ~small & (n["pool_nodes"] != n["pre_reselect_cands"]),
            "pool_nodes of a mid step are not pre_reselect_cands",
        )
        if rules.drafting.graft == "add":  # nothing is ever removed from the tree
            self.add(
                n["tree_nodes_before"] > n["tree_nodes"], "tree_nodes_before exceeds tree_nodes"
            )

    def each_state(self, rules: Rules) -> None:
        """Check that every state has all its rows, and what rows of a state say of each other."""
        each = self.depth << self.depth
        code = self.leaf * self.depth + self.number["step"] - 1
        seen = np.bincount(self.state * each + code, minlength=len(self.names) * each)
        whole = (seen.reshape(-1, each) == 1).all(1)
        for number in np.flatnonzero(~whole)[:1]:
            mine = seen.reshape(-1, each)[number]
            what = (
                f"{mine.sum()} rows ({(mine > 0).sum()} distinct), not each of {each} combinations "
                "of step and schedule once (states)"
            )
            self.problems.append(Problem(what, int((~whole).sum()), self.names[number]))
        rows = np.flatnonzero(whole[self.state])
        order = rows[np.lexsort((code[rows], self.state[rows]))]
        if len(order):
            self._equal(order)
            self._times(order, rules)

    def _cube(self, name: str, order: IntArray) -> Any:
        values = self.ranks if name == "accepted_ranks" else self.number[name]
        return values[order].reshape(-1, 1 << self.depth, self.depth, *values.shape[1:])

    def _mark(self, wrong: Any, order: IntArray, what: str) -> None:
        rows = np.zeros(len(self.table), bool)
        rows[order[np.asarray(wrong).reshape(-1)]] = True
        self.add(rows, what)

    def _equal(self, order: IntArray) -> None:
        """Compare rows that stand for one thing."""
        for name in (*OUTCOMES, "accepted_ranks"):
            cube = self._cube(name, order)
            wrong = cube != cube[:, :, :1]
            wrong = wrong.any(-1) if wrong.ndim == 4 else wrong
            self._mark(wrong, order, f"{name} differs within a schedule")
        for names, what, more in ((BY_PREFIX, "prefix", 0), (BY_STEP, "step", 1)):
            for name in names:
                cube = self._cube(name, order)
                wrong = np.zeros(cube.shape, bool)
                for k in range(self.depth):
                    # Schedules that agree up to here lie side by side.
                    same = cube[:, :, k].reshape(len(cube), 1 << (k + more), -1)
                    wrong[:, :, k] = (same != same[..., :1]).reshape(len(cube), -1)
                self._mark(wrong, order, f"{name} differs at one {what}")

    def _times(self, order: IntArray, rules: Rules) -> None:
        """Compute t again from the counts."""
        outcome: Any = SimpleNamespace(
            bits=all_schedules(self.depth),
            counts=np.stack([self._cube(name, order) for name in COUNT_NAMES], -1),
            kept_nodes=self._cube("kept_nodes", order)[:, :, 0].astype(np.int64),
        )
        context = self._cube("context_tokens", order)[:, 0, 0].astype(np.int64)
        for name, real in zip(TIMES, rules.profile.times(outcome, context), strict=True):
            wanted = real if real.ndim == 3 else np.repeat(real[..., None], self.depth, -1)
            wrong = ~np.isclose(self._cube(name, order), wanted, rtol=TIME_TOLERANCE, atol=0.0)
            self._mark(wrong, order, f"{name} does not follow from the counts and the profile")
