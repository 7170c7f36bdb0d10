"""A way to a real engine on which a test decides what happens, and a reward service on the same port."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SCORES = "/scores"
# Never a proxy: the machine asks itself.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_LONGEST_SECONDS = 900.0

# Says what to answer instead, given which request for this path it is, from 1; called when the engine has answered.
Disturbance = Callable[[int], int | None]


class Passage:
    """Hands requests to an engine. A disturbance of a path comes between the engine's answer and the one who asked."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.asked: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.disturbances: dict[str, Disturbance] = {}
        # Called before the engine is asked.
        self.arrivals: dict[str, Callable[[], None]] = {}
        self._lock = threading.Lock()
        passage = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                passage._answer(self)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def disturb(self, path: str, disturbance: Disturbance) -> None:
        """Disturb this path from its next request on."""
        with self._lock:
            self.asked[path] = 0
            self.disturbances[path] = disturbance

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, asked: BaseHTTPRequestHandler) -> None:
        body = asked.rfile.read(int(asked.headers.get("content-length", 0)))
        path = asked.path.partition("?")[0]
        self.arrivals.get(path, _nothing)()
        status, content = (200, _scored(body)) if path == SCORES else self._forwarded(asked, body)
        with self._lock:
            self.asked[path] += 1
            self.refused[path] += status >= HTTPStatus.BAD_REQUEST
            number, disturbance = self.asked[path], self.disturbances.get(path)
        status = (disturbance(number) if disturbance else None) or status
        # The one who asked may be gone.
        with suppress(OSError):
            asked.send_response(status)
            asked.send_header("content-length", str(len(content)))
            asked.end_headers()
            asked.wfile.write(content)

    def _forwarded(self, asked: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        headers = {name: asked.headers[name] for name in ("authorization", "content-type") if name in asked.headers}
        request = urllib.request.Request(  # noqa: S310  # always http
            self.engine + asked.path, body if asked.command == "POST" else None, headers, method=asked.command
        )
        try:
            with _opener.open(request, timeout=_LONGEST_SECONDS) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 502, b"{}"


def _nothing() -> None:
    """Let it pass."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing: those who ask are killed."""


def _scored(body: bytes) -> bytes:
    return json.dumps({"scores": scores(json.loads(body)["completions"])}).encode()


def scores(completions: Sequence[str]) -> list[Any]:
    """Return the share of letters in the first half of the alphabet: answers of any model differ in it."""
    return [sum(letter.lower() in "abcdefghijklm" for letter in text) / max(1, len(text)) for text in completions]
