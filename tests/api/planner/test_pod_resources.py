"""Requests of pods come from the plan; limits only from the job's own numbers, or where it asks for Guaranteed."""

from __future__ import annotations

from typing import Any

import pytest

from builders import moe_model, spec
from moejob_api.models.shape import ModelShape
from moejob_api.planner.plan import Plan, plan_job
from moejob_api.planner.pod_resources import PodResources
from moejob_api.problems import Rule
from moejob_api.quantities import GIB, quantity_bytes

SMALL_MIXTURE = moe_model(layers=2, experts=4)
SEPARATE: dict[str, Any] = {"rollout": {"placement": "Separate", "replicas": 2, "tensor": 4}}


def plan(resources: dict[str, Any], shape: ModelShape | None = SMALL_MIXTURE, **sections: Any) -> Plan:
    """The plan of a job on eight ranks."""
    return plan_job(spec(parallelism={"expert": 4, "data": 8}, resources=resources, **sections), shape)


def trainer(resources: dict[str, Any], shape: ModelShape | None = SMALL_MIXTURE, **sections: Any) -> PodResources:
    pod = plan(resources, shape, **sections).trainer_pod
    assert pod is not None
    return pod


def engine(resources: dict[str, Any], **sections: Any) -> PodResources:
    pod = plan(resources, method="GRPO", grpo=SEPARATE, **sections).engine_pod
    assert pod is not None
    return pod


def test_a_pod_requests_the_plans_host_memory_and_four_cores_a_gpu_without_limits() -> None:
    memory = plan({}).memory
    assert memory is not None
    pod = trainer({})
    assert pod.requests["cpu"] == "32"
    assert 0 <= quantity_bytes(pod.requests["memory"]) - memory.host_bytes_per_pod < 2**20
    assert (pod.limits, pod.shared_memory) == ({}, "16Gi")


def test_offloaded_states_are_requested_too() -> None:
    requests = [
        quantity_bytes(trainer({}, memory={"offloadOptimizer": share}).requests["memory"]) for share in (0.0, 1.0)
    ]
    assert requests[0] < requests[1]


def test_numbers_of_the_job_are_its_own_and_its_memory_is_a_limit() -> None:
    pod = trainer({"cpu": 90, "memory": "1Ti", "sharedMemory": "3Gi"})
    assert pod == PodResources({"cpu": 90, "memory": "1Ti"}, {"memory": "1Ti"}, "3Gi")


def test_guaranteed_pods_are_limited_to_their_requests_which_have_room_for_a_full_dev_shm() -> None:
    usual, guaranteed = trainer({}), trainer({"qosClass": "Guaranteed"})
    assert guaranteed.requests == guaranteed.limits
    assert guaranteed.requests["cpu"] == usual.requests["cpu"]
    larger = quantity_bytes(guaranteed.requests["memory"]) - quantity_bytes(usual.requests["memory"])
    assert larger == 16 * GIB


def test_ranks_on_cpus_leave_room_on_a_laptop_unless_their_cores_are_guaranteed() -> None:
    on_cpu = {"accelerator": "CPU", "gpusPerNode": 2}
    assert trainer(on_cpu).requests["cpu"] == "200m"
    assert trainer({**on_cpu, "qosClass": "Guaranteed"}).limits["cpu"] == "2"
    assert trainer(on_cpu).shared_memory == "2Gi"


@pytest.mark.parametrize(
    ("accelerator", "request_text"), [pytest.param("GPU", "32Gi", id="GPU"), pytest.param("CPU", "8Gi", id="CPU")]
)
def test_a_model_that_is_not_seen_gets_what_libraries_take(accelerator: str, request_text: str) -> None:
    pod = trainer({"accelerator": accelerator}, shape=None)
    assert (pod.requests["memory"], pod.limits) == (request_text, {})


def test_a_limit_is_not_guessed_for_a_model_that_is_not_seen() -> None:
    (problem,) = plan({"qosClass": "Guaranteed"}, shape=None).problems
    assert (problem.rule, problem.path) == (Rule.CONFLICT, "spec.resources.qosClass")
    assert problem.message.endswith("set resources.memory")
    assert plan({"qosClass": "Guaranteed", "memory": "500Gi"}, shape=None).is_accepted


def test_a_separate_engine_has_a_server_and_a_worker_for_each_gpu() -> None:
    assert engine({}) == PodResources({"cpu": "16", "memory": "20Gi"}, {}, "8Gi")
    assert plan({}).engine_pod is None


def test_an_engine_on_cpus_holds_its_weights_and_its_cache() -> None:
    rollout = {"rollout": {"placement": "Separate"}}
    job = {"method": "GRPO", "grpo": rollout, "model": {"dtype": "float32"}}
    small = plan({"accelerator": "CPU"}, SMALL_MIXTURE, **job).engine_pod
    large = plan({"accelerator": "CPU"}, moe_model(layers=4, experts=4), **job).engine_pod
    assert small is not None
    assert large is not None
    assert quantity_bytes(small.requests["memory"]) > 2.5 * GIB
    # Two layers more of 4 experts: 2 x (4 x 3 x 2,048 x 768 + attention and norms) parameters of 4 bytes.
    assert (
        quantity_bytes(large.requests["memory"]) - quantity_bytes(small.requests["memory"]) > 2 * 4 * 4 * 3 * 2048 * 768
    )


def test_engines_beside_the_trainer_count_in_its_pod() -> None:
    alone, beside = plan({}).memory, plan({}, method="GRPO", training={"globalBatchSize": None}).memory
    assert alone is not None
    assert beside is not None
    # Eight engines of one GPU: a server and a worker each.
    assert beside.host_bytes_per_pod >= 8 * 2 * 4 * GIB
    assert alone.host_bytes_per_pod < beside.host_bytes_per_pod
