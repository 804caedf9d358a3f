"""Which Parquet files of a dataset count: those that its manifest lists as finished."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.manifest import FOLDER, Manifest, read_manifest, within
from pipeline.store import LocalStore, NoFileError, Store
from treegraft_core import InputError

STATUS_FILE = re.compile(rf"{FOLDER}/status[\w.-]*\.json")
REPAIR = "python -m pipeline.run stage=verify verify.repair=true"


def finished_files(folder: Path) -> list[Path]:
    """Return the Parquet files below ``folder``, sorted, that are to be read.

    Where a folder has a manifest, those that it lists as finished; the others, which a run that
    was cut short or somebody else left there, are not read, and a note says so. A dataset without
    a manifest (an earlier version's, or one that was not collected) is read whole.

    Parameters
    ----------
    folder : Path
        A pair's folder, or one above those of several pairs.

    Raises
    ------
    InputError
        If a file that is listed is missing, or not the one that was written.
    """
    files = [
        path for path in folder.rglob("*.parquet") if within(path.relative_to(folder).as_posix())
    ]
    for home in (path.parent for path in folder.rglob(FOLDER) if path.is_dir()):
        store = LocalStore(home)
        manifest = read_manifest(store)
        listed = {home / name for name in manifest.files()}
        others = [path for path in files if path.is_relative_to(home) and path not in listed]
        check_listed(store, manifest)
        for line in notes(store, manifest, [p.relative_to(home).as_posix() for p in others]):
            _tell(line)
        files = [path for path in files if path not in set(others)]
    return sorted(files)


def check_listed(store: LocalStore, manifest: Manifest) -> None:
    """Raise `InputError` if a file that the manifest lists is missing or another one."""
    for name, record in manifest.files().items():
        try:
            size, sha256 = store.digest(name)
        except FileNotFoundError:
            wrong = "is not there, its manifest lists it"
        except NoFileError:
            wrong = "is not a regular file"
        else:
            wrong = difference(record, size, sha256)
        if wrong:
            split = " collect.split=evaluate" if store.folder.parent.name == "evaluate" else ""
            raise InputError(f"trajectories={store.path(name)}: {wrong}; run {REPAIR}{split}")


def difference(record: dict[str, Any], size: int, sha256: str) -> str:
    """Return in what a file is not the one of its record; nothing if it is."""
    if size != record["bytes"]:
        return f"has {size} bytes, its manifest says {record['bytes']}"
    return "" if sha256 == record["sha256"] else "its SHA-256 is not the one in its manifest"


def notes(store: Store, manifest: Manifest, unlisted: list[str]) -> list[str]:
    """Return what a reader should know of a dataset that is not complete, a line each."""
    where = f"note: trajectories={store.url}:"
    found = []
    if unlisted:
        found.append(
            f"{where} {len(unlisted)} files are not in its manifest and not read, the first "
            f"{unlisted[0]}; python -m pipeline.run stage=verify shows them"
        )
    failed = sum(record["status"] == "failed" for record in manifest.units.values())
    if failed:
        found.append(f"{where} {failed} prompts failed; stage=collect tries them again")
    left = sum(state.get("left", 0) for state in run_states(store))
    if left > 0:
        found.append(
            f"{where} not complete, {left} prompts were left when the last run there was cut "
            "short, or it goes on now; stage=collect goes on with it"
        )
    return found


def run_states(store: Store) -> list[dict[str, Any]]:
    """Return the figures of the last runs on a dataset, as far as their files can be read.

    They are for people: a run replaces its file all the time, and nothing is decided by it.
    """
    found = []
    for name in store.names():
        if not STATUS_FILE.fullmatch(name):
            continue
        try:
            state = json.loads(store.read(name))
        except (OSError, ValueError, RecursionError):
            state = None
        whole = isinstance(state, dict) and type(state.get("left")) is int
        found.append(state if whole else {"damaged": name})
    return found


@lru_cache(maxsize=256)
def _tell(line: str) -> None:
    # A stage opens its files more than once; it says so once.
    print(line, flush=True)
