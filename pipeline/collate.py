"""``results.json``: what every system did on every turn, beside what was predicted of it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import OmegaConf

from pipeline.engine import drafting_config
from pipeline.measure import clocked_ms, sampling_config
from pipeline.report import git_sha, machine
from pipeline.results import FORMAT
from pipeline.systems import Bench, System

if TYPE_CHECKING:
    from pipeline.evaluate import Verdict

Record = Mapping[str, Any]
PREDICTED_BY_REPLAY = ("scheduler", "online")
PREDICTED_BY_COUNTS = ("csd", "without_eg", "without_nd", "specinfer", "other")


def turn_key(record: Record) -> tuple[str, str, int]:
    """Return which turn a record is of."""
    return record["task"], record["prompt_id"], record["turn"]


# Predictions --------------------------------------------------------------------------------


def predict(
    bench: Bench,
    systems: Mapping[str, System],
    records: Sequence[Record],
    verdict: Verdict | None,
) -> dict[str, tuple[float, str]]:
    """Return the predicted speed-up over plain decoding of systems, and what it is from.

    ``replay``: from the enumerated outcomes of the same texts and the latency profile, without
    decoding. ``counts``: trees that are not enumerated; the rounds that were decoded, timed by the
    latency profile.
    """
    found, rules = {}, drafting_config(bench.conf)
    for name, system in systems.items():
        if system.config is None or system.role == "guarded":
            continue
        rows = [r for r in records if name in r["outputs"]]
        enumerated = system.config == rules and system.role not in PREDICTED_BY_COUNTS
        policy = None
        if enumerated and (system.bits is not None or system.role in PREDICTED_BY_REPLAY):
            policy = system.bits or system.role
        if policy is None:
            each = verdict.decision_ms.get(system.role, 0.0) if verdict else 0.0
            tokens, ms = clocked(bench, name, rows, each)
        else:
            tokens, ms = replayed(verdict, policy, rows)
        if ms:
            source = "counts" if policy is None else "replay"
            found[name] = (tokens / ms * bench.profile.plain_ms, source)
    return found


def replayed(verdict: Verdict | None, policy: str, rows: Sequence[Record]) -> tuple[int, float]:
    """Return tokens and time, ms, of a policy in the replay of the turns that ``rows`` are of."""
    if verdict is None:
        return 0, 0.0
    turns = verdict.texts.turns[["task", "prompt_id", "turn"]].itertuples(index=False, name=None)
    number = {turn: i for i, turn in enumerate(turns)}
    there = [number[turn_key(r)] for r in rows if turn_key(r) in number]
    run = verdict.runs[policy].take(np.array(there, np.int64))
    return int(run.tokens.sum()), float(run.ms.sum())


def clocked(
    bench: Bench, name: str, rows: Sequence[Record], decision_ms: float
) -> tuple[int, float]:
    """Return a system's tokens on some turns, and the time of its rounds by the profile, ms."""
    outputs = [r["outputs"][name] for r in rows]
    ms = sum(clocked_ms(bench.profile, r, decision_ms) for o in outputs for r in o["rounds"])
    return sum(o["counted"] for o in outputs), ms


# The file -----------------------------------------------------------------------------------


def collate(
    bench: Bench,
    systems: Mapping[str, System],
    records: Sequence[Record],
    predicted: Mapping[str, tuple[float, str]],
    verdict: Verdict | None,
) -> dict[str, Any]:
    """Return the contents of ``results.json``."""
    conf = bench.conf
    fitted = [str(name) for name in bench.artifact.metadata.get("pairs", [conf.fit.name])]
    trees = [name for name, system in systems.items() if system.config is not None]
    return {
        "format": FORMAT,
        "pair": str(conf.pair.name),
        "target": str(conf.pair.target.path),
        "mid": str(conf.pair.mid.path),
        "fitted_on": fitted,
        "unseen_pair": str(conf.pair.name) not in fitted,
        "held_out_tasks": [str(name) for name in conf.held_out_tasks],
        "settings": settings(bench, records),
        "profile": {
            name: value
            for name, value in vars(bench.profile).items()
            if isinstance(value, int | float)
        },
        "systems": [
            {
                "name": name,
                "label": system.label,
                "role": system.role,
                "bits": system.bits,
                "predicted": predicted[name][0] if name in predicted else None,
                "predicted_from": predicted[name][1] if name in predicted else None,
            }
            for name, system in systems.items()
        ],
        "turns": [
            {key: r[key] for key in ("task", "prompt_id", "turn", "prompt_tokens")} for r in records
        ],
        "runs": {
            name: [turn_run(r, system, greedy(bench)) for r in records]
            for name, system in systems.items()
        },
        "calls_by_step": {name: calls_by_step(name, records) for name in trees},
        "cost": {name: cost_of_round(name, records) for name in trees},
        "picks": {
            name: found
            for name in trees
            if (found := where_picked(rounds_of(name, records), bench.width)) is not None
        },
        "replay": replay_section(verdict) if verdict is not None else None,
    }


def greedy(bench: Bench) -> bool:
    """Tell whether this run decodes greedily."""
    return sampling_config(bench.conf).greedy


def settings(bench: Bench, records: Sequence[Record]) -> dict[str, Any]:
    """Return what the figures depend on."""
    conf = bench.conf
    return {
        "prompts": len({turn_key(r)[:2] for r in records}),
        "turns": len(records),
        "max_new_tokens": int(conf.evaluate.max_new_tokens),
        "sampling": OmegaConf.to_container(conf.sampling),
        "seed": int(conf.seed),
        "drafting": OmegaConf.to_container(conf.drafting),
        "dtype": str(bench.pair.target.dtype).removeprefix("torch."),
        "machine": machine(),
        "bootstrap": int(conf.evaluate.bootstrap),
        "git_sha": git_sha(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def turn_run(record: Record, system: System, is_greedy: bool) -> dict[str, Any] | None:
    """Return one system's totals on one turn; None if it did not run there.

    Greedy outputs are compared with ``generate``'s. Sampled ones of this project's decoders are
    compared with plain sampling under the same seed; ``generate`` draws otherwise.
    """
    output = record["outputs"].get(system.name)
    if output is None:
        return None
    reference = record["outputs"]["generate" if is_greedy else "plain"]
    comparable = system.exact and (is_greedy or system.role != "peer")
    rounds = output["rounds"]
    return {
        "tokens": output["counted"],
        "ms": output["ms"],
        "rounds": len(rounds),
        "accepted": sum(r["accepted"] for r in rounds),
        "calls": sum(sum(r["schedule"]) for r in rounds),
        "same": output["tokens"] == reference["tokens"] if comparable else None,
    }


def rounds_of(name: str, records: Iterable[Record]) -> list[Record]:
    """Return all rounds of a system."""
    return [r for record in records if name in record["outputs"] for r in
            record["outputs"][name]["rounds"]]  # fmt: skip


def calls_by_step(name: str, records: Sequence[Record]) -> dict[str, list[float]]:
    """Return the share of rounds that call the mid drafter at each step, by task and in all."""
    schedules: dict[str, list[list[int]]] = defaultdict(list)
    for record in records:
        for r in rounds_of(name, [record]):
            schedules["all"].append(r["schedule"])
            schedules[record["task"]].append(r["schedule"])
    return {task: np.mean(rows, axis=0).tolist() for task, rows in schedules.items()}


def cost_of_round(name: str, records: Sequence[Record]) -> dict[str, float]:
    """Return the mean time of a round's parts, ms."""
    rounds = rounds_of(name, records)
    parts: Counter[str] = Counter()
    for r in rounds:
        parts.update(r["ms"])
    return {part: ms / len(rounds) for part, ms in parts.items()}


def where_picked(rounds: Sequence[Record], width: int) -> dict[str, Any] | None:
    """Return where mid calls picked, and the sizes of their pools; None without picks.

    Where N_k was empty there is no offset; such picks count as earlier, as in the log.
    """
    picks = [p for r in rounds for p in r["picks"]]
    frontiers = [
        n for r in rounds for n, bit in zip(r["frontiers"], r["schedule"], strict=True) if bit
    ]
    offsets = Counter(offset for p in picks for offset in p[0])
    if not offsets:
        return None
    calls = [call for r in rounds for call in r["calls"]]
    n_picks = sum(len(p[0]) or min(width, p[1]) for p in picks)
    return {
        "calls": len(picks),
        "picks": n_picks,
        "earlier_share": sum(call[4] for call in calls) / n_picks,
        "by_offset": {str(offset): n for offset, n in sorted(offsets.items())},
        "pool": float(np.mean([p[1] for p in picks])),
        "frontier": float(np.mean(frontiers)),
        "usual_pool": float(np.mean([p[2] for p in picks])),
    }


def replay_section(verdict: Verdict) -> dict[str, Any]:
    """Return η of every policy, tokens/s, with intervals; and by the mid calls allowed."""
    named = [
        (verdict.small, "All Small"),
        (verdict.mid, "All Mid"),
        ("scheduler", "TreeGraft"),
        ("online", "online planning"),
        ("oracle", "oracle"),
        ("gain_oracle", "oracle, whole text"),
    ]
    return {
        "prompts": verdict.prompts,
        "plain": 1e3 / verdict.plain_ms,
        "policies": [
            {"name": name, "label": label, **verdict.figures(verdict.runs[name])}
            for name, label in named
            if name in verdict.runs
        ],
        "fixed": [{"bits": name, **verdict.figures(verdict.runs[name])} for name in verdict.fixed],
        "by_calls": [by_calls(verdict, most) for most in range(verdict.depth + 1)],
    }


def by_calls(verdict: Verdict, most: int) -> dict[str, Any]:
    """Return η of scheduler and oracle when a round may call the mid drafter ``most`` times."""
    row: dict[str, Any] = {"budget": most}
    for name in ("scheduler", "oracle"):
        figures = verdict.figures(verdict.runs[f"{name}, {most} calls"])
        row[name] = figures["eta"]
        row[f"{name}_low"], row[f"{name}_high"] = figures["low"], figures["high"]
    return row
