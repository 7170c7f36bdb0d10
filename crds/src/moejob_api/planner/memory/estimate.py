"""The memory estimate of a job: the fullest stage in its fullest phase, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moejob_api.arithmetic import ceil_div
from moejob_api.job import Spec
from moejob_api.job.grpo import RolloutPlacement
from moejob_api.job.resources import Accelerator
from moejob_api.layout.sizes import Layout
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.activations import layer_bytes
from moejob_api.planner.memory.case import PlanningCase, model_parameters, prepare_case
from moejob_api.planner.memory.constants import HOST_PROCESS_BYTES
from moejob_api.planner.memory.engine import EngineMemory, estimate_engine
from moejob_api.planner.memory.explained import explain_memory
from moejob_api.planner.memory.host_memory import (
    colocated_host_bytes,
    conversion_host_bytes,
    ranks_of_trainer_pod,
    shared_memory_bytes,
)
from moejob_api.planner.memory.phases import Amounts, MemoryPhase, MemoryUse, StageLoad, estimate_stage, phase_amounts
from moejob_api.planner.memory.routing_replay import replay_bytes
from moejob_api.planner.memory.states import divided_parameters, optimizer_bytes
from moejob_api.planner.memory.storage import checkpoint_bytes
from moejob_api.quantities import quantity_bytes


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory on one GPU, and the formula behind it."""

    name: MemoryUse
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The fullest stage of one phase."""

    phase: MemoryPhase
    stage: int
    parts: tuple[MemoryPart, ...]

    @property
    def bytes(self) -> int:
        """All parts."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of the fullest GPU. `phases` holds the peak of every phase, `peak` is the highest of them.

    host_bytes_per_pod: host memory of the ranks of one pod and of engines that share it; on CPU all of their memory.
    replay_bytes_per_pod: the part of it that holds routing to replay.
    """

    peak: PhasePeak
    phases: tuple[PhasePeak, ...]
    host_bytes_per_pod: int
    replay_bytes_per_pod: int
    engine: EngineMemory | None

    @property
    def bytes(self) -> int:
        """The highest peak."""
        return self.peak.bytes

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        """Return the parts of the highest peak."""
        return self.peak.parts

    @property
    def stage(self) -> int:
        """The fullest pipeline stage."""
        return self.peak.stage

    def is_within(self, limit_bytes: int) -> bool:
        """Return whether every phase stays within a GPU's memory and the engine, if any, has room for a sequence."""
        return self.bytes <= limit_bytes and (self.engine is None or self.engine.can_run)


def estimate_memory(spec: Spec, shape: ModelShape, layout: Layout) -> MemoryEstimate:
    """The memory that a job takes on each GPU and in each pod; its layout must keep moejob_api.rules."""
    case = prepare_case(spec, shape, layout)
    layers = layer_bytes(case)
    loads = tuple(estimate_stage(case, stage, layers) for stage in case.stages)
    peaks = tuple(_explain_peak(*fullest) for fullest in _fullest_stages(loads))
    replay = replay_bytes(case)
    return MemoryEstimate(
        peak=max(peaks, key=lambda peak: peak.bytes),
        phases=peaks,
        host_bytes_per_pod=_host_bytes(case, loads, max(peak.bytes for peak in peaks)) + replay,
        replay_bytes_per_pod=replay,
        engine=loads[0].engine,
    )


@dataclass(frozen=True, slots=True)
class MemoryFootprint:
    """The sums of an estimate, without its words: for layouts that are tried by the dozen."""

    bytes: int
    host_bytes_per_pod: int


def estimate_footprint(case: PlanningCase, limit_bytes: int | None) -> MemoryFootprint | None:
    """Return the sums that `estimate_memory` explains; None where they are beyond the limit of a GPU."""
    loads = _loads_within(case, limit_bytes)
    if loads is None:
        return None
    peak = max(map(_peak_of_load, loads))
    return MemoryFootprint(peak, _host_bytes(case, loads, peak) + replay_bytes(case))


def host_bytes_of_pod(spec: Spec, need: MemoryEstimate | MemoryFootprint) -> int:
    """Host memory of a pod with its /dev/shm, which is memory-backed and counts against the pod's limit."""
    return need.host_bytes_per_pod + shared_memory_bytes(spec.resources, ranks_of_trainer_pod(spec))


def is_within_host_memory(spec: Spec, need: MemoryEstimate | MemoryFootprint) -> bool:
    """Return whether pods stay within `resources.memory`, where the job gives it."""
    return spec.resources.memory is None or host_bytes_of_pod(spec, need) <= quantity_bytes(spec.resources.memory)


def can_fit(case: PlanningCase, limit_bytes: int) -> bool:
    """Return whether GPUs and pods have the memory of every stage and phase, and the engine has room for a sequence."""
    # A search asks this of thousands of layouts: the first stage beyond the limit ends it.
    need = estimate_footprint(case, limit_bytes)
    return need is not None and is_within_host_memory(case.spec, need)


def can_hold_states(case: PlanningCase, spec: Spec, limit_bytes: int) -> bool:
    """Return False where no cut of the layers leaves room: for weights, gradients and optimizer, and colocated engines.

    Stages hold them evenly at best. The spec has the whole length of sequences, which `case` may not have.
    """
    total, stages = model_parameters(case), case.layout.pipeline
    if case.has_weight_shards:
        return not case.has_weights_until_update or total.held.total * case.element_bytes <= limit_bytes
    weights, gradients = total.held.total * case.element_bytes, total.trained.total * case.gradient_bytes
    on_gpu = 1 - case.spec.memory.offload_optimizer
    optimizer = divided_parameters(case, total.trained) * optimizer_bytes(case) * on_gpu
    if weights + gradients + optimizer > limit_bytes * stages:
        return False
    if spec.grpo is None or spec.grpo.rollout.placement is RolloutPlacement.SEPARATE:
        return True
    engine = estimate_engine(spec, case.shape, case.layout)
    memory = spec.memory
    kept = optimizer + (not memory.offload_parameters) * weights + (not memory.offload_gradients) * gradients
    return engine is None or (engine.can_run and kept <= (limit_bytes - engine.bytes) * stages)


def _loads_within(case: PlanningCase, limit_bytes: int | None) -> tuple[StageLoad, ...] | None:
    """Return the load of every stage; None at the first that is beyond the limit."""
    layers, loads = layer_bytes(case), list[StageLoad]()
    for stage in case.stages:
        stage_bytes = estimate_stage(case, stage, layers)
        if limit_bytes is not None and (
            (stage_bytes.engine is not None and not stage_bytes.engine.can_run)
            or _peak_of_load(stage_bytes) > limit_bytes
        ):
            return None
        loads.append(stage_bytes)
    return tuple(loads)


def _peak_of_load(load: StageLoad) -> int:
    return max(sum(amounts.values()) for _, amounts in phase_amounts(load))


def peak_bytes(case: PlanningCase) -> int:
    """The highest peak alone, without its words, for searches."""
    layers = layer_bytes(case)
    return max(_peak_of_load(estimate_stage(case, stage, layers)) for stage in case.stages)


def _fullest_stages(loads: tuple[StageLoad, ...]) -> Iterator[tuple[MemoryPhase, StageLoad, Amounts]]:
    """The fullest stage of each phase."""
    of_stages = [(load, dict(phase_amounts(load))) for load in loads]
    for phase in of_stages[0][1]:
        yield max(
            ((phase, load, amounts[phase]) for load, amounts in of_stages), key=lambda entry: sum(entry[2].values())
        )


def _explain_peak(phase: MemoryPhase, load: StageLoad, amounts: Amounts) -> PhasePeak:
    parts = tuple(MemoryPart(name, amount, explain_memory(load, name)) for name, amount in amounts.items() if amount)
    return PhasePeak(phase, load.stage.index, parts)


def _host_bytes(case: PlanningCase, loads: tuple[StageLoad, ...], peak: int) -> int:
    """Host memory of the ranks of a pod and of processes beside them, without the routing that is replayed."""
    processes = colocated_host_bytes(case, loads[0].engine) + conversion_host_bytes(case)
    return case.layout.gpus_per_pod * _host_bytes_of_rank(case, loads, peak) + processes


def _host_bytes_of_rank(case: PlanningCase, loads: tuple[StageLoad, ...], peak: int) -> int:
    """Return a rank's own host memory, what is offloaded, and the copy of a checkpoint that is being written."""
    is_copied = case.spec.checkpoint.asynchronous
    copied_bytes = ceil_div(checkpoint_bytes(case.shape, case.spec), case.layout.gpus) if is_copied else 0
    # The tensors of a rank on CPUs are in host memory already: the estimate of its "GPU" is all but the copy.
    if case.spec.resources.accelerator is Accelerator.CPU:
        return peak + copied_bytes
    fullest = max(load.states.host + load.activations.offloaded + _parked_bytes(load) for load in loads)
    return HOST_PROCESS_BYTES + fullest + copied_bytes


def _parked_bytes(load: StageLoad) -> int:
    """Weights that wait in host memory: the reference's, and the trainer's own during generation."""
    trainer_bytes = load.states.weights if load.case.spec.memory.offload_parameters else 0
    return trainer_bytes + (load.states.weights if load.has_reference else 0)
