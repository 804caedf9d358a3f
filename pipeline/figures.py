"""Pictures of the report. Each function draws one figure; `save` writes it as PNG.

Colours are those of Okabe and Ito, which stay apart for colour-blind readers.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pipeline.results import (
    Estimate,
    Picks,
    Policy,
    Replay,
    Results,
    System,
    role_speedup,
    task_label,
)
from treegraft_core.files import atomic_path

BLACK, ORANGE, SKY, GREEN = "#000000", "#e69f00", "#56b4e9", "#009e73"
YELLOW, BLUE, VERMILION, PURPLE = "#f0e442", "#0072b2", "#d55e00", "#cc79a7"
GREY = "#80868b"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, BLACK)
ROLE_COLOURS = {
    "small": BLUE,
    "mid": ORANGE,
    "scheduler": GREEN,
    "guarded": GREEN,
    "plain": BLACK,
    "fastest": BLACK,
}
PART_COLOURS = {
    "small": BLUE,
    "mid": ORANGE,
    "signals": PURPLE,
    "scheduler": GREEN,
    "prune": YELLOW,
    "verify": SKY,
    "accept": VERMILION,
}
WIDTH = 7.0
DOTS_PER_INCH = 200
TITLE_CHARACTERS, LABEL_CHARACTERS = 72, 38
STYLE = {
    "font.size": 10,
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#5c6370",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "legend.frameon": False,
    "text.parse_math": False,  # a task may be named a$b$
}


def draw(plot: Callable[..., Any], *arguments: Any, path: Path) -> Path:
    """Draw ``plot(*arguments)`` in the report's style and write it to ``path`` as PNG."""
    with plt.rc_context(STYLE):
        figure = plot(*arguments)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=DOTS_PER_INCH, format="png")
        plt.close(figure)
    return path


def _axes(height: float, title: str, **labels: str) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(textwrap.fill(title, TITLE_CHARACTERS), x=0.01, ha="left")
    axes.set(**labels)
    return figure, axes


def _short(names: Iterable[str]) -> list[str]:
    """Return labels of an axis, cut so that they leave room for the picture."""
    return [n if len(n) <= LABEL_CHARACTERS else n[: LABEL_CHARACTERS - 1] + "…" for n in names]


def _legend(figure: Any, columns: int) -> None:
    figure.legend(loc="outside lower center", ncols=columns)


def _point(axes: Any, at: Estimate, y: float, colour: str, label: str | None = None) -> None:
    """Draw a figure as a dot at height ``y``, with its interval as a bar if it has one."""
    if math.isfinite(at.low):
        axes.plot([at.low, at.high], [y, y], color=colour, linewidth=2)
    axes.plot([at.value], [y], "o", color=colour, markersize=6, label=label)


def speedups(results: Results) -> Any:
    """Draw every system's speed-up over plain decoding, and what was predicted."""
    systems = [s for s in results.systems if s.role != "plain"]
    title = f"{results.pair}: measured and predicted speed-up"
    figure, axes = _axes(1.6 + 0.34 * len(systems), title, xlabel="speed-up, × plain decoding")
    for y, system in enumerate(systems):
        found = results.speedup(system.name, results.plain)
        colour = ROLE_COLOURS.get(system.role, GREY)
        _point(axes, found, y, colour, "measured, 95 % interval over prompts" if y == 0 else None)
        if system.predicted is not None:
            axes.plot([system.predicted], [y], "D", color=VERMILION, markersize=7, fillstyle="none")
    if any(s.predicted is not None for s in systems):
        axes.plot([], [], "D", color=VERMILION, markersize=7, fillstyle="none", label="predicted")
    axes.axvline(1, color=BLACK, linestyle="--", linewidth=1, label="plain decoding")
    axes.set_yticks(range(len(systems)), _with_turns(results, systems))
    axes.set_ylim(len(systems) - 0.4, -0.6)
    _legend(figure, 3)
    return figure


def _with_turns(results: Results, systems: Sequence[System]) -> list[str]:
    """Return the labels, with the turns of a system that did not run on all of them."""
    labels = _short(s.label for s in systems)
    turns = [len(results.turns(s.name)) for s in systems]
    most = max(turns)
    return [
        label if n == most else f"{label}, {n} turns"
        for label, n in zip(labels, turns, strict=True)
    ]


def by_task(results: Results) -> Any:
    """Draw S, M and TreeGraft over plain decoding by task and on average."""
    tasks = [*results.tasks, None]
    shown = [s for s in map(results.role, ("small", "mid", "scheduler")) if s is not None]
    title = f"{results.pair}: speed-up by task"
    figure, axes = _axes(1.6 + 0.55 * len(tasks), title, xlabel="speed-up, × plain decoding")
    for place, system in enumerate(shown):
        for y, task in enumerate(tasks):
            chosen = results.tasks if task is None else [task]
            found = role_speedup(results, system.role, "plain", chosen, average=task is None)
            height = y + 0.22 * (place - (len(shown) - 1) / 2)
            label = f"{system.label}, 95 % interval" if y == 0 else None
            _point(axes, found, height, ROLE_COLOURS[system.role], label)
    axes.axhline(len(tasks) - 1.5, color=GREY, linewidth=1)
    axes.axvline(1, color=BLACK, linestyle="--", linewidth=1, label="plain decoding")
    labels = ["average of tasks" if t is None else task_label(results, t) for t in tasks]
    axes.set_yticks(range(len(tasks)), _short(labels))
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    _legend(figure, 2)
    return figure


def picks(results: Results, found: Mapping[str, Picks]) -> Any:
    """Draw at which depths, relative to N_k, the mid drafter's picks lie."""
    offsets = sorted({offset for picked in found.values() for offset in picked.by_offset})
    figure, axes = _axes(
        3.6,
        f"{results.pair}: where the mid drafter's picks lie",
        xlabel="depth of a pick minus the deepest depth of the frontier N_k, tokens",
        ylabel="share of the picks, %",
    )
    width = 0.8 / len(found)
    for place, (name, picked) in enumerate(found.items()):
        total = sum(picked.by_offset.values())
        heights = [100 * picked.by_offset.get(offset, 0) / total for offset in offsets]
        x = np.array(offsets) + width * (place - (len(found) - 1) / 2)
        label = f"{results.label(name)}: {100 * picked.earlier_share:.1f} % at an earlier depth"
        bars = axes.bar(x, heights, 0.94 * width, color=CYCLE[place % len(CYCLE)], label=label)
        if len(found) <= 2:
            axes.bar_label(bars, fmt="%.0f", padding=1, fontsize=9)
    axes.set_xticks(offsets)
    axes.grid(visible=False, axis="x")
    _legend(figure, 1)
    return figure


def calls_by_step(results: Results, name: str, rates: Mapping[str, Sequence[float]]) -> Any:
    """Draw how often a system calls the mid drafter, by step and task."""
    tasks, table = list(rates), 100 * np.array([list(row) for row in rates.values()])
    figure, axes = _axes(
        1.5 + 0.36 * len(tasks),
        f"{results.pair}, {results.label(name)}: calls of the mid drafter by step",
        xlabel="step k of a round",
    )
    image = axes.imshow(table, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for y, x in np.ndindex(*table.shape):
        if math.isfinite(table[y, x]):
            colour = "white" if table[y, x] > 60 else "black"
            axes.text(x, y, f"{table[y, x]:.0f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(table.shape[1]), [str(k + 1) for k in range(table.shape[1])])
    labels = ["all tasks" if t == "all" else task_label(results, t) for t in tasks]
    axes.set_yticks(range(len(tasks)), _short(labels))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="rounds with a call, %", pad=0.02).outline.set_visible(
        False
    )
    return figure


def cost(results: Results) -> Any:
    """Draw what a round costs by part, stacked, one bar a system."""
    names = list(results.cost)
    parts = list(dict.fromkeys(part for row in results.cost.values() for part in row))
    title = f"{results.pair}: cost of a round by part"
    figure, axes = _axes(1.8 + 0.34 * len(names), title, xlabel="time of a round, ms")
    left = np.zeros(len(names))
    for place, part in enumerate(parts):
        ms = np.nan_to_num([results.cost[name].get(part, 0.0) for name in names])
        colour = PART_COLOURS.get(part, CYCLE[place % len(CYCLE)])
        axes.barh(range(len(names)), ms, 0.7, left=left, color=colour, label=part)
        left += ms
    for y, total in enumerate(left):
        axes.annotate(f"{total:.1f}", (total, y), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(names)), _short(map(results.label, names)))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")
    _legend(figure, 4)
    return figure


def budget(results: Results, replay: Replay) -> Any:
    """Draw η against mid calls a round: fixed schedules, policies, and the best at each budget."""
    figure, axes = _axes(
        4.6,
        f"{results.pair}: throughput against mid calls (exact replay)",
        xlabel="mid calls a round; of the curves: the most that are allowed",
        ylabel="η, committed tokens/s",
    )
    inner = [p for p in replay.fixed if len(set(p.name)) > 1]
    axes.scatter(
        [p.calls for p in inner],
        [p.eta.value for p in inner],
        s=26,
        facecolors="none",
        edgecolors=GREY,
        label="other fixed schedules",
    )
    labels = {policy.name: policy.label for policy in replay.policies}
    for column, colour, line in (("oracle", PURPLE, "--"), ("scheduler", GREEN, "-")):
        _curve(axes, replay, column, f"{labels.get(column, column)}, at most x calls", colour, line)
    for policy, colour, marker, label in _marked(replay):
        _errorbar(axes, policy, colour, marker, label)
    axes.axhline(replay.plain, color=BLACK, linestyle=":", linewidth=1.2, label="plain decoding")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, 2)
    return figure


def _curve(axes: Any, replay: Replay, column: str, label: str, colour: str, line: str) -> None:
    if not replay.by_calls:
        return
    x = [b.calls for b in replay.by_calls]
    eta = np.array([getattr(b, column) for b in replay.by_calls])
    axes.plot(x, eta[:, 0], line, color=colour, linewidth=1.8, label=label)
    if np.isfinite(eta[:, 1:]).all():
        axes.fill_between(x, eta[:, 1], eta[:, 2], color=colour, alpha=0.15, linewidth=0)


def _marked(replay: Replay) -> Iterable[tuple[Policy, str, str, str]]:
    """Yield the endpoints, the scheduler and the oracle, each with colour, marker and label."""
    for policy in replay.fixed:
        if set(policy.name) == {"0"}:
            yield policy, BLUE, "s", f"All Small ({policy.name})"
        elif set(policy.name) == {"1"}:
            yield policy, ORANGE, "s", f"All Mid ({policy.name})"
    for policy in replay.policies:
        if policy.name in ("scheduler", "oracle"):
            colour = GREEN if policy.name == "scheduler" else PURPLE
            yield policy, colour, "D", f"{policy.label}, no limit"


def _errorbar(axes: Any, policy: Policy, colour: str, marker: str, label: str) -> None:
    value, low, high = policy.eta
    if math.isfinite(low):
        axes.plot([policy.calls] * 2, [low, high], color=colour, linewidth=2)
    axes.plot(
        [policy.calls],
        [value],
        marker,
        color=colour,
        markersize=8,
        markeredgecolor="white",
        linestyle="none",
        label=label,
    )
