"""The API server over HTTPS, for what kubectl is too slow or too polite to do; knows paths and JSON, no kinds."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from cluster.control_plane.certificates import KeyPair
from cluster.control_plane.kubeconfigs import Server

SECONDS = 30
PROBE_SECONDS = 2
# A watch that is silent for that long is begun again.
WATCH_SECONDS = 3


class RefusedError(Exception):
    """The API server said no; `reason` and `message` are its own."""

    def __init__(self, status: dict[str, Any]) -> None:
        self.reason: str = status.get("reason", "")
        self.message: str = status.get("message", "")
        super().__init__(f"{status.get('code')} {self.reason}: {self.message}")


class Api:
    """A client of the API server with an administrator's rights."""

    def __init__(self, server: Server, user: KeyPair) -> None:
        self._url = server.url
        self._tls = ssl.create_default_context(cafile=server.ca)
        self._tls.load_cert_chain(user.certificate, user.key)
        # One for each thread.
        self._kept = threading.local()

    def get(self, path: str) -> Any:
        """The object or list at a path."""
        return self._call("GET", path)

    def create(self, path: str, body: Any) -> Any:
        """Add to the collection at a path."""
        return self._call("POST", path, body)

    def replace(self, path: str, body: Any) -> Any:
        """Put an object, with the resourceVersion it was read with, in the place of what is there."""
        return self._call("PUT", path, body)

    def merge(self, path: str, body: Any) -> Any:
        """Lay a part over the object at a path; None removes a field."""
        return self._call("PATCH", path, body, "application/merge-patch+json")

    def delete(self, path: str) -> Any:
        """Delete what is at a path."""
        return self._call("DELETE", path)

    def watch(self, path: str, stop: threading.Event) -> Iterator[Any]:
        """Events of the collection at a path, whose query is not empty, until stopped or the connection ends."""
        request = urllib.request.Request(f"{self._url}{path}&watch=true")  # noqa: S310
        with urllib.request.urlopen(request, timeout=WATCH_SECONDS, context=self._tls) as answer:  # noqa: S310
            while not stop.is_set() and (line := answer.readline()):
                yield json.loads(line)

    def is_healthy(self, url: str) -> bool:
        """Return whether a component, known to the same authority, answers 200."""
        try:
            with urllib.request.urlopen(url, timeout=PROBE_SECONDS, context=self._tls) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except urllib.error.HTTPError as answer:
            answer.close()
            return False
        except (OSError, http.client.HTTPException):
            return False

    def _call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        data = None if body is None else json.dumps(body).encode()
        status, content = self._answer(method, path, data, {"Content-Type": kind})
        if status >= 400:
            raise RefusedError(_refusal(status, content))
        return json.loads(content)

    def _answer(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        """Over the last connection, where it still works: connecting again costs more than asking."""
        kept: http.client.HTTPSConnection | None = getattr(self._kept, "connection", None)
        if kept is not None:
            try:
                return _asked(kept, method, path, data, headers)
            except (OSError, http.client.HTTPException):
                kept.close()
        fresh = http.client.HTTPSConnection(self._url.removeprefix("https://"), timeout=SECONDS, context=self._tls)
        self._kept.connection = fresh
        return _asked(fresh, method, path, data, headers)


def _refusal(status: int, content: bytes) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads(content)
    except ValueError:
        # Of a path that it does not know it speaks in plain words.
        return {"code": status, "message": content.decode()}
    return said


def _asked(
    connection: http.client.HTTPSConnection, method: str, path: str, data: bytes | None, headers: dict[str, str]
) -> tuple[int, bytes]:
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()
