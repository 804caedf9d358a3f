"""stage=verify: what it finds, what it says of it, and that a repair restores every byte."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from pipeline import collect, verify
from pipeline.checks import read_part
from pipeline.engine import drafting_config
from pipeline.manifest import FOLDER, Segment, part_name, read_manifest, seal, unseal
from pipeline.recompute import Compared, differing_states, draw
from pipeline.rows import write_rows
from pipeline.schema import part_files, read_trajectories
from pipeline.store import DatasetBusyError, LocalStore, open_store
from pipeline.tasks import load_prompts
from pipeline.units import plan
from tests.pipeline.conftest import conf, write_home
from tests.test_inputs import GRID, profile
from treegraft_core import InputError
from treegraft_core.errors import StageError

PROMPTS = 5
SMALL = (
    "drafting.depth=3",
    "drafting.width=3",
    "drafting.verify_nodes=6",
    "collect.states_per_turn=2",
    "collect.max_new_tokens=10",
    "collect.replay_rounds=0",
    f"collect.prompts_per_task={PROMPTS}",
    "engine.workers=0",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with the models, a profile, and a dataset that two runs collected."""
    torch.set_num_threads(1)
    home = write_home(tmp_path_factory.mktemp("verify"))
    profile(verify=GRID).save(home / "data" / "profiles" / "tiny" / "profile.json")
    for count in (2, PROMPTS):
        more = [o for o in SMALL if "prompts_per_task" not in o]
        collect.run(conf(home, "collect", *more, f"collect.prompts_per_task={count}"))
    return home


@dataclass
class Dataset:
    """A copy of the dataset that a test may damage."""

    home: Path
    base: DictConfig
    root: Path
    more: tuple[str, ...] = ()
    folder: Path = field(init=False)
    store: LocalStore = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.root / "collect" / "pair=tiny"
        self.store = LocalStore(self.folder)

    def conf(self, *extra: str) -> Any:
        where = (f"paths.trajectories={self.root}", f"paths.check={self.root / 'checks'}")
        given = [*where, "verify.states=0", *self.more, *extra]
        return OmegaConf.merge(self.base, OmegaConf.from_dotlist(given))

    def verify(self, *extra: str) -> list[dict[str, Any]]:
        """Run the stage; return its findings. They are on the disk if there are faults, too."""
        place = self.root / "checks" / "verify" / "findings.json"
        place.unlink(missing_ok=True)
        try:
            verify.run(self.conf(*extra))
        except StageError as error:
            self.error: str | None = str(error)
        else:
            self.error = None
        findings: list[dict[str, Any]] = json.loads(place.read_text())["findings"]
        return findings

    def parts(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.folder)): p.read_bytes() for p in self.paths()}

    def paths(self) -> list[Path]:
        return sorted(self.folder.rglob("*.parquet"))

    def part(self, prompt: int) -> Path:
        return self.folder / part_name("file", str(prompt))

    def segments(self) -> list[Path]:
        return sorted((self.folder / FOLDER).glob("*.jsonl"))

    def forge(self, prompt: int, record: dict[str, Any]) -> None:
        """Add a record of a unit, with right checksums, as a run of its own."""
        manifest = read_manifest(self.store)
        known = manifest.units["file", str(prompt)]
        lines = seal(manifest.header or {}) + seal({**known, **record})
        name = f"{manifest.segments + 1:05d}-forged.jsonl"
        (self.folder / FOLDER / name).write_bytes(lines)

    def put(self, prompt: int, data: bytes, **record: Any) -> None:
        """Replace a unit's file and its record, as a fault of the program would."""
        self.part(prompt).write_bytes(data)
        size = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
        self.forge(prompt, {**size, **record})

    def change(self, prompt: int, change: Callable[[pa.Table], pa.Table], **record: Any) -> None:
        """Change a unit's rows, all checksums right."""
        table = change(read_part(self.part(prompt).read_bytes()))
        buffer = BytesIO()
        write_rows(buffer, table, drafting_config(self.conf()))
        self.put(prompt, buffer.getvalue(), rows=table.num_rows, **record)


@pytest.fixture(scope="module")
def base(models: Path) -> DictConfig:
    return conf(models, "verify", *SMALL)


@pytest.fixture
def dataset(models: Path, base: DictConfig, tmp_path: Path) -> Dataset:
    shutil.copytree(models / "data" / "trajectories" / "collect", tmp_path / "t" / "collect")
    return Dataset(models, base, tmp_path / "t")


def flip(path: Path, at: float) -> None:
    """Flip a bit of a file, at a share of its length."""
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(at * len(data)))] ^= 4
    path.write_bytes(data)


def flip_back(path: Path, back: int) -> None:
    """Flip a bit of a file, so many bytes before its end."""
    data = bytearray(path.read_bytes())
    data[-back] ^= 4
    path.write_bytes(data)


def swap(d: Dataset) -> None:
    a, b = d.part(1).read_bytes(), d.part(2).read_bytes()
    d.part(1).write_bytes(b)
    d.part(2).write_bytes(a)


def foreign(d: Dataset) -> None:
    shutil.copy(d.part(1), d.part(1).with_name("copy.parquet"))


def cut_manifest(d: Dataset) -> None:
    data = d.segments()[-1].read_bytes()
    last = data.splitlines(keepends=True)[-1]
    d.segments()[-1].write_bytes(data[: len(data) - len(last) // 2])


def flip_line(d: Dataset) -> None:
    first = d.segments()[1]  # the first is the copy of the dataset's own line
    lines = first.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"rows": ', b'"rows": 1')
    first.write_bytes(b"".join(lines))


def forget_finish(d: Dataset) -> None:
    """Leave what a run leaves that is killed between a file's rename and its line."""
    data = d.segments()[-1].read_bytes().splitlines(keepends=True)
    d.segments()[-1].write_bytes(b"".join(data[:-1]))


def forge_swap(d: Dataset) -> None:
    a, b = d.part(1).read_bytes(), d.part(2).read_bytes()
    d.put(1, b)
    d.put(2, a)


def forge_page(d: Dataset) -> None:
    data = bytearray(d.part(1).read_bytes())
    column = pq.ParquetFile(d.part(1)).metadata.row_group(0).column(0)
    first = column.dictionary_page_offset or column.data_page_offset
    data[first + column.total_compressed_size - 1] ^= 4  # in a page, not in a header
    d.put(1, bytes(data))


def replaced(name: str, change: Callable[[Any], Any]) -> Callable[[pa.Table], pa.Table]:
    """Return a change of one column's values, a NumPy array of objects or numbers."""

    def apply(table: pa.Table) -> pa.Table:
        at, kind = table.schema.get_field_index(name), table.schema.field(name).type
        values = change(table.column(name).to_pandas().to_numpy(copy=True))
        return table.set_column(at, table.schema.field(name), pa.array(values, kind))

    return apply


def at_row(row: int, value: Any) -> Callable[[Any], Any]:
    def apply(values: Any) -> Any:
        values[row] = value
        return values

    return apply


def added(name: str, row: int, amount: float) -> Callable[[pa.Table], pa.Table]:
    return replaced(name, lambda v: at_row(row, v[row] + amount)(v))


def one_more_accepted(table: pa.Table) -> pa.Table:
    """Return a table with one wrong A that nothing in the file contradicts."""
    frame = table.to_pandas()
    found = frame[(frame["accepted"] == 0) & (frame["kept_nodes"] > 0)].iloc[0]
    rows = (frame["state_id"] == found["state_id"]) & (frame["schedule"] == found["schedule"])
    for name in ("accepted", "committed"):
        frame.loc[rows, name] += 1
    known = frame["accepted_ranks"]
    frame["accepted_ranks"] = [[0] if row else r for r, row in zip(known, rows, strict=True)]
    return pa.Table.from_pandas(frame, table.schema, preserve_index=False)


@dataclass(frozen=True)
class Fault:
    """How a dataset is damaged, what is said of it, and the prompts that are at fault then."""

    damage: Callable[[Dataset], Any]
    says: Sequence[str]
    bad: Sequence[int]
    more: tuple[str, ...] = ()


def rows(change: Callable[[pa.Table], pa.Table], **record: Any) -> Callable[[Dataset], None]:
    return lambda d: d.change(1, change, **record)


ONE = ["task=file/part-1.parquet"]
ALL_STATES = ("verify.states=1000",)
FAULTS = {
    "truncated": Fault(
        lambda d: d.part(1).write_bytes(d.part(1).read_bytes()[:-100]),
        [*ONE, "bytes, its manifest says"],
        [1],
    ),
    "cut to nothing": Fault(lambda d: d.part(1).write_bytes(b""), [*ONE, "has 0 bytes"], [1]),
    "header flipped": Fault(lambda d: flip(d.part(1), 0), [*ONE, "SHA-256"], [1]),
    "page flipped": Fault(lambda d: flip(d.part(1), 0.4), [*ONE, "SHA-256"], [1]),
    "footer flipped": Fault(lambda d: flip_back(d.part(1), 100), [*ONE, "SHA-256"], [1]),
    "magic flipped": Fault(lambda d: flip_back(d.part(1), 1), [*ONE, "SHA-256"], [1]),
    "swapped": Fault(swap, [*ONE, "it is task=file/part-2.parquet"], [1, 2]),
    "deleted": Fault(lambda d: d.part(1).unlink(), [*ONE, "file is missing"], [1]),
    "a task's folder deleted": Fault(
        lambda d: shutil.rmtree(d.part(1).parent), [*ONE, "file is missing"], list(range(PROMPTS))
    ),
    "foreign file": Fault(foreign, ["copy.parquet", "manifest does not list"], []),
    "manifest cut mid-line": Fault(cut_manifest, ["_manifest/00002", "cut off", "missing"], [4]),
    "manifest line changed": Fault(flip_line, ["_manifest/00001", "line 2", "checksum"], [0]),
    "segment deleted": Fault(
        lambda d: d.segments()[-1].unlink(), ["question_id=2", "prompt is missing"], [2, 3, 4]
    ),
    "killed before its line": Fault(forget_finish, ["not finished", "part-4.parquet"], [4]),
    "failed": Fault(
        lambda d: d.forge(3, {"status": "failed", "reason": "no luck"}), ["failed: no luck"], [3]
    ),
    "all sums right: swapped": Fault(forge_swap, [*ONE, "of another prompt"], [1, 2]),
    "all sums right: page flipped": Fault(forge_page, [*ONE, "damaged Parquet"], [1]),
    "all sums right: no Parquet": Fault(lambda d: d.put(1, b"PAR1"), [*ONE, "damaged"], [1]),
    "all sums right: rows twice": Fault(
        rows(lambda t: pa.concat_tables([t, t.slice(5, 1)])), [*ONE, "25 rows (24 distinct)"], [1]
    ),
    "all sums right: row missing": Fault(
        rows(lambda t: t.slice(1)), [*ONE, "23 rows (23 distinct)"], [1]
    ),
    "all sums right: no rows": Fault(
        lambda d: d.change(1, lambda t: t.slice(0, 0), states=2),
        ["rows 0 is not a whole number from 1", "has", "bytes"],
        [1],
    ),
    "all sums right: column missing": Fault(
        rows(lambda t: t.drop_columns(["step_ms"])), [*ONE, "step_ms"], [1]
    ),
    "all sums right: out of range": Fault(
        rows(replaced("leaf_ratio_before", at_row(7, 1.5))),
        [*ONE, "leaf_ratio_before is not from 0 to 1", "step 2"],
        [1],
    ),
    "all sums right: NaN": Fault(
        rows(replaced("score_before", at_row(4, np.nan))), ["score_before is not finite"], [1]
    ),
    "all sums right: a signal": Fault(
        rows(added("tree_nodes_before", 0, 1)), ["tree_nodes_before differs at one prefix"], [1]
    ),
    "all sums right: a time": Fault(
        rows(added("t_verify_ms", 0, 1e-6)), ["t_verify_ms does not follow"], [1]
    ),
    "all sums right: a count": Fault(
        rows(added("refresh_nodes", 0, 1)), ["counts of a small step are not 0"], [1]
    ),
    "all sums right: A alone": Fault(
        rows(added("accepted", 0, 1)), ["committed is not accepted + 1"], [1]
    ),
    "all sums right: an action": Fault(
        rows(replaced("action", at_row(0, 1))), ["not prefix + action + future"], [1]
    ),
    "all sums right: a position": Fault(
        rows(added("position", 0, 1)), ["state_id is not", "position differs"], [1]
    ),
    "all sums right: a plausible A": Fault(
        rows(one_more_accepted), [*ONE, "differ when computed again, in accepted"], [1], ALL_STATES
    ),
    "all sums right: a plausible text": Fault(
        lambda d: d.change(
            1,
            lambda t: replaced("prompt_tokens", lambda v: v + 1)(
                replaced("context_tokens", lambda v: v + 1)(t)
            ),
        ),
        [*ONE, "differ when computed again", "does not follow"],
        [1],
        ALL_STATES,
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_named_and_repaired_alone(dataset: Dataset, case: str) -> None:
    fault, whole = FAULTS[case], dataset.parts()
    fault.damage(dataset)
    mine = {dataset.part(prompt) for prompt in fault.bad}
    others = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in dataset.paths() if p not in mine}
    findings = dataset.verify(*fault.more)
    text = "\n".join(f"{f['what']} | {f['where']}" for f in findings)
    if "plausible text" not in case:
        for says in fault.says:
            assert says in text, text
    at_fault = {f["unit"][1] for f in findings if f["fault"]}
    assert at_fault == set(map(str, fault.bad)), text
    if fault.bad:
        assert dataset.error is not None and "\n" not in dataset.error
        prompts = f"{len(fault.bad)} prompt"
        assert prompts in dataset.error and "verify.repair=true" in dataset.error
    else:
        assert dataset.error is None
    dataset.verify("verify.repair=true", *fault.more)
    assert dataset.error is None
    now = dataset.parts()
    assert {name: now[name] for name in whole} == whole
    assert {name for name in now if name not in whole} <= {"task=file/copy.parquet"}
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in others} == others
    assert not [f for f in dataset.verify() if f["fault"]] and dataset.error is None


def test_a_sound_dataset(dataset: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.read_bytes() for p in dataset.folder.rglob("*") if p.is_file()}
    assert dataset.verify("verify.states=3") == [] and dataset.error is None
    assert re.search(r"sound: 5 prompts, \d+ rows\n$", capsys.readouterr().out)
    metrics = json.loads((dataset.root / "checks" / "verify" / "metrics.json").read_text())
    assert 3 <= metrics["states_computed_again"] < 12 and metrics["faults"] == 0
    assert dataset.verify("verify.repair=true") == []
    assert {p: p.read_bytes() for p in dataset.folder.rglob("*") if p.is_file()} == before


def test_under_a_smaller_budget_it_is_the_same_dataset(
    dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset.verify("drafting.verify_nodes=2")
    printed = capsys.readouterr().out
    assert "from which 2 follows" in printed and "sound: " in printed


def test_a_prompt_that_changed(dataset: Dataset, tmp_path: Path) -> None:
    whole, text = dataset.parts(), (dataset.home / "prompts.jsonl").read_text()
    prompts = tmp_path / "prompts.jsonl"
    dataset.more = (f"task.path={prompts}",)
    lines = text.splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), "turns": ["w3 w4 w5"]})
    prompts.write_text("\n".join(lines))
    (found,) = dataset.verify()
    assert "changed" in found["what"] and found["where"] == "task=file, question_id=2"
    dataset.verify("verify.repair=true")
    changed = dataset.parts()
    assert [name for name in whole if changed[name] != whole[name]] == ["task=file/part-2.parquet"]
    prompts.write_text(text)
    assert [f["where"] for f in dataset.verify()] == ["task=file, question_id=2"]
    dataset.verify("verify.repair=true")
    assert dataset.parts() == whole


def test_few_failures_are_noted_and_tried_again(dataset: Dataset) -> None:
    dataset.forge(3, {"status": "failed", "reason": "no luck"})
    (failed, left) = dataset.verify("collect.failures=0.5")
    assert dataset.error is None and not failed["fault"] and not left["fault"]
    assert {"prompt failed: no luck"} <= {failed["what"], left["what"]}
    assert dataset.verify("verify.repair=true", "collect.failures=0.5") == []


def test_a_repair_that_is_cut_short_is_gone_on_with(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dataset.parts()
    swap(dataset)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(verify, "collect_units", killed)
        verify.run(dataset.conf("verify.repair=true"))
    missing = [f["where"] for f in dataset.verify() if f["fault"]]
    assert missing == ["task=file, question_id=1", "task=file, question_id=2"]
    collect.run(dataset.conf())
    assert dataset.verify() == [] and dataset.parts() == whole


@pytest.mark.parametrize("damage", ["deleted", "first lines"])
def test_without_a_header_only_a_new_dataset_helps(dataset: Dataset, damage: str) -> None:
    whole = dataset.parts()
    for segment in dataset.segments():
        if damage == "deleted":
            segment.unlink()
        else:
            flip(segment, 0.1)
    for repair in ("false", "true"):
        findings = dataset.verify(f"verify.repair={repair}")
        assert any("no manifest" in f["what"] for f in findings)
        assert "collect.force=true" in str(dataset.error)
    assert dataset.parts() == whole


@pytest.mark.parametrize("copy", [0, 1])
def test_one_copy_of_the_header_is_enough(dataset: Dataset, copy: int) -> None:
    segment = dataset.segments()[copy]
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join([lines[0].replace(b"seed", b"Seed"), *lines[1:]]))
    (note,) = dataset.verify()
    assert not note["fault"] and segment.name in note["where"] and dataset.error is None
    assert len(read_manifest(dataset.store).finished()) == 5


def test_a_segment_of_another_dataset_counts_for_nothing(dataset: Dataset) -> None:
    """A record is its dataset's own: the config's digest is in every line."""
    whole, manifest = dataset.parts(), read_manifest(dataset.store)
    header = dict(manifest.header or {})
    header["config"] = header["config"] | {"seed": 7}
    other = Segment(dataset.store, 7, {k: header[k] for k in ("config", "profile", "code")})
    other.add({k: v for k, v in manifest.units["file", "1"].items() if k != "config"})
    assert len(read_manifest(dataset.store).faults) == 2
    dataset.put(2, dataset.part(1).read_bytes(), config=other.hash)
    faults = [f for f in dataset.verify() if f["fault"]]
    assert [f["where"] for f in faults] == [part_name("file", "2")]
    dataset.verify("verify.repair=true")
    assert dataset.parts() == whole


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "loop", "link to nothing"])
def test_what_is_no_file_is_named_and_replaced(dataset: Dataset, tmp_path: Path, kind: str) -> None:
    """Nothing waits for a pipe, follows a link or removes a folder."""
    whole, path = dataset.parts(), dataset.part(2)
    if kind in ("link", "link to nothing"):
        elsewhere = path.rename(tmp_path / "elsewhere.parquet")
        path.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    else:
        path.unlink()
        {"pipe": os.mkfifo, "folder": os.mkdir, "loop": lambda p: p.symlink_to(p)}[kind](path)
    with pytest.raises(InputError, match="not a regular file"):
        part_files(dataset.folder)
    (fault,) = [f for f in dataset.verify() if f["fault"]]
    assert fault["what"] == "not a regular file"
    dataset.verify("verify.repair=true")
    aside = list(path.parent.glob("*.aside-*"))
    assert len(aside) == (kind == "folder")
    assert dataset.parts() == whole and not path.is_symlink()
    if kind == "link":
        assert elsewhere.is_file()


def test_a_pipe_or_link_among_the_segments_is_not_read(dataset: Dataset, tmp_path: Path) -> None:
    os.mkfifo(dataset.folder / FOLDER / "00009-pipe.jsonl")
    os.mkfifo(dataset.folder / FOLDER / "status-0-of-9.json")
    (tmp_path / "away.jsonl").write_bytes(dataset.segments()[1].read_bytes() * 2)
    (dataset.folder / FOLDER / "00010-link.jsonl").symlink_to(tmp_path / "away.jsonl")
    assert dataset.verify() == [] and dataset.error is None


def test_a_header_without_a_profile(dataset: Dataset) -> None:
    for segment in dataset.segments():
        lines = segment.read_bytes().splitlines(keepends=True)
        header = unseal(lines[0]) | {"profile": None}
        lines[0] = seal({k: v for k, v in header.items() if k != "crc"})
        segment.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match=r"no complete latency profile; collect\.force=true"):
        dataset.verify()


def test_prompts_that_are_not_configured_are_checked_and_left(dataset: Dataset) -> None:
    (extra,) = dataset.verify("collect.prompts_per_task=3")
    assert extra["count"] == 2 and not extra["fault"]
    whole = dataset.part(4).read_bytes()
    flip(dataset.part(4), 0.5)
    flipped = dataset.part(4).read_bytes()
    for repair in ("false", "true"):
        dataset.verify("collect.prompts_per_task=3", f"verify.repair={repair}")
        assert "part-4.parquet" in str(dataset.error) and "collected from" in str(dataset.error)
        assert dataset.part(4).read_bytes() == flipped
    dataset.verify("verify.repair=true")
    assert dataset.error is None and dataset.part(4).read_bytes() == whole


MISTAKES = {
    "another config": (["seed=3"], "another config .seed: 0 in the dataset, 3 now"),
    "no dataset": (["collect.split=evaluate"], "no trajectories there; run python -m pipeline.run"),
    "other models": (
        ["verify.states=1", "pair.mid.path=${pair.target.path}"],
        "other models .models.mid: .* verify.states=0",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(dataset: Dataset, case: str) -> None:
    extra, message = MISTAKES[case]
    with pytest.raises(InputError, match=message):
        verify.run(dataset.conf(*extra))


def test_not_while_a_run_collects(dataset: Dataset) -> None:
    for repair in ("false", "true"):
        with dataset.store.lock("lock"), pytest.raises(DatasetBusyError, match="is collecting"):
            verify.run(dataset.conf(f"verify.repair={repair}"))


def test_a_dataset_at_a_url(dataset: Dataset) -> None:
    whole, url = dataset.parts(), "memory://verify"
    store = open_store(f"{url}/collect/pair=tiny")
    for name in dataset.store.names():
        store.write(name, dataset.store.read(name))
    dataset.more = (f"paths.trajectories={url}",)
    assert dataset.verify("verify.states=1") == []
    store.write("task=file/part-1.parquet", b"PAR1")
    assert [f["unit"][1] for f in dataset.verify()] == ["1"]
    dataset.verify("verify.repair=true")
    assert dataset.error is None
    assert {name: store.read(name) for name in whole} == whole


# --- readers --------------------------------------------------------------------------------------

UNREADABLE = ("truncated", "cut to nothing", "page flipped", "swapped", "deleted")


@pytest.mark.parametrize("case", UNREADABLE)
def test_readers_refuse_what_the_manifest_does_not_say(dataset: Dataset, case: str) -> None:
    FAULTS[case].damage(dataset)
    for folder in (dataset.folder, dataset.root):
        with pytest.raises(InputError, match=r"part-1.parquet: .*; run python -m .*repair=true"):
            read_trajectories(folder)


def test_readers_take_what_the_manifest_lists(
    dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = read_trajectories(dataset.root)
    assert "note" not in capsys.readouterr().out
    assert len(pd.read_parquet(dataset.root / "collect")) == len(whole)  # no file of the manifest
    foreign(dataset)
    forget_finish(dataset)
    dataset.forge(3, {"status": "failed", "reason": "no luck"})
    status = dataset.folder / FOLDER / "status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "left": 2}))
    names = [path.name for path in part_files(dataset.folder)]
    assert names == [f"part-{i}.parquet" for i in range(3)]
    told = capsys.readouterr().out
    for says in ("3 files are not in its manifest", "1 prompts failed", "2 prompts were left"):
        assert says in told
    shutil.rmtree(dataset.folder / FOLDER)  # as an earlier version's
    assert len(part_files(dataset.folder)) == PROMPTS + 1


# --- a sample computed again ----------------------------------------------------------------------


def test_states_that_differ_are_named(dataset: Dataset) -> None:
    table = read_part(dataset.part(1).read_bytes())
    assert differing_states(table, table.take(np.arange(len(table))[::-1])) == {}
    assert differing_states(table, replaced("score_before", lambda v: v + 1e-9)(table)) == {}
    first, second = dict.fromkeys(table.column("state_id").to_pylist())
    changed = added("kept_nodes", 0, 1)(added("score_before", 30, -1e-3)(table))
    assert differing_states(table, changed) == {
        first: ["kept_nodes"],
        second: ["score_before"],
    }
    longer = replaced("accepted_ranks", lambda v: at_row(0, [*v[0], 5])(v))(table)
    assert differing_states(table, longer) == {first: ["accepted_ranks"]}
    assert differing_states(longer, table) == {first: ["accepted_ranks"]}
    assert differing_states(table, table.slice(24)) == {first: ["state_id"]}
    assert set(differing_states(table, table.slice(1))) == {first, second}


@pytest.mark.parametrize(
    ("exact", "differing", "rounding"),
    [(True, 1, False), (False, 5, True), (False, 6, False), (False, 0, True)],
)
def test_rounding_explains_a_few_states_in_float32(
    exact: bool, differing: int, rounding: bool
) -> None:
    states = {str(i): ["accepted"] for i in range(differing)}
    assert Compared(100, exact, {("t", "1"): states}, {}).rounding is rounding


def test_no_more_is_computed_again_than_asked_for(dataset: Dataset) -> None:
    units = plan(dataset.conf(), load_prompts(dataset.conf(), "collect", PROMPTS))
    records = {unit.key: {"states": 4} for unit in units}
    for states, prompts in ((1, 1), (4, 1), (5, 2), (1000, PROMPTS)):
        chosen = draw(units, records, states, 0)
        assert len(chosen) == prompts and len({unit.key for unit in chosen}) == prompts
    assert draw(units, records, 4, 0) != draw(units, records, 4, 1)


def test_a_disk_that_cannot_be_read(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    read = LocalStore.read

    def worn(store: LocalStore, name: str) -> bytes:
        if name.endswith("part-1.parquet"):
            raise OSError(errno.EIO, "Input/output error", name)
        return read(store, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "read", worn)
        (found,) = dataset.verify()
    assert found["where"] == "task=file/part-1.parquet" and "cannot be read" in found["what"]
