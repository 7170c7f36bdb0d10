"""A hub on loopback that speaks what huggingface_hub and datasets ask of the real one, with branches that move.

Weights are in large-file storage. Reading needs no token, writing one of `writers`. Processes that start with
`environ` take it for the hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Files = Mapping[str, bytes]
WRITER, READER = "hf_writer", "hf_reader"
_PREUPLOAD = re.compile(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)")
_COMMIT = re.compile(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)")
_BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_OBJECT = re.compile(r"/lfs/([0-9a-f]{64})")
_ABOUT = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """The commits of one name, of which `main` is one."""

    commits: dict[str, Files] = field(default_factory=dict)
    main: str = ""

    def push(self, files: Files) -> str:
        """Move main to a new commit, and return it."""
        content = sorted((path, _oid(written)) for path, written in files.items())
        self.main = hashlib.sha1(repr((len(self.commits), content)).encode()).hexdigest()  # noqa: S324
        self.commits[self.main] = dict(files)
        return self.main

    def at(self, revision: str) -> str | None:
        """The commit of a revision."""
        found = self.main if revision == "main" else revision
        return found if found in self.commits else None


@dataclass
class Hub:
    """The repositories by kind and name, and what was asked."""

    url: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    # Files that the hub refuses to send.
    lost: set[str] = field(default_factory=set)
    # Contents of large-file storage by their digest.
    objects: dict[str, bytes] = field(default_factory=dict)

    def model(self, name: str) -> Repository:
        return self.repositories.setdefault(("models", name), Repository())

    def dataset(self, name: str) -> Repository:
        return self.repositories.setdefault(("datasets", name), Repository())

    def environ(self, home: Path) -> dict[str, str]:
        """Variables of a process that has this hub, and what it keeps by itself in a folder of its own."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


def read_files(folder: Path) -> dict[str, bytes]:
    """A folder as the files of a commit."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub without repositories."""
    hub = Hub()
    server = _Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self._read_body())

    def do_PUT(self) -> None:
        """Keep a file under the digest of its content."""
        path, content = urlsplit(self.path).path, self._read_body()
        self.server.hub.asked.append(f"PUT {path}")
        found = _OBJECT.fullmatch(path)
        if found is None or _sha256(content) != found[1]:
            return self._say(400, {}, b"")
        self.server.hub.objects[found[1]] = content
        return self._say(200, {}, b"")

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, sent: bytes) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.hub.asked.append(f"{self.command} {path}")
        if found := _FILE.fullmatch(path):
            self._file("datasets" if found[1] else "models", *found.groups()[1:])
        elif found := _ABOUT.fullmatch(path):
            self._about(sent, *found.groups())
        elif self.command == "POST":
            self._write(path, sent)
        else:
            self._say(404, {"X-Error-Code": "RepoNotFound"}, b"{}")

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        repository = self.server.hub.repositories.get((kind, name), Repository())
        commit = repository.at(revision)
        if commit is None:
            return self._say(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        content = repository.commits[commit].get(path)
        if path in self.server.hub.lost and self.command == "GET":
            return self._say(403, {}, b"")
        if content is None:
            return self._say(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"")
        etag = _sha256(content) if _is_large(path) else _oid(content)
        return self._say(200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, content)

    def _about(self, sent: bytes, *place: str | None) -> None:
        kind, name, what, revision, below = place
        repository = self.server.hub.repositories.get((kind or "", name or ""))
        commit = None if repository is None else repository.at(revision or "main")
        if repository is None or commit is None:
            error = "RepoNotFound" if repository is None else "RevisionNotFound"
            return self._say(404, {"X-Error-Code": error}, b"{}")
        files = repository.commits[commit]
        if what == "tree":
            inside = "" if not below else f"{below}/"
            return self._json([_entry(path, files) for path in sorted(files) if path.startswith(inside)])
        if what == "paths-info":
            asked = json.loads(sent) if sent.startswith(b"{") else parse_qs(sent.decode())
            return self._json([_entry(path, files) for path in asked["paths"] if path in files])
        siblings = [{"rfilename": path} for path in sorted(files)]
        return self._json({"id": name, "sha": commit, "siblings": siblings, "tags": [], "private": False})

    def _write(self, path: str, sent: bytes) -> None:
        """Take a part of a push, from who may write."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token != WRITER:
            return self._say(403 if token == READER else 401, {}, b'{"error": "no"}')
        if path == "/api/repos/create":
            wanted = json.loads(sent)
            name = f"{wanted['organization']}/{wanted['name']}"
            status = 409 if ("models", name) in self.server.hub.repositories else 200
            self.server.hub.model(name)
            return self._json({"url": f"{self.server.hub.url}/{name}"}, status)
        if _PREUPLOAD.fullmatch(path):
            modes = {
                file["path"]: "lfs" if _is_large(file["path"]) else "regular" for file in json.loads(sent)["files"]
            }
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self._json({"files": files})
        if _BATCH.fullmatch(path):
            return self._json({"transfer": "basic", "objects": [*map(self._place, json.loads(sent)["objects"])]})
        if found := _COMMIT.fullmatch(path):
            return self._commit(found[1], [json.loads(line) for line in sent.splitlines()])
        return self._say(404, {}, b"{}")

    def _place(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        place = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] in self.server.hub.objects:
            return place
        return place | {"actions": {"upload": {"href": f"{self.server.hub.url}/lfs/{wanted['oid']}"}}}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        repository = self.server.hub.model(name)
        files = dict(repository.commits.get(repository.main, {}))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.hub.objects[value["oid"]]
        commit = repository.push(files)
        url = f"{self.server.hub.url}/{name}/commit/{commit}"
        self._json({"success": True, "commitOid": commit, "commitUrl": url})

    def _json(self, body: Any, status: int = 200) -> None:
        self._say(status, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _say(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(path: str, files: Files) -> dict[str, Any]:
    content = files[path]
    large = {"lfs": {"oid": _sha256(content), "size": len(content), "pointerSize": 134}} if _is_large(path) else {}
    return {"type": "file", "path": path, "size": len(content), "oid": _oid(content), **large}


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


# Weights are megabytes, and asked for often.
@cache
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@cache
def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324
