"""Pictures of the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from treegraft_core.files import atomic_path
from treegraft_core.tree import FloatArray

if TYPE_CHECKING:
    from pipeline.evaluate import Verdict

GREY, BLUE, ORANGE, GREEN = "#9aa0a6", "#1f77b4", "#ff7f0e", "#2ca02c"


def plot_policies(path: Path, verdict: Verdict, pair: str) -> None:
    """Draw η of every policy with its 95 % interval over prompts: fixed schedules sorted."""
    names = [*sorted(verdict.fixed, key=verdict.eta), "scheduler", "oracle"]
    colours = {
        verdict.small: BLUE,
        verdict.mid: BLUE,
        "scheduler": ORANGE,
        "oracle": GREEN,
    }
    labels = {verdict.small: "All Small", verdict.mid: "All Mid"}
    figure, axes = plt.subplots(figsize=(7, 8), layout="constrained")
    for y, name in enumerate(names):
        low, high = verdict.interval(partial(verdict.eta, name))
        colour = colours.get(name, GREY)
        axes.barh(y, verdict.eta(name), color=colour, height=0.7)
        axes.plot([low, high], [y, y], color="black", linewidth=1)
    axes.axvline(
        1e3 / verdict.plain_ms, color="black", linestyle="--", linewidth=1, label="plain decoding"
    )
    axes.set_yticks(range(len(names)), [labels.get(n, n) for n in names], fontsize=8)
    axes.set_xlabel("η: committed tokens per second, 95 % interval over prompts")
    axes.set_title(f"Held-out prompts, {pair}: η by policy (exact replay)", fontsize=10)
    axes.legend(loc="lower right")
    axes.set_ylim(-0.8, len(names) - 0.2)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)


def plot_calibration(
    path: Path, curves: Mapping[str, FloatArray], shares: tuple[FloatArray, FloatArray] | None
) -> None:
    """Draw mean truth over mean prediction, and predicted beside observed shares of A.

    Parameters
    ----------
    path : Path
        The PNG file.
    curves : mapping of str to float64 array, shape ``[bins, 2]``
        Mean prediction and mean truth of equally many rows each.
    shares : pair of float64 arrays, or None
        Predicted and observed share of every A.
    """
    count = len(curves) + (shares is not None)
    figure, axes = plt.subplots(1, count, figsize=(3.2 * count, 3.3), layout="constrained")
    for panel, (name, points) in zip(axes, curves.items(), strict=False):
        low, high = float(points.min()), float(points.max())
        panel.plot([low, high], [low, high], color=GREY, linewidth=1)
        panel.plot(points[:, 0], points[:, 1], color=BLUE, marker="o", markersize=3, linewidth=1)
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("predicted", fontsize=8)
        panel.set_ylabel("logged", fontsize=8)
        panel.tick_params(labelsize=7)
    if shares is not None:
        place = range(len(shares[0]))
        axes[-1].bar([x - 0.2 for x in place], shares[0], 0.4, color=ORANGE, label="predicted")
        axes[-1].bar([x + 0.2 for x in place], shares[1], 0.4, color=GREY, label="logged")
        axes[-1].set_title("share of A", fontsize=9)
        axes[-1].legend(fontsize=7)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)


def plot_selection(path: Path, selection: Mapping[str, Any], related: FloatArray) -> None:
    """Draw what ``stage=select`` found: four panels.

    Parameters
    ----------
    path : Path
        The PNG file.
    selection : mapping
        Content of ``selection.json``.
    related : float64 array, shape ``[10, 10]``
        Rank correlations of the signals.
    """
    figure, axes = plt.subplots(2, 2, figsize=(12, 9), layout="constrained")
    _draw_order(axes[0, 0], selection)
    _draw_stability(axes[0, 1], selection)
    _draw_importance(axes[1, 0], selection)
    _draw_correlation(axes[1, 1], [row["signal"] for row in selection["stability"]], related)
    for panel in axes.flat:
        panel.tick_params(labelsize=8)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)


def _draw_order(panel: Any, selection: Mapping[str, Any]) -> None:
    steps = selection["cv"]["order"]
    labels = [("" if row["order"] == "0" else "+ ") + row["signal"] for row in steps]
    panel.plot(labels, [row["eta_ratio"] for row in steps], color=BLUE, marker="o")
    lines = {"the paper's six": GREY, "chosen without the fold": ORANGE, "all 10": GREEN}
    for row in selection["comparison"]:
        if row["signals"] in lines:
            colour = lines[row["signals"]]
            panel.axhline(row["eta_ratio"], color=colour, linestyle="--", label=row["signals"])
    panel.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    panel.set_ylabel("η / η of the better endpoint", fontsize=9)
    panel.set_title("Forward selection, out of fold", fontsize=10)
    panel.legend(fontsize=8)


def _draw_stability(panel: Any, selection: Mapping[str, Any]) -> None:
    rows = selection["stability"]
    groups = [name for name in rows[0] if name not in ("signal", "mean_place")]
    height = 0.8 / len(groups)
    for i, (group, colour) in enumerate(zip(groups, (BLUE, ORANGE, GREEN), strict=False)):
        y = [place - 0.4 + (i + 0.5) * height for place in range(len(rows))]
        panel.barh(y, [row[group] for row in rows], height, color=colour, label=f"by {group}")
    marks = {True: " *", False: ""}
    chosen = selection["signals"]
    panel.set_yticks(range(len(rows)), [r["signal"] + marks[r["signal"] in chosen] for r in rows])
    panel.invert_yaxis()
    panel.set_xlim(0, 1)
    panel.set_xlabel("share of selections (seed × fold left out) that choose it", fontsize=9)
    panel.set_title("Stability (* chosen)", fontsize=10)
    panel.legend(fontsize=8)


def _draw_importance(panel: Any, selection: Mapping[str, Any]) -> None:
    drops = selection["importance"]
    colours = [ORANGE if name in selection["signals"] else GREY for name in drops]
    means, spreads = ([d[key] for d in drops.values()] for key in ("mean", "std"))
    panel.barh(list(drops), means, xerr=spreads, color=colours, height=0.7, ecolor="black")
    panel.axvline(0.0, color="black", linewidth=0.8)
    panel.invert_yaxis()
    panel.set_xlabel("η ratio of all ten that goes if the signal is permuted", fontsize=9)
    panel.set_title("Permutation importance (orange: chosen)", fontsize=10)


def _draw_correlation(panel: Any, names: Sequence[str], related: FloatArray) -> None:
    panel.imshow(related, cmap="RdBu_r", vmin=-1, vmax=1)
    panel.set_xticks(range(len(names)), names, rotation=40, ha="right")
    panel.set_yticks(range(len(names)), names)
    for i, row in enumerate(related):
        for j, value in enumerate(row):
            shade = "white" if abs(value) > 0.6 else "black"
            panel.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=shade)
    panel.set_title("Rank correlation over states and prefixes", fontsize=10)
