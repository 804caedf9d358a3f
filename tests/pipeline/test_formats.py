"""Trajectories open everywhere: the lines of the documents are run; the card is valid and true."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import duckdb
import pandas
import polars
import pyarrow as pa
import pytest
import yaml
from huggingface_hub import DatasetCard
from omegaconf import DictConfig

from pipeline import collect, verify
from pipeline.card import CARD, dataset_card, feature, model_name, size_category, write_card
from pipeline.columns import MEANINGS
from pipeline.manifest import Manifest, read_manifest
from pipeline.schema import COLUMNS, SCHEMA, part_files, read_trajectories
from pipeline.store import open_store
from tests.pipeline.conftest import conf
from tests.pipeline.datasets import part_sums, write_place

README = Path(__file__).resolve().parents[2] / "data" / "README.md"
PLACE = "data/trajectories/collect"
READERS = ("pandas", "polars", "duckdb", "datasets")
SMALL = ("drafting.depth=2", "drafting.width=3", "collect.replay_rounds=0", "verify.states=0")


@pytest.fixture(scope="module")
def settings(home: Path, tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    place = write_place(tmp_path_factory.mktemp("formats"), 3)
    data = (f"paths.data={place / 'data'}", f"task.path={place / 'prompts.jsonl'}")
    return conf(home, "collect", *data, *SMALL)


@pytest.fixture(scope="module")
def folder(settings: DictConfig) -> Path:
    """The trajectories of the tiny pair: two tasks, of which one has a name to be quoted."""
    for name in ("odd (name)", "words"):
        settings.task.name = name
        collect.run(settings)
    return Path(settings.paths.trajectories) / "collect"


def lines_of(text: str) -> dict[str, str]:
    """Return the lines of the first block of Python in a document, by library."""
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return {line.partition(".")[0]: line for line in found[1].splitlines()}


def opened(line: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> pandas.DataFrame:
    """Run a line of a document; return its rows."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(cache))
    names = {"pandas": pandas, "polars": polars, "duckdb": duckdb, "datasets": datasets}
    found: Any = eval(line, names)
    if isinstance(found, pandas.DataFrame):
        return found
    if isinstance(found, polars.DataFrame):
        return pandas.DataFrame(found.to_dict(as_series=False))
    return found.to_df() if isinstance(found, duckdb.DuckDBPyRelation) else found.to_pandas()


def same_rows(found: pandas.DataFrame, folder: Path, columns: list[str]) -> None:
    """The rows are those that the stages read, in any order."""
    truth = read_trajectories(folder)
    keys = ["state_id", "schedule", "step"]
    assert len(found) == len(truth) > 0
    ours, theirs = (
        frame.sort_values(keys)[columns].astype(str).reset_index(drop=True)
        for frame in (truth, found)
    )
    pandas.testing.assert_frame_equal(ours, theirs)


COMPARED = [name for name, kind in COLUMNS.items() if not pa.types.is_list(kind)]


@pytest.mark.parametrize("reader", READERS)
def test_lines_of_the_readme(
    folder: Path, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(README.read_text(encoding="utf-8"))
    assert set(lines) == set(READERS) and PLACE in lines[reader]
    frame = opened(lines[reader].replace(PLACE, str(folder)), tmp_path, monkeypatch)
    names = COMPARED if reader == "datasets" else [*COMPARED, "pair", "task"]
    same_rows(frame, folder, names)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_lines_of_the_card(
    folder: Path, reader: str, published: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder that the card lies in, and in a copy as it is published."""
    home = tmp_path / "copy"
    shutil.copytree(folder / "pair=tiny", home)
    if published:
        (home / CARD).rename(home / "README.md")
    monkeypatch.chdir(home)
    card = next(path for path in (home / CARD, home / "README.md") if path.is_file())
    line = lines_of(card.read_text(encoding="utf-8"))[reader]
    frame = opened(line, tmp_path / "cache", monkeypatch)
    same_rows(frame, home, COMPARED if reader == "datasets" else [*COMPARED, "task"])


def front(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


def test_the_front_matter_is_what_the_hub_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published folder loads by its card's configurations; features are the schema's."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "published"
    shutil.copytree(folder / "pair=tiny", home)
    (home / CARD).rename(home / "README.md")
    card = DatasetCard.load(home / "README.md")
    about = card.data.to_dict()
    assert about["size_categories"] == [size_category(len(read_trajectories(folder)))]
    configs = [each["config_name"] for each in about["configs"]]
    assert configs == ["default", "odd%20%28name%29", "words"]
    whole = datasets.load_dataset(str(home), split="train")
    assert whole.features == datasets.Features.from_arrow_schema(SCHEMA)
    truth = read_trajectories(folder)
    assert len(whole) == len(truth)
    words = datasets.load_dataset(str(home), "words", split="train")
    assert len(words) == (truth["task"] == "words").sum() < len(truth)


def test_the_card_says_what_was_collected(folder: Path, settings: DictConfig) -> None:
    text = (folder / "pair=tiny" / CARD).read_text(encoding="utf-8")
    truth = read_trajectories(folder)
    assert f"{len(truth):,} rows" in text
    for task, rows in truth.groupby("task"):
        states = rows["state_id"].nunique()
        small = rows[rows["schedule"] == "00"].groupby("state_id")["accepted"].first().mean()
        row = next(line for line in text.splitlines() if line.startswith(f"| {task} |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:4] == ["3", f"{states:,}", f"{len(rows):,}"]
        assert float(cells[4]) == pytest.approx(small, abs=1e-3)
    config = read_manifest(open_store(folder / "pair=tiny")).header["config"]
    for fact in ("target", "causal_lm", "ngram", config["models.mid"], "float64", "depth 2"):
        assert fact in text, fact
    assert str(Path(settings.paths.data).parent) not in text
    for name in COLUMNS:
        assert f"| `{name}` | {COLUMNS[name]} |" in text


def test_every_column_has_a_meaning() -> None:
    assert not [name for name in COLUMNS if not MEANINGS.get(name)]


def test_the_card_is_no_part_of_the_data(folder: Path, settings: DictConfig) -> None:
    """Readers and stage=verify pass over it; collecting again writes the same."""
    store = open_store(folder / "pair=tiny")
    assert all(path.suffix == ".parquet" for path in part_files(folder))
    before, sums = store.read(CARD), part_sums(folder)
    collect.run(settings)
    assert (store.read(CARD), part_sums(folder)) == (before, sums)
    verify.run(settings)
    store.remove(CARD)
    write_card(settings, store)
    assert store.read(CARD) == before


def test_a_dataset_that_has_not_begun_has_no_card(settings: DictConfig, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_card(settings, store)
    assert store.names() == []


def test_names_that_break_tables_and_front_matter(settings: DictConfig) -> None:
    """Of tasks and machines; the card stays one document with valid front matter."""
    odd = "a|b\n---\n: {[*&!%"
    record = {"status": "done", "task": odd, "file": "task=x/part-1.parquet", "rows": 8}
    record |= {"states": 1, "A small": 0, "A mid": 1, "A best": 2}
    header = {"config": {"pair.name": odd}, "profile": {"meta": {"machine": {"cpu": odd}}}}
    text = dataset_card(settings, Manifest(header=header, units={(odd, "1"): record}))
    assert front(text)["pretty_name"].endswith(r"a\|b --- : {[*&!%")
    rows = [line for line in text.splitlines() if line.startswith("| a\\|b")]
    assert len(rows) == 1 and len(re.findall(r"(?<!\\)\|", rows[0])) == 8


@pytest.mark.parametrize(
    ("rows", "name"),
    [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (2_000_000, "1M<n<10M"), (10**11, "n>1T")],
)
def test_size_categories(rows: int, name: str) -> None:
    assert size_category(rows) == name


def test_features() -> None:
    assert feature(pa.field("x", pa.list_(pa.int16()))) == {"name": "x", "list": "int16"}
    assert feature(pa.field("x", pa.float64())) == {"name": "x", "dtype": "float64"}


def test_model_names_without_places(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert model_name(tmp_path / "mine") == "mine"
    assert model_name("/gone/away/model") == "model"
    assert model_name("org/model") == "org/model"
