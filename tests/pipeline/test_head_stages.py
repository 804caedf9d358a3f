"""A trained head in the whole pipeline: trained by stage=drafter, then every other stage."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors import safe_open

from pipeline import drafter
from pipeline.run import CONF
from tests.pipeline.test_drafters import check_run, run_all
from treegraft_core import InputError, LatencyProfile, load_pair
from treegraft_core.head import TrainedHead


def recipe(home: Path, data: Path, *extra: str) -> DictConfig:
    """Return the configuration of a tiny head's training."""
    values = {
        "name": "tiny",
        "layers": "[0,1,1]",
        "head_dim": 8,
        "kv_heads": 2,
        "intermediate": 48,
        "unroll": 3,
        "vocabulary": 40,
        "tokens": 200,
        "max_new_tokens": 12,
        "batch": 8,
        "top_k": 8,
        "held_out_prompts": 3,
        "steps": 8,
        "warmup": 1,
        "learning_rate": 5e-3,
        "tokens_per_batch": 64,
        "evaluate_every": 2,
        "prompts": home / "prompts.jsonl",
    }
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(
            "config",
            [
                "stage=drafter",
                "drafter=head",
                "pair=local",
                "pair.name=tiny",
                f"pair.target.path={home / 'target'}",
                "pair.mid.path=none",
                "tracker=disabled",
                f"paths.data={data}",
                *(f"drafter.{name}={value}" for name, value in values.items()),
                *extra,
            ],
        )


@pytest.fixture(scope="module")
def made(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("head")
    drafter.run(recipe(home, data))
    return data / "drafters" / "tiny"


def test_training_helps_and_shows_every_step(made: Path) -> None:
    with (made / "train_log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["train_kl"]) < float(rows[0]["train_kl"])
    assert {"top1", "top10", "top1_2", "top10_2", "top1_3", "top10_3"} <= set(rows[0])
    for row in rows:
        assert all(0 <= float(row[n]) <= 1 for n in row if n.startswith("top"))
    card = (made / "README.md").read_text()
    assert "at step 2" in card and "at step 3" in card
    assert float(json.loads((made / "drafter.json").read_text())["top1"]) == pytest.approx(
        float(rows[-1]["top1"]), abs=1e-5
    )


def test_what_the_target_has_is_not_stored(made: Path) -> None:
    with safe_open(made / "head.safetensors", framework="pt") as reader:
        names = set(reader.keys())
        assert reader.get_tensor("draft_vocabulary").shape == (40,)
        assert reader.get_tensor("fc.weight").dtype == torch.bfloat16
    assert not any("lm_head" in name or "embed" in name for name in names)


def test_a_killed_training_continues_to_the_same_weights(
    home: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = drafter.Unrolled.loss, []

    def dies(self: drafter.Unrolled, *args: object) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter.Unrolled, "loss", dies)
    with pytest.raises(KeyboardInterrupt):
        drafter.run(recipe(home, tmp_path, "drafter.steps=8"))
    monkeypatch.setattr(drafter.Unrolled, "loss", original)
    drafter.run(recipe(home, tmp_path, "drafter.steps=8"))
    again = tmp_path / "drafters" / "tiny" / "head.safetensors"
    assert again.read_bytes() == (made / "head.safetensors").read_bytes()


def test_every_stage_runs_with_a_head(
    home: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log is what the runtime does, decoding is lossless, levels are logged and paid for."""
    pair = load_pair(str(home / "target"), str(made))
    assert isinstance(pair.mid, TrainedHead)
    systems = "system=[plain,generate,all_small,all_mid,scheduler,assisted]"
    data = run_all(home, tmp_path, "pair.name=headed", f"pair.mid.path={made}", systems)
    check_run(data, "headed", "ngram", "head")
    assert "systems.assisted: the mid drafter is no transformers model" in capsys.readouterr().out
    profile = LatencyProfile.load(data / "profiles" / "headed" / "profile.json")
    assert profile.mid_sequential
    part = next((data / "trajectories" / "collect").rglob("*.parquet"))
    levels = pq.read_table(part).column("all_levels").to_numpy()
    assert levels.max() > 1
    assert np.all(levels >= 0)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("drafter.layers=[0,9]", "reads layer 9 of the target, which has 2"),
        ("drafter.kind=tail", "drafter.kind=tail: choose one of student, head"),
        ("drafter.unroll=0", "drafter.unroll=0"),
        ("drafter.head_dim=7", "drafter.head_dim=7"),
    ],
)
def test_bad_recipes_are_refused(home: Path, tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        drafter.run(recipe(home, tmp_path, override))
