"""What rounds and requests did: their statistics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from treegraft_core.drafting import MidCall
from treegraft_core.guard import Decision
from treegraft_core.tree import FloatArray


@dataclass(frozen=True)
class Picks:
    """Where a mid call picked.

    Attributes
    ----------
    offsets : tuple of int
        Depth of each node of F_k, less the greatest depth in N_k; empty if N_k is.
    pool : int
        |C_k|.
    level_pool : int
        Nodes of C_k at a depth that N_k has: the pool of a method that grows layer by layer.
    """

    offsets: tuple[int, ...]
    pool: int
    level_pool: int


@dataclass
class Round:
    """What one round did.

    Attributes
    ----------
    schedule : tuple of int
        τ_1 … τ_D; all 0 once the context is too long for the mid drafter.
    accepted : int
        A.
    committed : int
        Tokens that this round gave the caller: A + 1, less what EOS or the limit cut off.
    context_tokens : int
        Committed tokens at its start, the root included.
    tree_nodes, kept_nodes : int
        |V(T)| after step D, and nodes sent to verification.
    caught_up : int
        Committed tokens that the mid drafter's first pass had to read besides the root.
    calls : list of MidCall
        Counts of each mid call.
    ranks : list of int
        Place in the pruning order of each accepted node.
    signals : list of float64 array
        The ten signals before each step; empty when nobody reads them.
    frontiers : list of int
        |N_k| before each step.
    kept : list of (int, ...)
        Token paths of the kept nodes, in pruning order; only with ``keep_trees``.
    ms : dict
        Time by part, ms: small, mid, signals, scheduler, prune, verify, accept.
    pass_ms : float
        Of ``ms["mid"]``, the time in the mid drafter's passes.
    mode : {"scheduled", "small"}
        Whether the scheduler decided, or the guard allowed small steps only.
    picks : list of Picks
        Where each mid call picked; only with ``log_picks``.
    """

    schedule: tuple[int, ...]
    context_tokens: int
    accepted: int = 0
    committed: int = 0
    tree_nodes: int = 0
    kept_nodes: int = 0
    caught_up: int = 0
    calls: list[MidCall] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    signals: list[FloatArray] = field(default_factory=list)
    frontiers: list[int] = field(default_factory=list)
    kept: list[tuple[int, ...]] = field(default_factory=list)
    ms: dict[str, float] = field(default_factory=dict)
    pass_ms: float = 0.0
    mode: str = "scheduled"
    picks: list[Picks] = field(default_factory=list)

    @property
    def draft_ms(self) -> float:
        """t_D: everything but the verification pass, ms."""
        return sum(v for k, v in self.ms.items() if k != "verify")

    @property
    def verify_ms(self) -> float:
        """t_V, ms."""
        return self.ms.get("verify", 0.0)


@dataclass
class Generation:
    """The result of a request.

    Attributes
    ----------
    tokens : list of int
        New tokens, the end-of-sequence token included if it was reached.
    rounds : list of Round
        Statistics of every round.
    plain_steps : int
        Tokens that the guard had decoded plainly.
    decisions : list of Decision
        The guard's changes of mode.
    stopped : {"eos", "length", "context", "criteria"}
        Why it ended; ``criteria`` are the stopping criteria of ``transformers``.
    prefill_ms, decode_ms : float
        Time before and after the first token, ms.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    plain_steps: int = 0
    decisions: list[Decision] = field(default_factory=list)
    stopped: str = "length"
    prefill_ms: float = 0.0
    decode_ms: float = 0.0

    @property
    def mean_accepted(self) -> float:
        """Mean A over rounds."""
        return float(np.mean([r.accepted for r in self.rounds])) if self.rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens after the first, divided by the time spent on them."""
        return 1e3 * max(0, len(self.tokens) - 1) / self.decode_ms if self.decode_ms else 0.0


class Clock:
    """Sums up time by part.

    It does not wait for the device: a mid pass and a verification end with their results'
    transfer, which does.
    """

    def __init__(self, ms: dict[str, float]):
        self._ms = ms
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part."""
        now = time.perf_counter()
        self._ms[part] = self._ms.get(part, 0.0) + 1e3 * (now - self._last)
        self._last = now

    def resume(self) -> None:
        """Leave out the time since the last lap."""
        self._last = time.perf_counter()
