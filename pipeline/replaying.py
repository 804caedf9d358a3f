"""stage=replay: any policies over trajectories on disk, by task, pair and hardware.

A policy is anything that decides by the state (``replay.policies``). Written in Python, it is a
function of all states at once, named ``python:package.module:function``, which is imported only
with ``replay.trust_python=true``::

    def short_contexts(tries: Tries, outcomes: Outcomes) -> NDArray[np.bool_]:
        near = tries.states["context_tokens"].to_numpy() < 200
        return np.repeat(near[:, None], tries.signals.shape[1], axis=1)

It returns whether to call the mid drafter at each of the 2^D − 1 prefixes of each of the S states,
a bool array of shape ``[S, 2^D − 1]`` (prefixes as in `pipeline.tries.Tries`). ``tries`` also holds
what happens at the states: a policy that reads A or t knows what no scheduler does. Its own time
is not counted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from pipeline.engine import check_name, drafting_config
from pipeline.evaluate import check_depth
from pipeline.features import check_numerator, read_logged
from pipeline.hardware import Outcomes, linear_profile, outcomes
from pipeline.label import OBJECTIVES
from pipeline.places import SPLITS, dataset_url, local_pair
from pipeline.planning import OnlinePlanner
from pipeline.replay import (
    BoolArray,
    Judged,
    Replayed,
    Texts,
    follow,
    gain_decisions,
    planned_decisions,
    reference_runs,
    replay,
    scheduler_decisions,
    texts_of,
)
from pipeline.report import Stage, stage_run
from pipeline.tries import Tries
from pipeline.value import load_value
from treegraft_core import DraftingConfig, InputError, LatencyProfile, load_scheduler
from treegraft_core.files import write_json

ORACLES = {
    "oracle": "oracle (best rate of each state)",
    "gain_oracle": "oracle (highest throughput)",
}
COSTS = (
    "target_ms",
    "mid_ms",
    "small_ms",
    "decision_ms",
    "tree_ms",
    "verify_slope",
    "mid_slope",
    "context_slope",
)
LEAST_DRAWS = 20
TIMED_PROMPT_TOKENS = 100
POLICIES = (
    "give bits such as '10101', scheduler, online, online:rate, online:gain, a scheduler folder or "
    ".py literal, or python:package.module:function"
)
MACHINES = "give logged, a profile.json, or {NAME: costs}"

Decide = Callable[[Tries, Outcomes, Texts], BoolArray]


# Policies -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """What decides.

    Attributes
    ----------
    name : str
        In tables.
    decide : callable
        Takes states, outcomes and turns; returns decisions, ``[S, 2^D − 1]``.
    reads_signals : bool
        A decision costs the reading of the signals.
    search_ms : float or None
        And this much more; None: as a distilled scheduler on the machine.
    """

    name: str
    decide: Decide
    reads_signals: bool = False
    search_ms: float | None = 0.0

    def decision_ms(self, profile: LatencyProfile | None) -> float:
        """Return the time of a decision on a machine, ms; parts that are not known count as 0."""
        signals_ms, scheduler_ms = (
            (profile.signals_ms, profile.scheduler_ms) if profile is not None else (0.0, 0.0)
        )
        search_ms = scheduler_ms if self.search_ms is None else self.search_ms
        return search_ms + (signals_ms if self.reads_signals else 0.0)


def open_policies(conf: DictConfig, config: DraftingConfig) -> list[Policy]:
    """Return ``replay.policies``.

    Raises
    ------
    InputError
        If one is none, cannot be loaded, or has the name of another.
    """
    policies: list[Policy] = []
    for name, given in named("policies", conf.replay.policies, POLICIES):
        spec = str(given)
        taken = [p.name for p in policies] + list(ORACLES)
        if name in taken or (set(name) <= {"0", "1"} and name != spec):
            raise InputError(f"replay.policies: the name {name} is taken; give each its own")
        policies.append(open_policy(conf, config, name, spec))
    return policies


def named(key: str, items: Any, choices: str) -> list[tuple[str, Any]]:
    """Return the entries of a list under ``replay``: each by itself, or ``{NAME: it}``."""
    found: list[tuple[str, Any]] = []
    entries: Any = OmegaConf.to_container(items)
    for item in entries:
        pairs = list(item.items()) if isinstance(item, dict) else [(item, item)]
        if len(pairs) != 1 or pairs[0][1] is None or isinstance(item, list):
            raise InputError(f"replay.{key}={item}: {choices}, each by itself or as {{NAME: it}}")
        found.append((str(pairs[0][0]), pairs[0][1]))
    if not found:
        raise InputError(f"replay.{key}=[]: {choices}")
    return found


def open_policy(conf: DictConfig, config: DraftingConfig, name: str, spec: str) -> Policy:
    """Return the policy that ``spec`` stands for."""
    if set(spec) <= {"0", "1"}:
        return fixed(name, spec, config.depth)
    if spec.startswith("python:"):
        return written(name, spec, bool(conf.replay.trust_python))
    if spec in ("online", "online:rate", "online:gain"):
        return online(conf, config, name, spec)
    path = Path(str(conf.paths.scheduler) if spec == "scheduler" else spec)
    if spec != "scheduler" and not path.exists():
        raise InputError(f"replay.policies={spec}: no such file or folder; {POLICIES}")
    artifact = load_scheduler(path)
    check_depth(config, artifact.depth, f"the scheduler in {path} was trained")
    return Policy(name, lambda t, o, _: scheduler_decisions(artifact, t, o), True, None)


def fixed(name: str, bits: str, depth: int) -> Policy:
    """Return the policy that always takes one schedule."""
    if len(bits) != depth:
        raise InputError(
            f"replay.policies={bits}: has {len(bits)} bits, drafting.depth is {depth}; give one "
            "bit a step"
        )
    steps = np.repeat([bit == "1" for bit in bits], 1 << np.arange(depth))
    return Policy(name, lambda tries, _, __: np.tile(steps, (len(tries), 1)))


def written(name: str, spec: str, trusted: bool) -> Policy:
    """Return the policy of ``python:package.module:function``; import it only if trusted."""
    if not trusted:
        raise InputError(
            f"replay.policies={spec}: imports and runs that module; set replay.trust_python=true "
            "if you trust it"
        )
    module, _, attribute = spec.removeprefix("python:").partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"replay.policies={spec}: {error}; give python:package.module:function, importable "
            "from here"
        ) from error
    if not callable(function):
        raise InputError(f"replay.policies={spec}: {attribute} is no function; give one")

    def decide(tries: Tries, found: Outcomes, _: Texts) -> BoolArray:
        wanted, shape = np.asarray(function(tries, found)), tries.signals.shape[:2]
        if wanted.shape != shape or wanted.dtype != bool:
            raise InputError(
                f"replay.policies={spec}: returned an array of {wanted.dtype}, shape "
                f"{list(wanted.shape)}; return bool, shape [states, 2^D − 1] = {list(shape)}"
            )
        return wanted

    return Policy(name, decide)


def online(conf: DictConfig, config: DraftingConfig, name: str, spec: str) -> Policy:
    """Return online planning, by rate or by gain: as it says, or as ``label.objective``."""
    objective = spec.partition(":")[2] or str(conf.label.objective)
    if objective not in OBJECTIVES:
        raise InputError(f"label.objective={objective}: choose one of {', '.join(OBJECTIVES)}")
    model = load_value(Path(conf.paths.value))
    check_depth(config, model.depth, f"the value network in {conf.paths.value} was fitted")
    planner = OnlinePlanner(model, check_numerator(conf))

    def decide(tries: Tries, found: Outcomes, texts: Texts) -> BoolArray:
        if objective == "rate":
            return planned_decisions(planner, tries, found)
        return gain_decisions(planner, tries, found, texts)

    return Policy(name, decide, True, planner.decision_ms(TIMED_PROMPT_TOKENS, 1.0, 1.0))


# Hardware -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Where the rounds are to run: as logged (None), by a profile, or by costs."""

    name: str
    timing: LatencyProfile | Mapping[str, float] | None

    def outcomes(
        self, tries: Tries, own: LatencyProfile | None, verify_nodes: int | None
    ) -> tuple[Outcomes, LatencyProfile | None]:
        """Return the outcomes of one pair's states, and what decisions cost there.

        Parameters
        ----------
        tries : Tries
            The states.
        own : LatencyProfile or None
            The pair's, of the machine that it was collected on.
        verify_nodes : int or None
            A smaller B_ver.
        """
        if self.timing is None and verify_nodes is None:
            return outcomes(tries), own
        profile = own if self.timing is None else self.timing
        if profile is None:
            raise InputError(
                f"replay.verify_nodes={verify_nodes}: the times as logged are of the collected "
                "B_ver, and there is no profile.json of the pair; run stage=profile"
            )
        if not isinstance(profile, LatencyProfile):
            profile = linear_profile(tries, profile)
        return outcomes(tries, profile, verify_nodes), profile


def open_machines(conf: DictConfig) -> list[Machine]:
    """Return ``replay.hardware``."""
    machines: list[Machine] = []
    for name, given in named("hardware", conf.replay.hardware, MACHINES):
        timing: LatencyProfile | Mapping[str, float] | None = None
        if isinstance(given, dict):
            timing = check_costs(name, given)
        elif given != "logged":
            if not Path(str(given)).is_file():
                raise InputError(f"replay.hardware={given}: no such file; {MACHINES}")
            timing = LatencyProfile.load(str(given))
        if name in [m.name for m in machines]:
            raise InputError(f"replay.hardware: the name {name} is taken; give each its own")
        machines.append(Machine(name, timing))
    return machines


def check_costs(name: str, given: Mapping[Any, Any]) -> dict[str, float]:
    """Return the costs of `linear_profile`, checked."""
    if set(given) != set(COSTS):
        raise InputError(
            f"replay.hardware.{name}={dict(given)}: give each of {', '.join(COSTS)}, nothing else"
        )
    for key, value in given.items():
        number = type(value) in (int, float)
        if not number or not 0 <= value < np.inf or (value == 0 and key in ("target_ms", "mid_ms")):
            raise InputError(
                f"replay.hardware.{name}.{key}={value}: give a number of ms or a share"
            )
    return {key: float(value) for key, value in given.items()}


# What is replayed ---------------------------------------------------------------------------


def replay_pairs(conf: DictConfig) -> list[str]:
    """Return ``replay.pairs``, checked; the configured pair if it is null."""
    if conf.replay.pairs is None:
        return [str(conf.pair.name)]
    if not OmegaConf.is_list(conf.replay.pairs) or not conf.replay.pairs:
        raise InputError(f"replay.pairs={conf.replay.pairs}: give a list of pairs, or null")
    pairs = [str(name) for name in conf.replay.pairs]
    for name in pairs:
        check_name("replay.pairs", name)
    if len(set(pairs)) < len(pairs):
        raise InputError(f"replay.pairs={pairs}: give each once")
    return pairs


def pair_folder(conf: DictConfig, pair: str) -> Path:
    """Return the folder of a pair's trajectories; raise if it has none."""
    split = str(conf.replay.split)
    known = split in SPLITS
    folder = local_pair(conf, split, pair) if known else Path(split) / f"pair={pair}"
    if not folder.is_dir():
        fix = "give collect, evaluate or a folder that holds pair=NAME"
        if known:
            which = (
                " collect.split=evaluate collect.states_per_turn=0" if split != SPLITS[0] else ""
            )
            fix = f"run python -m pipeline.run stage=collect pair={pair}{which} first"
        where = dataset_url(conf, split, pair) if known else folder
        raise InputError(f"replay.split={split}: no trajectories in {where}; {fix}")
    return folder


def own_profile(conf: DictConfig, pair: str) -> LatencyProfile | None:
    """Return the latency profile of a pair on this machine, if there is one."""
    home = Path(conf.paths.profile)
    path = (home if pair == str(conf.pair.name) else home.parent / pair) / "profile.json"
    if path.is_file():
        return LatencyProfile.load(path)
    print(f"note: {path} is not there; as logged, decisions of {pair} count without their time")
    return None


@dataclass(frozen=True)
class Cell:
    """All policies of one pair on one machine, on all tasks or one.

    Attributes
    ----------
    hardware, pair : str
        Which.
    task : str or None
        Which; None: all tasks.
    judged : Judged
        The policies and what they are compared with.
    free : dict of Replayed
        The configured policies without the time of their decisions.
    """

    hardware: str
    pair: str
    task: str | None
    judged: Judged
    free: dict[str, Replayed]

    def entry(self, name: str) -> dict[str, Any]:
        """Return a policy's figures; where there are three, value and 95 % interval."""
        judged, figures = self.judged, self.judged.figures(self.judged.runs[name])
        statistics = {
            "over_endpoint": judged.ratio(name, judged.endpoint),
            "over_best_fixed": judged.ratio(name, judged.best_fixed),
            "gap_closed": judged.gap(name, "gain_oracle"),
            "rate_oracle_gap_closed": judged.gap(name, "oracle"),
        }
        free = self.free.get(name, judged.runs[name])
        return {
            "policy": name,
            "eta": [figures["eta"], figures["low"], figures["high"]],
            "eta_without_decisions": 1e3 * free.rate("committed"),
            **{key: [float(s()), *judged.interval(s)] for key, s in statistics.items()},
            "A": figures["A"],
            "calls": figures["calls"],
        }


def cells_of(
    tries: Tries,
    texts: Texts,
    machine: Machine,
    own: LatencyProfile | None,
    policies: Sequence[Policy],
    conf: DictConfig,
) -> Iterator[Cell]:
    """Yield all tasks of one pair on one machine together, then each alone."""
    depth = tries.depth
    found, profile = machine.outcomes(tries, own, conf.replay.verify_nodes)
    runs, free = reference_runs(texts, found, depth), {}
    for policy in policies:
        wanted = policy.decide(tries, found, texts)
        free[policy.name] = replay(texts, found, follow(wanted, depth))
        cost = depth * policy.decision_ms(profile)
        runs[policy.name] = free[policy.name].with_cost(cost)
    draws, seed, pair = int(conf.replay.bootstrap), int(conf.seed), tries.pairs[0]
    for task in (None, *sorted({str(name) for name in texts.tasks})):
        at = np.full(len(texts.turns), True) if task is None else texts.tasks == task
        mine, mine_free = ({n: r.take(at) for n, r in rows.items()} for rows in (runs, free))
        judged = Judged(mine, texts.groups[at], depth, draws, seed)
        yield Cell(machine.name, pair, task, judged, mine_free)


# Tables -------------------------------------------------------------------------------------


def bounded(figure: Sequence[float], decimals: int = 3, scale: float = 1.0) -> str:
    """Return a figure with its interval; a dash where it has no value."""
    value, low, high = (scale * v for v in figure)
    if np.isnan(value):
        return "–"
    inside = "" if np.isnan(low) else f" ({low:.{decimals}f} … {high:.{decimals}f})"
    return f"{value:.{decimals}f}{inside}"


def summary(cell: Cell, names: Sequence[str]) -> dict[str, Any]:
    """Return the figures of one pair on one machine, as in ``replay.json``."""
    judged = cell.judged
    every = dict.fromkeys((judged.small, judged.mid, judged.best_fixed, *names, *ORACLES))
    return {
        "hardware": cell.hardware,
        "pair": cell.pair,
        "task": cell.task,
        "prompts": judged.prompts,
        "better_endpoint": judged.endpoint,
        "best_fixed": judged.best_fixed,
        "policies": [cell.entry(name) for name in every],
        "fixed": {name: judged.eta(name) for name in judged.fixed},
    }


def policy_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one pair on one machine in the main table."""
    best, depth = found["best_fixed"], len(found["best_fixed"])
    labels = {"0" * depth: "All Small", "1" * depth: "All Mid", **ORACLES}
    labels[best] = f"{labels.get(best, best)} (best fixed, in hindsight)"
    return [
        {
            "hardware": found["hardware"],
            "pair": found["pair"],
            "policy": labels.get(entry["policy"], entry["policy"]),
            "η tokens/s": bounded(entry["eta"], 2),
            "η without deciding": entry["eta_without_decisions"],
            "÷ better endpoint": bounded(entry["over_endpoint"]),
            "÷ best fixed": bounded(entry["over_best_fixed"]),
            "gap closed, %": bounded(entry["gap_closed"], 0, 100.0),
            "of the rate oracle's, %": bounded(entry["rate_oracle_gap_closed"], 0, 100.0),
            "mean A": entry["A"],
            "mid calls a round": entry["calls"],
        }
        for entry in found["policies"]
    ]


def task_rows(found: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the configured policies on one task."""
    entries = {entry["policy"]: entry for entry in found["policies"]}
    return [
        {
            "hardware": found["hardware"],
            "pair": found["pair"],
            "task": found["task"],
            "prompts": found["prompts"],
            "policy": name,
            "η tokens/s": entries[name]["eta"][0],
            "better endpoint": found["better_endpoint"],
            "÷ better endpoint": bounded(entries[name]["over_endpoint"]),
        }
        for name in names
    ]


def worst_rows(cells: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return each policy's least ratio to the better endpoint over task × pair × hardware."""
    rows = []
    for name in names:
        ratios = [
            (entry["over_endpoint"], cell)
            for cell in cells
            for entry in cell["policies"]
            if entry["policy"] == name
        ]
        (least, low, high), cell = min(ratios, key=lambda found: found[0][0])
        rows.append(
            {
                "policy": name,
                "cells": len(ratios),
                "least ÷ better endpoint": least,
                "95 % interval": f"{low:.3f} … {high:.3f}",
                "hardware": cell["hardware"],
                "pair": cell["pair"],
                "task": cell["task"],
                "cells below 1": sum(ratio[0] < 1 for ratio, _ in ratios),
                "surely below 1": sum(ratio[2] < 1 for ratio, _ in ratios),
            }
        )
    return rows


def coverage(pair: str, tries: Tries, texts: Texts) -> dict[str, Any]:
    """Return how much there is of a pair, and how the replay goes through it."""
    return {
        "pair": pair,
        "states": len(tries),
        "turns": len(texts.turns),
        "prompts": len(set(texts.groups)),
        "tasks": len(set(texts.tasks)),
        "how": "texts walked, exact" if texts.whole else "sampled states, each once",
    }


def note_sampled(conf: DictConfig, pair: str) -> None:
    """Say what the figures of sampled states are worth."""
    print(
        f"note: replay.split={conf.replay.split}: states of {pair} were sampled. Many lie inside "
        "runs of accepted tokens, which rounds jump over: η is too high, that of All Small most; "
        "collect.states_per_turn=0 gives every state"
    )


def check_options(conf: DictConfig) -> None:
    """Check the numbers of ``replay``."""
    draws, budget = conf.replay.bootstrap, conf.replay.verify_nodes
    if draws < LEAST_DRAWS:
        raise InputError(f"replay.bootstrap={draws}: must be {LEAST_DRAWS} or more")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise InputError(f"replay.verify_nodes={budget}: give a whole number of 1 or more, or null")
    check_name("replay.name", str(conf.replay.name))


def run(conf: DictConfig) -> None:
    """Replay ``replay.policies``; write ``replay.json`` and the tables below ``data/replay``."""
    check_options(conf)
    config = drafting_config(conf)
    pairs, machines = replay_pairs(conf), open_machines(conf)
    folders = {pair: pair_folder(conf, pair) for pair in pairs}
    policies = open_policies(conf, config)
    names = [policy.name for policy in policies]
    folder = Path(conf.paths.data) / "replay" / str(conf.replay.name)
    found: list[dict[str, Any]] = []
    covered = []
    with stage_run(conf, "replay", folder) as stage:
        for pair, home in folders.items():
            tries = read_logged(conf, pair, home)
            texts, own = texts_of(tries), own_profile(conf, pair)
            stage.read(home, f"{tries.rows:,} rows")
            covered.append(coverage(pair, tries, texts))
            if not texts.whole:
                note_sampled(conf, pair)
            for machine in machines:
                cells = cells_of(tries, texts, machine, own, policies, conf)
                found += [summary(cell, names) for cell in cells]
        show(stage, covered, found, names)
        write_json(folder / "replay.json", {"replayed": covered, "cells": found})
        stage.wrote(folder / "replay.json")
        stage.write_tables()


def show(
    stage: Stage,
    covered: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
    names: Sequence[str],
) -> None:
    """Print what was replayed, the policies by pair and machine, by task, and the worst cells."""
    stage.show("replayed", covered)
    by_task = [cell for cell in found if cell["task"] is not None]
    whole = [cell for cell in found if cell["task"] is None]
    stage.show(
        "η by policy; in brackets 95 % intervals over prompts",
        [row for cell in whole for row in policy_rows(cell)],
    )
    stage.show("by task", [row for cell in by_task for row in task_rows(cell, names)])
    worst = worst_rows(by_task, names)
    stage.show("the worst of task x pair x hardware", worst)
    stage.metrics["states"] = sum(row["states"] for row in covered)
    stage.metrics["cells"] = len(by_task)
    for row in worst:
        stage.metrics[f"least_over_endpoint_{row['policy']}"] = row["least ÷ better endpoint"]
