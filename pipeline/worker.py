"""What a worker of stage=collect does: one unit at a time, from the prompt to a complete file."""

from __future__ import annotations

import ctypes
import hashlib
import io
import logging
import os
import platform
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from omegaconf import DictConfig, OmegaConf

from pipeline.engine import drafting_config, open_pair
from pipeline.manifest import UnitKey, part_name
from pipeline.rows import enumerate_text, pack_memory, sample_roots, state_rows, write_rows
from pipeline.secrets import redact, redact_logs
from pipeline.store import open_store, temporary_name
from pipeline.texts import Text, answer_room, decode_texts, fingerprint, too_long
from pipeline.units import Unit, rng_of
from treegraft_core import InputError, LatencyProfile
from treegraft_core.enumeration import out_of_memory
from treegraft_core.errors import NonFiniteError
from treegraft_core.fit_check import families

log = logging.getLogger(__name__)

MEMORY, STORAGE, DATA, LOST = "memory", "storage", "data", "lost"
"""Why a unit failed: what may go better in smaller packs, what stops the run, and what is final."""


NO_FAULT = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a worker, and is no fault of its unit."""


@dataclass(frozen=True)
class Setup:
    """What every worker starts from, as plain data that can be sent anywhere."""

    conf: dict[str, Any]
    profile: dict[str, Any]
    url: str
    run: str = ""


@dataclass(frozen=True)
class Order:
    """One unit to collect.

    Attributes
    ----------
    unit : Unit
        It.
    beside : tuple of Unit
        Units whose texts are decoded with it, since this worker will get them next.
    smaller : bool
        One state a pack: the unit ran out of memory before.
    attempt : int
        From 1.
    """

    unit: Unit
    beside: tuple[Unit, ...] = ()
    smaller: bool = False
    attempt: int = 1


@dataclass
class Result:
    """What became of a unit.

    Attributes
    ----------
    key : (str, str)
        Task and prompt id.
    status : {"done", "empty", "failed"}
        Done: its file is complete under the hidden name ``temporary``. Empty: it has no states.
    record : dict
        For the manifest.
    temporary : str or None
        The file.
    why : str or None
        Of a failure: one of memory, storage, data.
    seconds : float
        That it took.
    memory_mib : float
        The worker's resident memory afterwards.
    """

    key: UnitKey
    status: str
    record: dict[str, Any] = field(default_factory=dict)
    temporary: str | None = None
    why: str | None = None
    seconds: float = 0.0
    memory_mib: float = 0.0


def memory_mib() -> float:
    """Return this process's resident memory, MiB."""
    import psutil

    return round(psutil.Process().memory_info().rss / 2**20, 1)


def give_back() -> None:
    """Give memory that is free back to the system, where the C library knows how.

    Prompts differ in length, and so do their buffers: the free pieces between them add up.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def first_line(error: BaseException, limit: int = 300) -> str:
    """Return an error as one line."""
    lines = str(error).strip().splitlines() or [""]
    name = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    return f"{name}{lines[0]}"[:limit].rstrip(": ")


class Collector:
    """A copy of the pair's models, and what it collects with them.

    Parameters
    ----------
    setup : Setup
        Configuration, latency profile, and where the dataset is.
    device : str or None
        Where the models go (default: as configured).

    Raises
    ------
    InputError
        If the models cannot be loaded.
    """

    def __init__(self, setup: Setup, device: str | None = None):
        self.conf = OmegaConf.create(setup.conf)
        assert isinstance(self.conf, DictConfig)
        if device is not None:
            self.conf.engine.device = device
        if not self.conf.engine.threads:
            self.conf.engine.threads = 1  # so that results do not depend on the machine's cores
        self.profile = LatencyProfile.from_dict(setup.profile, "of the dataset")
        self.store, self.run = open_store(setup.url), setup.run
        self.pair = open_pair(self.conf)
        self.config = drafting_config(self.conf)
        self.target = fingerprint(self.pair.target)
        self.cache = Path(self.conf.paths.cache) / "texts"
        self.decoded: dict[UnitKey, tuple[list[Text], int]] = {}
        self.alone: set[UnitKey] = set()

    def about(self) -> dict[str, Any]:
        """Return what the values depend on, by name; see `pipeline.units.settings`."""
        template = (self.pair.tokenizer.chat_template or "").encode()
        return {
            "models.target": self.target[:16],
            "models.mid": fingerprint(self.pair.mid)[:16],
            "models.mid_family": families(self.pair, self.config)[1],
            "models.dtype": str(self.pair.target.dtype).removeprefix("torch."),
            "models.chat_template": hashlib.sha256(template).hexdigest()[:16],
            "models.max_context": self.pair.max_context,
        }

    def collect(self, order: Order) -> Result:
        """Collect one unit; whatever goes wrong with it becomes a result that says so."""
        started = time.monotonic()
        try:
            found = self._collect(order)
        except BaseException as error:
            # Tokenizers written in Rust panic with an exception that is no Exception.
            if isinstance(error, NO_FAULT):
                raise
            found = self._failed(order.unit, error)
        found.seconds = round(time.monotonic() - started, 3)
        give_back()
        found.memory_mib = memory_mib()
        return found

    def _failed(self, unit: Unit, error: BaseException) -> Result:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        causes = (error, error.__cause__)
        if any(isinstance(e, Exception) and out_of_memory(e) for e in causes):
            why = MEMORY
        elif isinstance(error, OSError):
            why = STORAGE
        else:
            why = DATA
        reason = redact(f"{unit}: {first_line(error)}")
        return Result(unit.key, "failed", {"reason": reason}, why=why)

    def _texts(self, order: Order) -> tuple[list[Text], int]:
        # The texts that are decoded beside it are kept in memory until their turn comes.
        conf = self.conf.collect
        if order.unit.key not in self.decoded:
            self.decoded.clear()
            beside = [unit for unit in order.beside if unit.key not in self.alone]
            units = [order.unit, *([] if order.unit.key in self.alone else beside)]
            try:
                found = self._decode(units, int(conf.batch))
            except BaseException as error:
                if len(units) == 1 or isinstance(error, NO_FAULT):
                    raise
                # One of them is at fault; each finds out for itself when its turn comes.
                log.debug("decoding one by one: %s", first_line(error))
                self.alone |= {unit.key for unit in units}
                units, found = [order.unit], self._decode([order.unit], 1)
            self.decoded = {u.key: f for u, f in zip(units, found, strict=True)}
        return self.decoded.pop(order.unit.key)

    def _decode(self, units: list[Unit], batch: int) -> list[tuple[list[Text], int]]:
        return decode_texts(
            self.pair,
            [unit.prompt for unit in units],
            int(self.conf.collect.max_new_tokens),
            batch,
            self.config,
            self.cache,
            self.target,
        )

    def _collect(self, order: Order) -> Result:
        unit, conf = order.unit, self.conf.collect
        texts, ties = self._texts(order)
        record: dict[str, Any] = {"ties": ties}
        if len(texts) < len(unit.prompt.prompt.turns):
            room = answer_room(self.pair, int(conf.max_new_tokens), self.config)
            record["reason"] = f"turn {len(texts) + 1} left out: {too_long(self.pair, room)}"
        tables, counts = [], dict.fromkeys(COUNTS, 0)
        for text in texts:
            rng = rng_of(int(self.conf.seed), unit, text.turn)
            roots = sample_roots(text, int(conf.states_per_turn), rng)
            if not roots:
                continue
            try:
                found = enumerate_text(
                    self.pair,
                    self.pair.open_mid(),  # new: packs do not depend on earlier buffers
                    text,
                    roots,
                    self.config,
                    pack_memory(self.conf),
                    1 if order.smaller else int(conf.pack),
                )
            except NonFiniteError as error:
                raise NonFiniteError(f"turn {text.turn + 1}: {error}") from error
            tables.append(state_rows(text, roots, found, self.profile))
            for name, value in {
                "turns": 1,
                "states": len(roots),
                "rows": tables[-1].num_rows,
                "paths": found.paths,
                "A small": int(found.accepted[:, 0].sum()),
                "A mid": int(found.accepted[:, -1].sum()),
                "A best": int(found.accepted.max(1).sum()),
            }.items():
                counts[name] += value
        if not tables:
            record.setdefault("reason", "no answer of two tokens or more")
            return Result(unit.key, "empty", record)
        if order.smaller:
            record["pack"] = 1
        return self._write(unit, pa.concat_tables(tables), record | counts)

    def _write(self, unit: Unit, rows: pa.Table, record: dict[str, Any]) -> Result:
        buffer = io.BytesIO()
        write_rows(buffer, rows, self.config)
        data = buffer.getvalue()
        name = part_name(*unit.key)
        temporary = temporary_name(name, self.run)
        self.store.put(temporary, data)
        record |= {"file": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        return Result(unit.key, "done", record, temporary)


COUNTS = ("turns", "states", "rows", "paths", "A small", "A mid", "A best")


def where() -> str:
    """Return this process's place, for log lines."""
    return f"{platform.node() or socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True)
class Ready:
    """A worker has loaded its models."""

    about: dict[str, Any]
    where: str


@dataclass(frozen=True)
class Refused:
    """A worker cannot start: the user has to mend something."""

    message: str


def serve(setup: Setup, device: str | None, connection: Connection) -> None:
    """Run a worker process: send `Ready`, then a `Result` for each `Order` until None comes.

    Ctrl-C is the driver's business. A worker ends with its driver, however that ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    redact_logs()
    try:
        collector = Collector(setup, device)
    except InputError as error:
        connection.send(Refused(str(error)))
        return
    connection.send(Ready(collector.about(), where()))
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        if order is None:
            return
        connection.send(collector.collect(order))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
