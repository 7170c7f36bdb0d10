"""The API server over HTTPS, for what kubectl is too slow or too polite to do; knows paths and JSON, no kinds."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from cluster.control_plane.certificates import KeyPair
from cluster.control_plane.kubeconfigs import Server

SECONDS = 30
PROBE_SECONDS = 2


class RefusedError(Exception):
    """The API server said no; `reason` and `message` are its own."""

    def __init__(self, status: dict[str, Any]) -> None:
        self.reason: str = status.get("reason", "")
        self.message: str = status.get("message", "")
        super().__init__(f"{status.get('code')} {self.reason}: {self.message}")


class Api:
    """What an administrator says to the API server."""

    def __init__(self, server: Server, user: KeyPair) -> None:
        self._url = server.url
        self._tls = ssl.create_default_context(cafile=server.ca)
        self._tls.load_cert_chain(user.certificate, user.key)

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

    def is_healthy(self, url: str) -> bool:
        """Whether a component, known to the same authority, answers 200."""
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
        request = urllib.request.Request(self._url + path, data, {"Content-Type": kind}, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=SECONDS, context=self._tls) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as refusal:
            with refusal:
                raise RefusedError(json.load(refusal)) from None
