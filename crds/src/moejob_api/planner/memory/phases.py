"""The phases of a step and the contents of GPU memory in each, by parts. The parts of a phase add up to its peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from moejob_api.derived import has_reference
from moejob_api.job.grpo import RolloutPlacement
from moejob_api.job.resources import Accelerator
from moejob_api.planner.memory.activations import Activations, LayerBytes, loss_bytes, stage_activations
from moejob_api.planner.memory.case import HeldParameters, PlanningCase, stage_parameters
from moejob_api.planner.memory.communication import communication_bytes, has_writers, peer_memory_bytes
from moejob_api.planner.memory.constants import (
    CONTEXT_BYTES,
    CPU_RANK_BYTES,
    ENGINE_ASLEEP_BYTES,
    FRAGMENTATION,
    SYNC_BUCKET_BYTES,
)
from moejob_api.planner.memory.engine import EngineMemory, estimate_engine
from moejob_api.planner.memory.kept_activations import layer_input_bytes
from moejob_api.planner.memory.kinds import StageContents
from moejob_api.planner.memory.states import StageStates, stage_states
from moejob_api.planner.memory.temporaries import largest_matrix


class MemoryPhase(StrEnum):
    """The phase of a GPU's work. Only the first two exist for SFT."""

    TRAIN = "forward and backward"
    STEP = "optimizer step"
    SCORE = "scoring"
    SYNC = "weight sync"
    GENERATE = "generation"


class MemoryUse(StrEnum):
    """The uses of memory."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    GATHERED = "gathered layers"
    ROUNDED = "weights in FP8"
    REFERENCE = "reference weights"
    STREAM = "activations between layers"
    ATTENTION = "activations of attention"
    FEED_FORWARD = "activations of feed-forward layers"
    ROUTED = "activations of experts"
    ROUTING = "activations of routing"
    WORKING = "working memory of a layer"
    LOSS = "logits and loss"
    STEP = "temporaries of the update"
    PIPELINE = "pipeline buffers"
    ENGINE_WEIGHTS = "engine weights"
    ENGINE_WORKSPACE = "engine workspace"
    ENGINE_CACHE = "engine KV cache"
    ENGINE_ASLEEP = "sleeping engine"
    BUCKET = "weights on their way"
    CONTEXT = "context and libraries"
    COMMUNICATORS = "communicators"
    PEER_MEMORY = "rows written by peers"
    FRAGMENTATION = "allocator"


Amounts = dict[MemoryUse, int]


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The bytes of one stage from which its phases are put together."""

    case: PlanningCase
    stage: StageContents
    parameters: HeldParameters
    layers: LayerBytes
    states: StageStates
    activations: Activations
    engine: EngineMemory | None

    @property
    def colocated_engine(self) -> EngineMemory | None:
        """The engine, when it shares this GPU."""
        grpo = self.case.spec.grpo
        if grpo is None or grpo.rollout.placement is RolloutPlacement.SEPARATE:
            return None
        return self.engine

    @property
    def has_reference(self) -> bool:
        """Return whether a reference model is kept. Under LoRA the frozen weights are it."""
        return has_reference(self.case.spec) and self.case.spec.training.lora is None


def estimate_stage(case: PlanningCase, stage: StageContents, layers: LayerBytes) -> StageLoad:
    """Return the bytes of one stage; `layers` are the same for every stage."""
    parameters = stage_parameters(case, stage)
    return StageLoad(
        case=case,
        stage=stage,
        parameters=parameters,
        layers=layers,
        states=stage_states(case, stage, parameters),
        activations=stage_activations(case, stage, layers),
        engine=estimate_engine(case.spec, case.shape, case.layout),
    )


def phase_amounts(load: StageLoad) -> Iterator[tuple[MemoryPhase, Amounts]]:
    """Each phase of a step with its parts."""
    yield MemoryPhase.TRAIN, _train_amounts(load)
    yield MemoryPhase.STEP, _step_amounts(load)
    if load.case.spec.grpo is None:
        return
    yield MemoryPhase.SCORE, _score_amounts(load)
    if load.colocated_engine is not None:
        yield MemoryPhase.SYNC, _sync_amounts(load, load.colocated_engine)
        yield MemoryPhase.GENERATE, _generate_amounts(load, load.colocated_engine)


def _resident_amounts(load: StageLoad) -> Amounts:
    return {
        MemoryUse.WEIGHTS: load.states.weights,
        MemoryUse.GRADIENTS: load.states.gradients,
        MemoryUse.OPTIMIZER: load.states.optimizer,
        MemoryUse.REFERENCE: _waiting_reference(load),
    }


def _waiting_reference(load: StageLoad) -> int:
    """Return the reference weights between their passes: in host memory, which on CPUs is this memory."""
    on_cpu = load.case.spec.resources.accelerator is Accelerator.CPU
    return load.states.weights if on_cpu and load.has_reference else 0


def _library_amounts(load: StageLoad, moving: int) -> Amounts:
    """Return the bytes of libraries, with the allocator's waste on the bytes that come and go."""
    if load.case.spec.resources.accelerator is Accelerator.CPU:
        return {MemoryUse.CONTEXT: CPU_RANK_BYTES, MemoryUse.PEER_MEMORY: _peer_memory(load.case)}
    return {
        MemoryUse.CONTEXT: CONTEXT_BYTES,
        MemoryUse.COMMUNICATORS: communication_bytes(load.case.layout, load.case.spec.moe.dispatcher),
        MemoryUse.PEER_MEMORY: _peer_memory(load.case),
        MemoryUse.FRAGMENTATION: int(moving * FRAGMENTATION),
    }


def _peer_memory(case: PlanningCase) -> int:
    dispatcher = case.spec.moe.dispatcher
    return peer_memory_bytes(case.share, dispatcher) if has_writers(case.layout, dispatcher) else 0


def _sleeping_engine(load: StageLoad) -> Amounts:
    on_gpu = load.case.spec.resources.accelerator is Accelerator.GPU
    return {MemoryUse.ENGINE_ASLEEP: ENGINE_ASLEEP_BYTES} if load.colocated_engine is not None and on_gpu else {}


def _train_amounts(load: StageLoad) -> Amounts:
    held, moving = load.activations.kept, load.activations.peak_bytes
    is_loss = load.activations.loss > load.activations.working
    return {
        **_resident_amounts(load),
        MemoryUse.GATHERED: load.states.gathered,
        MemoryUse.ROUNDED: load.states.rounded,
        MemoryUse.STREAM: held.stream,
        MemoryUse.ATTENTION: held.attention,
        MemoryUse.FEED_FORWARD: held.feed_forward,
        MemoryUse.ROUTED: held.routed,
        MemoryUse.ROUTING: held.routing,
        # The loss and the backward pass of a layer come one after the other.
        MemoryUse.LOSS if is_loss else MemoryUse.WORKING: max(load.activations.loss, load.activations.working),
        MemoryUse.PIPELINE: _pipeline_bytes(load.case),
        **_sleeping_engine(load),
        **_library_amounts(load, moving),
    }


def _step_amounts(load: StageLoad) -> Amounts:
    return {
        **_resident_amounts(load),
        MemoryUse.STEP: load.states.step,
        **_sleeping_engine(load),
        **_library_amounts(load, load.states.step),
    }


def _score_amounts(load: StageLoad) -> Amounts:
    """Forward passes only: one layer's tensors and a chunk of logits."""
    case = load.case
    layer = max(layer_kept.total for layer_kept in load.layers.without_recompute)
    loss = loss_bytes(case) if load.stage.output else 0
    return {
        **_resident_amounts(load),
        MemoryUse.GATHERED: load.states.gathered,
        # While the reference is in the model, the trained weights wait beside it.
        MemoryUse.REFERENCE: _waiting_reference(load) + (load.states.weights if load.has_reference else 0),
        MemoryUse.LOSS if loss > layer else MemoryUse.WORKING: max(layer, loss),
        MemoryUse.PIPELINE: _pipeline_bytes(case),
        **_sleeping_engine(load),
        **_library_amounts(load, max(layer, loss)),
    }


def _sync_amounts(load: StageLoad, engine_here: EngineMemory) -> Amounts:
    """Both copies of the weights, and the tensors that are being gathered for the engine."""
    gathered = _largest_tensor(load.case) * load.case.element_bytes + SYNC_BUCKET_BYTES
    return {
        **_idle_trainer_amounts(load),
        MemoryUse.WEIGHTS: load.states.weights,
        MemoryUse.BUCKET: gathered,
        MemoryUse.ENGINE_WEIGHTS: engine_here.weights,
        MemoryUse.ENGINE_WORKSPACE: engine_here.workspace,
        **_library_amounts(load, gathered),
    }


def _generate_amounts(load: StageLoad, engine_here: EngineMemory) -> Amounts:
    return {
        **_idle_trainer_amounts(load),
        MemoryUse.ENGINE_WEIGHTS: engine_here.weights,
        MemoryUse.ENGINE_WORKSPACE: engine_here.workspace,
        MemoryUse.ENGINE_CACHE: engine_here.bytes - engine_here.weights - engine_here.workspace,
        **_library_amounts(load, 0),
    }


def _idle_trainer_amounts(load: StageLoad) -> Amounts:
    """Return the bytes that the trainer leaves on the GPU while answers are generated."""
    memory = load.case.spec.memory
    return {
        MemoryUse.WEIGHTS: 0 if memory.offload_parameters else load.states.weights,
        MemoryUse.GRADIENTS: 0 if memory.offload_gradients else load.states.gradients,
        MemoryUse.OPTIMIZER: load.states.optimizer,
        MemoryUse.REFERENCE: _waiting_reference(load),
    }


def _largest_tensor(case: PlanningCase) -> int:
    """Elements of the largest tensor an engine receives at once, gathered over the ranks that divide it."""
    largest = max(
        largest_matrix(layer, case.share) * case.layout.expert_tensor * case.layout.expert
        for layer in case.kinds.layers
    )
    return max(largest, case.vocabulary * case.layout.tensor)


def _pipeline_bytes(case: PlanningCase) -> int:
    """Hidden states and gradients received from and sent to the neighbouring stages."""
    return 4 * layer_input_bytes(case.share) if case.layout.pipeline > 1 else 0
