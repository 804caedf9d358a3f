"""Rows and replay tables made from arrays equal those made one outcome at a time."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pipeline.hardware import outcomes
from pipeline.manifest import part_name
from pipeline.profile import random_artifact
from pipeline.replay import follow, scheduler_decisions, tries_of
from pipeline.rows import bits_text, state_id, state_rows, write_rows
from pipeline.schema import COLUMNS, SCHEMA
from pipeline.texts import Text, reach
from pipeline.tries import ARRAYS, NEVER, join, read_tries
from tests.test_enumeration import Case, Head, repetitive_case
from tests.test_inputs import GRID, profile
from treegraft_core import SIGNALS, DistilledScheduler, LatencyProfile, StepState
from treegraft_core.drafting import DraftingConfig, MidCall
from treegraft_core.enumeration import Enumeration
from treegraft_core.signals import context_features
from treegraft_core.tree import UNLIMITED

PROMPT, ANSWER = 6, 10


@pytest.fixture(scope="module")
def case() -> Case:
    """Return every state of an answer."""
    return replace(repetitive_case(), roots=list(range(PROMPT, PROMPT + ANSWER - 1)), cached=20)


@pytest.fixture(scope="module")
def found(case: Case) -> Enumeration:
    """Return their outcomes; some accept nothing, some a lot."""
    found = case.enumerate(case.model())
    assert found.accepted.min() == 0 and found.accepted.max() > 3
    return found


@pytest.fixture
def text(case: Case) -> Text:
    return Text("ma/th", "p 1", 1, case.tokens, PROMPT, ANSWER, case.log_p)


@pytest.fixture
def clock() -> LatencyProfile:
    return profile(verify=GRID)


def plain_rows(
    text: Text, roots: list[int], found: Enumeration, clock: LatencyProfile
) -> list[dict[str, Any]]:
    """Return the rows, one at a time."""
    rows = []
    for state, root in enumerate(roots):
        context = root + 1
        for o in found.outcomes(state):
            for k, (action, call) in enumerate(zip(o.bits, o.calls, strict=True)):
                row = {
                    "prompt_id": text.prompt_id,
                    "turn": text.turn,
                    "position": context - text.prompt_tokens,
                    "state_id": state_id(text, context - text.prompt_tokens),
                    "schedule": bits_text(o.bits),
                    "prompt_tokens": text.prompt_tokens,
                    "context_tokens": context,
                    "target_ms": clock.target_ms,
                    "mid_ms": clock.mid_ms,
                    "accepted": o.accepted,
                    "committed": o.accepted + 1,
                    "t_draft_ms": clock.draft_ms(o.calls, context),
                    "t_verify_ms": clock.verify_ms(o.kept_nodes, context),
                    "accepted_ranks": o.ranks,
                    "tree_nodes": o.tree_nodes,
                    "kept_nodes": o.kept_nodes,
                    "step": k + 1,
                    "prefix": bits_text(o.bits[:k]),
                    "action": action,
                    "future": bits_text(o.bits[k + 1 :]),
                    "step_ms": clock.step_ms(call, context),
                    **dict(zip(SIGNALS, o.signals[k].tolist(), strict=True)),
                    **asdict(call or MidCall()),
                }
                rows.append(row)
    return rows


def test_rows_equal_those_made_one_at_a_time(
    case: Case, found: Enumeration, text: Text, clock: LatencyProfile
) -> None:
    """Every column of every row, in the order of states, schedules and steps."""
    table = state_rows(text, case.roots, found, clock)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    rows, expected = table.to_pylist(), plain_rows(text, case.roots, found, clock)
    assert len(rows) == len(expected) == len(case.roots) * 16 * 4
    times = ("t_draft_ms", "t_verify_ms", "step_ms")
    for name in COLUMNS:
        ours, theirs = [r[name] for r in rows], [r[name] for r in expected]
        assert ours == (pytest.approx(theirs, rel=1e-12) if name in times else theirs), name


def test_walking_many_states_equals_deciding_step_by_step(
    found: Enumeration, text: Text, clock: LatencyProfile
) -> None:
    """The scheduler's decisions at each state, as in the runtime, lead to the same schedule."""
    depth, taken = 4, set()
    seen = [
        [
            *context_features(PROMPT, clock.target_ms, clock.mid_ms, k + 1, o.bits[:k], depth),
            *o.signals[k][:6],
        ]
        for state in range(len(found))
        for o in found.outcomes(state)
        for k in range(depth)
    ]
    mean, std = np.mean(seen, axis=0), np.std(seen, axis=0)
    for seed in range(6):
        artifact = replace(
            random_artifact(depth, seed), x_mean=mean, x_std=np.where(std > 1e-9, std, 1.0)
        )
        scheduler = DistilledScheduler(artifact)
        tries = tries_of("tiny", text, found, clock)
        walked = follow(scheduler_decisions(artifact, tries, outcomes(tries)), depth)
        for state in range(len(found)):
            by_bits = {o.bits: o for o in found.outcomes(state)}
            bits: tuple[int, ...] = ()
            while len(bits) < depth:
                signals = next(o for b, o in by_bits.items() if b[: len(bits)] == bits).signals
                now = StepState(
                    len(bits) + 1,
                    bits,
                    depth,
                    text.prompt_tokens,
                    clock.target_ms,
                    clock.mid_ms,
                    signals[len(bits)],
                )
                bits = (*bits, int(scheduler.decide(now)))
            assert walked[state] == int(bits_text(bits), 2)
            taken.add(bits)
    assert len(taken) > 3


@pytest.mark.parametrize("budget", [1, 2, 5, 11, 40])
def test_a_smaller_budget_from_the_same_table(
    case: Case, found: Enumeration, text: Text, clock: LatencyProfile, budget: int
) -> None:
    """A, kept nodes and time under a smaller B_ver, as if enumerated with it."""
    tries = tries_of("tiny", text, found, clock)
    ours = outcomes(tries, clock, budget)
    smaller = replace(case, config=replace(case.config, verify_nodes=budget))
    other = smaller.enumerate(smaller.model())
    assert ours.accepted.tolist() == other.accepted.tolist()
    assert tries.within(budget)[1].tolist() == other.kept_nodes.tolist()
    for state, root in enumerate(case.roots):
        for n, o in enumerate(other.outcomes(state)):
            draft, verify = (
                clock.draft_ms(o.calls, root + 1),
                clock.verify_ms(o.kept_nodes, root + 1),
            )
            assert ours.ms[state, n] == pytest.approx(draft + verify, rel=1e-12)
    if budget == 40:
        assert ours.accepted.tolist() == tries.accepted.tolist() == found.accepted.tolist()
        np.testing.assert_allclose(ours.ms, outcomes(tries).ms, rtol=1e-12)
    else:
        assert (other.kept_nodes < tries.kept).any()


def test_tries_are_those_read_from_disk(
    case: Case, found: Enumeration, text: Text, clock: LatencyProfile, tmp_path: Path
) -> None:
    """Made of an enumeration, or of the rows that it was written as."""
    path = tmp_path / part_name(text.task, text.prompt_id)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        write_rows(file, state_rows(text, case.roots, found, clock), case.config)
    read = read_tries(tmp_path, "tiny", "file", case.config.depth)
    made = join([tries_of("tiny", text, found, clock)])
    pd.testing.assert_frame_equal(made.states[read.states.columns], read.states)
    for name in ARRAYS:
        ours, theirs = getattr(made, name), getattr(read, name)
        assert ours.dtype == theirs.dtype, name
        if name == "ranks":
            most = min(ours.shape[2], theirs.shape[2])
            assert (ours[..., most:] == NEVER).all() and (theirs[..., most:] == NEVER).all()
            ours, theirs = ours[..., :most], theirs[..., :most]
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("pool", ["tree", "frontier"])
@pytest.mark.parametrize("depth", range(1, 6))
@pytest.mark.parametrize("max_ngram", [1, 3, 5])
def test_texts_reach_beyond_every_draft(pool: str, depth: int, max_ngram: int) -> None:
    """Where all drafts are right, the deepest is known to the text to its end, bonus included."""
    head = Head("full", 2, [0, 1], [0, 12], 0)
    head.order = lambda text: [0, 1]  # type: ignore[method-assign]  # token 0 after every text
    config = DraftingConfig(depth, 16, 63, max_ngram, pool=pool)
    tokens = [0] * 60
    case = Case(tokens, [head.values[0]] * 60, [12], config, head, UNLIMITED, 13)
    deepest = int(case.enumerate(case.model()).accepted.max())
    assert deepest >= max(depth, max_ngram)
    assert deepest + 1 <= reach(config)
    if pool == "tree" and depth >= 2 and max_ngram >= 2:
        assert deepest > max(depth, max_ngram)  # a mid step went on from a chain's end
