"""TreeGraft's core: draft tree, drafters, grafting, verification, schedulers, runtime decoder.

The definitions follow arXiv 2608.26112. The package needs torch, numpy, transformers and
safetensors only; the offline stages are in ``pipeline``.

Examples
--------
>>> from treegraft_core import TreeGraftDecoder, FixedSchedule, load_pair  # doctest: +SKIP
>>> pair = load_pair("embedded:smollm2-135m-instruct", "data/drafters/smollm2-135m-4l")
... # doctest: +SKIP
>>> decoder = TreeGraftDecoder(pair, FixedSchedule([1, 0, 1, 0, 1]))  # doctest: +SKIP
>>> decoder.generate(prompt_ids, max_new_tokens=64).tokens  # doctest: +SKIP
"""

from treegraft_core.artifact import SchedulerArtifact, load_scheduler
from treegraft_core.context import Context
from treegraft_core.decoder import Caches, Generation, Round, TreeGraftDecoder, decode_plain
from treegraft_core.drafting import DraftingConfig
from treegraft_core.errors import InputError
from treegraft_core.guard import AS_DEFINED, RuntimeConfig
from treegraft_core.latency import LatencyProfile
from treegraft_core.pair import Pair, load_pair
from treegraft_core.sampling import Sampling
from treegraft_core.schedulers import (
    DistilledScheduler,
    FixedSchedule,
    RandomSchedule,
    Scheduler,
    StepState,
    all_mid,
    all_small,
)
from treegraft_core.signals import PAPER_SIGNALS, SIGNALS
from treegraft_core.tree import DraftTree

__all__ = [
    "AS_DEFINED",
    "PAPER_SIGNALS",
    "SIGNALS",
    "Caches",
    "Context",
    "DistilledScheduler",
    "DraftTree",
    "DraftingConfig",
    "FixedSchedule",
    "Generation",
    "InputError",
    "LatencyProfile",
    "Pair",
    "RandomSchedule",
    "Round",
    "RuntimeConfig",
    "Sampling",
    "Scheduler",
    "SchedulerArtifact",
    "StepState",
    "TreeGraftDecoder",
    "all_mid",
    "all_small",
    "decode_plain",
    "load_pair",
    "load_scheduler",
]
