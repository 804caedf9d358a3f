"""What a round is worth within its text: exact, from the logged outcomes of every position.

A round that takes t and commits A + 1 tokens leaves the text A + 1 tokens further on. If a policy
decodes the rest, the round costs t and what the rest costs from there; both are on disk where every
position of the text was logged. One and the same λ for all positions, as in `pipeline.label`,
overrates tokens in stretches that decode fast anyway. Where states were sampled, λ has to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.hardware import Outcomes, Setting, assign
from pipeline.replay import Texts
from pipeline.tries import Tries
from treegraft_core.tree import FloatArray, IntArray

FIRST_OFFSETS = 8
"""Decoding may start at any of so many positions, so that what is visited is not one path."""
EXPLORED = 0.05
"""Weight of a state that no path visits."""


def slots(texts: Texts) -> IntArray:
    """Return each state's place where every text has one place more, its end: ``[S]``."""
    number = np.arange(len(texts.first))
    return np.arange(len(texts.left)) + np.repeat(number, texts.length)


def time_to_go(texts: Texts, steps: IntArray, ms: FloatArray) -> FloatArray:
    """Return the time from every place to the end of its text, ms, shape ``[S + T]``.

    Parameters
    ----------
    texts : Texts
        Whole ones.
    steps : int64 array, shape ``[S]``
        Tokens that a round at each state commits, at most those that are left.
    ms : float64 array, shape ``[S]``
        What it takes.
    """
    to_end = np.zeros(len(ms) + len(texts.first))
    number = np.arange(len(texts.first))
    for offset in range(int(texts.length.max()) - 1, -1, -1):
        live = number[texts.length > offset]
        at = texts.first[live] + offset
        to_end[at + live] = ms[at] + to_end[at + live + steps[at]]
    return to_end


def visits(texts: Texts, steps: IntArray) -> FloatArray:
    """Return how often each state is visited, ``[S]``, from a start among the first places."""
    seen = np.zeros(len(steps) + len(texts.first))
    number = np.arange(len(texts.first))
    starts = np.minimum(FIRST_OFFSETS, texts.length)
    for offset in range(int(texts.length.max())):
        live = number[texts.length > offset]
        at = texts.first[live] + offset
        seen[at + live] += np.where(offset < starts[live], 1.0 / starts[live], 0.0)
        np.add.at(seen, at + live + steps[at], seen[at + live])
    return seen[slots(texts)]


@dataclass(frozen=True)
class Worth:
    """What every schedule is worth if a policy goes on, in mean rounds.

    Attributes
    ----------
    gain : float64 array, shape ``[S, 2^D]``
        What is left over at the policy's rate, in tokens of its mean round; differences count.
    weight : float64 array, shape ``[S]``
        How much each state matters; 1 on the average.
    """

    gain: FloatArray
    weight: FloatArray


def worth(
    texts: Texts, found: Outcomes, leaf: IntArray, rate: FloatArray, tokens: FloatArray, depth: int
) -> Worth:
    """Return what every schedule is worth where a policy takes the schedules ``leaf``.

    Parameters
    ----------
    texts : Texts
        The turns of the states.
    found : Outcomes
        Of the states.
    leaf : int64 array, shape ``[S]``
        The policy's schedules, by number.
    rate, tokens : float64 array, shape ``[S]``
        Tokens/ms, and tokens a round, in each state's setting.
    depth : int
        D: a round decides so often.
    """
    state = np.arange(len(leaf))
    spent = found.ms + depth * found.decision_ms[:, None]
    steps = np.minimum(found.accepted + 1, texts.left[:, None])
    if texts.whole:
        place = slots(texts)
        rest = time_to_go(texts, steps[state, leaf], spent[state, leaf])
        gain = -rate[:, None] * (spent + rest[place[:, None] + steps] - rest[place][:, None])
        weight = visits(texts, steps[state, leaf]) + EXPLORED
    else:
        gain = steps - rate[:, None] * spent
        weight = 1.0 / steps[state, leaf]  # a round stands for the positions that it covers
    return Worth(gain / tokens[:, None], weight / weight.mean())


def turn_settings(
    tries: Tries,
    texts: Texts,
    drawn: Sequence[Setting],
    logged_share: float,
    rng: np.random.Generator,
) -> IntArray:
    """Return a setting for each state, ``[S]``: one for all states of a turn that is whole."""
    if not texts.whole:
        return assign(tries, drawn, logged_share, rng)
    each = assign(tries.take(texts.first), drawn, logged_share, rng)
    return np.repeat(each, texts.length)


def rounds_of(
    texts: Texts, found: Outcomes, leaf: IntArray, depth: int
) -> tuple[FloatArray, IntArray, FloatArray]:
    """Return how many rounds start at each state, their tokens and their time (ms), ``[S]`` each.

    The policy takes the schedules ``leaf`` (``[S]``, by number), deciding ``depth`` times a round.
    """
    state = np.arange(len(leaf))
    steps = np.minimum(found.accepted[state, leaf] + 1, texts.left)
    spent = found.ms[state, leaf] + depth * found.decision_ms
    return rounds_at(texts, steps), steps, spent


def rounds_at(texts: Texts, steps: IntArray) -> FloatArray:
    """Return how many rounds start at each state, ``[S]``, if they commit ``steps`` (``[S]``).

    Where states were sampled, a round stands for the positions that it covers.
    """
    return texts.visited(steps).astype(np.float64) if texts.whole else 1.0 / steps
