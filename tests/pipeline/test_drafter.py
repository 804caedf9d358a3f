"""stage=drafter on a tiny target: generate, choose a vocabulary, train, resume, load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors import safe_open

from pipeline import drafter, sequences
from pipeline.run import CONF
from tests.conftest import tiny_llama, word_tokenizer
from treegraft_core import InputError, RandomSchedule, TreeGraftDecoder, decode_plain, load_pair
from treegraft_core.student import load_student


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("drafter")
    tiny_llama(0, layers=4, dtype=torch.float32).save_pretrained(folder / "target")
    word_tokenizer().save_pretrained(folder / "target")
    rng = np.random.default_rng(0)
    lines = [
        {
            "question_id": i,
            "category": "words",
            "turns": [
                " ".join(f"w{t}" for t in rng.integers(2, 48, size=5))
                for _ in range(2 if i % 4 == 0 else 1)
            ],
        }
        for i in range(24)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def conf(home: Path, data: Path, *extra: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(
            "config",
            [
                "stage=drafter",
                "pair=local",
                "pair.name=tiny",
                f"pair.target.path={home / 'target'}",
                f"pair.mid.path={data / 'drafters' / 'tiny'}",
                "tracker=disabled",
                f"paths.data={data}",
                f"drafter.prompts={home / 'train.jsonl'}",
                "drafter.name=tiny",
                "drafter.layers=[0,3]",
                "drafter.vocabulary=32",
                "drafter.tokens=300",
                "drafter.max_new_tokens=12",
                "drafter.batch=8",
                "drafter.top_k=8",
                "drafter.held_out_prompts=6",
                "drafter.steps=6",
                "drafter.warmup=1",
                "drafter.learning_rate=5.0e-3",
                "drafter.tokens_per_batch=128",
                "drafter.evaluate_every=2",
                *extra,
            ],
        )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "student.safetensors", framework="pt") as reader:
        return {name: reader.get_tensor(name) for name in list(reader.keys())}


@pytest.fixture(scope="module")
def made(home: Path) -> Path:
    data = home / "data"
    drafter.run(conf(home, data))
    return data


def test_the_folder_holds_only_what_differs(made: Path) -> None:
    folder = made / "drafters" / "tiny"
    names = set(weights(folder))
    assert "draft_vocabulary" in names
    assert "model.norm.weight" in names
    assert any(n.startswith("model.layers.1.") for n in names)
    assert not any("embed" in n or "lm_head" in n or "layers.2" in n for n in names)
    assert all(
        t.dtype == torch.bfloat16 for n, t in weights(folder).items() if n != "draft_vocabulary"
    )
    for name in ("README.md", "recipe.yaml", "train_log.csv", "config.json", "drafter.json"):
        assert (folder / name).stat().st_size > 0


def test_training_helps(made: Path) -> None:
    lines = (made / "drafters" / "tiny" / "train_log.csv").read_text().splitlines()
    column = lines[0].split(",").index("train_kl")
    first, last = float(lines[1].split(",")[column]), float(lines[-1].split(",")[column])
    assert last < first


def test_the_student_drafts_and_stays_lossless(home: Path, made: Path) -> None:
    pair = load_pair(str(home / "target"), str(made / "drafters" / "tiny"), dtype="float32")
    assert pair.vocabulary is not None
    assert len(pair.vocabulary.tokens) == 32
    assert pair.vocabulary.floor_log_p < 0
    prompt = [5, 9, 11, 30]
    expected = decode_plain(pair, prompt, 40, eos_token_ids=[]).tokens
    done = TreeGraftDecoder(pair, RandomSchedule(0)).generate(prompt, 40, eos_token_ids=[])
    assert done.tokens == expected


def test_a_killed_run_continues_to_the_same_weights(
    home: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = home / "killed"
    original = drafter.Distillation.loss
    calls = 0

    def dies(self: drafter.Distillation, *args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter.Distillation, "loss", dies)
    with pytest.raises(KeyboardInterrupt):
        drafter.run(conf(home, data))
    assert not (data / "drafters").exists()
    monkeypatch.setattr(drafter.Distillation, "loss", original)
    drafter.run(conf(home, data))
    ours, theirs = weights(data / "drafters" / "tiny"), weights(made / "drafters" / "tiny")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("drafter.layers=[0,9]", "0 to 3"),
        ("drafter.layers=[]", "drafter.layers"),
        ("drafter.steps=0", "drafter.steps=0"),
        ("drafter.temperatures=[-1]", "drafter.temperatures"),
        ("drafter.prompts=nowhere.jsonl", "nowhere.jsonl"),
    ],
)
def test_bad_recipes_change_nothing(home: Path, tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        drafter.run(conf(home, tmp_path, override))
    assert not list(tmp_path.iterdir())


def test_damaged_student_folders(made: Path, home: Path, tmp_path: Path) -> None:
    target = tiny_llama(0, layers=4, dtype=torch.float32)
    source = made / "drafters" / "tiny"
    for name in ("student.safetensors", "drafter.json", "config.json"):
        folder = tmp_path / name
        folder.mkdir()
        for file in source.iterdir():
            content = file.read_bytes()
            cut = len(content) // 2 if file.name == name else len(content)
            (folder / file.name).write_bytes(content[:cut])
        with pytest.raises(InputError, match="student folder"):
            load_student(folder, target)
    other = tiny_llama(0, layers=4, vocab=16, dtype=torch.float32)
    with pytest.raises(InputError, match="made for a target"):
        load_student(source, other)


def generations(data: Path) -> list[Path]:
    """Return the folders of generated data below ``data``."""
    return sorted(p for p in data.rglob("generations-*") if p.is_dir())


def test_students_of_one_target_share_its_generations(
    home: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(shutil.copytree(made, tmp_path / "data"))
    before = generations(data)
    assert [p.parent for p in before] == [data / "cache" / "drafter"]
    with monkeypatch.context() as patch:
        patch.setattr(sequences, "generate_batch", None)  # nothing is generated again
        drafter.run(conf(home, data, "drafter.name=wide", "drafter.layers=[0,1,3]"))
    assert generations(data) == before
    assert len(list((data / "cache" / "drafter" / "wide").glob("training-*"))) == 1
    assert any(".2." in name for name in weights(data / "drafters" / "wide"))


def test_another_target_shares_nothing(home: Path, made: Path, tmp_path: Path) -> None:
    """Not even under the same path and name: neither generations nor a training's state."""
    data, models = Path(shutil.copytree(made, tmp_path / "data")), tmp_path / "models"
    shutil.copytree(home / "target", models / "target")
    (models / "train.jsonl").write_bytes((home / "train.jsonl").read_bytes())
    drafter.run(conf(models, data))
    tiny_llama(7, layers=4, dtype=torch.float32).save_pretrained(models / "target")
    drafter.run(conf(models, data))
    assert len(generations(data)) == 3
    work = data / "cache" / "drafter" / "tiny"
    assert len(list(work.glob("training-*"))) == 3


def test_students_are_not_made_from_held_out_prompts(home: Path, tmp_path: Path) -> None:
    lines = (home / "train.jsonl").read_text()
    named, mixed = tmp_path / "mt_bench.jsonl", tmp_path / "mixed.jsonl"
    named.write_text(lines)
    mixed.write_text(lines.replace("words", "mt_bench", 1))
    for path in (named, mixed):
        with pytest.raises(InputError, match=r"drafter\.prompts=.*: prompts of mt_bench"):
            drafter.run(conf(home, tmp_path / "data", f"drafter.prompts={path}"))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "layers", "steps"), [("1l", 1, 400), ("2l", 2, 600), ("8l", 8, 500)]
)
def test_recipes_of_other_depths_change_only_what_they_name(
    name: str, layers: int, steps: int
) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        default = compose("config", ["stage=drafter"]).drafter
        recipe = compose("config", ["stage=drafter", f"drafter={name}"]).drafter
        pair = compose("config", ["stage=drafter", f"pair=smollm2-135m-{name}"]).pair
    assert (len(recipe.layers), recipe.steps) == (layers, steps)
    assert recipe.folder == pair.mid.path == f"data/drafters/{pair.name}"
    differs = {key for key in default if recipe[key] != default[key]}
    assert differs <= {"name", "folder", "work", "layers", "steps", "schedule_steps"}
