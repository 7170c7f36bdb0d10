"""The way to a cluster: which API server, as whom, and in which namespace; found as kubectl finds it."""

from __future__ import annotations

from pathlib import Path

from kubernetes.aio import config
from kubernetes.aio.config import ConfigException

from moejob_api import api_bodies
from moejob_client.api_client import ApiClient, is_in_pod, load_configuration
from moejob_client.failures import JobRequestError, RequestFailure
from moejob_client.jobs import AsyncClient

_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
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
        settings = await load_configuration(kubeconfig, context)
        found_namespace = namespace or _default_namespace(kubeconfig, context)
    except (ConfigException, OSError) as error:
        text = f"no cluster is configured: {error}; set KUBECONFIG, or name a context that it has with --context"
        raise JobRequestError(RequestFailure.NO_CREDENTIALS, text) from error
    http = ApiClient(settings, _NoMetrics(), concurrency=_CONCURRENCY, seconds=_REQUEST_SECONDS)
    return AsyncClient(http, found_namespace)


def _default_namespace(kubeconfig: Path | None, context: str | None) -> str:
    if is_in_pod(kubeconfig, context):
        return _POD_NAMESPACE.read_text(encoding="utf-8").strip()
    contexts, current = config.list_kube_config_contexts(  # type: ignore[no-untyped-call]
        None if kubeconfig is None else str(kubeconfig)
    )
    entry = current if context is None else next((each for each in contexts if each["name"] == context), {})
    return api_bodies.as_text(api_bodies.as_mapping(entry.get("context")).get("namespace")) or "default"
