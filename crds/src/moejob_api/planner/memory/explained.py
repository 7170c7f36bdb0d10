"""Explanations of the parts of the memory estimate: one short formula each, with its numbers.

`moejob plan` prints them beside the bytes, so that a reader can multiply them out: "1.54 B parameters x 2 B".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from moejob_api.derived import keeps_roundings
from moejob_api.hardware import GIB
from moejob_api.job.training import RecomputeGranularity
from moejob_api.planner.memory.activations import slope_bytes
from moejob_api.planner.memory.case import layer_parameters
from moejob_api.planner.memory.communication import communicators, peers
from moejob_api.planner.memory.constants import FRAGMENTATION, FSDP_UNITS, LOSS_CHUNK_TOKENS, ROUNDINGS
from moejob_api.planner.memory.in_flight import in_flight
from moejob_api.planner.memory.phases import Name, StageBytes
from moejob_api.planner.memory.states import divided, optimizer_bytes
from moejob_api.planner.memory.whole_layers import layers_kept_whole

Why = Callable[[StageBytes], str]


def why(of: StageBytes, name: Name) -> str:
    """The formula behind one part."""
    return _SAYINGS.get(name) or _FORMULAS[name](of)


def gib(amount: int) -> str:
    """Bytes as people read them."""
    return f"{amount / GIB:,.1f} GiB"


def count(number: int) -> str:
    """A number of parameters as people read it."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return str(number)


def _weights(of: StageBytes) -> str:
    held = of.parameters.held
    divided_by = f" / {of.case.layout.data * of.case.layout.context} ranks" if of.case.divides_weights else ""
    routed = f", {count(held.routed)} of them in experts" if held.routed else ""
    return f"{count(held.total)} parameters x {of.case.frozen_bytes} B{divided_by}{routed}"


def _gradients(of: StageBytes) -> str:
    trained = of.parameters.trained
    if of.case.divides_weights:
        return f"{count(divided(of.case, trained))} trained parameters of this rank x {of.case.summed_bytes} B"
    return f"{count(trained.total)} trained parameters x {of.case.gradient_bytes} B"


def _optimizer(of: StageBytes) -> str:
    case, trained = of.case, of.parameters.trained
    ranks = case.layout.data * case.layout.context
    dense = f"{count(trained.dense)} / {ranks} ranks"
    routed = f" + {count(trained.routed)} / {case.layout.expert_data} ranks" if trained.routed else ""
    moments = case.spec.training.precision.moments
    moved = f", {case.spec.memory.offload_optimizer:.0%} in host memory" if of.states.host else ""
    return f"({dense}{routed}) x {optimizer_bytes(case)} B, moments in {moments}{moved}"


def _gathered(of: StageBytes) -> str:
    if of.case.keeps_gathered:
        held = of.parameters.held
        return f"{count(held.total)} parameters x {of.case.element_bytes} B until the update, gradients of one layer"
    beside = f", {kept} layers but for their experts" if (kept := layers_kept_whole(of.case)) else ""
    return f"weights of {FSDP_UNITS} whole layers, gradients of one, the vocabulary's matrices{beside}"


def _rounded(of: StageBytes) -> str:
    if not keeps_roundings(of.case.spec, of.case.layout):
        return "one rounding of the largest matrix"
    held = layer_parameters(of.case, of.stage).held
    return f"{count(held.total)} parameters of layers x {ROUNDINGS} roundings, along inputs and along outputs"


def _reference(of: StageBytes) -> str:
    return f"kl.coefficient {of.case.spec.grpo.kl.coefficient:g} needs the model as it was" if of.case.spec.grpo else ""


def _kept(of: StageBytes) -> str:
    case, share = of.case, of.case.share
    flights = in_flight(case.layout, of.stage.index, case.batch.microbatches)
    layers = sum(len(chunk) for chunk in of.stage.chunks)
    if len(flights) == 1:
        held = f"{flights[0]} microbatch{'es' if flights[0] > 1 else ''} in flight x {layers} layers"
    else:
        held = f"{'+'.join(map(str, flights))} microbatches in flight in {len(flights)} chunks of {layers} layers"
    recompute = case.spec.training.recompute.granularity
    again = "" if recompute is RecomputeGranularity.NONE else f", recompute {recompute}"
    moved = f", {gib(of.activations.offloaded)} in host memory" if of.activations.offloaded else ""
    return f"{held} x {share.tokens:,} tokens{again}{moved}"


def _routed(of: StageBytes) -> str:
    experts, share = of.case.shape.experts, of.case.share
    if experts is None:
        return _kept(of)
    rows = share.rows(experts.per_token)
    bound = "capacityFactor" if of.case.spec.moe.capacity_factor is not None else "uneven routing"
    margin = f" x {share.expert_rows:g} for {bound}" if share.expert_rows != 1 else ""
    return f"{rows:,} rows a layer ({experts.per_token} a token{margin}); {_kept(of)}"


def _working(of: StageBytes) -> str:
    again = of.case.spec.training.recompute.granularity
    repeated = "" if again is RecomputeGranularity.NONE else " and what is computed again"
    return f"gradients of the busiest layer's tensors{repeated} for {of.case.share.tokens:,} tokens"


def _loss(of: StageBytes) -> str:
    rows = min(of.case.share.tokens, LOSS_CHUNK_TOKENS)
    width = of.case.vocabulary // of.case.shape.hidden
    slopes = f", {gib(found)} of their slopes" if (found := slope_bytes(of.case)) else ""
    return f"{rows:,} tokens x {width:,} logits at a time{slopes}, and the gradient of the output projection"


def _step(of: StageBytes) -> str:
    copies = "float32 copies of the gradients and " if of.case.summed_bytes < 4 else ""
    return f"{copies}the largest one clipped"


def _engine_weights(of: StageBytes) -> str:
    tensor = of.engine.gpus if of.engine else 1
    return f"the whole model in {of.case.spec.model.dtype} / {tensor} GPUs of an engine"


def _engine_cache(of: StageBytes) -> str:
    if of.engine is None or of.case.spec.grpo is None:
        return ""
    length = of.case.spec.data.max_length
    if of.engine.sequences is None:
        return f"{of.engine.useful_sequences} sequences of {length:,} tokens"
    share = of.case.spec.grpo.rollout.engine_share
    return f"what gpuMemoryUtilization {share:g} leaves: {of.engine.sequences} sequences of {length:,} tokens"


def _communicators(of: StageBytes) -> str:
    layout, dispatcher = of.case.layout, of.case.spec.moe.dispatcher
    alone = peers(layout, dispatcher)
    sent = f", {alone} peers in the node that are sent to one by one" if alone else ""
    return f"{communicators(layout, dispatcher)} communicators{sent}"


_SAYINGS: Mapping[Name, str] = MappingProxyType(
    {
        Name.PIPELINE: "hidden states and gradients from and to the neighbouring stages",
        Name.ENGINE_WORKSPACE: "context, graphs and prefill of the engine",
        Name.ENGINE_ASLEEP: "context of the engine while the trainer works",
        Name.BUCKET: "the largest tensor, gathered, and a bucket",
        Name.CONTEXT: "the libraries' own memory",
        Name.PEER_MEMORY: "dispatcher Flex: tokens that other GPUs of the node write here, of the worst routing",
        Name.FRAGMENTATION: f"{FRAGMENTATION:.0%} of what comes and goes",
    }
)
_FORMULAS: Mapping[Name, Why] = MappingProxyType(
    {
        Name.WEIGHTS: _weights,
        Name.GRADIENTS: _gradients,
        Name.OPTIMIZER: _optimizer,
        Name.GATHERED: _gathered,
        Name.ROUNDED: _rounded,
        Name.REFERENCE: _reference,
        Name.STREAM: _kept,
        Name.ATTENTION: _kept,
        Name.FEED_FORWARD: _kept,
        Name.ROUTED: _routed,
        Name.ROUTING: _kept,
        Name.WORKING: _working,
        Name.LOSS: _loss,
        Name.STEP: _step,
        Name.ENGINE_WEIGHTS: _engine_weights,
        Name.ENGINE_CACHE: _engine_cache,
        Name.COMMUNICATORS: _communicators,
    }
)
