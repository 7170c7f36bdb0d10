"""The phases of a step and what is in GPU memory in each, part by part. The parts of a phase add up to its peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from moejob_api.derived import has_reference
from moejob_api.job.grpo import Placement
from moejob_api.job.resources import Accelerator
from moejob_api.planner.memory.activations import Activations, LayerBytes, activations, loss_bytes
from moejob_api.planner.memory.case import Case, Portion, stage_parameters
from moejob_api.planner.memory.communication import communication_bytes, has_writers, peer_memory_bytes
from moejob_api.planner.memory.constants import (
    CONTEXT_BYTES,
    CPU_RANK_BYTES,
    ENGINE_ASLEEP_BYTES,
    FRAGMENTATION,
    SYNC_BUCKET_BYTES,
)
from moejob_api.planner.memory.engine import EngineMemory, engine
from moejob_api.planner.memory.kept_activations import layer_input
from moejob_api.planner.memory.kinds import StageContents
from moejob_api.planner.memory.states import States, states
from moejob_api.planner.memory.temporaries import largest_matrix


class MemoryPhase(StrEnum):
    """The phase of a GPU's work. Only the first two exist for SFT."""

    TRAIN = "forward and backward"
    STEP = "optimizer step"
    SCORE = "scoring"
    SYNC = "weight sync"
    GENERATE = "generation"


class Name(StrEnum):
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


Amounts = dict[Name, int]


@dataclass(frozen=True, slots=True)
class StageBytes:
    """The bytes of one stage from which its phases are put together."""

    case: Case
    stage: StageContents
    parameters: Portion
    layers: LayerBytes
    states: States
    activations: Activations
    engine: EngineMemory | None

    @property
    def colocated(self) -> EngineMemory | None:
        """The engine, when it shares this GPU."""
        grpo = self.case.spec.grpo
        if grpo is None or grpo.rollout.placement is Placement.SEPARATE:
            return None
        return self.engine

    @property
    def has_reference(self) -> bool:
        """Return whether a reference model is kept. Under LoRA the frozen weights are it."""
        return has_reference(self.case.spec) and self.case.spec.training.lora is None


def load(case: Case, stage: StageContents, layers: LayerBytes) -> StageBytes:
    """Return the bytes of one stage; `layers` are the same for every stage."""
    parameters = stage_parameters(case, stage)
    return StageBytes(
        case=case,
        stage=stage,
        parameters=parameters,
        layers=layers,
        states=states(case, stage, parameters),
        activations=activations(case, stage, layers),
        engine=engine(case.spec, case.shape, case.layout),
    )


def phases(of: StageBytes) -> Iterator[tuple[MemoryPhase, Amounts]]:
    """Each phase of a step with its parts."""
    yield MemoryPhase.TRAIN, _train(of)
    yield MemoryPhase.STEP, _step(of)
    if of.case.spec.grpo is None:
        return
    yield MemoryPhase.SCORE, _score(of)
    if of.colocated is not None:
        yield MemoryPhase.SYNC, _sync(of, of.colocated)
        yield MemoryPhase.GENERATE, _generate(of, of.colocated)


def _resident(of: StageBytes) -> Amounts:
    return {
        Name.WEIGHTS: of.states.weights,
        Name.GRADIENTS: of.states.gradients,
        Name.OPTIMIZER: of.states.optimizer,
    }


def _around(of: StageBytes, moving: int) -> Amounts:
    """Return the bytes of libraries, with the allocator's waste on the bytes that come and go."""
    if of.case.spec.resources.accelerator is Accelerator.CPU:
        return {Name.CONTEXT: CPU_RANK_BYTES, Name.PEER_MEMORY: _peer_memory(of.case)}
    return {
        Name.CONTEXT: CONTEXT_BYTES,
        Name.COMMUNICATORS: communication_bytes(of.case.layout, of.case.spec.moe.dispatcher),
        Name.PEER_MEMORY: _peer_memory(of.case),
        Name.FRAGMENTATION: int(moving * FRAGMENTATION),
    }


def _peer_memory(case: Case) -> int:
    dispatcher = case.spec.moe.dispatcher
    return peer_memory_bytes(case.share, dispatcher) if has_writers(case.layout, dispatcher) else 0


def _asleep(of: StageBytes) -> Amounts:
    on_gpu = of.case.spec.resources.accelerator is Accelerator.GPU
    return {Name.ENGINE_ASLEEP: ENGINE_ASLEEP_BYTES} if of.colocated is not None and on_gpu else {}


def _train(of: StageBytes) -> Amounts:
    held, moving = of.activations.kept, of.activations.peak
    is_loss = of.activations.loss > of.activations.working
    return {
        **_resident(of),
        Name.GATHERED: of.states.gathered,
        Name.ROUNDED: of.states.rounded,
        Name.STREAM: held.stream,
        Name.ATTENTION: held.attention,
        Name.FEED_FORWARD: held.feed_forward,
        Name.ROUTED: held.routed,
        Name.ROUTING: held.routing,
        # The loss and the backward pass of a layer come one after the other.
        Name.LOSS if is_loss else Name.WORKING: max(of.activations.loss, of.activations.working),
        Name.PIPELINE: _pipeline(of.case),
        **_asleep(of),
        **_around(of, moving),
    }


def _step(of: StageBytes) -> Amounts:
    return {**_resident(of), Name.STEP: of.states.step, **_asleep(of), **_around(of, of.states.step)}


def _score(of: StageBytes) -> Amounts:
    """Forward passes only: one layer's tensors and a chunk of logits."""
    case = of.case
    layer = max(whole.total for whole in of.layers.whole)
    loss = loss_bytes(case) if of.stage.output else 0
    return {
        **_resident(of),
        Name.GATHERED: of.states.gathered,
        Name.REFERENCE: of.states.weights if of.has_reference else 0,
        Name.LOSS if loss > layer else Name.WORKING: max(layer, loss),
        Name.PIPELINE: _pipeline(case),
        **_asleep(of),
        **_around(of, max(layer, loss)),
    }


def _sync(of: StageBytes, engine_here: EngineMemory) -> Amounts:
    """Both copies of the weights, and the tensors that are being gathered for the engine."""
    gathered = _largest_tensor(of.case) * of.case.element_bytes + SYNC_BUCKET_BYTES
    return {
        **_between_phases(of),
        Name.WEIGHTS: of.states.weights,
        Name.BUCKET: gathered,
        Name.ENGINE_WEIGHTS: engine_here.weights,
        Name.ENGINE_WORKSPACE: engine_here.workspace,
        **_around(of, gathered),
    }


def _generate(of: StageBytes, engine_here: EngineMemory) -> Amounts:
    return {
        **_between_phases(of),
        Name.ENGINE_WEIGHTS: engine_here.weights,
        Name.ENGINE_WORKSPACE: engine_here.workspace,
        Name.ENGINE_CACHE: engine_here.bytes - engine_here.weights - engine_here.workspace,
        **_around(of, 0),
    }


def _between_phases(of: StageBytes) -> Amounts:
    """Return the bytes that the trainer leaves on the GPU while answers are generated."""
    memory = of.case.spec.memory
    return {
        Name.WEIGHTS: 0 if memory.offload_parameters else of.states.weights,
        Name.GRADIENTS: 0 if memory.offload_gradients else of.states.gradients,
        Name.OPTIMIZER: of.states.optimizer,
    }


def _largest_tensor(case: Case) -> int:
    """Elements of the largest tensor an engine receives at once, gathered over the ranks that divide it."""
    largest = max(
        largest_matrix(layer, case.share) * case.layout.expert_tensor * case.layout.expert
        for layer in case.kinds.layers
    )
    return max(largest, case.vocabulary * case.layout.tensor)


def _pipeline(case: Case) -> int:
    """Hidden states and gradients received from and sent to the neighbouring stages."""
    return 4 * layer_input(case.share) if case.layout.pipeline > 1 else 0
