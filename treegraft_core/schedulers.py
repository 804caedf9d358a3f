"""Schedulers: what decides at each drafting step whether the mid drafter works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from treegraft_core import kernels
from treegraft_core.artifact import SchedulerArtifact
from treegraft_core.errors import InputError
from treegraft_core.signals import SIGNALS, context_features
from treegraft_core.tree import FloatArray


@dataclass(frozen=True)
class StepState:
    """What a scheduler may look at before step k.

    Attributes
    ----------
    step : int
        k, from 1.
    bits : tuple of int
        τ_1 … τ_{k−1}.
    depth : int
        D.
    prompt_tokens : int
        Tokens of the prompt.
    target_ms, mid_ms : float
        T_tgt and T_mid, ms.
    signals : float64 array, shape ``[10]``, or None
        The ten signals; None when the scheduler says that it does not read them.
    """

    step: int
    bits: tuple[int, ...]
    depth: int
    prompt_tokens: int
    target_ms: float
    mid_ms: float
    signals: FloatArray | None = None

    @property
    def context(self) -> FloatArray:
        """The part of z* that does not come from the tree: :func:`context_features`."""
        return context_features(
            self.prompt_tokens, self.target_ms, self.mid_ms, self.step, self.bits, self.depth
        )


class Scheduler(Protocol):
    """Anything that decides a step.

    ``reads_signals`` says whether the decoder must compute the signals for it.
    """

    reads_signals: bool

    def decide(self, state: StepState) -> int:
        """Return τ_k: 1 calls the mid drafter, 0 the small one."""
        ...


class FixedSchedule:
    """The same schedule every round.

    Parameters
    ----------
    bits : sequence of int
        τ_1 … τ_D, each 0 or 1.
    """

    reads_signals = False

    def __init__(self, bits: Sequence[int]):
        if not bits or any(b not in (0, 1) for b in bits):
            raise InputError(f"schedule={list(bits)}: give one 0 or 1 for each drafting step")
        self.bits = tuple(int(b) for b in bits)

    def decide(self, state: StepState) -> int:
        """Return the bit of this step."""
        if len(self.bits) != state.depth:
            raise InputError(
                f"schedule={','.join(map(str, self.bits))}: has {len(self.bits)} bits, "
                f"drafting.depth is {state.depth}; give one bit a step"
            )
        return self.bits[state.step - 1]


def all_small(depth: int) -> FixedSchedule:
    """Return τ = 0…0."""
    return FixedSchedule([0] * depth)


def all_mid(depth: int) -> FixedSchedule:
    """Return τ = 1…1, EAGLE-2's tree."""
    return FixedSchedule([1] * depth)


class RandomSchedule:
    """A random schedule every round, reproducible by seed."""

    reads_signals = False

    def __init__(self, seed: int = 0, call_rate: float = 0.5):
        self._rng = np.random.default_rng(seed)
        self.call_rate = call_rate

    def decide(self, state: StepState) -> int:
        """Return 1 with probability ``call_rate``."""
        return int(self._rng.random() < self.call_rate)


class DistilledScheduler:
    """The 3,265-parameter classifier g_ψ: calls the mid drafter when its margin is positive.

    Parameters
    ----------
    artifact : SchedulerArtifact
        What ``stage=export`` wrote.
    max_calls : int, optional
        Most mid calls a round (the paper's cap is floor(T_tgt / T_mid)); default: no cap.
    allow : sequence of str
        What may differ from its training when a decoder is built with it, of ``drafters``,
        ``width``, ``verify_nodes`` and ``max_ngram``: see
        :func:`treegraft_core.fit_check.check_fits`.
    """

    reads_signals = True

    def __init__(
        self,
        artifact: SchedulerArtifact,
        max_calls: int | None = None,
        allow: Sequence[str] = (),
    ):
        self.artifact = artifact
        self.max_calls = max_calls
        self.allow = tuple(allow)
        self._columns = np.array([SIGNALS.index(name) for name in artifact.selected_signals])
        # The z-scores go into the first layer, so that a decision is a few products,
        # in one compiled loop: BLAS takes longer to start than they take.
        scale = 1.0 / np.maximum(artifact.x_std, 1e-12)
        first = artifact.weights[0] * scale
        pairs = [
            (first, artifact.biases[0] - first @ artifact.x_mean),
            *zip(artifact.weights[1:], artifact.biases[1:], strict=True),
        ]
        self._layers = tuple(
            (np.ascontiguousarray(w, np.float64), np.ascontiguousarray(b, np.float64))
            for w, b in pairs
        )

    def margin(self, state: StepState) -> float:
        """Return the margin of calling the mid drafter now."""
        if state.depth != self.artifact.depth:
            raise InputError(
                f"drafting.depth={state.depth}: the scheduler was trained for depth "
                f"{self.artifact.depth}; decode with that or train another"
            )
        if state.signals is None:
            raise ValueError("state.signals: the distilled scheduler needs the ten signals")
        h = np.concatenate([state.context, state.signals[self._columns]])
        return self.artifact.y_std * float(kernels.margin(h, self._layers)) + self.artifact.y_mean

    def decide(self, state: StepState) -> int:
        """Return 1 when the margin is positive and the cap allows another call."""
        if self.max_calls is not None and sum(state.bits) >= self.max_calls:
            return 0
        return int(self.margin(state) > 0)
