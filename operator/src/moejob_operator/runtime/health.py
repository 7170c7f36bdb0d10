"""/healthz, /readyz and /metrics. Knows what to serve, not what it means."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from moejob_operator.runtime.metrics import Metrics

# What is not yet so is said in words: {"certificate": "the Secret x has none yet"}.
Lacks = Callable[[], Mapping[str, str]]


def application(metrics: Metrics, troubles: Lacks, missing: Lacks) -> web.Application:
    """Return the answers of a replica: not alive with troubles that stay, ready when no part is missing."""

    async def alive(_: web.Request) -> web.Response:
        return _answer(troubles())

    async def ready(_: web.Request) -> web.Response:
        return _answer(missing())

    async def measured(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.add_routes([web.get("/healthz", alive), web.get("/readyz", ready), web.get("/metrics", measured)])
    return app


def text(lacks: Mapping[str, str]) -> str:
    """Return one line for each."""
    return "".join(f"{what}: {why}\n" for what, why in lacks.items())


def _answer(lacks: Mapping[str, str]) -> web.Response:
    return web.Response(text=text(lacks) or "ok\n", status=503 if lacks else 200)


@asynccontextmanager
async def served(app: web.Application, port: int, host: str | None = None) -> AsyncIterator[int]:
    """Serve while the block runs, on all addresses of this machine unless given one. Yields the port."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
