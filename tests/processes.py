"""Command lines as processes, forked from one that has imported everything already."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
HANGS_S = 300.0
"""Until a command line has to have ended; one that ends sooner is not waited for."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT


class Template:
    """The process that command lines are forked from."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.template"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
        )
        self.answers = b""
        self.lock = threading.Lock()
        assert self._read() == "ready"

    def _read(self) -> Any:
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.answers:
            assert select.select([pipe], [], [], HANGS_S)[0], "the template process hangs"
            data = os.read(pipe, 4096)
            assert data, "the template process has ended"
            self.answers += data
        line, self.answers = self.answers.split(b"\n", 1)
        return json.loads(line)

    def _ask(self, order: Any) -> Any:
        assert self.process.stdin is not None
        with self.lock:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
            return self._read()

    def start(
        self,
        arguments: list[str],
        output: Path,
        faults: dict[str, Any] | None = None,
        errors: Path | None = None,
    ) -> int:
        """Fork a command line; return its process id. `wait` has to follow.

        What it prints is appended to ``output``, and to ``errors`` if that is another file.
        """
        order = {
            "arguments": arguments,
            "environment": os.environ | ENVIRONMENT,
            "faults": faults or {},
            "output": str(output),
            "errors": str(errors or output),
        }
        pid: int = self._ask(order)
        return pid

    def ended(self, pid: int) -> int | None:
        """Return a command line's exit status, minus a signal's number if that ended it."""
        code: int | None = self._ask(pid)
        return code

    def wait(self, pid: int) -> int:
        """Wait for `ended`, which must not be asked again."""
        end = time.monotonic() + HANGS_S
        while (code := self.ended(pid)) is None:
            if time.monotonic() > end:
                for each in (*children(pid), pid):
                    send(each, KILL)
                raise AssertionError("the command line hangs")
            time.sleep(0.005)
        return code

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


@dataclass
class Ran:
    """What a command line printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


class CommandLine:
    """One command line that runs, as `subprocess.Popen` would start it.

    Parameters
    ----------
    template : Template
        Where it is forked from.
    folder : Path
        Its two files of output are written here, under names of their own.
    arguments : list of str
        After the module's name.
    faults : dict
        Functions of `tests.faults.inject`, and their arguments.
    """

    def __init__(
        self,
        template: Template,
        folder: Path,
        *arguments: str,
        faults: dict[str, Any] | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("printed-*.out")))
        self.out = folder / f"printed-{number}.out"
        self.err = folder / f"printed-{number}.err"
        self.template = template
        self.returncode: int | None = None
        self.pid = template.start(list(arguments), self.out, faults, self.err)

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        if self.returncode is None:
            self.returncode = self.template.ended(self.pid)
        return self.returncode

    def end(self) -> Ran:
        """Wait for it; return what it printed."""
        if self.returncode is None:
            self.returncode = self.template.wait(self.pid)
        return Ran(self.returncode, *self.printed())

    def printed(self) -> tuple[str, str]:
        """Return what it has printed to stdout and to stderr."""
        out, err = (
            path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            for path in (self.out, self.err)
        )
        return out, err


def children(pid: int) -> list[int]:
    """Return a process's living children."""
    try:
        return [p.pid for p in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def gone(pids: list[int], seconds: float = 20.0) -> bool:
    """Wait until processes have ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        living = [
            p
            for p in pids
            if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE
        ]
        if not living:
            return True
        time.sleep(0.02)
    return False


def send(pid: int, number: int) -> bool:
    """Send a signal; False if the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
