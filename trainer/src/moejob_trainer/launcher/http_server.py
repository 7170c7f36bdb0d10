"""/progress, /ready and /metrics of a pod, served from threads of the launcher while ranks come and go.

It asks for no key, so it bounds its clients: the number of connections (each has a thread), the time of a connection
and the bytes of a request. A new connection takes the place of the oldest: a silent client keeps out no probe.
"""

from __future__ import annotations

import io
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from moejob_api.contract.pods import HttpPath, PodProgress
from moejob_trainer.launcher.metrics import CONTENT_TYPE, format_metrics

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# The kubelet, the operator and Prometheus are three.
CONNECTIONS = 32
# From the first byte of a request to the last of its response.
CONNECTION_SECONDS = 10.0
# Browsers send 1 kB.
REQUEST_BYTES = 16 * 1024


class ProgressServer:
    """HTTP server of a pod until it is closed. `progress` may be called at any time and in any thread."""

    def __init__(
        self, address: str, port: int, progress: Callable[[], PodProgress], seconds: float = CONNECTION_SECONDS
    ) -> None:
        class Handler(_ProgressHandler):
            pod = staticmethod(progress)
            timeout = seconds

        self._server = _BoundedServer(address, port, Handler, seconds)
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="serving", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


class _BoundedServer(ThreadingHTTPServer):
    daemon_threads = True
    # Connections that wait to be accepted; beyond the default of five, clients try again after a second.
    request_queue_size = CONNECTIONS

    def __init__(self, address: str, port: int, handler: type[BaseHTTPRequestHandler], seconds: float) -> None:
        # Pods speak IPv4 or IPv6 or both; one socket answers either.
        self._is_dual_stack = not address and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if self._is_dual_stack else socket.AF_INET
        self._seconds = seconds
        # When each open connection came, the oldest first.
        self._opened_at: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((address, port), handler)

    def server_bind(self) -> None:
        if self._is_dual_stack:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not HTTPServer's: that asks DNS for the machine's full name, which may take half a minute.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if isinstance(request, socket.socket):
            with self._lock:
                self._opened_at[request] = time.monotonic()
                self._hang_up(max(0, len(self._opened_at) - CONNECTIONS))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Hang up on those whose time is over, twice a second."""
        with self._lock:
            latest = time.monotonic() - self._seconds
            self._hang_up(sum(since <= latest for since in self._opened_at.values()))

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        with self._lock:
            if isinstance(request, socket.socket):
                self._opened_at.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that vanish."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # the stubs want what it never reads

    def _hang_up(self, count: int) -> None:
        """End the oldest connections, with the lock held: their threads find that out and close them."""
        for oldest in list(self._opened_at)[:count]:
            del self._opened_at[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)


class _ProgressHandler(BaseHTTPRequestHandler):
    pod: Callable[[], PodProgress]

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_BoundedRequest(self.rfile))

    def do_GET(self) -> None:
        pod = self.pod()
        match self.path.partition("?")[0]:
            case HttpPath.PROGRESS:
                text = pod.model_dump_json(by_alias=True, exclude_none=True)
                self._respond(HTTPStatus.OK, "application/json", text)
            case HttpPath.READY:
                status = HTTPStatus.OK if pod.ready else HTTPStatus.SERVICE_UNAVAILABLE
                self._respond(status, "text/plain", "ready\n" if pod.ready else "not every rank has sent a heartbeat\n")
            case HttpPath.METRICS:
                self._respond(HTTPStatus.OK, CONTENT_TYPE, format_metrics(pod))
            case _:
                paths = ", ".join(HttpPath)
                self._respond(HTTPStatus.NOT_FOUND, "text/plain", f"nothing here; there is {paths}\n")

    def _respond(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the base class's
        """Say nothing: probes come every few seconds."""


class _BoundedRequest(io.RawIOBase):
    """A request, which seems to end where it gets too long."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream, self._bytes_left = stream, REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        content = self._stream.read1(min(len(view), self._bytes_left))
        view[: len(content)] = content
        self._bytes_left -= len(content)
        return len(content)

    def close(self) -> None:
        self._stream.close()
        super().close()
