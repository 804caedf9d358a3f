"""Online planning: the value network searches the remaining schedule at every step.

The paper's control for distillation: the same knowledge, without the 3,265-parameter student.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.features import advantage, schedules_ahead
from pipeline.value import ValueModel
from treegraft_core import SIGNALS, InputError, StepState
from treegraft_core.tree import FloatArray

TIMED_DECISIONS = 20


@dataclass(frozen=True)
class OnlinePlanner:
    """A scheduler that takes the first bit of the remaining schedule that is worth most.

    Attributes
    ----------
    model : ValueModel
        What ``stage=value`` fitted.
    numerator : {"committed", "accepted"}
        Of η̂.
    rate : float or None
        None: schedules are worth η̂, tokens over time, as in the paper. A number: the long-run
        rate λ, tokens/ms; they are worth tokens − λ · time (`pipeline.label`).
    """

    model: ValueModel
    numerator: str
    rate: float | None = None

    reads_signals = True

    def worth(self, committed: FloatArray, ms: FloatArray) -> FloatArray:
        """Return what estimated rounds are worth, elementwise."""
        tokens = committed - (0.0 if self.numerator == "committed" else 1.0)
        return tokens / ms if self.rate is None else tokens - self.rate * ms

    def wanted(self, committed: FloatArray, ms: FloatArray) -> NDArray[np.bool_]:
        """Return where to call the mid drafter, ``[S, 2^D − 1]``.

        ``committed`` and ``ms`` are `ValueModel.outcomes`, ``[S, D, 2^D]``.
        """
        return advantage(self.worth(committed, ms)) > 0

    def decide(self, state: StepState) -> int:
        """Return τ_k of the best remaining schedule."""
        if state.depth != self.model.depth:
            raise InputError(
                f"drafting.depth={state.depth}: the value network was fitted for depth "
                f"{self.model.depth}; fit another with stage=value"
            )
        if state.signals is None:
            raise ValueError("state.signals: online planning needs the ten signals")
        # Bits before step k do not matter here: the first schedules stand for all.
        left = state.depth - state.step + 1
        ahead = schedules_ahead(state.depth)[state.step - 1, : 1 << left]
        columns = [SIGNALS.index(name) for name in self.model.signals]
        z = np.concatenate([state.context, state.signals[columns]])
        heads = self.model.heads(np.hstack([np.tile(z, (len(ahead), 1)), ahead]))
        worth = self.worth(heads[:, 0], heads[:, 1] + heads[:, 2])
        return int(worth.argmax() >= len(ahead) // 2)

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
