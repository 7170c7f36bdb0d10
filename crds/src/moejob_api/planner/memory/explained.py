"""Explanations of the parts of the memory estimate: one short formula each, with its numbers.

`moejob plan` prints them beside the bytes, so that a reader can multiply them out: "1.54 B parameters x 2 B".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from moejob_api.derived import has_shared_roundings
from moejob_api.job.training import RecomputeGranularity
from moejob_api.planner.memory.activations import slope_bytes
from moejob_api.planner.memory.case import layer_parameters
from moejob_api.planner.memory.communication import count_communicators, count_peers
from moejob_api.planner.memory.constants import FRAGMENTATION, FSDP_UNITS, LOSS_CHUNK_TOKENS, ROUNDINGS
from moejob_api.planner.memory.in_flight import in_flight
from moejob_api.planner.memory.phases import MemoryUse, StageLoad
from moejob_api.planner.memory.states import divided_parameters, optimizer_bytes
from moejob_api.planner.memory.whole_layers import count_whole_layers
from moejob_api.quantities import GIB

Formula = Callable[[StageLoad], str]


def explain_memory(load: StageLoad, name: MemoryUse) -> str:
    """The formula behind one part."""
    return _FIXED_TEXTS.get(name) or _FORMULAS[name](load)


def gib_text(amount: int) -> str:
    """Bytes as people read them."""
    return f"{amount / GIB:,.1f} GiB"


def count_text(number: int) -> str:
    """A number of parameters as people read it."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return str(number)


def _weights_formula(load: StageLoad) -> str:
    held = load.parameters.held
    divided_by = f" / {load.case.layout.data * load.case.layout.context} ranks" if load.case.has_weight_shards else ""
    routed = f", {count_text(held.routed)} of them in experts" if held.routed else ""
    return f"{count_text(held.total)} parameters x {load.case.frozen_bytes} B{divided_by}{routed}"


def _gradients_formula(load: StageLoad) -> str:
    trained = load.parameters.trained
    if load.case.has_weight_shards:
        return (
            f"{count_text(divided_parameters(load.case, trained))} trained parameters of this rank x "
            f"{load.case.summed_bytes} B"
        )
    return f"{count_text(trained.total)} trained parameters x {load.case.gradient_bytes} B"


def _optimizer_formula(load: StageLoad) -> str:
    case, trained = load.case, load.parameters.trained
    ranks = case.layout.data * case.layout.context
    dense = f"{count_text(trained.dense)} / {ranks} ranks"
    routed = f" + {count_text(trained.routed)} / {case.layout.expert_data} ranks" if trained.routed else ""
    moments = case.spec.training.precision.moments
    moved = f", {case.spec.memory.offload_optimizer:.0%} in host memory" if load.states.host else ""
    return f"({dense}{routed}) x {optimizer_bytes(case)} B, moments in {moments}{moved}"


def _gathered_formula(load: StageLoad) -> str:
    if load.case.has_weights_until_update:
        held = load.parameters.held
        return (
            f"{count_text(held.total)} parameters x {load.case.element_bytes} B until the update, gradients of one "
            "layer"
        )
    beside = f", {whole_count} layers but for their experts" if (whole_count := count_whole_layers(load.case)) else ""
    return f"weights of {FSDP_UNITS} whole layers, gradients of one, the vocabulary's matrices{beside}"


def _rounded_formula(load: StageLoad) -> str:
    if not has_shared_roundings(load.case.spec, load.case.layout):
        return "one rounding of the largest matrix"
    held = layer_parameters(load.case, load.stage).held
    return f"{count_text(held.total)} parameters of layers x {ROUNDINGS} roundings, along inputs and along outputs"


def _reference_formula(load: StageLoad) -> str:
    return (
        f"kl.coefficient {load.case.spec.grpo.kl.coefficient:g} needs the model as it was"
        if load.case.spec.grpo
        else ""
    )


def _kept_formula(load: StageLoad) -> str:
    case, share = load.case, load.case.share
    flights = in_flight(case.layout, load.stage.index, case.batch.microbatches)
    layers = sum(len(chunk) for chunk in load.stage.chunks)
    if len(flights) == 1:
        held = f"{flights[0]} microbatch{'es' if flights[0] > 1 else ''} in flight x {layers} layers"
    else:
        held = f"{'+'.join(map(str, flights))} microbatches in flight in {len(flights)} chunks of {layers} layers"
    recompute = case.spec.training.recompute.granularity
    recompute_note = "" if recompute is RecomputeGranularity.NONE else f", recompute {recompute}"
    moved = f", {gib_text(load.activations.offloaded)} in host memory" if load.activations.offloaded else ""
    return f"{held} x {share.tokens:,} tokens{recompute_note}{moved}"


def _routed_formula(load: StageLoad) -> str:
    experts, share = load.case.shape.experts, load.case.share
    if experts is None:
        return _kept_formula(load)
    rows = share.count_rows(experts.per_token)
    bound = "capacityFactor" if load.case.spec.moe.capacity_factor is not None else "uneven routing"
    margin = f" x {share.expert_rows:g} for {bound}" if share.expert_rows != 1 else ""
    return f"{rows:,} rows a layer ({experts.per_token} a token{margin}); {_kept_formula(load)}"


def _working_formula(load: StageLoad) -> str:
    granularity = load.case.spec.training.recompute.granularity
    repeated = "" if granularity is RecomputeGranularity.NONE else " and what is computed again"
    return f"gradients of the busiest layer's tensors{repeated} for {load.case.share.tokens:,} tokens"


def _loss_formula(load: StageLoad) -> str:
    rows = min(load.case.share.tokens, LOSS_CHUNK_TOKENS)
    # case.vocabulary counts elements of this GPU's part of the output matrix; over hidden they are its logits.
    width = load.case.vocabulary // load.case.shape.hidden
    slopes = f", {gib_text(kept_slopes)} of their slopes" if (kept_slopes := slope_bytes(load.case)) else ""
    return f"{rows:,} tokens x {width:,} logits at a time{slopes}, and the gradient of the output projection"


def _step_formula(load: StageLoad) -> str:
    copies = "float32 copies of the gradients and " if load.case.summed_bytes < 4 else ""
    return f"{copies}the largest one clipped"


def _engine_weights_formula(load: StageLoad) -> str:
    tensor = load.engine.gpus if load.engine else 1
    return f"the whole model in {load.case.spec.model.dtype} / {tensor} GPUs of an engine"


def _engine_cache_formula(load: StageLoad) -> str:
    if load.engine is None or load.case.spec.grpo is None:
        return ""
    length = load.case.spec.data.max_length
    if load.engine.sequences is None:
        return f"{load.engine.useful_sequences} sequences of {length:,} tokens"
    share = load.case.spec.grpo.rollout.engine_share
    return f"what gpuMemoryUtilization {share:g} leaves: {load.engine.sequences} sequences of {length:,} tokens"


def _communicators_formula(load: StageLoad) -> str:
    layout, dispatcher = load.case.layout, load.case.spec.moe.dispatcher
    alone = count_peers(layout, dispatcher)
    sent = f", {alone} peers in the node that are sent to one by one" if alone else ""
    return f"{count_communicators(layout, dispatcher)} communicators{sent}"


_FIXED_TEXTS: Mapping[MemoryUse, str] = MappingProxyType(
    {
        MemoryUse.PIPELINE: "hidden states and gradients from and to the neighbouring stages",
        MemoryUse.ENGINE_WORKSPACE: "context, graphs and prefill of the engine",
        MemoryUse.ENGINE_ASLEEP: "context of the engine while the trainer works",
        MemoryUse.BUCKET: "the largest tensor, gathered, and a bucket",
        MemoryUse.CONTEXT: "the libraries' own memory",
        MemoryUse.PEER_MEMORY: "dispatcher Flex: tokens that other GPUs of the node write here, of the worst routing",
        MemoryUse.FRAGMENTATION: f"{FRAGMENTATION:.0%} of what comes and goes",
    }
)
_FORMULAS: Mapping[MemoryUse, Formula] = MappingProxyType(
    {
        MemoryUse.WEIGHTS: _weights_formula,
        MemoryUse.GRADIENTS: _gradients_formula,
        MemoryUse.OPTIMIZER: _optimizer_formula,
        MemoryUse.GATHERED: _gathered_formula,
        MemoryUse.ROUNDED: _rounded_formula,
        MemoryUse.REFERENCE: _reference_formula,
        MemoryUse.STREAM: _kept_formula,
        MemoryUse.ATTENTION: _kept_formula,
        MemoryUse.FEED_FORWARD: _kept_formula,
        MemoryUse.ROUTED: _routed_formula,
        MemoryUse.ROUTING: _kept_formula,
        MemoryUse.WORKING: _working_formula,
        MemoryUse.LOSS: _loss_formula,
        MemoryUse.STEP: _step_formula,
        MemoryUse.ENGINE_WEIGHTS: _engine_weights_formula,
        MemoryUse.ENGINE_CACHE: _engine_cache_formula,
        MemoryUse.COMMUNICATORS: _communicators_formula,
    }
)
