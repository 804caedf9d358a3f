"""One dataset of trajectories while it is collected: what is there, what is missing, what comes."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from pipeline.logs import event
from pipeline.manifest import (
    HEADER,
    Manifest,
    Segment,
    UnitKey,
    differences,
    header_record,
    part_name,
    read_manifest,
    seal,
    within,
)
from pipeline.report import git_sha
from pipeline.store import DatasetBusyError, LocalStore, Store, hidden
from pipeline.units import Unit, settings
from pipeline.worker import Result
from treegraft_core import InputError, LatencyProfile
from treegraft_core.errors import StageError
from treegraft_core.files import to_disk

WHOLE = "lock"
BEGIN = "begin"
WAIT_S = 2.0
BEGIN_S = 60.0


@contextmanager
def hold(store: Store, shard: int, shards: int, wait: bool) -> Iterator[None]:
    """Hold a dataset's lock while collecting into it; shards share it, each with its own part.

    Parameters
    ----------
    store : Store
        The dataset.
    shard, shards : int
        This run's part.
    wait : bool
        Wait for another run instead of refusing.

    Raises
    ------
    DatasetBusyError
        If another run holds it.
    """
    told, tries = False, 0
    while True:
        tries += 1
        with ExitStack() as stack:
            try:
                stack.enter_context(store.lock(WHOLE, shared=shards > 1))
                if shards > 1:
                    stack.enter_context(store.lock(f"{WHOLE}-{shard}-of-{shards}"))
                    _check_division(store, shards)
            except DatasetBusyError as error:
                if not wait and tries > 1:
                    raise
                if wait and not told:
                    print(f"waiting: {str(error).partition(';')[0]}", flush=True)
                    told = True
            else:
                yield
                return
        # Once again even without waiting: stage=status has it for an instant while it looks.
        time.sleep(WAIT_S if wait else 0.2)


def _check_division(store: Store, shards: int) -> None:
    """Raise `DatasetBusyError` if runs divide the prompts otherwise: they would do some twice."""
    for key in store.locks():
        part = re.fullmatch(rf"{WHOLE}-\d+-of-(\d+)", key)
        if part is not None and int(part[1]) != shards and (who := store.held(key)):
            raise DatasetBusyError(
                f"collect.shards={shards}: {who} collects into {store.url} with collect.shards="
                f"{part[1]}; give the same, or wait for it"
            )


def with_logged_budget(conf: DictConfig, store: Store) -> DictConfig:
    """Return the configuration with the dataset's B_ver, if the configured one is smaller.

    What a smaller budget keeps follows from the rows of a larger one, so a dataset serves both;
    what is missing of it is collected with its own.
    """
    header = read_manifest(store).header
    logged = None if header is None else header["config"].get("drafting.verify_nodes")
    ours = int(conf.drafting.verify_nodes)
    if not isinstance(logged, int) or logged <= ours:
        return conf
    print(
        f"note: the dataset has drafting.verify_nodes={logged}, from which {ours} follows; what is "
        f"missing is collected with {logged}",
        flush=True,
    )
    changed = conf.copy()
    changed.drafting.verify_nodes = logged
    return changed


def profile_of(header: dict[str, Any], store: Store) -> LatencyProfile:
    """Return the latency profile in a dataset's header.

    Raises
    ------
    InputError
        If it is none.
    """
    try:
        return LatencyProfile.from_dict(header.get("profile"), "of the dataset")
    except InputError as error:
        raise InputError(
            f"trajectories={store.url}: its manifest has no complete latency profile; "
            "collect.force=true moves the dataset aside and begins a new one"
        ) from error


@contextmanager
def alone(store: Store) -> Iterator[None]:
    """Hold the lock under which a dataset is begun, for an instant."""
    end = time.monotonic() + BEGIN_S
    while True:
        with ExitStack() as stack:
            try:
                stack.enter_context(store.lock(BEGIN))
            except DatasetBusyError:
                if time.monotonic() > end:
                    raise
            else:
                yield
                return
        time.sleep(0.05)


class Dataset:
    """The manifest and files of one pair's trajectories, held by this run.

    Parameters
    ----------
    store : Store
        Where they are.
    conf : DictConfig
        The composed configuration.
    profile : LatencyProfile
        That a new dataset's t is computed from; one that has begun has its own.
    """

    def __init__(self, store: Store, conf: DictConfig, profile: LatencyProfile):
        self.store, self.conf = store, conf
        self.run = uuid.uuid4().hex[:12]
        self.manifest = read_manifest(store)
        self.own_profile = profile
        header = self.manifest.header
        if header is None and any(within(name) for name in store.names()):
            raise InputError(
                f"trajectories={store.url}: has files but no manifest that can be read (an earlier "
                "version's, or damaged); collect.force=true moves it aside and begins a new one"
            )
        self.profile = profile if header is None else profile_of(header, store)
        self.config: dict[str, Any] | None = None if header is None else header["config"]
        self._segment: Segment | None = None
        self._check(self._known_settings())

    @property
    def other_profile(self) -> bool:
        """Whether the profile in ``paths.profile`` is not the one that t is computed from."""
        return self.profile.to_dict() != self.own_profile.to_dict()

    def _known_settings(self) -> dict[str, Any]:
        # Without what only a worker knows, so that a mistake is told before models are loaded.
        old = self.config or {}
        models = {name: value for name, value in old.items() if name.startswith("models.")}
        return settings(self.conf, models)

    def _check(self, new: dict[str, Any]) -> None:
        if self.config is None:
            return
        changed = differences(self.config, new)
        if changed:
            raise InputError(
                f"trajectories={self.store.url}: collected with another config ("
                f"{'; '.join(changed)}); give the same again, or collect.force=true, which moves "
                "it aside and begins a new one"
            )

    def missing(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units that are not finished.

        Raises
        ------
        InputError
            If a prompt had another text when it was collected.
        """
        finished = self.manifest.finished()
        there = set(self.store.names())
        found = []
        for unit in units:
            record = finished.get(unit.key)
            if record is None:
                found.append(unit)
            elif record.get("digest") != unit.digest:
                raise InputError(
                    f"{unit}: had another text when it was collected into {self.store.url}; give "
                    "it another id or the task another name (task.name), or collect.force=true, "
                    "which moves the dataset aside and begins a new one"
                )
            elif record["status"] == "done" and record["file"] not in there:
                found.append(unit)
        return found

    def accept(self, about: dict[str, Any]) -> None:
        """Check that units of these models belong here; the first worker's models decide.

        Raises
        ------
        InputError
            If the dataset was begun with another configuration or other models.
        StageError
            If another shard has begun it in the meantime with another latency profile.
        """
        new = settings(self.conf, about)
        self._check(new)
        if self.config is None:
            self._begin(new)
        self.config = new

    def _begin(self, config: dict[str, Any]) -> None:
        # Of shards that begin at once one says what the dataset is; the others have to agree.
        with alone(self.store):
            found = read_manifest(self.store).header
            if found is None:
                self.store.write(HEADER, seal(header_record(self._header(config))))
                return
        self.config = found["config"]
        self._check(config)
        if profile_of(found, self.store) != self.profile:
            raise StageError(
                f"trajectories={self.store.url}: another run has just begun it with another "
                "latency profile; run the same command again, which takes that one"
            )

    def _header(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"config": config, "profile": self.profile.to_dict(), "code": git_sha()}

    def commit(self, result: Result) -> None:
        """Make a unit's file visible, then record the unit."""
        name = part_name(*result.key)
        if result.temporary is not None:
            self.store.commit(result.temporary, name)
        try:
            self.segment().add(result.record)
        except DatasetBusyError:
            if result.temporary is not None and name not in self.manifest.files():
                self.store.remove(name)
            raise
        except FileNotFoundError as error:
            if result.temporary is not None:
                self.store.remove(name)  # no file without its record
            raise StageError(
                f"trajectories={self.store.url}: the manifest has gone while this run collected; "
                "somebody has removed or moved the dataset; the same command begins again"
            ) from error
        self.manifest.units[result.key] = result.record

    def drop(self, result: Result) -> None:
        """Remove the file of a result that is not wanted."""
        if result.temporary is not None:
            self.store.remove(result.temporary)

    def segment(self) -> Segment:
        """Return the segment that this run writes."""
        if self._segment is None:
            assert self.config is not None, "a worker has to be accepted first"
            header = self._header(self.config)
            self._segment = Segment(self.store, self.manifest.segments + 1, header)
        return self._segment

    def clean(self) -> None:
        """Remove temporary files: all, of runs that were killed; beside other shards the own."""
        mine = f".{self.run}-" if int(self.conf.collect.shards) > 1 else ""
        for name in self.store.names():
            if hidden(name) and name.endswith(".tmp") and mine in name:
                self.store.remove(name)
        for fault in self.manifest.faults:
            event("manifest_damaged", "warning", where=fault.where, what=fault.what)


def move_aside(store: Store, old: Path) -> Path | None:
    """Move a dataset to a new folder below ``old``; return it, None if there is no dataset.

    Raises
    ------
    InputError
        If it is not in a folder: objects cannot be renamed at once.
    """
    if not isinstance(store, LocalStore):
        raise InputError(
            f"collect.force=true: the dataset {store.url} is not in a folder and cannot be moved "
            "aside at once; give another paths.trajectories"
        )
    if not store.folder.is_dir() or not any(store.folder.iterdir()):
        return None
    number = 1
    while (place := old / f"{store.folder.parent.name}-{store.folder.name}-{number}").exists():
        number += 1
    old.mkdir(parents=True, exist_ok=True)
    os.replace(store.folder, place)
    to_disk(old)
    return place


def unit_records(manifest: Manifest, units: Sequence[Unit]) -> list[dict[str, Any]]:
    """Return the last records of units that have one, in the units' order."""
    keys: list[UnitKey] = [unit.key for unit in units]
    return [manifest.units[key] for key in keys if key in manifest.units]
