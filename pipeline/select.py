"""stage=select: which of the ten signals the scheduler reads (design section 4, step 2).

Forward selection by grouped cross-validation. The score of a set of signals is the out-of-fold R²
of a ridge regression on the linear and pairwise terms of context, signals, action and future, for
committed tokens and for the round's time, averaged. The products of the widest design are summed
once for each fold over **all** rows; every set is then a sub-block of them, so that the stage takes
seconds and needs no subsample.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig
from sklearn.model_selection import GroupKFold
from tqdm import tqdm

from pipeline.features import (
    Trajectories,
    context_matrix,
    group_keys,
    load_trajectories,
    schedule_ahead,
    table_order,
)
from pipeline.report import stage_run
from pipeline.training import column_stats
from treegraft_core import PAPER_SIGNALS, SIGNALS, InputError
from treegraft_core.files import write_json
from treegraft_core.tree import FloatArray

RIDGE = 1e-2
CLIP = 4.0
CHUNK = 16_384
TARGETS = ("committed", "time")


@dataclass(frozen=True)
class Moments:
    """Sums of products of the widest design, of each fold.

    Attributes
    ----------
    xx : float64 array, shape ``[folds, p, p]``
    xy : float64 array, shape ``[folds, p, 2]``
    yy : float64 array, shape ``[folds, 2]``
        Targets are standardised over all rows.
    rows : int64 array, shape ``[folds]``
    needs : bool array, shape ``[p, 10]``
        The signals that a column of the design is made of.
    """

    xx: FloatArray
    xy: FloatArray
    yy: FloatArray
    rows: NDArray[np.int64]
    needs: NDArray[np.bool_]

    def r2(self, signals: tuple[str, ...]) -> tuple[float, float]:
        """Return the out-of-fold R² of committed tokens and of time with ``signals``."""
        allowed = np.array([name in signals for name in SIGNALS])
        keep = np.flatnonzero((~self.needs | allowed).all(axis=1))
        xx, xy = self.xx[:, keep[:, None], keep], self.xy[:, keep]
        squared = np.zeros(2)
        for fold in range(len(self.rows)):
            penalty = RIDGE * (self.rows.sum() - self.rows[fold]) * np.eye(len(keep))
            penalty[0, 0] = 0.0  # the intercept
            w = np.linalg.solve(xx.sum(axis=0) - xx[fold] + penalty, xy.sum(axis=0) - xy[fold])
            squared += self.yy[fold] - 2 * (w * xy[fold]).sum(axis=0)
            squared += (w * (xx[fold] @ w)).sum(axis=0)
        committed, time = 1.0 - squared / np.maximum(self.yy.sum(axis=0), 1e-12)
        return float(committed), float(time)


def standard(values: FloatArray) -> FloatArray:
    """Standardise the columns of ``[n, p]`` and clip them at 4 standard deviations."""
    mean, std = column_stats(values)
    return np.clip((values - mean) / std, -CLIP, CLIP)


def chosen_group(rows: Trajectories, conf: DictConfig) -> str:
    """Return what may not be on both sides of a split; ``auto`` is task if there are enough."""
    group = str(conf.select.group)
    if group == "auto":
        return "task" if rows.frame["task"].nunique() >= int(conf.select.folds) else "prompt"
    return group


def fold_numbers(rows: Trajectories, conf: DictConfig) -> tuple[NDArray[np.int64], int]:
    """Return each row's fold, shape ``[n]``, and the number of groups."""
    folds, group = int(conf.select.folds), chosen_group(rows, conf)
    keys = group_keys(rows.frame, group)
    groups = len(set(keys))
    if folds < 2:
        raise InputError(f"select.folds={folds}: give 2 or more")
    if groups < folds:
        raise InputError(
            f"select.group={group}: the trajectories hold {groups}, fewer than "
            f"select.folds={folds}; give select.group=prompt, fewer folds, or collect more"
        )
    number = np.zeros(len(keys), dtype=np.int64)
    for fold, (_, test) in enumerate(GroupKFold(folds).split(keys, groups=keys)):
        number[test] = fold
    return number, groups


def moments(rows: Trajectories, fold: NDArray[np.int64]) -> Moments:
    """Sum the products of the widest design over the rows of each fold."""
    frame = rows.frame
    ahead = schedule_ahead(rows.bits, frame["step"].to_numpy(np.int64))
    base = np.hstack([context_matrix(frame, rows.depth), ahead])
    base = base[:, base.max(axis=0) > base.min(axis=0)]
    values = standard(np.hstack([base, frame[list(SIGNALS)].to_numpy(np.float64)]))
    time = frame["t_draft_ms"] + frame["t_verify_ms"]
    y = np.stack([frame["committed"].to_numpy(np.float64), time.to_numpy(np.float64)], axis=1)
    mean, std = column_stats(y)
    y = (y - mean) / std
    first, second = np.array(list(combinations_with_replacement(range(values.shape[1]), 2))).T
    single = np.vstack([np.zeros((base.shape[1], len(SIGNALS)), bool), np.eye(len(SIGNALS)) > 0])
    needs = np.vstack([np.zeros((1, len(SIGNALS)), bool), single, single[first] | single[second]])
    folds, p = int(fold.max()) + 1, len(needs)
    xx, xy, yy = np.zeros((folds, p, p)), np.zeros((folds, p, 2)), np.zeros((folds, 2))
    for f in tqdm(range(folds), desc="select", unit="fold"):
        members = np.flatnonzero(fold == f)
        for part in np.split(members, range(CHUNK, len(members), CHUNK)):
            v, t = values[part], y[part]
            x = np.hstack([np.ones((len(v), 1)), v, v[:, first] * v[:, second]])
            xx[f] += x.T @ x
            xy[f] += x.T @ t
            yy[f] += (t * t).sum(axis=0)
    return Moments(xx, xy, yy, np.bincount(fold, minlength=folds), needs)


def forward(sums: Moments, count: int) -> list[dict[str, Any]]:
    """Choose ``count`` signals one by one; each takes the largest mean R², ties by the table."""
    chosen: tuple[str, ...] = ()
    rows = [score(sums, chosen, "0", "(none)")]
    for place in range(1, count + 1):
        left = [name for name in SIGNALS if name not in chosen]
        scores = [score(sums, (*chosen, name), str(place), name) for name in left]
        best = max(scores, key=lambda row: float(row["r2"]))
        chosen = (*chosen, str(best["signal"]))
        rows.append(best)
    return rows


def score(sums: Moments, signals: tuple[str, ...], order: str, label: str) -> dict[str, Any]:
    """Return one row of the table: R² of each target and their mean."""
    r2 = sums.r2(signals)
    named = {f"r2_{name}": value for name, value in zip(TARGETS, r2, strict=True)}
    return {"order": order, "signal": label, **named, "r2": sum(r2) / len(r2)}


def run(conf: DictConfig) -> None:
    """Choose the signals and write ``selection.json`` to ``paths.selection``."""
    count = int(conf.select.signals)
    if not 1 <= count <= len(SIGNALS):
        raise InputError(f"select.signals={count}: choose 1 to {len(SIGNALS)}")
    rows = load_trajectories(conf)
    fold, groups = fold_numbers(rows, conf)
    folder = Path(conf.paths.selection)
    with stage_run(conf, "select", folder) as stage:
        rows.note(stage)
        sums = moments(rows, fold)
        order = forward(sums, count)
        paper = score(sums, PAPER_SIGNALS, "-", "the paper's six")
        every = score(sums, SIGNALS, "-", f"all {len(SIGNALS)}")
        signals = table_order(row["signal"] for row in order[1:])
        stage.show("Forward selection, out-of-fold R²", [*order, paper, every])
        cv = {
            "group": chosen_group(rows, conf),
            "groups": groups,
            "folds": len(sums.rows),
            "rows": len(fold),
            "regressor": f"ridge {RIDGE} on pairwise terms",
            "order": order,
            "r2": order[-1]["r2"],
            "r2_paper_six": paper["r2"],
            "r2_all": every["r2"],
        }
        chosen = {"signals": list(signals), "pairs": list(rows.folders), "cv": cv}
        write_json(folder / "selection.json", chosen)
        stage.wrote(folder / "selection.json", ", ".join(signals))
        shown = ("group", "groups", "folds", "rows", "r2", "r2_paper_six", "r2_all")
        stage.metrics.update({name: cv[name] for name in shown})
        stage.metrics["rows_subsampled"] = "none, every row is used"
        stage.metrics["shared_with_paper"] = len(set(signals) & set(PAPER_SIGNALS))
