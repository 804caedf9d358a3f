"""The only entry point: ``python -m pipeline.run stage=NAME [overrides]``.

What takes seconds to import is imported inside `main`, so that Ctrl-C is quiet from the start.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from pipeline.secrets import redact

CONF = Path(__file__).resolve().parent.parent / "conf"
USAGE_STATUS = 2
FAILED_STATUS = 1
INTERRUPTED_STATUS = 130
LONGEST_LINE = 2000


def fail(message: str, status: int = USAGE_STATUS) -> int:
    """Print ``error: message`` as one line to stderr, without secrets; return ``status``."""
    line = " ".join(redact(message).split())[:LONGEST_LINE]
    # Names come from others' files too: no escape sequence of theirs reaches the terminal.
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    print(f"error: {shown}", file=sys.stderr, flush=True)
    return status


def interrupted() -> int:
    """Say that the run was stopped; return its status."""
    print("\nstopped; what was written stays", file=sys.stderr, flush=True)
    return INTERRUPTED_STATUS


def closed() -> int:
    """Say that nobody reads stdout any more; return the run's status."""
    # What Python still holds for stdout must go somewhere, or it complains at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return fail("stdout was closed by its reader; what was written stays", FAILED_STATUS)


def main() -> int:
    """Run the command line; return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # tables are not ASCII, a terminal may be
    try:
        from pipeline.command import run_hydra

        return run_hydra()
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:
        return closed()


if __name__ == "__main__":
    sys.exit(main())
