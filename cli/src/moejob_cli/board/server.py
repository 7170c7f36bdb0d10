"""The server of `moejob board`: GET only, from files, for the browser of this machine.

A page of a stranger could ask for its own name, let that name point to this machine, and read what it gets. So a
request has to name this machine as its host.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from moejob_cli.board.page import build_page, content_policy
from moejob_cli.board.run_files import RunFiles

_HOST = "127.0.0.1"
_NAMES = (_HOST, "localhost")
_SECONDS = 30
# Colours of the page.
_MOST_OVERLAID = 8


class BoardServer(ThreadingHTTPServer):
    """Serves the page of some runs."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunFiles], port: int) -> None:
        super().__init__((_HOST, port), _BoardRequest)
        self.runs = runs
        # Columns are read and stored by one thread at a time.
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """The address to open."""
        return f"http://{_HOST}:{self.server_address[1]}/"

    @property
    def overlay_url(self) -> str:
        """The address that opens with the curves of all runs overlaid."""
        numbers = "+".join(map(str, range(min(len(self.runs), _MOST_OVERLAID))))
        return f"{self.url}#curves-{numbers}" if len(self.runs) > 1 else self.url


class _BoardRequest(BaseHTTPRequestHandler):
    server: BoardServer
    timeout = _SECONDS
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with the page or with a part of a run."""
        url = urlsplit(self.path)
        if (self.headers.get("Host") or "").rpartition(":")[0] not in _NAMES:
            self._send_answer(403, b"ask for 127.0.0.1 or localhost", "text/plain")
        elif url.path == "/":
            self._send_answer(200, build_page().encode(), "text/html; charset=utf-8")
        else:
            self._answer_part(url.path, {name: values[0] for name, values in parse_qs(url.query).items()})

    def _answer_part(self, path: str, query: dict[str, str]) -> None:
        with self.server.lock:
            content = self._read_part(path, query)
        if content is None:
            self._send_answer(404, b"there is no such part of a run", "text/plain")
        elif isinstance(content, bytes):
            self._send_answer(200, content, "application/octet-stream")
        else:
            self._send_answer(200, json.dumps(content, allow_nan=False).encode(), "application/json")

    def _read_part(self, path: str, query: dict[str, str]) -> Any:
        if path == "/api/runs":
            return [run.summary() for run in self.server.runs]
        number = query.get("run", "")
        if not (number.isascii() and number.isdigit()) or int(number) >= len(self.server.runs):
            return None
        run = self.server.runs[int(number)]
        if path == "/api/run":
            return run.details()
        if path == "/api/experts":
            return run.read_experts()
        if path == "/api/samples":
            return run.read_samples(query.get("file", ""))
        if path == "/api/curve":
            return (run.columns.read_column("step") + run.columns.read_column(query.get("name", ""))).tobytes()
        return None

    def _send_answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": content_policy(is_file=False),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Log nothing: the terminal is the user's."""
