"""Units of work of stage=collect: one prompt of one task for one pair.

What a unit's rows are follows from the configuration and the seed alone: not from the order of
units, from what is decoded or enumerated beside it, or from which worker does it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig

from pipeline.engine import drafting_config, drafting_rules
from pipeline.inputs import digest
from pipeline.manifest import UnitKey
from pipeline.schema import SCHEMA_VERSION
from pipeline.tasks import TaskPrompt
from treegraft_core import InputError


@dataclass(frozen=True)
class Unit:
    """One prompt of one task, with all its turns."""

    prompt: TaskPrompt

    @property
    def key(self) -> UnitKey:
        """Task and prompt id."""
        return self.prompt.task, self.prompt.prompt.question_id

    @property
    def digest(self) -> str:
        """Of the prompt's text: another text under the same id is another unit."""
        return digest(list(self.prompt.prompt.turns))

    def __str__(self) -> str:
        return f"task={self.key[0]}, question_id={self.key[1]}"


def plan(conf: DictConfig, prompts: Sequence[TaskPrompt]) -> list[Unit]:
    """Return the units of this run: all prompts, or those of its shard.

    Raises
    ------
    InputError
        If the shard is not one of ``collect.shards``, or two prompts of a task share an id.
    """
    shard, shards = int(conf.collect.shard), int(conf.collect.shards)
    if not 0 <= shard < shards:
        raise InputError(
            f"collect.shard={shard}: must be from 0 to {shards - 1} (collect.shards={shards})"
        )
    units = [Unit(p) for p in prompts]
    if len({unit.key for unit in units}) < len(units):
        keys = [unit.key for unit in units]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"task={twice[0]}: question_id={twice[1]} repeats; make ids unique")
    return [unit for unit in units if zlib.crc32("\0".join(unit.key).encode()) % shards == shard]


def rng_of(seed: int, unit: Unit, turn: int) -> np.random.Generator:
    """Return the random numbers of one turn."""
    name = zlib.crc32("\0".join((*unit.key, str(turn))).encode())
    return np.random.default_rng([seed, name])


def settings(conf: DictConfig, models: dict[str, Any]) -> dict[str, Any]:
    """Return what decides the values of a dataset, flat: units of another one do not mix with them.

    Left out is what changes them by rounding at the most (threads, device, the memory of a pack)
    and the latency profile, which is a part of the dataset.

    Parameters
    ----------
    conf : DictConfig
        The composed configuration.
    models : dict
        What a worker says of the models that it has loaded: fingerprints and dtype.
    """
    rules = drafting_rules(drafting_config(conf))
    return {
        "schema_version": SCHEMA_VERSION,
        "pair.name": str(conf.pair.name),
        "collect.split": str(conf.collect.split),
        "collect.max_new_tokens": int(conf.collect.max_new_tokens),
        "collect.states_per_turn": int(conf.collect.states_per_turn),
        "seed": int(conf.seed),
        **{f"drafting.{name}": value for name, value in rules.items()},
        **models,
    }
