"""The metrics that Prometheus reads. Owns the names of all metrics and their registry; decides nothing."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from moejob_api.job.resources import Accelerator
from moejob_api.job.status import Phase
from moejob_operator.cluster import Raw
from moejob_operator.runtime.work_queue import WorkOutcome

_FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_UNKNOWN = "Unknown"
# The label of each kind of restart, and its counter in status.restarts.
_RESTARTS = {"gang": "total", "pod": "pods", "rank": "ranks", "preemption": "preemptions"}


class Metrics:
    """Every metric of one operator process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        tasks = Gauge("moejob_tasks", "Tasks that run or wait in this process.", registry=registry)
        tasks.set_function(_count_tasks)
        self._reconcile = Histogram(
            "moejob_reconcile_seconds", "Time to reconcile one job.", ["outcome"], registry=registry, buckets=_FAST
        )
        self._queue_wait = Histogram(
            "moejob_queue_wait_seconds", "From due to begun.", registry=registry, buckets=_FAST
        )
        self._depth = Gauge("moejob_queue_depth", "Jobs that wait for a look, now or later.", registry=registry)
        self._retries = Counter(
            "moejob_queue_retries", "Reconciles that failed and are tried again.", registry=registry
        )
        self._requests = Histogram(
            "moejob_api_request_seconds",
            "Time of a request to the API server.",
            ["verb", "resource", "code"],
            registry=registry,
            buckets=_FAST,
        )
        self._leading = Gauge("moejob_leading", "1 while this replica leads.", registry=registry)
        self._restarts = Counter(
            "moejob_restarts",
            "Restarts by what was restarted and the reason of the last failure.",
            ["what", "reason"],
            registry=registry,
        )
        self._lost_gpu_hours = Counter("moejob_lost_gpu_hours", "GPU hours lost to failures.", registry=registry)
        self._finished_jobs = Counter("moejob_finished_jobs", "Jobs that ended.", ["phase"], registry=registry)
        self._reviews = Histogram(
            "moejob_admission_seconds", "Time to judge a job.", ["answer"], registry=registry, buckets=_FAST
        )
        self._expiry = Gauge(
            "moejob_certificate_expiry_timestamp_seconds", "When the webhook's certificate ends.", registry=registry
        )

    def format_text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def count_jobs(self, jobs: Callable[[], Iterable[Raw]]) -> None:
        """Count jobs at each scrape; `jobs` returns none on a follower, or two replicas would count the same jobs."""
        self.registry.register(_JobCollector(jobs))

    # --- the work queue -------------------------------------------------------------------------------------------

    def set_queue_depth(self, depth: int) -> None:
        """Set the number of jobs that wait."""
        self._depth.set(depth)

    def observe_wait(self, waited_seconds: float) -> None:
        """A reconcile begins."""
        self._queue_wait.observe(waited_seconds)

    def observe_work(self, seconds: float, outcome: WorkOutcome) -> None:
        """A reconcile ended."""
        self._reconcile.labels(outcome).observe(seconds)
        if outcome in (WorkOutcome.RETRIED, WorkOutcome.BROKEN):
            self._retries.inc()

    # --- the rest -------------------------------------------------------------------------------------------------

    def count_request(self, verb: str, resource: str, code: str, seconds: float) -> None:
        """Count a request to the API server; without a response the code is a word."""
        self._requests.labels(verb, resource, code).observe(seconds)

    def set_leading(self, is_leading: bool) -> None:
        """This replica begins or ends to lead."""
        self._leading.set(is_leading)

    def count_review(self, verdict: str, seconds: float) -> None:
        """The webhook answered."""
        self._reviews.labels(verdict).observe(seconds)

    def set_certificate_end(self, timestamp: float) -> None:
        """A certificate is served until then."""
        self._expiry.set(timestamp)

    def count_status_change(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Count what grew from one status to the next."""
        reason = _field_at(after, "lastFailure", "reason") or _UNKNOWN
        for kind, field in _RESTARTS.items():
            grown = _number_at(after, "restarts", field) - _number_at(before, "restarts", field)
            if grown > 0:
                self._restarts.labels(kind, reason).inc(grown)
        self._lost_gpu_hours.inc(
            max(0.0, _number_at(after, "goodput", "lostGpuHours") - _number_at(before, "goodput", "lostGpuHours"))
        )
        phase = after.get("phase")
        if phase != before.get("phase") and phase in (Phase.SUCCEEDED, Phase.FAILED):
            self._finished_jobs.labels(phase).inc()


class _JobCollector(Collector):
    """Counts jobs at each scrape: a gauge would keep counting deleted jobs."""

    def __init__(self, jobs: Callable[[], Iterable[Raw]]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Jobs by phase and by obstacle, and the GPUs they hold or wait for."""
        phases: Tally[tuple[str, str]] = Tally()
        blockers: Tally[tuple[str, str]] = Tally()
        gpus: Tally[tuple[str, str]] = Tally()
        for job in self._jobs():
            status = job.get("status") or {}
            key = (job["metadata"]["namespace"], status.get("phase") or Phase.PENDING)
            phases[key] += 1
            blocker = _field_at(status, "why", "blocker")
            if blocker is not None and key[1] not in (Phase.SUCCEEDED, Phase.FAILED):
                blockers[key[0], blocker] += 1
            has_gpus = _field_at(job.get("spec") or {}, "resources", "accelerator") != Accelerator.CPU
            if has_gpus and key[1] in (Phase.PENDING, Phase.RUNNING, Phase.RESTARTING):
                gpus[key] += int(_number_at(status, "layout", "gpus"))
        yield _metric_family("moejob_jobs", "Jobs by phase.", "phase", phases)
        yield _metric_family("moejob_blocked_jobs", "Unfinished jobs by what they wait for.", "blocker", blockers)
        yield _metric_family("moejob_gpus", "GPUs that jobs hold or wait for.", "phase", gpus)


def _count_tasks() -> float:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        # Asked from outside the loop.
        return 0.0


def _metric_family(name: str, text: str, label: str, counts: Mapping[tuple[str, str], int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["namespace", label])
    for labels, count in counts.items():
        family.add_metric(list(labels), count)
    return family


def _field_at(tree: Mapping[str, Any], section: str, field: str) -> Any:
    return (tree.get(section) or {}).get(field)


def _number_at(tree: Mapping[str, Any], section: str, field: str) -> float:
    return float(_field_at(tree, section, field) or 0)
