"""engine=ray: collection's workers as actors of a Ray cluster, started here or joined.

Imported only when it is asked for. An actor holds a copy of the models; Ray restarts and repeats
nothing by itself, since `pipeline.dispatch` does, as for every engine.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from pipeline.engines import Lost, Message, local_workers
from pipeline.logs import event
from pipeline.worker import Collector, Order, Ready, Refused, Setup, first_line, where
from treegraft_core import InputError
from treegraft_core.errors import StageError

PLACE_S = 300.0
"""Longest time without any worker that has a place on a node."""
CONNECT_S = 5.0
STORE_BYTES = 100 << 20
"""Of Ray's object store: orders and results are small, rows go into files."""
PACKAGES = ("pipeline", "treegraft_core")
INSTALL = "pip install 'treegraft[ray]'"


def source_digest() -> str:
    """Return a digest of this program's sources: workers must run the same as the driver."""
    home = Path(__file__).resolve().parent.parent
    found = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((home / package).rglob("*.py")):
            found.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def open_collector(setup: Setup, device: str | None) -> tuple[Collector | None, Ready | Refused]:
    """Load the models inside an actor; return them and what to tell the driver."""
    # Ray's own handlers: Ctrl-C in the terminal reaches the workers of this machine as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        collector = Collector(setup, device)
    except InputError as error:
        return None, Refused(f"{error} (on the Ray worker {where()})")
    return collector, Ready(collector.about(), where())


def actor_class() -> type:
    """Return the actors' class.

    It is made inside a function so that it travels as code, not as a name to import: a machine
    that lacks this program, or has another version, must be able to say so.
    """

    class Worker:
        def __init__(self) -> None:
            self.collector: Any = None

        def place(self) -> dict[str, str]:
            """Return where the actor is, and which sources it has."""
            import platform

            try:
                from pipeline.ray_engine import source_digest
            except ImportError as error:
                return {"node": platform.node(), "fault": str(error)}
            return {"node": platform.node(), "digest": source_digest()}

        def load(self, setup: Any, device: str | None) -> Any:
            from pipeline.ray_engine import open_collector

            self.collector, message = open_collector(setup, device)
            return message

        def collect(self, order: Any) -> Any:
            return self.collector.collect(order)

    return Worker


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Keep this process's handlers of signals: Ray puts its own in their place."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def import_ray() -> Any:
    """Return the module; raise `InputError` if Ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    try:
        import ray
    except ImportError as error:
        raise InputError(f"engine=ray: Ray cannot be imported ({error}); {INSTALL}") from error
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray prints what its daemons report whatever `log_to_driver` says: it would tear the table.
    vars(ray._private.worker)["print_to_stdstream"] = note_report
    return ray


def note_report(data: dict[str, Any], *_: Any, **__: Any) -> None:
    """Put the first line of what a daemon of Ray reports into the run's log."""
    lines = [line for text in data.get("lines", []) for line in str(text).splitlines()]
    event("ray_reports", text=lines[0][:300] if lines else "")


def unreachable(address: str, why: object) -> InputError:
    """Return the error of a cluster that cannot be joined."""
    reason = " ".join(str(why).split())[:200].rstrip(".")
    return InputError(
        f"engine.address={address}: cannot join that Ray cluster ({reason}); start it with "
        "`ray start --head`, or leave engine.address=null to start Ray on this machine"
    )


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return where a cluster answers; None where Ray finds no cluster by itself.

    Raises
    ------
    InputError
        If the address is none that Ray has.
    """
    if address == "auto":
        from ray._private.services import canonicalize_bootstrap_address

        found = canonicalize_bootstrap_address("auto")
        if found is None:
            return None
    else:
        found = address.removeprefix("ray://")
    host, _, port = found.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise InputError(
            f"engine.address={address}: give null, auto, HOST:PORT of the head node, or "
            "ray://HOST:PORT of its client server (10001 unless set)"
        )
    return host.strip("[]"), int(port)


def check_reachable(address: str) -> None:
    """Raise `InputError` if nobody answers: Ray itself would try for minutes, then end us."""
    place = host_and_port(address)
    if place is None:
        return
    try:
        socket.create_connection(place, timeout=CONNECT_S).close()
    except OSError as error:
        raise unreachable(address, f"{place[0]}:{place[1]}: {error}") from error


def wanted_workers(conf: DictConfig) -> int | None:
    """Return ``engine.workers``, checked; None leaves it to the cluster."""
    count = conf.engine.workers
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"engine.workers={count}: engine=ray needs a whole number from 1, or null")
    return count


def several(count: int, what: str) -> str:
    """Return a number of things in words."""
    return f"{count} {what}{'' if count == 1 else 's'}"


class RayEngine:
    """Actors of a Ray cluster, each with its own copy of the models.

    Parameters
    ----------
    setup : Setup
        What the workers start from.
    conf : DictConfig
        The composed configuration.
    units : int
        How many units there are: no more workers than that.

    Raises
    ------
    InputError
        If Ray is not installed, the cluster cannot be joined, or no node can hold a worker.
    """

    def __init__(self, setup: Setup, conf: DictConfig, units: int):
        wanted_workers(conf)
        self.ray = import_ray()
        self.setup = setup
        self.threads = max(1, int(conf.engine.threads))
        self.owner = not self.ray.is_initialized()
        if self.owner:
            self._join(conf)
        try:
            nodes = [n["Resources"] for n in self.ray.nodes() if n["Alive"]]
            self.gpu = self._needs_gpu(str(conf.engine.device), nodes)
            self.workers = range(min(units, self._count(conf, nodes)))
        except BaseException:
            self._leave()
            raise
        self.name = f"Ray: {several(len(self.workers), 'worker')}, {several(len(nodes), 'node')}"
        self.digest = source_digest()
        self.actors: dict[int, Any] = {}
        self.refs: dict[int, Any] = {}
        self.placed: set[int] = set()
        self.since = time.monotonic()
        # No restarts by Ray: a new actor has no models, and the dispatcher has to know.
        self.actor = self.ray.remote(
            num_cpus=0 if self.gpu else self.threads,
            num_gpus=1 if self.gpu else 0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )(actor_class())

    def _join(self, conf: DictConfig) -> None:
        address = conf.engine.address
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            count = local_workers(conf)
            options |= {
                "address": "local",  # whatever RAY_ADDRESS says
                "include_dashboard": False,
                "object_store_memory": STORE_BYTES,
                "num_cpus": max(os.cpu_count() or 1, count * self.threads),
            }
        else:
            options["address"] = str(address)
        with kept_handlers():
            try:
                if address is not None:
                    check_reachable(str(address))
                self.ray.init(**options)
            except InputError:
                raise
            except Exception as error:  # Ray has no error of its own for this
                if address is None:
                    raise InputError(
                        f"engine=ray: cannot start Ray: {first_line(error)}"
                    ) from error
                raise unreachable(str(address), error) from error

    def _needs_gpu(self, device: str, nodes: list[dict[str, float]]) -> bool:
        there = any(node.get("GPU", 0) >= 1 for node in nodes)
        if device.startswith("cuda") and not there:
            raise InputError(f"engine.device={device}: no node of the Ray cluster has a GPU")
        return there and (device == "auto" or device.startswith("cuda"))

    def _count(self, conf: DictConfig, nodes: list[dict[str, float]]) -> int:
        count = wanted_workers(conf)
        if count is not None:
            return count
        if self.gpu:
            return int(sum(node.get("GPU", 0) // 1 for node in nodes))
        if conf.engine.address is None:
            return max(1, local_workers(conf))
        room = int(sum(node.get("CPU", 0) // self.threads for node in nodes))
        if not room:
            raise InputError(
                f"engine.threads={self.threads}: no node of the Ray cluster has as many CPUs; give "
                "fewer, or start nodes"
            )
        return room

    def start(self, worker: int) -> None:
        """Ask for an actor; it may have to wait for a place, which holds up nobody else."""
        self._end(worker)
        with kept_handlers():
            self.actors[worker] = self.actor.remote()
        self.refs[worker] = self.actors[worker].place.remote()

    def send(self, worker: int, order: Order) -> None:
        """Send an order; one to an actor that is gone comes back as lost."""
        self.refs[worker] = self.actors[worker].collect.remote(order)

    def wait(self, timeout: float) -> list[tuple[int, Message]]:
        """Return results, and actors that are ready, refuse, or are lost.

        Raises
        ------
        StageError
            If no worker has had a place for `PLACE_S`, or the cluster is gone.
        """
        if not self.refs:
            time.sleep(timeout)
            return []
        workers = {ref: worker for worker, ref in self.refs.items()}
        found: list[tuple[int, Message]] = []
        try:
            ready, rest = self.ray.wait(list(workers), num_returns=1, timeout=timeout)
            if ready and rest:
                ready = [*ready, *self.ray.wait(rest, num_returns=len(rest), timeout=0)[0]]
            for ref in ready:
                message = self._hear(workers[ref], ref)
                if message is not None:
                    found.append((workers[ref], message))
        except ConnectionError as error:  # of ray://, whose client does not connect again
            raise StageError(
                f"engine.address: the Ray cluster is gone ({first_line(error)}); the same command "
                "goes on"
            ) from error
        if self.placed:
            self.since = time.monotonic()
        elif time.monotonic() - self.since > PLACE_S:
            need = "1 GPU" if self.gpu else f"{self.threads} CPUs"
            raise StageError(
                f"engine.address: for {PLACE_S:.0f} s no node of the Ray cluster has had room for "
                f"a worker ({need}); start nodes or wait for them, the same command goes on"
            )
        return found

    def _hear(self, worker: int, ref: Any) -> Message | None:
        self.refs.pop(worker, None)
        try:
            value = self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            return self._lost(worker, f"ended: {first_line(error.cause or error)}")
        except self.ray.exceptions.RayError as error:
            return self._lost(worker, f"went away ({type(error).__name__})")
        if isinstance(value, dict):
            return self._place(worker, value)
        return value  # type: ignore[no-any-return]

    def _place(self, worker: int, value: dict[str, str]) -> Message | None:
        self.placed.add(worker)
        if value.get("digest") != self.digest:
            what = value.get("fault") or "its files differ from those here"
            return Refused(
                f"engine.address: Ray's node {value['node']} has another version of treegraft "
                f"({what}); install the same one there"
            )
        device = "cuda" if self.gpu else None  # Ray shows an actor no other GPU than its own
        self.refs[worker] = self.actors[worker].load.remote(self.setup, device)
        return None

    def _lost(self, worker: int, reason: str) -> Lost:
        self._end(worker)
        return Lost(reason)

    def _end(self, worker: int) -> None:
        self.placed.discard(worker)
        self.refs.pop(worker, None)
        actor = self.actors.pop(worker, None)
        if actor is not None:
            # One that only cannot be reached now must not write later either.
            self.ray.kill(actor, no_restart=True)

    def end(self, worker: int) -> None:
        """Kill an actor; what it was asked for comes as lost."""
        if worker in self.actors:
            self.ray.kill(self.actors[worker], no_restart=True)

    def close(self) -> None:
        """Kill all actors, and Ray if it was started or joined here."""
        if self.ray.is_initialized():
            for worker in list(self.actors):
                self._end(worker)
        self._leave()

    def _leave(self) -> None:
        if self.owner:
            with kept_handlers():
                self.ray.shutdown()
