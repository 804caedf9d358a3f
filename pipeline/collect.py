"""stage=collect: all 2^D schedules at sampled decoding states, logged to Parquet."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig
from tqdm import tqdm

from pipeline.engine import drafting_config, drafting_rules, open_pair, open_profile
from pipeline.report import Stage, stage_run
from pipeline.schema import COLUMNS, RULES_KEY, SCHEMA
from pipeline.tasks import load_prompts, prompt_source
from pipeline.texts import Text, greedy_texts, left_out
from treegraft_core import (
    AS_DEFINED,
    SIGNALS,
    DraftingConfig,
    FixedSchedule,
    InputError,
    LatencyProfile,
    Pair,
    TreeGraftDecoder,
)
from treegraft_core.drafting import MidCall
from treegraft_core.enumeration import DEFAULT_MEMORY, Enumeration, enumerate_states
from treegraft_core.files import atomic_path
from treegraft_core.models import CachedModel

COUNT_NAMES = tuple(field.name for field in fields(MidCall))
LONGEST_NAME = 120
SPLITS = ("collect", "evaluate")


def bits_text(bits: Iterable[int]) -> str:
    """Return bits as text, such as ``10101``."""
    return "".join(map(str, bits))


def state_id(text: Text, position: int) -> str:
    """Return ``task/prompt_id/turn/position``, with slashes inside a name escaped."""
    return f"{quote(text.task, safe='')}/{quote(text.prompt_id, safe='')}/{text.turn}/{position}"


def state_rows(
    text: Text, roots: Sequence[int], found: Enumeration, profile: LatencyProfile
) -> pa.Table:
    """Return the D · 2^D rows of each state; columns as in ``data/README.md``.

    Rows are ordered by state, schedule and step.
    """
    states, schedules, depth = found.counts.shape[:3]
    context = np.asarray(roots) + 1
    position = context - text.prompt_tokens
    step_ms, draft_ms, verify_ms = profile.times(found, context)
    taken = [bits_text(row) for row in found.bits.tolist()]

    def each_state(values: Any) -> Any:
        return np.repeat(np.asarray(values), schedules * depth)

    def each_schedule(values: Any) -> Any:
        return np.repeat(np.asarray(values).reshape(-1), depth)

    def each_step(values: Any) -> Any:
        return np.tile(np.asarray(values).reshape(-1), states)

    reach = found.ranks.shape[2]
    ranks = np.repeat(found.ranks.reshape(-1, reach), depth, axis=0)
    offsets = np.concatenate([[0], np.cumsum((ranks >= 0).sum(1))])
    columns = {
        "prompt_id": pa.array([text.prompt_id] * (states * schedules * depth)),
        "turn": np.full(states * schedules * depth, text.turn),
        "position": each_state(position),
        "state_id": each_state([state_id(text, int(at)) for at in position]),
        "schedule": each_schedule(taken * states),
        "prompt_tokens": np.full(states * schedules * depth, text.prompt_tokens),
        "context_tokens": each_state(context),
        "target_ms": np.full(states * schedules * depth, profile.target_ms),
        "mid_ms": np.full(states * schedules * depth, profile.mid_ms),
        "accepted": each_schedule(found.accepted),
        "committed": each_schedule(found.accepted + 1),
        "t_draft_ms": each_schedule(draft_ms),
        "t_verify_ms": each_schedule(verify_ms),
        "accepted_ranks": pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()), pa.array(ranks[ranks >= 0], pa.int16())
        ),
        "tree_nodes": each_schedule(found.tree_nodes),
        "kept_nodes": each_schedule(found.kept_nodes),
        "step": np.tile(np.arange(1, depth + 1), states * schedules),
        "prefix": each_step([t[:k] for t in taken for k in range(depth)]),
        "action": each_step(found.bits),
        "future": each_step([t[k + 1 :] for t in taken for k in range(depth)]),
        "step_ms": step_ms.reshape(-1),
        **{name: found.signals[..., i].reshape(-1) for i, name in enumerate(SIGNALS)},
        **{name: found.counts[..., i].reshape(-1) for i, name in enumerate(COUNT_NAMES)},
    }
    return pa.table(
        {name: pa.array(columns[name]).cast(kind) for name, kind in COLUMNS.items()}, schema=SCHEMA
    )


def sample_roots(text: Text, count: int, rng: np.random.Generator) -> list[int]:
    """Return ``count`` root positions spread over the answer; all of them if ``count`` is 0."""
    roots = np.array(text.roots())
    if count and len(roots) > count:
        roots = np.sort(rng.choice(roots, size=count, replace=False))
    return roots.tolist()


def enumerate_text(
    pair: Pair,
    model: CachedModel,
    text: Text,
    roots: Sequence[int],
    config: DraftingConfig,
    memory: int = DEFAULT_MEMORY,
    pack: int = 0,
    keep_trees: bool = False,
) -> Enumeration:
    """Enumerate the states of one text, packed over one shared cache.

    ``memory`` is the budget of a pack, bytes; ``pack`` the most states in one (0: no limit).
    """
    model.reset()
    last = max(roots) + 1
    model.run(text.tokens[:last], np.arange(last), rows=np.zeros(0, np.int64))
    return enumerate_states(
        model,
        text.context(config.max_ngram),
        roots,
        config,
        pair.vocabulary,
        pair.target_vocab,
        keep_trees,
        pair.max_context,
        memory,
        pack,
    )


def write_rows(path: Path, rows: pa.Table, config: DraftingConfig) -> None:
    """Write rows as one Parquet file, atomically; the drafting rules go into its metadata."""
    rules = json.dumps(drafting_rules(config)).encode()
    table = rows.replace_schema_metadata({**(rows.schema.metadata or {}), RULES_KEY: rules})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def part_path(folder: Path, text: Text) -> Path:
    """Return the Parquet file of one turn below a pair's folder."""
    prompt = quote(text.prompt_id, safe="")
    if len(prompt) > LONGEST_NAME:
        prompt = hashlib.sha256(prompt.encode()).hexdigest()[:32]
    name = f"part-{prompt}-{text.turn}.parquet"
    return folder / f"task={quote(text.task, safe='')}" / name


def pack_memory(conf: DictConfig) -> int:
    """Return the budget of a pack, bytes."""
    return int(float(conf.collect.memory_gb) * 2**30)


def collect_texts(
    conf: DictConfig,
    stage: Stage,
    pair: Pair,
    texts: Sequence[Text],
    folder: Path,
    states_per_turn: int,
    profile: LatencyProfile,
) -> dict[str, dict[str, float]]:
    """Enumerate and write every text; return counts and means by task."""
    config, memory = drafting_config(conf), pack_memory(conf)
    rng = np.random.default_rng(conf.seed)
    model = CachedModel(pair.mid)
    summary: dict[str, dict[str, float]] = {}
    with tqdm(texts, desc="enumerate", unit="turn") as bar:
        for number, text in enumerate(bar):
            roots = sample_roots(text, states_per_turn, rng)
            if not roots:
                continue
            found = enumerate_text(pair, model, text, roots, config, memory, int(conf.collect.pack))
            rows = state_rows(text, roots, found, profile)
            write_rows(part_path(folder, text), rows, config)
            s = summary.setdefault(
                text.task,
                {
                    "turns": 0,
                    "states": 0,
                    "rows": 0,
                    "paths": 0,
                    "A small": 0,
                    "A mid": 0,
                    "A best": 0,
                },
            )
            s["turns"] += 1
            s["states"] += len(roots)
            s["rows"] += rows.num_rows
            s["paths"] += found.paths
            s["A small"] += int(found.accepted[:, 0].sum())
            s["A mid"] += int(found.accepted[:, -1].sum())
            s["A best"] += int(found.accepted.max(1).sum())
            states = sum(v["states"] for v in summary.values())
            bar.set_postfix(states=states)
            stage.log({"collect/states": states, "collect/turns": number + 1})
    return summary


def show_summary(stage: Stage, summary: dict[str, dict[str, float]]) -> None:
    """Print counts and means by task."""
    stage.show(
        "collected, by task (A: mean accepted tokens; best: over the 32 schedules)",
        [
            {
                "task": task,
                "turns": int(s["turns"]),
                "states": int(s["states"]),
                "rows": int(s["rows"]),
                "paths a state": s["paths"] / s["states"],
                "A All Small": s["A small"] / s["states"],
                "A All Mid": s["A mid"] / s["states"],
                "A best": s["A best"] / s["states"],
            }
            for task, s in summary.items()
        ],
    )


def replay_rounds(
    pair: Pair,
    texts: Sequence[Text],
    config: DraftingConfig,
    profile: LatencyProfile,
    rounds: int,
    seed: int,
) -> dict[str, float]:
    """Run random schedules at random states for real; compare time and A with the log's.

    Returns
    -------
    dict
        Rounds, the ratio of predicted to measured time (ratio of sums, and its quartiles over
        rounds), and the share of rounds with the same A.
    """
    rng = np.random.default_rng(seed)
    usable = [t for t in texts if len(t.roots())]
    model = CachedModel(pair.mid)
    predicted, measured, same = [], [], 0
    for _ in tqdm(range(rounds), desc="replay", unit="round"):
        text = usable[int(rng.integers(len(usable)))]
        root = int(rng.choice(np.array(text.roots())))
        outcomes = enumerate_text(pair, model, text, [root], config).outcomes(0)
        o = outcomes[int(rng.integers(len(outcomes)))]
        decoder = TreeGraftDecoder(pair, FixedSchedule(o.bits), config, profile, runtime=AS_DEFINED)
        context = decoder.resume(text.tokens[: root + 1])
        done, _ = decoder.round(context, text.prompt_tokens)
        predicted.append(
            profile.draft_ms(o.calls, root + 1) + profile.verify_ms(o.kept_nodes, root + 1)
        )
        measured.append(done.draft_ms + done.verify_ms)
        same += done.accepted == o.accepted
    ratio = np.array(predicted) / np.array(measured)
    return {
        "replayed_rounds": rounds,
        "predicted_over_measured": float(np.sum(predicted) / np.sum(measured)),
        "ratio_q25": float(np.percentile(ratio, 25)),
        "ratio_q75": float(np.percentile(ratio, 75)),
        "same_accepted_share": same / rounds,
    }


def check_split(conf: DictConfig) -> str:
    """Return ``collect.split``, checked."""
    split = str(conf.collect.split)
    if split not in SPLITS:
        raise InputError(f"collect.split={split}: choose one of {', '.join(SPLITS)}")
    return split


def run(conf: DictConfig) -> None:
    """Collect trajectories of the configured pair on the configured prompts.

    With ``collect.split=evaluate`` on the prompts to judge on: they go into a folder of their own,
    which nothing that fits reads.
    """
    config, split = drafting_config(conf), check_split(conf)
    profile = open_profile(conf)
    prompts = load_prompts(conf, split, conf.collect.prompts_per_task)
    home = Path(conf.paths.trajectories) / split / f"pair={conf.pair.name}"
    meta = Path(conf.paths.data) / "trajectories" / "meta"
    of_split = meta if split == "collect" else meta / split
    with stage_run(conf, "collect", of_split / str(conf.pair.name)) as stage:
        stage.read(prompt_source(conf, split), f"{len(prompts)} prompts")
        stage.read(Path(conf.paths.profile) / "profile.json")
        pair = open_pair(conf)
        texts, cut = greedy_texts(
            pair,
            prompts,
            int(conf.collect.max_new_tokens),
            int(conf.collect.batch),
            config,
            Path(conf.paths.cache) / "texts",
        )
        scratch = Path(conf.paths.cache) / f"collect-{uuid.uuid4().hex[:8]}"
        try:
            summary = collect_texts(
                conf, stage, pair, texts, scratch, int(conf.collect.states_per_turn), profile
            )
            if not summary:
                raise InputError(
                    f"collect.max_new_tokens={conf.collect.max_new_tokens}: no answer of two "
                    "tokens or more; raise it or give other prompts"
                )
            for part in sorted(scratch.iterdir()):
                with atomic_path(home / part.name) as temporary:
                    shutil.move(part, temporary)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        show_summary(stage, summary)
        stage.metrics |= {
            "states": int(sum(s["states"] for s in summary.values())),
            "rows": int(sum(s["rows"] for s in summary.values())),
            "prompts_left_out": len(left_out(prompts, texts)),
            "texts_cut_at_a_tie": cut,
            "columns": len(COLUMNS),
            "drafting": drafting_rules(config),
        }
        if conf.collect.replay_rounds:
            stage.metrics |= replay_rounds(
                pair, texts, config, profile, int(conf.collect.replay_rounds), int(conf.seed)
            )
        stage.wrote(home, f"{stage.metrics['rows']:,} rows")
