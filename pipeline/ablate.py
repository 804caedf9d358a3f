"""stage=ablate: one way to fit a scheduler, judged on held-out prompts; a sweep gives the table.

Every job of a Hydra sweep (``experiment=ablation``) fits a scheduler in memory, replays it on every
machine of ``replay.hardware`` and leaves one file; a job whose file is there is not run again. The
table is made of all files: seeds together, intervals over prompts of the mean over seeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from pipeline.distill import check_options as check_distill
from pipeline.features import fit_pairs, load_tries, note, read_selection
from pipeline.fitting import fit_scheduler, plain, some_states
from pipeline.hardware import Outcomes
from pipeline.inputs import damaged, digest
from pipeline.leaving import policies_of, read_held_out
from pipeline.places import SPLITS, local_pair, local_trajectories
from pipeline.replay import (
    Replayed,
    follow,
    gain_oracle,
    interval,
    rate_of,
    replay,
    resamples,
    texts_of,
)
from pipeline.replaying import Machine, Policy, check_options, open_machines, own_profile
from pipeline.report import stage_run, table
from pipeline.tries import Tries
from treegraft_core import PAPER_SIGNALS, SIGNALS, InputError
from treegraft_core.files import write_json, write_text

SETS = ("chosen", "paper", "all")
KEYS = ("value", "label", "distill", "hardware", "drafting", "held_out_tasks", "trainer")


def signal_set(conf: DictConfig) -> tuple[str, ...]:
    """Return the signals of ``ablate.signals``."""
    name = str(conf.ablate.signals)
    if name not in SETS:
        raise InputError(f"ablate.signals={name}: choose one of {', '.join(SETS)}")
    if name == "chosen":
        return read_selection(conf)
    return PAPER_SIGNALS if name == "paper" else SIGNALS


def axes(conf: DictConfig) -> dict[str, str]:
    """Return what the table tells apart."""
    return {
        "label": str(conf.label.name),
        "rollouts": "yes" if conf.distill.rollout_epochs else "no",
        "loss": str(conf.distill.loss) + (", by |y|" if conf.distill.weight == "size" else ""),
        "hardware": str(conf.hardware.name),
        "signals": str(conf.ablate.signals),
        "B_ver": str(conf.drafting.verify_nodes),
        "other": str(conf.ablate.note or ""),
    }


def by_prompt(run: Replayed, groups: Any) -> list[list[float]]:
    """Return tokens and time of each prompt, in order of their names."""
    names, index = np.unique(groups, return_inverse=True)
    sums = [np.bincount(index, v, len(names)) for v in (run.tokens, run.ms)]
    return np.stack(sums, axis=1).tolist()


def judge(
    held: Mapping[str, Tries],
    machines: Sequence[Machine],
    policies: Sequence[Policy],
    conf: DictConfig,
) -> list[dict[str, Any]]:
    """Return tokens and time by prompt of every policy, endpoint and the oracle in each cell."""
    found = []
    for pair, tries in held.items():
        texts, own = texts_of(tries), own_profile(conf, pair)
        for machine in machines:
            seen, profile = machine.outcomes(tries, own, conf.replay.verify_nodes)
            runs = ends(tries, seen, texts)
            for policy in policies:
                wanted = policy.decide(tries, seen, texts)
                done = replay(texts, seen, follow(wanted, tries.depth))
                runs[policy.name] = done.with_cost(tries.depth * policy.decision_ms(profile))
                runs[f"{policy.name}, free"] = done
            sums = {name: by_prompt(run, texts.groups) for name, run in runs.items()}
            found.append({"pair": pair, "hardware": machine.name, "sums": sums})
    return found


def ends(tries: Tries, seen: Outcomes, texts: Any) -> dict[str, Replayed]:
    """Replay the endpoints and the oracle."""
    last = (1 << tries.depth) - 1
    leaves = {
        "All Small": np.zeros(len(tries), np.int64),
        "All Mid": np.full(len(tries), last),
        "oracle": gain_oracle(texts, seen),
    }
    return {name: replay(texts, seen, leaf) for name, leaf in leaves.items()}


def read_jobs(folder: Path) -> list[dict[str, Any]]:
    """Return what the jobs of the sweep have left."""
    jobs = []
    for path in sorted(folder.glob("job-*.json")):
        try:
            job = json.loads(path.read_text(encoding="utf-8"))
            jobs.append({key: job[key] for key in ("axes", "seed", "cells", "metrics")})
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(path, "ablate", f"{error!r}; delete it first") from error
    return jobs


def cell_figures(
    jobs: Sequence[Mapping[str, Any]], at: int, policy: str, draws: int
) -> dict[str, Any]:
    """Return ratio to the better endpoint and share of the gap, means over the jobs' seeds."""
    ratios, shares = [], []
    for job in jobs:
        sums = {name: np.array(v) for name, v in job["cells"][at]["sums"].items()}
        once = np.ones((1, len(sums["oracle"])))
        weights = np.concatenate([once, resamples(len(sums["oracle"]), draws, 0)])
        end = max(("All Small", "All Mid"), key=lambda name: float(rate_of(sums[name], once)[0]))
        base = rate_of(sums[end], weights)
        mine, best = rate_of(sums[policy], weights), rate_of(sums["oracle"], weights)
        ratios.append(mine / base)
        shares.append((mine - base) / np.maximum(best - base, 1e-9))
    ratio, share = np.mean(ratios, axis=0), np.mean(shares, axis=0)
    low, high = interval(ratio[1:])
    return {
        "ratio": float(ratio[0]),
        "low": low,
        "high": high,
        "seeds": float(np.std([r[0] for r in ratios])),
        "share": float(share[0]),
    }


def ablation_rows(
    jobs: Sequence[Mapping[str, Any]], policy: str, draws: int
) -> list[dict[str, Any]]:
    """Return a row for each way to fit: ÷ better endpoint in every cell, seeds together."""
    ways: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for job in jobs:
        if policy in job["cells"][0]["sums"]:
            ways.setdefault(tuple(job["axes"].values()), []).append(job)
    rows = []
    for way, mine in sorted(ways.items()):
        row: dict[str, Any] = dict(zip(mine[0]["axes"], way, strict=True))
        row["seeds"] = len(mine)
        every = []
        for at, cell in enumerate(mine[0]["cells"]):
            found = cell_figures(mine, at, policy, draws)
            every.append(found)
            name = cell["hardware"] + (f", {cell['pair']}" if pairs_of(jobs) > 1 else "")
            interval_text = f"({found['low']:.3f} … {found['high']:.3f})"
            row[name] = f"{found['ratio']:.3f} {interval_text}"
        row["mean"] = float(np.exp(np.mean([np.log(f["ratio"]) for f in every])))
        row["least"] = min(f["ratio"] for f in every)
        row["± seeds"] = float(np.mean([f["seeds"] for f in every]))
        row["gap closed, %"] = 100 * float(np.mean([f["share"] for f in every]))
        rows.append(row)
    return rows


def pairs_of(jobs: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of pairs that the jobs are judged on."""
    return len({cell["pair"] for job in jobs for cell in job["cells"]})


_READ: dict[str, tuple[Tries, dict[str, Tries]]] = {}
"""What the last job read: the jobs of a sweep run in one process, on the same files."""


def read(conf: DictConfig) -> tuple[Tries, dict[str, Tries]]:
    """Return the trajectories to fit on and to judge on; those of the last job if unchanged."""
    for split in {"collect", str(conf.replay.split)} & set(SPLITS):
        for pair in fit_pairs(conf):
            local_pair(conf, split, pair)
    home = local_trajectories(conf)
    files = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in home.rglob("*.parquet")]
    groups = ["fit", "task", "drafting", "held_out_tasks", "replay"]
    key = digest([plain(conf, groups), int(conf.ablate.states), sorted(files)])
    if key not in _READ:
        tries = some_states(load_tries(conf), int(conf.ablate.states))
        held = read_held_out(conf, tries.pairs)
        _READ.clear()
        _READ[key] = tries, held
    return _READ[key]


def run(conf: DictConfig) -> None:
    """Fit one scheduler, judge it, leave its file, and print the table of all files."""
    check_options(conf)
    check_distill(conf.distill)
    machines, signals = open_machines(conf), signal_set(conf)
    tries, held = read(conf)
    folder = Path(conf.paths.data) / "ablation" / str(conf.fit.name)
    states = digest(tries.states[["pair", "state_id"]].to_numpy().tolist())
    rules = plain(conf, [*KEYS, "replay"])
    name = digest([rules, int(conf.seed), signals, axes(conf), states])
    with stage_run(conf, "ablate", folder) as stage:
        note(tries, conf, stage)
        path = folder / f"job-{name}.json"
        if not path.is_file():
            cache = Path(conf.paths.cache) / "ablation"
            artifact, model, metrics = fit_scheduler(tries, signals, conf, stage, cache)
            cells = judge(held, machines, policies_of(artifact, model, conf), conf)
            job = {
                "axes": axes(conf),
                "seed": int(conf.seed),
                "signals": list(signals),
                "metrics": metrics,
                "cells": cells,
            }
            write_json(path, job)
        stage.wrote(path)
        show_jobs(folder, conf, stage)


def show_jobs(folder: Path, conf: DictConfig, stage: Any) -> None:
    """Print and write the table of all jobs that are there."""
    jobs, draws = read_jobs(folder), int(conf.replay.bootstrap)
    texts = []
    for policy in ("scheduler", "online", "online, free"):
        rows = ablation_rows(jobs, policy, draws)
        if rows and policy == "scheduler":
            stage.show(f"{policy}: η ÷ better endpoint, {len(jobs)} jobs", rows)
        texts.append(table(rows, policy))
    write_text(folder / "tables.txt", "\n\n".join(texts) + "\n")
    stage.wrote(folder / "tables.txt")
    stage.metrics["jobs"] = len(jobs)
