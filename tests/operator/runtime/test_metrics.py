"""The operator's metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from moejob_operator.runtime.health import health_handler, serve_health
from moejob_operator.runtime.metrics import Metrics
from moejob_operator.runtime.work_queue import WorkOutcome
from stand_in_api import stored_object


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def make_job_body(name: str, phase: str | None, gpus: int = 0, accelerator: str = "GPU") -> dict[str, Any]:
    status = {} if phase is None else {"phase": phase, "layout": {"gpus": gpus}}
    spec = {"resources": {"accelerator": accelerator}}
    return stored_object("MoETrainingJob", name, spec=spec, status=status, metadata={"namespace": "default"})


def test_jobs_are_counted_by_phase_and_gpus_only_where_they_are_wanted() -> None:
    metrics = Metrics()
    jobs = [
        make_job_body("a", "Running", 8),
        make_job_body("b", "Running", 16),
        make_job_body("c", "Succeeded", 64),
        make_job_body("d", None),
    ]
    jobs.append(make_job_body("e", "Running", 4, accelerator="CPU"))
    metrics.count_jobs(lambda: jobs)
    assert value(metrics, "moejob_jobs", namespace="default", phase="Running") == 3
    assert value(metrics, "moejob_jobs", namespace="default", phase="Pending") == 1
    assert value(metrics, "moejob_gpus", namespace="default", phase="Running") == 24
    assert value(metrics, "moejob_gpus", namespace="default", phase="Succeeded") is None
    jobs.clear()
    assert value(metrics, "moejob_jobs", namespace="default", phase="Running") is None


def test_unfinished_jobs_are_counted_by_what_they_wait_for() -> None:
    metrics = Metrics()
    jobs = [make_job_body(name, phase) for name, phase in (("a", "Pending"), ("b", "Pending"), ("c", "Failed"))]
    for body in jobs:
        body["status"]["why"] = {"blocker": "QueueQuota"}
    metrics.count_jobs(lambda: [*jobs, make_job_body("d", "Running")])
    assert value(metrics, "moejob_blocked_jobs", namespace="default", blocker="QueueQuota") == 2


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [
        pytest.param(
            {"restarts": {"total": 1}},
            {"restarts": {"total": 2}, "lastFailure": {"reason": "RankFailed"}},
            {"moejob_restarts_total": ({"what": "gang", "reason": "RankFailed"}, 1)},
            id="a gang was restarted",
        ),
        pytest.param(
            {},
            {"restarts": {"pods": 2, "ranks": 3, "preemptions": 1}},
            {
                "moejob_restarts_total": ({"what": "rank", "reason": "Unknown"}, 3),
            },
            id="ranks were restarted",
        ),
        pytest.param(
            {"goodput": {"lostGpuHours": 1.5}},
            {"goodput": {"lostGpuHours": 4.0}},
            {"moejob_lost_gpu_hours_total": ({}, 2.5)},
            id="GPU hours were lost",
        ),
        pytest.param(
            {"phase": "Running"},
            {"phase": "Failed"},
            {"moejob_finished_jobs_total": ({"phase": "Failed"}, 1)},
            id="a job failed",
        ),
        pytest.param(
            {"phase": "Failed", "restarts": {"total": 7}, "goodput": {"lostGpuHours": 9}},
            {"phase": "Failed", "restarts": None, "goodput": None},
            {"moejob_finished_jobs_total": ({"phase": "Failed"}, None), "moejob_lost_gpu_hours_total": ({}, 0)},
            id="counters never fall",
        ),
    ],
)
def test_what_grew_in_a_status_is_counted(
    before: dict[str, Any], after: dict[str, Any], counted: dict[str, tuple[dict[str, str], float | None]]
) -> None:
    metrics = Metrics()
    metrics.count_status_change(before, after)
    for name, (labels, expected) in counted.items():
        assert value(metrics, name, **labels) == expected


def test_the_queue_the_requests_and_the_reviews_are_measured() -> None:
    metrics = Metrics()
    metrics.set_queue_depth(3)
    metrics.observe_wait(0.2)
    metrics.observe_work(0.01, WorkOutcome.DONE)
    metrics.observe_work(0.01, WorkOutcome.RETRIED)
    metrics.count_request("list", "pods", "200", 0.1)
    metrics.count_review("denied", 0.1)
    metrics.set_leading(True)
    metrics.set_certificate_end(1.8e9)
    assert value(metrics, "moejob_queue_depth") == 3
    assert value(metrics, "moejob_queue_retries_total") == 1
    assert value(metrics, "moejob_reconcile_seconds_count", outcome="done") == 1
    assert value(metrics, "moejob_api_request_seconds_count", verb="list", resource="pods", code="200") == 1
    assert value(metrics, "moejob_admission_seconds_count", answer="denied") == 1
    assert value(metrics, "moejob_leading") == 1
    assert value(metrics, "moejob_certificate_expiry_timestamp_seconds") == 1.8e9


def test_alive_is_who_has_no_trouble_and_ready_who_lacks_nothing() -> None:
    lacks: dict[str, str] = {"webhook": "the Secret x holds no certificate yet"}
    troubles: dict[str, str] = {}

    async def story() -> None:
        async with (
            serve_health(health_handler(Metrics(), lambda: troubles, lambda: lacks), 0, "127.0.0.1") as port,
            aiohttp.ClientSession() as session,
        ):

            async def get(path: str) -> tuple[int, str]:
                async with session.get(f"http://127.0.0.1:{port}{path}") as said:
                    return said.status, await said.text()

            assert await get("/healthz") == (200, "ok\n")
            troubles["election"] = "has ended"
            assert await get("/healthz") == (503, "election: has ended\n")
            assert await get("/readyz") == (503, "webhook: the Secret x holds no certificate yet\n")
            lacks.clear()
            assert await get("/readyz") == (200, "ok\n")
            code, text = await get("/metrics")
            assert code == 200
            assert "# TYPE moejob_reconcile_seconds histogram" in text
            assert "process_resident_memory_bytes" in text

    asyncio.run(story())


def test_tasks_are_counted_when_asked_for() -> None:
    metrics = Metrics()

    async def counted() -> tuple[float | None, float | None]:
        alone = value(metrics, "moejob_tasks")
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            return alone, value(metrics, "moejob_tasks")

    assert asyncio.run(counted()) == (1, 2)
    assert value(metrics, "moejob_tasks") == 0
