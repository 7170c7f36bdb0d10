"""Kubeconfig files: who one is for which API server. They carry all they need, so they can be copied anywhere."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path

from cluster.control_plane.certificates import KeyPair


@dataclass(frozen=True, slots=True)
class Server:
    """An API server, and whom to trust about it."""

    url: str
    ca: Path


def write_for_certificate(path: Path, server: Server, user: KeyPair) -> Path:
    """For a user known by a certificate."""
    identity = {"client-certificate-data": _encoded(user.certificate), "client-key-data": _encoded(user.key)}
    return _write(path, server, identity)


def write_for_token(path: Path, server: Server, token: str, namespace: str) -> Path:
    """For a service account, at home in its namespace."""
    return _write(path, server, {"token": token}, namespace)


def _write(path: Path, server: Server, identity: dict[str, str], namespace: str = "default") -> Path:
    context = {"cluster": "tests", "user": "tests", "namespace": namespace}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "contexts": [{"name": "tests", "context": context}],
        "clusters": [
            {"name": "tests", "cluster": {"server": server.url, "certificate-authority-data": _encoded(server.ca)}}
        ],
        "users": [{"name": "tests", "user": identity}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(content, indent=2))
    return path


def _encoded(file: Path) -> str:
    return b64encode(file.read_bytes()).decode()
