"""/progress, /ready and /metrics of a pod, answered from a thread of the launcher while ranks come and go."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from moejob_api.contract import HttpPath, PodProgress
from moejob_trainer.launcher.metrics import CONTENT_TYPE, exposition

_SLOWEST_CLIENT_SECONDS = 10


class Serving:
    """Serves until it is closed. `look` says how the pod is doing, at any time and in any thread."""

    def __init__(self, address: str, port: int, look: Callable[[], PodProgress]) -> None:
        # Pods speak IPv4 or IPv6 or both; one socket answers either.
        both = not address and socket.has_dualstack_ipv6()

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if both else socket.AF_INET
            daemon_threads = True

            def server_bind(self) -> None:
                if both:
                    self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                # Not HTTPServer's: that asks DNS for the machine's full name, which may take half a minute.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(self.server_address)
                self.server_address = self.socket.getsockname()
                self.server_name, self.server_port = address, self.server_address[1]

        class Handler(_Answers):
            pod = staticmethod(look)

        self._server = Server((address, port), Handler)
        threading.Thread(target=self._server.serve_forever, name="serving", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


class _Answers(BaseHTTPRequestHandler):
    pod: Callable[[], PodProgress]
    timeout = _SLOWEST_CLIENT_SECONDS

    def do_GET(self) -> None:
        pod = self.pod()
        match self.path.partition("?")[0]:
            case HttpPath.PROGRESS:
                text = pod.model_dump_json(by_alias=True, exclude_none=True)
                self._answer(HTTPStatus.OK, "application/json", text)
            case HttpPath.READY:
                status = HTTPStatus.OK if pod.ready else HTTPStatus.SERVICE_UNAVAILABLE
                self._answer(status, "text/plain", "ready\n" if pod.ready else "not every rank has sent a heartbeat\n")
            case HttpPath.METRICS:
                self._answer(HTTPStatus.OK, CONTENT_TYPE, exposition(pod))
            case _:
                paths = ", ".join(HttpPath)
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", f"nothing here; there is {paths}\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the base class's
        """Say nothing: probes come every few seconds."""
