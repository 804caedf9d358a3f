"""A server of the real S3 protocol on this machine, which fails when it is told to."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

import boto3
import numpy as np
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

BUCKET = "tree"
KEY, SECRET = "AKIAEXAMPLEKEY000000", "secret-of-this-test-0123456789abcdef"
STATUSES = ("500 Internal Server Error", "503 Slow Down")
CODES = ("InternalError", "SlowDown")


class Unlogged(WSGIRequestHandler):
    """No line a request: a stream that a test captures is closed while threads still answer."""

    def log(self, type: str, message: str, *args: object) -> None:  # noqa: A002
        """Write nothing."""


class S3:
    """Moto's S3; what is stored survives `stop` and `start`.

    Attributes
    ----------
    share : float
        Of requests that are answered with 500 or 503 and change nothing.
    """

    PART = re.compile(r"/part-[^/]*\.parquet$")

    def __init__(self) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.share, self.faults, self.requests = 0.0, 0, 0
        self.rng, self.guard = np.random.default_rng(0), threading.Lock()
        self.port = 0
        self._parts_to_come = 0
        self._then: Callable[[], object] = list
        self.server: BaseWSGIServer | None = None

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Answer one request."""
        with self.guard:
            self.requests += 1
            fails = bool(self.rng.random() < self.share)
            self.faults += fails
            which = int(self.rng.integers(2))
        if not fails:
            found: Iterable[bytes] = self.app(environ, start_response)
            if environ["REQUEST_METHOD"] == "PUT" and self.PART.search(environ["PATH_INFO"]):
                self._part_stored()
            return found
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = f"<Error><Code>{CODES[which]}</Code><Message>try again</Message></Error>".encode()
        start_response(
            STATUSES[which],
            [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))],
        )
        return [body]

    def after_parts(self, parts: int, then: Callable[[], object]) -> None:
        """Do something once so many more part files are stored, before anybody hears of the last.

        The moment does not depend on how fast the machine is.
        """
        with self.guard:
            self._parts_to_come, self._then = parts, then

    def _part_stored(self) -> None:
        with self.guard:
            self._parts_to_come -= 1
            due = self._parts_to_come == 0
        if due:
            self._then()

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Answer, again at the same port."""
        self.server = make_server(
            "127.0.0.1", self.port, self, threaded=True, request_handler=Unlogged
        )
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def environment(self) -> dict[str, str]:
        """Return what a client finds it by."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Make it this process's server, with an empty bucket."""
        import fsspec

        for name, value in self.environment().items():
            patch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        boto3.client("s3").create_bucket(Bucket=BUCKET)
