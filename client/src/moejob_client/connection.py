"""The way to a cluster: which API server, as whom, and in which namespace; found as kubectl finds it."""

from __future__ import annotations

from pathlib import Path

from moejob_client.api_client import ApiClient
from moejob_client.credentials import CredentialsError, load_credentials
from moejob_client.failures import JobRequestError, RequestFailure
from moejob_client.jobs import AsyncClient

_CONCURRENCY = 16
_REQUEST_SECONDS = 15.0


class _NoMetrics:
    def count_request(self, verb: str, resource: str, code: str, seconds: float) -> None:
        """Count nothing: a client that ends soon has no metrics to serve."""


async def connect_client(
    namespace: str | None = None, context: str | None = None, kubeconfig: Path | None = None
) -> AsyncClient:
    """Return a client for a namespace; without one that of the context, or of this pod."""
    try:
        credentials = await load_credentials(kubeconfig, context)
        http = ApiClient(credentials, _NoMetrics(), concurrency=_CONCURRENCY, seconds=_REQUEST_SECONDS)
    except (CredentialsError, OSError) as error:
        text = f"no cluster is configured: {error}; set KUBECONFIG, or name a context that it has with --context"
        raise JobRequestError(RequestFailure.NO_CREDENTIALS, text) from error
    return AsyncClient(http, namespace or credentials.namespace)
