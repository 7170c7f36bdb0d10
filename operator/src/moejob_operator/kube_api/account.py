"""The operator's credentials, as Kubernetes' own client library finds and renews them.

Commands have a reader of their own, moejob_client.credentials, because the library's import takes longer than a
command may. An operator starts once, and lives by the library that the cluster's makers test.
"""

from __future__ import annotations

from pathlib import Path

from kubernetes.aio import client, config
from kubernetes.aio.config.config_exception import ConfigException

from moejob_client.credentials import Credentials, CredentialsError, is_in_pod
from moejob_client.exec_plugin import Identity


async def load_account(kubeconfig: Path | None) -> Credentials:
    """Find the API server: by the given file, else as a pod does, else as kubectl does."""
    settings = client.Configuration()
    try:
        if is_in_pod(kubeconfig, None):
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            file = None if kubeconfig is None else str(kubeconfig)
            await config.load_kube_config(config_file=file, client_configuration=settings)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise CredentialsError(str(error)) from error

    async def find_identity() -> Identity:
        # The library reads a pod's token again, and asks a plugin again, where the old one has run out.
        return Identity(await settings.get_api_key_with_prefix("BearerToken"))

    return Credentials(
        host=settings.host.rstrip("/"),
        find_identity=find_identity,
        authority=_read_file(settings.ssl_ca_cert),
        client_certificate=_read_file(settings.cert_file),
        client_key=_read_file(settings.key_file),
        is_verified=bool(settings.verify_ssl),
        server_name=settings.tls_server_name,
        proxy=settings.proxy,
    )


def _read_file(path: str | None) -> str | None:
    return Path(path).read_text(encoding="utf-8") if path else None
