"""Cores, memory and /dev/shm of the pods of a job, from its plan.

A request is the expected use of a pod: the scheduler finds a node by it, and the kubelet evicts pods beyond it first.
At a limit the kernel kills. The plan's host memory is an estimate, so it becomes a request alone, and a limit only of a
job that asks for the class Guaranteed. The author of a job answers for a number in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.arithmetic import ceil_div
from moejob_api.job import Spec
from moejob_api.job.resources import Accelerator, QosClass
from moejob_api.planner.memory import MemoryEstimate
from moejob_api.planner.memory.constants import CPU_RANK_BYTES, HOST_PROCESS_BYTES
from moejob_api.planner.memory.host_memory import engine_host_bytes, shared_memory_bytes

# One launches kernels, one runs the backward pass, the others load data, write checkpoints and drive the network.
# Nodes have 12 cores and more for each GPU.
MILLICORES_OF_GPU = 4000
# Ranks on CPUs compute with the cores that are free. A laptop has two, and a request of theirs would leave the pod
# without a node; under Guaranteed the request is a limit too, so it is a core.
MILLICORES_OF_CPU = 100
MILLICORES_OF_GUARANTEED_CPU = 1000
_MIB = 2**20

Quantity = int | str


@dataclass(frozen=True, slots=True)
class PodResources:
    """Quantities of one pod. `limits` are of the same names as `requests`."""

    requests: dict[str, Quantity]
    limits: dict[str, Quantity]
    shared_memory: Quantity


def trainer_resources(spec: Spec, ranks: int, memory: MemoryEstimate | None) -> PodResources:
    """Return the resources of a trainer pod; `memory` is None where the model cannot be seen."""
    on_gpu = spec.resources.accelerator is Accelerator.GPU
    # The libraries alone: no job takes less.
    least_bytes = ranks * (HOST_PROCESS_BYTES if on_gpu else CPU_RANK_BYTES)
    return _pod_resources(spec, ranks, least_bytes if memory is None else memory.host_bytes_per_pod)


def engine_resources(spec: Spec, tensor: int, memory: MemoryEstimate | None) -> PodResources:
    """Return the resources of the pod of a separate engine."""
    engine = None if memory is None else memory.engine
    return _pod_resources(spec, tensor, engine_host_bytes(spec, tensor, engine))


def _pod_resources(spec: Spec, ranks: int, host_bytes: int) -> PodResources:
    resources, is_guaranteed = spec.resources, spec.resources.qos_class is QosClass.GUARANTEED
    shared_bytes = shared_memory_bytes(resources, ranks)
    # Pages of /dev/shm count against a limit; without one, few of them are ever used.
    planned_bytes = host_bytes + (shared_bytes if is_guaranteed else 0)
    cpu = _cpu_quantity(spec, ranks) if resources.cpu is None else resources.cpu
    memory = _mebibyte_quantity(planned_bytes) if resources.memory is None else resources.memory
    has_memory_limit = is_guaranteed or resources.memory is not None
    return PodResources(
        requests={"cpu": cpu, "memory": memory},
        limits=({"cpu": cpu} if is_guaranteed else {}) | ({"memory": memory} if has_memory_limit else {}),
        shared_memory=_mebibyte_quantity(shared_bytes) if resources.shared_memory is None else resources.shared_memory,
    )


def _cpu_quantity(spec: Spec, ranks: int) -> Quantity:
    if spec.resources.accelerator is Accelerator.GPU:
        return _core_quantity(ranks * MILLICORES_OF_GPU)
    is_guaranteed = spec.resources.qos_class is QosClass.GUARANTEED
    return _core_quantity(ranks * (MILLICORES_OF_GUARANTEED_CPU if is_guaranteed else MILLICORES_OF_CPU))


def _core_quantity(millicores: int) -> Quantity:
    return f"{millicores}m" if millicores % 1000 else str(millicores // 1000)


def _mebibyte_quantity(size_bytes: int) -> str:
    count = ceil_div(size_bytes, _MIB)
    return f"{count}Mi" if count % 1024 else f"{count // 1024}Gi"
