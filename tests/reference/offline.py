"""The offline stages' arithmetic in plain Python: one row, one state, one round at a time.

Nothing here is fast and nothing is shared with ``pipeline``. A schedule or a prefix is a text of
bits; a text is a list of rounds' steps and times, one position after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

Rows = Sequence[Mapping[str, Any]]
ONCE = ("prompt_id", "turn", "position", "prompt_tokens", "context_tokens", "target_ms", "mid_ms")


def prefixes(depth: int) -> list[str]:
    """Return the prefixes before all steps, by step, then in binary order."""
    return ["".join(bits) for k in range(depth) for bits in product("01", repeat=k)]


def schedules(depth: int) -> list[str]:
    """Return all schedules in binary order."""
    return ["".join(bits) for bits in product("01", repeat=depth)]


def state_of(rows: Rows, depth: int, signals: Sequence[str], counts: Sequence[str]) -> Any:
    """Return what the D · 2^D rows of a state say, each number looked up in its own row."""
    by = {(row["schedule"], row["step"]): row for row in rows}
    assert len(by) == len(rows) == depth << depth
    found: dict[str, Any] = {name: rows[0][name] for name in ONCE}
    at = [(prefix, len(prefix) + 1) for prefix in prefixes(depth)]
    small, mid = (
        [by[prefix + bit + "0" * (depth - step), step] for prefix, step in at] for bit in "01"
    )
    found["signals"] = [[row[name] for name in signals] for row in small]
    found["counts"] = [[row[name] for name in counts] for row in mid]
    every = [by[schedule, 1] for schedule in schedules(depth)]
    for name in ("accepted", "t_draft_ms", "t_verify_ms", "kept_nodes", "accepted_ranks"):
        found[name] = [row[name] for row in every]
    return found


# What a mid call is worth ---------------------------------------------------------------------


def best_future(values: Mapping[str, float], prefix: str, action: str) -> float:
    """Return the most that any schedule that begins so is worth."""
    return max(value for name, value in values.items() if name.startswith(prefix + action))


def advantages(depth: int, values: Callable[[str], Mapping[str, float]]) -> list[float]:
    """Return best of the futures with a mid call, less without, at every prefix.

    ``values(prefix)`` is what each schedule is worth, seen from there.
    """
    return [
        best_future(values(prefix), prefix, "1") - best_future(values(prefix), prefix, "0")
        for prefix in prefixes(depth)
    ]


def continuation(
    depth: int, values: Mapping[str, float], wanted: Mapping[str, bool]
) -> list[float]:
    """Return what a mid call brings at every prefix if decisions go on as wanted."""

    def go_on(prefix: str) -> float:
        if len(prefix) == depth:
            return values[prefix]
        return go_on(prefix + ("1" if wanted[prefix] else "0"))

    return [go_on(prefix + "1") - go_on(prefix + "0") for prefix in prefixes(depth)]


def covered(rounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return tokens/ms and mean ms of rounds (tokens, ms), one at each position of texts."""
    weights = [1 / max(tokens, 1.0) for tokens, _ in rounds]
    sums = [sum(w * r[i] for w, r in zip(weights, rounds, strict=True)) for i in range(2)]
    return sums[0] / sums[1], sums[1] / sum(weights)


def best_ratio(
    counts: Sequence[Sequence[tuple[float, float]]],
    seen: Sequence[Sequence[tuple[float, float]]],
    iterations: int,
) -> tuple[float, float]:
    """Return rate and mean time of rounds chosen by gain: the choices of each position."""
    best = max(covered([row[n] for row in counts]) for n in range(len(counts[0])))
    for _ in range(iterations):
        rounds = []
        for row, guess in zip(counts, seen, strict=True):
            gains = [tokens - best[0] * ms for tokens, ms in guess]
            rounds.append(row[gains.index(max(gains))])
        found = covered(rounds)
        if found[0] <= best[0]:
            break
        best = found
    return best


# Texts ----------------------------------------------------------------------------------------


def time_to_end(steps: Sequence[int], ms: Sequence[float], start: int) -> float:
    """Decode one text from a position to its end, round by round; return what it takes."""
    total = 0.0
    while start < len(steps):
        total += ms[start]
        start += steps[start]
    return total


def visits(steps: Sequence[int], first: int) -> list[float]:
    """Return how often each position is visited if decoding starts at any of the first."""
    starts = min(first, len(steps))
    seen = [0.0] * len(steps)
    for start in range(starts):
        at = start
        while at < len(steps):
            seen[at] += 1 / starts
            at += steps[at]
    return seen


def gains(
    accepted: Sequence[Sequence[int]],
    ms: Sequence[Sequence[float]],
    leaf: Sequence[int],
    rate: float,
    tokens: float,
) -> list[list[float]]:
    """Return what each schedule is worth at each position of a text, if ``leaf`` goes on."""
    length = len(leaf)
    steps = [min(accepted[at][leaf[at]] + 1, length - at) for at in range(length)]
    mine = [ms[at][leaf[at]] for at in range(length)]
    found = []
    for at in range(length):
        row = []
        for n, spent in enumerate(ms[at]):
            after = min(at + accepted[at][n] + 1, length)
            # What is saved on the way to the end against going on as before.
            more = spent + time_to_end(steps, mine, after) - time_to_end(steps, mine, at)
            row.append(-rate * more / tokens)
        found.append(row)
    return found


# Networks -------------------------------------------------------------------------------------


def affine(weight: Any, bias: Any, h: Sequence[float]) -> list[float]:
    """Return a linear layer's output."""
    out = np.asarray(weight, float) @ np.asarray(h) + np.asarray(bias, float)
    return [float(v) for v in out]


def silu(h: Sequence[float]) -> list[float]:
    """Return x · sigmoid(x)."""
    return [v / (1 + math.exp(-v)) for v in h]


def softmax(h: Sequence[float]) -> list[float]:
    """Return shares that sum to 1."""
    powers = [math.exp(v - max(h)) for v in h]
    return [p / sum(powers) for p in powers]


def value_heads(
    tensors: Mapping[str, Any],
    stats: Mapping[str, Mapping[str, float]],
    x: Sequence[float],
    mid_ms: float,
    target_ms: float,
    member: int = 0,
) -> tuple[float, float, float]:
    """Return committed tokens, t_D and t_V (ms) of one input, from a value network's files."""

    def tensor(name: str) -> Any:
        return tensors[f"{member}.{name}"]

    h = [
        (v - float(m)) / float(s)
        for v, m, s in zip(x, tensor("x_mean"), tensor("x_std"), strict=True)
    ]
    layer = 0
    while f"{member}.net.trunk.{layer}.weight" in tensors:
        h = silu(affine(tensor(f"net.trunk.{layer}.weight"), tensor(f"net.trunk.{layer}.bias"), h))
        layer += 2
    out = []
    for i, (name, unit) in enumerate(
        (("committed", 1.0), ("t_draft_ms", mid_ms), ("t_verify_ms", target_ms))
    ):
        raw = affine(tensor(f"net.heads.{name}.weight"), tensor(f"net.heads.{name}.bias"), h)
        if len(raw) > 1:
            value = sum((n + 1) * p for n, p in enumerate(softmax(raw)))
        else:
            value = raw[0] * float(tensor("y_std")[i]) + float(tensor("y_mean")[i])
        out.append(unit * min(max(value, stats[name]["min"]), stats[name]["max"]))
    return out[0], out[1], out[2]
