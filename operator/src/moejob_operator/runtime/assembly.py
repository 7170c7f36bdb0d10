"""Builds the parts of a replica, once each, and connects them. Starts none of them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from moejob_client.api_client import ApiClient
from moejob_operator.admission.certificate_keeper import CertificateKeeper
from moejob_operator.admission.certificates import CertificateStore, service_hosts
from moejob_operator.admission.listener import ListenerLimits
from moejob_operator.admission.server import AdmissionServer, IdleServer
from moejob_operator.children.attempt import Images, JobNetwork
from moejob_operator.cluster import Conflict, Forbidden, JobKey, Retryable
from moejob_operator.kube_api.account import load_account
from moejob_operator.kube_api.api_server import ApiServer
from moejob_operator.kube_api.cache import Cache
from moejob_operator.kube_api.informers import WATCHED, Informer, build_informers
from moejob_operator.kube_api.live_lists import GangApis, LiveLists
from moejob_operator.kube_api.pod_client import PodClient
from moejob_operator.kube_api.profiles import ProfileReader
from moejob_operator.planning.observed_state import OperatorSetting
from moejob_operator.reconcile import Reconciler
from moejob_operator.runtime.job_watch import JobWatch
from moejob_operator.runtime.kopf_session import KopfSession
from moejob_operator.runtime.leader_duties import Leader
from moejob_operator.runtime.leader_election import ApiLeaseStore, Election, Leadership, SoleReplica
from moejob_operator.runtime.metrics import Metrics
from moejob_operator.runtime.settings import Settings, unique_identity
from moejob_operator.runtime.work_queue import RateLimiter, WorkQueue
from moejob_operator.validation import Validator, validate_spec

# A thread for each connection: most of them only wait for their turn to validate or to search for layouts.
REVIEWERS = ListenerLimits().connections


@dataclass(frozen=True, slots=True)
class ReplicaParts:
    """Everything of a replica that is not kopf's. Without a webhook there is no keeper of a certificate."""

    settings: Settings
    metrics: Metrics
    cache: Cache
    leadership: Leadership
    leader: Leader
    job_watches: tuple[JobWatch, ...]
    informers: tuple[Informer, ...]
    kopf_session: KopfSession
    keeper: CertificateKeeper | None
    admission: AdmissionServer | IdleServer
    reviewers: ThreadPoolExecutor
    profiles: ProfileReader


async def assemble_replica(stack: AsyncExitStack, settings: Settings) -> ReplicaParts:
    """Build everything; the stack closes what has to be closed."""
    metrics, cache = Metrics(), Cache(settings.request_seconds)
    api = await _build_client(stack, settings, metrics, settings.request_concurrency)
    leadership = await _build_leadership(stack, settings, metrics)
    metrics.count_jobs(lambda: cache.all_jobs() if leadership.remaining_seconds() > 0 else ())
    gangs = GangApis(api)
    lists = [LiveLists(api, cache, namespace, gangs) for namespace in settings.namespaces or (None,)]
    cluster = ApiServer(
        api=api,
        cache=cache,
        lists=lists[0],
        pods=PodClient(settings.progress_seconds),
        identity=settings.identity,
        remaining_seconds=leadership.remaining_seconds,
        on_status_written=metrics.count_status_change,
    )
    queue = _build_queue(settings, metrics, cluster, gangs)
    # As many connections as there are watches, and one to spare for each that begins again.
    watch_client = await _build_client(stack, settings, metrics, concurrency=2 * len(WATCHED) * len(lists))
    informers = tuple(watch for places in lists for watch in build_informers(watch_client, places, queue.add))
    job_watches = tuple(JobWatch(places, queue.add) for places in lists)
    keeper = _build_keeper(settings, metrics, api, leadership) if settings.webhook else None
    return ReplicaParts(
        settings=settings,
        metrics=metrics,
        cache=cache,
        leadership=leadership,
        leader=Leader(queue, lists, (*job_watches, *informers), settings.resync_seconds, metrics.set_leading),
        job_watches=job_watches,
        informers=informers,
        kopf_session=KopfSession(api, job_watches, metrics),
        keeper=keeper,
        admission=_build_admission(settings, metrics, keeper),
        reviewers=stack.enter_context(ThreadPoolExecutor(REVIEWERS, thread_name_prefix="review")),
        profiles=ProfileReader(api, asyncio.get_running_loop()),
    )


def _build_queue(settings: Settings, metrics: Metrics, cluster: ApiServer, gangs: GangApis) -> WorkQueue[JobKey]:
    images = Images(settings.trainer_image, settings.trainer_colocated_image, settings.rollout_image)
    network = _job_network(settings) if settings.job_network_policy else None
    validator = Validator(partial(validate_spec, limits=settings.job_limits), settings.job_limits)
    setting = OperatorSetting(images, gangs.served_apis, network, settings.limits.schedulers, settings.gpu_nodes)
    reconciler = Reconciler(validator, setting, lambda: datetime.now(UTC))

    async def reconcile(key: JobKey) -> float | None:
        return await replace(reconciler, setting=replace(setting, gang_apis=gangs.served_apis))(key, cluster)

    return WorkQueue(
        reconcile,
        metrics,
        RateLimiter(settings.workers, settings.spacing_seconds),
        expected=(Conflict, Retryable, Forbidden),
    )


def _job_network(settings: Settings) -> JobNetwork:
    return JobNetwork(settings.own_namespace, settings.job_metrics_from, settings.job_egress, settings.job_egress_rules)


async def _build_client(stack: AsyncExitStack, settings: Settings, metrics: Metrics, concurrency: int) -> ApiClient:
    credentials = await load_account(settings.kubeconfig)
    api = ApiClient(
        credentials,
        metrics,
        concurrency=concurrency,
        seconds=settings.request_seconds,
        user_agent="moejob-operator",
    )
    stack.push_async_callback(api.close)
    return api


async def _build_leadership(stack: AsyncExitStack, settings: Settings, metrics: Metrics) -> Leadership:
    if not settings.leader_election:
        return SoleReplica()
    # The election has its own client: no other request may delay a renewal.
    api = await _build_client(stack, settings, metrics, concurrency=1)
    store = ApiLeaseStore(api, settings.own_namespace, settings.lease_name)
    return Election(store, unique_identity(settings.identity), settings.lease_durations)


def _build_keeper(settings: Settings, metrics: Metrics, api: ApiClient, leadership: Leadership) -> CertificateKeeper:
    is_ours = settings.webhook_certificates == "SelfSigned"
    return CertificateKeeper(
        CertificateStore(api, settings.own_namespace, settings.webhook_secret, settings.webhook_configuration),
        service_hosts(settings.webhook_service, settings.own_namespace),
        makes_certificates=lambda: is_ours and leadership.remaining_seconds() > 0,
        on_loaded=metrics.set_certificate_end,
    )


def _build_admission(
    settings: Settings, metrics: Metrics, keeper: CertificateKeeper | None
) -> AdmissionServer | IdleServer:
    if keeper is None:
        return IdleServer()
    return AdmissionServer(keeper.context, keeper.certified, settings.webhook_port, metrics)
