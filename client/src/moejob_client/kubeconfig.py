"""Kubeconfig files: the entries of a context, with paths relative to the file that has them. Opens no connection."""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from moejob_api.api_bodies import Raw, as_mapping, as_mappings


class CredentialsError(Exception):
    """No API server, or no credentials for it, can be found; the message names the file or the entry."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A named entry of a kubeconfig, and the folder of its file."""

    name: str
    fields: Raw
    folder: Path

    def find_text(self, key: str) -> str | None:
        """Return a text, None when it is absent or empty."""
        return plain_text(self.fields.get(key)) or None

    def find_path(self, key: str) -> Path | None:
        """Return a path, relative to the file of the entry."""
        text = self.find_text(key)
        return None if text is None else self.folder / text

    def read_pem(self, key: str) -> str | None:
        """Return a certificate or a key: of the data in the entry, or of the file that it names."""
        try:
            if data := self.find_text(f"{key}-data"):
                return b64decode(data, validate=True).decode()
            path = self.find_path(key)
            return None if path is None else path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CredentialsError(f"{key} of {self.name} cannot be read: {error}") from error

    def basic_authorization(self) -> str:
        """Return the header of a user with a password."""
        user = f"{plain_text(self.fields.get('username'))}:{plain_text(self.fields.get('password'))}"
        return f"Basic {b64encode(user.encode()).decode()}"


@dataclass(frozen=True, slots=True)
class ContextEntries:
    """The cluster and the user of a context."""

    server: str
    namespace: str
    cluster: Entry
    user: Entry


def plain_text(value: object) -> str:
    """Return a text as it is: keys and certificates have several lines. Empty when the value is something else."""
    return value if isinstance(value, str) else ""


def kubeconfig_files(kubeconfig: Path | None) -> tuple[Path, ...]:
    """Return the files to read: the given one, those of KUBECONFIG, or kubectl's own."""
    if kubeconfig is not None:
        return (kubeconfig,)
    names = [name for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    return tuple(map(Path, names)) or (Path("~/.kube/config").expanduser(),)


def read_context(kubeconfig: Path | None, name: str | None) -> ContextEntries:
    """Return the entries of a context, or of the current one."""
    files = kubeconfig_files(kubeconfig)
    # Like kubectl: a file of KUBECONFIG may be missing, but not all of them.
    documents = [(path, _read_file(path)) for path in files if path.exists()]
    if not documents:
        raise CredentialsError(f"there is no {' and no '.join(map(str, files))}")
    current = name or next((text for _, body in documents if (text := plain_text(body.get("current-context")))), "")
    if not current:
        raise CredentialsError(f"{documents[0][0]} has no current context")
    context = _find_entry(documents, "context", current)
    cluster = _find_entry(documents, "cluster", plain_text(context.fields.get("cluster")))
    user_name = plain_text(context.fields.get("user"))
    user = _find_entry(documents, "user", user_name) if user_name else Entry("", {}, context.folder)
    server = cluster.find_text("server")
    if server is None:
        raise CredentialsError(f"the cluster {cluster.name} has no server")
    return ContextEntries(server, context.find_text("namespace") or "default", cluster, user)


def _find_entry(documents: Iterable[tuple[Path, Raw]], kind: str, name: str) -> Entry:
    """Return the first entry of a name: earlier files come first."""
    for path, body in documents:
        for item in as_mappings(body.get(f"{kind}s")):
            if item.get("name") == name:
                return Entry(name, as_mapping(item.get(kind)), path.absolute().parent)
    raise CredentialsError(f"there is no {kind} {name!r} in {', '.join(str(path) for path, _ in documents)}")


def _read_file(path: Path) -> Raw:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CredentialsError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, Mapping):
        raise CredentialsError(f"{path} is no kubeconfig")
    return as_mapping(document)
