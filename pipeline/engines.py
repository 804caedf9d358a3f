"""Who does the work of stage=collect: this process, processes of this machine, or Ray.

An engine has numbered workers; it sends orders and tells events. Everything else (which unit, what
when one fails, the manifest) is `pipeline.dispatch`'s, and the same for all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch
from omegaconf import DictConfig

from pipeline.worker import Collector, Order, Ready, Refused, Result, Setup, serve, where
from treegraft_core import InputError
from treegraft_core.pair import resolve_device

GRACE_S = 2.0
"""That an idle worker has to end in."""
START_METHODS = ("forkserver", "spawn", "fork")


@dataclass(frozen=True)
class Lost:
    """A worker has ended without being asked to."""

    reason: str


Message = Ready | Refused | Result | Lost


class Engine(Protocol):
    """Numbered workers that collect units."""

    @property
    def name(self) -> str:
        """Who works, in words."""

    @property
    def workers(self) -> Sequence[int]:
        """The workers' numbers."""

    def start(self, worker: int) -> None:
        """Start a worker, again if it was lost; `Ready` or `Refused` comes as an event."""

    def send(self, worker: int, order: Order) -> None:
        """Give a worker that is not busy a unit."""

    def wait(self, timeout: float) -> list[tuple[int, Message]]:
        """Return what has happened, after at most ``timeout`` seconds."""

    def end(self, worker: int) -> None:
        """End a worker at once; it comes as lost."""

    def close(self) -> None:
        """End all workers; what they are doing is dropped."""


class InlineEngine:
    """One worker in this very process, for debugging and small runs."""

    name = "this process"
    workers = (0,)

    def __init__(self, setup: Setup):
        self.setup = setup
        self.threads = torch.get_num_threads()
        self.collector: Collector | None = None
        self.orders: deque[Order] = deque()
        self.events: list[tuple[int, Message]] = []

    def start(self, worker: int) -> None:
        """Load the models; `InputError` goes to the caller."""
        self.collector = Collector(self.setup)
        self.events.append((worker, Ready(self.collector.about(), where())))

    def send(self, worker: int, order: Order) -> None:
        """Note the order; `wait` does it."""
        self.orders.append(order)

    def wait(self, timeout: float) -> list[tuple[int, Message]]:
        """Do the next order."""
        found, self.events = self.events, []
        if not found and self.orders:
            assert self.collector is not None
            found.append((0, self.collector.collect(self.orders.popleft())))
        return found

    def end(self, worker: int) -> None:
        """Cannot be done."""
        raise InputError(
            "engine.unit_timeout_s: needs workers of their own; give engine.workers=1 or more"
        )

    def close(self) -> None:
        """Give the models back."""
        self.collector = None
        torch.set_num_threads(self.threads)


class LocalEngine:
    """Processes of this machine, each with its own copy of the models.

    Parameters
    ----------
    setup : Setup
        What the workers start from.
    count : int
        How many.
    start_method : {"forkserver", "spawn", "fork"}
        How a process begins.
    """

    def __init__(self, setup: Setup, count: int, start_method: str = "forkserver"):
        if start_method not in START_METHODS:
            raise InputError(
                f"engine.start_method={start_method}: choose one of {', '.join(START_METHODS)}"
            )
        self.name = f"{count} local process{'es' if count > 1 else ''}"
        self.setup, self.workers = setup, range(count)
        self.context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self.context.set_forkserver_preload(["pipeline.worker"])
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Connection] = {}
        self.devices = worker_devices(str(setup.conf["engine"]["device"]))

    def start(self, worker: int) -> None:
        """Start a process."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(
            target=serve,
            args=(self.setup, self.devices[worker % len(self.devices)], theirs),
            name=f"collect-{worker}",
            daemon=True,
        )
        process.start()
        theirs.close()
        self.processes[worker], self.pipes[worker] = process, ours

    def send(self, worker: int, order: Order) -> None:
        """Send an order; one to a process that has just ended comes back as lost."""
        try:
            self.pipes[worker].send(order)
        except OSError:
            return

    def wait(self, timeout: float) -> list[tuple[int, Message]]:
        """Return results, and processes that have ended."""
        pipes = {pipe: worker for worker, pipe in self.pipes.items()}
        found: list[tuple[int, Message]] = []
        for pipe in wait(list(pipes), timeout):
            worker = pipes[pipe]  # type: ignore[index]
            try:
                found.append((worker, self.pipes[worker].recv()))
            except (EOFError, OSError):
                found.append((worker, self._lost(worker)))
        return found

    def _lost(self, worker: int) -> Lost:
        process = self.processes.pop(worker)
        self.pipes.pop(worker).close()
        process.join(timeout=10)
        code = process.exitcode
        if code is not None and code < 0:
            cause = ", perhaps for want of memory" if code == -9 else ""
            return Lost(f"ended by signal {-code}{cause}")
        return Lost(f"ended with exit status {code}")

    def end(self, worker: int) -> None:
        """Kill a process."""
        if worker in self.processes:
            self.processes[worker].kill()

    def close(self) -> None:
        """End all processes; one that is busy is killed: it leaves nothing half done."""
        for pipe in self.pipes.values():
            try:
                pipe.send(None)
            except OSError:  # it has ended already
                continue
        end = time.monotonic() + GRACE_S
        for process in self.processes.values():
            process.join(timeout=max(0.0, end - time.monotonic()))
        for worker, process in self.processes.items():
            if process.exitcode is None:
                process.kill()
                process.join(timeout=10)
            self.pipes[worker].close()
        self.processes.clear()
        self.pipes.clear()


def worker_devices(device: str) -> list[str | None]:
    """Return the devices that workers are spread over; None leaves it to the configuration."""
    if device in ("auto", "cuda") and torch.cuda.is_available():
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return [None]


def local_workers(conf: DictConfig) -> int:
    """Return how many worker processes this machine gets.

    One a GPU; on a CPU one for each ``engine.threads`` cores, as far as the memory goes.
    """
    count = conf.engine.workers
    if count is not None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InputError(f"engine.workers={count}: must be a whole number from 0, or null")
        return count
    device = resolve_device(str(conf.engine.device))
    if device.startswith("cuda"):
        return len(worker_devices(str(conf.engine.device)))
    if device != "cpu":
        return 1
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    by_cores = max(1, (cores or 1) // max(1, int(conf.engine.threads)))
    by_memory = int(psutil.virtual_memory().available // worker_bytes(conf))
    return max(1, min(by_cores, by_memory))


def worker_bytes(conf: DictConfig) -> int:
    """Estimate the memory of a worker: the weights, once more while they are loaded, and a pack."""
    weights = sum(
        file.stat().st_size
        for path in (conf.pair.target.path, conf.pair.mid.path)
        for file in Path(str(path)).glob("*.safetensors")
    )
    return int(2 * weights + float(conf.collect.memory_gb) * 2**30 + (1 << 30))


def open_engine(conf: DictConfig, setup: Setup, units: int) -> Engine:
    """Return the configured engine, with no more workers than units."""
    runner = str(conf.engine.runner)
    if runner == "ray":
        from pipeline.ray_engine import RayEngine  # Ray is imported only when asked for

        return RayEngine(setup, conf, units)
    if runner != "local":
        raise InputError(f"engine.runner={runner}: choose local or ray")
    count = local_workers(conf)
    if count == 0:
        return InlineEngine(setup)
    return LocalEngine(setup, min(count, units), str(conf.engine.start_method))
