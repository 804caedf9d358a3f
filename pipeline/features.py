"""Trajectories as numbers: the scheduler's input z*, the value network's input, group keys.

Nothing of design section 3 is written again here: the context part of z* comes row for row from
`treegraft_core.signals.context_features`, called once for each distinct combination.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from omegaconf import DictConfig

from pipeline.engine import check_name, drafting_config, drafting_rules
from pipeline.inputs import read_json
from pipeline.report import Stage
from pipeline.schema import FEATURES, IDS, STEP, read_trajectories
from pipeline.tasks import held_out_tasks
from treegraft_core import SIGNALS, InputError
from treegraft_core.signals import context_features, context_names
from treegraft_core.tree import FloatArray

OUTCOMES = ("committed", "t_draft_ms", "t_verify_ms")
CONTEXT_KEYS = ["prompt_tokens", "target_ms", "mid_ms", "step", "prefix"]
GROUPS = ("task", "pair", "prompt")
NUMERATORS = ("committed", "accepted")


@dataclass(frozen=True)
class Trajectories:
    """Checked trajectory rows of the pairs that a scheduler is fitted on.

    Attributes
    ----------
    frame : DataFrame
        One row for each step of each schedule of each state; ids, step, features, outcome, and
        ``pair`` and ``task``. A state is its ``pair`` and ``state_id``: pairs with one target share
        the latter.
    bits : int8 array, shape ``[n, D]``
        The schedule of each row.
    folders : dict of str to Path
        Where the rows of each pair came from.
    """

    frame: pd.DataFrame
    bits: NDArray[np.int8]
    folders: dict[str, Path]

    @property
    def depth(self) -> int:
        """D."""
        return int(self.bits.shape[1])

    def note(self, stage: Stage) -> None:
        """Note the folders as the stage's input."""
        rows = self.frame["pair"].value_counts()
        for pair, folder in self.folders.items():
            stage.read(folder, f"{rows[pair]:,} rows")


def fit_pairs(conf: DictConfig) -> tuple[str, ...]:
    """Return the pairs to fit on, sorted, so that their order changes nothing."""
    pairs = [str(name) for name in conf.fit.pairs]
    check_name("fit.name", str(conf.fit.name))
    for name in pairs:
        check_name("fit.pairs", name)
    if not pairs or len(set(pairs)) < len(pairs):
        raise InputError(f"fit.pairs={pairs}: give one pair or more, each once")
    return tuple(sorted(pairs))


def check_fitted(conf: DictConfig, pairs: Sequence[str], path: Path, stage: str) -> None:
    """Raise if the file at ``path`` was fitted on other pairs than ``fit.pairs``."""
    wanted = fit_pairs(conf)
    if tuple(pairs) != wanted:
        raise InputError(
            f"fit.pairs={list(wanted)}: {path} was fitted on {list(pairs)}; run python -m "
            f"pipeline.run stage={stage} again, or give another fit.name"
        )


def trajectory_folder(conf: DictConfig, pair: str) -> Path:
    """Return the folder of a pair's trajectories."""
    return Path(conf.paths.trajectories) / "collect" / f"pair={pair}"


def load_trajectories(conf: DictConfig) -> Trajectories:
    """Read and check the trajectories of all ``fit.pairs``.

    Raises
    ------
    InputError
        If a pair has none, a file is damaged, the drafting rules are not the configured ones, a
        value is not a finite number, a time is not positive, the schedules are not of depth
        ``drafting.depth``, or a row is of a held-out task.
    """
    folders = {pair: trajectory_folder(conf, pair) for pair in fit_pairs(conf)}
    for pair, folder in folders.items():
        if next(folder.rglob("*.parquet"), None) is None:
            choice = "" if pair == str(conf.pair.name) else f" pair={pair}"
            raise InputError(
                f"fit.pairs: no trajectories of {pair} in {folder}; run python -m pipeline.run "
                f"stage=collect{choice} first"
            )
    read = [read_pair(conf, pair, folder) for pair, folder in folders.items()]
    frame = pd.concat([frame for frame, _ in read], ignore_index=True)
    return Trajectories(frame, np.concatenate([bits for _, bits in read]), folders)


def read_pair(conf: DictConfig, pair: str, folder: Path) -> tuple[pd.DataFrame, NDArray[np.int8]]:
    """Read and check the rows of one pair; return them and their schedules ``[n, D]``."""
    columns = [*IDS, *STEP, *FEATURES, *OUTCOMES, "task"]
    rules = drafting_rules(drafting_config(conf))
    frame = read_trajectories(folder, columns, rules).assign(pair=pair)
    if "task" not in frame:
        frame["task"] = conf.task.name
    for task in held_out_tasks(conf):
        if (frame["task"] == task).any():
            part = folder / f"task={quote(task, safe='')}"
            raise InputError(
                f"held_out_tasks: nothing is fitted on {task}, but {folder} holds rows of it; "
                f"delete {part} or take {task} out of held_out_tasks"
            )
    if frame.empty:
        raise bad_rows(folder, "hold no rows")
    if frame.isna().to_numpy().any():
        raise bad_rows(folder, "have rows with missing values")
    numbers = frame[[*FEATURES, *OUTCOMES]].to_numpy(np.float64)
    if not np.isfinite(numbers).all():
        raise bad_rows(folder, "have values that are not finite")
    if (frame[["target_ms", "mid_ms", "t_verify_ms"]] <= 0).to_numpy().any():
        raise bad_rows(folder, "have a time of 0 ms or less")
    return frame, schedule_bits(frame, int(conf.drafting.depth), folder)


def bad_rows(folder: Path, what: str) -> InputError:
    """Return the error for trajectories that have to be collected again."""
    return InputError(
        f"trajectories={folder}: {what}; delete the folder and run "
        "python -m pipeline.run stage=collect again"
    )


def schedule_bits(frame: pd.DataFrame, depth: int, folder: Path) -> NDArray[np.int8]:
    """Return τ of each row, shape ``[n, D]``; check it against step, prefix, action and future."""
    found = sorted(set(frame["schedule"].str.len()))
    if found != [depth]:
        raise InputError(
            f"drafting.depth={depth}: {folder} holds schedules of {found[0]} steps; give "
            f"drafting.depth={found[0]} or collect again"
        )
    text = np.array(frame["schedule"].to_list(), dtype=f"S{depth}")
    bits = (text.view(np.uint8).reshape(-1, depth) - ord("0")).astype(np.int8)
    whole = frame["prefix"] + frame["action"].astype(str) + frame["future"]
    consistent = (whole == frame["schedule"]) & (frame["prefix"].str.len() == frame["step"] - 1)
    if not (np.isin(bits, (0, 1)).all() and consistent.all()):
        raise bad_rows(folder, "have a schedule that is not prefix + action + future")
    return bits


def table_order(signals: Iterable[str]) -> tuple[str, ...]:
    """Return ``signals`` in the order of the design's table."""
    return tuple(sorted(signals, key=SIGNALS.index))


def read_selection(conf: DictConfig) -> tuple[str, ...]:
    """Return the signals that ``stage=select`` chose, in the order of the design's table."""
    path = Path(conf.paths.selection) / "selection.json"
    selection = read_json(path, "select")
    signals = selection.get("signals")
    if not isinstance(signals, list) or not signals or not set(signals) <= set(SIGNALS):
        raise InputError(
            f"{path}: signals={signals} are not signals; run python -m pipeline.run stage=select"
        )
    check_fitted(conf, selection.get("pairs", []), path, "select")
    return table_order(signals)


def input_names(depth: int, signals: Iterable[str]) -> tuple[str, ...]:
    """Return the names of z*: the 6 + D context features, then the selected signals."""
    return (*context_names(depth), *signals)


def context_matrix(frame: pd.DataFrame, depth: int) -> FloatArray:
    """Return `context_features` of every row, shape ``[n, 6 + D]``."""
    groups = frame.groupby(CONTEXT_KEYS, sort=False).ngroup().to_numpy()
    distinct = frame.drop_duplicates(CONTEXT_KEYS)
    columns = [distinct[key].tolist() for key in CONTEXT_KEYS]
    rows = [
        context_features(tokens, target_ms, mid_ms, step, [int(bit) for bit in prefix], depth)
        for tokens, target_ms, mid_ms, step, prefix in zip(*columns, strict=True)
    ]
    return np.stack(rows)[groups]


def scheduler_inputs(frame: pd.DataFrame, signals: Iterable[str], depth: int) -> FloatArray:
    """Return z* of every row, shape ``[n, 6 + D + signals]``, columns as `input_names`."""
    chosen = frame[list(signals)].to_numpy(np.float64)
    return np.hstack([context_matrix(frame, depth), chosen])


def schedule_ahead(bits: NDArray[np.int8], step: NDArray[np.int64]) -> FloatArray:
    """Return action and future of every row, shape ``[n, D]``.

    Column j is 0 for the steps before k, then −1 (small) or 1 (mid) for τ_j; j = k is the action.
    """
    ahead = np.arange(1, bits.shape[1] + 1)[None, :] >= step[:, None]
    return np.where(ahead, 2.0 * bits - 1.0, 0.0)


def value_inputs(rows: Trajectories, signals: Iterable[str]) -> FloatArray:
    """Return the value network's input, z* then `schedule_ahead`: ``[n, 6 + 2 D + signals]``."""
    z = scheduler_inputs(rows.frame, signals, rows.depth)
    return np.hstack([z, schedule_ahead(rows.bits, rows.frame["step"].to_numpy(np.int64))])


def group_keys(frame: pd.DataFrame, group: str) -> NDArray[np.object_]:
    """Return the key that may not be on both sides of a split: ``task``, ``pair``, ``prompt``."""
    if group not in GROUPS:
        raise InputError(f"select.group={group}: choose one of {', '.join(GROUPS)}")
    return prompt_keys(frame) if group == "prompt" else frame[group].to_numpy(object)


def prompt_keys(frame: pd.DataFrame) -> NDArray[np.object_]:
    """Return each row's prompt, unique across tasks and one for all pairs, shape ``[n]``."""
    return (frame["task"] + "\n" + frame["prompt_id"]).to_numpy(object)


def validation_rows(
    prompts: NDArray[np.object_], share: float, seed: int, key: str
) -> NDArray[np.bool_]:
    """Return which rows validate, shape ``[n]``: whole prompts, about ``share`` of them.

    ``key`` names the config key of ``share`` in the error.
    """
    names, index = np.unique(prompts.astype(str), return_inverse=True)
    if not 0 < share < 1:
        raise InputError(f"{key}={share}: give a share between 0 and 1, such as 0.2")
    if len(names) < 2:
        raise InputError(
            f"{key}={share}: the rows come from {len(names)} prompt and no prompt may be on both "
            "sides of the split; collect at least 2 prompts"
        )
    count = min(max(1, round(share * len(names))), len(names) - 1)
    held = np.zeros(len(names), dtype=bool)
    held[np.random.default_rng(seed).permutation(len(names))[:count]] = True
    return held[index]


def check_numerator(conf: DictConfig) -> str:
    """Return ``value.numerator``, checked."""
    numerator = str(conf.value.numerator)
    if numerator not in NUMERATORS:
        raise InputError(f"value.numerator={numerator}: choose one of {', '.join(NUMERATORS)}")
    return numerator


def throughput(outcome: FloatArray, numerator: str) -> FloatArray:
    """Return η in tokens/s, shape ``[n]``.

    Parameters
    ----------
    outcome : float64 array, shape ``[n, 3]``
        Committed tokens, t_D and t_V (ms): the columns `OUTCOMES`.
    numerator : {"committed", "accepted"}
        A + 1, this project's η, or A, the paper's.
    """
    bonus = 1.0 if numerator == "accepted" else 0.0
    eta: FloatArray = 1000.0 * (outcome[:, 0] - bonus) / (outcome[:, 1] + outcome[:, 2])
    return eta
