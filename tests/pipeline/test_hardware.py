"""Hardware as data: times from counts against the profile's own, drawn costs, settings."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.hardware import (
    COSTS,
    RANGES,
    Outcomes,
    Setting,
    assign,
    at_budget,
    draw_costs,
    linear_profile,
    mean_mid_ms,
    outcomes,
    outcomes_in,
    settings,
)
from pipeline.replay import tries_of
from pipeline.tries import COUNTS, Tries, join, prefix_steps, prefixes_of, schedules
from tests.pipeline.test_replay import random_tries
from tests.pipeline.test_rows import case, found, text  # noqa: F401
from tests.test_inputs import GRID, profile
from treegraft_core import InputError, LatencyProfile
from treegraft_core.drafting import MidCall
from treegraft_core.latency import Grid

COST = {
    "target_ms": 80.0,
    "mid_ms": 6.0,
    "small_ms": 0.3,
    "decision_ms": 0.1,
    "tree_ms": 0.2,
    "verify_slope": 0.01,
    "mid_slope": 0.02,
    "context_slope": 0.05,
}
WIDE: dict[str, Any] = {
    "ratio": [1.5, 40.0],
    "target_ms": [5.0, 400.0],
    "verify_slope": [0.0002, 0.05],
    "mid_slope": [0.0002, 0.05],
    "context_slope": [0.01, 0.1],
    "small_ms": [0.02, 1.0],
    "decision_ms": [0.01, 0.35],
    "tree_ms": [0.02, 0.3],
    "profiles": 4,
}


def random_profile(rng: np.random.Generator, evaluation: str) -> LatencyProfile:
    """Return a profile that is not linear and whose parts all differ."""
    grids = []
    for tokens in ((1, 4, 9), (1, 8, 32)):
        ms = tuple(tuple(rng.uniform(1, 40, 2).tolist()) for _ in tokens)
        grids.append(Grid(tokens, (4, 60), ms, ((0.0, 0.0),) * 3))
    once = {
        name: float(rng.uniform(0.01, 2))
        for name in ("small_ms", "mid_overhead_ms", "signals_ms", "prune_ms", "accept_ms")
    }
    sequential = bool(rng.integers(2))
    return replace(
        profile(verify=grids[1]),
        mid=grids[0],
        evaluation=evaluation,
        mid_sequential=sequential,
        **once,
    )


def slow_times(
    tries: Tries, at: int, leaf: int, machine: LatencyProfile, kept: int
) -> tuple[float, float]:
    """Return t_D and t_V of one round from the profile's own functions."""
    context = int(tries.states["context_tokens"].iloc[at])
    calls: list[MidCall | None] = []
    for step, bit in enumerate(schedules(tries.depth)[leaf].tolist()):
        counts = tries.counts[at, prefixes_of(tries.depth)[leaf, step]].tolist()
        call = MidCall(**dict(zip(COUNTS, counts, strict=True)))
        calls.append(call if bit else None)
    return machine.draft_ms(calls, context), machine.verify_ms(kept, context)


machines = st.tuples(
    st.integers(0, 10**6), st.integers(1, 4), st.sampled_from(["needed", "all"]), st.booleans()
)


@hypothesis_settings(max_examples=25, deadline=None)
@given(machines)
def test_outcomes_are_what_the_profile_says_of_the_counts(drawn: Any) -> None:
    seed, depth, evaluation, smaller = drawn
    rng = np.random.default_rng(seed)
    tries = random_tries(rng, depth, [3, 2])
    machine = random_profile(rng, evaluation)
    budget = 7 if smaller else None
    ours = outcomes(tries, machine, budget)
    for at in range(len(tries)):
        for leaf in range(1 << depth):
            kept = min(int(tries.kept[at, leaf]), budget or 999)
            expected = slow_times(tries, at, leaf, machine, kept)
            got = ours.draft_ms[at, leaf], ours.verify_ms[at, leaf]
            assert got == pytest.approx(expected, rel=1e-12)
    assert ours.accepted.tolist() == (tries.within(7)[0] if smaller else tries.accepted).tolist()
    assert set(ours.decision_ms) == {machine.signals_ms + machine.scheduler_ms}
    assert (set(ours.target_ms), set(ours.mid_ms)) == ({machine.target_ms}, {machine.mid_ms})


@pytest.mark.parametrize("budget", [1, 7, 30])
def test_states_under_a_smaller_budget_are_as_if_logged_so(budget: int) -> None:
    rng = np.random.default_rng(budget)
    tries, machine = random_tries(rng, 3, [4, 5]), random_profile(rng, "needed")
    smaller = at_budget(tries, machine, budget)
    ours, theirs = outcomes(smaller), outcomes(tries, machine, budget)
    for field in fields(Outcomes):
        if field.name != "decision_ms":
            np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name))
    assert (smaller.kept <= budget).all()
    for less in (1, 5, 40):
        first, second = (each.within(min(less, budget)) for each in (smaller, tries))
        assert first[0].tolist() == second[0].tolist() and first[1].tolist() == second[1].tolist()
    assert (tries.accepted >= smaller.accepted).all()


@pytest.mark.parametrize("evaluation", ["needed", "all"])
def test_the_profile_as_measured_gives_the_times_as_logged(
    text: Any,  # noqa: F811
    found: Any,  # noqa: F811
    evaluation: str,
) -> None:
    """On texts enumerated for real; and as logged nothing of the profile is read."""
    machine = replace(profile(verify=GRID), evaluation=evaluation)
    tries = tries_of("tiny", text, found, machine)
    again, logged = outcomes(tries, machine), outcomes(tries)
    for field in fields(Outcomes):
        if field.name != "decision_ms":
            ours, theirs = getattr(again, field.name), getattr(logged, field.name)
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, err_msg=field.name)
    assert not logged.decision_ms.any()
    slower = replace(machine, prune_ms=machine.prune_ms + 1.0)
    np.testing.assert_allclose(outcomes(tries, slower).draft_ms, logged.draft_ms + 1.0)
    with pytest.raises(ValueError, match="verify_nodes"):
        outcomes(tries, None, 5)


def test_eta_and_tokens_are_ratios_of_their_parts() -> None:
    tries = random_tries(np.random.default_rng(0), 2, [4])
    logged = outcomes(tries)
    assert (logged.tokens("committed") - logged.tokens("accepted") == 1).all()
    expected = 1000 * tries.accepted[2, 1] / (tries.draft_ms[2, 1] + tries.verify_ms[2, 1])
    assert logged.eta("accepted")[2, 1] == pytest.approx(expected)
    logged.draft_ms[:] = 0
    assert (tries.draft_ms > 0).all(), "outcomes share memory with the states"


@pytest.mark.parametrize("seed", range(6))
def test_a_linear_profile_has_the_costs_it_was_asked_for(seed: int) -> None:
    """T_tgt is the mean verification pass, T_mid the mean mid call under random schedules."""
    rng = np.random.default_rng(seed)
    tries = random_tries(rng, 3, [6, 5, 9])
    costs = COST | {"target_ms": float(rng.uniform(5, 400)), "mid_ms": float(rng.uniform(0.2, 60))}
    made = linear_profile(tries, costs)
    assert (made.target_ms, made.mid_ms) == (costs["target_ms"], costs["mid_ms"])
    ours = outcomes(tries, made)
    assert ours.verify_ms.mean() == pytest.approx(costs["target_ms"], rel=1e-9)
    # A prefix before step k comes up in 2^(1−k) of the schedules.
    total = weight = 0.0
    names = prefix_steps(3)
    for at in range(len(tries)):
        context = int(tries.states["context_tokens"].iloc[at])
        for prefix, k in enumerate(names):
            call = MidCall(**dict(zip(COUNTS, tries.counts[at, prefix].tolist(), strict=True)))
            total += made.mid_call_ms(call, context) * 2.0 ** (1 - k)
            weight += 2.0 ** (1 - k)
    assert total / weight == pytest.approx(costs["mid_ms"], rel=1e-9)
    assert mean_mid_ms(tries, made) == pytest.approx(costs["mid_ms"], rel=1e-9)
    other = replace(made, evaluation={"needed": "all", "all": "needed"}[made.evaluation])
    assert mean_mid_ms(tries, other) >= mean_mid_ms(tries, made) - 1e-9
    assert made.decision_ms() == costs["decision_ms"]
    assert (made.prune_ms, made.accept_ms, made.small_ms) == (0.2, 0.2, 0.3)
    assert made.verify.at(33, 0) / made.verify.at(1, 0) == pytest.approx(1 + 32 * 0.01)
    assert made.mid.at(1, 2000) / made.mid.at(1, 0) == pytest.approx(1 + 2 * 0.05)


def test_drawn_costs_are_inside_and_their_ratios_cover_the_range() -> None:
    drawn = draw_costs(WIDE, 40, 3)
    assert all(set(costs) == {"mid_ms", *RANGES, *COSTS} - {"ratio"} for costs in drawn)
    for name in ("target_ms", "verify_slope", "mid_slope", "context_slope", *COSTS):
        low, high = WIDE[name]
        values = np.log([costs[name] for costs in drawn])
        assert np.log(low) <= values.min() and values.max() <= np.log(high)
        assert np.ptp(values) > 0.7 * np.log(high / low), name
    places = np.log([costs["target_ms"] / costs["mid_ms"] for costs in drawn])
    low, high = np.log(WIDE["ratio"])
    parts = np.floor(40 * (places - low) / (high - low) + 1e-9).astype(int)
    assert parts.tolist() == list(range(40))
    assert draw_costs(WIDE, 40, 3) == drawn != draw_costs(WIDE, 40, 4)
    assert draw_costs(WIDE, 0, 3) == []


@pytest.mark.parametrize("bad", [[0.0, 1.0], [3.0, 2.0], [-1.0, 2.0]])
@pytest.mark.parametrize("name", ["ratio", "tree_ms"])
def test_bad_ranges_name_their_key(name: str, bad: list[float]) -> None:
    with pytest.raises(InputError, match=rf"hardware\.{name}=\["):
        draw_costs(WIDE | {name: bad}, 3, 0)


def two_pairs() -> Tries:
    one = random_tries(np.random.default_rng(1), 2, [40] * 10)
    two = random_tries(np.random.default_rng(2), 2, [30] * 10)
    return join([one, replace(two, states=two.states.assign(pair="q"))])


def test_every_pair_has_a_setting_as_logged_and_the_same_machines() -> None:
    tries = two_pairs()
    drawn = settings(tries, WIDE, 5)
    assert [s.pair for s in drawn] == ["p"] * 5 + ["q"] * 5
    assert [i for i, s in enumerate(drawn) if s.profile is None] == [0, 5]
    for ours, theirs in zip(drawn[1:5], drawn[6:], strict=True):
        assert ours.profile is not None and theirs.profile is not None
        assert ours.profile.target_ms == theirs.profile.target_ms
        assert ours.profile.mid_ms == theirs.profile.mid_ms
    only = settings(tries, WIDE | {"profiles": 0}, 5)
    assert only == [Setting("p", None), Setting("q", None)]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_states_are_assigned_settings_of_their_pair(share: float) -> None:
    tries = two_pairs()
    drawn = settings(tries, WIDE, 5)
    number = assign(tries, drawn, share, np.random.default_rng(0))
    for at, n in enumerate(number):
        assert drawn[n].pair == tries.states["pair"].iloc[at]
    for pair, first in (("p", 0), ("q", 5)):
        mine = number[tries.states["pair"] == pair]
        logged = (mine == first).mean()
        assert logged == share if share in (0.0, 1.0) else abs(logged - share) < 0.1
        counts = np.bincount(mine - first, minlength=5)[1:]
        if share < 1:
            assert counts.min() > 0.6 * counts.mean()
    only = settings(tries, WIDE | {"profiles": 0}, 5)
    alone = assign(tries, only, share, np.random.default_rng(0))
    assert alone.tolist() == [0] * 400 + [1] * 300


def test_outcomes_together_are_those_of_each_state_in_its_setting() -> None:
    tries = two_pairs().take(np.arange(0, 700, 9))
    drawn = settings(tries, WIDE, 5)
    number = assign(tries, drawn, 0.3, np.random.default_rng(1))
    together = outcomes_in(tries, drawn, number)
    assert len(set(number)) == 10
    for at, n in enumerate(number):
        alone = outcomes(tries.take([at]), drawn[n].profile)
        for field in fields(Outcomes):
            ours, theirs = getattr(together, field.name)[at], getattr(alone, field.name)[0]
            np.testing.assert_array_equal(ours, theirs, err_msg=field.name)
