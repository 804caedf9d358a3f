"""stage=compare reads replays side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline import compare
from pipeline.profile import random_artifact
from tests.pipeline.conftest import conf
from tests.test_inputs import GRID, profile
from treegraft_core import InputError


def policy(name: str, eta: float, accepted: float) -> dict:
    return {"policy": name, "eta": [eta, eta - 1, eta + 1], "A": accepted}


def cell(task: str | None, eta: float, prompts: int = 4) -> dict:
    names = [("000", eta), ("111", eta - 2), ("100", eta + 3), ("scheduler", eta + 5)]
    return {
        "task": task,
        "prompts": prompts,
        "best_fixed": "100",
        "policies": [policy(name, value, value / 10) for name, value in names],
    }


def write(data: Path, name: str, eta: float, prompts: int = 4, cells: int = 1) -> None:
    folder = data / "replay" / name
    folder.mkdir(parents=True)
    found = [*[cell(None, eta, prompts)] * cells, cell("code", eta, prompts), cell("qa", eta + 1)]
    (folder / "replay.json").write_text(json.dumps({"cells": found}))
    random_artifact(3).save(data / "schedulers" / name)
    profile(verify=GRID).save(data / "profiles" / name / "profile.json")


def test_the_first_pair_is_the_yardstick(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    write(data, "one", 20.0)
    write(data, "two", 24.0)
    settings = conf(home, "compare", f"paths.data={data}", "compare.pairs=[one,two]")
    compare.run(settings)
    found = json.loads((data / "compare" / "metrics.json").read_text())
    assert found["eta_best_fixed_two"] == 27.0 and found["eta_scheduler_one"] == 25.0
    rows = [compare.row(compare.read_replayed(data, n), compare.read_replayed(data, "one")) for n in
            ("one", "two")]  # fmt: skip
    assert [row["÷ one"] for row in rows] == ["1.000", f"{27 / 23:.3f}"]
    assert rows[1]["A, All Small"] == "2.40" and rows[1]["η"] == "27.0 (26.0 … 28.0)"
    tasks = compare.task_rows([compare.read_replayed(data, "two")])
    assert tasks[0] == {"drafters": "two", "policy": "best fixed", "code": "27.0", "qa": "28.0"}
    assert (data / "compare" / "tables.txt").read_text().count("two") >= 3


def test_what_cannot_be_compared_is_refused(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    write(data, "one", 20.0)
    write(data, "fewer", 20.0, prompts=3)
    write(data, "both", 20.0, cells=2)
    cases = {
        "[one,fewer]": r"compare\.pairs=fewer: replayed on .* collect both",
        "[both]": r"compare\.pairs=both: its replay has 2 pairs and machines",
        "[none]": "none",
        "[]": r"compare\.pairs=\[\]: give the names",
        "[../x]": r"compare\.pairs=\.\./x: names a folder",
    }
    for pairs, message in cases.items():
        with pytest.raises(InputError, match=message):
            compare.run(conf(home, "compare", f"paths.data={data}", f"compare.pairs={pairs}"))
    assert not (data / "compare").exists()
