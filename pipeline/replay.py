"""Exact replay of policies on enumerated texts: no model, no approximation but the clock.

Every state of a held-out text has its 2^D outcomes, so a policy is replayed by walking the trie by
its decisions, taking that leaf's A and t, and jumping A + 1 tokens on (design section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.texts import Text
from treegraft_core import SIGNALS, LatencyProfile, SchedulerArtifact
from treegraft_core.enumeration import Outcome
from treegraft_core.signals import context_features
from treegraft_core.tree import FloatArray, IntArray


@dataclass
class TextTable:
    """One held-out turn with the outcomes of every schedule at every state.

    Attributes
    ----------
    task, prompt_id : str
        Where it comes from.
    tokens : int
        Tokens of the answer; the first one is the first root.
    accepted : int64 array, shape ``[states, 2^D]``
        A at state i (root = answer token i), schedules in binary order.
    ms : float64 array, shape ``[states, 2^D]``
        t of the round without the scheduler's own cost, ms.
    choice : int64 array, shape ``[states]``
        The schedule (its number) that the distilled scheduler walks to.
    """

    task: str
    prompt_id: str
    tokens: int
    accepted: IntArray
    ms: FloatArray
    choice: IntArray


def scheduler_walk(
    artifact: SchedulerArtifact, outcomes: Sequence[Outcome], text: Text, profile: LatencyProfile
) -> int:
    """Return the number of the schedule that the scheduler's decisions lead to at one state."""
    depth = artifact.depth
    columns = [SIGNALS.index(name) for name in artifact.selected_signals]
    low, high = 0, 1 << depth
    bits: tuple[int, ...] = ()
    for step in range(1, depth + 1):
        x = np.concatenate(
            [
                context_features(
                    text.prompt_tokens, profile.target_ms, profile.mid_ms, step, bits, depth
                ),
                outcomes[low].signals[step - 1][columns],
            ]
        )
        action = int(artifact.margin(x) > 0)
        middle = (low + high) // 2
        low, high = (middle, high) if action else (low, middle)
        bits = (*bits, action)
    return low


def text_table(
    text: Text,
    outcomes: Sequence[Sequence[Outcome]],
    profile: LatencyProfile,
    artifact: SchedulerArtifact,
) -> TextTable:
    """Build the table of one turn from the outcomes at each of ``text.roots()``."""
    roots = text.roots()
    return TextTable(
        task=text.task,
        prompt_id=text.prompt_id,
        tokens=text.answer_tokens,
        accepted=np.array([[o.accepted for o in found] for found in outcomes]),
        ms=np.array(
            [
                [
                    profile.draft_ms(o.calls, root + 1) + profile.verify_ms(o.kept_nodes, root + 1)
                    for o in found
                ]
                for root, found in zip(roots, outcomes, strict=True)
            ]
        ),
        choice=np.array([scheduler_walk(artifact, found, text, profile) for found in outcomes]),
    )


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


def scheduled(table: TextTable, state: int) -> int:
    """Take the distilled scheduler's schedule."""
    return int(table.choice[state])


def oracle(table: TextTable, state: int) -> int:
    """Take the schedule with the most committed tokens per time at this state."""
    return int(np.argmax((table.accepted[state] + 1) / table.ms[state]))


def throughput(rows: Sequence[Replayed]) -> float:
    """Return η over texts: tokens/s, ratio of sums."""
    return 1e3 * sum(r.tokens for r in rows) / sum(r.ms for r in rows)


def bootstrap(
    groups: Sequence[str], statistic: Callable[[IntArray], float], draws: int, seed: int
) -> tuple[float, float]:
    """Return a 95 % percentile interval of ``statistic`` over resampled prompts.

    Parameters
    ----------
    groups : sequence of str
        The prompt of each text; the texts of one prompt are drawn together.
    statistic : callable
        Takes indices of texts (with repeats).
    draws, seed : int
        Resamples, and where they start.
    """
    rng = np.random.default_rng(seed)
    names = sorted(set(groups))
    members = {n: [i for i, g in enumerate(groups) if g == n] for n in names}
    values = []
    for _ in range(draws):
        picked = rng.integers(len(names), size=len(names))
        values.append(statistic(np.array([i for p in picked for i in members[names[p]]])))
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
