"""The latency profile: what each part of a round costs on one machine with one pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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

    def mid_call_ms(self, call: MidCall, context: int, evaluation: str | None = None) -> float:
        """Time of one mid step with these counts, ms."""
        return self.mid_overhead_ms + sum(
            self.mid.at(n, context) for n in mid_passes(call, evaluation or self.evaluation)
        )

    def verify_ms(self, kept: int, context: int) -> float:
        """Time of verification of ``kept`` nodes and the root, ms."""
        return float(self.verify.at(kept + 1, context))

    def save(self, path: Path | str) -> None:
        """Write the profile as JSON."""
        write_json(path, {"format": PROFILE_FORMAT, **asdict(self)})

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
            if not isinstance(value, dict) or value.pop("format") != PROFILE_FORMAT:
                raise ValueError(f"not format {PROFILE_FORMAT}")
            for name in ("mid", "verify"):
                grid = value[name]
                value[name] = Grid(
                    tokens=tuple(map(int, grid["tokens"])),
                    context=tuple(map(int, grid["context"])),
                    ms=tuple(tuple(map(float, row)) for row in grid["ms"]),
                    spread_ms=tuple(tuple(map(float, row)) for row in grid["spread_ms"]),
                )
            return cls(**value)
        except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InputError(
                f"profile={path}: no complete latency profile ({error}); run "
                "python -m pipeline.run stage=profile"
            ) from error

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
        counts, at = found.counts, context[:, None, None]
        columns = [2] if self.evaluation == "all" else [0, 1]
        passes = [
            np.where(counts[..., c] > 0, self.mid.at(counts[..., c], at), 0.0) for c in columns
        ]
        step_ms = np.where(
            found.bits[None] > 0, self.mid_overhead_ms + np.sum(passes, axis=0), self.small_ms
        )
        draft_ms = step_ms.sum(-1) + self.prune_ms + self.accept_ms
        return step_ms, draft_ms, self.verify.at(found.kept_nodes + 1, context[:, None])

    def decision_ms(self) -> float:
        """Time of reading the signals and deciding once, ms."""
        return self.signals_ms + self.scheduler_ms


def mid_passes(call: MidCall, evaluation: str) -> list[int]:
    """Return the new nodes of each pass that a mid call makes."""
    passes = [call.all_nodes] if evaluation == "all" else [call.refresh_nodes, call.expand_nodes]
    return [n for n in passes if n]
