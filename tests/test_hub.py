"""Schedulers on the hub, against a server on this machine: whole, of one commit, and no secret."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.fuzzing import Touch
from tests.hub_server import TOKEN, Hub, Repository
from tests.test_artifact import assert_same, margins_of, random_artifact
from treegraft_core import InputError, SchedulerArtifact, StageError

NAME = "me/mine"
FILES = {"README.md", "scheduler.json", "scheduler.safetensors"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    found = Hub()
    monkeypatch.setenv("HF_ENDPOINT", found.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's tries
    huggingface_hub.utils.disable_progress_bars()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    """The token is in nothing that is printed, logged or saved."""
    caplog.set_level(logging.DEBUG)
    yield
    printed = capfd.readouterr()
    assert TOKEN not in printed.out + printed.err + caplog.text
    for path in tmp_path.rglob("*"):
        assert not (path.is_file() and TOKEN.encode() in path.read_bytes()), path


def pushed(hub: Hub, seed: int = 0, **options: Any) -> SchedulerArtifact:
    artifact = random_artifact(seed=seed)
    url = artifact.push_to_hub(NAME, token=TOKEN, **options)
    assert url == f"{hub.url}/{NAME}/commit/{hub.repositories[NAME].commits[-1][0]}"
    return artifact


def loaded(tmp_path: Path, name: str = NAME, **options: Any) -> SchedulerArtifact:
    return SchedulerArtifact.from_pretrained(name, cache_dir=tmp_path / "cache", **options)


def refused(kind: type[Exception], message: str, act: Any) -> None:
    with pytest.raises(kind, match=message) as caught:
        act()
    assert type(caught.value) is kind
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and TOKEN not in text


def test_there_and_back(hub: Hub, tmp_path: Path) -> None:
    first, second = pushed(hub, 0), pushed(hub, 1)
    old, new = (sha for sha, _ in hub.repositories[NAME].commits)
    assert set(hub.repositories[NAME].commits[0][1]) == FILES
    for revision, artifact in ((None, second), ("main", second), (old, first), (new, second)):
        found = loaded(tmp_path, revision=revision)
        assert_same(found, artifact)
        assert margins_of(found) == margins_of(artifact)
        assert found.metadata == artifact.metadata
    card = hub.repositories[NAME].commits[-1][1]["README.md"].decode()
    assert f'from_pretrained("{NAME}")' in card


def test_saved_here_and_there(hub: Hub, tmp_path: Path) -> None:
    """save_pretrained uploads its three files, not what else lies in the folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "private.txt").write_text("mine")
    artifact = random_artifact()
    url = artifact.save_pretrained(tmp_path / "mine", True, NAME, token=TOKEN, private=True)
    assert url is not None and url.startswith(hub.url)
    assert set(hub.repositories[NAME].commits[-1][1]) == FILES
    assert hub.repositories[NAME].private
    assert_same(SchedulerArtifact.from_pretrained(tmp_path / "mine"), artifact)
    assert_same(loaded(tmp_path, token=TOKEN), artifact)


def test_a_folder_here_comes_first(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    pushed(hub, 0)
    monkeypatch.chdir(tmp_path)
    random_artifact(seed=1).save_pretrained(tmp_path / NAME)
    hub.asked.clear()
    assert_same(SchedulerArtifact.from_pretrained(NAME), random_artifact(seed=1))
    assert hub.asked == []


def test_only_two_files_are_asked_for_and_both_of_one_commit(hub: Hub, tmp_path: Path) -> None:
    pushed(hub)
    sha = hub.repositories[NAME].add({"code.py": b"raise SystemExit", "pytorch_model.bin": b"x"})
    hub.asked.clear()
    loaded(tmp_path)
    places = {line.split()[1] for line in hub.asked}
    assert {place.rsplit("/", 1)[1] for place in places} == FILES - {"README.md"}
    second = {p for p in places if p.endswith("safetensors")}
    assert second == {f"/{NAME}/resolve/{sha}/scheduler.safetensors"}


def test_the_environments_token_is_used(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    pushed(hub, private=True)
    refused(
        InputError, r"scheduler=me/mine: .* \(HTTP 401\); give token=", lambda: loaded(tmp_path)
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.tokens.clear()
    loaded(tmp_path)
    assert hub.tokens == {TOKEN}


READS: dict[str, tuple[dict[str, int | str], type[Exception], str]] = {
    "unauthorised": ({"HEAD": 401}, InputError, r"\(HTTP 401\); give token=, or run hf auth login"),
    "forbidden": ({"HEAD": 403}, InputError, r"no right to it \(HTTP 403\)"),
    "not found": ({"HEAD": 404}, InputError, r"no such repository on the hub \(HTTP 404\)"),
    "fault": ({"HEAD": 500}, StageError, r"does not work \(HTTP 500\); run it again"),
    "fault later": ({"GET .*safetensors": 500}, StageError, r"\(HTTP 500\); run it again"),
    "too large": ({"HEAD .*safetensors": "size"}, InputError, "has 10,737,418,240 bytes, more"),
    "truncated": ({"GET .*safetensors": "truncated"}, StageError, "does not work .*; run it again"),
    "truncated header": ({"GET .*json": "truncated"}, StageError, "does not work .*; run it again"),
}


@pytest.mark.parametrize("name", READS)
def test_faults_of_a_download(hub: Hub, tmp_path: Path, name: str) -> None:
    """One line; and once the fault is over, the same call works."""
    artifact = pushed(hub)
    hub.faults, kind, message = READS[name]
    refused(kind, f"scheduler={NAME}: .*{message}", lambda: loaded(tmp_path, token=TOKEN))
    if name == "too large":
        assert not any(line.startswith("GET") and "safetensors" in line for line in hub.asked)
    hub.faults = {}
    assert_same(loaded(tmp_path), artifact)


WRITES: dict[str, tuple[str, int, type[Exception], str]] = {
    "unauthorised": ("create", 401, InputError, r"\(HTTP 401\); give token="),
    "forbidden": ("create", 403, InputError, r"\(HTTP 403\); give token="),
    "refused": ("create", 400, InputError, r"refuses it \(HTTP 400: .*\); mend"),
    "gone": ("preupload", 404, InputError, r"\(HTTP 404\)"),
    "changed": ("commit", 409, InputError, r"changed the repository just now \(HTTP 409\)"),
    "too large": ("commit", 413, InputError, r"too large for the hub \(HTTP 413\)"),
    "fault": ("commit", 500, StageError, r"\(HTTP 500\); run it again"),
    "fault first": ("create", 503, StageError, r"\(HTTP 503\); run it again"),
}


@pytest.mark.parametrize("name", WRITES)
def test_faults_of_an_upload(hub: Hub, name: str) -> None:
    place, status, kind, message = WRITES[name]
    hub.faults = {f"POST /api/.*{place}": status}
    refused(kind, f"scheduler={NAME}: .*{message}", lambda: pushed(hub))
    hub.faults = {}
    pushed(hub)


def test_names_that_are_none(hub: Hub, tmp_path: Path) -> None:
    for name in ("a/b/c", "data/schedulers/../x", "-x-", "a b", "you/x.git"):
        refused(
            InputError, "no such folder, and not the name of", lambda n=name: loaded(tmp_path, n)
        )
    refused(InputError, r"no such repository on the hub \(HTTP 404\)",
            lambda: loaded(tmp_path, "me/other", token=TOKEN))  # fmt: skip
    refused(InputError, r"holds no literal", lambda: loaded(tmp_path, "me/other.py"))
    assert not hub.repositories


def test_a_revision_that_is_not_there(hub: Hub, tmp_path: Path) -> None:
    pushed(hub)
    message = "revision=v9: the repository me/mine has no such branch, tag or commit"
    refused(InputError, message, lambda: loaded(tmp_path, revision="v9"))
    refused(InputError, message, lambda: pushed(hub, revision="v9"))


def test_a_repository_of_something_else(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME] = Repository(False)
    hub.repositories[NAME].add({"config.json": b"{}", "model.safetensors": b""})
    refused(InputError, "is no complete scheduler", lambda: loaded(tmp_path))


def test_tensors_that_are_not_the_headers(hub: Hub, tmp_path: Path) -> None:
    pushed(hub)
    data = bytearray(hub.repositories[NAME].commits[-1][1]["scheduler.safetensors"])
    data[-1] ^= 1
    hub.repositories[NAME].add({"scheduler.safetensors": bytes(data)})
    refused(InputError, "is not the file that scheduler.json was written with",
            lambda: loaded(tmp_path))  # fmt: skip


def test_a_pickle_is_not_read(hub: Hub, tmp_path: Path) -> None:
    pushed(hub)
    bomb = pickle.dumps(Touch(tmp_path / "proof"))
    hub.repositories[NAME].add({"scheduler.safetensors": bomb, "scheduler.json": bomb})
    refused(InputError, "not a complete scheduler folder", lambda: loaded(tmp_path))
    assert not (tmp_path / "proof").exists()
    pickle.loads(bomb)
    assert (tmp_path / "proof").exists()


def test_without_the_hub(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    """What is in the cache can be had; what is not is named."""
    artifact = pushed(hub)
    refused(StageError, "not in the cache, and the hub is not asked",
            lambda: loaded(tmp_path, local_files_only=True))  # fmt: skip
    loaded(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    refused(StageError, "the hub cannot be reached or does not work", lambda: loaded(tmp_path))
    refused(StageError, "the hub cannot be reached or does not work", lambda: pushed(hub))
    assert_same(loaded(tmp_path, local_files_only=True), artifact)
