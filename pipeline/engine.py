"""What the stages that touch models share: the pair, the drafting config, the latency profile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers.utils import logging as transformers_logging

from pipeline.small import small_drafter
from treegraft_core import (
    DraftingConfig,
    InputError,
    LatencyProfile,
    Pair,
    RuntimeConfig,
    load_pair,
)


def check_name(key: str, name: str) -> None:
    """Raise if ``name``, the value of config ``key``, cannot be the name of a folder."""
    if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise InputError(
            f"{key}={name}: names a folder; use letters, digits, dots, dashes and underscores"
        )


def open_pair(conf: DictConfig) -> Pair:
    """Load the configured pair, quietly."""
    check_name("pair.name", str(conf.pair.name))
    transformers_logging.disable_progress_bar()
    if conf.engine.threads < 0:
        raise InputError(
            f"engine.threads={conf.engine.threads}: must be 0 (torch's choice) or more"
        )
    if conf.engine.threads:
        torch.set_num_threads(int(conf.engine.threads))
    torch.manual_seed(int(conf.seed))
    return load_pair(
        str(conf.pair.target.path),
        str(conf.pair.mid.path),
        name=str(conf.pair.name),
        device=str(conf.engine.device),
        dtype=str(conf.engine.dtype),
        cache=Path(conf.paths.cache) / "models",
        pack=bool(conf.engine.pack),
        trust_remote_code=bool(conf.engine.trust_remote_code),
    )


def drafting_config(conf: DictConfig, rules: Any = None) -> DraftingConfig:
    """Return the validated drafting configuration; ``rules`` in place of ``conf.drafting``."""
    values = OmegaConf.to_container(conf.drafting if rules is None else rules, resolve=True)
    assert isinstance(values, dict)
    return DraftingConfig(**{str(k): v for k, v in values.items()}, small=small_drafter(conf))


def runtime_config(conf: DictConfig) -> RuntimeConfig:
    """Return the validated runtime configuration."""
    return RuntimeConfig(
        guard=bool(conf.runtime.guard),
        budget=conf.runtime.budget,
        compile=bool(conf.runtime.compile),
    )


def profile_path(conf: DictConfig) -> Path:
    """Return where the pair's latency profile is."""
    return Path(conf.paths.profile) / "profile.json"


def open_profile(conf: DictConfig) -> LatencyProfile:
    """Load the pair's latency profile, or say that ``stage=profile`` comes first."""
    path = profile_path(conf)
    if not path.is_file():
        raise InputError(
            f"profile={path}: not there; run python -m pipeline.run stage=profile first"
        )
    return LatencyProfile.load(path)


def drafting_rules(config: DraftingConfig) -> dict[str, int | str]:
    """Return the settings that decide trees, and so must be equal where logs are combined."""
    names = ("depth", "width", "verify_nodes", "max_ngram", "pool", "graft")
    return {**{name: getattr(config, name) for name in names}, "small": config.small.rule()}
