"""The latency profile: what each part of a round costs on one machine with one pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from treegraft_core.drafting import MidCall
from treegraft_core.errors import InputError
from treegraft_core.files import write_json

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

    def at(self, tokens: float, context: float) -> float:
        """Interpolate linearly, ms; beyond the last point the last slope goes on."""
        columns = [_line(context, self.context, row) for row in self.ms]
        return max(_line(tokens, self.tokens, columns), 1e-3)


def _line(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    if len(xs) == 1 or x <= xs[0]:
        return float(ys[0])
    i = min(int(np.searchsorted(xs, x)), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    if x > xs[-1]:
        return float(ys[-1] + max(slope, 0.0) * (x - xs[-1]))
    return float(ys[i - 1] + slope * (x - xs[i - 1]))


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
        return self.verify.at(kept + 1, context)

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

    def decision_ms(self) -> float:
        """Time of reading the signals and deciding once, ms."""
        return self.signals_ms + self.scheduler_ms


def mid_passes(call: MidCall, evaluation: str) -> list[int]:
    """Return the new nodes of each pass that a mid call makes."""
    passes = [call.all_nodes] if evaluation == "all" else [call.refresh_nodes, call.expand_nodes]
    return [n for n in passes if n]
