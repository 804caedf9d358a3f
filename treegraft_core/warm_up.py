"""T_tgt and T_mid measured in a warm-up, for a decoder that has no latency profile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treegraft_core.drafting import DraftingConfig
from treegraft_core.errors import InputError
from treegraft_core.guard import AS_DEFINED
from treegraft_core.latency import Grid, LatencyProfile
from treegraft_core.pair import Pair
from treegraft_core.schedulers import RandomSchedule

if TYPE_CHECKING:
    from treegraft_core.rounds import Round

WARM_UP_TOKENS, WARM_UP_PROMPT = 24, 64


def warm_up_profile(
    make: Any, pair: Pair, config: DraftingConfig, prompts: int = 3
) -> LatencyProfile:
    """Measure T_tgt and T_mid in a warm-up: the mean verification pass and the mean mid call.

    Random schedules decode a few tokens after meaningless prompts of 64 tokens; the first prompt
    is not counted. The other times of the profile are medians of the same rounds and one length of
    context, which is what a decoder without a profile would learn by itself. ``stage=profile``
    measures all of it over many lengths.

    Parameters
    ----------
    make : type
        `TreeGraftDecoder`.
    pair : Pair
        What is measured.
    config : DraftingConfig
        As it will be used.
    prompts : int
        Prompts that count.

    Returns
    -------
    LatencyProfile
        ``meta["measured_by"]`` is ``"warm-up"``.
    """
    decoder = make(
        pair, RandomSchedule(0), replace(config, evaluation="needed"),
        log_signals=True, runtime=AS_DEFINED,
    )  # fmt: skip
    length = max(1, min(WARM_UP_PROMPT, decoder.max_context // 2))
    rounds: list[Round] = []
    plain: list[float] = []
    for i in range(prompts + 1):
        text = [(7 * k + 11 * i + 3) % pair.target_vocab for k in range(length)]
        found = decoder.generate(text, WARM_UP_TOKENS, ()).rounds
        context = decoder.resume(text)
        started = time.perf_counter()
        decoder.plain_step(context)
        pair.synchronize()
        if i:
            rounds += found
            plain.append(1e3 * (time.perf_counter() - started))
    if not any(r.calls for r in rounds):
        raise InputError(
            "profile=None: the warm-up made no mid call, since the models' contexts are too short; "
            "run stage=profile and give its profile"
        )
    return _profile(rounds, float(np.median(plain)), length, torch.get_num_threads())


def _profile(rounds: Sequence[Round], plain_ms: float, at: int, threads: int) -> LatencyProfile:
    called = [r for r in rounds if r.calls]
    calls = sum(len(r.calls) for r in called)
    target_ms = float(np.mean([r.ms["verify"] for r in rounds]))
    mid_ms = float(sum(r.ms["mid"] for r in called)) / calls
    pass_ms = float(sum(r.pass_ms for r in called)) / calls
    nodes = [c.refresh_nodes + c.expand_nodes for r in called for c in r.calls]
    most = max(2, round(float(np.mean([r.kept_nodes + 1 for r in rounds]))))

    def grid(tokens: tuple[int, ...], ms: tuple[float, ...]) -> Grid:
        return Grid(tokens, (at,), tuple((t,) for t in ms), tuple((0.0,) for _ in ms))

    def per(part: str, pieces: Sequence[int]) -> float:
        each = [r.ms[part] / n for r, n in zip(rounds, pieces, strict=True) if n]
        return float(np.median(each)) if each else 0.0

    steps = [len(r.schedule) for r in rounds]
    return LatencyProfile(
        mid=grid((max(1, round(float(np.mean(nodes)))),), (pass_ms,)),
        verify=grid((1, most), (min(plain_ms, target_ms), target_ms)),
        plain_ms=plain_ms,
        small_ms=per("small", [r.schedule.count(0) for r in rounds]),
        mid_overhead_ms=max(0.0, mid_ms - pass_ms),
        signals_ms=per("signals", steps),
        scheduler_ms=per("scheduler", steps),
        prune_ms=per("prune", [1] * len(rounds)),
        accept_ms=per("accept", [1] * len(rounds)),
        target_ms=target_ms,
        mid_ms=mid_ms,
        evaluation="needed",
        meta={"measured_by": "warm-up", "rounds": len(rounds), "calls": calls, "threads": threads},
    )
