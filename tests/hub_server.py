"""A server on this machine that speaks as much of the Hugging Face hub's API as schedulers need."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_sentinel0123456789abcdef"


@dataclass
class Repository:
    """Commits of one repository, the newest last: SHA-1 and files."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def add(self, files: dict[str, bytes]) -> str:
        before = self.commits[-1][1] if self.commits else {}
        text = repr((len(self.commits), sorted(files.items()))).encode()
        self.commits.append((hashlib.sha1(text).hexdigest(), {**before, **files}))
        return self.commits[-1][0]

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main" and self.commits:
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0] == revision), None)


class Hub:
    """The server; what it holds, what it was asked, and what it does wrong.

    ``faults`` has for a regular expression of ``METHOD /path`` a status to answer, or
    ``truncated``: half of the file is sent, or ``size``: a HEAD says that it has 10 GB.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.faults: dict[str, int | str] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fault(self, line: str) -> int | str | None:
        return next((f for pattern, f in self.faults.items() if re.search(pattern, line)), None)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content_Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def error(self, status: int, code: str = "") -> None:
            self.answer(status, b'{"error": "said by the server"}', X_Error_Code=code)

        @property
        def token(self) -> str | None:
            return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

        def handle_any(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            line = f"{self.command} {self.path}"
            hub.asked.append(line)
            hub.tokens.add(self.token)
            fault = hub.fault(line)
            if isinstance(fault, int):
                self.error(fault)
            elif self.command == "POST":
                self.posted(body)
            else:
                self.resolved(fault)

        do_GET = do_HEAD = do_POST = handle_any  # noqa: N815

        def resolved(self, fault: str | None) -> None:
            found = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([\w.-]+)/(.+)", self.path)
            repository = hub.repositories.get(found[1]) if found else None
            if found is None or repository is None:
                return self.error(401 if self.token is None else 404, "RepoNotFound")
            if repository.private and self.token != TOKEN:
                return self.error(401, "RepoNotFound")
            commit = repository.at(found[2])
            if commit is None:
                return self.error(404, "RevisionNotFound")
            if found[3] not in commit[1]:
                return self.error(404, "EntryNotFound")
            self.sent(commit[0], commit[1][found[3]], fault)

        def sent(self, commit: str, data: bytes, fault: str | None) -> None:
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            size = 10 * 2**30 if fault == "size" else len(data)
            if fault != "truncated" or self.command == "HEAD":
                length = str(size if self.command == "HEAD" else len(data))
                return self.answer(
                    200, data, Content_Length=length, ETag=etag, X_Repo_Commit=commit
                )
            self.close_connection = True
            half = data[: len(data) // 2]
            self.answer(200, half, Content_Length=str(size), ETag=etag, X_Repo_Commit=commit)

        def posted(self, body: bytes) -> None:
            if self.token != TOKEN:
                return self.error(401)
            if self.path == "/api/repos/create":
                return self.created(json.loads(body))
            if self.path == "/api/validate-yaml":
                front = json.loads(body)["content"].split("---\n")[1]
                assert isinstance(yaml.safe_load(front), dict)
                return self.told({"errors": [], "warnings": []})
            found = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/(\w+)/([\w.-]+)", self.path)
            if found is None or found[1] not in hub.repositories:
                return self.error(404, "RepoNotFound")
            if found[3] != "main":
                return self.error(404, "RevisionNotFound")
            if found[2] == "preupload":
                files = [file["path"] for file in json.loads(body)["files"]]
                each = {"uploadMode": "regular", "shouldIgnore": False}
                return self.told({"files": [{"path": path, **each} for path in files]})
            self.committed(found[1], body)

        def told(self, value: Any, status: int = 200) -> None:
            self.answer(status, json.dumps(value).encode(), Content_Type="application/json")

        def created(self, about: dict[str, Any]) -> None:
            name = f"{about.get('organization') or 'me'}/{about['name']}"
            there = name in hub.repositories
            if not there:
                hub.repositories[name] = Repository(
                    about.get("visibility") == "private" or bool(about.get("private"))
                )
            self.told({"url": f"{hub.url}/{name}", "name": name, "id": name}, 409 if there else 200)

        def committed(self, name: str, body: bytes) -> None:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            sha = hub.repositories[name].add(files)
            url = f"{hub.url}/{name}/commit/{sha}"
            self.told({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    return Handler
