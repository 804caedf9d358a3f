"""Trajectories as numbers: the scheduler's input z*, the value network's input, group keys.

Nothing of design section 3 is written again here: the context part of z* is
`treegraft_core.signals.context_matrix`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from pipeline.engine import check_name, drafting_config, drafting_rules
from pipeline.hardware import at_budget
from pipeline.inputs import read_json
from pipeline.places import dataset_url, local_pair, local_trajectories
from pipeline.report import Stage
from pipeline.schema import logged_budgets
from pipeline.tasks import held_out_tasks
from pipeline.tries import Tries, join, prefix_bits, prefix_steps, read_tries, schedules
from treegraft_core import SIGNALS, InputError, LatencyProfile
from treegraft_core.signals import context_matrix, context_names
from treegraft_core.tree import FloatArray

OUTCOMES = ("committed", "t_draft_ms", "t_verify_ms")
GROUPS = ("task", "pair", "prompt")
NUMERATORS = ("committed", "accepted")


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
    return local_trajectories(conf) / "collect" / f"pair={pair}"


def load_tries(conf: DictConfig) -> Tries:
    """Read and check the trajectories of all ``fit.pairs``.

    Raises
    ------
    InputError
        If a pair has none or unsound ones (`read_tries`), or a row is of a held-out task.
    """
    folders = {pair: local_pair(conf, "collect", pair) for pair in fit_pairs(conf)}
    for pair, folder in folders.items():
        if next(folder.rglob("*.parquet"), None) is None:
            choice = "" if pair == str(conf.pair.name) else f" pair={pair}"
            where = dataset_url(conf, "collect", pair)
            raise InputError(
                f"fit.pairs: no trajectories of {pair} in {where}; run python -m pipeline.run "
                f"stage=collect{choice} first"
            )
    return join([read_pair(conf, pair, folder) for pair, folder in folders.items()])


def read_logged(conf: DictConfig, pair: str, folder: Path) -> Tries:
    """Read trajectories of one pair; those of a larger B_ver as under the configured one.

    Raises
    ------
    InputError
        If there are none or unsound ones, or times have to be computed and there is no profile.
    """
    config = drafting_config(conf)
    tries = read_tries(folder, pair, str(conf.task.name), config.depth, drafting_rules(config))
    if logged_budgets(folder) <= {config.verify_nodes}:
        return tries
    path = Path(conf.paths.profile).parent / pair / "profile.json"
    if not path.is_file():
        raise InputError(
            f"drafting.verify_nodes={config.verify_nodes}: {folder} was collected with "
            f"{max(logged_budgets(folder))}, and times under a smaller budget need {path}; run "
            f"python -m pipeline.run stage=profile pair={pair}"
        )
    return at_budget(tries, LatencyProfile.load(path), config.verify_nodes)


def read_pair(conf: DictConfig, pair: str, folder: Path) -> Tries:
    """Read and check the trajectories of one pair to fit on."""
    tries = read_logged(conf, pair, folder)
    for task in held_out_tasks(conf):
        if (tries.states["task"] == task).any():
            part = folder / f"task={quote(task, safe='')}"
            raise InputError(
                f"held_out_tasks: nothing is fitted on {task}, but {folder} holds rows of it; "
                f"delete {part} or take {task} out of held_out_tasks"
            )
    return tries


def note(tries: Tries, conf: DictConfig, stage: Stage) -> None:
    """Note the trajectories as the stage's input."""
    each = tries.rows // max(1, len(tries))
    for pair, states in tries.states["pair"].value_counts().sort_index().items():
        stage.read(trajectory_folder(conf, str(pair)), f"{states * each:,} rows")


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


def contexts(
    tries: Tries, target_ms: FloatArray | None = None, mid_ms: FloatArray | None = None
) -> FloatArray:
    """Return the part of z* that does not come from the tree, ``[S, 2^D − 1, 6 + D]``.

    ``target_ms`` and ``mid_ms`` (``[S]``) stand for other hardware; default: as logged.
    """
    states, depth = tries.states, tries.depth
    target_ms = states["target_ms"].to_numpy() if target_ms is None else target_ms
    mid_ms = states["mid_ms"].to_numpy() if mid_ms is None else mid_ms
    return context_matrix(
        states["prompt_tokens"].to_numpy()[:, None],
        target_ms[:, None],
        mid_ms[:, None],
        prefix_steps(depth),
        prefix_bits(depth),
    )


def scheduler_inputs(
    tries: Tries,
    signals: Iterable[str],
    target_ms: FloatArray | None = None,
    mid_ms: FloatArray | None = None,
) -> FloatArray:
    """Return z* at every prefix, ``[S, 2^D − 1, 6 + D + signals]``, columns as `input_names`."""
    columns = [SIGNALS.index(name) for name in signals]
    z = [contexts(tries, target_ms, mid_ms), tries.signals[..., columns]]
    return np.concatenate(z, axis=-1)


def schedules_ahead(depth: int) -> FloatArray:
    """Return action and future of every schedule from every step on, shape ``[D, 2^D, D]``.

    Column j is 0 for the steps before k, then −1 (small) or 1 (mid) for τ_j; j = k is the action.
    """
    steps = np.arange(depth)
    ahead = steps[None, :] >= steps[:, None]
    return np.where(ahead[:, None], 2.0 * schedules(depth) - 1.0, 0.0)


def group_keys(tries: Tries, group: str) -> NDArray[np.object_]:
    """Return the key that may not be on both sides of a split: ``task``, ``pair``, ``prompt``."""
    if group not in GROUPS:
        raise InputError(f"select.group={group}: choose one of {', '.join(GROUPS)}")
    return prompt_keys(tries) if group == "prompt" else tries.states[group].to_numpy(object)


def prompt_keys(tries: Tries) -> NDArray[np.object_]:
    """Return each state's prompt, unique across tasks and one for all pairs, shape ``[S]``."""
    return (tries.states["task"] + "\n" + tries.states["prompt_id"]).to_numpy(object)


def validation_states(
    prompts: NDArray[Any], options: DictConfig, seed: int, group: str
) -> NDArray[np.bool_]:
    """Return which states validate, shape ``[S]``: whole prompts, about a share of them.

    Parameters
    ----------
    prompts : array, shape ``[S]``
        `prompt_keys`, or other keys of prompts.
    options : DictConfig
        Has ``validation_share``.
    seed : int
        Of the draw.
    group : str
        The config group of ``options``, for the error.
    """
    key, share = f"{group}.validation_share", float(options.validation_share)
    names, index = np.unique(prompts, return_inverse=True)
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


def advantage(values: FloatArray) -> FloatArray:
    """Return what a mid call is worth at every prefix, shape ``[S, 2^D − 1]``.

    y_k = max over futures of the value at a = 1 minus the max at a = 0 (design section 4).

    Parameters
    ----------
    values : float64 array, shape ``[S, D, 2^D]``
        At step k (row k − 1) of every schedule, seen from its prefix before that step.
    """
    count, depth = values.shape[:2]
    columns = []
    for k in range(1, depth + 1):
        # [S, prefixes, action, futures]
        best = values[:, k - 1].reshape(count, 1 << (k - 1), 2, 1 << (depth - k)).max(axis=3)
        columns.append(best[:, :, 1] - best[:, :, 0])
    return np.concatenate(columns, axis=1)
