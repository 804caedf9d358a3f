"""stage=profile: what each part of a round costs on this machine with this pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from pipeline.engine import drafting_config, open_pair, profile_path
from pipeline.inputs import digest
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


def flat_tree(nodes: int, vocab: int) -> DraftTree:
    """Return a tree of ``nodes`` children of the root."""
    tree = DraftTree.from_root(0)
    for token in range(nodes):
        tree.add(0, token % vocab, -1.0)
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
    """Time mid passes: mask, model, distributions, by new nodes (root included) x context.

    Of a sequential drafter one level: the root is evaluated before, the nodes are its children.
    """
    rng = np.random.default_rng(0)
    drafter = MidDrafter(
        pair.open_mid(), config.width, pair.vocabulary, pair.target_vocab, config.small
    )

    def prepare(context: int) -> Callable[[int], Callable[[], object]]:
        text = rng.integers(pair.target_vocab, size=context + 1).tolist()
        drafter.model.reset()
        if drafter.model.target is not None:
            drafter.model.target.reset()
            drafter.model.target.run(text[:-1], np.arange(context), rows=np.zeros(0, np.int64))
        drafter.model.run(text[:-1], np.arange(context), rows=np.zeros(0, np.int64))

        def at(n: int) -> Callable[[], object]:
            level = drafter.model.sequential
            if level:
                tree = flat_tree(n, pair.target_vocab)
            else:
                tree = random_tree(rng, n - 1, pair.target_vocab, config.depth)
            drafter.model.keep(context)
            drafter.begin_round(Context(text, np.zeros(len(text)), config.max_ngram))
            if level:
                drafter.evaluate(tree, np.zeros(1, np.int64))
            return lambda: drafter.evaluate(tree, np.arange(n) + level)

        return at

    return measure_grid(pair, conf.mid_nodes, contexts, conf.repeats, prepare, "mid pass")


def verify_grid(pair: Pair, config: DraftingConfig, conf: DictConfig, contexts: list[int]) -> Grid:
    """Time verification: mask, model, walk, by tokens (kept nodes + root) x context."""
    rng = np.random.default_rng(1)
    target = pair.open_target()

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


def shared_grid(conf: DictConfig, config: DraftingConfig) -> Grid | None:
    """Return the verification grid of ``profile.target_from``, if there is one.

    Pairs with one target that are compared on one machine share what its passes cost.
    """
    if conf.profile.target_from is None:
        return None
    path = str(conf.profile.target_from)
    other = LatencyProfile.load(path)
    here = {name: value for name, value in machine().items() if name != "torch_threads"}
    there = {name: other.meta.get("machine", {}).get(name) for name in here}
    if there != here or other.meta.get("target") != str(conf.pair.target.path):
        raise InputError(
            f"profile.target_from={path}: of another machine or target than this profile; give "
            "one that stage=profile measured here with this target, or null"
        )
    if max(other.verify.tokens) < min(config.verify_nodes + 1, max(conf.profile.verify_nodes)):
        raise InputError(
            f"profile.target_from={path}: ends at {max(other.verify.tokens)} tokens; give one with "
            "the same profile.verify_nodes"
        )
    return other.verify


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
    verify = shared_grid(conf, config) or verify_grid(pair, config, conf.profile, contexts)
    calls = [(c, r.context_tokens) for r in rounds for c in r.calls]
    overhead_ms = float(np.median(overhead))
    profile = LatencyProfile(
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
        mid_ms=overhead_ms,
        evaluation="needed",
        mid_sequential=pair.open_mid().sequential,
    )
    ways = {
        way: float(np.mean([profile.mid_call_ms(c, t, way) for c, t in calls]))
        for way in ("needed", "all")
    }
    evaluation = min(ways, key=ways.__getitem__)
    return replace(
        profile,
        mid_ms=ways[evaluation],
        evaluation=evaluation,
        meta={
            "machine": machine(),
            "pair": pair.name,
            "target": str(conf.pair.target.path),
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "needed_ms_per_call": ways["needed"] - overhead_ms,
            "all_ms_per_call": ways["all"] - overhead_ms,
            "measured_with": measured_with(conf),
        },
    )


def measured_with(conf: DictConfig) -> str:
    """Return a digest of what a profile depends on: machine, pair, engine, drafting, grids."""
    engine = {name: conf.engine[name] for name in ("device", "dtype", "threads", "pack")}
    grids = {
        str(name): value
        for name, value in conf.profile.items()
        if name not in ("keep", "target_from")
    }
    plain = OmegaConf.to_container(
        OmegaConf.create(
            {"pair": conf.pair, "drafting": conf.drafting, "small": conf.small, "grids": grids}
        )
    )
    hardware = {name: value for name, value in machine().items() if name != "torch_threads"}
    return digest([hardware, engine, plain])


def kept(conf: DictConfig) -> bool:
    """Tell whether there is a profile that a new measurement would only repeat."""
    path = profile_path(conf)
    if not conf.profile.keep or not path.is_file():
        return False
    same = LatencyProfile.load(path).meta.get("measured_with") == measured_with(conf)
    if same:
        print(f"{path}: kept, measured on this machine with these settings", flush=True)
    return same


def run(conf: DictConfig) -> None:
    """Measure the latency profile of the configured pair on this machine.

    With ``profile.keep`` only if there is none yet of this machine and these settings.
    """
    config = drafting_config(conf)
    path = profile_path(conf)
    load_prompts(conf, "collect", 0)
    if kept(conf):
        return
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
