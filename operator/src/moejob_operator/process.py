"""One operator process: builds every part once, and brings them up and down in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp

from moejob_operator import admission, health
from moejob_operator.api_client import ApiClient, configuration
from moejob_operator.api_server import ApiServer
from moejob_operator.cache import Cache
from moejob_operator.certificates import CertificateStore, hosts_of
from moejob_operator.children.gangs import GangApi
from moejob_operator.cluster import Cluster, Conflict, Forbidden, JobKey, Retryable
from moejob_operator.leading import Leader
from moejob_operator.leases import ApiLeaseStore, Election, Leadership, Sole
from moejob_operator.lists import GangApis, Lists
from moejob_operator.logs import Log
from moejob_operator.metrics import Metrics
from moejob_operator.settings import Settings, unique
from moejob_operator.watching import WATCHED, watches
from moejob_operator.webhook import Webhook
from moejob_operator.work_queue import Pace, WorkQueue

log = Log(__name__)

# Looks at a job, knowing which gang schedulers there are. Returns after how many seconds to look again; None: when
# something happens.
Reconcile = Callable[[JobKey, Cluster, frozenset[GangApi]], Awaitable[float | None]]

CLOSING_SECONDS = 5.0
# Reviews come one at a time, when a person applies something.
_REVIEWERS = 2


@dataclass(frozen=True, slots=True)
class _Parts:
    """What runs."""

    leadership: Leadership
    leader: Leader
    webhook: Webhook | None


async def run(settings: Settings, reconcile: Reconcile) -> int:
    """Run until SIGTERM, or until something ends that should not. Returns the exit code."""
    stopping = asyncio.Event()
    async with AsyncExitStack() as stack:
        parts = await _built(stack, settings, reconcile, stopping)
        tasks = _started(parts, stopping)
        log.info("started", identity=settings.identity, namespaces=settings.namespaces)
        leading, told, *_ = tasks
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            stopping.set()
            parts.leader.queue.stop()
            parts.leadership.stop()
            # The work in hand ends, then the Lease is given up. Webhook and watches last as long as that.
            await asyncio.wait({leading}, timeout=settings.stop_seconds)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=CLOSING_SECONDS)
    failed = [task for task in tasks if not _reported(task)]
    code = 0 if ended == {told} and not failed else 1
    log.info("stopped", exit_code=code)
    return code


def _started(parts: _Parts, stopping: asyncio.Event) -> list[asyncio.Task[Any]]:
    """Everything that runs for ever: the election first, then what waits for a signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(parts.leadership.run(parts.leader.lead), name="election"),
        asyncio.create_task(stopping.wait(), name="signal"),
        *(asyncio.create_task(watch.run(), name=watch.name) for watch in parts.leader.watches),
    ]
    if parts.webhook is not None:
        tasks.append(asyncio.create_task(parts.webhook.run(), name="webhook"))
    return tasks


def _reported(task: asyncio.Task[Any]) -> bool:
    """Whether a task ended well; if not, why is told."""
    raised = None if task.cancelled() or not task.done() else task.exception()
    if raised is not None:
        log.error("a part has failed", part=task.get_name(), raised=raised)
    return raised is None


# --- building -------------------------------------------------------------------------------------------------------


async def _built(stack: AsyncExitStack, settings: Settings, reconcile: Reconcile, stopping: asyncio.Event) -> _Parts:
    metrics = Metrics()
    api = await _client(stack, settings, metrics, settings.request_concurrency)
    leadership = await _leadership(stack, settings, metrics)
    webhook = _webhook(stack, settings, metrics, api, leadership) if settings.webhook else None
    cache = Cache(settings.request_seconds)
    metrics.count(lambda: cache.jobs() if leadership.remaining_seconds() > 0 else ())
    gangs = GangApis(api)
    lists = [Lists(api, cache, namespace, gangs) for namespace in settings.namespaces or (None,)]
    cluster = ApiServer(
        api=api,
        cache=cache,
        lists=lists[0],
        pods=await stack.enter_async_context(_pod_session(settings)),
        identity=settings.identity,
        remaining_seconds=leadership.remaining_seconds,
        status_written=metrics.status_written,
    )
    queue: WorkQueue[JobKey] = WorkQueue(
        lambda key: reconcile(key, cluster, gangs.served),
        metrics,
        Pace(settings.workers, settings.spacing_seconds),
        expected=(Conflict, Retryable, Forbidden),
    )
    # As many connections as there are watches, and one to spare for each that begins anew.
    watched = await _client(stack, settings, metrics, concurrency=2 * len(WATCHED) * len(lists))
    watching = [watch for places in lists for watch in watches(watched, places, queue.add)]
    parts = _Parts(leadership, Leader(queue, lists, watching, settings.resync_seconds, metrics.leads), webhook)
    served = health.application(metrics, lambda: _missing(parts, stopping))
    await stack.enter_async_context(health.served(served, settings.http_port))
    return parts


async def _client(stack: AsyncExitStack, settings: Settings, metrics: Metrics, concurrency: int) -> ApiClient:
    found = await configuration(settings.kubeconfig)
    api = ApiClient(found, metrics, concurrency=concurrency, seconds=settings.request_seconds)
    stack.push_async_callback(api.close)
    return api


async def _leadership(stack: AsyncExitStack, settings: Settings, metrics: Metrics) -> Leadership:
    if not settings.leader_election:
        return Sole()
    # A client of its own: no other request may stand in the way of a renewal.
    api = await _client(stack, settings, metrics, concurrency=1)
    store = ApiLeaseStore(api, settings.own_namespace, settings.lease_name)
    return Election(store, unique(settings.identity), settings.terms)


def _webhook(
    stack: AsyncExitStack, settings: Settings, metrics: Metrics, api: ApiClient, leadership: Leadership
) -> Webhook:
    executor = stack.enter_context(ThreadPoolExecutor(_REVIEWERS, thread_name_prefix="review"))
    is_ours = settings.webhook_certificates == "SelfSigned"
    return Webhook(
        admission.application(executor, metrics),
        CertificateStore(api, settings.own_namespace, settings.webhook_secret, settings.webhook_configuration),
        hosts_of(settings.webhook_service, settings.own_namespace),
        settings.webhook_port,
        makes_certificates=lambda: is_ours and leadership.remaining_seconds() > 0,
        loaded=metrics.certificate_ends,
    )


def _missing(parts: _Parts, stopping: asyncio.Event) -> Mapping[str, str]:
    if stopping.is_set():
        return {"operator": "is stopping"}
    lacks = {watch.name: "has not listed yet" for watch in parts.leader.watches if not watch.listed.is_set()}
    if parts.webhook is not None and parts.webhook.pair is None:
        lacks["webhook"] = f"the Secret {parts.webhook.store.secret} holds no certificate yet"
    return lacks


def _pod_session(settings: Settings) -> aiohttp.ClientSession:
    # A pod is asked every half minute: not worth a connection that stays.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=settings.progress_seconds)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
