"""A tiny pair on disk, its prompts, and the configuration that runs stages on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from pipeline import run as command_line
from pipeline.features import input_names
from pipeline.profile import random_artifact
from pipeline.run import CONF
from pipeline.value import ValueModel, build, write_value
from tests.conftest import tiny_llama, word_tokenizer
from tests.test_inputs import GRID, profile
from treegraft_core import SIGNALS

HIDDEN = (16, 16)
OVERRIDES = [
    "pair=local",
    "pair.name=tiny",
    "task=file",
    "tracker=disabled",
    "engine=float64",
    "engine.workers=0",
    "select.group=prompt",
    "select.folds=2",
    "profile.repeats=3",
    "profile.context=[16,64]",
    "profile.mid_nodes=[1,8]",
    "profile.verify_nodes=[1,16]",
    "profile.warmup_prompts=3",
    "profile.warmup_tokens=12",
    "collect.max_new_tokens=16",
    "collect.states_per_turn=3",
    "collect.prompts_per_task=6",
    "collect.replay_rounds=2",
    "drafting.width=4",
    "drafting.verify_nodes=20",
    "value.max_epochs=4",
    "distill.max_epochs=4",
    "evaluate.prompts_per_task=4",
    "evaluate.max_new_tokens=12",
    "evaluate.decode_prompts_per_task=3",
    "evaluate.warmup_tokens=6",
    "systems.fastest.candidates=[same,generate,float32]",
    "evaluate.bootstrap=50",
    "check.states=4",
    "check.prompts_per_task=2",
    "check.max_new_tokens=12",
    "check.lossless_tokens=24",
]


def write_home(folder: Path) -> Path:
    """Write the models of the tiny pair, and eight prompts, the first of two turns."""
    target, mid = tiny_llama(0), tiny_llama(0)
    generator = torch.Generator().manual_seed(1)
    for p in mid.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    for name, model in (("target", target), ("mid", mid)):
        model.save_pretrained(folder / name)
        word_tokenizer().save_pretrained(folder / name)
    rng = np.random.default_rng(0)
    lines = [
        {
            "question_id": i,
            "category": "words",
            "turns": [
                " ".join(f"w{t}" for t in rng.integers(2, 48, size=8))
                for _ in range(2 if i == 0 else 1)
            ],
        }
        for i in range(8)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_home(tmp_path_factory.mktemp("e2e"))


def overrides(home: Path, *extra: str) -> list[str]:
    """Return the overrides of the tiny pair, and ``extra`` ones."""
    few = any(o.startswith("system=") for o in extra)  # perhaps without ``fastest``
    return [
        *(o for o in OVERRIDES if not (few and o.startswith("systems."))),
        f"paths.data={home / 'data'}",
        f"pair.target.path={home / 'target'}",
        f"pair.mid.path={home / 'mid'}",
        f"task.path={home / 'prompts.jsonl'}",
        *extra,
    ]


def conf(home: Path, stage: str, *extra: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [f"stage={stage}", *overrides(home, *extra)])


def random_value(depth: int, seed: int = 0) -> ValueModel:
    """Return a value network of the right shape with random weights, signals as in the table."""
    rng = np.random.default_rng(seed)
    signals = tuple(name for name in SIGNALS if rng.random() < 0.6)
    inputs = len(input_names(depth, signals)) + depth
    module = build(inputs, HIDDEN, None, seed).eval()
    module.x_mean.copy_(torch.tensor(rng.normal(size=inputs)))
    module.x_std.copy_(torch.tensor(rng.uniform(0.5, 2, size=inputs)))
    module.y_mean.copy_(torch.tensor([2.5, 3.0, 1.5]))
    module.y_std.copy_(torch.tensor([5.0, 3.0, 1.0]))
    low, high = np.array([1.0, 0.7, 0.6]), np.array([6.0, 13.0, 4.0])
    return ValueModel((module,), depth, signals, ("tiny",), low, high)


def write_fit(data: Path, depth: int = 5, seed: int = 0) -> Path:
    """Write what evaluation reads of earlier stages, with random weights: no stage is run."""
    profile(verify=GRID).save(data / "profiles" / "tiny" / "profile.json")
    random_artifact(depth, seed).save(data / "schedulers" / "tiny")
    model = random_value(depth, seed)
    ahead = [f"ahead_{j + 1}" for j in range(depth)]
    names = [*input_names(depth, model.signals), *ahead]
    write_value(data / "value" / "tiny", model, HIDDEN, names, {})
    return data


def assert_refused(
    stage: str,
    arguments: list[str],
    data: Path,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Run the command line's own function: one line, status 2, and nothing below ``data``."""
    monkeypatch.setattr(sys, "argv", ["pipeline.run", f"stage={stage}", *arguments])
    before = sorted(data.rglob("*"))
    try:
        status = command_line.main()
    except SystemExit as stop:
        status = stop.code
    printed = capfd.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(errors) == 1, printed.err
    assert message in errors[0], errors[0]
    assert "Traceback" not in printed.err
    assert sorted(data.rglob("*")) == before
