"""Sampling, CSD and SpecInfer in plain Python: slow, and obvious from their definitions.

What happens by chance goes through one function, ``pick(weights)``, which returns the place of one
of the weights. Given a random generator a procedure is a sampler; :func:`law` runs it over every
outcome of every pick instead and returns its distribution, exactly.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

from tests.reference.twin import UNLIMITED, LogProbs, Node, matches

Outcome = TypeVar("Outcome", bound=Hashable)
Pick = Callable[[Sequence[Any]], int]
Laws = Callable[[tuple[int, ...]], Sequence[Any]]


# Sampling -------------------------------------------------------------------------------------


def distribution(
    logits: Sequence[float],
    tokens: Sequence[int],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    repetition_penalty: float = 1.0,
) -> list[float]:
    """Return the distribution that sampling draws the token after ``tokens`` from."""
    scores = list(logits)
    for token in set(tokens):
        score = scores[token]
        scores[token] = score * repetition_penalty if score < 0 else score / repetition_penalty
    scores = [score / temperature for score in scores]
    if top_k:
        least = sorted(scores, reverse=True)[:top_k][-1]
        scores = [score if score >= least else -math.inf for score in scores]
    p = softmax(scores)
    if top_p < 1.0:
        reached, inside = 0.0, set()
        for token in sorted(range(len(p)), key=lambda t: -p[t]):
            if reached >= top_p:
                break
            inside.add(token)
            reached += p[token]
        p = softmax([s if t in inside else -math.inf for t, s in enumerate(scores)])
    return p


def softmax(scores: Sequence[float]) -> list[float]:
    """Return exp(scores), normalised."""
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]


def random_pick(seed: int) -> Pick:
    """Return a ``pick`` that draws by the weights."""
    rng = random.Random(seed)

    def pick(weights: Sequence[Any]) -> int:
        u = rng.random() * float(sum(weights))
        for place, weight in enumerate(weights):
            u -= float(weight)
            if u < 0:
                return place
        return max(place for place, weight in enumerate(weights) if weight)

    return pick


class _Fork(Exception):  # noqa: N818
    # A pick that the script does not decide yet.
    def __init__(self, weights: Sequence[Any]):
        super().__init__()
        self.weights = weights


def law(procedure: Callable[[Pick], Outcome]) -> dict[Outcome, Any]:
    """Return the probability of each outcome, by running through every sequence of picks."""
    found: dict[Outcome, Any] = defaultdict(int)
    pending: list[tuple[tuple[int, ...], Any]] = [((), 1)]
    while pending:
        script, chance = pending.pop()
        left = list(script)

        def pick(weights: Sequence[Any], left: list[int] = left) -> int:
            if not left:
                raise _Fork(weights)
            return left.pop(0)

        try:
            found[procedure(pick)] += chance
        except _Fork as fork:
            whole = sum(fork.weights)
            for place, weight in enumerate(fork.weights):
                if weight:
                    pending.append(((*script, place), chance * weight / whole))
    return dict(found)


def literal_rule(children: Sequence[int], p: Sequence[Any], pick: Pick) -> tuple[int, bool]:
    """Return the token after a node, and whether it is a child: the design's rule, word by word.

    Try the children in order; accept x with probability p(x), else zero p(x) and renormalise; the
    bonus is drawn from what is left.
    """
    left = list(p)
    for token in children:
        if pick([left[token], 1 - left[token]]) == 0:
            return token, True
        left[token] = 0
        rest = sum(left)
        left = [q / rest for q in left]
    return pick(left), False


def literal_walk(
    children: dict[tuple[int, ...], Sequence[int]], laws: Laws, pick: Pick
) -> tuple[int, tuple[int, ...]]:
    """Verify a tree by the literal rule; return A and the tokens committed.

    ``children`` are the tokens under each path of the tree, ``laws`` the target's distribution
    after each path.
    """
    path: tuple[int, ...] = ()
    while True:
        token, is_child = literal_rule(children.get(path, ()), laws(path), pick)
        if not is_child:
            return len(path), (*path, token)
        path = (*path, token)


def exactly(p: Sequence[float]) -> list[Fraction]:
    """Return the floats as fractions, normalised."""
    fractions = [Fraction(q) for q in p]
    return [q / sum(fractions) for q in fractions]


# CSD ------------------------------------------------------------------------------------------


@dataclass
class SequenceRound:
    """A round of CSD.

    Attributes
    ----------
    sequence : list of int
        The tokens sent to verification.
    read, length : list of int
        For each mid call, the nodes that it read, and those of the sequence, the root included.
    overwrote : list of bool
        For each mid call, whether it put its token in the place of another.
    """

    sequence: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    overwrote: list[bool] = field(default_factory=list)


def csd_round(
    context: Sequence[int],
    schedule: Sequence[int],
    mid_choice: Callable[[tuple[int, ...]], int],
    max_ngram: int,
    deepest: int = UNLIMITED,
) -> SequenceRound:
    """Draft one sequence by ``schedule``; ``mid_choice`` is the mid drafter's token after a path.

    At most ``deepest`` tokens have room.
    """
    result, known = SequenceRound(), 0  # nodes that the mid drafter has read and that still stand
    for step, bit in enumerate(schedule, start=1):
        sequence = result.sequence
        if not bit:
            chain = max(1, max_ngram - (step - 1))
            _, followers = matches(context, sequence, max_ngram)
            if followers:
                sequence += context[followers[0] : followers[0] + chain]
            elif step == 1:
                newest_first = list(context)[::-1]
                sequence.append(max(newest_first, key=newest_first.count))
        else:
            result.read.append(len(sequence) + 1 - known)
            result.length.append(len(sequence) + 1)
            at = 0
            while at < len(sequence) and sequence[at] == mid_choice(tuple(sequence[:at])):
                at += 1
            result.overwrote.append(at < len(sequence))
            sequence[at:] = [mid_choice(tuple(sequence[:at]))]
            known = at + 1
        del sequence[deepest:]
    return result


# SpecInfer ------------------------------------------------------------------------------------


def fixed_shape(
    shape: Sequence[int], log_probs: LogProbs, path: tuple[int, ...] = ()
) -> list[tuple[int, ...]]:
    """Return the paths of the tree in which a node at depth k has ``shape[k]`` likeliest tokens."""
    if not shape:
        return []
    values = log_probs(path)
    best = sorted(range(len(values)), key=lambda t: (-values[t], t))[: shape[0]]
    below = [fixed_shape(shape[1:], log_probs, (*path, token)) for token in best]
    return [(*path, token) for token in best] + [p for paths in below for p in paths]


# Where mid calls pick -------------------------------------------------------------------------


def where_picked(
    frontier: Sequence[Node], picked: Sequence[Node], pool: Sequence[Node]
) -> tuple[tuple[int, ...], int, int]:
    """Return the depth of each pick less the frontier's greatest, |C_k|, and C_k at its depths."""
    depths = [node.depth() for node in frontier]
    offsets = tuple(node.depth() - max(depths) for node in picked) if depths else ()
    return offsets, len(pool), sum(node.depth() in depths for node in pool)
