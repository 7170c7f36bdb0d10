"""A registry for the nodes: it serves the images of archives where they lie, and takes none.

A registry that takes images keeps a second copy of every layer; ours are of several gigabytes, and none is pushed.
"""

from __future__ import annotations

import re
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cluster.nodes.images import Blob, Image, read_image

# The name of an image has slashes, a tag or digest has none.
MANIFEST_PATH = re.compile(r"/v2/(?P<name>.+)/manifests/(?P<reference>[^/?]+)")
BLOB_PATH = re.compile(r"/v2/.+/blobs/(?P<digest>[^/?]+)")
# What a runtime makes of a name without a registry, or without a place in it.
DEFAULT_REGISTRY = "docker.io"
DEFAULT_PLACE = "library"


class Registry:
    """Whatever registry a name speaks of, it is here that nodes look for it."""

    def __init__(self, address: str) -> None:
        self.images: dict[str, Image] = {}
        self._server = _Server((address, 0), self)

    @property
    def url(self) -> str:
        """Return where nodes find it."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        """Serve until stopped, or until we end."""
        threading.Thread(target=self._server.serve_forever, name="registry", daemon=True).start()

    def stop(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()

    def add_image(self, name: str, archive: Path) -> str:
        """Serve the image of an OCI archive or folder under a name with a tag. Returns the whole name."""
        whole = whole_name(name)
        self.images[whole] = read_image(archive)
        return whole

    def references(self) -> set[str]:
        """All that a runtime calls what it has pulled from here: by tag, by manifest, by configuration."""
        return {
            reference
            for name, image in self.images.items()
            for reference in (name, f"{name.rpartition(':')[0]}@{image.manifest}", image.config)
        }

    def find_manifest(self, name: str, reference: str) -> Image | None:
        """By tag, or by digest. The name comes without its registry."""
        for whole, image in self.images.items():
            _, _, tagged = whole.partition("/")
            if reference == image.manifest or tagged == f"{name}:{reference}":
                return image
        return None

    def find_blob(self, digest: str) -> Blob | None:
        """A piece of any image."""
        return next((image.blobs[digest] for image in self.images.values() if digest in image.blobs), None)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], registry: Registry) -> None:
        super().__init__(address, _RequestHandler)
        self.registry = registry


class _RequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        blob = self._answered()
        if blob is not None:
            with blob.file.open("rb") as source:
                self.wfile.flush()
                self.connection.sendfile(source, blob.offset, blob.size)

    def do_HEAD(self) -> None:
        self._answered()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nodes say themselves what they could not get."""

    def _answered(self) -> Blob | None:
        """Send the head of the answer. Returns what is its body."""
        if self.path == "/v2/":
            self._send_headers(0, {})
            return None
        wanted = MANIFEST_PATH.match(self.path)
        image = self.server.registry.find_manifest(wanted["name"], wanted["reference"]) if wanted else None
        if image is not None:
            blob = image.blobs[image.manifest]
            self._send_headers(blob.size, {"Content-Type": image.media_type, "Docker-Content-Digest": image.manifest})
            return blob
        piece = BLOB_PATH.match(self.path)
        found = self.server.registry.find_blob(piece["digest"]) if piece else None
        if found is None:
            self.send_response(HTTPStatus.NOT_FOUND)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        self._send_headers(found.size, {"Content-Type": "application/octet-stream"})
        return found

    def _send_headers(self, size: int, headers: dict[str, str]) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in {**headers, "Content-Length": str(size)}.items():
            self.send_header(name, value)
        self.end_headers()


def whole_name(name: str) -> str:
    """As a runtime reads it: moejob-trainer:1 is docker.io/library/moejob-trainer:1."""
    first, slash, _ = name.partition("/")
    has_registry = slash and (set(".:") & set(first) or first == "localhost")
    if has_registry:
        return name
    return f"{DEFAULT_REGISTRY}/{name}" if slash else f"{DEFAULT_REGISTRY}/{DEFAULT_PLACE}/{name}"
