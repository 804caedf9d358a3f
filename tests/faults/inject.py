"""Faults for a collection under test, each put where the real one would strike."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

from pipeline import dispatch, manifest, store, texts, worker


class RustPanic(BaseException):
    """What a tokenizer written in Rust raises: no `Exception`."""


def tokenizer_panics(word: str) -> None:
    """Panic on every prompt that holds ``word``."""
    real = texts.chat_ids

    def chat_ids(tokenizer: Any, messages: Any) -> list[int]:
        if any(word in m["content"].split() for m in messages if m["role"] == "user"):
            raise RustPanic("index out of bounds")
        return real(tokenizer, messages)

    texts.chat_ids = chat_ids


def tokenizer_crashes(word: str) -> None:
    """End the process by SIGSEGV on every prompt that holds ``word``."""
    real = texts.chat_ids

    def chat_ids(tokenizer: Any, messages: Any) -> list[int]:
        if any(word in m["content"].split() for m in messages if m["role"] == "user"):
            os.kill(os.getpid(), signal.SIGSEGV)
        return real(tokenizer, messages)

    texts.chat_ids = chat_ids


def memory_runs_out(prompt_id: str, always: bool) -> None:
    """Fail to allocate for one prompt: in packs of several states, or ``always``."""
    real = worker.enumerate_text

    def enumerate_text(*arguments: Any) -> Any:
        text, pack = arguments[2], arguments[6]
        if text.prompt_id == prompt_id and (always or pack != 1):
            raise MemoryError("cannot allocate")
        return real(*arguments)

    worker.enumerate_text = enumerate_text


def address_space(extra_mib: int) -> None:
    """Limit the process to ``extra_mib`` beyond what it has mapped when a unit begins."""
    real = worker.Collector.collect

    def collect(self: Any, order: Any) -> Any:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (extra_mib << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        try:
            return real(self, order)
        finally:
            infinity = resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_AS, (infinity, infinity))

    worker.Collector.collect = collect  # type: ignore[method-assign]


def disk_fills(after_bytes: int) -> None:
    """Let writes into the dataset fail, part-way, once so many bytes are there."""
    real = store.LocalStore.put
    used = [0]

    def put(self: Any, temporary: str, data: bytes) -> None:
        room = after_bytes - used[0]
        if len(data) > room:
            path = self.path(temporary)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data[: max(0, room)])
            path.unlink()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        used[0] += len(data)
        real(self, temporary, data)

    store.LocalStore.put = put  # type: ignore[method-assign]


def clock_jumps(seed: int) -> None:
    """Let the wall clock jump by up to a year, back or forth, at every reading."""
    rng, real = random.Random(seed), time.time
    time.time = lambda: real() + rng.uniform(-3e7, 3e7)
    strftime = time.strftime
    time.strftime = lambda form, at=None: strftime(  # type: ignore[assignment]
        form, time.gmtime(real() + rng.uniform(-3e7, 3e7))
    )


def worker_hangs(prompt_id: str, marker: str, seconds: float) -> None:
    """Let the first worker that gets a prompt hang for some time; the next one does it."""
    real = worker.Collector.collect

    def collect(self: Any, order: Any) -> Any:
        if order.unit.key[1] == prompt_id:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return real(self, order)
            time.sleep(seconds)
        return real(self, order)

    worker.Collector.collect = collect  # type: ignore[method-assign]


def worker_dies(prompt_id: str, marker: str, times: int) -> None:
    """Kill the worker, as the kernel does, in the middle of a prompt, so many times."""
    real = worker.enumerate_text

    def enumerate_text(*arguments: Any) -> Any:
        if arguments[2].prompt_id == prompt_id:
            for n in range(times):
                try:
                    os.close(os.open(f"{marker}-{n}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    worker.enumerate_text = enumerate_text


def units_take(seconds: float) -> None:
    """Let every unit take so much longer."""
    real = worker.Collector.collect

    def collect(self: Any, order: Any) -> Any:
        time.sleep(seconds)
        return real(self, order)

    worker.Collector.collect = collect  # type: ignore[method-assign]


def impatient(ratio: float, seconds: float) -> None:
    """Take a unit for a straggler sooner."""
    dispatch.STRAGGLER_RATIO, dispatch.STRAGGLER_S = ratio, seconds


def dies_before_record(number: int) -> None:
    """Kill the driver after the rename of a unit's file and before its line in the manifest."""
    real = manifest.Segment.add
    count = [0]

    def add(self: Any, record: Any) -> None:
        count[0] += 1
        if count[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, record)

    manifest.Segment.add = add  # type: ignore[method-assign]


def jobs_without_results(seconds: float) -> None:
    """Wait no longer for the result of a job that has ended without one."""
    from submitit.core.core import Job

    Job._results_timeout_s = seconds
