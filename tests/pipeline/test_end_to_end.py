"""All stages in order on a tiny pair, through the real configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pipeline import check, collect, distill, evaluate, export, label, profile, select, value
from tests.pipeline.conftest import conf
from treegraft_core import InputError, load_scheduler


@pytest.fixture(scope="module")
def done(home: Path) -> Path:
    for name, stage in (
        ("profile", profile),
        ("collect", collect),
        ("select", select),
        ("value", value),
        ("label", label),
        ("distill", distill),
        ("export", export),
        ("evaluate", evaluate),
        ("check", check),
    ):
        stage.run(conf(home, name))
    return home / "data"


def test_trajectories_open_with_pandas(done: Path) -> None:
    frame = pd.read_parquet(done / "trajectories" / "collect")
    assert {"pair", "task", "state_id", "accepted"} <= set(frame.columns)
    assert set(frame["pair"].astype(str)) == {"tiny"}
    assert (frame.groupby("state_id").size() == 160).all()
    per_schedule = frame.groupby(["state_id", "schedule"])
    assert (per_schedule["t_draft_ms"].nunique() == 1).all()
    assert (per_schedule["step"].agg(list).map(lambda s: s == [1, 2, 3, 4, 5])).all()
    assert (frame["committed"] == frame["accepted"] + 1).all()
    assert (
        frame["prefix"] + frame["action"].astype(str) + frame["future"] == frame["schedule"]
    ).all()


def test_every_stage_left_metrics_and_provenance(done: Path) -> None:
    folders = [
        "profiles/tiny",
        "trajectories/meta/tiny",
        "selection/tiny",
        "value/tiny",
        "labels/tiny",
        "distill/tiny",
        "schedulers/tiny",
        "evaluation/tiny",
        "checks/tiny",
    ]
    for folder in folders:
        assert json.loads((done / folder / "metrics.json").read_text())
        record = json.loads((done / folder / "provenance.json").read_text())
        assert record["pair"] == "tiny"
        assert record["versions"]["torch"]


def test_log_is_what_the_runtime_does(done: Path) -> None:
    metrics = json.loads((done / "checks" / "tiny" / "metrics.json").read_text())
    assert metrics["rounds"] == 32 * metrics["states"] > 0
    for key in ("accepted", "target_pass", "kept_tree", "counts", "signals"):
        assert metrics[f"equal_{key}"] == metrics["rounds"], key
    for row in metrics["lossless"]:
        assert row["identical"] == row["prompts"] > 0


def test_evaluation_is_printed_with_intervals(done: Path) -> None:
    result = json.loads((done / "evaluation" / "tiny" / "replay.json").read_text())
    assert len(result["findings"]) == 4
    assert [row["B_ver"] for row in result["budgets"]] == [3, 7, 15, 20]
    eta = {row["policy"]: row["η tokens/s"] for row in result["policies"]}
    oracle = next(v for k, v in eta.items() if k.startswith("oracle"))
    assert oracle > 0
    assert (done / "evaluation" / "tiny" / "eta_by_policy.png").stat().st_size > 10_000


def results(data: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((data / "evaluation" / "tiny" / "results.json").read_text())
    return found


def test_every_system_decodes_the_targets_own_tokens(done: Path) -> None:
    found = results(done)
    roles = {s["role"] for s in found["systems"]}
    assert roles >= {"plain", "peer", "small", "mid", "scheduler", "guarded", "fixed", "csd"}
    assert roles >= {"without_eg", "without_nd", "specinfer", "online", "fastest"}
    assert len(found["turns"]) == 4  # three prompts, of which the first has two turns
    for system in found["systems"]:
        for run in found["runs"][system["name"]]:
            assert run["tokens"] > 0 and run["ms"] > 0
            assert run["same"] is (None if system["role"] == "fastest" else True), system


def test_predictions_are_of_the_same_rounds(done: Path) -> None:
    """Where trees are enumerated, replay has the same rounds, A and calls as decoding."""
    found = results(done)
    home = next((done / "evaluation" / "tiny").glob("run-*"))
    records = [t for p in sorted(home.glob("0*.json")) for t in json.loads(p.read_text())["turns"]]
    assert len(records) == 4
    for system in found["systems"]:
        if system["role"] in ("small", "mid", "fixed", "scheduler", "online"):
            assert system["predicted_from"] == "replay" and system["predicted"] > 0
    policies = {p["name"]: p for p in found["replay"]["policies"]}
    assert {"scheduler", "online", "oracle"} <= set(policies)
    assert policies["oracle"]["eta"] > 0
    budgets = found["replay"]["by_calls"]
    assert [b["budget"] for b in budgets] == [0, 1, 2, 3, 4, 5]
    assert budgets[-1]["oracle"] == pytest.approx(policies["oracle"]["eta"])
    assert budgets[-1]["scheduler"] == pytest.approx(policies["scheduler"]["eta"])


def test_a_run_cut_short_goes_on_and_gives_the_same_tables(done: Path, home: Path) -> None:
    """What was measured stays as it was; only what is missing is measured again."""
    before = results(done)
    folder = next((done / "evaluation" / "tiny").glob("run-*"))
    parts = sorted(folder.glob("0*.json"))
    kept = {p: p.read_bytes() for p in parts[:2]}
    missing = json.loads(parts[2].read_text())["turns"][0]["outputs"]
    parts[2].unlink()
    evaluate.run(conf(home, "evaluate"))
    assert {p: p.read_bytes() for p in kept} == kept
    again = json.loads(parts[2].read_text())["turns"][0]["outputs"]
    timed = {"guarded"}  # what the guard does depends on the clock; its tokens do not
    for name, output in missing.items():
        assert again[name]["tokens"] == output["tokens"]
        if name not in timed:
            rounds = [[r[k] for r in o["rounds"] for k in ("schedule", "accepted", "kept")]
                      for o in (again[name], output)]  # fmt: skip
            assert rounds[0] == rounds[1], name
    after = results(done)
    for name in before["runs"]:
        if name not in timed:
            keys = ("tokens", "rounds", "accepted", "calls", "same")
            same = [[[r[k] for k in keys] for r in x["runs"][name]] for x in (before, after)]
            assert same[0] == same[1]
    assert before["replay"] == after["replay"] or "online" in before["runs"]


def test_exported_scheduler_loads(done: Path) -> None:
    artifact = load_scheduler(done / "schedulers" / "tiny")
    assert artifact.n_parameters == 3265


def test_collecting_twice_gives_the_same_rows(done: Path, home: Path) -> None:
    first = pd.read_parquet(done / "trajectories" / "collect")
    collect.run(conf(home, "collect", "collect.pack=2", "collect.force=true"))
    second = pd.read_parquet(done / "trajectories" / "collect")
    pd.testing.assert_frame_equal(first, second, check_exact=False, rtol=1e-9)


def test_half_a_trajectory_file_is_named(done: Path, home: Path) -> None:
    path = sorted((done / "trajectories" / "collect").rglob("*.parquet"))[0]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    try:
        with pytest.raises(InputError, match=r"damaged|verify\.repair=true"):
            value.run(conf(home, "value"))
    finally:
        path.write_bytes(whole)


def test_prompt_longer_than_the_context(done: Path, home: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"question_id": 1, "category": "a", "turns": ["w3 " * 400]}) + "\n")
    before = sorted((done / "trajectories").rglob("*"))
    with pytest.raises(InputError, match="task=file, question_id=1: had another text"):
        collect.run(conf(home, "collect", f"task.path={long}"))
    assert sorted((done / "trajectories").rglob("*")) == before
    where = f"paths.trajectories={tmp_path / 'new'}"
    with pytest.raises(InputError, match=r"question_id=1: turn 1 left out: it is longer than the"):
        collect.run(conf(home, "collect", f"task.path={long}", where))


def test_notebook_runs_on_what_the_pipeline_wrote(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbconvert.preprocessors import ExecutePreprocessor

    path = Path(__file__).resolve().parents[2] / "notebooks" / "trajectories.ipynb"
    book = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in book.cells), "commit notebooks without output"
    monkeypatch.setenv("TREEGRAFT_DATA", str(done))
    ExecutePreprocessor(timeout=120, kernel_name="python3").preprocess(
        book, {"metadata": {"path": str(path.parent)}}
    )
    printed = "".join(str(cell.get("outputs", "")) for cell in book.cells)
    states = pd.read_parquet(done / "trajectories" / "collect")["state_id"].nunique()
    assert f"tiny {states} states" in printed
