"""Other drafters in the whole pipeline: the documented examples, and the suffix drafter."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from pipeline import check, collect, distill, evaluate, export, label, profile, select, value
from pipeline.corpus import save_corpus
from pipeline.schema import logged_rules
from pipeline.small import read_corpus, small_drafter
from tests.pipeline.conftest import assert_refused, conf, overrides
from treegraft_core import InputError, load_scheduler

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "drafters.md"
STAGES = (profile, collect, select, value, label, distill, export, evaluate, check)
FEW = ("collect.prompts_per_task=4", "evaluate.prompts_per_task=2", "check.prompts_per_task=1",
       "evaluate.decode_prompts_per_task=1", "drafting.depth=3", "profile.repeats=1",
       "system=[plain,generate,all_small,all_mid,scheduler]")  # fmt: skip


def examples() -> dict[str, str]:
    """Return the Python files of the document by their names."""
    blocks = re.findall(r"```python\n(# (\w+)\.py\n.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return {name: code for code, name in blocks}


def run_all(home: Path, data: Path, *extra: str) -> Path:
    """Run every stage with other drafters; return where their data is."""
    for stage in STAGES:
        name = stage.__name__.rpartition(".")[2]
        stage.run(conf(home, name, f"paths.data={data}", *FEW, *extra))
    return data


def check_run(data: Path, pair: str, small: str, mid: str) -> None:
    """Losslessness, logs equal to rounds run alone, and what the files say of the drafters."""
    found = json.loads((data / "checks" / pair / "metrics.json").read_text())
    for name in ("accepted", "target_pass", "kept_tree", "counts", "signals"):
        assert found[f"equal_{name}"] == found["rounds"] > 0, found["unequal_examples"]
    assert found["lossless"] and all(row["other"] == 0 for row in found["lossless"])
    parts = list((data / "trajectories" / "collect").rglob("*.parquet"))
    for part in parts:
        assert str(logged_rules(pq.read_schema(part).metadata)["small"]).startswith(small)
    assert parts
    artifact = load_scheduler(data / "schedulers" / pair)
    assert [(each.small, each.mid) for each in artifact.trained.drafters] == [(small, mid)]


def test_examples_are_short() -> None:
    assert set(examples()) == {"phrases", "bigrams"}
    for code in examples().values():
        assert len(code.splitlines()) < 60


def test_the_documented_drafters_go_through_every_stage(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, code in examples().items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save_corpus(
        tmp_path / "data" / "corpora" / "smollm2-135m.safetensors",
        [torch.arange(2, 40), torch.tensor([5, 9, 5, 9])],
    )
    text = DOCUMENT.read_text()
    command = re.search(r"```sh\npython -m pipeline.run stage=collect (.*?)```", text, re.DOTALL)
    assert command is not None
    words = [w.strip("'") for w in re.findall(r"'[^']*'|\S+", command[1]) if w != "\\"]
    data = run_all(home, tmp_path / "data", "pair.name=tiny", *words)
    check_run(data, "counted", "phrases", "bigrams")


@pytest.mark.parametrize("corpus", ["none", "texts"])
def test_the_suffix_drafter_goes_through_every_stage(
    home: Path, tmp_path: Path, corpus: str
) -> None:
    words = ["small=suffix", "small.chain=6"]
    if corpus == "texts":
        path = tmp_path / "corpus.jsonl"
        lines = (home / "prompts.jsonl").read_text().splitlines()[:3]
        path.write_text("\n".join([*lines, json.dumps({"text": "w3 w4 w5 w6"})]))
        words.append(f"small.corpus={path}")
    check_run(run_all(home, tmp_path / "data", *words), "tiny", "suffix", "causal_lm")


def test_logs_of_other_drafters_do_not_mix(home: Path, tmp_path: Path) -> None:
    where = [f"paths.data={tmp_path / 'data'}", *FEW]
    profile.run(conf(home, "profile", *where))
    collect.run(conf(home, "collect", *where))
    with pytest.raises(InputError, match=r"drafting\.small"):
        collect.run(conf(home, "collect", *where, "small=suffix"))
    with pytest.raises(InputError, match=r"drafting\.small=suffix"):
        select.run(conf(home, "select", *where, "small=suffix"))


def test_a_corpus_is_read_from_texts_and_tokens(home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w3 w4")
    (tmp_path / "b.jsonl").write_text('{"text": "w3 w4"}\n\n{"turns": ["w5", "w6 w7"]}\n')
    save_corpus(tmp_path / "c.safetensors", [torch.tensor([3, 4]), torch.tensor([5])])
    one = read_corpus(conf(home, "collect"), tmp_path / "a.txt")
    assert read_corpus(conf(home, "collect"), tmp_path / "b.jsonl")[0] == one[0]
    assert len(read_corpus(conf(home, "collect"), tmp_path / "b.jsonl")) == 3
    assert read_corpus(conf(home, "collect"), tmp_path / "c.safetensors") == [[3, 4], [5]]


BAD = {
    "small=suffix small.corpus=/none.txt": "small.corpus=/none.txt: no such file",
    "small=suffix small.corpus={there}/odd.bin": "unknown kind of file",
    "small=suffix small.corpus={there}/odd.jsonl": "odd.jsonl, line 2: no JSON object",
    "small=suffix small.corpus={there}/odd.safetensors": "not a corpus",
    "small=suffix small.places=0": "small.places=0: must be",
    "small=suffix small.remember_tokens=10": "small.name=suffix: what it proposes",
    "small=suffix small.chain=200": "small.chain=200: must be",
    "small=python small.drafter=os:getcwd": "small.drafter=os:getcwd: imports and runs",
    "small=python small.drafter=os:getcwd small.trust_python=true": "is no treegraft_core.Small",
    "small=python small.drafter=none.at:all small.trust_python=true": "give package.module:Class",
    "pair.mid.path=python:os:getcwd": "pair.mid.path=python:os:getcwd: imports and runs",
    "small.name=magic": "small.name=magic: choose small=ngram",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_drafters_are_one_line(
    home: Path,
    tmp_path: Path,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "odd.bin").write_text("text")
    (tmp_path / "odd.jsonl").write_text('{"text": "w3"}\n{"tokens": 3}\n')
    (tmp_path / "odd.safetensors").write_bytes(b"none")
    (tmp_path / "data").mkdir()
    words = [word.format(there=tmp_path) for word in case.split()]
    arguments = overrides(home, f"paths.data={tmp_path / 'data'}", *words)
    stage = "profile" if "pair.mid" in case else "collect"
    assert_refused(stage, arguments, tmp_path / "data", BAD[case], monkeypatch, capfd)


def test_an_ngram_needs_no_tokenizer(home: Path) -> None:
    assert small_drafter(conf(home, "collect")).name == "ngram"
