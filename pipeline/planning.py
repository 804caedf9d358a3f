"""Online planning: the value network searches the remaining schedule at every step.

The paper's control for distillation: the same knowledge, without the 3,265-parameter student.
"""

from __future__ import annotations

import time

import numpy as np

from pipeline.features import schedule_ahead
from pipeline.value import ValueModel
from treegraft_core import SIGNALS, InputError, StepState
from treegraft_core.tree import FloatArray, IntArray

TIMED_DECISIONS = 20


class OnlinePlanner:
    """A scheduler that takes the first bit of the schedule with the highest η̂.

    Parameters
    ----------
    model : ValueModel
        What ``stage=value`` fitted.
    numerator : {"committed", "accepted"}
        Of η̂.
    """

    reads_signals = True

    def __init__(self, model: ValueModel, numerator: str):
        self.model, self.numerator = model, numerator
        self._columns = [SIGNALS.index(name) for name in model.signals]
        # Completions of each prefix length: action and future, in binary order.
        depth = model.depth
        numbers = np.arange(1 << depth)
        self._bits = (numbers[:, None] >> np.arange(depth)[::-1]) & 1

    def decide(self, state: StepState) -> int:
        """Return τ_k of the best remaining schedule."""
        if state.depth != self.model.depth:
            raise InputError(
                f"drafting.depth={state.depth}: the value network was fitted for depth "
                f"{self.model.depth}; fit another with stage=value"
            )
        if state.signals is None:
            raise ValueError("state.signals: online planning needs the ten signals")
        return int(self.actions(state.context[None], state.signals[None], state.step)[0])

    def actions(self, context: FloatArray, signals: FloatArray, step: int) -> IntArray:
        """Return τ_k at several states of one step, shape ``[n]``.

        Parameters
        ----------
        context : float64 array, shape ``[n, 6 + D]``
            `context_features` of each.
        signals : float64 array, shape ``[n, 10]``
            The ten signals of each.
        step : int
            k.
        """
        left = self.model.depth - step + 1
        # Bits before step k do not matter here: they are zeroed.
        completions = self._bits[: 1 << left]
        ahead = schedule_ahead(completions.astype(np.int8), np.full(len(completions), step))
        z = np.hstack([context, signals[:, self._columns]])
        x = np.hstack([np.repeat(z, len(ahead), axis=0), np.tile(ahead, (len(z), 1))])
        eta = self.model.eta(x, self.numerator).reshape(len(z), len(ahead))
        return completions[eta.argmax(1), step - 1].astype(np.int64)

    def decision_ms(self, prompt_tokens: int, target_ms: float, mid_ms: float) -> float:
        """Return the time of a decision, ms: mean over the steps of a round, measured now."""
        states = [
            StepState(
                step=step,
                bits=(0,) * (step - 1),
                depth=self.model.depth,
                prompt_tokens=prompt_tokens,
                target_ms=target_ms,
                mid_ms=mid_ms,
                signals=np.ones(len(SIGNALS)),
            )
            for step in range(1, self.model.depth + 1)
        ]
        rounds = []
        for _ in range(TIMED_DECISIONS):
            started = time.perf_counter()
            for state in states:
                self.decide(state)
            rounds.append(1e3 * (time.perf_counter() - started))
        return float(np.median(rounds)) / len(states)
