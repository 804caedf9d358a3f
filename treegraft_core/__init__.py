"""TreeGraft's core: draft tree, drafters, grafting, verification, schedulers, runtime decoder.

The definitions follow arXiv 2608.26112. The package needs torch, numpy, transformers and
safetensors only; the offline stages are in ``pipeline``.

Examples
--------
>>> from treegraft_core import TreeGraftDecoder  # doctest: +SKIP
>>> decoder = TreeGraftDecoder.from_pretrained(  # doctest: +SKIP
...     "embedded:smollm2-135m-instruct", "data/drafters/smollm2-135m-4l", scheduler="1,0,1,0,1"
... )
>>> decoder.generate("What is a tree?", max_new_tokens=64, chat=True).tokens  # doctest: +SKIP
>>> model = decoder.pair.target  # doctest: +SKIP
>>> model.generate(**inputs, custom_generate=decoder.custom_generate)  # doctest: +SKIP
"""

from treegraft_core.artifact import SchedulerArtifact, load_scheduler
from treegraft_core.context import Context
from treegraft_core.custom_generate import CustomGenerate, write_custom_generate
from treegraft_core.decoder import Caches, TreeGraftDecoder, decode_plain
from treegraft_core.drafting import DraftingConfig
from treegraft_core.errors import InputError, StageError
from treegraft_core.guard import AS_DEFINED, RuntimeConfig
from treegraft_core.latency import LatencyProfile
from treegraft_core.mid import MidCache, MidCacheBase
from treegraft_core.pair import Pair, load_pair
from treegraft_core.rounds import Generation, Round
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
from treegraft_core.small import Chain, NGramDrafter, SmallDrafter
from treegraft_core.suffix import SuffixDrafter
from treegraft_core.tree import DraftTree

__all__ = [
    "AS_DEFINED",
    "PAPER_SIGNALS",
    "SIGNALS",
    "Caches",
    "Chain",
    "Context",
    "CustomGenerate",
    "DistilledScheduler",
    "DraftTree",
    "DraftingConfig",
    "FixedSchedule",
    "Generation",
    "InputError",
    "LatencyProfile",
    "MidCache",
    "MidCacheBase",
    "NGramDrafter",
    "Pair",
    "RandomSchedule",
    "Round",
    "RuntimeConfig",
    "Sampling",
    "Scheduler",
    "SchedulerArtifact",
    "SmallDrafter",
    "StageError",
    "StepState",
    "SuffixDrafter",
    "TreeGraftDecoder",
    "all_mid",
    "all_small",
    "decode_plain",
    "load_pair",
    "load_scheduler",
    "write_custom_generate",
]
