"""A process that has imported everything and forks a command line for each order it is given.

Each command line is a process of its own, with its own signals and workers, that starts in
milliseconds instead of the seconds that the imports take. Orders and answers are JSON lines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401  (so that no fork imports it again)

import pipeline.ablate
import pipeline.collect
import pipeline.evaluate
import pipeline.status
import pipeline.verify  # noqa: F401
from pipeline.command import check_config
from pipeline.rows import enumerate_text
from pipeline.run import main
from pipeline.texts import Text
from tests.conftest import tiny_llama, word_tokenizer
from tests.faults import inject
from tests.pipeline.conftest import overrides
from treegraft_core import FixedSchedule, Pair, TreeGraftDecoder
from treegraft_core.drafting import DraftingConfig
from treegraft_core.models import CachedModel


def warm() -> None:
    """Load compiled kernels, model classes and the configuration's files: forks have them then."""
    torch.set_num_threads(1)
    pair = Pair("warm", tiny_llama(0), tiny_llama(1), word_tokenizer(), None, ())
    decoder = TreeGraftDecoder(pair, FixedSchedule([0, 1, 0, 1, 1]))
    tokens = [*range(2, 12), *decoder.generate(range(2, 12), 12, ()).tokens]
    text = Text("warm", "warm", 0, tokens, 10, len(tokens) - 10, [-1.0] * len(tokens))
    enumerate_text(pair, CachedModel(pair.mid), text, [10, 12], DraftingConfig(depth=3))
    check_config([*overrides(Path("nowhere")), "stage=collect"])


def child(order: dict[str, Any]) -> int:
    """Run the command line's own function with the faults asked for; return its exit status."""
    os.setsid()
    os.environ.update(order["environment"])
    # Of a test run in a shell's background SIGINT may be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "output"), (2, "errors")):
        file = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["pipeline.run", *order["arguments"]]
    try:
        for name, arguments in order["faults"].items():
            getattr(inject, name)(*arguments)
        return main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 99


def started(order: dict[str, Any]) -> int:
    """Fork a command line; return its process id."""
    pid = os.fork()
    if pid == 0:
        sys.stdin.close()
        code = child(order)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return pid


def ended(pid: int) -> int | None:
    """Return a command line's exit status; None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def serve() -> None:
    """Answer each line of stdin: an order with its process id, a process id with its status."""
    for line in sys.stdin:
        order = json.loads(line)
        answer = ended(order) if isinstance(order, int) else started(order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    warm()
    print(json.dumps("ready"), flush=True)
    serve()
