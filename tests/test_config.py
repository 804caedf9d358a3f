"""Every configuration composes, and every key is read by somebody."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
STAGES = sorted(p.stem for p in (CONF / "stage").glob("*.yaml"))
REQUIRED = {
    ("pair", "local"): ["pair.name=mine", "pair.target.path=a", "pair.mid.path=b"],
    ("task", "file"): ["task.path=prompts.jsonl"],
    ("small", "python"): ["small.drafter=package.module:Class"],
}


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def choices() -> list[tuple[str, str]]:
    return sorted(
        (p.parent.name, p.stem) for p in CONF.glob("*/*.yaml") if p.parent.name != "stage"
    )


@pytest.mark.parametrize(("group", "name"), choices())
def test_every_choice_composes_and_resolves(group: str, name: str) -> None:
    conf = composed("stage=collect", f"{group}={name}", *REQUIRED.get((group, name), []))
    assert not OmegaConf.missing_keys(conf)
    OmegaConf.to_container(conf, resolve=True)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_function(stage: str) -> None:
    import importlib

    conf = composed(f"stage={stage}")
    module, _, function = conf.stage.run._target_.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))


def leaves(conf: DictConfig, prefix: str = "") -> list[str]:
    found = []
    for key, value in OmegaConf.to_container(conf, resolve=False).items():  # type: ignore[union-attr]
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found += leaves(OmegaConf.create(value), name + ".")
        else:
            found.append(name)
    return found


def test_no_key_is_dead() -> None:
    conf = composed("stage=collect")
    source = "\n".join(
        p.read_text()
        for folder in ("pipeline", "treegraft_core")
        for p in (ROOT / folder).glob("*.py")
    )
    yaml = "\n".join(p.read_text() for p in CONF.rglob("*.yaml"))
    dead = []
    for key in leaves(conf):
        if key.startswith(("hydra.", "stage.")):
            continue
        name = key.split(".")[-1]
        used = re.search(rf"""(\.{name}\b|["']{name}["'])""", source)
        interpolated = "${" + key + "}" in yaml
        if not used and not interpolated:
            dead.append(key)
    assert not dead, f"nothing reads {dead}"


def test_the_papers_ten_pairs_are_there() -> None:
    names = {p.stem for p in (CONF / "pair").glob("*.yaml")}
    paper = {
        "qwen3-32b-1.7b",
        "qwen3-32b-0.6b",
        "qwen3-32b-8b",
        "llama3-70b-1b",
        "llama3-70b-3b",
        "llama3-8b-1b",
        "qwen3-32b-4b",
        "qwen3-8b-0.6b",
        "llama3-70b-8b",
        "llama3-8b-3b",
    }
    assert paper <= names
