"""Pictures of the stages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from treegraft_core.files import atomic_path

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
