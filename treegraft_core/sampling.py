"""How the target's next token is chosen: greedily or by sampling, as ``transformers`` has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from treegraft_core.errors import InputError
from treegraft_core.tree import IntArray


def _at_least(value: object, low: float) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= low  # type: ignore[arg-type, operator]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class Sampling:
    """What ``generate`` of ``transformers`` takes under the same names.

    Attributes
    ----------
    temperature : float
        0 is greedy.
    top_p : float
        Only the likeliest tokens that reach this probability together; 1 is all.
    top_k : int
        Only the k likeliest tokens; 0 is all.
    repetition_penalty : float
        Divides positive and multiplies negative logits of tokens that occurred, the prompt
        included; 1 is none. It holds for greedy decoding too.
    seed : int
        Of the one uniform number that each new token takes.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (_at_least(self.temperature, 0.0), "must be 0 (greedy) or more"),
            "top_p": (_at_least(self.top_p, 0.0) and 0 < self.top_p <= 1, "must be in (0, 1]"),
            "top_k": (_whole(self.top_k), "must be a whole number, 0 (all tokens) or more"),
            "repetition_penalty": (
                _at_least(self.repetition_penalty, 0.0) and self.repetition_penalty > 0,
                "must be above 0; 1 is none",
            ),
            "seed": (_whole(self.seed), "must be a whole number, 0 or more"),
        }
        for name, (good, what) in checks.items():
            if not good:
                raise InputError(f"sampling.{name}={getattr(self, name)}: {what}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def untouched(self) -> bool:
        """Whether it is the likeliest of the model's own logits."""
        return self.greedy and self.repetition_penalty == 1.0

    def processors(self) -> LogitsProcessorList:
        """Return the processors of ``transformers``, in the order in which ``generate`` has them.

        As there, temperature, top-k and top-p are for sampling only.
        """
        found = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            found.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.greedy:
            return found
        if self.temperature != 1.0:
            found.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            found.append(TopPLogitsWarper(float(self.top_p)))
        return found


GREEDY = Sampling()


class Chooser:
    """Chooses the tokens of one request, in their order.

    A draft child x is to be accepted with probability p(x), after the children tried before it were
    refused and p renormalised; that is p(x) of the whole, whatever the order. So the token is drawn
    from p first, by one uniform number a position, and the child that carries it is taken, if there
    is one. The law is the same, and so are the tokens for one seed whatever was drafted: plain
    sampling's own.

    Parameters
    ----------
    sampling : Sampling
        How.
    """

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self._processors = sampling.processors()
        self._rng = np.random.default_rng(sampling.seed)

    def probabilities(self, tokens: Sequence[int] | IntArray, logits: Tensor) -> Tensor:
        """Return the distribution of the next token, shape ``[vocabulary]``.

        Parameters
        ----------
        tokens : sequence of int
            Everything before it, the prompt first.
        logits : Tensor, shape ``[vocabulary]``
            The target's.
        """
        return self._processed(tokens, logits).softmax(-1)

    def choose(self, tokens: Sequence[int] | IntArray, logits: Tensor) -> int:
        """Return the next token; sampling takes one number of the generator.

        Raises
        ------
        FloatingPointError
            If the distribution is not one, for example for logits that are not numbers.
        """
        if self.sampling.greedy:
            return int(self._processed(tokens, logits).argmax())
        # In float64, and by vocabulary order: what a seed gives hardly depends on rounding.
        row = logits.cpu() if logits.device.type == "mps" else logits  # which has no float64
        reach = self.probabilities(tokens, row.double()).cumsum(-1)
        total = float(reach[-1])
        if not 0.5 < total < 2.0:
            raise FloatingPointError("the target's logits give no distribution")
        # Below the total by more than a rounding, so that the token found has p > 0.
        u = reach.new_tensor([min(self._rng.random(), 1 - 1e-12) * total])
        return int(torch.searchsorted(reach, u, right=True))

    def _processed(self, tokens: Sequence[int] | IntArray, logits: Tensor) -> Tensor:
        if not self._processors:
            return logits
        ids = torch.as_tensor(np.asarray(tokens, np.int64), device=logits.device)
        return self._processors(ids[None], logits[None])[0]


ARGMAX = Chooser(GREEDY)
"""Takes the likeliest token."""

OUTSIDE = Chooser(Sampling(temperature=1.0))
"""Stands for tokens chosen elsewhere (:mod:`treegraft_core.stepping`): any may come."""
