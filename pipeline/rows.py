"""The rows of decoding states: all 2^D schedules, enumerated and written as one table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig

from pipeline.engine import drafting_rules
from pipeline.schema import COLUMNS, RULES_KEY, SCHEMA
from pipeline.texts import Text
from treegraft_core import SIGNALS, DraftingConfig, LatencyProfile, Pair
from treegraft_core.drafting import MidCall
from treegraft_core.enumeration import DEFAULT_MEMORY, Enumeration, enumerate_states
from treegraft_core.mid import MidCache

COUNT_NAMES = tuple(field.name for field in fields(MidCall))


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
    model: MidCache,
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
    if model.target is not None:
        model.target.reset()
        nothing = np.zeros(0, np.int64)
        model.target.run(text.tokens[:last], np.arange(last), rows=nothing)
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


def write_rows(file: BinaryIO, rows: pa.Table, config: DraftingConfig) -> None:
    """Write rows as Parquet; the drafting rules go into its metadata, a checksum to each page."""
    rules = json.dumps(drafting_rules(config)).encode()
    table = rows.replace_schema_metadata({**(rows.schema.metadata or {}), RULES_KEY: rules})
    pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def pack_memory(conf: DictConfig) -> int:
    """Return the budget of a pack, bytes."""
    return int(float(conf.collect.memory_gb) * 2**30)
