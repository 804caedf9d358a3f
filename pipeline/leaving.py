"""stage=leave_out: what a scheduler is worth on what it never saw.

For each task, and each pair, a scheduler is fitted without it and replayed on its held-out prompts;
and one that is fitted on everything is replayed too. All of them on every machine of
``replay.hardware``, which may lie outside ``hardware``'s range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from pipeline.features import check_numerator, load_tries, note, read_logged, read_selection
from pipeline.fitting import fit_scheduler, some_states
from pipeline.planning import OnlinePlanner
from pipeline.replay import gain_decisions, scheduler_decisions, texts_of
from pipeline.replaying import (
    TIMED_PROMPT_TOKENS,
    Cell,
    Machine,
    Policy,
    bounded,
    cells_of,
    check_options,
    open_machines,
    own_profile,
    pair_folder,
)
from pipeline.report import Stage, stage_run
from pipeline.tries import Tries
from pipeline.value import ValueModel
from treegraft_core import InputError, SchedulerArtifact
from treegraft_core.files import write_json


@dataclass(frozen=True)
class Split:
    """What is fitted on and what is judged.

    Attributes
    ----------
    name : str
        What is left out, in words, such as ``task code``.
    left_out : str
        The task or pair; empty for nothing.
    key : str or None
        ``task`` or ``pair``; None: nothing is left out.
    """

    name: str
    left_out: str
    key: str | None

    def train(self, tries: Tries) -> Tries:
        """Return the states to fit on."""
        if self.key is None:
            return tries
        return tries.take((tries.states[self.key] != self.left_out).to_numpy())

    def test(self, tries: Tries) -> Tries:
        """Return the states to judge."""
        if self.key is None:
            return tries
        return tries.take((tries.states[self.key] == self.left_out).to_numpy())


def splits(tries: Tries) -> list[Split]:
    """Return everything, then each task and each pair left out, where others remain."""
    found = [Split("nothing", "", None)]
    for key in ("task", "pair"):
        names = sorted(set(tries.states[key]))
        found += [Split(f"{key} {name}", name, key) for name in names if len(names) > 1]
    return found


def policies_of(
    artifact: SchedulerArtifact, model: ValueModel | None, conf: DictConfig
) -> list[Policy]:
    """Return the scheduler and, if there is a value network, online planning with it."""
    found = [Policy("scheduler", lambda t, o, _: scheduler_decisions(artifact, t, o), True, None)]
    if model is not None:
        planner = OnlinePlanner(model, check_numerator(conf))
        cost = planner.decision_ms(TIMED_PROMPT_TOKENS, 1.0, 1.0)
        found.append(
            Policy("online", lambda t, o, texts: gain_decisions(planner, t, o, texts), True, cost)
        )
    return found


def read_held_out(conf: DictConfig, pairs: Sequence[str]) -> dict[str, Tries]:
    """Return the trajectories of held-out prompts of each pair."""
    found = {}
    for pair in pairs:
        folder = pair_folder(conf, pair)
        found[pair] = read_logged(conf, pair, folder)
        if not texts_of(found[pair]).whole:
            raise InputError(
                f"replay.split={conf.replay.split}: states of {pair} were sampled; collect them "
                "with collect.states_per_turn=0"
            )
    return found


def judged_cells(
    held: dict[str, Tries],
    split: Split,
    machines: Sequence[Machine],
    policies: Sequence[Policy],
    conf: DictConfig,
) -> Iterator[Cell]:
    """Yield the cells of a split: pair × machine × task."""
    for pair, tries in held.items():
        test = split.test(tries)
        if len(test):
            texts, own = texts_of(test), own_profile(conf, pair)
            for machine in machines:
                for cell in cells_of(test, texts, machine, own, policies, conf):
                    if split.key != "task" or cell.task is not None:
                        yield cell


def entries(cell: Cell, split: Split, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of the policies in a cell."""
    judged = cell.judged
    plain = {
        "left_out": split.name,
        "hardware": cell.hardware,
        "pair": cell.pair,
        "task": cell.task or "all",
        "prompts": judged.prompts,
        "endpoint": "All Mid" if judged.endpoint == judged.mid else "All Small",
        "oracle": judged.ratio("gain_oracle", judged.endpoint)(),
        "fixed": judged.ratio(judged.best_fixed, judged.endpoint)(),
    }
    return [plain | cell.entry(name) for name in names]


def rows_of(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the printed table: the cells of all tasks, and single tasks that were left out."""
    return [
        {
            "left out": e["left_out"],
            "hardware": e["hardware"],
            "pair": e["pair"],
            "policy": e["policy"],
            "better endpoint": e["endpoint"],
            "÷ better endpoint": bounded(e["over_endpoint"]),
            "best fixed": e["fixed"],
            "oracle": e["oracle"],
            "gap closed, %": bounded(e["gap_closed"], 0, 100.0),
            "mid calls": e["calls"],
        }
        for e in found
    ]


def worst(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the least ratio of each policy to the better endpoint, by what was left out."""
    rows = []
    for key in dict.fromkeys((e["policy"], e["left_out"].split()[0]) for e in found):
        mine = [e for e in found if (e["policy"], e["left_out"].split()[0]) == key]
        least = min(mine, key=lambda e: float(e["over_endpoint"][0]))
        ratios = np.array([e["over_endpoint"][0] for e in mine])
        rows.append(
            {
                "policy": key[0],
                "left out": key[1],
                "cells": len(mine),
                "least": bounded(least["over_endpoint"]),
                "where": f"{least['left_out']}, {least['hardware']}, {least['pair']}, "
                f"{least['task']}",
                "below 0.97": int((ratios < 0.97).sum()),
                "geometric mean": float(np.exp(np.log(ratios).mean())),
            }
        )
    return rows


def run(conf: DictConfig) -> None:
    """Fit without each task and pair; write ``leave_out.json`` and the tables."""
    check_options(conf)
    machines = open_machines(conf)
    signals = read_selection(conf)
    tries = some_states(load_tries(conf), int(conf.leave_out.states))
    held = read_held_out(conf, tries.pairs)
    folder = Path(conf.paths.data) / "leave_out" / str(conf.fit.name) / str(conf.hardware.name)
    with stage_run(conf, "leave_out", folder) as stage:
        note(tries, conf, stage)
        found = judge_all(tries, held, signals, machines, conf, stage)
        whole = [e for e in found if e["task"] == "all" or e["left_out"].startswith("task")]
        stage.show("on what was left out; 95 % intervals over prompts", rows_of(whole))
        least = worst(found)
        stage.show("the worst of task x pair x hardware", least)
        for row in least:
            name = f"least_{row['policy']}_{row['left out']}"
            stage.metrics[name] = row["least"]
        write_json(folder / "leave_out.json", {"signals": list(signals), "cells": found})
        stage.wrote(folder / "leave_out.json")
        stage.write_tables()


def judge_all(
    tries: Tries,
    held: dict[str, Tries],
    signals: tuple[str, ...],
    machines: Sequence[Machine],
    conf: DictConfig,
    stage: Stage,
) -> list[dict[str, Any]]:
    """Return the figures of all splits."""
    cache = Path(conf.paths.cache) / "leave_out"
    found: list[dict[str, Any]] = []
    for split in splits(tries):
        print(f"-- left out: {split.name}", flush=True)
        artifact, model, _ = fit_scheduler(split.train(tries), signals, conf, stage, cache)
        policies = policies_of(artifact, model, conf)
        names = [policy.name for policy in policies]
        for cell in judged_cells(held, split, machines, policies, conf):
            found += entries(cell, split, names)
    return found
