"""Seconds of one optimizer update: the slowest pipeline stage for every microbatch, then gradients and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from moejob_api.derived import NO_MODULES, counts_choices, keeps_roundings, multiplies_float8, reads_replicas
from moejob_api.job.training import RecomputeGranularity, RecomputeMethod, RecomputeModule
from moejob_api.layout.expert_nodes import expert_nodes
from moejob_api.models.shape import DenseMLP, Layer
from moejob_api.planner.cost.layers import Forward, Work, forward, host_seconds, rounded_elements
from moejob_api.planner.cost.rates import (
    ACCUMULATION_SHARE,
    FLOAT8_SPEED,
    HOST_ADAM_BYTES,
    HOST_ADAM_BYTES_PER_SECOND,
    HOST_COPY_SHARE,
    OPTIMIZER_SHARE,
    READ_EXPOSED,
    Machine,
    gather_seconds,
    gemm_seconds,
    replicas_seconds,
    rounding_seconds,
    send_seconds,
)
from moejob_api.planner.memory.activations import kept_by_chunk, layer_bytes
from moejob_api.planner.memory.case import (
    Case,
    Parameters,
    Portion,
    layer_parameters,
    model_parameters,
    stage_parameters,
)
from moejob_api.planner.memory.constants import FSDP_UNITS, ROUNDINGS
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES
from moejob_api.planner.memory.kinds import StageContents
from moejob_api.planner.memory.states import divided, optimizer_bytes
from moejob_api.planner.memory.whole_layers import gathered_by_turns


class Spent(StrEnum):
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


Seconds = dict[Spent, float]


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update, and its forward passes alone, which is what scoring costs."""

    seconds: Seconds
    forward_seconds: float


@dataclass(frozen=True, slots=True)
class _Passes:
    """One microbatch through one stage: both passes by what is done, and the forward pass alone."""

    both: Seconds
    forward: float

    @property
    def total(self) -> float:
        return sum(self.both.values())


def update_seconds(case: Case, machine: Machine) -> Update:
    """The seconds of one update on this layout."""
    work = _work(case, machine)
    parts = [stage_parameters(case, stage) for stage in case.stages]
    stages = [_passes(case, stage, part, work) for stage, part in zip(case.stages, parts, strict=True)]
    slowest = max(stages, key=lambda passes: passes.total)
    count = case.batch.microbatches
    waiting = (case.layout.pipeline - 1) / case.layout.virtual_pipeline
    seconds = {spent: value * count for spent, value in slowest.both.items()}
    seconds[Spent.BUBBLE] = waiting * slowest.total
    seconds |= _after(case, max(parts, key=lambda part: part.trained.total), machine)
    forward_seconds = (count + waiting) * slowest.forward
    # The choices of the whole global batch are counted before any of it is trained on.
    seconds[Spent.COUNTING] = forward_seconds if counts_choices(case.spec) and case.shape.experts else 0.0
    return Update(seconds, forward_seconds)


def least_update_seconds(case: Case, machine: Machine, chunks: int) -> float:
    """Return the least seconds of any cut into stages of at most `chunks` chunks: all layers shared evenly."""
    stages = case.layout.pipeline
    work = _work(case, machine)
    once, of_host = Forward(), 0.0
    for layer, of_kind in zip(case.kinds.layers, case.kinds.before, strict=True):
        once = once.plus(forward(layer, work), of_kind[-1])
        of_host += host_seconds(layer, work) * of_kind[-1]
    products = _products(case)
    stage = products * (once.projections + once.feed_forward + once.experts) + _output_products(case) * _output(
        case, work
    )
    stage += 3.0 * (once.attention + once.elementwise) + 2.0 * (once.tensor + once.dispatch + once.context)
    whole = model_parameters(case)
    part = Portion(whole.held // stages, whole.trained // stages)
    of_microbatch = max(stage / stages + _accumulation(case, part, machine), of_host / stages)
    waiting = (stages - 1) / chunks
    return (case.batch.microbatches + waiting) * of_microbatch + sum(_after(case, part, machine).values())


def _work(case: Case, machine: Machine) -> Work:
    keeping = replace(case.keeping, recomputed=NO_MODULES) if case.keeping.recomputed else case.keeping
    dispatcher = case.spec.moe.dispatcher
    nodes = expert_nodes(case.layout, dispatcher)
    return Work(case.share, keeping, machine, case.spec.data.max_length, dispatcher, nodes, _speed(case))


def _speed(case: Case) -> float:
    """Products of layers, forward and for gradients of inputs, beside those in the model's type."""
    return FLOAT8_SPEED if multiplies_float8(case.spec) else 1.0


def _products(case: Case) -> float:
    """Passes through each matrix of a layer: forward, and for the gradients of its input and its weights."""
    # Gradients of weights are multiplied in the model's type.
    return 2.0 + (_output_products(case) - 2.0) * _speed(case)


def _output_products(case: Case) -> float:
    """The same of the output layer, and of all layers in the model's type."""
    # Frozen matrices have no gradient of their own; adapters beside them are small.
    return 3.0 if case.spec.training.lora is None else 2.0


# --- a microbatch on a stage ----------------------------------------------------------------------------------------


def _passes(case: Case, stage: StageContents, part: Portion, work: Work) -> _Passes:
    """Both passes of one microbatch through one stage."""
    layers = [forward(layer, work) for layer in case.kinds.layers]
    counts = [sum(of) for of in zip(*(case.kinds.counts(c.start, c.stop) for c in stage.chunks), strict=True)]
    once = _summed(layers, counts)
    output = _output(case, work) if stage.output else 0.0
    products = _products(case)
    both = {
        Spent.PROJECTIONS: products * once.projections,
        Spent.ATTENTION: 3.0 * once.attention,
        Spent.FEED_FORWARD: products * once.feed_forward,
        Spent.EXPERTS: products * once.experts,
        Spent.ELEMENTWISE: 3.0 * once.elementwise,
        Spent.OUTPUT: _output_products(case) * output,
        Spent.ROUNDING: _rounding(case, stage, counts, work),
        Spent.RECOMPUTE: _recomputed(case, stage, layers, counts),
        # What is gathered on the way forth is scattered on the way back.
        Spent.TENSOR: 2.0 * once.tensor,
        Spent.DISPATCH: 2.0 * once.dispatch,
        Spent.CONTEXT: 2.0 * once.context,
        Spent.PIPELINE: _sends(case, work),
        Spent.ACCUMULATION: _accumulation(case, part, work.machine),
    }
    forward_seconds = _whole(once) + output
    both[Spent.HOST] = max(0.0, _of_host(case, counts, work) - sum(both.values()))
    both[Spent.OFFLOAD] = _offloaded(case, stage, (forward_seconds, sum(both.values()) - forward_seconds), work.machine)
    return _Passes(both, forward_seconds)


def _rounding(case: Case, stage: StageContents, counts: list[int], work: Work) -> float:
    """Rows are rounded for each product, weights for each micro batch, or once for all of an update."""
    if not multiplies_float8(case.spec):
        return 0.0
    rows = sum(rounded_elements(layer, work) * count for layer, count in zip(case.kinds.layers, counts, strict=True))
    weights = ROUNDINGS * layer_parameters(case, stage).held.total
    uses = case.batch.microbatches if keeps_roundings(case.spec, case.layout) else 1
    return rounding_seconds(rows + weights / uses, work.machine.hardware)


def _offloaded(case: Case, stage: StageContents, passes: tuple[float, float], machine: Machine) -> float:
    """Return how much longer copies take than each pass that they run beside."""
    if not case.spec.memory.offload_activations:
        return 0.0
    layers = layer_bytes(case)
    copied = sum(kept_by_chunk(case, chunk, layers).total for chunk in stage.chunks)
    seconds = copied / (HOST_COPY_SHARE * machine.hardware.host_bytes_per_second)
    return sum(max(0.0, seconds - beside) for beside in passes)


def _of_host(case: Case, counts: list[int], work: Work) -> float:
    """Return the seconds in which the host starts a microbatch's kernels and ranks meet, however fast the GPU is."""
    # Under full recomputation the host waits for the sizes of each dispatch a second time.
    again = 1.8 if case.spec.training.recompute.granularity is RecomputeGranularity.FULL else 1.0
    kinds = zip(case.kinds.layers, counts, strict=True)
    return again * sum(host_seconds(layer, work) * count for layer, count in kinds)


def _summed(layers: list[Forward], counts: list[int]) -> Forward:
    """A number of layers of each kind, one after the other."""
    total = Forward()
    for one, count in zip(layers, counts, strict=True):
        total = total.plus(one, count)
    return total


def _whole(once: Forward) -> float:
    """All of a forward pass; `up` is part of the projections."""
    computed = once.projections + once.attention + once.feed_forward + once.experts + once.elementwise
    return computed + once.tensor + once.dispatch + once.context


def _output(case: Case, work: Work) -> float:
    """Logits, once for the next token and once for each further one, and the layers that predict those."""
    share = work.share
    width = case.vocabulary // share.hidden
    logits = gemm_seconds(2.0 * share.tokens * share.hidden * width, share.tokens, share.hidden, work.machine.hardware)
    further = sum(_whole(forward(layer, work)) for layer in case.shape.mtp_layers)
    return (1 + len(case.shape.mtp_layers)) * logits + further


def _recomputed(case: Case, stage: StageContents, layers: list[Forward], counts: list[int]) -> float:
    """Return the seconds of recomputation in the backward pass."""
    recompute = case.spec.training.recompute
    if recompute.granularity is RecomputeGranularity.FULL:
        whole = sum(_whole(one) * n for one, n in zip(layers, counts, strict=True))
        if recompute.method is not RecomputeMethod.BLOCK:
            return whole
        held = sum(len(chunk) for chunk in stage.chunks)
        again = sum(min(len(chunk), recompute.layers or 1) for chunk in stage.chunks)
        return whole * again / max(held, 1)
    kinds = zip(case.kinds.layers, layers, counts, strict=True)
    return sum(_modules_again(layer, one, case.keeping.recomputed) * n for layer, one, n in kinds)


def _modules_again(layer: Layer, once: Forward, modules: frozenset[RecomputeModule]) -> float:
    is_dense = isinstance(layer.mlp, DenseMLP)
    again = {
        RecomputeModule.CORE_ATTENTION: once.attention,
        RecomputeModule.LATENT_UP_PROJECTION: once.up,
        # Norms and activations read and write; each is a small part of what does.
        RecomputeModule.NORMS: once.elementwise / 5,
        RecomputeModule.EXPERT_INPUT: 0.0 if is_dense else once.elementwise / 5,
        RecomputeModule.EXPERT_ACTIVATION: 0.0 if is_dense else once.elementwise / 5,
        RecomputeModule.MLP: once.feed_forward if is_dense else 0.0,
        RecomputeModule.SHARED_EXPERTS: 0.0 if is_dense or RecomputeModule.EXPERTS in modules else once.feed_forward,
        RecomputeModule.EXPERTS: 0.0 if is_dense else once.experts + once.dispatch + once.feed_forward,
    }
    return sum(again[module] for module in modules)


def _sends(case: Case, work: Work) -> float:
    """Hidden states to the next stage and their gradients back, once for each chunk."""
    if case.layout.pipeline == 1:
        return 0.0
    amount = work.share.sequence_tokens * work.share.hidden * work.share.element_bytes
    stride = case.layout.gpus // case.layout.pipeline
    return 2 * case.layout.virtual_pipeline * send_seconds(amount, stride, work.machine)


def _accumulation(case: Case, part: Portion, machine: Machine) -> float:
    """Each new gradient is read and added to its buffer; where replicas divide weights it is copied and summed before.

    The products of experts add gradients to the buffer themselves.
    """
    if not case.divides_weights:
        return _touched_seconds(part.trained.dense * (case.element_bytes + 2 * case.gradient_bytes), machine)
    touched = part.trained.dense * (case.element_bytes + case.gradient_bytes)
    touched += divided(case, part.trained) * (case.gradient_bytes + 2 * case.summed_bytes)
    return _touched_seconds(touched, machine)


def _touched_seconds(touched: float, machine: Machine) -> float:
    return touched / (ACCUMULATION_SHARE * machine.hardware.memory_bytes_per_second)


# --- after the last microbatch --------------------------------------------------------------------------------------


def _after(case: Case, fullest: Portion, machine: Machine) -> Seconds:
    return {
        Spent.DATA: _exchanged(case, fullest.held, fullest.trained, machine),
        Spent.OPTIMIZER: _optimizer(case, divided(case, fullest.trained), machine),
    }


def _exchanged(case: Case, held: Parameters, trained: Parameters, machine: Machine) -> float:
    """Gradients are scattered and weights gathered over the replicas."""
    sums = _over_replicas(case, trained, case.gradient_bytes, machine)
    if not case.divides_weights:
        return sums + _over_replicas(case, trained, case.element_bytes, machine)
    # What does not stay whole until the update is gathered for either pass of each microbatch.
    gathers = 1 if case.keeps_gathered else 2 * case.batch.microbatches
    turning = 0 if case.keeps_gathered else gathered_by_turns(case)
    dense = _dense_gathered(case, held.dense - turning, machine) + gathers * _dense_gathered(case, turning, machine)
    experts = gathers * _of_experts(case, held, case.element_bytes, machine) * _gathered_share(case)
    return case.batch.microbatches * sums + dense + experts


def _dense_gathered(case: Case, gathered: int, machine: Machine) -> float:
    """Shares of that many weights beside experts gathered into a buffer, and copied from that."""
    copied = gathered * (case.layout.data * case.layout.context > 1)
    copies = _touched_seconds(2 * case.element_bytes * copied, machine)
    return _of_dense(case, Parameters(dense=gathered), case.element_bytes, machine) + copies


def _gathered_share(case: Case) -> float:
    """Return the share of layers whose experts are gathered for a pass: those at its turns stay whole."""
    layers = max(len(chunk) for stage in case.stages for chunk in stage.chunks)
    return 1.0 if case.keeps_gathered else max(0.0, 1 - FSDP_UNITS / layers)


def _over_replicas(case: Case, parameters: Parameters, size_bytes: int, machine: Machine) -> float:
    return _of_dense(case, parameters, size_bytes, machine) + _of_experts(case, parameters, size_bytes, machine)


def _of_dense(case: Case, parameters: Parameters, size_bytes: int, machine: Machine) -> float:
    layout = case.layout
    return replicas_seconds(parameters.dense * size_bytes, layout.tensor, layout.data * layout.context, machine)


def _of_experts(case: Case, parameters: Parameters, size_bytes: int, machine: Machine) -> float:
    layout = case.layout
    stride, replicas = layout.expert_tensor * layout.expert, layout.expert_data
    amount = parameters.routed * size_bytes
    if reads_replicas(case.spec) and machine.members_in_node(stride, replicas) == replicas:
        return READ_EXPOSED * gather_seconds(amount, stride, replicas, machine)
    return replicas_seconds(amount, stride, replicas, machine)


def _optimizer(case: Case, mine: int, machine: Machine) -> float:
    """Adam reads and writes weights and state once; all GPUs of a node share the host that updates what lives there."""
    on_host = case.spec.memory.offload_optimizer
    touched = mine * (2 * (optimizer_bytes(case) + case.weight_bytes) + case.summed_bytes)
    on_gpu = touched / (OPTIMIZER_SHARE * machine.hardware.memory_bytes_per_second)
    moved = mine * (FLOAT32_BYTES + case.element_bytes) / machine.hardware.host_bytes_per_second
    updated = mine * HOST_ADAM_BYTES * case.layout.gpus_per_pod / HOST_ADAM_BYTES_PER_SECOND
    return (1 - on_host) * on_gpu + on_host * (moved + updated)
