"""The guard: speculate only as far as it pays on this machine and this text.

Whether a round is worth its time depends on the machine (what a pass over n tokens costs beside
one token) and on the text (how many drafted tokens the target takes). Both are measured while
decoding, across requests. Two decisions follow:

- *How many nodes to verify.* The pruning order stays; its length is the budget B ≤ B_ver that
  makes the expected number of committed tokens, less the time they take at the best known rate,
  largest. Expected acceptance comes from the acceptance rates of edges, counted by log p and
  drafter.
- *Whether to speculate at all.* The rate of each way of decoding (plain steps, small-drafted
  rounds, scheduled rounds) is a running mean; the best one goes on. While decoding plainly, small
  drafts are made and judged by the tokens that follow, which costs no pass; scheduled rounds are
  probed again after a while. What rounds may lose to plain decoding in a request is bounded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from treegraft_core import kernels
from treegraft_core.errors import InputError
from treegraft_core.latency import LatencyProfile
from treegraft_core.tree import DraftTree, FloatArray, IntArray

Mode = Literal["plain", "small", "scheduled"]

MEMORY = 0.9
"""Weight of the past in a running mean, a round."""
INITIAL_LOSS = 0.012
LOSS_RATE = 0.006
"""What rounds may lose to plain decoding: shares of the request's most, and of its past, tokens."""
LONGEST_CREDIT = 256
"""Tokens of a request that count at its start: it may end early."""
SHADOW_SHARE = 0.01
FIRST_WAIT, LONGEST_WAIT = 8, 64
"""Steps after which scheduled rounds that did not pay are probed again; the wait doubles."""
PRIOR_TOKENS = 2.0
"""Committed tokens expected of a round before the first one."""
EDGE_MEMORY, TEXT_MEMORY = 0.999, 0.95
PRIOR_EDGES, PRIOR_TAKEN = 4.0, 4.0
MID_PRIOR = (0.99, 0.95, 0.83, 0.62, 0.36, 0.16, 0.04, 0.005)
SMALL_PRIOR = (0.02, 0.15, 0.3, 0.45, 0.6, 0.7, 0.8)
COARSE_PRIOR = (1.0, 0.7, 0.4)
"""Rates of edges before the first one: by the mid drafter's log p; by tokens matched x log p."""


@dataclass(frozen=True)
class RuntimeConfig:
    """How the decoder runs; none of it changes a token.

    Attributes
    ----------
    guard : bool
        Decode plainly for a while when no schedule is expected to pay.
    budget : {"auto", "fixed"}
        Nodes verified: as many as pay, at most B_ver; or always B_ver.
    compile : bool
        Passes of few fixed shapes through ``torch.compile``, with CUDA graphs on a GPU.
    """

    guard: bool = True
    budget: Literal["auto", "fixed"] = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        if self.budget not in ("auto", "fixed"):
            raise InputError(f"runtime.budget={self.budget}: choose one of auto, fixed")


AS_DEFINED = RuntimeConfig(guard=False, budget="fixed")
"""Rounds exactly as the design's section 2 has them, always."""


@dataclass(frozen=True)
class Decision:
    """A change of mode, and why.

    Attributes
    ----------
    at_token : int
        New tokens of the request so far.
    mode : {"plain", "small", "scheduled"}
        What comes next.
    rates : dict
        Expected tokens/s of each mode.
    """

    at_token: int
    mode: Mode
    rates: dict[str, float]


@dataclass
class RunningRate:
    """Tokens and time of a way of decoding, the past fading."""

    tokens: float
    ms: float
    weight: float = 1.0

    def add(self, tokens: float, ms: float) -> None:
        """Count one more round."""
        self.tokens = MEMORY * self.tokens + tokens
        self.ms = MEMORY * self.ms + ms
        self.weight = MEMORY * self.weight + 1.0

    @property
    def rate(self) -> float:
        """Tokens a ms."""
        return self.tokens / self.ms


class PassCost:
    """Time of a target pass by its tokens, from what passes have taken and, if given, a profile.

    What passes of about n tokens have taken is a running mean for each power of two. A profile is
    scaled by the ratio to it, so that its shape may be wrong too.
    """

    def __init__(self, profile: LatencyProfile | None):
        self._profile = profile
        self._points: dict[int, float] = {}  # ms, or with a profile the ratio to it
        self._base: FloatArray = np.zeros(0)
        self._base_at = -1

    @property
    def known(self) -> bool:
        """Whether anything is known of one token's pass."""
        return self._profile is not None or 1 in self._points

    @property
    def explored(self) -> float:
        """Most tokens of a pass of which the time can be told; longer ones are tried by and by."""
        return float("inf") if self._profile is not None else 8.0 * max(self._points)

    def add(self, tokens: int, context: int, ms: float) -> None:
        """Count a pass that was timed."""
        if self._profile is not None:
            ms /= float(self._profiled(tokens, context)[tokens - 1])
        bucket = 1 << (tokens - 1).bit_length()
        old = self._points.get(bucket, ms)
        # A pass may be slow by chance, hardly fast: a faster one counts for more.
        self._points[bucket] = old + (0.5 if ms < old else 1 - MEMORY) * (ms - old)

    def up_to(self, tokens: int, context: int) -> FloatArray:
        """Return the expected time of passes of 1, 2, … ``tokens`` tokens, ms.

        Flat where nothing is known of longer passes.
        """
        if self._profile is None:
            known = sorted(self._points)
            values = np.maximum.accumulate([self._points[n] for n in known])
            return np.asarray(np.interp(np.arange(1, tokens + 1), known, values))
        base = self._profiled(tokens, context)[:tokens]
        if not self._points:
            return base
        known = sorted(self._points)
        ratios = [self._points[n] for n in known]
        return base * np.interp(np.arange(1, tokens + 1), known, ratios)

    def one(self, context: int) -> float:
        """Return the expected time of one token's pass, ms."""
        if self._profile is None:
            return self._points[1]
        ratio = self._points[min(self._points)] if self._points else 1.0
        return ratio * float(self._profiled(1, context)[0])

    def _profiled(self, tokens: int, context: int) -> FloatArray:
        # The profile is read anew every 64 tokens of context.
        assert self._profile is not None
        if self._base_at != context // 64 or len(self._base) < tokens:
            most = max(tokens, len(self._base), 64)
            self._base_at = context // 64
            self._base = np.asarray(self._profile.verify.at(np.arange(1, most + 1), context))
        return self._base


@dataclass
class _Shadow:
    # A small draft made while decoding plainly, to be judged by the tokens that follow.
    tree: DraftTree
    kept: IntArray
    at: int
    ms: float


class EdgeRates:
    """How often the target takes a drafted edge, given that it took the path to it.

    Rates by :func:`kernels.edge_bin` are learned across requests; a factor for the request at hand
    says how its text differs.
    """

    def __init__(self) -> None:
        evidence = np.repeat(SMALL_PRIOR, 3) * np.tile(COARSE_PRIOR, len(SMALL_PRIOR))
        self._tried = np.full(kernels.EDGE_BINS, PRIOR_EDGES)
        self._taken = PRIOR_EDGES * np.concatenate([MID_PRIOR, evidence])
        self.begin()

    def begin(self) -> None:
        """Start a request."""
        self._expected = self._seen = PRIOR_TAKEN

    @property
    def rate(self) -> FloatArray:
        """Acceptance rate of each bin."""
        factor = min(1.5, self._seen / self._expected)
        return np.minimum(0.99, factor * self._taken / self._tried)

    def learn(self, tree: DraftTree, continuation: IntArray) -> None:
        """Count the edges below the nodes that the target took."""
        tried, taken = np.zeros(kernels.EDGE_BINS), np.zeros(kernels.EDGE_BINS)
        kernels.count_edges(tree.node, continuation, tried, taken)
        expected = tried @ (self._taken / self._tried)
        self._expected = TEXT_MEMORY * self._expected + (1 - TEXT_MEMORY) * PRIOR_TAKEN + expected
        self._seen = TEXT_MEMORY * self._seen + (1 - TEXT_MEMORY) * PRIOR_TAKEN + taken.sum()
        self._tried = EDGE_MEMORY * self._tried + tried
        self._taken = EDGE_MEMORY * self._taken + taken


@dataclass
class Guard:
    """Decides how each step of a request is decoded; learns across requests.

    Parameters
    ----------
    runtime : RuntimeConfig
        What it may decide.
    profile : LatencyProfile, optional
        Costs until they are measured.
    has_schedule : bool
        The scheduler may call the mid drafter, so scheduled rounds differ from small ones.
    """

    runtime: RuntimeConfig
    profile: LatencyProfile | None = None
    has_schedule: bool = True
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cost = PassCost(self.profile)
        self.edges = EdgeRates()
        self._rates: dict[str, RunningRate] = {}
        self._shadows: deque[_Shadow] = deque()
        self._shadow_ms = 0.0
        self._wait, self._waited = FIRST_WAIT, FIRST_WAIT
        self.begin(1)

    def begin(self, max_new_tokens: int) -> None:
        """Start a request."""
        self.decisions = []
        self.edges.begin()
        self._shadows.clear()
        self._most = min(max_new_tokens, LONGEST_CREDIT)
        self._lost = 0.0
        self._tokens = 0
        self._since_shadow = 0

    # What to do next ------------------------------------------------------------------------

    def choose(self, context: int) -> Mode:
        """Return how to decode the next tokens at a context of ``context`` tokens."""
        mode = self._best(context) if self.runtime.guard else "scheduled"
        if not self.decisions or self.decisions[-1].mode != mode:
            rates = {name: 1e3 * r.rate for name, r in self._rates.items()}
            if self.cost.known:
                rates["plain"] = 1e3 / self.plain_ms(context)
            self.decisions.append(Decision(self._tokens, mode, rates))
        return mode

    def plain_ms(self, context: int) -> float:
        """Expected time of one plain step, ms."""
        return self.cost.one(context)

    def _best(self, context: int) -> Mode:
        if not self.cost.known:
            return "plain"
        plain = self.plain_ms(context)
        modes: list[Mode] = ["small", "scheduled"] if self.has_schedule else ["small"]
        for mode in modes:
            if mode not in self._rates:
                self._rates[mode] = self._prior(mode, context)
        best: Mode = max(modes, key=lambda mode: self._rates[mode].rate)
        if self._rates[best].rate < 1.0 / plain:
            best = "plain"
        probe = modes[-1]
        if best != probe and self._waited >= self._wait and self._affords(probe, plain):
            self._waited = 0
            self._wait = min(2 * self._wait, LONGEST_WAIT)
            return probe
        if best == "plain" or not self._affords(best, plain):
            return "plain"
        if best == probe:
            self._wait, self._waited = FIRST_WAIT, 0
        return best

    def _affords(self, mode: Mode, plain: float) -> bool:
        # What one more round is expected to lose, on top of what was lost, must be allowed.
        rate = self._rates[mode]
        expected = max(0.0, (rate.ms - rate.tokens * plain) / rate.weight)
        allowed = plain * (INITIAL_LOSS * self._most + LOSS_RATE * self._tokens)
        return self._lost + expected <= allowed

    def _prior(self, mode: Mode, context: int) -> RunningRate:
        ms = float(self.cost.up_to(8 if self.runtime.budget == "auto" else 64, context)[-1])
        if mode == "scheduled" and self.profile is not None:
            ms += 2 * self.profile.mid_ms
        return RunningRate(PRIOR_TOKENS, ms)

    def budget(self, tree: DraftTree, kept: IntArray, context: int) -> IntArray:
        """Return the part of ``kept`` that pays: at most all, perhaps nothing."""
        if self.runtime.budget == "fixed" or not self.cost.known or not len(kept):
            return kept
        kept = kept[: int(min(len(kept), self.cost.explored - 1))]
        reach = kernels.reach_of(tree.node, tree.size, self.edges.rate)
        gain = np.concatenate([[0.0], np.cumsum(reach[kept])])
        ms = self.cost.up_to(len(kept) + 1, context)
        rate = max([1.0 / ms[0], *(r.rate for r in self._rates.values())])
        return kept[: int(np.argmax(gain - rate * ms))]

    # What came of it ------------------------------------------------------------------------

    def plain_step(self, context: int, ms: float) -> None:
        """Count a plain step."""
        self.cost.add(1, context, ms)
        self._tokens += 1
        self._waited += 1
        self._since_shadow += 1

    def round(
        self, mode: Mode, tree: DraftTree, tokens: IntArray, kept: int, context: int,
        verify_ms: float, ms: float,
    ) -> None:  # fmt: skip
        """Count a round that committed ``tokens`` after ``kept`` nodes were verified."""
        self.edges.learn(tree, tokens)
        self.cost.add(kept + 1, context, verify_ms)
        self._tokens += len(tokens)
        self._waited += mode != "scheduled"
        if mode in self._rates:
            self._rates[mode].add(len(tokens), ms)
        if self.cost.known:
            self._lost += ms - len(tokens) * self.plain_ms(context)
            self._lost = max(self._lost, -INITIAL_LOSS * self._most * self.plain_ms(context))

    def shadow_due(self, context: int) -> bool:
        """Whether a small draft should be made beside a plain step: they take a share of it."""
        worth = self._shadow_ms <= SHADOW_SHARE * self._since_shadow * self.plain_ms(context)
        return self._since_shadow >= 2 and worth and len(self._shadows) < 8

    def shadow(self, tree: DraftTree, kept: IntArray, at: int, ms: float) -> None:
        """Remember a small draft at a context of ``at`` tokens that took ``ms``."""
        self._shadows.append(_Shadow(tree, kept, at, ms))
        first = self._shadow_ms == 0.0
        self._shadow_ms = ms if first else MEMORY * self._shadow_ms + (1 - MEMORY) * ms
        self._since_shadow = 0
        self._lost += ms

    def judge(self, tokens: IntArray, reach: int) -> None:
        """Judge the small drafts whose continuation is known by now.

        Parameters
        ----------
        tokens : int64 array
            The committed tokens.
        reach : int
            Tokens after the root that decide everything.
        """
        while self._shadows and len(tokens) >= self._shadows[0].at + reach:
            shadow = self._shadows.popleft()
            known = tokens[shadow.at : shadow.at + reach]
            path, _ = kernels.accepted(shadow.tree.node, shadow.tree.size, shadow.kept, known)
            if "small" in self._rates:
                ms = shadow.ms + float(self.cost.up_to(len(shadow.kept) + 1, shadow.at)[-1])
                self._rates["small"].add(len(path) + 1, ms)
            self.edges.learn(shadow.tree, known)
