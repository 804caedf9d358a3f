"""Hardware as data: what the logged rounds would take on other machines.

A does not depend on the machine. t does, and follows from the counts that the rows keep and a
latency profile: a measured one, or one drawn from a range (design section 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from pipeline.tries import NEVER, Tries, prefix_steps, prefixes_of, schedules
from treegraft_core import InputError, LatencyProfile
from treegraft_core.latency import Grid
from treegraft_core.tree import FloatArray, IntArray

FAR_NODES, FAR_CONTEXT = 64, 1000
MEAN_STATES = 1024
"""States of a pair that the mean nodes of its passes are taken from."""


@dataclass(frozen=True)
class Outcomes:
    """What every schedule brings and takes at S states, on some hardware.

    Attributes
    ----------
    accepted : int64 array, shape ``[S, 2^D]``
        A.
    draft_ms, verify_ms : float64 array, shape ``[S, 2^D]``
        t_D and t_V without the scheduler's own cost.
    target_ms, mid_ms : float64 array, shape ``[S]``
        T_tgt and T_mid.
    decision_ms : float64 array, shape ``[S]``
        Reading the signals and deciding, once; 0 where it is not known.
    """

    accepted: IntArray
    draft_ms: FloatArray
    verify_ms: FloatArray
    target_ms: FloatArray
    mid_ms: FloatArray
    decision_ms: FloatArray

    @property
    def ms(self) -> FloatArray:
        """t, shape ``[S, 2^D]``."""
        ms: FloatArray = self.draft_ms + self.verify_ms
        return ms

    def tokens(self, numerator: str) -> FloatArray:
        """Return η's tokens, ``[S, 2^D]``: A + 1 if ``committed``, A if ``accepted``."""
        bonus = 1.0 if numerator == "committed" else 0.0
        tokens: FloatArray = self.accepted.astype(np.float64) + bonus
        return tokens

    def eta(self, numerator: str) -> FloatArray:
        """Return η of every round, tokens/s, shape ``[S, 2^D]``."""
        eta: FloatArray = 1e3 * self.tokens(numerator) / self.ms
        return eta

    def put(self, at: Any, other: Outcomes) -> None:
        """Overwrite the states ``at``."""
        for field in fields(self):
            getattr(self, field.name)[at] = getattr(other, field.name)


def outcomes(
    tries: Tries, profile: LatencyProfile | None = None, verify_nodes: int | None = None
) -> Outcomes:
    """Return what the rounds take on the hardware of ``profile``; None: as logged.

    With ``verify_nodes``, under a smaller B_ver, exactly; that needs a profile.
    """
    states = tries.states
    if profile is None:
        if verify_nodes is not None:
            raise ValueError("verify_nodes: the times as logged are of the collected B_ver")
        return Outcomes(
            tries.accepted.astype(np.int64),
            tries.draft_ms.copy(),
            tries.verify_ms.copy(),
            states["target_ms"].to_numpy(np.float64).copy(),
            states["mid_ms"].to_numpy(np.float64).copy(),
            np.zeros(len(tries)),
        )
    accepted, kept = tries.accepted.astype(np.int64), tries.kept.astype(np.int64)
    if verify_nodes is not None:
        accepted, kept = tries.within(verify_nodes)
    context = states["context_tokens"].to_numpy(np.int64)
    extra_ms = mid_step_ms(tries, profile) - profile.small_ms
    ahead, calls = prefixes_of(tries.depth), schedules(tries.depth)
    drafting_ms = np.zeros((len(tries), 1 << tries.depth))
    for k in range(tries.depth):
        drafting_ms += extra_ms[:, ahead[:, k]] * calls[:, k]
    once_ms = tries.depth * profile.small_ms + profile.prune_ms + profile.accept_ms

    def everywhere(value: float) -> FloatArray:
        return np.full(len(tries), value)

    return Outcomes(
        accepted,
        drafting_ms + once_ms,
        profile.verify.at(kept + 1, context[:, None]),
        everywhere(profile.target_ms),
        everywhere(profile.mid_ms),
        everywhere(profile.decision_ms()),
    )


def at_budget(tries: Tries, profile: LatencyProfile, verify_nodes: int) -> Tries:
    """Return the states as they would have been logged under a smaller B_ver, exactly.

    Trees and signals are the same. A, kept nodes and times follow from the place in the pruning
    order at which each accepted node was kept, and the profile.
    """
    found = outcomes(tries, profile, verify_nodes)
    states = tries.states.assign(target_ms=profile.target_ms, mid_ms=profile.mid_ms)
    return replace(
        tries,
        states=states,
        accepted=found.accepted.astype(np.int16),
        draft_ms=found.draft_ms,
        verify_ms=found.verify_ms,
        kept=np.minimum(tries.kept, verify_nodes).astype(np.int16),
        ranks=np.where(tries.ranks < verify_nodes, tries.ranks, NEVER).astype(np.int16),
    )


def mid_step_ms(tries: Tries, profile: LatencyProfile) -> FloatArray:
    """Return the time of a mid step at every prefix, ms, shape ``[S, 2^D − 1]``."""
    at = tries.states["context_tokens"].to_numpy(np.int64)[:, None]
    ms: FloatArray = profile.mid_step_ms(tries.counts.astype(np.int64), at)
    return ms


def mean_mid_ms(tries: Tries, profile: LatencyProfile) -> float:
    """Return the mean mid call, ms, under schedules at random, as in a warm-up."""
    weights = np.ldexp(1.0, -prefix_steps(tries.depth))  # how often a prefix comes up
    return float(np.average(mid_step_ms(tries, profile).mean(0), weights=weights))


def flat(ms: float, nodes_slope: float, context_slope: float) -> Grid:
    """Return a grid that is linear in nodes and in context.

    Parameters
    ----------
    ms : float
        One token in an empty context.
    nodes_slope : float
        What another token adds, as a share of ``ms``.
    context_slope : float
        What 1,000 tokens of context add, as a share of ``ms``.
    """
    rows = []
    for nodes in (1, FAR_NODES):
        cost = 1.0 + nodes_slope * (nodes - 1)
        rows.append((ms * cost, ms * (cost + context_slope * FAR_CONTEXT / 1000)))
    return Grid((1, FAR_NODES), (0, FAR_CONTEXT), tuple(rows), ((0.0, 0.0), (0.0, 0.0)))


def linear_profile(tries: Tries, costs: Mapping[str, float]) -> LatencyProfile:
    """Return a profile with given T_tgt and T_mid for the rounds of one pair.

    Parameters
    ----------
    tries : Tries
        States of one pair: how many nodes its passes read, in which context.
    costs : mapping
        ``target_ms`` and ``mid_ms``: T_tgt and T_mid; ``verify_slope``, ``mid_slope`` (shares of
        a pass over one token that another token adds) and ``context_slope`` (that 1,000 tokens of
        context add); ``small_ms``, ``decision_ms`` and ``tree_ms`` (the tree work of a mid step,
        of pruning, and after verification, each).
    """
    tree_ms = float(costs["tree_ms"])
    base = LatencyProfile(
        mid=flat(1.0, costs["mid_slope"], costs["context_slope"]),
        verify=flat(1.0, costs["verify_slope"], costs["context_slope"]),
        plain_ms=1.0,
        small_ms=float(costs["small_ms"]),
        mid_overhead_ms=0.0,
        signals_ms=0.0,
        scheduler_ms=float(costs["decision_ms"]),
        prune_ms=tree_ms,
        accept_ms=tree_ms,
        target_ms=float(costs["target_ms"]),
        mid_ms=float(costs["mid_ms"]),
        evaluation="needed",
    )
    context = tries.states["context_tokens"].to_numpy(np.int64)
    verify = base.verify.at(tries.kept.astype(np.int64) + 1, context[:, None])
    once = base.target_ms / float(verify.mean())
    ways = {way: mean_mid_ms(tries, _replace(base, evaluation=way)) for way in ("needed", "all")}
    way = min(ways, key=ways.__getitem__)
    overhead_ms = min(tree_ms, 0.5 * base.mid_ms)
    mid = (base.mid_ms - overhead_ms) / ways[way]
    verify_grid = flat(once, costs["verify_slope"], costs["context_slope"])
    return _replace(
        base,
        mid=flat(mid, costs["mid_slope"], costs["context_slope"]),
        verify=verify_grid,
        plain_ms=float(np.mean(verify_grid.at(1, context))),
        mid_overhead_ms=overhead_ms,
        evaluation=way,
    )


def _replace(profile: LatencyProfile, **changes: Any) -> LatencyProfile:
    return LatencyProfile(**{**vars(profile), **changes})


RANGES = ("ratio", "target_ms", "verify_slope", "mid_slope", "context_slope")
COSTS = ("small_ms", "decision_ms", "tree_ms")


def draw_costs(ranges: Mapping[str, Any], count: int, seed: int) -> list[dict[str, float]]:
    """Return ``count`` sets of costs, each log-uniform in its range, ratios spread evenly.

    ``ranges`` gives ``[least, most]`` of `RANGES` and `COSTS`; ``ratio`` is T_tgt / T_mid.
    """
    rng = np.random.default_rng(seed)
    limits = {}
    for name in (*RANGES, *COSTS):
        low, high = (float(v) for v in ranges[name])
        if not 0 < low <= high:
            raise InputError(
                f"hardware.{name}={[low, high]}: give the least and the most, both above 0"
            )
        limits[name] = (np.log(low), np.log(high))
    # One ratio in each of `count` equal parts of its range, so that few profiles cover it.
    place = (np.arange(count) + rng.random(count)) / max(1, count)
    drawn = []
    for at in place:
        costs = {
            name: float(np.exp(low + (high - low) * (at if name == "ratio" else rng.random())))
            for name, (low, high) in limits.items()
        }
        costs["mid_ms"] = costs["target_ms"] / costs.pop("ratio")
        drawn.append(costs)
    return drawn


@dataclass(frozen=True)
class Setting:
    """One pair on one machine.

    Attributes
    ----------
    pair : str
        The pair.
    profile : LatencyProfile or None
        The machine; None: as logged.
    """

    pair: str
    profile: LatencyProfile | None


def settings(tries: Tries, hardware: Mapping[str, Any], seed: int) -> list[Setting]:
    """Return the settings to train in: each pair as logged, and on ``hardware.profiles`` drawn."""
    found = []
    for pair in tries.pairs:
        ours = np.flatnonzero(tries.states["pair"] == pair)
        mine = tries.take(ours[:: -(-len(ours) // MEAN_STATES)])
        found.append(Setting(pair, None))
        costs = draw_costs(hardware, int(hardware["profiles"]), seed)
        found += [Setting(pair, linear_profile(mine, each)) for each in costs]
    return found


def assign(
    tries: Tries, drawn: Sequence[Setting], logged_share: float, rng: np.random.Generator
) -> IntArray:
    """Return a setting for each state, by number: as logged with ``logged_share``, else any."""
    number = np.zeros(len(tries), np.int64)
    pairs = tries.states["pair"].to_numpy()
    for pair in tries.pairs:
        mine = np.flatnonzero(pairs == pair)
        ours = np.array([i for i, s in enumerate(drawn) if s.pair == pair])
        others = ours[1:] if len(ours) > 1 else ours
        as_logged = rng.random(len(mine)) < logged_share
        number[mine] = np.where(as_logged, ours[0], rng.choice(others, len(mine)))
    return number


def outcomes_in(tries: Tries, drawn: Sequence[Setting], number: IntArray) -> Outcomes:
    """Return the outcomes of each state in its own setting."""
    found = outcomes(tries)
    order = np.argsort(number, kind="stable")
    edges = np.searchsorted(number[order], np.arange(len(drawn) + 1))
    for setting, (low, high) in zip(drawn, pairwise(edges), strict=True):
        if high > low and setting.profile is not None:
            at = order[low:high]
            found.put(at, outcomes(tries.take(at), setting.profile))
    return found
