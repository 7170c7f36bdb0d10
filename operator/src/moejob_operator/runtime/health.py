"""/healthz, /readyz and /metrics. Knows what to serve, not what it means."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus

from aiohttp import web

from moejob_operator.admission.listener import BoundedServer, Handler, ListenerLimits, open_listener
from moejob_operator.runtime.metrics import Metrics

# The kubelet and Prometheus are two.
LIMITS = ListenerLimits()

# Unmet conditions in words: {"certificate": "the Secret x has none yet"}.
Lacks = Callable[[], Mapping[str, str]]


def health_handler(metrics: Metrics, troubles: Lacks, missing: Lacks) -> Handler:
    """Return the handler of a replica's probes: not alive with lasting troubles, ready when no part is missing."""

    async def respond(request: web.BaseRequest) -> web.Response:
        match request.path:
            case "/healthz":
                return _health_response(troubles())
            case "/readyz":
                return _health_response(missing())
            case "/metrics":
                kind = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
                return web.Response(body=metrics.format_text(), headers=kind)
            case _:
                return web.Response(status=HTTPStatus.NOT_FOUND, text="there is /healthz, /readyz and /metrics here\n")

    return respond


def format_lacks(lacks: Mapping[str, str]) -> str:
    """Return one line for each."""
    return "".join(f"{part}: {problem}\n" for part, problem in lacks.items())


def _health_response(lacks: Mapping[str, str]) -> web.Response:
    return web.Response(text=format_lacks(lacks) or "ok\n", status=503 if lacks else 200)


@asynccontextmanager
async def serve_health(
    handler: Handler, port: int, host: str | None = None, limits: ListenerLimits = LIMITS
) -> AsyncIterator[int]:
    """Serve while the block runs, on all addresses of this machine unless given one. Yields the port."""
    async with open_listener(BoundedServer(handler, limits), host, port) as served_port:
        yield served_port
