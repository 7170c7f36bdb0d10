"""An authority and the certificates it signs, made with the openssl command; knows nothing of who uses them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

DAYS = "30"
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
# The machine's own configuration would add extensions that strict clients refuse.
NO_CONFIGURATION = ("-config", "/dev/null")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority: a client that trusts its certificate trusts all that it signs."""

    folder: Path
    own: KeyPair

    def client(self, name: str, group: str | None = None) -> KeyPair:
        """The certificate of a user; Kubernetes reads user and group from its subject."""
        subject = f"/O={group}/CN={name}" if group else f"/CN={name}"
        return self._signed(name.replace(":", "-"), subject, "extendedKeyUsage=clientAuth")

    def server(self, name: str, hosts: str) -> KeyPair:
        """The certificate of a server that is reached under the given hosts: `DNS:localhost,IP:127.0.0.1`."""
        return self._signed(name, f"/CN={name}", "extendedKeyUsage=serverAuth", f"subjectAltName={hosts}")

    def _signed(self, name: str, subject: str, *extensions: str) -> KeyPair:
        pair = _files(self.folder, name)
        signer = ("-CA", str(self.own.certificate), "-CAkey", str(self.own.key))
        _certify(pair, subject, ("basicConstraints=critical,CA:FALSE", *extensions), signer)
        return pair


def new_authority(folder: Path) -> Authority:
    """An authority whose files, like those of all it signs, are in the folder."""
    folder.mkdir(mode=0o700)
    own = _files(folder, "ca")
    _certify(own, "/CN=moejob-tests", ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"))
    return Authority(folder, own)


def new_signing_key(path: Path) -> Path:
    """A bare key for tokens, in the one form in which the API server also takes it for the public half."""
    _openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", str(path))
    return path


def _files(folder: Path, name: str) -> KeyPair:
    return KeyPair(folder / f"{name}.crt", folder / f"{name}.key")


def _certify(pair: KeyPair, subject: str, extensions: tuple[str, ...], signer: tuple[str, ...] = ()) -> None:
    files = ("-out", str(pair.certificate), "-keyout", str(pair.key))
    added = (word for extension in extensions for word in ("-addext", extension))
    _openssl("req", "-x509", *NO_CONFIGURATION, "-days", DAYS, *NEW_KEY, "-subj", subject, *files, *signer, *added)


def _openssl(*arguments: str) -> None:
    subprocess.run([shutil.which("openssl") or "openssl", *arguments], check=True, capture_output=True)
