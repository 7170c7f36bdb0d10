"""Seconds of one optimizer update: the slowest pipeline stage for every microbatch, then gradients and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from moejob_api.derived import (
    NO_MODULES,
    has_float8_products,
    has_replica_reads,
    has_shared_roundings,
    needs_choice_count,
)
from moejob_api.job.training import RecomputeGranularity, RecomputeMethod, RecomputeModule
from moejob_api.layout.expert_nodes import expert_nodes
from moejob_api.models.shape import DenseMLP, Layer
from moejob_api.planner.cost.layers import ForwardTime, LayerWork, estimate_forward, host_seconds, rounded_elements
from moejob_api.planner.cost.rates import (
    ACCUMULATION_SHARE,
    FLOAT8_SPEED,
    HOST_ADAM_BYTES,
    HOST_ADAM_BYTES_PER_SECOND,
    HOST_COPY_SHARE,
    OPTIMIZER_SHARE,
    READ_EXPOSED,
    GpuMachine,
    gather_seconds,
    gemm_seconds,
    replicas_seconds,
    rounding_seconds,
    send_seconds,
)
from moejob_api.planner.memory.activations import kept_by_chunk, layer_bytes
from moejob_api.planner.memory.case import (
    HeldParameters,
    LocalParameters,
    PlanningCase,
    layer_parameters,
    model_parameters,
    stage_parameters,
)
from moejob_api.planner.memory.constants import FSDP_UNITS, ROUNDINGS
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES
from moejob_api.planner.memory.kinds import StageContents
from moejob_api.planner.memory.states import divided_parameters, optimizer_bytes
from moejob_api.planner.memory.whole_layers import gathered_parameters


class TimeUse(StrEnum):
    """The parts of a step's time."""

    PROJECTIONS = "attention projections"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward layers"
    EXPERTS = "experts"
    ELEMENTWISE = "norms, gates and copies"
    OUTPUT = "logits and loss"
    ROUNDING = "rounding to FP8"
    RECOMPUTE = "recomputation"
    COUNTING = "counting of choices"
    OFFLOAD = "activations to the host and back"
    HOST = "the host, and ranks that wait"
    TENSOR = "tensor group"
    DISPATCH = "tokens to experts"
    CONTEXT = "keys and values"
    PIPELINE = "between stages"
    BUBBLE = "pipeline bubble"
    ACCUMULATION = "gradient accumulation"
    DATA = "gradients and weights of replicas"
    OPTIMIZER = "optimizer"
    SCORING = "scoring"
    GENERATION = "generation"
    SYNC = "weight sync"
    WAITING = "waiting for answers"


TimeByUse = dict[TimeUse, float]


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """One optimizer update, and its forward passes alone, which is what scoring costs."""

    seconds: TimeByUse
    forward_seconds: float


@dataclass(frozen=True, slots=True)
class _StagePasses:
    """One microbatch through one stage: both passes by what is done, and the forward pass alone."""

    both: TimeByUse
    forward: float

    @property
    def total_seconds(self) -> float:
        return sum(self.both.values())


def update_seconds(case: PlanningCase, machine: GpuMachine) -> UpdateTime:
    """The seconds of one update on this layout."""
    work = _layer_work(case, machine)
    parts = [stage_parameters(case, stage) for stage in case.stages]
    stages = [_stage_passes(case, stage, part, work) for stage, part in zip(case.stages, parts, strict=True)]
    slowest = max(stages, key=lambda passes: passes.total_seconds)
    count = case.batch.microbatches
    waiting = (case.layout.pipeline - 1) / case.layout.virtual_pipeline
    seconds = {spent: value * count for spent, value in slowest.both.items()}
    seconds[TimeUse.BUBBLE] = waiting * slowest.total_seconds
    seconds |= _seconds_after_microbatches(case, max(parts, key=lambda part: part.trained.total), machine)
    forward_seconds = (count + waiting) * slowest.forward
    # The choices of the whole global batch are counted before any of it is trained on.
    seconds[TimeUse.COUNTING] = forward_seconds if needs_choice_count(case.spec) and case.shape.experts else 0.0
    return UpdateTime(seconds, forward_seconds)


def least_update_seconds(case: PlanningCase, machine: GpuMachine, chunks: int) -> float:
    """Return the least seconds of any cut into stages of at most `chunks` chunks: all layers shared evenly."""
    stages = case.layout.pipeline
    work = _layer_work(case, machine)
    forward_time, host_total = ForwardTime(), 0.0
    for layer, layers_before in zip(case.kinds.layers, case.kinds.before, strict=True):
        forward_time = forward_time.add_passes(estimate_forward(layer, work), layers_before[-1])
        host_total += host_seconds(layer, work) * layers_before[-1]
    products = _product_passes(case)
    stage = products * (forward_time.projections + forward_time.feed_forward + forward_time.experts) + _output_passes(
        case
    ) * _output_seconds(case, work)
    stage += 3.0 * (forward_time.attention + forward_time.elementwise) + 2.0 * (
        forward_time.tensor + forward_time.dispatch + forward_time.context
    )
    all_parameters = model_parameters(case)
    part = HeldParameters(all_parameters.held // stages, all_parameters.trained // stages)
    microbatch_seconds = max(stage / stages + _accumulation_seconds(case, part, machine), host_total / stages)
    waiting = (stages - 1) / chunks
    return (case.batch.microbatches + waiting) * microbatch_seconds + sum(
        _seconds_after_microbatches(case, part, machine).values()
    )


def _layer_work(case: PlanningCase, machine: GpuMachine) -> LayerWork:
    settings = (
        replace(case.activation_settings, recomputed=NO_MODULES)
        if case.activation_settings.recomputed
        else case.activation_settings
    )
    dispatcher = case.spec.moe.dispatcher
    nodes = expert_nodes(case.layout, dispatcher)
    return LayerWork(case.share, settings, machine, case.spec.data.max_length, dispatcher, nodes, _product_speed(case))


def _product_speed(case: PlanningCase) -> float:
    """Products of layers, forward and for gradients of inputs, beside those in the model's type."""
    return FLOAT8_SPEED if has_float8_products(case.spec) else 1.0


def _product_passes(case: PlanningCase) -> float:
    """Passes through each matrix of a layer: forward, and for the gradients of its input and its weights."""
    # Gradients of weights are multiplied in the model's type.
    return 2.0 + (_output_passes(case) - 2.0) * _product_speed(case)


def _output_passes(case: PlanningCase) -> float:
    """The same of the output layer, and of all layers in the model's type."""
    # Frozen matrices have no gradient of their own; adapters beside them are small.
    return 3.0 if case.spec.training.lora is None else 2.0


# --- a microbatch on a stage ----------------------------------------------------------------------------------------


def _stage_passes(case: PlanningCase, stage: StageContents, part: HeldParameters, work: LayerWork) -> _StagePasses:
    """Both passes of one microbatch through one stage."""
    layers = [estimate_forward(layer, work) for layer in case.kinds.layers]
    counts = [
        sum(chunk_counts)
        for chunk_counts in zip(
            *(case.kinds.count_layers(chunk.start, chunk.stop) for chunk in stage.chunks), strict=True
        )
    ]
    forward_time = _sum_layers(layers, counts)
    output = _output_seconds(case, work) if stage.output else 0.0
    products = _product_passes(case)
    both = {
        TimeUse.PROJECTIONS: products * forward_time.projections,
        TimeUse.ATTENTION: 3.0 * forward_time.attention,
        TimeUse.FEED_FORWARD: products * forward_time.feed_forward,
        TimeUse.EXPERTS: products * forward_time.experts,
        TimeUse.ELEMENTWISE: 3.0 * forward_time.elementwise,
        TimeUse.OUTPUT: _output_passes(case) * output,
        TimeUse.ROUNDING: _stage_rounding_seconds(case, stage, counts, work),
        TimeUse.RECOMPUTE: _recompute_seconds(case, stage, layers, counts),
        # What is gathered on the way forth is scattered on the way back.
        TimeUse.TENSOR: 2.0 * forward_time.tensor,
        TimeUse.DISPATCH: 2.0 * forward_time.dispatch,
        TimeUse.CONTEXT: 2.0 * forward_time.context,
        TimeUse.PIPELINE: _stage_send_seconds(case, work),
        TimeUse.ACCUMULATION: _accumulation_seconds(case, part, work.machine),
    }
    forward_seconds = _total_forward_seconds(forward_time) + output
    both[TimeUse.HOST] = max(0.0, _stage_host_seconds(case, counts, work) - sum(both.values()))
    both[TimeUse.OFFLOAD] = _offload_seconds(
        case, stage, (forward_seconds, sum(both.values()) - forward_seconds), work.machine
    )
    return _StagePasses(both, forward_seconds)


def _stage_rounding_seconds(case: PlanningCase, stage: StageContents, counts: list[int], work: LayerWork) -> float:
    """Rows are rounded for each product, weights for each micro batch, or once for all of an update."""
    if not has_float8_products(case.spec):
        return 0.0
    rows = sum(rounded_elements(layer, work) * count for layer, count in zip(case.kinds.layers, counts, strict=True))
    weights = ROUNDINGS * layer_parameters(case, stage).held.total
    uses = case.batch.microbatches if has_shared_roundings(case.spec, case.layout) else 1
    return rounding_seconds(rows + weights / uses, work.machine.hardware)


def _offload_seconds(
    case: PlanningCase, stage: StageContents, passes: tuple[float, float], machine: GpuMachine
) -> float:
    """Return how much longer copies take than each pass that they run beside."""
    if not case.spec.memory.offload_activations:
        return 0.0
    layers = layer_bytes(case)
    copied = sum(kept_by_chunk(case, chunk, layers).total for chunk in stage.chunks)
    seconds = copied / (HOST_COPY_SHARE * machine.hardware.host_bytes_per_second)
    return sum(max(0.0, seconds - beside) for beside in passes)


def _stage_host_seconds(case: PlanningCase, counts: list[int], work: LayerWork) -> float:
    """Return the seconds in which the host starts a microbatch's kernels and ranks meet, however fast the GPU is."""
    # Under full recomputation the host waits for the sizes of each dispatch a second time.
    repetitions = 1.8 if case.spec.training.recompute.granularity is RecomputeGranularity.FULL else 1.0
    kinds = zip(case.kinds.layers, counts, strict=True)
    return repetitions * sum(host_seconds(layer, work) * count for layer, count in kinds)


def _sum_layers(layers: list[ForwardTime], counts: list[int]) -> ForwardTime:
    """A number of layers of each kind, one after the other."""
    total = ForwardTime()
    for layer_time, count in zip(layers, counts, strict=True):
        total = total.add_passes(layer_time, count)
    return total


def _total_forward_seconds(forward_time: ForwardTime) -> float:
    """All of a forward pass; `up` is part of the projections."""
    computed = (
        forward_time.projections
        + forward_time.attention
        + forward_time.feed_forward
        + forward_time.experts
        + forward_time.elementwise
    )
    return computed + forward_time.tensor + forward_time.dispatch + forward_time.context


def _output_seconds(case: PlanningCase, work: LayerWork) -> float:
    """Logits, once for the next token and once for each further one, and the layers that predict those."""
    share = work.share
    width = case.vocabulary // share.hidden
    logits = gemm_seconds(2.0 * share.tokens * share.hidden * width, share.tokens, share.hidden, work.machine.hardware)
    further = sum(_total_forward_seconds(estimate_forward(layer, work)) for layer in case.shape.mtp_layers)
    return (1 + len(case.shape.mtp_layers)) * logits + further


def _recompute_seconds(case: PlanningCase, stage: StageContents, layers: list[ForwardTime], counts: list[int]) -> float:
    """Return the seconds of recomputation in the backward pass."""
    recompute = case.spec.training.recompute
    if recompute.granularity is RecomputeGranularity.FULL:
        all_seconds = sum(_total_forward_seconds(layer_time) * n for layer_time, n in zip(layers, counts, strict=True))
        if recompute.method is not RecomputeMethod.BLOCK:
            return all_seconds
        layer_count = sum(len(chunk) for chunk in stage.chunks)
        recomputed_count = sum(min(len(chunk), recompute.layers or 1) for chunk in stage.chunks)
        return all_seconds * recomputed_count / max(layer_count, 1)
    kinds = zip(case.kinds.layers, layers, counts, strict=True)
    return sum(
        _recomputed_module_seconds(layer, layer_kind, case.activation_settings.recomputed) * n
        for layer, layer_kind, n in kinds
    )


def _recomputed_module_seconds(layer: Layer, forward_time: ForwardTime, modules: frozenset[RecomputeModule]) -> float:
    is_dense = isinstance(layer.mlp, DenseMLP)
    module_seconds = {
        RecomputeModule.CORE_ATTENTION: forward_time.attention,
        RecomputeModule.LATENT_UP_PROJECTION: forward_time.up,
        # Norms and activations read and write; each is a small part of what does.
        RecomputeModule.NORMS: forward_time.elementwise / 5,
        RecomputeModule.EXPERT_INPUT: 0.0 if is_dense else forward_time.elementwise / 5,
        RecomputeModule.EXPERT_ACTIVATION: 0.0 if is_dense else forward_time.elementwise / 5,
        RecomputeModule.MLP: forward_time.feed_forward if is_dense else 0.0,
        RecomputeModule.SHARED_EXPERTS: 0.0
        if is_dense or RecomputeModule.EXPERTS in modules
        else forward_time.feed_forward,
        RecomputeModule.EXPERTS: 0.0
        if is_dense
        else forward_time.experts + forward_time.dispatch + forward_time.feed_forward,
    }
    return sum(module_seconds[module] for module in modules)


def _stage_send_seconds(case: PlanningCase, work: LayerWork) -> float:
    """Hidden states to the next stage and their gradients back, once for each chunk."""
    if case.layout.pipeline == 1:
        return 0.0
    amount = work.share.sequence_tokens * work.share.hidden * work.share.element_bytes
    stride = case.layout.gpus // case.layout.pipeline
    return 2 * case.layout.virtual_pipeline * send_seconds(amount, stride, work.machine)


def _accumulation_seconds(case: PlanningCase, part: HeldParameters, machine: GpuMachine) -> float:
    """Each new gradient is read and added to its buffer; where replicas divide weights it is copied and summed before.

    The products of experts add gradients to the buffer themselves.
    """
    if not case.has_weight_shards:
        return _touched_seconds(part.trained.dense * (case.element_bytes + 2 * case.gradient_bytes), machine)
    touched_bytes = part.trained.dense * (case.element_bytes + case.gradient_bytes)
    touched_bytes += divided_parameters(case, part.trained) * (case.gradient_bytes + 2 * case.summed_bytes)
    return _touched_seconds(touched_bytes, machine)


def _touched_seconds(touched_bytes: float, machine: GpuMachine) -> float:
    return touched_bytes / (ACCUMULATION_SHARE * machine.hardware.memory_bytes_per_second)


# --- after the last microbatch --------------------------------------------------------------------------------------


def _seconds_after_microbatches(case: PlanningCase, fullest: HeldParameters, machine: GpuMachine) -> TimeByUse:
    return {
        TimeUse.DATA: _exchange_seconds(case, fullest.held, fullest.trained, machine),
        TimeUse.OPTIMIZER: _optimizer_seconds(case, divided_parameters(case, fullest.trained), machine),
    }


def _exchange_seconds(
    case: PlanningCase, held: LocalParameters, trained: LocalParameters, machine: GpuMachine
) -> float:
    """Gradients are scattered and weights gathered over the replicas."""
    sums = _replica_seconds(case, trained, case.gradient_bytes, machine)
    if not case.has_weight_shards:
        return sums + _replica_seconds(case, trained, case.element_bytes, machine)
    # What does not stay whole until the update is gathered for either pass of each microbatch.
    gathers = 1 if case.has_weights_until_update else 2 * case.batch.microbatches
    turning = 0 if case.has_weights_until_update else gathered_parameters(case)
    dense = _dense_gather_seconds(case, held.dense - turning, machine) + gathers * _dense_gather_seconds(
        case, turning, machine
    )
    experts = gathers * _expert_exchange_seconds(case, held, case.element_bytes, machine) * _gathered_share(case)
    return case.batch.microbatches * sums + dense + experts


def _dense_gather_seconds(case: PlanningCase, gathered: int, machine: GpuMachine) -> float:
    """Shares of that many weights beside experts gathered into a buffer, and copied from that."""
    copied = gathered * (case.layout.data * case.layout.context > 1)
    copies = _touched_seconds(2 * case.element_bytes * copied, machine)
    return _dense_seconds(case, LocalParameters(dense=gathered), case.element_bytes, machine) + copies


def _gathered_share(case: PlanningCase) -> float:
    """Return the share of layers whose experts are gathered for a pass: those at its turns stay whole."""
    layers = max(len(chunk) for stage in case.stages for chunk in stage.chunks)
    return 1.0 if case.has_weights_until_update else max(0.0, 1 - FSDP_UNITS / layers)


def _replica_seconds(case: PlanningCase, parameters: LocalParameters, size_bytes: int, machine: GpuMachine) -> float:
    return _dense_seconds(case, parameters, size_bytes, machine) + _expert_exchange_seconds(
        case, parameters, size_bytes, machine
    )


def _dense_seconds(case: PlanningCase, parameters: LocalParameters, size_bytes: int, machine: GpuMachine) -> float:
    layout = case.layout
    return replicas_seconds(parameters.dense * size_bytes, layout.tensor, layout.data * layout.context, machine)


def _expert_exchange_seconds(
    case: PlanningCase, parameters: LocalParameters, size_bytes: int, machine: GpuMachine
) -> float:
    layout = case.layout
    stride, replicas = layout.expert_tensor * layout.expert, layout.expert_data
    amount = parameters.routed * size_bytes
    if has_replica_reads(case.spec) and machine.members_in_node(stride, replicas) == replicas:
        return READ_EXPOSED * gather_seconds(amount, stride, replicas, machine)
    return replicas_seconds(amount, stride, replicas, machine)


def _optimizer_seconds(case: PlanningCase, parameter_count: int, machine: GpuMachine) -> float:
    """Adam reads and writes weights and state once; all GPUs of a node share the host that updates what lives there."""
    on_host = case.spec.memory.offload_optimizer
    touched = parameter_count * (2 * (optimizer_bytes(case) + case.weight_bytes) + case.summed_bytes)
    on_gpu = touched / (OPTIMIZER_SHARE * machine.hardware.memory_bytes_per_second)
    moved = parameter_count * (FLOAT32_BYTES + case.element_bytes) / machine.hardware.host_bytes_per_second
    updated = parameter_count * HOST_ADAM_BYTES * case.layout.gpus_per_pod / HOST_ADAM_BYTES_PER_SECOND
    return (1 - on_host) * on_gpu + on_host * (moved + updated)
