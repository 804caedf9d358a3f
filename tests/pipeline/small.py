"""What the tests of the offline stages share: the real configuration at depth 3, whole texts."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, ClassVar

from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer
from omegaconf import DictConfig

from pipeline.report import Stage
from pipeline.run import CONF
from pipeline.tries import Tries, join, read_tries
from tests.pipeline.synthetic import RULE_SIGNAL, write_texts
from treegraft_core import SIGNALS

DEPTH = 3
PAIR = "smollm2-135m"
CHOSEN = (SIGNALS[0], RULE_SIGNAL)
TASKS = ("math", "code")
FEW = (
    f"drafting.depth={DEPTH}",
    "tracker=disabled",
    "value.hidden=[32,32]",
    "value.batch_size=128",
    "value.block_states=32",
    "value.max_epochs=6",
    "distill.hidden=[16,8]",
    "distill.batch_size=64",
    "distill.max_epochs=12",
    "distill.rollout_epochs=3",
    "distill.block_states=32",
)


def config(data: Path, stage: str, *overrides: str) -> DictConfig:
    """Compose the real configuration with its data below ``data``."""
    fixed = [f"stage={stage}", f"paths.data={data}", *FEW]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=[*fixed, *overrides])


def a_stage(conf: DictConfig, folder: Path) -> Stage:
    """Return the run of the configured stage, without a tracker."""
    return Stage(conf, str(conf.stage.name), folder)


def texts(folder: Path, prompts: int, length: int, seed: int = 0, pair: str = PAIR) -> Tries:
    """Write whole texts of the planted rule below ``folder`` and read them."""
    write_texts(folder, pair, prompts, length, seed, depth=DEPTH, tasks=TASKS)
    return join([read_tries(folder / "trajectories/collect" / f"pair={pair}", pair, "", DEPTH)])


def write_selection(data: Path, fit: str, pairs: list[str]) -> None:
    """Write what the stages read of ``selection.json``."""
    path = data / "selection" / fit / "selection.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"signals": list(CHOSEN), "pairs": pairs}))


class Sending(Trainer):  # type: ignore[misc]
    """Pickles what Lightning would send to the processes that it spawns; trains in this one."""

    sent: ClassVar[list[int]] = []

    def fit(self, *args: Any, **kwargs: Any) -> None:
        self.sent.append(len(pickle.dumps((self, args, kwargs))))
        super().fit(*args, **kwargs)
