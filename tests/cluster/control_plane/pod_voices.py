"""Answers of pods without a kubelet over HTTP: one server on all of loopback, where every pod has an address."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from moejob_api.contract.pods import HttpPath, PodProgress


@dataclass
class PodVoices:
    """`answers` are what pods say, by UID; one that is not in there says nothing."""

    port: int = 0
    answers: dict[str, PodProgress] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)

    def new_address(self, uid: str) -> str:
        """An address of 127.0.0.0/8 for a pod."""
        number = len(self.addresses) + 1
        address = f"127.77.{number // 250}.{number % 250 + 1}"
        self.addresses[address] = uid
        return address

    def said_at(self, address: str) -> PodProgress | None:
        """Return what the pod at an address says."""
        return self.answers.get(self.addresses.get(address, ""))


@contextmanager
def pod_voices() -> Iterator[PodVoices]:
    """Pods that can be asked."""
    voices = PodVoices()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = voices.said_at(self.connection.getsockname()[0])
            if said is None or self.path != HttpPath.PROGRESS:
                self.send_error(503)
                return
            body = said.model_dump_json(by_alias=True).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """The tests say what was asked."""

    with ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:  # noqa: S104
        voices.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield voices
        server.shutdown()
        thread.join()
