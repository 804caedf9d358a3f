"""The latency profile: what each part of a round costs on one machine with one pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from treegraft_core.drafting import MidCall
from treegraft_core.enumeration import Enumeration
from treegraft_core.errors import InputError
from treegraft_core.files import write_json
from treegraft_core.tree import FloatArray, IntArray

PROFILE_FORMAT = 1
PASS_COUNTS = ("refresh_nodes", "expand_nodes", "all_nodes", "refresh_levels", "all_levels")
"""The counts of a mid call that its time follows from."""


@dataclass(frozen=True)
class Grid:
    """Median time of a pass by tokens read and tokens in the cache.

    Attributes
    ----------
    tokens, context : tuple of int
        Axes, ascending.
    ms : tuple of tuple of float
        Medians, ms, one row for each of ``tokens``.
    spread_ms : tuple of tuple of float
        Interquartile ranges, ms.
    """

    tokens: tuple[int, ...]
    context: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]
    spread_ms: tuple[tuple[float, ...], ...]

    def at(self, tokens: ArrayLike, context: ArrayLike) -> Any:
        """Interpolate linearly, ms; beyond the last point the last slope goes on.

        Takes numbers or arrays that broadcast; returns a float or an array.
        """
        tokens, context = np.broadcast_arrays(
            np.asarray(tokens, np.float64), np.asarray(context, np.float64)
        )
        rows = np.asarray(self.ms, np.float64)[(...,) + (None,) * context.ndim]
        columns = np.stack([_line(context, self.context, row) for row in rows])
        ms = np.maximum(_line(tokens, self.tokens, columns), 1e-3)
        return float(ms) if ms.ndim == 0 else ms


PASS_COLUMNS = [[f.name for f in fields(MidCall)].index(name) for name in PASS_COUNTS]
"""Their places among the counts of an :class:`Enumeration`."""

TIMES = (
    "plain_ms",
    "small_ms",
    "mid_overhead_ms",
    "signals_ms",
    "scheduler_ms",
    "prune_ms",
    "accept_ms",
    "target_ms",
    "mid_ms",
)
MOST_MS = 1e9
"""Twelve days: no pass takes that long, and sums stay finite."""


def _time(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < MOST_MS:
        raise ValueError(f"{name} must be a time in ms, not {str(value)[:40]}")
    return float(value)


def _grid(value: Any, name: str) -> Grid:
    axes: dict[str, tuple[int, ...]] = {}
    for axis in ("tokens", "context"):
        points = axes[axis] = tuple(value[axis])
        whole = all(type(x) is int and 0 < x < 2**31 for x in points)
        if not points or not whole or list(points) != sorted(set(points)):
            raise ValueError(f"{name}.{axis} must be ascending counts")
    tables: dict[str, tuple[tuple[float, ...], ...]] = {
        table: tuple(tuple(_time(ms, f"{name}.{table}") for ms in row) for row in value[table])
        for table in ("ms", "spread_ms")
    }
    for table, rows in tables.items():
        if [len(row) for row in rows] != [len(axes["context"])] * len(axes["tokens"]):
            raise ValueError(
                f"{name}.{table} must have a row for each of tokens, as long as context"
            )
    return Grid(axes["tokens"], axes["context"], tables["ms"], tables["spread_ms"])


def _line(x: FloatArray, xs: Sequence[float], ys: FloatArray) -> FloatArray:
    # ys[i] is the value at xs[i] for each element of x.
    ys = np.broadcast_to(ys, (len(xs), *x.shape))
    if len(xs) == 1:
        return ys[0]
    points = np.asarray(xs, np.float64)
    i = np.clip(np.searchsorted(points, x), 1, len(xs) - 1)
    left = np.take_along_axis(ys, (i - 1)[None], 0)[0]
    right = np.take_along_axis(ys, i[None], 0)[0]
    slope = (right - left) / (points[i] - points[i - 1])
    inside = left + slope * (np.maximum(x, points[0]) - points[i - 1])
    return np.where(x > points[-1], right + np.maximum(slope, 0.0) * (x - points[-1]), inside)


@dataclass(frozen=True)
class LatencyProfile:
    """Times of the parts of a round, ms.

    Attributes
    ----------
    mid, verify : Grid
        A mid pass by new nodes x context, a verification pass by tokens (kept nodes + root) x
        context.
    plain_ms : float
        One step of plain decoding.
    small_ms, mid_overhead_ms, signals_ms, scheduler_ms, prune_ms, accept_ms : float
        A small step, the tree work of a mid step, reading the signals, one decision, the pruning,
        and the tree work after verification.
    target_ms, mid_ms : float
        T_tgt and T_mid of the scheduler's input: mean verification pass and mean mid call.
    evaluation : {"needed", "all"}
        The cheaper way to evaluate nodes in a mid call.
    mid_sequential : bool
        The mid drafter goes through a tree level by level (:class:`treegraft_core.mid.MidCache`).
        Then ``mid`` is of one level, and L levels of n nodes together take L times what a level of
        n / L nodes takes, a number that need not be whole.
    meta : dict
        Machine, versions, pair.
    """

    mid: Grid
    verify: Grid
    plain_ms: float
    small_ms: float
    mid_overhead_ms: float
    signals_ms: float
    scheduler_ms: float
    prune_ms: float
    accept_ms: float
    target_ms: float
    mid_ms: float
    evaluation: str
    meta: dict[str, Any] = field(default_factory=dict)
    mid_sequential: bool = False

    def mid_call_ms(self, call: MidCall, context: int, evaluation: str | None = None) -> float:
        """Time of one mid step with these counts, ms."""
        counts = np.array([getattr(call, name) for name in PASS_COUNTS])
        return float(self.mid_step_ms(counts, context, evaluation))

    def mid_step_ms(
        self, counts: ArrayLike, context: ArrayLike, evaluation: str | None = None
    ) -> Any:
        """Time of mid steps with these counts, ms, shape ``[…]``.

        Parameters
        ----------
        counts : array, shape ``[…, 5]``
            `PASS_COUNTS` of each.
        context : array
            Committed tokens, the root included; broadcasts to ``[…]``.
        evaluation : {"needed", "all"}, optional
            How mid calls evaluate nodes (default: the cheaper way).
        """
        refresh, new, every, levels, all_levels = np.moveaxis(np.asarray(counts), -1, 0)
        if (evaluation or self.evaluation) == "all":
            passes = [(every, all_levels)]
        else:
            passes = [(refresh, levels), (new, np.minimum(new, 1))]
        ms: Any = self.mid_overhead_ms
        for nodes, deep in passes:
            ms = ms + np.where(nodes > 0, self.mid_pass_ms(nodes, deep, context), 0.0)
        return ms

    def mid_pass_ms(self, nodes: ArrayLike, levels: ArrayLike, context: ArrayLike) -> Any:
        """Time of mid passes over ``nodes`` new nodes in ``levels`` levels, ms."""
        if not self.mid_sequential:
            return self.mid.at(nodes, context)
        deep = np.maximum(levels, 1)
        return deep * self.mid.at(np.asarray(nodes) / deep, context)

    def verify_ms(self, kept: int, context: int) -> float:
        """Time of verification of ``kept`` nodes and the root, ms."""
        return float(self.verify.at(kept + 1, context))

    def save(self, path: Path | str) -> None:
        """Write the profile as JSON."""
        write_json(path, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data, as in its file."""
        return {"format": PROFILE_FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, value: Any, where: str) -> LatencyProfile:
        """Return the profile of plain data.

        Raises
        ------
        InputError
            If something is missing or not as it must be; the message names ``where``.
        """
        try:
            if not isinstance(value, dict) or value["format"] != PROFILE_FORMAT:
                raise ValueError(f"not format {PROFILE_FORMAT}")
            given = {name: part for name, part in value.items() if name != "format"}
            for name in ("mid", "verify"):
                given[name] = _grid(given[name], name)
            for name in TIMES:
                given[name] = _time(given[name], name)
            if given["evaluation"] not in ("needed", "all"):
                raise ValueError("evaluation must be needed or all")
            if not isinstance(given.get("mid_sequential", False), bool):
                raise ValueError("mid_sequential must be true or false")
            if not isinstance(given.get("meta", {}), dict):
                raise ValueError("meta must be an object")
            return cls(**given)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"profile={where}: no complete latency profile ({str(error)[:160]}); run "
                "python -m pipeline.run stage=profile"
            ) from error

    @classmethod
    def load(cls, path: Path | str) -> LatencyProfile:
        """Read a profile written by :meth:`save`.

        Raises
        ------
        InputError
            If the file is missing or damaged.
        """
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"profile={path}: no complete latency profile ({error}); run "
                "python -m pipeline.run stage=profile"
            ) from error
        return cls.from_dict(value, str(path))

    def draft_ms(
        self,
        calls: Sequence[MidCall | None],
        context: int,
        evaluation: str | None = None,
    ) -> float:
        """t_D of a schedule without the scheduler's own cost, ms.

        Parameters
        ----------
        calls : sequence of (MidCall or None)
            Counts of each step; None for a small step.
        context : int
            Committed tokens, the root included.
        evaluation : {"needed", "all"}, optional
            How mid calls evaluate nodes (default: the cheaper way).
        """
        return (
            sum(self.step_ms(call, context, evaluation) for call in calls)
            + self.prune_ms
            + self.accept_ms
        )

    def step_ms(self, call: MidCall | None, context: int, evaluation: str | None = None) -> float:
        """Time of one drafting step, ms; ``call`` is None for a small step."""
        return self.small_ms if call is None else self.mid_call_ms(call, context, evaluation)

    def times(
        self, found: Enumeration, context: IntArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return what the runtime would have spent on every schedule at every state, ms.

        Parameters
        ----------
        found : Enumeration
            Outcomes of S states.
        context : int64 array, shape ``[S]``
            Committed tokens at each, the root included.

        Returns
        -------
        step_ms : float64 array, shape ``[S, N, D]``
            Each drafting step.
        draft_ms, verify_ms : float64 array, shape ``[S, N]``
            t_D without the scheduler's own cost, and t_V.
        """
        mid_ms = self.mid_step_ms(found.counts[..., PASS_COLUMNS], context[:, None, None])
        step_ms = np.where(found.bits[None] > 0, mid_ms, self.small_ms)
        draft_ms = step_ms.sum(-1) + self.prune_ms + self.accept_ms
        return step_ms, draft_ms, self.verify.at(found.kept_nodes + 1, context[:, None])

    def decision_ms(self) -> float:
        """Time of reading the signals and deciding once, ms."""
        return self.signals_ms + self.scheduler_ms
