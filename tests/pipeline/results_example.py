"""A results.json with known truth, in exactly the form that stage=evaluate writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

DEPTH = 5
TASKS = ("gsm8k", "alpaca", "humaneval", "qa", "cnn_dm", "mt_bench")
PLAIN_TOKENS_PER_MS = 0.015
# name: label, role, bits, true speed-up over plain, mean A, mid calls a round
SYSTEMS: dict[str, tuple[str, str, str | None, float, float, float]] = {
    "plain": ("plain decoding", "plain", None, 1.0, 0.0, 0.0),
    "compiled": ("plain, compiled", "fastest", None, 1.12, 0.0, 0.0),
    "generate": ("transformers generate", "peer", None, 0.88, 0.0, 0.0),
    "assisted": ("transformers assisted", "peer", None, 1.05, 0.0, 0.0),
    "all_small": ("All Small", "small", "00000", 1.22, 0.7, 0.0),
    "all_mid": ("All Mid", "mid", "11111", 1.31, 2.2, 5.0),
    "fixed": ("fixed 10101", "fixed", "10101", 1.43, 2.17, 3.0),
    "without_eg": ("w/o EG", "without_eg", "10101", 1.35, 1.8, 3.0),
    "without_nd": ("w/o ND", "without_nd", "10101", 1.2, 1.47, 3.0),
    "csd": ("CSD", "csd", "10101", 0.94, 0.81, 3.0),
    "specinfer": ("SpecInfer", "specinfer", None, 1.25, 1.6, 5.0),
    "online": ("online planning", "online", None, 0.95, 2.3, 1.9),
    "scheduler": ("TreeGraft", "scheduler", None, 1.62, 2.3, 1.7),
    "guarded": ("TreeGraft, guarded", "guarded", None, 1.65, 2.3, 1.6),
}
PARTS = {
    "small": 0.9,
    "mid": 22.0,
    "signals": 0.6,
    "scheduler": 0.3,
    "prune": 0.4,
    "verify": 81.0,
    "accept": 0.5,
}


def example(
    pair: str = "smollm2-135m",
    tasks: Sequence[str] = TASKS,
    prompts_per_task: int = 8,
    seed: int = 0,
    speed: float = 1.0,
    noise: float = 0.25,
    draws: int = 400,
    unseen: bool = False,
) -> dict[str, Any]:
    """Return a whole results object; every system's expected speed-up is in `SYSTEMS`.

    Speed-ups other than plain's are multiplied by ``speed``; ``noise`` is the spread of the ms of a
    prompt (one factor for all systems) and half of it that of each run.
    """
    rng = np.random.default_rng(seed)
    turns = example_turns(tasks, prompts_per_task)
    prompt_factor = {
        (t["task"], t["prompt_id"]): float(np.exp(rng.normal(0, noise))) for t in turns
    }
    return {
        "format": 1,
        "pair": pair,
        "target": "embedded:smollm2-135m-instruct",
        "mid": "data/drafters/smollm2-135m-4l",
        "fitted_on": ["smollm2-135m"],
        "unseen_pair": unseen,
        "held_out_tasks": [t for t in tasks if t == "mt_bench"],
        "settings": example_settings(len(tasks) * prompts_per_task, len(turns), draws),
        "profile": {
            **{"plain_ms": 66.0, "target_ms": 81.0, "mid_ms": 13.2, "small_ms": 0.4},
            **{"scheduler_ms": 0.05, "signals_ms": 0.1, "prune_ms": 0.1},
            **{"accept_ms": 0.2, "mid_overhead_ms": 1.5},
        },
        "systems": [
            {
                "name": name,
                "label": label,
                "role": role,
                "bits": bits,
                "predicted": None if role in ("plain", "peer") else round(1.03 * speed * times, 3),
                "predicted_from": None if role in ("plain", "peer") else "replay",
            }
            for name, (label, role, bits, times, _, _) in SYSTEMS.items()
        ],
        "turns": turns,
        "runs": {
            name: [
                example_run(rng, system, prompt_factor[t["task"], t["prompt_id"]], speed, noise)
                for t in turns
            ]
            for name, system in SYSTEMS.items()
        },
        "calls_by_step": {
            name: {task: rng.uniform(0, 1, DEPTH).round(3).tolist() for task in ("all", *tasks)}
            for name in ("scheduler", "guarded")
        },
        "cost": {
            name: {
                part: round(ms * (calls if part == "mid" else 1) * rng.uniform(0.9, 1.1), 3)
                for part, ms in PARTS.items()
            }
            for name, (_, role, _, _, _, calls) in SYSTEMS.items()
            if role not in ("plain", "peer", "fastest")
        },
        "picks": {
            name: {
                "calls": 120,
                "picks": 1168,
                "earlier_share": round(628 / 1168, 4),
                "by_offset": {"-4": 8, "-3": 40, "-2": 180, "-1": 400, "0": 520, "1": 20},
                "pool": 90.1 * scale,
                "frontier": 9.2,
                "usual_pool": 40.2,
            }
            for name, scale in (("fixed", 1.0), ("scheduler", 0.8))
        },
        "replay": example_replay(rng),
    }


def example_settings(prompts: int, turns: int, draws: int) -> dict[str, Any]:
    """Return what was run."""
    return {
        "prompts": prompts,
        "turns": turns,
        "max_new_tokens": 32,
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
        "seed": 0,
        "drafting": {"depth": DEPTH, "width": 10, "verify_nodes": 63, "max_ngram": 5},
        "dtype": "float32",
        "machine": {"processor": "Xeon", "cores": 2, "accelerator": "none"},
        "bootstrap": draws,
        "git_sha": "0123abc",
        "created": "2026-01-01T00:00:00Z",
    }


def example_turns(tasks: Sequence[str], prompts_per_task: int) -> list[dict[str, Any]]:
    """Return the turns: one a prompt, two for prompts of mt_bench."""
    return [
        {"task": task, "prompt_id": str(p), "turn": turn, "prompt_tokens": 57}
        for task in tasks
        for p in range(prompts_per_task)
        for turn in range(2 if task == "mt_bench" else 1)
    ]


def example_run(
    rng: np.random.Generator, system: tuple[Any, ...], factor: float, speed: float, noise: float
) -> dict[str, Any]:
    """Return one turn of one system, whose mean ms is that of its true speed-up."""
    _, role, _, times, accepted, calls = system
    tokens = int(rng.integers(20, 32))
    spread = noise / 2
    wobble = float(np.exp(rng.normal(-(spread**2) / 2, spread)))
    rounds = 0 if role in ("plain", "peer", "fastest") else max(1, round(tokens / (1 + accepted)))
    return {
        "tokens": tokens,
        "ms": tokens
        / (PLAIN_TOKENS_PER_MS * times * (1 if role == "plain" else speed))
        * factor
        * wobble,
        "rounds": rounds,
        "accepted": int(rng.poisson(accepted * rounds)),
        "calls": int(rng.binomial(DEPTH * rounds, calls / DEPTH)),
        "same": True,
    }


def example_replay(rng: np.random.Generator) -> dict[str, Any]:
    """Return η of all 32 fixed schedules, the policies, and η by mid-call budget."""
    plain = 15.0
    fixed = []
    for bits in product("01", repeat=DEPTH):
        calls = bits.count("1")
        eta = plain * (1.2 + 0.15 * calls - 0.03 * calls**2 + float(rng.normal(0, 0.03)))
        fixed.append(policy("".join(bits), eta, calls) | {"bits": "".join(bits)})
    policies = [
        {"label": label, **policy(name, plain * times, calls)}
        for name, label, times, calls in (
            ("all_small", "All Small", 1.22, 0.0),
            ("all_mid", "All Mid", 1.31, 5.0),
            ("scheduler", "TreeGraft", 1.62, 1.7),
            ("oracle", "oracle", 1.95, 1.4),
        )
    ]
    by_calls = []
    for calls in range(DEPTH + 1):
        entry: dict[str, float] = {"budget": calls}
        for name, best in (("scheduler", 1.62), ("oracle", 1.95)):
            eta = plain * (best - (best - 1.22) * 0.5**calls * (calls < 4))
            entry |= {name: eta, f"{name}_low": 0.93 * eta, f"{name}_high": 1.07 * eta}
        by_calls.append(entry)
    return {
        "prompts": 48,
        "plain": plain,
        "policies": policies,
        "fixed": fixed,
        "by_calls": by_calls,
    }


def policy(name: str, eta: float, calls: float) -> dict[str, Any]:
    """Return one policy of the replay."""
    return {
        **{"name": name, "eta": eta, "low": 0.94 * eta, "high": 1.06 * eta},
        **{"calls": calls, "A": 0.7 + 0.3 * calls},
    }


def write_results(data: Path, value: Mapping[str, Any], folder: str = "") -> Path:
    """Write ``value`` to where the report looks for it, below ``data``; return the file."""
    path = data / "evaluation" / (folder or value["pair"]) / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path
