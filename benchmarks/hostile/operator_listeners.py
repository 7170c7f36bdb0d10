"""One listener of the operator in a process of its own, for benchmarks.hostile: its name, and what it needs."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kopf
import uvloop

from benchmarks.hostile.probe import GapProbe, serve_until_told
from moejob_api.job import GROUP, PLURAL, VERSION
from moejob_api.rules.limits import DEFAULT_LIMITS
from moejob_operator.admission import review
from moejob_operator.admission.certificates import load_pair, make_pair, service_hosts, utc_now
from moejob_operator.admission.server import AdmissionServer
from moejob_operator.handlers import validate
from moejob_operator.kube_api.pod_client import MutePod, PodClient
from moejob_operator.runtime import health
from moejob_operator.runtime.assembly import REVIEWERS
from moejob_operator.runtime.kopf_settings import configure_kopf
from moejob_operator.runtime.metrics import Metrics
from moejob_operator.runtime.process import keep_loop_prompt
from stand_in_api import list_answer, serve_stand_in

HOSTS = service_hosts("moejob-webhook", "moejob-system")
# Pods of a job that are asked at once.
_PODS = 64
_SECONDS = 5.0


@asynccontextmanager
async def webhook(authority: str) -> AsyncIterator[int]:
    """Run kopf with our admission server before a stand-in of the API; the authority to trust goes into that file."""
    context, certified, registry = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), asyncio.Event(), kopf.OperatorRegistry()
    pair = make_pair(HOSTS, utc_now())
    load_pair(context, pair)
    await asyncio.to_thread(Path(authority).write_bytes, pair.authority)
    certified.set()
    server = AdmissionServer(context, certified, 0, Metrics(), host="127.0.0.1")
    settings = kopf.OperatorSettings()
    async with AsyncExitStack() as stack:
        reviewers = stack.enter_context(ThreadPoolExecutor(REVIEWERS))
        configure_kopf(settings, reviewers, server)
        kopf.on.validate(GROUP, VERSION, PLURAL, id=review.HANDLER, registry=registry)(validate)
        api, _ = await stack.enter_async_context(serve_stand_in())
        api.serve_jobs()
        api.set_answers(f"GET /apis/{GROUP}/{VERSION}/{PLURAL}", list_answer())

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(server=api.url)

        memo = kopf.Memo(operator=SimpleNamespace(limits=DEFAULT_LIMITS))
        running = asyncio.ensure_future(
            kopf.operator(registry=registry, settings=settings, memo=memo, clusterwide=True)
        )
        # kopf tells of nothing by which to wait.
        while server.served_port is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield server.served_port
        running.cancel()
        await asyncio.wait({running})


@asynccontextmanager
async def metrics(_: str) -> AsyncIterator[int]:
    """Serve /metrics and the probes."""
    async with health.serve_health(health.health_handler(Metrics(), dict, dict), 0, "127.0.0.1") as port:
        yield port


@asynccontextmanager
async def pods(port: str) -> AsyncIterator[int]:
    """Ask pods without end, all of which are the attacker's."""
    client = PodClient(_SECONDS, int(port))

    async def ask() -> None:
        while True:
            try:
                await client.get_progress("127.0.0.1")
            except MutePod:
                await asyncio.sleep(0.01)

    asking = [asyncio.create_task(ask()) for _ in range(_PODS)]
    yield int(port)
    for task in asking:
        task.cancel()


LISTENERS: dict[str, Callable[[str], Any]] = {"webhook": webhook, "metrics": metrics, "pods": pods}


async def main(name: str, argument: str) -> None:
    """Serve until standard input ends."""
    probe = GapProbe()

    def begin() -> None:
        probe.gap_seconds = 0.0

    async with LISTENERS[name](argument) as port:
        watching = asyncio.create_task(probe.run_in_loop())
        await asyncio.to_thread(serve_until_told, port, lambda: probe.gap_seconds, begin)
        watching.cancel()


if __name__ == "__main__":
    keep_loop_prompt()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
