"""Exact replay of policies on enumerated texts: no model, no approximation but the clock.

Every state of a held-out text has its 2^D outcomes, so a policy is replayed by walking the trie by
its decisions, taking that leaf's A and t, and jumping A + 1 tokens on (design section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.planning import OnlinePlanner
from pipeline.texts import Text
from treegraft_core import SIGNALS, LatencyProfile, SchedulerArtifact
from treegraft_core.enumeration import Enumeration
from treegraft_core.signals import context_features
from treegraft_core.tree import FloatArray, IntArray


@dataclass
class TextTable:
    """One held-out turn with the outcomes of every schedule at every state.

    Attributes
    ----------
    task, prompt_id : str
        Where it comes from.
    turn : int
        0 for the first user turn.
    tokens : int
        Tokens of the answer; the first one is the first root.
    accepted : int64 array, shape ``[states, 2^D]``
        A at state i (root = answer token i), schedules in binary order.
    ms : float64 array, shape ``[states, 2^D]``
        t of the round without the scheduler's own cost, ms.
    choices : dict of int64 array, shape ``[states]``
        The schedule (its number) that each policy that decides by the state walks to.
    draft_ms : float64 array, shape ``[states, 2^D]``
        t_D, the part of ``ms`` that does not depend on B_ver.
    kept : int64 array, shape ``[states, 2^D]``
        Nodes sent to verification.
    context : int64 array, shape ``[states]``
        Committed tokens at the state.
    ranks : int64 array, shape ``[states, 2^D, deepest]``
        Place in the pruning order of each accepted node; a large number after the last.
    """

    task: str
    prompt_id: str
    turn: int
    tokens: int
    accepted: IntArray
    ms: FloatArray
    choices: dict[str, IntArray]
    draft_ms: FloatArray
    kept: IntArray
    context: IntArray
    ranks: IntArray


NEVER = 1 << 30


def with_budget(table: TextTable, profile: LatencyProfile, verify_nodes: int) -> TextTable:
    """Return the table under a smaller B_ver, exactly: trees and decisions stay as they are.

    The nodes that a smaller budget keeps are the first of the pruning order, so A is the number of
    accepted nodes whose place is below it.
    """
    kept = np.minimum(table.kept, verify_nodes)
    verify_ms = profile.verify.at(kept + 1, table.context[:, None])
    return replace(
        table,
        accepted=(table.ranks < verify_nodes).sum(-1),
        ms=table.draft_ms + verify_ms,
        kept=kept,
    )


Decide = Callable[[list[list[int]], FloatArray, int], IntArray]
"""Takes the bits so far of each state, the ten signals ``[n, 10]`` and k; returns τ_k ``[n]``."""


def walk(found: Enumeration, depth: int, decide: Decide) -> IntArray:
    """Return the number of the schedule that decisions lead to at each state: ``[states]``."""
    states = np.arange(len(found))
    # The schedules with the bits decided so far are the ``span`` from ``low`` on.
    low, span = np.zeros(len(found), np.int64), 1 << depth
    for step in range(1, depth + 1):
        bits = found.bits[low][:, : step - 1].tolist()
        span //= 2
        low = low + span * decide(bits, found.signals[states, low, step - 1], step)
    return low


def scheduler_walk(
    artifact: SchedulerArtifact,
    found: Enumeration,
    text: Text,
    profile: LatencyProfile,
    max_calls: int | None = None,
) -> IntArray:
    """Return the schedule that the scheduler's decisions lead to at each state, by number.

    With ``max_calls`` it may call the mid drafter so often in a round.
    """
    columns = [SIGNALS.index(name) for name in artifact.selected_signals]

    def decide(bits: list[list[int]], signals: FloatArray, step: int) -> IntArray:
        x = np.hstack([contexts(bits, text, profile, step, artifact.depth), signals[:, columns]])
        wanted = artifact.margins(x) > 0
        if max_calls is not None:
            wanted &= np.array([sum(row) < max_calls for row in bits])
        return wanted.astype(np.int64)

    return walk(found, artifact.depth, decide)


def planner_walk(
    planner: OnlinePlanner, found: Enumeration, text: Text, profile: LatencyProfile
) -> IntArray:
    """Return the schedule that online planning leads to at each state, by number."""
    depth = planner.model.depth

    def decide(bits: list[list[int]], signals: FloatArray, step: int) -> IntArray:
        return planner.actions(contexts(bits, text, profile, step, depth), signals, step)

    return walk(found, depth, decide)


def contexts(
    bits: list[list[int]], text: Text, profile: LatencyProfile, step: int, depth: int
) -> FloatArray:
    """Return the part of z* that does not come from the tree, shape ``[n, 6 + D]``."""
    rows = [
        context_features(text.prompt_tokens, profile.target_ms, profile.mid_ms, step, row, depth)
        for row in bits
    ]
    return np.stack(rows)


def text_table(
    text: Text, found: Enumeration, profile: LatencyProfile, choices: dict[str, IntArray]
) -> TextTable:
    """Build the table of one turn from the outcomes at each of ``text.roots()``."""
    context = np.array(text.roots()) + 1
    table = TextTable(
        task=text.task,
        prompt_id=text.prompt_id,
        turn=text.turn,
        tokens=text.answer_tokens,
        accepted=found.accepted,
        ms=np.zeros(0),
        choices=choices,
        draft_ms=profile.times(found, context)[1],
        kept=found.kept_nodes,
        context=context,
        ranks=np.where(found.ranks >= 0, found.ranks, NEVER),
    )
    return with_budget(table, profile, NEVER)


Policy = Callable[[TextTable, int], int]


@dataclass
class Replayed:
    """Totals of one policy on one text.

    Attributes
    ----------
    tokens : int
        Tokens committed after the first.
    ms : float
        Time, ms.
    rounds, accepted, calls : int
        Rounds, their A in all (not cut at the end of the answer), mid calls in all.
    """

    tokens: int = 0
    ms: float = 0.0
    rounds: int = 0
    accepted: int = 0
    calls: int = 0


def replay(table: TextTable, policy: Policy, decision_ms: float = 0.0) -> Replayed:
    """Decode one text with ``policy``; ``decision_ms`` is added to every round."""
    done = Replayed()
    state, last = 0, table.tokens - 1
    while state < last:
        schedule = policy(table, state)
        step = min(int(table.accepted[state, schedule]) + 1, last - state)
        done.tokens += step
        done.ms += float(table.ms[state, schedule]) + decision_ms
        done.rounds += 1
        done.accepted += int(table.accepted[state, schedule])
        done.calls += schedule.bit_count()
        state += step
    return done


def fixed(schedule: int) -> Policy:
    """Return the policy that always takes one schedule, by number."""
    return lambda table, state: schedule


def capped(max_calls: int) -> str:
    """Return the name of the scheduler's choices with so many mid calls a round at most."""
    return f"scheduler, {max_calls} calls"


def chosen(name: str) -> Policy:
    """Return the policy that takes the schedule of ``table.choices[name]``."""
    return lambda table, state: int(table.choices[name][state])


def oracle(depth: int, max_calls: int | None = None) -> Policy:
    """Return the policy that takes the schedule with the most committed tokens per time.

    With ``max_calls``, of the schedules with so many mid calls at most.
    """
    allowed = np.array([max_calls is None or n.bit_count() <= max_calls for n in range(1 << depth)])

    def policy(table: TextTable, state: int) -> int:
        rate = (table.accepted[state] + 1) / table.ms[state]
        return int(np.argmax(np.where(allowed, rate, 0.0)))

    return policy


def throughput(rows: Sequence[Replayed]) -> float:
    """Return η over texts: tokens/s, ratio of sums."""
    return 1e3 * sum(r.tokens for r in rows) / sum(r.ms for r in rows)


def run_policy(
    tables: Sequence[TextTable], policy: Policy, decision_ms: float = 0.0
) -> list[Replayed]:
    """Replay one policy on every text."""
    return [replay(t, policy, decision_ms) for t in tables]


def bootstrap(
    groups: Sequence[str], statistic: Callable[[IntArray], float], draws: int, seed: int
) -> tuple[float, float]:
    """Return a 95 % percentile interval of ``statistic`` over resampled prompts; NaN for one.

    Parameters
    ----------
    groups : sequence of str
        The prompt of each text; the texts of one prompt are drawn together.
    statistic : callable
        Takes indices of texts (with repeats).
    draws, seed : int
        Resamples, and where they start.
    """
    return interval(statistic, resamples(groups, draws, seed))


def resamples(groups: Sequence[str], draws: int, seed: int) -> list[IntArray]:
    """Return the texts of every resample of prompts; none for a single prompt."""
    rng = np.random.default_rng(seed)
    names = sorted(set(groups))
    if len(names) < 2:
        return []
    members = {n: [i for i, g in enumerate(groups) if g == n] for n in names}
    picks = (rng.integers(len(names), size=len(names)) for _ in range(draws))
    return [np.array([i for p in picked for i in members[names[p]]]) for picked in picks]


def interval(
    statistic: Callable[[IntArray], float], drawn: Sequence[IntArray]
) -> tuple[float, float]:
    """Return the 95 % percentile interval of ``statistic`` over `resamples`; NaN without any."""
    if not drawn:
        return float("nan"), float("nan")
    low, high = np.percentile([statistic(texts) for texts in drawn], [2.5, 97.5])
    return float(low), float(high)
