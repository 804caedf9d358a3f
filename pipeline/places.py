"""Where trajectories lie: a folder, or a URL such as s3://, of which stages read a local copy."""

from __future__ import annotations

import io
from pathlib import Path

from omegaconf import DictConfig

from pipeline.inputs import digest
from pipeline.manifest import FOLDER, manifest_of
from pipeline.parts import REPAIR, difference
from pipeline.store import LocalStore, Store, below, digest_of, is_url, open_store
from treegraft_core import InputError

SPLITS = ("collect", "evaluate")


def dataset_url(conf: DictConfig, split: str, pair: str) -> str:
    """Return the path or URL of a pair's trajectories."""
    return below(str(conf.paths.trajectories), f"{split}/pair={pair}")


def meta_folder(conf: DictConfig, split: str, pair: str) -> Path:
    """Return where the stage leaves metrics, provenance and its log."""
    meta = Path(conf.paths.data) / "trajectories" / "meta"
    return (meta if split == "collect" else meta / split) / pair


def old_folder(conf: DictConfig) -> Path:
    """Return where datasets go that ``collect.force`` moves aside."""
    return Path(str(conf.paths.trajectories)) / "old"


def local_trajectories(conf: DictConfig) -> Path:
    """Return the folder that stages read trajectories from: of a URL, where its copy is."""
    url = str(conf.paths.trajectories)
    if not is_url(url):
        return Path(url)
    return Path(conf.paths.cache) / "mirror" / digest([url.rstrip("/")])


def local_pair(conf: DictConfig, split: str, pair: str) -> Path:
    """Return the folder to read a pair's trajectories from; of a URL, a copy, brought up to date.

    Raises
    ------
    InputError
        If an object is missing there, or not what the manifest says.
    StorageError
        If the server does not answer.
    """
    folder = local_trajectories(conf) / split / f"pair={pair}"
    if is_url(str(conf.paths.trajectories)):
        mirror(open_store(dataset_url(conf, split, pair)), LocalStore(folder), split)
    return folder


def mirror(there: Store, here: LocalStore, split: str) -> None:
    """Make ``here`` a copy of the finished files of ``there``, and of its manifest.

    What a file must be comes from the manifest as it was read first: a run may go on there.
    """
    about = {n: there.read(n) for n in there.names() if n.startswith(f"{FOLDER}/")}
    listed = manifest_of(about).files()
    for name in set(here.names()) - set(about) - set(listed):
        here.remove(name)
    local = set(here.names())
    for name, record in listed.items():
        if name in local and not difference(record, *here.digest(name)):
            continue
        try:
            data = there.read(name)
        except FileNotFoundError:
            wrong = "is not there, its manifest lists it"
        else:
            wrong = difference(record, *digest_of(io.BytesIO(data)))
        if wrong:
            choice = "" if split == SPLITS[0] else f" collect.split={split}"
            raise InputError(
                f"trajectories={below(there.url, name)}: {wrong}; run {REPAIR}{choice}"
            )
        here.write(name, data)
    for name, data in about.items():
        here.write(name, data)
