"""Credentials for an API server, found as kubectl finds them: in kubeconfig files, or in the account of this pod.

The client library of Kubernetes would do the same. Its import takes longer than any other work of a command, and it
leaves keys in files.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile

from moejob_client.exec_plugin import ExecPlugin, Identity, PluginCluster
from moejob_client.kubeconfig import ContextEntries, CredentialsError, read_context

__all__ = ["Credentials", "CredentialsError", "is_in_pod", "load_credentials"]

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The kubelet renews a token long before it expires.
_TOKEN_FILE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """An API server, its certificate authority, and who asks."""

    host: str
    namespace: str = "default"
    find_identity: Callable[[], Awaitable[Identity]] | None = None
    # Certificates as PEM.
    authority: str | None = None
    client_certificate: str | None = None
    client_key: str | None = field(default=None, repr=False)
    is_verified: bool = True
    server_name: str | None = None
    proxy: str | None = None

    async def find_authorization(self) -> str | None:
        """Return the header Authorization, renewed where it had run out."""
        return None if self.find_identity is None else (await self.find_identity()).authorization

    def make_tls_context(self) -> ssl.SSLContext | bool:
        """Return the settings of TLS; True, those of any server, where there is none."""
        if not self.host.startswith("https:"):
            return True
        context = ssl.create_default_context(cadata=self.authority)
        # kubectl accepts authorities without the extensions that Python 3.13 asks for.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not self.is_verified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_certificate:
            _load_certificate(context, self.client_certificate, self.client_key or "")
        return context


async def load_credentials(kubeconfig: Path | None, context: str | None = None) -> Credentials:
    """Find the API server: by the given file or context, else as a pod does, else as kubectl does."""
    if is_in_pod(kubeconfig, context):
        return _pod_credentials()
    return await _context_credentials(read_context(kubeconfig, context))


def is_in_pod(kubeconfig: Path | None, context: str | None) -> bool:
    """Return whether the credentials are those of this pod."""
    return kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ


def _pod_credentials() -> Credentials:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        authority = (_ACCOUNT / "ca.crt").read_text(encoding="utf-8")
        namespace = (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        identity = _TokenFile(_ACCOUNT / "token")
    except OSError as error:
        raise CredentialsError(f"this pod has no account: {error}") from error
    address = f"[{host}]" if ":" in host else host
    return Credentials(f"https://{address}:{port}", namespace, identity, authority)


async def _context_credentials(entries: ContextEntries) -> Credentials:
    cluster, user = entries.cluster, entries.user
    identity_source = _identity_source(entries)
    # A plugin may answer with a certificate, which TLS needs before the first request.
    identity = await identity_source() if isinstance(identity_source, ExecPlugin) else Identity()
    return Credentials(
        host=entries.server.rstrip("/"),
        namespace=entries.namespace,
        find_identity=identity_source,
        authority=cluster.read_pem("certificate-authority"),
        client_certificate=identity.certificate or user.read_pem("client-certificate"),
        client_key=identity.key or user.read_pem("client-key"),
        is_verified=cluster.fields.get("insecure-skip-tls-verify") is not True,
        server_name=cluster.find_text("tls-server-name"),
        proxy=cluster.find_text("proxy-url"),
    )


def _identity_source(entries: ContextEntries) -> Callable[[], Awaitable[Identity]] | None:
    """Return the source of the identity; in kubectl's order."""
    user = entries.user
    if token := user.find_text("token"):
        return _FixedIdentity(Identity(f"Bearer {token}"))
    if token_file := user.find_path("tokenFile"):
        try:
            return _TokenFile(token_file)
        except OSError as error:
            raise CredentialsError(f"the token of the user {user.name} cannot be read: {error}") from error
    if "username" in user.fields:
        return _FixedIdentity(Identity(user.basic_authorization()))
    if provider := user.fields.get("auth-provider"):
        return _FixedIdentity(_provider_identity(provider, user.name))
    if plugin := user.fields.get("exec"):
        cluster = PluginCluster(
            entries.server, entries.cluster.fields, entries.cluster.read_pem("certificate-authority")
        )
        return ExecPlugin(plugin, user.folder, cluster)
    return None


def _provider_identity(provider: object, user_name: str) -> Identity:
    """Return the token of a kubeconfig's auth-provider. kubectl renews it and keeps the renewed one: a second renewer
    would spend the refresh token that kubectl has."""
    settings = provider.get("config") if isinstance(provider, Mapping) else None
    token = settings.get("id-token") if isinstance(settings, Mapping) else None
    if not isinstance(token, str) or _has_expired(token):
        raise CredentialsError(
            f"the token of the user {user_name} has run out; run `kubectl get namespaces`, which renews it"
        )
    return Identity(f"Bearer {token}")


def _has_expired(token: str) -> bool:
    with suppress(ValueError, IndexError, AttributeError, TypeError):
        payload = token.split(".")[1]
        claims = json.loads(b64decode(payload + "=" * (-len(payload) % 4), altchars=b"-_"))
        return bool(claims.get("exp") and claims["exp"] < time.time() + 10)
    return False


@dataclass(frozen=True, slots=True)
class _FixedIdentity:
    identity: Identity

    async def __call__(self) -> Identity:
        return self.identity


class _TokenFile:
    """A token in a file, which is read again every minute."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_token()

    async def __call__(self) -> Identity:
        if time.monotonic() >= self._read_again_at:
            # A file that is just being replaced is read a minute later.
            with suppress(OSError):
                self._read_token()
        return self._identity

    def _read_token(self) -> None:
        self._identity = Identity(f"Bearer {self._path.read_text(encoding='utf-8').strip()}")
        self._read_again_at = time.monotonic() + _TOKEN_FILE_SECONDS


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load a certificate with its key; ssl takes both from a file only, which is gone again at once."""
    with NamedTemporaryFile("w", suffix=".pem", encoding="utf-8") as file:
        file.write(f"{certificate}\n{key}")
        file.flush()
        context.load_cert_chain(file.name)
