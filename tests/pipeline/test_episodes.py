"""What rounds are worth within their text, against loops over rounds; and what it is good for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.episodes import EXPLORED, FIRST_OFFSETS, slots, time_to_go, visits, worth
from pipeline.hardware import Outcomes, outcomes
from pipeline.replay import Texts, gain_oracle, replay, texts_of
from pipeline.tries import Tries
from tests.pipeline.test_replay import parts, random_tries
from tests.reference import offline as slow
from treegraft_core.tree import FloatArray, IntArray

cases = st.tuples(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
)


def made(case: Any, sampled: bool = False) -> tuple[Tries, Texts, Outcomes, IntArray]:
    """Return random tries, their texts and outcomes (deciding takes time), and schedules."""
    seed, depth, lengths = case
    rng = np.random.default_rng(seed)
    tries = random_tries(rng, depth, lengths, sampled)
    found = replace(outcomes(tries), decision_ms=rng.uniform(0, 2, len(tries)))
    return tries, texts_of(tries), found, rng.integers(0, 1 << depth, len(tries))


def taken(texts: Texts, found: Outcomes, leaf: IntArray, depth: int) -> tuple[IntArray, FloatArray]:
    """Return steps and time of the schedules."""
    state = np.arange(len(leaf))
    steps = np.minimum(found.accepted[state, leaf] + 1, texts.left)
    return steps, found.ms[state, leaf] + depth * found.decision_ms


@settings(max_examples=60, deadline=None)
@given(cases)
def test_time_to_go_is_that_of_decoding_from_every_position(case: Any) -> None:
    tries, texts, found, leaf = made(case)
    steps, ms = taken(texts, found, leaf, tries.depth)
    to_end, place = time_to_go(texts, steps, ms), slots(texts)
    assert len(to_end) == len(tries) + len(case[2])
    assert sorted({*range(len(to_end))} - set(place.tolist())) == [
        end + text for text, end in enumerate(np.cumsum(case[2]).tolist())
    ]
    for first, part in parts(leaf, case[2]):
        mine = slice(first, first + len(part))
        for at in range(len(part)):
            expected = slow.time_to_end(steps[mine].tolist(), ms[mine].tolist(), at)
            assert to_end[place[first + at]] == pytest.approx(expected, rel=1e-9)
    assert not np.delete(to_end, place).any()


@settings(max_examples=60, deadline=None)
@given(cases)
def test_visits_are_those_of_decoding_from_the_first_positions(case: Any) -> None:
    tries, texts, found, leaf = made(case)
    steps, _ = taken(texts, found, leaf, tries.depth)
    seen = visits(texts, steps)
    for first, part in parts(leaf, case[2]):
        mine = slice(first, first + len(part))
        expected = slow.visits(steps[mine].tolist(), FIRST_OFFSETS)
        assert seen[mine].tolist() == pytest.approx(expected, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(cases)
def test_worth_is_what_is_saved_on_the_way_to_the_end(case: Any) -> None:
    tries, texts, found, leaf = made(case)
    rng = np.random.default_rng(case[0])
    rate, tokens = rng.uniform(0.01, 0.2, len(tries)), rng.uniform(1, 4, len(tries))
    mine = worth(texts, found, leaf, rate, tokens, tries.depth)
    ms = found.ms + tries.depth * found.decision_ms[:, None]
    steps, _ = taken(texts, found, leaf, tries.depth)
    for first, part in parts(leaf, case[2]):
        at = slice(first, first + len(part))
        expected = slow.gains(found.accepted[at].tolist(), ms[at].tolist(), part, 1.0, 1.0)
        scale = (rate / tokens)[at, None]
        np.testing.assert_allclose(mine.gain[at], scale * np.array(expected), atol=1e-9)
        # The policy's own schedule brings nothing new.
        np.testing.assert_allclose(mine.gain[at][np.arange(len(part)), part], 0, atol=1e-9)
    weight = visits(texts, steps) + EXPLORED
    np.testing.assert_allclose(mine.weight, weight / weight.mean())


def test_worth_of_sampled_states_is_the_gain_at_their_rate() -> None:
    tries, texts, found, leaf = made((3, 2, [5, 6]), sampled=True)
    rate, tokens = np.linspace(0.01, 0.1, 11), np.linspace(1, 3, 11)
    mine = worth(texts, found, leaf, rate, tokens, 2)
    assert not texts.whole
    for at in range(len(tries)):
        for n in range(4):
            spent = found.ms[at, n] + 2 * found.decision_ms[at]
            gain = (found.accepted[at, n] + 1 - rate[at] * spent) / tokens[at]
            assert mine.gain[at, n] == pytest.approx(gain)
    shares = [1 / (found.accepted[at, leaf[at]] + 1) for at in range(len(tries))]
    np.testing.assert_allclose(mine.weight, np.array(shares) / np.mean(shares))


@settings(max_examples=80, deadline=None)
@given(cases)
def test_a_greedy_step_never_takes_longer_and_ends_at_the_oracle(case: Any) -> None:
    """Policy improvement: the schedule of the most worth everywhere, at once, in every text."""
    tries, texts, found, leaf = made(case)
    found = replace(found, decision_ms=np.zeros(len(tries)))
    one = np.ones(len(tries))
    best = replay(texts, found, gain_oracle(texts, found)).ms
    last = replay(texts, found, leaf).ms
    for _ in range(max(case[2])):
        leaf = worth(texts, found, leaf, 0.05 * one, 2 * one, tries.depth).gain.argmax(1)
        now = replay(texts, found, leaf).ms
        assert (now <= last * (1 + 1e-12)).all()
        last = now
    np.testing.assert_allclose(last, best, rtol=1e-12)
