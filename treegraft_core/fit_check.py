"""Whether a scheduler fits the decoder that is to be built with it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from treegraft_core.artifact import SchedulerArtifact
from treegraft_core.drafting import DraftingConfig
from treegraft_core.errors import InputError
from treegraft_core.trained import FAR, WIDTHS

if TYPE_CHECKING:
    from treegraft_core.latency import LatencyProfile

log = logging.getLogger(__name__)

ALLOWED = ("drafters", *WIDTHS)
"""What may differ from the training if one says so. Depth and signals are its inputs: never."""


def families(pair: Any, config: DraftingConfig) -> tuple[str, str]:
    """Return the families of the small and the mid drafter.

    Returns
    -------
    small : str
        The ``name`` of ``config.small``: ``ngram``, ``suffix``, or a user's own.
    mid : str
        ``causal_lm`` for a model of ``transformers``, ``student`` for one with a draft vocabulary,
        else the drafter's ``family``, such as ``head``, or the name of its class.
    """
    mid = pair.mid
    if isinstance(mid, PreTrainedModel):
        return config.small.name, "causal_lm" if pair.vocabulary is None else "student"
    return config.small.name, str(getattr(mid, "family", type(mid).__name__))


def check_scheduler(
    scheduler: Any, pair: Any, config: DraftingConfig, profile: LatencyProfile | None
) -> None:
    """Check the artifact of a distilled scheduler, as `check_fits` does; others have none."""
    artifact = getattr(scheduler, "artifact", None)
    if isinstance(artifact, SchedulerArtifact):
        small, mid = families(pair, config)
        check_fits(artifact, config, small, mid, profile, getattr(scheduler, "allow", ()))


def check_fits(
    artifact: SchedulerArtifact,
    config: DraftingConfig,
    small: str,
    mid: str,
    profile: LatencyProfile | None = None,
    allow: Collection[str] = (),
) -> None:
    """Raise if a scheduler was trained for another decoder; warn of what it was not trained on.

    W and n_max decide which trees grow, and with them every signal: another one is refused. B_ver
    decides neither. Trees and signals are the same, and of a smaller B_ver A and t_V follow from
    the logged rows (the first nodes of the same pruning order are verified, as the decoder's own
    guard does): a smaller one is taken, with a warning, for margins are those of the larger. What
    a larger B_ver brings is in no log, so it is refused. T_tgt and T_mid are inputs: their ratio
    may lie outside the training's range, but more than `FAR` times outside there is a warning.

    Parameters
    ----------
    artifact : SchedulerArtifact
        The scheduler.
    config : DraftingConfig
        The decoder's.
    small, mid : str
        The decoder's drafters, as `families` names them.
    profile : LatencyProfile, optional
        Of this machine and pair.
    allow : collection of str
        What may differ all the same, with a warning: of ``drafters``, ``width``, ``verify_nodes``
        and ``max_ngram``.

    Raises
    ------
    InputError
        If it does not fit; one line with argument, value and fix.
    """
    unknown = [name for name in allow if name not in ALLOWED]
    if unknown:
        raise InputError(f"allow={unknown[0]}: choose of {', '.join(ALLOWED)}")
    if config.depth != artifact.depth:
        raise InputError(
            f"drafting.depth={config.depth}: the scheduler was trained for depth "
            f"{artifact.depth}; decode with that or train another"
        )
    if artifact.trained.missing:
        _tell(
            f"scheduler: does not say what {', '.join(artifact.trained.missing)} it was trained "
            "with (an old folder, or the paper's literal): not checked"
        )
    for name in artifact.trained.widths:
        _width(artifact, config, name, allow)
    _drafters(artifact, small, mid, allow)
    if profile is not None:
        _ratio(artifact, profile)


def _refuse(message: str, fix: str, name: str, allow: Collection[str]) -> None:
    if name not in allow:
        raise InputError(f'{message}; {fix}, or take it all the same with allow=("{name}",)')
    _tell(f"{message}; allow={name} takes it")


def _width(
    artifact: SchedulerArtifact, config: DraftingConfig, name: str, allow: Collection[str]
) -> None:
    ours, theirs = int(getattr(config, name)), artifact.trained.widths[name]
    if ours == theirs:
        return
    message = f"drafting.{name}={ours}: the scheduler was trained with {theirs}"
    if name == "verify_nodes" and ours < theirs:
        _tell(
            f"{message}; trees and signals are the same, its margins are of the larger budget; "
            "one of its own is distilled from the same trajectories"
        )
        return
    _refuse(message, f"give drafting.{name}={theirs} or train another", name, allow)


def _drafters(artifact: SchedulerArtifact, small: str, mid: str, allow: Collection[str]) -> None:
    trained = {(each.small, each.mid): None for each in artifact.trained.drafters}
    if not trained or (small, mid) in trained:
        return
    known = " or ".join(f"{a} and {b}" for a, b in trained)
    _refuse(
        f"small={small}, mid={mid}: the scheduler was trained with {known}",
        "decode with those or train one for these",
        "drafters",
        allow,
    )


def _ratio(artifact: SchedulerArtifact, profile: LatencyProfile) -> None:
    ends = artifact.trained.costs.get("ratio")
    if ends is None or not profile.target_ms > 0 < profile.mid_ms:
        return
    ratio = profile.target_ms / profile.mid_ms
    if not ends[0] / FAR <= ratio <= ends[1] * FAR:
        _tell(
            f"profile: T_tgt / T_mid is {ratio:.4g} (T_tgt {profile.target_ms:.4g} ms, T_mid "
            f"{profile.mid_ms:.4g} ms), the scheduler was trained on {ends[0]:.4g} to "
            f"{ends[1]:.4g}; more than {FAR:g} times outside, its decisions may be poor: distil "
            "one for this machine"
        )


@lru_cache(maxsize=256)
def _tell(line: str) -> None:
    # A stage builds many decoders of one scheduler; it is said once.
    log.warning("%s", line)
