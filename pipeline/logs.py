"""Structured log lines of long runs: one JSON object a line in a file, warnings on the terminal."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.secrets import redact

LOGGER = logging.getLogger("pipeline.events")
LOGGER.propagate = False
LOGGER.addHandler(logging.NullHandler())
LOGGER.setLevel(logging.INFO)
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def event(name: str, level: str = "info", **fields: Any) -> None:
    """Log an event with its fields, secrets left out."""
    safe: dict[str, Any] = redact(fields)
    text = " ".join(f"{key}={value}" for key, value in safe.items())
    LOGGER.log(LEVELS[level], "%s %s", name, text, extra={"event": name, "fields": safe})


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        fields = getattr(record, "fields", {})
        name = getattr(record, "event", record.getMessage())
        line = {"at": at, "level": record.levelname.lower(), "event": name, **fields}
        return json.dumps(line, ensure_ascii=False, default=str)


class _File(logging.FileHandler):
    """A log that cannot be written says so once: it is no reason to end what it is about."""

    told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Say why, the first time."""
        if not self.told:
            self.told = True
            reason = str(sys.exc_info()[1])
            print(f"note: {self.baseFilename}: cannot be written ({reason})", file=sys.stderr)


@contextmanager
def log_file(path: Path, terminal: logging.Handler | None = None) -> Iterator[Path]:
    """Append events to ``path``, and warnings to ``terminal`` (default: stderr)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = _File(path, encoding="utf-8")
    lines.setFormatter(_Lines())
    shown = terminal or logging.StreamHandler()
    shown.setLevel(logging.WARNING)
    for handler in (lines, shown):
        LOGGER.addHandler(handler)
    try:
        yield path
    finally:
        for handler in (lines, shown):
            LOGGER.removeHandler(handler)
        try:
            lines.close()
        except OSError:  # of what could not be written before, which has been told
            lines.told = True
