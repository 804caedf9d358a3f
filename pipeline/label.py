"""stage=label: what calling the mid drafter is worth at every prefix (design section 4, step 4).

Two objectives. ``rate`` is the paper's: a round is worth its committed tokens over its time, η̂.
``gain`` is what throughput over a whole text wants: a round is worth its committed tokens less its
time at the long-run rate λ. Rounds of a high rate may be short, and then what comes after them
counts for more; a policy has the highest ratio of tokens to time, both summed, exactly if no choice
has a positive gain at its own λ (Dinkelbach, 1967). And two sources: the value network's estimates,
or the logged outcomes themselves, which know the future that no scheduler sees (hindsight).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig

from pipeline.features import (
    advantage,
    check_fitted,
    check_numerator,
    input_names,
    load_tries,
    note,
    scheduler_inputs,
)
from pipeline.hardware import Outcomes, Setting, assign, outcomes_in, settings
from pipeline.inputs import damaged, require
from pipeline.report import stage_run
from pipeline.tries import Tries, prefix_bits, prefix_steps
from pipeline.value import ValueModel, load_value
from treegraft_core import InputError
from treegraft_core.files import atomic_path
from treegraft_core.tree import FloatArray, IntArray

HEADER_KEY = b"treegraft.labels"
KEYS = ("pair", "task", "prompt_id", "state_id", "setting", "step", "prefix")
TEXTS = ("pair", "task", "prompt_id", "state_id", "prefix")
LABELS = ("y", "y_hindsight", "rate")
OBJECTIVES, SOURCES = ("rate", "gain"), ("value", "logged")
RATE_STATES, RATE_ROUNDS = 128, 6


def worth(
    tokens: FloatArray, ms: FloatArray, objective: str, rate: FloatArray, round_ms: FloatArray
) -> FloatArray:
    """Return what rounds are worth, tokens/s.

    Parameters
    ----------
    tokens, ms : float64 array, shape ``[S, …]``
        η's tokens and t.
    objective : {"rate", "gain"}
        tokens / t; or (tokens − λ t) / T, which is to first order what a round adds to λ where
        rounds take T on the average.
    rate, round_ms : float64 array, shape ``[S]``
        λ in tokens/ms, and T in ms.
    """
    shape = (-1, *[1] * (tokens.ndim - 1))
    if objective == "rate":
        return 1e3 * tokens / ms
    gain: FloatArray = 1e3 * (tokens - rate.reshape(shape) * ms) / round_ms.reshape(shape)
    return gain


def best_ratio(
    tokens: FloatArray, ms: FloatArray, seen: FloatArray, spent: FloatArray
) -> tuple[float, float]:
    """Return the rate and the mean time of rounds that are chosen for their gain.

    Dinkelbach's iteration: choose by ``seen − λ spent``, count ``tokens`` over ``ms``, take that
    for λ as long as it rises. The states are positions of texts, and rounds jump over positions:
    each round counts for the share of its text that it covers, or fast stretches would count for
    more than they take (`covered`).

    Parameters
    ----------
    tokens, ms : float64 array, shape ``[S, choices]``
        What counts.
    seen, spent : float64 array, shape ``[S, choices]``
        What the choice goes by: estimates, or the same.

    Returns
    -------
    rate, round_ms : float
        Tokens/ms, and ms.
    """
    state = np.arange(len(tokens))
    rate, round_ms = max(covered(tokens[:, n], ms[:, n]) for n in range(tokens.shape[1]))
    for _ in range(RATE_ROUNDS):
        choice = (seen - rate * spent).argmax(1)
        found, its_ms = covered(tokens[state, choice], ms[state, choice])
        if found <= rate:
            break
        rate, round_ms = found, its_ms
    return rate, round_ms


def covered(tokens: FloatArray, ms: FloatArray) -> tuple[float, float]:
    """Return tokens/ms and mean time of rounds, one at each position of texts, shape ``[S]``.

    A round of n tokens is one of n whose positions it covers, so it counts 1 / n.
    """
    weight = 1.0 / np.maximum(tokens, 1.0)
    return float((weight * tokens).sum() / (weight * ms).sum()), float(
        np.average(ms, weights=weight)
    )


@dataclass(frozen=True)
class Labeller:
    """Labels states block by block.

    Attributes
    ----------
    tries : Tries
        The states.
    drawn : list of Setting
        Pairs and machines.
    logged_share : float
        Share of the states with their times as logged.
    signals : tuple of str
        The signals in z*.
    model : ValueModel or None
        The value network; not needed for labels from hindsight.
    objective, source, numerator : str
        What a round is worth; estimated or logged; η's tokens.
    relative : bool
        Labels as shares of λ, so that no machine counts for more because it is faster.
    rate, round_ms : float64 array, shape ``[settings]``
        λ in tokens/ms and T in ms.
    """

    tries: Tries
    drawn: Sequence[Setting]
    logged_share: float
    signals: tuple[str, ...]
    model: ValueModel | None
    objective: str
    source: str
    numerator: str
    relative: bool
    rate: FloatArray
    round_ms: FloatArray

    def block(
        self, at: IntArray, rng: np.random.Generator
    ) -> tuple[Tries, FloatArray, dict[str, Any]]:
        """Return states, z* ``[n, 2^D − 1, …]``, and columns ``[n, 2^D − 1]`` or ``[n]``."""
        mine = self.tries.take(at)
        number = assign(mine, self.drawn, self.logged_share, rng)
        found = outcomes_in(mine, self.drawn, number)
        z = scheduler_inputs(mine, self.signals, found.target_ms, found.mid_ms)
        rate, round_ms = self.rate[number], self.round_ms[number]
        scale = (1e-3 / rate if self.relative else np.ones(len(rate)))[:, None]
        shape = (len(mine), mine.depth, 1 << mine.depth)

        def label(tokens: FloatArray, ms: FloatArray) -> FloatArray:
            return scale * advantage(worth(tokens, ms, self.objective, rate, round_ms))

        logged = [
            np.broadcast_to(v[:, None], shape) for v in (found.tokens(self.numerator), found.ms)
        ]
        columns = {"setting": number, "rate": 1e3 * rate, "y_hindsight": label(*logged)}
        columns["y"] = columns["y_hindsight"]
        if self.model is not None and self.source == "value":
            committed, ms = self.model.outcomes(z)
            bonus = 0.0 if self.numerator == "committed" else 1.0
            columns["y"] = label(committed - bonus, ms)
        return mine, z, columns


def labeller(
    tries: Tries, signals: tuple[str, ...], model: ValueModel | None, conf: DictConfig
) -> Labeller:
    """Return a labeller as configured; find the long-run rate of every setting.

    ``model`` is not needed with ``label.source=logged``.
    """
    options, numerator = conf.label, check_numerator(conf)
    objective, source = str(options.objective), str(options.source)
    for name, value, allowed in (("objective", objective, OBJECTIVES), ("source", source, SOURCES)):
        if value not in allowed:
            raise InputError(f"label.{name}={value}: choose one of {', '.join(allowed)}")
    drawn = settings(tries, conf.hardware, int(conf.seed))
    pairs = tries.states["pair"].to_numpy()
    rate, round_ms = np.zeros(len(drawn)), np.zeros(len(drawn))
    rng = np.random.default_rng(conf.seed)
    some = {
        pair: tries.take(np.sort(rng.permutation(np.flatnonzero(pairs == pair))[:RATE_STATES]))
        for pair in tries.pairs
    }
    for i, setting in enumerate(drawn):
        planner = model if source == "value" else None
        rate[i], round_ms[i] = setting_rate(some[setting.pair], setting, planner, numerator)
    share = float(conf.hardware.logged_share)
    relative = bool(options.relative)
    return Labeller(
        tries, drawn, share, signals, model, objective, source, numerator, relative, rate, round_ms
    )


def setting_rate(
    tries: Tries, setting: Setting, model: ValueModel | None, numerator: str
) -> tuple[float, float]:
    """Return λ (tokens/ms) and T (ms) of choosing whole schedules by gain in one setting.

    They are chosen by the estimates of ``model``, or without one by what was logged.
    """
    found = outcomes_in(tries, [setting], np.zeros(len(tries), np.int64))
    tokens, ms = found.tokens(numerator), found.ms
    seen, spent = (tokens, ms) if model is None else planned(tries, found, model)
    return best_ratio(tokens, ms, seen, spent)


def planned(tries: Tries, found: Outcomes, model: ValueModel) -> tuple[FloatArray, FloatArray]:
    """Return estimated committed tokens and t (ms) of all schedules, seen before the first step."""
    z = scheduler_inputs(tries, model.signals, found.target_ms, found.mid_ms)
    tokens, ms = model.outcomes(z)
    return tokens[:, 0], ms[:, 0]


def label_table(made: Labeller, conf: DictConfig) -> pd.DataFrame:
    """Return the labels of all states in memory, as `load_labels` does from disk."""
    names = input_names(made.tries.depth, made.signals)
    tables = [block_table(*block, names) for block in label_blocks(made, conf)]
    return pa.concat_tables(tables).unify_dictionaries().to_pandas()


def label_blocks(
    made: Labeller, conf: DictConfig
) -> Iterator[tuple[Tries, FloatArray, dict[str, Any]]]:
    """Yield the blocks of all states, ``label.settings_per_state`` times."""
    size = int(conf.label.block_states)
    for turn in range(int(conf.label.settings_per_state)):
        rng = np.random.default_rng([int(conf.seed), turn])
        for at in range(0, len(made.tries), size):
            yield made.block(np.arange(at, min(at + size, len(made.tries))), rng)


def block_table(
    tries: Tries, z: FloatArray, columns: dict[str, Any], names: Sequence[str]
) -> pa.Table:
    """Return a block as rows: one for each prefix of each state."""
    count, prefixes = z.shape[:2]
    steps = prefix_steps(tries.depth)
    bits = prefix_bits(tries.depth)
    texts = ["".join(map(str, row[: k - 1])) for row, k in zip(bits.tolist(), steps, strict=True)]
    values: dict[str, Any] = {}
    for name in ("pair", "task", "prompt_id", "state_id"):
        codes, distinct = pd.factorize(tries.states[name])
        values[name] = pa.DictionaryArray.from_arrays(
            pa.array(np.repeat(codes, prefixes), pa.int32()), pa.array(distinct, pa.string())
        )
    values["setting"] = pa.array(np.repeat(columns["setting"], prefixes), pa.int32())
    values["step"] = pa.array(np.tile(steps, count), pa.int16())
    values["prefix"] = pa.DictionaryArray.from_arrays(
        pa.array(np.tile(np.arange(prefixes), count), pa.int32()), pa.array(texts, pa.string())
    )
    flat_z = z.reshape(-1, z.shape[-1])
    values |= {name: pa.array(flat_z[:, i]) for i, name in enumerate(names)}
    values["y"] = pa.array(columns["y"].ravel())
    values["y_hindsight"] = pa.array(columns["y_hindsight"].ravel())
    values["rate"] = pa.array(np.repeat(columns["rate"], prefixes))
    return pa.table(values)


class StepSums:
    """Sums by step for the table of labels, so that no block has to stay."""

    def __init__(self, depth: int):
        self.steps = prefix_steps(depth)
        self.sums = np.zeros((depth + 1, 7))
        self.weights = np.zeros(depth + 1)

    def add(self, y: FloatArray, hindsight: FloatArray) -> None:
        """Count labels ``[n, 2^D − 1]``."""
        agree, weight = (y > 0) == (hindsight > 0), np.abs(hindsight)
        parts = np.stack(
            [np.ones(y.shape), y, y * y, y > 0, hindsight > 0, agree, agree * weight], axis=-1
        ).sum(0)
        np.add.at(self.sums, self.steps, parts)
        np.add.at(self.weights, self.steps, weight.sum(0))

    def table(self) -> list[dict[str, Any]]:
        """Return mean and spread of y, share of positive labels and agreement, by step."""
        rows = []
        each = [(str(k), slice(k, k + 1)) for k in range(1, len(self.sums))]
        for name, at in [*each, ("all", slice(1, None))]:
            n, total, squares, *shares, weighted = self.sums[at].sum(0).tolist()
            positive, hindsight, agree = (s / n for s in shares)
            mean = total / n
            rows.append(
                {
                    "step": name,
                    "labels": int(n),
                    "y_mean": mean,
                    "y_std": float(np.sqrt(max(0.0, squares / n - mean * mean))),
                    "positive": positive,
                    "hindsight_positive": hindsight,
                    "sign_agreement": agree,
                    "weighted_agreement": weighted / max(self.weights[at].sum(), 1e-12),
                }
            )
        return rows


def load_labels(folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return labels and header: depth, selected signals, pairs, numerator, objective.

    Numbers are float32, but for what is in the header; texts are categories.

    Raises
    ------
    InputError
        If the file is missing, damaged or lacks a column.
    """
    path = require(folder / "labels.parquet", "label")
    try:
        part = pq.ParquetFile(path, read_dictionary=list(TEXTS))
        header = json.loads((part.schema_arrow.metadata or {})[HEADER_KEY])
        depth, signals = int(header["depth"]), tuple(header["selected_signals"])
        numbers = [*input_names(depth, signals), *LABELS]
        columns = [*KEYS, *numbers]
        lacking = set(columns) - set(part.schema_arrow.names)
        if lacking or not {"numerator", "objective", "source", "pairs"} <= set(header):
            raise ValueError(f"lacks {sorted(lacking) or 'a part of its header'}")
        frame = part.read(columns=columns).to_pandas(self_destruct=True, split_blocks=True)
    except KeyError as error:
        raise damaged(path, "label", f"no {error} in its metadata") from error
    except (TypeError, ValueError, OSError, pa.ArrowException) as error:
        raise damaged(path, "label", error) from error
    finite = all(np.isfinite(frame[name].to_numpy()).all() for name in numbers)
    if frame.empty or not finite:
        raise damaged(path, "label", "no rows, or values that are not finite")
    return frame, header


def run(conf: DictConfig) -> None:
    """Label every prefix state; write ``labels.parquet`` to ``paths.labels``."""
    check_numerator(conf)
    model = load_value(Path(conf.paths.value))
    check_fitted(conf, model.pairs, Path(conf.paths.value) / "value.json", "value")
    tries = load_tries(conf)
    if tries.depth != model.depth:
        raise InputError(
            f"drafting.depth={tries.depth}: {conf.paths.value} was fitted at depth {model.depth}; "
            "run python -m pipeline.run stage=select and stage=value first"
        )
    made = labeller(tries, model.signals, model, conf)
    folder = Path(conf.paths.labels)
    with stage_run(conf, "label", folder) as stage:
        note(tries, conf, stage)
        stage.read(Path(conf.paths.value) / "value.safetensors")
        names = input_names(model.depth, model.signals)
        header = {
            "depth": model.depth,
            "selected_signals": list(model.signals),
            "pairs": list(tries.pairs),
            "numerator": made.numerator,
            "objective": made.objective,
            "source": made.source,
            "unit": "share of the long-run rate" if made.relative else "tokens/s",
        }
        sums = StepSums(model.depth)
        writer = None
        with atomic_path(folder / "labels.parquet") as temporary:
            try:
                for block, z, columns in label_blocks(made, conf):
                    sums.add(columns["y"], columns["y_hindsight"])
                    rows = block_table(block, z, columns, names)
                    metadata = {HEADER_KEY: json.dumps(header).encode()}
                    rows = rows.replace_schema_metadata(metadata)
                    if writer is None:
                        writer = pq.ParquetWriter(temporary, rows.schema)
                    writer.write_table(rows)
            finally:
                if writer is not None:
                    writer.close()
        table = sums.table()
        stage.show(f"Labels, {header['unit']} ({made.objective}, {made.source})", table)
        stage.wrote(folder / "labels.parquet", f"{table[-1]['labels']:,} rows")
        stage.metrics.update({k: v for k, v in table[-1].items() if k != "step"})
        stage.metrics.update(
            states=len(tries),
            numerator=made.numerator,
            long_run_rate_as_logged=1e3 * float(made.rate[0]),
        )
