"""What stage=export notes of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pipeline.export import costs_of, drafters_of
from pipeline.manifest import HEADER, header_record, seal
from tests.pipeline.small import config
from treegraft_core.trained import Drafters

RULES = {"drafting.depth": 3}
MID = {"models.mid": "0a1b2c", "models.mid_family": "student"}


def manifest(data: Path, pair: str, known: dict[str, Any]) -> None:
    """Write the first line of a pair's dataset, as its first segment has it."""
    folder = data / "trajectories" / "collect" / f"pair={pair}"
    name = HEADER.replace("00000-dataset", "00001-abc")
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(seal(header_record({"config": {**RULES, **known}})))


def test_drafters_are_those_of_the_trajectories(tmp_path: Path) -> None:
    """The small drafter's rule has settings after its name; without one it is the n-gram."""
    manifest(tmp_path, "one", MID)
    manifest(tmp_path, "two", {**MID, "drafting.small": 'suffix {"chain": 12}'})
    conf = config(tmp_path, "export")
    assert drafters_of(conf, ("one", "two")) == (
        Drafters("ngram", "student", "one", "0a1b2c"),
        Drafters("suffix", "student", "two", "0a1b2c"),
    )


@pytest.mark.parametrize("known", [{}, None])
def test_drafters_that_nobody_noted(
    tmp_path: Path, known: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one pair: then nothing is known of all, for a part would refuse what was trained on."""
    manifest(tmp_path, "one", MID)
    if known is not None:
        manifest(tmp_path, "two", known)
    assert drafters_of(config(tmp_path, "export"), ("one", "two")) == ()
    assert "note: the trajectories of two do not say which drafters" in capsys.readouterr().out


def test_costs_are_the_ends_over_all_labels() -> None:
    """The ratio is of the same row, not of the ends."""
    labels = pd.DataFrame({"target_ms": [10.0, 40.0, 30.0], "mid_ms": [5.0, 4.0, 20.0]})
    labels = labels.astype(np.float32)
    assert costs_of(labels) == {
        "target_ms": (10.0, 40.0),
        "mid_ms": (4.0, 20.0),
        "ratio": (1.5, 10.0),
    }
