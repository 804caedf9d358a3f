"""Which worker gets which unit, and what happens when one fails: the same for every engine."""

from __future__ import annotations

import errno
import math
import os
import signal
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from pipeline.engines import Engine, Lost
from pipeline.logs import event
from pipeline.manifest import UnitKey
from pipeline.units import Unit
from pipeline.worker import LOST, MEMORY, STORAGE, Order, Ready, Refused, Result
from treegraft_core import InputError
from treegraft_core.errors import StageError

POLL_S = 0.5
STRAGGLER_RATIO = 3.0
STRAGGLER_S = 5.0
"""With nothing else to do, a unit is done a second time when it takes longer than both."""
STARTS = 3
"""Times that a worker may end before it is ready."""


@dataclass
class Running:
    """A unit that a worker is doing."""

    unit: Unit
    attempt: int
    since: float
    beside: tuple[Unit, ...] = ()


@dataclass
class Stop:
    """Whether the run is to end early: by a signal, or because going on makes no sense."""

    signal: int | None = None
    error: Exception | None = None

    def __bool__(self) -> bool:
        return self.signal is not None or self.error is not None


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM; a second one ends the process at once."""
    stop = Stop()

    def note(number: int, _: FrameType | None) -> None:
        if stop.signal is not None:
            # Every file is complete or hidden, and workers end with this process.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.signal = number

    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, note) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Tally:
    """What a run has done so far, for whoever watches it."""

    total: int
    finished: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    states: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    retries: int = 0
    lost: int = 0
    again: int = 0
    seconds: list[float] = field(default_factory=list)
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        """Units that need nothing more in this run."""
        return sum(self.finished.values())


class Dispatcher:
    """Gets units done by an engine's workers.

    A unit whose worker is lost or runs out of memory is tried again up to ``retries`` times, and
    then counts as failed; one whose data are at fault fails at once. One that ran out of memory,
    or has lost two workers, is tried in smaller packs; otherwise its file is what it would have
    been.

    Parameters
    ----------
    engine : Engine
        The workers.
    units : sequence of Unit
        What is to be done.
    accept : callable
        Given what a worker that is ready says of its models; raises `InputError` if its units
        would not belong into the dataset.
    commit : callable
        Makes a unit's file visible and records the unit.
    drop : callable
        Removes the file of a result that is not wanted.
    batch, retries : int
        Most units whose texts are decoded together; times that a unit is tried again.
    timeout_s : float
        Longest time of a unit, s; 0 for any.
    watch : callable
        Given the tally now and then.
    """

    def __init__(
        self,
        engine: Engine,
        units: Sequence[Unit],
        accept: Callable[[dict[str, Any]], None],
        commit: Callable[[Result], None],
        drop: Callable[[Result], None],
        batch: int,
        retries: int,
        timeout_s: float = 0.0,
        watch: Callable[[Tally], None] = lambda _: None,
    ):
        self.engine, self.accept, self.commit, self.drop = engine, accept, commit, drop
        self.retries, self.timeout_s, self.watch = retries, timeout_s, watch
        self.pending = deque(units)
        self.again: deque[tuple[Unit, int]] = deque()
        self.own: dict[int, deque[Unit]] = defaultdict(deque)
        self.running: dict[int, Running] = {}
        self.alone: set[UnitKey] = set()  # one of those that were decoded together ended a worker
        self.smaller: set[UnitKey] = set()
        self.idle: set[int] = set()
        self.starts: Counter[int] = Counter()
        self.living: set[int] = set()
        self.done: set[UnitKey] = set()
        self.bundle = max(1, min(batch, math.ceil(len(units) / max(1, len(engine.workers)) / 2)))
        self.tally = Tally(len(units))
        self.storage_faults = 0

    def run(self, stop: Stop) -> Tally:
        """Do all units, or stop early.

        Raises
        ------
        InputError
            If a worker cannot start for a reason that the user can mend.
        StageError
            If no worker is left, or nothing can be written.
        """
        try:
            for worker in self.engine.workers:
                self._start(worker)
            while self._busy(stop):
                if not stop:
                    self._assign()
                for worker, message in self.engine.wait(POLL_S):
                    self._hear(worker, message, stop)
                self._end_overdue()
                self.watch(self.tally)
            self.watch(self.tally)
        finally:
            self.engine.close()
        if stop.error is not None:
            raise stop.error
        return self.tally

    def _busy(self, stop: Stop) -> bool:
        if stop:
            return bool(self.running) and stop.error is None
        return self.tally.ended < self.tally.total

    def _start(self, worker: int) -> None:
        self.starts[worker] += 1
        self.living.add(worker)
        self.tally.workers[worker] = {"state": "starting"}
        self.engine.start(worker)

    def _assign(self) -> None:
        for worker in sorted(self.idle):
            found = self._next(worker)
            if found is not None:
                unit, attempt = found
                self.idle.discard(worker)
                self.tally.workers[worker] |= {"state": "collecting", "unit": str(unit)}
                # What this worker will get next is decoded together with it.
                beside = tuple(u for u in self.own[worker] if u.key not in self.alone)
                if attempt > 1 or unit.key in self.alone:
                    beside = ()
                self.running[worker] = Running(unit, attempt, time.monotonic(), beside)
                self.engine.send(worker, Order(unit, beside, unit.key in self.smaller, attempt))

    def _next(self, worker: int) -> tuple[Unit, int] | None:
        if self.again:
            return self.again.popleft()
        own = self.own[worker]
        if not own:
            # A bundle is decoded together; at the end they get smaller, so that nobody waits.
            share = math.ceil(len(self.pending) / max(1, len(self.living)))
            while self.pending and len(own) < min(self.bundle, share):
                own.append(self.pending.popleft())
        if own:
            return own.popleft(), 1
        richest = max(self.own.values(), key=len)
        if richest:
            return richest.pop(), 1
        return self._straggler()

    def _straggler(self) -> tuple[Unit, int] | None:
        # The same unit gives the same file: whoever is first with it counts.
        now, usual = time.monotonic(), statistics.median(self.tally.seconds or [math.inf])
        twice = Counter(r.unit.key for r in self.running.values())
        for r in sorted(self.running.values(), key=lambda r: r.since):
            slow = now - r.since > max(STRAGGLER_RATIO * usual, STRAGGLER_S)
            if slow and twice[r.unit.key] == 1:
                self.tally.again += 1
                event("unit_again", unit=str(r.unit), why="slow", seconds=round(now - r.since, 1))
                return r.unit, r.attempt
        return None

    def _hear(self, worker: int, message: Any, stop: Stop) -> None:
        if isinstance(message, Ready):
            self.accept(message.about)
            event("worker_ready", worker=worker, where=message.where)
            self.starts[worker] = 0
            self.idle.add(worker)
            self.tally.workers[worker] = {"state": "idle", "where": message.where}
        elif isinstance(message, Refused):
            raise InputError(message.message)
        elif isinstance(message, Lost):
            self._lost(worker, message, stop)
        else:
            self._result(worker, message, stop)

    def _result(self, worker: int, result: Result, stop: Stop) -> None:
        running = self.running.pop(worker)
        self.idle.add(worker)
        self.tally.workers[worker] |= {
            "state": "idle",
            "unit": "",
            "memory_mib": result.memory_mib,
            "units": self.tally.workers[worker].get("units", 0) + 1,
        }
        if result.key in self.done:
            self.drop(result)
        elif result.status == "failed":
            self._failed(running, result, stop)
        else:
            result.record |= {
                "attempt": running.attempt,
                "seconds": result.seconds,
                "worker": self.tally.workers[worker]["where"],
            }
            self._finish(running.unit, result, stop)

    def _finish(self, unit: Unit, result: Result, stop: Stop) -> None:
        record = {
            "task": unit.key[0],
            "prompt": unit.key[1],
            "digest": unit.digest,
            "status": result.status,
            **result.record,
        }
        result.record = record
        try:
            self.commit(result)
        except OSError as error:
            stop.error = storage_error(error)
            return
        self.done.add(unit.key)
        self.tally.finished[result.status] += 1
        self.tally.rows += record.get("rows", 0)
        self.tally.states += record.get("states", 0)
        if result.status == "failed":  # which has been told
            self.tally.failures.append(record)
            return
        self.tally.seconds.append(result.seconds)
        self.storage_faults = 0
        known = {k: record[k] for k in ("rows", "states", "attempt", "worker") if k in record}
        event(
            f"unit_{result.status}",
            unit=str(unit),
            seconds=result.seconds,
            memory_mib=result.memory_mib,
            **known,
        )

    def _failed(self, running: Running, result: Result, stop: Stop) -> None:
        unit, reason = running.unit, result.record["reason"]
        if result.why == STORAGE:
            self.storage_faults += 1
            if "No space" in reason or self.storage_faults > self.retries:
                stop.error = StageError(f"{reason}; free space there, or mend it, and run it again")
                return
        may_help = result.why in (MEMORY, STORAGE, LOST)
        if may_help and running.attempt <= self.retries:
            self.tally.retries += 1
            event("unit_again", "warning", unit=str(unit), why=result.why, reason=reason)
            # Other packs round otherwise, in float32: a machine that went away is no reason.
            if result.why == MEMORY or (result.why == LOST and running.attempt > 1):
                self.smaller.add(unit.key)
            self.again.append((unit, running.attempt + 1))
            return
        event("unit_failed", "error", unit=str(unit), why=result.why, reason=reason)
        self._finish(unit, Result(unit.key, "failed", {"reason": reason, "why": result.why}), stop)

    def _lost(self, worker: int, message: Lost, stop: Stop) -> None:
        self.tally.lost += 1
        self.idle.discard(worker)
        self.living.discard(worker)
        self.pending.extendleft(reversed(self.own.pop(worker, deque())))
        self.tally.workers[worker] |= {"state": f"lost: {message.reason}", "unit": ""}
        event("worker_lost", "warning", worker=worker, reason=message.reason)
        running = self.running.pop(worker, None)
        if running is not None:
            self.alone |= {unit.key for unit in running.beside}
        if running is not None and running.unit.key not in self.done:
            reason = f"{running.unit}: its worker {message.reason}"
            others = {r.unit.key for r in self.running.values()}
            if running.unit.key not in others:
                why = Result(running.unit.key, "failed", {"reason": reason}, why=LOST)
                self._failed(running, why, stop)
        if stop:
            return
        if self.starts[worker] < STARTS:
            self._start(worker)
        elif not self.living:
            raise StageError(
                f"engine.workers: every worker ended before it was ready (the last {message.reason}"
                "); give fewer workers, or a machine with more memory"
            )

    def _end_overdue(self) -> None:
        if self.timeout_s:
            for worker, running in list(self.running.items()):
                if time.monotonic() - running.since > self.timeout_s:
                    event("unit_overdue", "warning", unit=str(running.unit), worker=worker)
                    self.engine.end(worker)


def storage_error(error: OSError) -> StageError:
    """Return the error of a run that cannot write."""
    if isinstance(error, StageError):  # a remote store's says all of it
        return error
    what = "no space left" if error.errno == errno.ENOSPC else error.strerror or str(error)
    return StageError(f"{error.filename or 'trajectories'}: {what}; mend that and run it again")
