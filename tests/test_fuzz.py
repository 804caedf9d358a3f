"""Thousands of damaged inputs: a result or one line, never a traceback, a hang or execution."""

from __future__ import annotations

import hashlib
import json
import pickle
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import omegaconf.base
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import strategies as st

from pipeline import tasks
from pipeline.command import check_config
from pipeline.inputs import read_json, read_table, read_tensors
from pipeline.manifest import config_hash, part_name, read_manifest, seal
from pipeline.schema import RULES_KEY, SCHEMA, open_part, read_trajectories
from pipeline.store import check_name, open_store
from pipeline.tries import read_tries
from pipeline.trust import check_yaml
from tests.fuzzing import Touch, as_json, changed, damaged, fuzz, payloads
from tests.pipeline.synthetic import place_of, state_rows
from treegraft_core import (
    DraftingConfig,
    InputError,
    LatencyProfile,
    SchedulerArtifact,
    load_scheduler,
)
from treegraft_core.artifact import LITERAL_NAME
from treegraft_core.fit_check import check_fits
from treegraft_core.model_card import model_card
from treegraft_core.prompts import read_prompts
from treegraft_core.signals import context_names
from treegraft_core.trained import Drafters, Trained

EXAMPLES = {
    "prompt files": 2400,
    "prompt fields": 600,
    "rows of public sets": 300,
    "overrides": 900,
    "experiment files": 40,
    "YAML files": 1000,
    "part files": 1000,
    "trajectory values": 300,
    "rules of trajectories": 200,
    "scheduler headers": 500,
    "scheduler tensors": 500,
    "scheduler literals": 900,
    "latency profiles": 1000,
    "JSON of stages": 600,
    "tables of stages": 300,
    "tensors of stages": 300,
    "manifests": 1000,
}
"""How many inputs of each kind are read; `fuzz` fails if it reads fewer."""


def test_ten_thousand_inputs() -> None:
    assert sum(EXAMPLES.values()) >= 10_000


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file that exists only if an input was executed."""
    path = tmp_path / "canary" / "executed"
    path.parent.mkdir()
    yield path
    assert not path.exists(), "an input was executed"


def test_payloads_are_live(tmp_path: Path) -> None:
    path = tmp_path / "canary"
    code, *_, one, two, three = payloads(path)
    for run in (lambda: exec(code), *(lambda p=p: pickle.loads(p) for p in (one, two, three))):
        run()
        assert path.exists()
        path.unlink()


# Prompts ----------------------------------------------------------------------------------------

ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again, ähnlich 日本."]},
    {"question_id": "b-2", "category": "math", "turns": ["1 + 1 = ?"], "reference": ["2"]},
    {"question_id": 3, "turns": ["x"]},
]


def test_prompt_files(tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "p.jsonl"
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()
    source = tasks.Source("mine", str(path), None, kinds=True)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        prompts = read_prompts(path)
        assert prompts == [each.prompt for each in tasks.read_source(source)]
        for prompt in prompts:
            assert prompt.turns and all(t.strip() and t.encode() for t in prompt.turns)
            assert prompt.question_id.encode() and prompt.category.encode() is not None

    assert fuzz(EXAMPLES["prompt files"], damaged([text, text.splitlines()[0]], canary), read)
    fields = changed(ROWS, canary).map(
        lambda rows: b"\n".join(map(as_json, rows)) if isinstance(rows, list) else as_json(rows)
    )
    assert fuzz(EXAMPLES["prompt fields"], fields, read)


SETS = {
    "gsm8k": {"question": "How many?"},
    "alpaca": {"instruction": "Do.", "input": "it"},
    "humaneval": {"prompt": "def f():"},
    "natural_questions": {"question": {"text": "who"}},
    "cnn_dailymail": {"article": "News."},
    "mt_bench": {"prompt": ["One.", "Two."]},
}


def test_rows_of_public_sets(canary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from omegaconf import OmegaConf

    rows: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)

    def read(found: tuple[str, Any]) -> None:
        name, rows[:] = found[0], [found[1]]
        hub = OmegaConf.create(
            {"id": "x", "config": None, "split": "test", "limit": 0, "reader": name}
        )
        for prompt in tasks.read_hub("mine", hub):
            assert prompt.turns and all(t.strip() and t.encode() for t in prompt.turns)

    inputs = st.sampled_from(sorted(SETS)).flatmap(
        lambda name: st.tuples(st.just(name), changed(SETS[name], canary))
    )
    assert fuzz(EXAMPLES["rows of public sets"], inputs, read)


# Configurations ---------------------------------------------------------------------------------

OVERRIDES = [
    "collect.batch=3", "seed=7", "pair=smollm2-135m", "task=file", "task.path=p.jsonl",
    "collect.memory_gb=1.5", "paths.data=/tmp/x", "system=[plain,generate]",
    "replay.hardware=[{a: {target_ms: 3}}]", "held_out_tasks=[mt_bench,gsm8k]",
    "tracker=disabled", "drafting.depth=4", "pair.name='my pair'", "engine.threads=2",
    "hydra.run.dir=.", "hydra.job_logging.root.level=DEBUG", "sampling.top_p=0.9",
]  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the same interpolation once: most of a check's time goes there."""
    monkeypatch.setattr(omegaconf.base, "parse", lru_cache(maxsize=4096)(omegaconf.base.parse))


@pytest.mark.usefixtures("quick")
def test_overrides(canary: Path) -> None:
    def read(data: bytes) -> None:
        check_config(["stage=collect", *data.decode("utf-8", "surrogateescape").split("\n")])

    seeds = [line.encode() for line in OVERRIDES]
    seeds += [f"{a}\n{b}".encode() for a, b in zip(OVERRIDES, OVERRIDES[3:], strict=False)]
    assert fuzz(EXAMPLES["overrides"], damaged(seeds, canary), read)


EXPERIMENTS = [
    {
        "defaults": [{"override /task": "benchmarks"}],
        "evaluate": {"prompts_per_task": 8, "ablation_tasks": ["gsm8k"]},
        "stage": {"run": {"_target_": "pipeline.evaluate.run"}},
    },
    {
        "seed": 3,
        "hydra": {
            "mode": "MULTIRUN",
            "sweeper": {"params": {"seed": "0,1"}},
            "job_logging": {"handlers": {"console": {"class": "logging.StreamHandler"}}},
        },
    },
]


@pytest.mark.usefixtures("quick")
def test_experiment_files(tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "mine" / "experiment" / "e.yaml"
    path.parent.mkdir(parents=True)

    def write(value: Any) -> bytes:
        return f"# @package _global_\n{yaml.safe_dump(value)}".encode()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        check_config([f"--config-dir={tmp_path / 'mine'}", "stage=collect", "experiment=e"])

    texts = [write(each) for each in EXPERIMENTS]
    for data in texts:
        read(data)
    values = st.one_of(*(changed(each, canary) for each in EXPERIMENTS)).map(write)
    both = st.one_of(damaged(texts, canary), values)
    assert fuzz(EXAMPLES["experiment files"], both, read)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        check_yaml(path)

    assert fuzz(EXAMPLES["YAML files"], damaged(texts, canary), check)


# Trajectories -----------------------------------------------------------------------------------

DEPTH = 2


def part_bytes(rows: list[dict[str, Any]], rules: bytes = b"{}") -> bytes:
    sink = pa.BufferOutputStream()
    schema = SCHEMA.with_metadata({**SCHEMA.metadata, RULES_KEY: rules})
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema))
    return sink.getvalue().to_pybytes()


def test_part_files(tmp_path: Path, canary: Path) -> None:
    folder = tmp_path / "pair=tiny"
    folder.mkdir()
    path = folder / "part-0.parquet"
    rng = np.random.default_rng(0)
    rows = state_rows(rng, place_of("math", 0, 0, 1, 20), DEPTH)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        open_part(path)
        read_trajectories(folder)
        assert len(read_tries(folder, "tiny", "math", DEPTH)) == 1

    whole = part_bytes(rows)
    read(whole)
    assert fuzz(EXAMPLES["part files"], damaged([whole, whole[-4000:]], canary), read)

    def read_rows(found: Any) -> None:
        try:
            data = part_bytes(found)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
            return  # cannot be written either
        path.write_bytes(data)
        read_tries(folder, "tiny", "math", DEPTH)

    assert fuzz(EXAMPLES["trajectory values"], changed(rows, canary), read_rows)

    def read_rules(data: bytes) -> None:
        path.write_bytes(part_bytes(rows, data))
        open_part(path, {"depth": DEPTH, "verify_nodes": 7})
        read_tries(folder, "tiny", "math", DEPTH)

    rules = {"depth": DEPTH, "verify_nodes": 63, "pool": "all"}
    inputs = st.one_of(damaged([as_json(rules)], canary), changed(rules, canary).map(as_json))
    assert fuzz(EXAMPLES["rules of trajectories"], inputs, read_rules)


# Schedulers and profiles ------------------------------------------------------------------------


def small_artifact() -> SchedulerArtifact:
    inputs = len(context_names(2)) + 1
    return SchedulerArtifact(
        depth=2,
        selected_signals=("depth_before",),
        weights=(np.ones((2, inputs)), np.ones((1, 2))),
        biases=(np.zeros(2), np.zeros(1)),
        x_mean=np.zeros(inputs),
        x_std=np.ones(inputs),
        y_mean=0.5,
        y_std=2.0,
        metadata={"pair": "tiny"},
        trained=Trained(
            {"width": 10, "verify_nodes": 63, "max_ngram": 5},
            (Drafters("ngram", "student", "tiny", "0a1b"),),
            {"target_ms": (20.0, 40.0), "mid_ms": (5.0, 8.0), "ratio": (3.0, 6.0)},
            {"r2": 0.5, "texts_whole": True},
        ),
    )


def use(artifact: SchedulerArtifact) -> None:
    assert artifact.n_parameters > 0
    artifact.margins(np.zeros((2, len(artifact.input_names))))
    known = artifact.trained
    drafters = known.drafters[0] if known.drafters else Drafters("ngram", "student")
    config = DraftingConfig(depth=artifact.depth, **known.widths)
    check_fits(artifact, config, drafters.small, drafters.mid)
    card = model_card(artifact, "tiny")
    assert card.startswith("---\nlicense: apache-2.0\n") and card.encode()


def test_scheduler_folders(tmp_path: Path, canary: Path) -> None:
    small_artifact().save(tmp_path)
    header, tensors = tmp_path / "scheduler.json", tmp_path / "scheduler.safetensors"
    good, whole = json.loads(header.read_text()), tensors.read_bytes()

    def read_header(data: bytes) -> None:
        header.write_bytes(data)
        use(load_scheduler(tmp_path))

    inputs = st.one_of(damaged([as_json(good)], canary), changed(good, canary).map(as_json))
    assert fuzz(EXAMPLES["scheduler headers"], inputs, read_header)
    header.write_bytes(as_json(good))

    def read_tensors(data: bytes) -> None:
        tensors.write_bytes(data)
        header.write_bytes(as_json(good | {"sha256": hashlib.sha256(data).hexdigest()}))
        use(load_scheduler(tmp_path))

    assert fuzz(EXAMPLES["scheduler tensors"], damaged([whole], canary), read_tensors)
    for payload in payloads(canary):
        with pytest.raises(ValueError):
            read_tensors(payload)


def test_scheduler_literals(tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "artifact.py"
    small_artifact().save_literal(path)
    whole, good = path.read_bytes(), small_artifact().literal()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        use(load_scheduler(path))

    texts = changed(good, canary).map(lambda value: f"{LITERAL_NAME} = {value!r}\n".encode())
    inputs = st.one_of(
        damaged([whole], canary),
        texts.map(lambda t: t.decode().encode("utf-8", "backslashreplace")),
    )
    assert fuzz(EXAMPLES["scheduler literals"], inputs, read)
    for expression in ("9**9**9", "[0] * 10**12", "'x' * 10**12", "1 << 10**9", "{*range(10**9)}"):
        with pytest.raises(ValueError, match="literal"):
            read(f"{LITERAL_NAME} = {expression}\n".encode())


PROFILE = {
    "format": 1,
    **{
        name: {
            "tokens": [1, 8],
            "context": [64, 256],
            "ms": [[1.0, 2.0], [3.0, 4.0]],
            "spread_ms": [[0.1, 0.1], [0.1, 0.1]],
        }
        for name in ("mid", "verify")
    },
    **dict.fromkeys(
        ("plain_ms", "small_ms", "mid_overhead_ms", "signals_ms", "scheduler_ms", "prune_ms"), 1.0
    ),
    **{"accept_ms": 0.5, "target_ms": 20.0, "mid_ms": 4.0, "evaluation": "needed", "meta": {}},
}


def test_latency_profiles(tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "profile.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        profile = LatencyProfile.load(path)
        times = [profile.verify_ms(3, 100), profile.mid.at(5, 1000), profile.decision_ms()]
        assert np.isfinite([float(t) for t in times]).all()

    read(as_json(PROFILE))
    inputs = st.one_of(damaged([as_json(PROFILE)], canary), changed(PROFILE, canary).map(as_json))
    assert fuzz(EXAMPLES["latency profiles"], inputs, read)


# What stages leave to each other ------------------------------------------------------------------


def test_files_of_stages(tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "selection.json"
    good = {"signals": ["depth_before"], "folds": 5, "scores": [0.5, 0.25], "of": {"a": None}}

    def read(data: bytes) -> None:
        path.write_bytes(data)
        assert isinstance(read_json(path, "select"), dict)

    inputs = st.one_of(damaged([as_json(good)], canary), changed(good, canary).map(as_json))
    assert fuzz(EXAMPLES["JSON of stages"], inputs, read)

    sink = pa.BufferOutputStream()
    table = pa.table({"state_id": ["a", "b"], "margin": [0.5, -1.0]})
    pq.write_table(table.replace_schema_metadata({b"key": as_json(good)}), sink)

    def read_rows(data: bytes) -> None:
        path.write_bytes(data)
        _, header = read_table(path, "label", b"key")
        assert isinstance(header, dict)

    whole = sink.getvalue().to_pybytes()
    assert fuzz(EXAMPLES["tables of stages"], damaged([whole], canary), read_rows)

    def read_weights(data: bytes) -> None:
        path.write_bytes(data)
        read_tensors(path, "value")

    small_artifact().save(tmp_path)
    whole = (tmp_path / "scheduler.safetensors").read_bytes()
    assert fuzz(EXAMPLES["tensors of stages"], damaged([whole], canary), read_weights)
    torch.save(Touch(canary), path)
    with pytest.raises(ValueError):
        read_tensors(path, "value")


def test_manifests(tmp_path: Path, canary: Path) -> None:
    """A damaged line is a fault of its own; no line names a file outside the dataset."""
    unit = {
        **{"kind": "unit", "task": "math", "prompt": "a/b", "status": "done"},
        "config": config_hash({"depth": 2}),
        **{"file": part_name("math", "a/b"), "sha256": "0" * 64},
        **dict.fromkeys(("bytes", "rows", "states", "turns"), 7),
    }
    header = {"kind": "dataset", "format": 1, "config": {"depth": 2}}
    store = open_store(tmp_path / "data")
    name = "_manifest/00001-abc.jsonl"

    def read(data: bytes) -> None:
        (tmp_path / "data" / name).write_bytes(data)
        found = read_manifest(store)
        for fault in found.faults:
            assert fault.what.strip() and name in fault.where
        for file, record in found.files().items():
            path = tmp_path / "data" / check_name(file)
            assert path.resolve().is_relative_to(tmp_path / "data")
            assert record["rows"] > 0 and found.finished()

    (tmp_path / "data" / name).parent.mkdir(parents=True)
    lines = [seal(header), seal(unit), seal(unit | {"status": "empty", "prompt": "c"})]
    read(b"".join(lines))
    sealed = st.one_of(changed(unit, canary), changed(header, canary)).map(sealed_line)
    fuzz(EXAMPLES["manifests"], st.one_of(damaged([b"".join(lines)], canary), sealed), read)


def sealed_line(record: Any) -> bytes:
    """Return a line with a right checksum, whatever it holds: ``seal`` writes no NaN."""
    text = json.dumps(record if isinstance(record, dict) else {"kind": record})
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


BAD_NAMES = ["", "../x.parquet", "/etc/passwd", "a/../../x", "a\\..\\x", "x\0.parquet"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_outside_a_dataset(tmp_path: Path, name: str) -> None:
    for act in (check_name, open_store(tmp_path / "data").read):
        with pytest.raises(InputError, match="not the name of a file inside"):
            act(name)
