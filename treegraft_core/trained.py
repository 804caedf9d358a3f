"""What a scheduler was trained on: what decides whether it fits a decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WIDTHS = ("width", "verify_nodes", "max_ngram")
"""W, B_ver and n_max, as `DraftingConfig` names them."""
COSTS = ("target_ms", "mid_ms", "ratio")
"""T_tgt and T_mid in ms, and T_tgt / T_mid."""
FAR = 2.0
"""T_tgt / T_mid is far outside a range when it is this many times below or above its ends.

A mid call then costs, in verifications, twice what it ever did in training, or less than half.
"""
MOST_TEXT = 200


@dataclass(frozen=True)
class Drafters:
    """The drafters of one pair that a scheduler was trained on.

    Attributes
    ----------
    small, mid : str
        Families: ``ngram``, ``suffix``; ``causal_lm``, ``student``, ``head``; or a user's own.
    pair : str
        The pair's name.
    identity : str
        A digest of the mid drafter's weights, hexadecimal; empty if nobody noted one. For people:
        a scheduler may be used with other drafters of the same family.
    """

    small: str
    mid: str
    pair: str = ""
    identity: str = ""


@dataclass(frozen=True)
class Trained:
    """What a scheduler was trained on. A fact that nobody noted is missing, and is not checked.

    Attributes
    ----------
    widths : mapping of str to int
        By `WIDTHS`.
    drafters : tuple of Drafters
        One for each pair.
    costs : mapping of str to (float, float)
        By `COSTS`: the least and the most over the rows that it was trained on.
    metrics : dict
        Figures of the fit on held-out prompts.
    """

    widths: Mapping[str, int] = field(default_factory=dict)
    drafters: tuple[Drafters, ...] = ()
    costs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[str, ...]:
        """The facts that are not there, in words."""
        facts = {"widths": self.widths, "drafters": self.drafters, "costs": self.costs}
        return tuple(name for name, fact in facts.items() if not fact)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as in ``scheduler.json``."""
        return {
            "widths": dict(self.widths),
            "drafters": [vars(each) for each in self.drafters],
            "costs": {name: list(ends) for name, ends in self.costs.items()},
            "metrics": dict(self.metrics),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Trained:
        """Return what the plain data of a folder says; a fact that is not in it is missing.

        Raises
        ------
        ValueError
            If a fact cannot be right.
        """
        metrics = value.get("metrics", {})
        if not isinstance(metrics, dict):
            raise ValueError("metrics must be an object")
        return cls(
            _widths(value.get("widths", {})),
            tuple(_drafters(each) for each in _list(value.get("drafters", []), "drafters")),
            _costs(value.get("costs", {})),
            metrics,
        )


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list")
    return value


def _known(value: Any, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict) or (value and set(value) != set(keys)):
        raise ValueError(f"{name} must hold {', '.join(keys)}, or nothing")
    return value


def _widths(value: Any) -> dict[str, int]:
    found = _known(value, "widths", WIDTHS)
    for name, count in found.items():
        if type(count) is not int or not 1 <= count < 2**31:
            raise ValueError(f"widths.{name} must be a count, not {str(count)[:40]}")
    return found


def _drafters(value: Any) -> Drafters:
    names = ("small", "mid", "pair", "identity")
    if not isinstance(value, dict) or not {"small", "mid"} <= set(value) <= set(names):
        raise ValueError(f"drafters must hold {', '.join(names)}")
    for name, text in value.items():
        if not isinstance(text, str) or len(text) > MOST_TEXT or not text.isprintable():
            raise ValueError(f"drafters.{name} must be a name")
    return Drafters(**value)


def _costs(value: Any) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for name, ends in _known(value, "costs", COSTS).items():
        numbers = isinstance(ends, list) and [type(end) in (int, float) for end in ends]
        if numbers != [True, True]:
            raise ValueError(f"costs.{name} must be the least and the most")
        low, high = (float(end) for end in ends)
        if not 0.0 < low <= high < math.inf:
            raise ValueError(f"costs.{name} must be the least and the most, above 0")
        found[name] = (low, high)
    return found
