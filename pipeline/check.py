"""stage=check: that the log is what the runtime does, and that every scheduler is lossless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from pipeline.engine import drafting_config, open_pair, open_profile, runtime_config
from pipeline.evaluate import PAPER_FIXED, open_scheduler
from pipeline.report import Stage, stage_run
from pipeline.rows import enumerate_text, pack_memory
from pipeline.tasks import TaskPrompt, load_prompts
from pipeline.texts import Text, greedy_texts
from treegraft_core import (
    AS_DEFINED,
    SIGNALS,
    Context,
    DistilledScheduler,
    DraftingConfig,
    FixedSchedule,
    InputError,
    LatencyProfile,
    Pair,
    RandomSchedule,
    RuntimeConfig,
    Scheduler,
    TreeGraftDecoder,
)
from treegraft_core.enumeration import DEFAULT_MEMORY, Outcome
from treegraft_core.models import CachedModel
from treegraft_core.prompts import chat_ids

SCORES = [SIGNALS.index("pre_reselect_score"), SIGNALS.index("score_before")]
SCORE_TOLERANCE = 1e-3
"""Nats: passes of other shapes round otherwise, and a mean of log s sums up to ten of them."""


@dataclass
class Agreement:
    """How many rounds of the runtime agree with their logged rows, by what is compared."""

    rounds: int = 0
    states: int = 0
    accepted: int = 0
    target_pass: int = 0
    kept_tree: int = 0
    counts: int = 0
    signals: int = 0
    worst_score: float = 0.0
    examples: list[str] = field(default_factory=list)


def check_states(
    pair: Pair,
    texts: Sequence[Text],
    config: DraftingConfig,
    states: int,
    seed: int,
    memory: int = DEFAULT_MEMORY,
    pack: int = 0,
) -> Agreement:
    """Run each of the 2^D schedules alone through the decoder at sampled states and compare.

    A state's caches are cut back between schedules, so each round starts from the same context.
    """
    rng = np.random.default_rng(seed)
    usable = [t for t in texts if len(t.roots())]
    if not usable:
        raise InputError("check.max_new_tokens: no answer of two tokens or more; raise it")
    model = pair.open_mid()
    found = Agreement()
    per_text = -(-states // len(usable))
    with tqdm(total=states, desc="states", unit="state") as bar:
        for text in usable:
            roots = np.array(text.roots())
            n = min(per_text, len(roots), states - found.states)
            chosen = np.sort(rng.choice(roots, size=n, replace=False)).tolist()
            if not chosen:
                continue
            log = enumerate_text(pair, model, text, chosen, config, memory, pack, keep_trees=True)
            for number, root in enumerate(chosen):
                check_state(pair, text, root, log.outcomes(number), config, found)
                bar.update()
    return found


def check_state(
    pair: Pair,
    text: Text,
    root: int,
    outcomes: Sequence[Outcome],
    config: DraftingConfig,
    found: Agreement,
) -> None:
    """Compare one state's outcomes with 2^D rounds of the decoder."""
    decoder = TreeGraftDecoder(
        pair,
        FixedSchedule([0] * config.depth),
        config,
        keep_trees=True,
        log_signals=True,
        runtime=AS_DEFINED,
    )
    tokens = text.tokens[: root + 1]
    start = decoder.resume(tokens)
    found.states += 1
    for o in outcomes:
        decoder.scheduler = FixedSchedule(o.bits)
        decoder.rewind(len(tokens) - 1)
        context = Context(start.tokens[: root + 1], start.log_p[: root + 1], config.max_ngram)
        done, committed = decoder.round(context, text.prompt_tokens)
        found.rounds += 1
        known = text.tokens[root + 1 :]
        n = min(len(known), len(committed))
        same_target = done.accepted == o.accepted and committed[:n] == known[:n]
        found.target_pass += same_target
        found.accepted += done.accepted == o.accepted and done.ranks == o.ranks
        found.kept_tree += done.kept == o.kept and done.tree_nodes == o.tree_nodes
        found.counts += done.calls == [c for c in o.calls if c is not None]
        ours, theirs = np.array(done.signals), np.array(o.signals)
        difference = np.abs(ours - theirs)
        found.worst_score = max(found.worst_score, float(difference[:, SCORES].max()))
        exact = np.delete(difference, SCORES, axis=1)
        found.signals += bool((exact == 0).all() and difference.max() < SCORE_TOLERANCE)
        if done.kept != o.kept and len(found.examples) < 5:
            found.examples.append(f"{text.task}/{text.prompt_id} root {root} bits {o.bits}")


def show_agreement(stage: Stage, found: Agreement) -> None:
    """Print how many rounds agree in each respect."""
    stage.show(
        f"{found.rounds} rounds at {found.states} states: logged against run alone",
        [
            {"compared": name, "equal": f"{n} of {found.rounds}"}
            for name, n in (
                ("A and pruning ranks", found.accepted),
                ("A from the known continuation = A from the target's pass", found.target_pass),
                ("kept tree, in order", found.kept_tree),
                ("counts of every mid call", found.counts),
                ("signals (scores within 1e-3, the rest exactly)", found.signals),
            )
        ],
    )
    stage.metrics |= {
        "states": found.states,
        "rounds": found.rounds,
        "equal_accepted": found.accepted,
        "equal_target_pass": found.target_pass,
        "equal_kept_tree": found.kept_tree,
        "equal_counts": found.counts,
        "equal_signals": found.signals,
        "worst_score_difference": found.worst_score,
        "unequal_examples": found.examples,
    }


def tie_gap(pair: Pair, tokens: Sequence[int], ours: int, theirs: int) -> tuple[float, float]:
    """Return the gap between two tokens' logits after ``tokens``, and what rounding may make it.

    The bound is four units in the last place of the larger logit in the model's dtype: two
    roundings a pass, in two passes.
    """
    logits = CachedModel(pair.target).run(tokens, np.arange(len(tokens)))[-1]
    gap = abs(float(logits[ours]) - float(logits[theirs]))
    largest = max(abs(float(logits[ours])), abs(float(logits[theirs])), 1.0)
    unit = torch.finfo(pair.target.dtype).eps * 2.0 ** np.floor(np.log2(largest))
    scale = 4.0 if pair.target.dtype in (torch.bfloat16, torch.float16) else 64.0
    return gap, scale * float(unit)


def check_lossless(
    pair: Pair,
    prompts: Sequence[TaskPrompt],
    schedulers: dict[str, Scheduler],
    config: DraftingConfig,
    profile: LatencyProfile | None,
    max_new_tokens: int,
    runtime: RuntimeConfig,
) -> list[dict[str, Any]]:
    """Compare outputs with ``model.generate(do_sample=False)``, token by token.

    Every scheduler decodes as defined, the last one under ``runtime`` too.
    """
    decoders = {
        name: TreeGraftDecoder(pair, scheduler, config, profile, runtime=AS_DEFINED)
        for name, scheduler in schedulers.items()
    }
    last = list(schedulers)[-1]
    decoders[f"{last}, guarded"] = TreeGraftDecoder(
        pair, schedulers[last], config, profile, runtime=runtime
    )
    rows: dict[str, dict[str, Any]] = {
        name: {
            "system": name,
            "prompts": 0,
            "identical": 0,
            "ties": 0,
            "other": 0,
            "worst gap": 0.0,
        }
        for name in decoders
    }
    for p in tqdm(prompts, desc="lossless", unit="prompt"):
        ids = chat_ids(pair.tokenizer, [{"role": "user", "content": p.prompt.turns[0]}])
        if len(ids) >= pair.max_context:
            continue  # `greedy_texts` has named it
        with torch.inference_mode():
            out = pair.target.generate(
                torch.tensor([ids], device=pair.device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=pair.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
        expected = out[0, len(ids) :].tolist()
        for name, decoder in decoders.items():
            tokens = decoder.generate(ids, max_new_tokens).tokens
            row = rows[name]
            row["prompts"] += 1
            if tokens == expected:
                row["identical"] += 1
                continue
            at = next(
                (i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None
            )
            if at is None:
                row["other"] += 1
                continue
            gap, bound = tie_gap(pair, ids + expected[:at], tokens[at], expected[at])
            row["ties" if gap <= bound else "other"] += 1
            row["worst gap"] = max(row["worst gap"], gap)
    return list(rows.values())


def schedulers_to_check(conf: DictConfig, config: DraftingConfig) -> dict[str, Scheduler]:
    """Return All Small, All Mid, the paper's fixed bits, random, and the distilled scheduler."""
    depth = config.depth
    chosen: dict[str, Scheduler] = {
        "All Small": FixedSchedule([0] * depth),
        "All Mid": FixedSchedule([1] * depth),
        "random": RandomSchedule(int(conf.seed)),
    }
    if depth == len(PAPER_FIXED):
        chosen["fixed 10101"] = FixedSchedule(PAPER_FIXED)
    if (Path(conf.paths.scheduler) / "scheduler.json").is_file():
        artifact, allow = open_scheduler(conf, config), list(conf.evaluate.allow)
        chosen["scheduler"] = DistilledScheduler(artifact, allow=allow)
    return chosen


def run(conf: DictConfig) -> None:
    """Compare logged outcomes with the decoder's, and every system's output with the target's."""
    config = drafting_config(conf)
    schedulers = schedulers_to_check(conf, config)
    profile = open_profile(conf) if "scheduler" in schedulers else None
    prompts = load_prompts(conf, "evaluate", conf.check.prompts_per_task)
    with stage_run(conf, "check", conf.paths.check) as stage:
        pair = open_pair(conf)
        if conf.check.states:
            texts, _ = greedy_texts(
                pair, prompts, int(conf.check.max_new_tokens), int(conf.collect.batch), config
            )
            found = check_states(
                pair,
                texts,
                config,
                int(conf.check.states),
                int(conf.seed),
                pack_memory(conf),
                int(conf.collect.pack),
            )
            show_agreement(stage, found)
        if conf.check.lossless_tokens:
            rows = check_lossless(
                pair,
                prompts,
                schedulers,
                config,
                profile,
                int(conf.check.lossless_tokens),
                runtime_config(conf),
            )
            stage.show(
                f"output against generate(do_sample=False), {conf.check.lossless_tokens} tokens, "
                f"{pair.target.dtype}".replace("torch.", ""),
                rows,
            )
            stage.metrics["lossless"] = rows
