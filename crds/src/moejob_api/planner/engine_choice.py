"""The engines of GRPO for a search that may choose them: where they run, how many, and how many GPUs each spans. Pure.

Answers are always of the current weights, so trainer and engines take turns: engines on the trainer's GPUs leave
none idle, and those with GPUs of their own leave more memory to both. The search weighs them by the time of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moejob_api.arithmetic import divisors
from moejob_api.contract.engines import colocated_per_pod
from moejob_api.job import Spec
from moejob_api.job.grpo import Grpo, RolloutPlacement, RolloutSettings
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.engine import EngineMemory, estimate_engine_among
from moejob_api.rules.rollout_rules import can_divide_model

# Eighths of the GPUs that separate engines may get.
SEPARATE_EIGHTHS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class GpuDivision:
    """A job with its engines settled, and the GPUs that this leaves to its trainer."""

    spec: Spec
    trainer_gpus: int


def gpu_divisions(spec: Spec, shape: ModelShape, gpus: int) -> Iterator[GpuDivision]:
    """Yield the ways to divide all GPUs between trainer and engines, engines on the trainer's GPUs first.

    What the job says of its engines stays, but for engines that are too small to hold the model.
    """
    if spec.grpo is None:
        yield GpuDivision(spec, gpus)
        return
    rollout = spec.grpo.rollout
    if rollout.placement is RolloutPlacement.COLOCATED:
        yield from (GpuDivision(sized, gpus) for sized in with_runnable_engines(spec, shape, gpus))
    if rollout.placement is RolloutPlacement.SEPARATE or "placement" not in rollout.model_fields_set:
        separate = _with_rollout(spec, spec.grpo, placement=RolloutPlacement.SEPARATE)
        for sized in with_runnable_engines(separate, shape, gpus):
            yield from _separate_divisions(sized, gpus)


def with_runnable_engines(spec: Spec, shape: ModelShape, gpus: int) -> tuple[Spec, ...]:
    """The job with engines of each size that holds the model, the smallest first.

    Larger engines leave more memory to the trainer and answer faster, but there are fewer. Where no engine holds the
    model, the job stays as it is, and its engines are its problem.
    """
    if spec.grpo is None:
        return (spec,)
    current_engine = _engine_memory(spec, spec.grpo, shape, gpus)
    if current_engine.can_run and "tensor" in spec.grpo.rollout.model_fields_set:
        return (spec,)
    running = [
        changed
        for changed, larger_engine in ((spec, current_engine), *_larger_engines(spec, spec.grpo, shape, gpus))
        if larger_engine.can_run
    ]
    return tuple(running) or (spec,)


def _larger_engines(spec: Spec, grpo: Grpo, shape: ModelShape, gpus: int) -> Iterator[tuple[Spec, EngineMemory]]:
    """The job with each larger engine that fills pods and divides the model, the smallest first."""
    for tensor in divisors(_gpus_in_pod(spec, gpus)):
        if tensor > grpo.rollout.tensor and can_divide_model(shape, tensor):
            changed = _with_rollout(spec, grpo, tensor=tensor)
            yield changed, _engine_memory(changed, changed.grpo or grpo, shape, gpus)


def _separate_divisions(spec: Spec, gpus: int) -> Iterator[GpuDivision]:
    """Yield the job with separate engines on some of the GPUs, on whole nodes where there are several."""
    if spec.grpo is None:
        return
    tensor = spec.grpo.rollout.tensor
    for replicas in _replica_counts(spec, spec.grpo.rollout, gpus):
        if replicas * tensor < gpus:
            yield GpuDivision(_with_rollout(spec, spec.grpo, replicas=replicas), gpus - replicas * tensor)


def _replica_counts(spec: Spec, rollout: RolloutSettings, gpus: int) -> list[int]:
    if rollout.replicas is not None:
        return [rollout.replicas]
    unit = spec.resources.gpus_per_node if gpus > spec.resources.gpus_per_node else 1
    counts = {gpus * eighths // 8 // unit * unit // rollout.tensor for eighths in SEPARATE_EIGHTHS}
    return sorted(counts - {0})


def _engine_memory(spec: Spec, grpo: Grpo, shape: ModelShape, gpus: int) -> EngineMemory:
    in_pod = _gpus_in_pod(spec, gpus)
    if grpo.rollout.placement is RolloutPlacement.COLOCATED:
        engines = max(1, gpus // in_pod * colocated_per_pod(spec, in_pod))
    else:
        engines = grpo.rollout.replicas or 1
    return estimate_engine_among(spec, grpo, shape, engines)


def _gpus_in_pod(spec: Spec, gpus: int) -> int:
    return min(gpus, spec.resources.gpus_per_node)


def _with_rollout(spec: Spec, grpo: Grpo, **changes: object) -> Spec:
    changed = grpo.model_copy(update={"rollout": grpo.rollout.model_copy(update=changes)})
    return spec.model_copy(update={"grpo": changed})
