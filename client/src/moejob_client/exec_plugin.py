"""Credentials from a program that a kubeconfig names, as those of cloud providers. It runs again when they expire."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from moejob_api.api_bodies import Raw, as_mapping, as_mappings, as_time
from moejob_client.kubeconfig import CredentialsError, plain_text

# A token that runs out under way would be refused.
_EARLY = timedelta(seconds=10)
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Identity:
    """An identity: a header, or a certificate with its key."""

    authorization: str | None = field(default=None, repr=False)
    certificate: str | None = None
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class PluginCluster:
    """The cluster, for a plugin that asks for it."""

    server: str
    fields: Raw
    authority: str | None

    def to_document(self) -> dict[str, object]:
        """Return it in the words of ExecCredential."""
        document: dict[str, object] = {"server": self.server}
        if self.authority is not None:
            document["certificate-authority-data"] = b64encode(self.authority.encode()).decode()
        for key in ("tls-server-name", "insecure-skip-tls-verify", "proxy-url"):
            if key in self.fields:
                document[key] = self.fields[key]
        for extension in as_mappings(self.fields.get("extensions")):
            if extension.get("name") == "client.authentication.k8s.io/exec":
                document["config"] = extension.get("extension")
        return document


class ExecPlugin:
    """The program of a user, and its last answer."""

    def __init__(self, settings: object, folder: Path, cluster: PluginCluster) -> None:
        self._settings = as_mapping(settings)
        self._folder = folder
        self._cluster = cluster
        self._identity: Identity | None = None
        self._expires_at: datetime | None = None

    async def __call__(self) -> Identity:
        """Return the identity, of the last answer if that is still good."""
        is_over = self._expires_at is not None and datetime.now(UTC) >= self._expires_at - _EARLY
        if self._identity is None or is_over:
            status = await self._run_program()
            token = plain_text(status.get("token"))
            self._identity = Identity(
                f"Bearer {token}" if token else None,
                plain_text(status.get("clientCertificateData")) or None,
                plain_text(status.get("clientKeyData")) or None,
            )
            self._expires_at = as_time(status.get("expirationTimestamp"))
        return self._identity

    async def _run_program(self) -> Raw:
        command = plain_text(self._settings.get("command"))
        # A path is relative to the kubeconfig; a name is looked for in PATH.
        program = str(self._folder / command) if "/" in command else command
        arguments = self._settings.get("args")
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *(map(plain_text, arguments) if isinstance(arguments, list) else ()),
                env=self._plugin_environment(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            hint = plain_text(self._settings.get("installHint"))
            raise CredentialsError(
                f"the plugin {command} cannot run: {error}" + (f"; {hint}" if hint else "")
            ) from error
        output, errors = await process.communicate()
        if process.returncode:
            words = errors.decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
            raise CredentialsError(f"the plugin {command} ended with {process.returncode}: {words}")
        return _read_answer(command, output)

    def _plugin_environment(self) -> dict[str, str]:
        interactive = plain_text(self._settings.get("interactiveMode")) != "Never" and sys.stdin.isatty()
        spec: dict[str, object] = {"interactive": interactive}
        if self._settings.get("provideClusterInfo") is True:
            spec["cluster"] = self._cluster.to_document()
        request = {"apiVersion": self._settings.get("apiVersion"), "kind": "ExecCredential", "spec": spec}
        variables = {
            plain_text(item.get("name")): plain_text(item.get("value"))
            for item in as_mappings(self._settings.get("env"))
        }
        return os.environ | variables | {"KUBERNETES_EXEC_INFO": json.dumps(request)}


def _read_answer(command: str, output: bytes) -> Raw:
    try:
        document = json.loads(output)
    except ValueError:
        document = None
    status = as_mapping(document.get("status")) if isinstance(document, Mapping) else {}
    if not status.get("token") and not (status.get("clientCertificateData") and status.get("clientKeyData")):
        raise CredentialsError(f"the plugin {command} answers neither with a token nor with a certificate and its key")
    return status
