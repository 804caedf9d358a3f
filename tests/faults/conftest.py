"""The pair, the template process and the uninterrupted dataset that all fault tests share."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.faults.harness import Bench
from tests.pipeline.conftest import write_home
from tests.processes import Template
from tests.test_inputs import GRID, profile

PROMPTS = 14
KILLS = int(os.environ.get("FAULTS_KILLS", "56"))
"""Kills of the whole suite; ``make faults`` takes more."""


@pytest.fixture(scope="session")
def pair_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the models, prompts of one to three turns, and a latency profile."""
    home = write_home(tmp_path_factory.mktemp("faults"))
    rng = np.random.default_rng(1)
    lines = [
        {
            "question_id": f"p{i}",
            "category": "words",
            "turns": [
                " ".join(f"w{t}" for t in rng.integers(2, 40, size=rng.integers(3, 30)))
                for _ in range(1 + (i % 5 == 0) + (i == 10))
            ],
        }
        for i in range(PROMPTS)
    ]
    # One that does not fit: a unit without states.
    lines.append({"question_id": "long", "category": "words", "turns": ["w3 " * 400]})
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    profile(verify=GRID).save(home / "data" / "profiles" / "tiny" / "profile.json")
    return home


@pytest.fixture
def bench(template: Template, pair_home: Path, tmp_path: Path) -> Bench:
    return Bench(template, pair_home, tmp_path)


@pytest.fixture(scope="session")
def whole(
    template: Template, pair_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Return the part files of a collection that nothing interrupts, by SHA-256."""
    bench = Bench(template, pair_home, tmp_path_factory.mktemp("whole"))
    assert bench.collect("engine.workers=0") == 0, bench.output
    assert len(bench.parts()) == PROMPTS
    assert set(bench.units().values()) == {"done", "empty"}
    return bench.parts()
