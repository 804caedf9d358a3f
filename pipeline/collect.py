"""stage=collect: all 2^D schedules at sampled decoding states, logged to Parquet."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict
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
from pipeline.tasks import load_prompts
from pipeline.texts import Text, greedy_texts
from treegraft_core import (
    SIGNALS,
    DraftingConfig,
    FixedSchedule,
    InputError,
    LatencyProfile,
    Pair,
    TreeGraftDecoder,
)
from treegraft_core.drafting import MidCall
from treegraft_core.enumeration import DEFAULT_MEMORY, Enumeration, Outcome, enumerate_states
from treegraft_core.files import atomic_path
from treegraft_core.models import CachedModel

NO_CALL = MidCall()
LONGEST_NAME = 120


def bits_text(bits: Iterable[int]) -> str:
    """Return bits as text, such as ``10101``."""
    return "".join(map(str, bits))


def state_id(text: Text, position: int) -> str:
    """Return ``task/prompt_id/turn/position``, with slashes inside a name escaped."""
    return f"{quote(text.task, safe='')}/{quote(text.prompt_id, safe='')}/{text.turn}/{position}"


def state_rows(
    text: Text, root: int, outcomes: Sequence[Outcome], profile: LatencyProfile
) -> list[dict[str, Any]]:
    """Return the D · 2^D rows of one state; columns as in ``data/README.md``."""
    rows = []
    context = root + 1
    position = context - text.prompt_tokens
    for o in outcomes:
        shared = {
            "prompt_id": text.prompt_id,
            "turn": text.turn,
            "position": position,
            "state_id": state_id(text, position),
            "schedule": bits_text(o.bits),
            "prompt_tokens": text.prompt_tokens,
            "context_tokens": context,
            "target_ms": profile.target_ms,
            "mid_ms": profile.mid_ms,
            "accepted": o.accepted,
            "committed": o.accepted + 1,
            "t_draft_ms": profile.draft_ms(o.calls, context),
            "t_verify_ms": profile.verify_ms(o.kept_nodes, context),
            "accepted_ranks": o.ranks,
            "tree_nodes": o.tree_nodes,
            "kept_nodes": o.kept_nodes,
        }
        for k, (action, call, values) in enumerate(
            zip(o.bits, o.calls, o.signals, strict=True), start=1
        ):
            rows.append(
                {
                    **shared,
                    "step": k,
                    "prefix": bits_text(o.bits[: k - 1]),
                    "action": action,
                    "future": bits_text(o.bits[k:]),
                    "step_ms": profile.step_ms(call, context),
                    **dict(zip(SIGNALS, values.tolist(), strict=True)),
                    **asdict(call or NO_CALL),
                }
            )
    return rows


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


def write_rows(path: Path, rows: list[dict[str, Any]], config: DraftingConfig) -> None:
    """Write rows as one Parquet file, atomically; the drafting rules go into its metadata."""
    rules = json.dumps(drafting_rules(config)).encode()
    schema = SCHEMA.with_metadata({**(SCHEMA.metadata or {}), RULES_KEY: rules})
    table = pa.Table.from_pylist(rows, schema=schema)
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def part_path(folder: Path, text: Text) -> Path:
    """Return the Parquet file of one turn below a pair's folder."""
    prompt = quote(text.prompt_id, safe="")
    if len(prompt) > LONGEST_NAME:
        prompt = hashlib.sha256(prompt.encode()).hexdigest()[:32]
    name = f"part-{prompt}-{text.turn}.parquet"
    return folder / f"task={quote(text.task, safe='')}" / name


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
    if conf.collect.pack < 1:
        raise InputError(f"collect.pack={conf.collect.pack}: must be at least 1")
    config = drafting_config(conf)
    rng = np.random.default_rng(conf.seed)
    model = CachedModel(pair.mid)
    summary: dict[str, dict[str, float]] = {}
    with tqdm(texts, desc="enumerate", unit="turn") as bar:
        for number, text in enumerate(bar):
            roots = sample_roots(text, states_per_turn, rng)
            if not roots:
                continue
            outcomes, paths = enumerate_text(pair, model, text, roots, config, conf.collect.pack)
            rows = [
                row
                for root, found in zip(roots, outcomes, strict=True)
                for row in state_rows(text, root, found, profile)
            ]
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
            s["rows"] += len(rows)
            s["paths"] += paths
            s["A small"] += sum(found[0].accepted for found in outcomes)
            s["A mid"] += sum(found[-1].accepted for found in outcomes)
            s["A best"] += sum(max(o.accepted for o in found) for found in outcomes)
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
        outcomes, _ = enumerate_text(pair, model, text, [root], config, 1)
        o = outcomes[0][int(rng.integers(len(outcomes[0])))]
        decoder = TreeGraftDecoder(pair, FixedSchedule(o.bits), config, profile)
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


def run(conf: DictConfig) -> None:
    """Collect trajectories of the configured pair on the configured prompts."""
    config = drafting_config(conf)
    profile = open_profile(conf)
    prompts = load_prompts(conf, "collect", conf.collect.prompts_per_task)
    folder = Path(conf.paths.trajectories) / "collect"
    home = folder / f"pair={conf.pair.name}"
    with stage_run(
        conf, "collect", Path(conf.paths.data) / "trajectories" / "meta" / conf.pair.name
    ) as stage:
        stage.read(
            conf.task.path or conf.task.collect or conf.task.hub.id, f"{len(prompts)} prompts"
        )
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
            "texts_cut_at_a_tie": cut,
            "columns": len(COLUMNS),
            "drafting": drafting_rules(config),
        }
        if conf.collect.replay_rounds:
            stage.metrics |= replay_rounds(
                pair, texts, config, profile, int(conf.collect.replay_rounds), int(conf.seed)
            )
        stage.wrote(home, f"{stage.metrics['rows']:,} rows")
