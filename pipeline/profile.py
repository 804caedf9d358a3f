"""stage=profile: what each part of a round costs on this machine with this pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

from pipeline.engine import drafting_config, open_pair, profile_path
from pipeline.report import Stage, machine, stage_run
from pipeline.tasks import load_prompts
from treegraft_core import (
    AS_DEFINED,
    PAPER_SIGNALS,
    Context,
    DistilledScheduler,
    DraftingConfig,
    DraftTree,
    InputError,
    LatencyProfile,
    Pair,
    RandomSchedule,
    Round,
    SchedulerArtifact,
    StepState,
    TreeGraftDecoder,
)
from treegraft_core.latency import Grid
from treegraft_core.models import CachedModel
from treegraft_core.neural import MidDrafter
from treegraft_core.prompts import chat_ids
from treegraft_core.verify import verify


def random_tree(rng: np.random.Generator, nodes: int, vocab: int, depth: int) -> DraftTree:
    """Return a tree of ``nodes`` non-root nodes, no deeper than ``depth``."""
    tree = DraftTree.from_root(int(rng.integers(vocab)))
    while tree.size <= nodes:
        parent = int(rng.integers(tree.size))
        token = int(rng.integers(vocab))
        if tree.depth[parent] < depth and tree.child(parent, token) < 0:
            tree.add(parent, token, -float(rng.random()))
    return tree


def timed_ms(pair: Pair, call: Callable[[], object]) -> float:
    """Return the wall time of ``call``, device included, ms."""
    pair.synchronize()
    started = time.perf_counter()
    call()
    pair.synchronize()
    return 1e3 * (time.perf_counter() - started)


def measure_grid(
    pair: Pair,
    tokens: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    prepare: Callable[[int], Callable[[int], Callable[[], object]]],
    title: str,
) -> Grid:
    """Time passes of ``tokens`` x ``contexts``; medians and interquartile ranges.

    Repeats are the outer loop within a context, so that a slow moment hits all sizes alike.
    """
    samples = np.zeros((len(tokens), len(contexts), repeats))
    with tqdm(total=samples.size, desc=title, unit="pass") as bar:
        for c, context in enumerate(contexts):
            at_context = prepare(context)
            for repeat in range(-1, repeats):
                for t, n in enumerate(tokens):
                    ms = timed_ms(pair, at_context(n))
                    if repeat >= 0:
                        samples[t, c, repeat] = ms
                        bar.update()
    low, median, high = np.percentile(samples, [25, 50, 75], axis=2)
    return Grid(
        tokens=tuple(int(t) for t in tokens),
        context=tuple(int(c) for c in contexts),
        ms=tuple(tuple(row) for row in median.tolist()),
        spread_ms=tuple(tuple(row) for row in (high - low).tolist()),
    )


def mid_grid(pair: Pair, config: DraftingConfig, conf: DictConfig, contexts: list[int]) -> Grid:
    """Time mid passes: mask, model, distributions, by new nodes (root included) x context."""
    rng = np.random.default_rng(0)
    drafter = MidDrafter(CachedModel(pair.mid), config.width, pair.vocabulary, pair.target_vocab)

    def prepare(context: int) -> Callable[[int], Callable[[], object]]:
        text = rng.integers(pair.target_vocab, size=context + 1).tolist()
        drafter.model.reset()
        drafter.model.run(text[:-1], np.arange(context), rows=np.zeros(0, np.int64))

        def at(n: int) -> Callable[[], object]:
            tree = random_tree(rng, n - 1, pair.target_vocab, config.depth)
            drafter.model.keep(context)
            drafter.begin_round(Context(text, np.zeros(len(text)), config.max_ngram))
            return lambda: drafter.evaluate(tree, np.arange(n))

        return at

    return measure_grid(pair, conf.mid_nodes, contexts, conf.repeats, prepare, "mid pass")


def verify_grid(pair: Pair, config: DraftingConfig, conf: DictConfig, contexts: list[int]) -> Grid:
    """Time verification: mask, model, walk, by tokens (kept nodes + root) x context."""
    rng = np.random.default_rng(1)
    target = CachedModel(pair.target)

    def prepare(context: int) -> Callable[[int], Callable[[], object]]:
        target.reset()
        text = rng.integers(pair.target_vocab, size=context + 1)
        target.run(text[:-1], np.arange(context))

        def at(n: int) -> Callable[[], object]:
            tree = random_tree(rng, n - 1, pair.target_vocab, config.depth)
            target.keep(context)
            return lambda: verify(target, tree, np.arange(1, n), text)

        return at

    return measure_grid(pair, conf.verify_nodes, contexts, conf.repeats, prepare, "verification")


def random_artifact(depth: int, seed: int = 0) -> SchedulerArtifact:
    """Return a scheduler of the right shape with random weights, to time a decision."""
    rng = np.random.default_rng(seed)
    sizes = (6 + depth + len(PAPER_SIGNALS), 64, 32, 1)
    return SchedulerArtifact(
        depth=depth,
        selected_signals=PAPER_SIGNALS,
        weights=tuple(rng.normal(size=(o, i)) for i, o in pairwise(sizes)),
        biases=tuple(rng.normal(size=o) for o in sizes[1:]),
        x_mean=np.zeros(sizes[0]),
        x_std=np.ones(sizes[0]),
        y_mean=0.0,
        y_std=1.0,
    )


def scheduler_ms(depth: int, repeats: int = 500) -> float:
    """Median time of one decision of the distilled scheduler, ms."""
    scheduler = DistilledScheduler(random_artifact(depth))
    state = StepState(1, (), depth, 50, 80.0, 8.0, np.zeros(10))
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        scheduler.decide(state)
        samples.append(1e3 * (time.perf_counter() - started))
    return float(np.median(samples))


def warm_up(
    pair: Pair, config: DraftingConfig, conf: DictConfig
) -> tuple[list[Round], list[float]]:
    """Decode a few prompts with random schedules; return rounds and tree work per mid call, ms."""
    prompts = load_prompts(conf, "collect", 0)
    step = max(1, len(prompts) // conf.profile.warmup_prompts)
    decoder = TreeGraftDecoder(
        pair, RandomSchedule(0), config, log_signals=True, runtime=AS_DEFINED
    )
    rounds: list[Round] = []
    for p in tqdm(prompts[::step][: conf.profile.warmup_prompts], desc="warm-up", unit="prompt"):
        ids = chat_ids(pair.tokenizer, [{"role": "user", "content": p.prompt.turns[0]}])
        if len(ids) < decoder.max_context - 1:
            rounds += decoder.generate(ids, int(conf.profile.warmup_tokens)).rounds
    if sum(len(r.calls) for r in rounds) < 2:
        raise InputError(
            f"profile.warmup_prompts={conf.profile.warmup_prompts}: too few rounds to time; "
            "raise it or profile.warmup_tokens"
        )
    overhead = [(r.ms["mid"] - r.pass_ms) / len(r.calls) for r in rounds if r.calls]
    return rounds, overhead


def per_step(rounds: Sequence[Round], part: str, count: Callable[[Round], int]) -> float:
    """Median over rounds of the time of one part, per piece, ms."""
    return float(np.median([r.ms[part] / count(r) for r in rounds if count(r)]))


def build_profile(pair: Pair, config: DraftingConfig, conf: DictConfig) -> LatencyProfile:
    """Measure everything."""
    limit = pair.max_context
    most = max(*conf.profile.mid_nodes, *conf.profile.verify_nodes) + config.depth
    contexts = [c for c in conf.profile.context if c + most <= limit]
    if not contexts:
        raise InputError(
            f"profile.context={list(conf.profile.context)}: none leaves room for {most} nodes in a "
            f"context of {limit}; add a smaller one"
        )
    rounds, overhead = warm_up(pair, config, conf)
    mid = mid_grid(pair, config, conf.profile, contexts)
    verify = verify_grid(pair, config, conf.profile, contexts)
    calls = [(c, r.context_tokens) for r in rounds for c in r.calls]
    needed = sum(mid.at(n, t) for c, t in calls for n in (c.refresh_nodes, c.expand_nodes) if n)
    everything = sum(mid.at(c.all_nodes, t) for c, t in calls if c.all_nodes)
    evaluation = "needed" if needed <= everything else "all"
    overhead_ms = float(np.median(overhead))
    return LatencyProfile(
        mid=mid,
        verify=verify,
        plain_ms=float(np.median([row[0] for row in zip(*verify.ms, strict=True)])),
        small_ms=per_step(rounds, "small", lambda r: r.schedule.count(0)),
        mid_overhead_ms=overhead_ms,
        signals_ms=per_step(rounds, "signals", lambda r: len(r.schedule)),
        scheduler_ms=scheduler_ms(config.depth),
        prune_ms=per_step(rounds, "prune", lambda r: 1),
        accept_ms=per_step(rounds, "accept", lambda r: 1),
        target_ms=float(np.mean([verify.at(r.kept_nodes + 1, r.context_tokens) for r in rounds])),
        mid_ms=overhead_ms + min(needed, everything) / len(calls),
        evaluation=evaluation,
        meta={
            "machine": machine(),
            "pair": pair.name,
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "needed_ms_per_call": needed / len(calls),
            "all_ms_per_call": everything / len(calls),
        },
    )


def run(conf: DictConfig) -> None:
    """Measure the latency profile of the configured pair on this machine."""
    config = drafting_config(conf)
    path = profile_path(conf)
    load_prompts(conf, "collect", 0)
    with stage_run(conf, "profile", path.parent) as stage:
        pair = open_pair(conf)
        profile = build_profile(pair, config, conf)
        profile.save(path)
        stage.wrote(path)
        show(stage, profile)


def show(stage: Stage, profile: LatencyProfile) -> None:
    """Print the grids and the single figures."""
    for name, grid in (("mid pass", profile.mid), ("verification", profile.verify)):
        rows = [
            {
                f"{name}, tokens": n,
                **{
                    f"context {c}": f"{ms:.1f} ± {spread / 2:.1f} ms"
                    for c, ms, spread in zip(grid.context, row, spreads, strict=True)
                },
            }
            for n, row, spreads in zip(grid.tokens, grid.ms, grid.spread_ms, strict=True)
        ]
        stage.show(f"{name}: median ± half the interquartile range", rows)
    for name in (
        "target_ms",
        "mid_ms",
        "plain_ms",
        "small_ms",
        "mid_overhead_ms",
        "signals_ms",
        "scheduler_ms",
        "prune_ms",
        "accept_ms",
        "evaluation",
    ):
        stage.metrics[name] = getattr(profile, name)
    stage.metrics["target_mid_ratio"] = profile.target_ms / profile.mid_ms
    stage.metrics["dtype"] = profile.meta["dtype"]
