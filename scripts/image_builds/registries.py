"""Asks a registry of images which digest a tag stands for, by the OCI distribution specification; pulls no image.

A digest is worked out from the manifest that arrives. A registry is believed as far as its certificate goes: it is
asked over TLS, no redirection is followed, and what it sends is read up to a bound.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

# An image for several platforms first: its digest names all of them.
_ACCEPTED = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
# As large as registries have to take them.
_MANIFEST_BYTES = 4 << 20
_SECONDS = 30.0
# Names that stand for another host.
_HOSTS = {"docker.io": "registry-1.docker.io"}
_NAME = re.compile(r"(?P<registry>[a-z0-9.-]+(:[0-9]+)?)/(?P<repository>[a-z0-9._/-]+):(?P<tag>[A-Za-z0-9_.-]+)")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class UnknownDigestError(Exception):
    """A registry does not say which digest a tag stands for."""


def digest_of(image: str) -> str:
    """Return the digest of a tag: REGISTRY/NAME:TAG. Any client may ask."""
    named = _NAME.fullmatch(image)
    if named is None:
        raise UnknownDigestError(f"{image} is no REGISTRY/NAME:TAG; write it so in the Dockerfile")
    host = _HOSTS.get(named["registry"], named["registry"])
    url = f"{_scheme(host)}://{host}/v2/{named['repository']}/manifests/{named['tag']}"
    try:
        content, said = _manifest(url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnknownDigestError(
            f"{image}: {host} answers with {error!r}; name an image that it has, or try again where it can be reached"
        ) from None
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    if said not in (None, digest):
        raise UnknownDigestError(f"{image}: {host} calls it {said}, and what it sends is {digest}; trust neither")
    return digest


def _manifest(url: str) -> tuple[bytes, str | None]:
    """Return a manifest and the digest by which the registry calls it, with a token where it wants one."""
    headers = {"Accept": ", ".join(_ACCEPTED)}
    try:
        return _got(url, headers)
    except urllib.error.HTTPError as refused:
        if refused.code != HTTPStatus.UNAUTHORIZED:
            raise
        refused.close()
        token = _token(refused.headers.get("WWW-Authenticate", ""))
    return _got(url, headers | {"Authorization": f"Bearer {token}"})


def _token(challenge: str) -> str:
    """Return what a registry gives to any client, as its challenge says."""
    said = dict(_CHALLENGE.findall(challenge)) if challenge.startswith("Bearer ") else {}
    place = urllib.parse.urlsplit(said.get("realm", ""))
    if place.scheme != _scheme(place.netloc):
        raise ValueError(f"it asks for a login that is not understood: {challenge!r}")
    asked = urllib.parse.urlencode({name: said[name] for name in ("service", "scope") if name in said})
    given: Any = json.loads(_got(f"{said['realm']}?{asked}", {})[0])
    token = given.get("token") or given.get("access_token") if isinstance(given, dict) else None
    if isinstance(token, str):
        return token
    raise ValueError(f"{place.netloc} gives no token")


def _got(url: str, headers: Mapping[str, str]) -> tuple[bytes, str | None]:
    with _opener.open(urllib.request.Request(url, headers=dict(headers)), timeout=_SECONDS) as answer:  # noqa: S310
        content: bytes = answer.read(_MANIFEST_BYTES + 1)
        if len(content) > _MANIFEST_BYTES:
            raise ValueError(f"{url} sends more than {_MANIFEST_BYTES} bytes")
        return content, answer.headers.get("Docker-Content-Digest")


def _scheme(host: str) -> str:
    # What listens on loopback is this machine's, as container engines have it too.
    return "http" if host.partition(":")[0] in ("127.0.0.1", "localhost") else "https"


class _Staying(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow none: it could lead to where no certificate is asked for."""


_opener = urllib.request.build_opener(_Staying)
