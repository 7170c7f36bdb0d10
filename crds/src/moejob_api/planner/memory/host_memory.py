"""Host memory of engines, and the size of /dev/shm, which the memory limit of a pod counts too."""

from __future__ import annotations

from moejob_api.contract.engines import colocated_per_pod
from moejob_api.job import Spec
from moejob_api.job.resources import Accelerator, Resources
from moejob_api.layout.sizes import count_gpus
from moejob_api.models.shape import Experts
from moejob_api.planner.memory.case import PlanningCase
from moejob_api.planner.memory.constants import (
    CONVERSION_PROCESS_BYTES,
    CPU_ENGINE_CACHE_BYTES,
    CPU_ENGINE_PROCESS_BYTES,
    HOST_PROCESS_BYTES,
    SHARED_BYTES_OF_CPU,
    SHARED_BYTES_OF_GPU,
)
from moejob_api.planner.memory.engine import EngineMemory
from moejob_api.quantities import quantity_bytes


def shared_memory_bytes(resources: Resources, ranks: int) -> int:
    """Return the size of /dev/shm in a pod of this many ranks."""
    if resources.shared_memory is not None:
        return quantity_bytes(resources.shared_memory)
    on_gpu = resources.accelerator is Accelerator.GPU
    return ranks * (SHARED_BYTES_OF_GPU if on_gpu else SHARED_BYTES_OF_CPU)


def ranks_of_trainer_pod(spec: Spec) -> int:
    """Return the ranks of a trainer pod: those of a node, or all of a job that is smaller than a node."""
    return min(count_gpus(spec.parallelism), spec.resources.gpus_per_node)


def engine_host_bytes(spec: Spec, tensor: int, engine: EngineMemory | None) -> int:
    """Return the host memory of one engine; `engine` is None where the model's weights are not known.

    On a GPU these are a server and a worker for each GPU; weights pass through the page cache, which gives way.
    """
    if spec.resources.accelerator is Accelerator.GPU:
        return (tensor + 1) * HOST_PROCESS_BYTES
    # On a CPU the parts of an engine share this memory: together they hold all weights.
    weights = 0 if engine is None else engine.weights * tensor
    return CPU_ENGINE_PROCESS_BYTES + CPU_ENGINE_CACHE_BYTES + weights


def conversion_host_bytes(case: PlanningCase) -> int:
    """Return the host memory of the process that reads or writes a checkpoint of Megatron: its imports, one tensor.

    A tensor is there as it was read, as it is joined or split, and as it is written.
    """
    spec, shape = case.spec, case.shape
    if spec.model.config is None and not spec.checkpoint.export_megatron:
        return 0
    experts = max(
        (mlp.count * 2 * mlp.intermediate for mlp in shape.mlp_kinds() if isinstance(mlp, Experts)), default=0
    )
    largest = shape.hidden * max(shape.vocabulary, experts)
    return CONVERSION_PROCESS_BYTES + 3 * largest * spec.model.dtype.size_bytes


def colocated_host_bytes(case: PlanningCase, engine: EngineMemory | None) -> int:
    """Return the host memory of the engines that share a trainer pod."""
    count = colocated_per_pod(case.spec, case.layout.gpus_per_pod)
    return 0 if engine is None else count * engine_host_bytes(case.spec, engine.gpus, engine)
