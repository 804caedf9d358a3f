"""Where datasets lie: a folder, and objects on a server of the S3 protocol, faults included."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import collect, select, store
from pipeline import run as command_line
from pipeline.places import local_pair, local_trajectories
from pipeline.store import (
    DatasetBusyError,
    LocalStore,
    RemoteStore,
    StorageError,
    Store,
    open_store,
    temporary_name,
)
from tests.pipeline.conftest import conf, overrides
from tests.pipeline.datasets import part_sums, until, write_place
from tests.processes import KILL, CommandLine, Template, send
from treegraft_core import InputError

pytest.importorskip("s3fs", reason="s3:// is an extra")
pytest.importorskip("moto", reason="the S3 server is for tests")

from tests.pipeline.s3 import BUCKET, KEY, S3, SECRET

PROMPTS = 8
FAST_BEAT_S = 0.2


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with pytest.MonkeyPatch.context() as patch:
        found = S3()
        found.start()
        found.use(patch)
        yield found
        found.stop()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BEAT_S", FAST_BEAT_S)


def url(name: str) -> str:
    return f"s3://{BUCKET}/{name}"


@pytest.fixture(params=["folder", "s3", "memory"])
def there(request: pytest.FixtureRequest, server: S3, tmp_path: Path) -> Store:
    place = {"folder": str(tmp_path / "d"), "s3": url(tmp_path.name), "memory": "memory://d"}
    found = open_store(place[request.param])
    for name in found.names():
        found.remove(name)
    return found


def test_a_file_has_its_name_only_when_it_is_complete(there: Store) -> None:
    name = "task=a%2Fb/part-1.parquet"
    temporary = temporary_name(name)
    there.put(temporary, b"rows")
    with pytest.raises(FileNotFoundError):
        there.read(name)
    there.commit(temporary, name)
    assert there.names() == [name]
    assert there.read(name) == there.open(name).read() == b"rows"
    assert there.digest(name)[0] == 4
    there.remove(name)
    there.remove(name)
    assert there.names() == []


def test_lines_are_added(there: Store) -> None:
    there.append("_manifest/1.jsonl", b"one\n", new=True)
    there.append("_manifest/1.jsonl", b"two\n")
    assert there.read("_manifest/1.jsonl") == b"one\ntwo\n"
    again = open_store(there.url)
    again.append("_manifest/1.jsonl", b"three\n")
    assert there.read("_manifest/1.jsonl") == b"one\ntwo\nthree\n"


def test_a_file_that_has_gone_is_not_begun_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "d")
    store.append("a.jsonl", b"one\n", new=True)
    store.remove("a.jsonl")
    with pytest.raises(FileNotFoundError):
        store.append("a.jsonl", b"two\n")
    assert store.names() == []


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "a\\b"])
def test_nothing_outside_the_dataset_has_a_name(there: Store, name: str) -> None:
    for call in (there.read, there.open, there.remove, there.digest):
        with pytest.raises(InputError, match="not the name of a file inside the dataset"):
            call(name)
    with pytest.raises(InputError):
        there.commit("a", name)


def test_a_link_does_not_lead_out(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "task=x").symlink_to(tmp_path / "out")
    with pytest.raises(InputError, match="a link leads out of the dataset"):
        LocalStore(tmp_path / "d").put("task=x/part-1.parquet", b"rows")
    assert not list((tmp_path / "out").iterdir())


# Locks -------------------------------------------------------------------------------------


def test_a_second_run_is_refused_until_the_first_ends(there: Store) -> None:
    second = open_store(there.url)
    assert second.held("lock") is None
    with there.lock("lock"):
        with pytest.raises(DatasetBusyError, match=r"process \d+ on .* is collecting into it"):
            second.lock("lock").__enter__()
        assert "process" in str(second.held("lock"))
    assert second.held("lock") is None
    with second.lock("lock"):
        pass


def test_shards_share_the_lock_and_a_whole_run_is_refused(there: Store) -> None:
    others = [open_store(there.url) for _ in range(3)]
    with (
        there.lock("lock", shared=True),
        others[0].lock("lock", shared=True),
        there.lock("lock-0-of-2"),
        others[0].lock("lock-1-of-2"),
    ):
        for key in ("lock-0-of-2", "lock"):
            with pytest.raises(DatasetBusyError):
                others[1].lock(key).__enter__()
    with others[2].lock("lock"), pytest.raises(DatasetBusyError):
        others[1].lock("lock", shared=True).__enter__()


@pytest.mark.parametrize("name", [".lock-lock.json", ".lock-lock.shared-dead.json"])
def test_the_lock_of_a_run_that_was_killed_is_taken_over(
    server: S3, tmp_path: Path, name: str
) -> None:
    there = RemoteStore(url(tmp_path.name))
    there.write(name, b'{"host": "gone", "pid": 1, "run": "dead", "beat": 3}')
    assert there.held("lock") is None
    with there.lock("lock"):
        assert "process" in str(RemoteStore(there.url).held("lock"))
    assert there.names() == []


def test_a_run_whose_lock_was_taken_over_adds_nothing_more(server: S3, tmp_path: Path) -> None:
    there = RemoteStore(url(tmp_path.name))
    with there.lock("lock"):
        there.append("_manifest/1.jsonl", b"one\n")
        there.write(".lock-lock.json", b'{"host": "other", "pid": 7, "run": "another", "beat": 0}')
        until(lambda: there.taken is not None, "the loss of the lock")
        with pytest.raises(DatasetBusyError, match="process 7 on other"):
            there.append("_manifest/1.jsonl", b"two\n")
    assert there.read("_manifest/1.jsonl") == b"one\n"
    assert ".lock-lock.json" in there.names()


# Places that do not work -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nosuch://a/b", "paths.trajectories=nosuch://a/b: no file system for it"),
        (f"s3://{KEY}:{SECRET}@{BUCKET}/x", "has a user or a key in its URL"),
        ("s3://no-such-bucket/x", "no such bucket or folder; create it first"),
    ],
)
def test_a_place_that_cannot_be_is_refused(server: S3, place: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        open_store(place).write("a", b"")
    assert message in str(refused.value)
    assert SECRET not in str(refused.value)


def test_without_the_extra_it_is_named(server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    known = sys.modules["fsspec.registry"]._registry  # type: ignore[attr-defined]
    monkeypatch.delitem(known, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError, match=r"for s3:// install treegraft\[s3\]"):
        open_store("s3://a/b")


def test_a_server_that_is_gone_is_one_line(
    server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PATIENCE_S", 0.0)
    there = RemoteStore(url(tmp_path.name))
    there.write("a", b"1")
    server.stop()
    try:
        with pytest.raises(StorageError) as gone:
            there.names()
    finally:
        server.start()
    line = str(gone.value)
    assert "cannot be read or written (EndpointConnectionError: Could not connect" in line
    assert line.endswith("mend that, the same command goes on") and "\n" not in line
    assert there.read("a") == b"1"


def test_a_share_of_failing_requests_changes_nothing(server: S3, tmp_path: Path) -> None:
    there, faults = RemoteStore(url(tmp_path.name)), server.faults
    server.share = 0.2
    try:
        for i in range(6):
            name = f"task=t/part-{i}.parquet"
            temporary = temporary_name(name)
            there.put(temporary, bytes([i]))
            there.commit(temporary, name)
            there.append("_manifest/1.jsonl", b"%d\n" % i)
        found = {name: there.read(name) for name in there.names()}
    finally:
        server.share = 0.0
    assert server.faults > faults
    parts = {f"task=t/part-{i}.parquet": bytes([i]) for i in range(6)}
    assert found == parts | {"_manifest/1.jsonl": b"".join(b"%d\n" % i for i in range(6))}


# Collection --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("store"), PROMPTS)


def options(place: Path, trajectories: str, *extra: str) -> list[str]:
    return [
        f"paths.data={place / 'data'}",
        f"paths.trajectories={trajectories}",
        f"task.path={place / 'prompts.jsonl'}",
        f"collect.prompts_per_task={PROMPTS}",
        "collect.states_per_turn=0",
        "collect.replay_rounds=0",
        "engine.workers=0",
        *extra,
    ]


@pytest.fixture(scope="module")
def alone(home: Path, place: Path) -> dict[str, str]:
    collect.run(conf(home, "collect", *options(place, str(place / "alone"))))
    return part_sums(place / "alone")


def mirrored(home: Path, place: Path, trajectories: str) -> dict[str, str]:
    given = conf(home, "select", *options(place, trajectories))
    local_pair(given, "collect", "tiny")
    return part_sums(local_trajectories(given))


def parts(dataset: Store) -> int:
    return sum("/part-" in name for name in dataset.names())


def test_a_dataset_of_objects_is_that_of_a_folder_whatever_happens(
    home: Path,
    place: Path,
    alone: dict[str, str],
    server: S3,
    template: Template,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    there = url("whatever")
    dataset = RemoteStore(f"{there}/collect/pair=tiny")
    arguments = overrides(home, *options(place, there))
    # Killed while a share of the requests fails: its lock and temporary objects stay.
    server.share = 0.05
    server.after_parts(2, lambda: send(run.pid, KILL))
    run = CommandLine(template, tmp_path, "stage=collect", *arguments)
    ran = run.end()
    text = ran.stdout + ran.stderr
    server.share = 0.0
    assert ran.returncode == -KILL and parts(dataset) == 2, text
    assert ".lock-lock.json" in dataset.names()
    # The server goes away while a run goes on, and stays away: one line, what is there stays.
    server.after_parts(2, server.stop)
    with monkeypatch.context() as patch:
        patch.setattr(store, "PATIENCE_S", 1.0)
        patch.setattr(sys, "argv", ["pipeline.run", "stage=collect", *arguments])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
    printed = "".join(capfd.readouterr())
    server.start()
    assert ended.value.code == 1, printed
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"trajectories={there}" in errors[0], printed
    assert "Traceback" not in printed
    assert SECRET not in printed + text and KEY not in printed + text
    # The killed run had no time to record its second part: that one was stored once more.
    assert parts(dataset) == 3
    # The same command goes on; an outage that ends is waited for.
    again = threading.Timer(2, server.start)
    server.after_parts(1, lambda: (server.stop(), again.start()))
    collect.run(conf(home, "collect", *options(place, there)))
    again.join()
    assert mirrored(home, place, there) == alone
    assert not [name for name in dataset.names() if name.startswith(".") or name.endswith(".tmp")]


# Reading -----------------------------------------------------------------------------------


def test_stages_read_a_local_copy_that_is_kept_up_to_date(
    home: Path, place: Path, alone: dict[str, str], server: S3
) -> None:
    there = url("read")
    few = options(place, there, "collect.prompts_per_task=4")
    collect.run(conf(home, "collect", *few))
    first, copy = mirrored(home, place, there), local_trajectories(conf(home, "select", *few))
    assert len(first) == 4 and first.items() <= alone.items()
    # More prompts there; a file of the copy is damaged, and one is not in the dataset.
    collect.run(conf(home, "collect", *options(place, there)))
    name = sorted(first)[0]
    (copy / name).write_bytes(b"damaged")
    (copy / name).with_name("part-other.parquet").write_bytes(b"other")
    assert mirrored(home, place, there) == alone
    before = server.requests
    kept = (copy / name).stat().st_mtime_ns
    assert mirrored(home, place, there) == alone
    assert (copy / name).stat().st_mtime_ns == kept
    assert server.requests - before < PROMPTS + 4, "files that are there are not fetched again"


def test_a_damaged_object_is_refused(
    home: Path, place: Path, alone: dict[str, str], server: S3
) -> None:
    there = url("damaged")
    collect.run(conf(home, "collect", *options(place, there, "collect.prompts_per_task=2")))
    dataset = RemoteStore(f"{there}/collect/pair=tiny")
    name = next(name for name in dataset.names() if name.endswith(".parquet"))
    dataset.write(name, b"other bytes")
    with pytest.raises(InputError, match=r"its manifest says .*; run .*stage=verify"):
        mirrored(home, place, there)
    dataset.remove(name)
    with pytest.raises(InputError, match=r"is not there, its manifest lists it; run"):
        mirrored(home, place, there)


def test_select_from_objects_is_select_from_files(
    home: Path, place: Path, alone: dict[str, str], server: S3
) -> None:
    there, found = url("select"), {}
    collect.run(conf(home, "collect", *options(place, there)))
    for kind, trajectories in (("folder", str(place / "alone")), ("s3", there)):
        chosen = f"paths.selection={place / kind}"
        select.run(conf(home, "select", *options(place, trajectories, chosen)))
        found[kind] = (place / kind / "selection.json").read_bytes()
    assert found["s3"] == found["folder"]


def test_a_folder_is_read_where_it_is(home: Path, place: Path) -> None:
    given = conf(home, "select", *options(place, str(place / "alone")))
    assert local_pair(given, "collect", "tiny") == place / "alone" / "collect" / "pair=tiny"


def test_two_threads_do_not_hold_one_lock(server: S3, tmp_path: Path) -> None:
    held, refused = [], []
    barrier = threading.Barrier(4)
    ready = threading.Event()

    def take() -> None:
        there = RemoteStore(url(tmp_path.name))
        barrier.wait()
        try:
            with there.lock("lock"):
                held.append(1)
                ready.wait()
        except DatasetBusyError:
            refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(held) + len(refused) == 4, "all four")
    ready.set()
    for thread in threads:
        thread.join()
    assert len(held) == 1
