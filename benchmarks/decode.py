"""Tokens a second on held-out prompts: transformers' own ways to speculate, and this runtime's.

Same weights, dtype, threads and prompts; whole requests, the reading of the prompt included. Draft
lengths and the best fixed schedule are chosen on other prompts than those reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

from benchmarks.timing import Measured, seconds, short
from pipeline.check import tie_gap
from pipeline.engine import drafting_config, open_pair, open_profile, runtime_config
from pipeline.evaluate import open_scheduler
from pipeline.peers import assistant_of
from pipeline.peers import generate as by_transformers
from pipeline.replay import bootstrap
from pipeline.tasks import TaskPrompt, load_prompts
from treegraft_core import (
    AS_DEFINED,
    DistilledScheduler,
    DraftingConfig,
    FixedSchedule,
    LatencyProfile,
    Pair,
    RuntimeConfig,
    Scheduler,
    SchedulerArtifact,
    TreeGraftDecoder,
    decode_plain,
)
from treegraft_core.prompts import chat_ids
from treegraft_core.sampling import GREEDY

System = Callable[[list[int], int], tuple[list[int], float]]
"""Takes prompt ids and a number of tokens; returns the new tokens and the seconds they took."""

PLAIN, OWN_PLAIN, SCHEDULER = "transformers", "decode_plain", "scheduler"
GUARDED = "scheduler, guarded"
PEERS = ("assisted", "prompt lookup")
WARM_UP_TOKENS = 8
LENGTHS = (2, 4, 8)
CANDIDATES = ("00000", "10000", "01000", "11000", "10100", "10101")


def timed(call: Callable[[], list[int]]) -> tuple[list[int], float]:
    """Return what a call returns and its seconds."""
    result: list[list[int]] = []
    s = seconds(lambda: result.append(call()))
    return result[0], s


def generate(pair: Pair, ids: list[int], n_tokens: int, **named: Any) -> list[int]:
    """Run transformers' greedy ``generate``; return the new tokens."""
    return by_transformers(pair, ids, n_tokens, GREEDY, **named).tokens


def peers(pair: Pair, lengths: Sequence[int] = LENGTHS) -> dict[str, System]:
    """Return transformers' assisted generation and prompt lookup at every draft length."""
    assistant = assistant_of(pair)
    found: dict[str, System] = {}

    def assisted(length: int, ids: list[int], n: int) -> tuple[list[int], float]:
        assistant.generation_config.num_assistant_tokens = length
        return timed(lambda: generate(pair, ids, n, assistant_model=assistant))

    def lookup(length: int, ids: list[int], n: int) -> tuple[list[int], float]:
        return timed(lambda: generate(pair, ids, n, prompt_lookup_num_tokens=length))

    for length in lengths:
        found[f"assisted, {length}"] = partial(assisted, length)
        found[f"prompt lookup, {length}"] = partial(lookup, length)
    return found


def plain(pair: Pair) -> dict[str, System]:
    """Return plain decoding by transformers and by this runtime."""
    return {
        PLAIN: lambda ids, n: timed(lambda: generate(pair, ids, n)),
        OWN_PLAIN: lambda ids, n: timed(lambda: decode_plain(pair, ids, n).tokens),
    }


def decoder(
    pair: Pair,
    scheduler: Scheduler,
    config: DraftingConfig,
    profile: LatencyProfile | None,
    runtime: RuntimeConfig = AS_DEFINED,
) -> System:
    """Return this runtime's decoder under one scheduler."""
    made = TreeGraftDecoder(pair, scheduler, config, profile, runtime=runtime)
    return lambda ids, n: timed(lambda: made.generate(ids, n).tokens)


def fixed(pair: Pair, config: DraftingConfig, profile: LatencyProfile | None) -> dict[str, System]:
    """Return All Small, All Mid and the candidates for the best fixed schedule."""
    depth = config.depth
    candidates = (c[:depth].ljust(depth, "0") for c in CANDIDATES)
    return {
        bits: decoder(pair, FixedSchedule([int(x) for x in bits]), config, profile)
        for bits in dict.fromkeys(("0" * depth, "1" * depth, *candidates))
    }


Runs = dict[str, list[tuple[list[int], float]]]


def run_all(systems: Mapping[str, System], prompts: Sequence[list[int]], n_tokens: int) -> Runs:
    """Decode every prompt with every system, prompt by prompt, starting with another each time."""
    names = list(systems)
    for name in names:
        systems[name](prompts[0], WARM_UP_TOKENS)
    runs: Runs = {name: [] for name in names}
    for number, ids in enumerate(tqdm(prompts, desc="decode", unit="prompt")):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(systems[name](ids, n_tokens))
    return runs


def rate(runs: Runs, name: str, at: Any = slice(None)) -> float:
    """Return tokens/s of a system over prompts: ratio of sums."""
    tokens = np.array([len(out) for out, _ in runs[name]])[at]
    return float(tokens.sum() / np.array([s for _, s in runs[name]])[at].sum())


def best(runs: Runs, names: Sequence[str]) -> str:
    """Return the fastest of some systems."""
    return max(names, key=lambda name: rate(runs, name))


def compare(pair: Pair, prompts: Sequence[list[int]], runs: Runs) -> dict[str, tuple[int, int]]:
    """Return how many outputs of each system equal transformers', and how many part at a tie."""
    counts = {}
    for name, done in runs.items():
        same = ties = 0
        for ids, (tokens, _), (expected, _) in zip(prompts, done, runs[PLAIN], strict=True):
            same += tokens == expected
            pairs = enumerate(zip(tokens, expected, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), None)
            if at is not None:
                gap, bound = tie_gap(pair, ids + expected[:at], tokens[at], expected[at])
                ties += gap <= bound
        counts[name] = same, ties
    return counts


def interval(
    runs: Runs, name: str, other: str, at: Sequence[int], draws: int
) -> tuple[float, float]:
    """Return the 95 % interval over prompts of the ratio of two systems' tokens/s."""
    groups = [str(i) for i in at]
    places = np.array(at)

    def ratio(picked: Any) -> float:
        return rate(runs, name, places[picked]) / rate(runs, other, places[picked])

    return bootstrap(groups, ratio, draws, 0)


def ids_of(pair: Pair, prompts: Sequence[TaskPrompt]) -> list[list[int]]:
    """Return the token ids of each prompt's first turn."""
    return [
        chat_ids(pair.tokenizer, [{"role": "user", "content": p.prompt.turns[0]}]) for p in prompts
    ]


def choose(tuning: Runs) -> dict[str, str]:
    """Return the best draft length of each peer, the better peer, and the best fixed schedule."""
    names = {kind: [n for n in tuning if n.startswith(kind)] for kind in PEERS}
    chosen = {kind: best(tuning, names[kind]) for kind in PEERS}
    chosen["peer"] = best(tuning, list(chosen.values()))
    chosen["fixed"] = best(tuning, [n for n in tuning if set(n) <= {"0", "1"}])
    return chosen


def measure(
    pair: Pair,
    systems: Mapping[str, System],
    chosen: dict[str, str],
    ids: Sequence[list[int]],
    kinds: Sequence[str],
    n_tokens: int,
    draws: int,
) -> Measured:
    """Decode the reported prompts with ``systems`` and lay out the tables."""
    runs = run_all(systems, ids, n_tokens)
    equal = compare(pair, ids, runs)
    rows = [system_row(runs, name, chosen, equal[name], draws) for name in systems]
    by_kind = [kind_row(runs, kinds, kind, chosen, draws) for kind in sorted(set(kinds))]
    return Measured(
        values={
            "chosen_on_other_prompts": chosen,
            "systems": rows,
            "by_kind": by_kind,
            "prompts": len(ids),
            "tokens": n_tokens,
        },
        tables={
            f"{len(ids)} held-out prompts, {n_tokens} tokens, whole requests": rows,
            "tokens/s by kind": by_kind,
        },
        notes=[
            f"chosen on other prompts: peer {chosen['peer']}, fixed schedule {chosen['fixed']}; "
            "intervals: 95 %, over prompts; assisted: constant length, confidence threshold 0"
        ],
        failures=[
            f"{name}: {len(ids) - sum(counts)} outputs differ from transformers' beyond a tie"
            for name, counts in equal.items()
            if sum(counts) < len(ids)
        ],
    )


def system_row(
    runs: Runs, name: str, chosen: dict[str, str], equal: tuple[int, int], draws: int
) -> dict[str, Any]:
    """Return one system's line over all prompts."""
    peer, prompts = chosen["peer"], len(runs[name])
    low, high = interval(runs, name, peer, range(prompts), draws)
    return {
        "system": label(name, chosen),
        "tokens/s": rate(runs, name),
        "× plain": rate(runs, name) / rate(runs, PLAIN),
        "× best peer": f"{rate(runs, name) / rate(runs, peer):.3f} ({low:.3f} … {high:.3f})",
        "identical": f"{equal[0]} of {prompts}",
        "ties": equal[1],
    }


def label(name: str, chosen: dict[str, str]) -> str:
    """Return a system's name for a table."""
    if not set(name) <= {"0", "1"}:
        return name
    marks = ["All Small"] * (set(name) == {"0"}) + ["All Mid"] * (set(name) == {"1"})
    marks += ["best fixed"] * (name == chosen["fixed"])
    return f"{name} ({', '.join(marks)})"


def kind_row(
    runs: Runs, kinds: Sequence[str], kind: str, chosen: dict[str, str], draws: int
) -> dict[str, Any]:
    """Return one kind's tokens/s of every system, and the scheduler against the best peer."""
    at = [i for i, k in enumerate(kinds) if k == kind]
    peer = chosen["peer"]
    row: dict[str, Any] = {"kind": kind, **{name: rate(runs, name, at) for name in runs}}
    for name in runs:
        if name.startswith(SCHEDULER):
            low, high = interval(runs, name, peer, at, draws)
            ratio = short(rate(runs, name, at) / rate(runs, peer, at))
            row[f"{name} / {peer}"] = f"{ratio} ({short(low)} … {short(high)})"
    return row


def split(conf: DictConfig, count: int) -> tuple[list[TaskPrompt], list[TaskPrompt]]:
    """Return prompts to choose on (one of each kind) and ``count`` of each kind to report.

    The shipped task has a file for each; any other is halved.
    """
    if conf.task.collect is not None:
        return load_prompts(conf, "collect", 1), load_prompts(conf, "evaluate", count)
    prompts = load_prompts(conf, "evaluate", 2 * count)
    return prompts[1::2], prompts[::2]


def check(conf: DictConfig) -> tuple[DraftingConfig, LatencyProfile, SchedulerArtifact]:
    """Return what decoding needs from earlier stages, or say which to run."""
    config = drafting_config(conf)
    return config, open_profile(conf), open_scheduler(conf, config)


def run(conf: DictConfig, states: int | None, repeats: int) -> Measured:
    """Decode ``repeats`` prompts of each kind."""
    config, profile, artifact = check(conf)
    pair = open_pair(conf)
    n_tokens = int(conf.evaluate.max_new_tokens)
    choosing, reported = split(conf, repeats)
    candidates = {**peers(pair), **fixed(pair, config, profile)}
    tuning = run_all(candidates, ids_of(pair, choosing), n_tokens)
    chosen = choose(tuning)
    endpoints = ["0" * config.depth, "1" * config.depth]
    taken = dict.fromkeys([*(chosen[kind] for kind in PEERS), *endpoints, chosen["fixed"]])
    scheduler = DistilledScheduler(artifact)
    # Further systems: a name and a callable of the type System.
    systems = {
        **plain(pair),
        **{name: candidates[name] for name in taken},
        SCHEDULER: decoder(pair, scheduler, config, profile),
        GUARDED: decoder(pair, scheduler, config, profile, runtime_config(conf)),
    }
    done = measure(
        pair,
        systems,
        chosen,
        ids_of(pair, reported),
        [p.task for p in reported],
        n_tokens,
        int(conf.evaluate.bootstrap),
    )
    done.values["tuning_tokens_per_s"] = {name: rate(tuning, name) for name in tuning}
    return done
