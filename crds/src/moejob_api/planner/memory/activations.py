"""Activations of one pipeline stage: the kept bytes of every microbatch in flight, and one layer's working memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moejob_api.arithmetic import ceil_div
from moejob_api.derived import NO_MODULES, kept_slope_bytes
from moejob_api.job.training import RecomputeGranularity, RecomputeMethod
from moejob_api.planner.memory.case import PlanningCase, output_parameters
from moejob_api.planner.memory.constants import LOSS_CHUNK_TOKENS
from moejob_api.planner.memory.in_flight import in_flight
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES, KeptBytes, kept_by_layer, layer_input_bytes
from moejob_api.planner.memory.kinds import StageContents
from moejob_api.planner.memory.microbatch_share import MicrobatchShare
from moejob_api.planner.memory.temporaries import working_bytes

# Token ids, labels, positions and loss mask, eight bytes each.
BATCH_BYTES_PER_TOKEN = 32


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer of each kind: kept with what the job recomputes, kept when nothing is, and working."""

    kept: tuple[KeptBytes, ...]
    without_recompute: tuple[KeptBytes, ...]
    working: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one stage. working and loss are not alive at the same time; offloaded are in host memory."""

    kept: KeptBytes
    working: int
    loss: int
    offloaded: int

    @property
    def peak_bytes(self) -> int:
        """The most at once on the GPU."""
        return self.kept.total + max(self.working, self.loss)


def layer_bytes(case: PlanningCase) -> LayerBytes:
    """Return the bytes that one layer of each kind keeps and needs."""
    layers = case.kinds.layers
    kept_layers = tuple([kept_by_layer(layer, case.share, case.activation_settings) for layer in layers])
    unrecomputed = replace(case.activation_settings, recomputed=NO_MODULES)
    return LayerBytes(
        kept=kept_layers,
        without_recompute=tuple([kept_by_layer(layer, case.share, unrecomputed) for layer in layers])
        if case.activation_settings.recomputed
        else kept_layers,
        working=tuple([working_bytes(layer, case.share, case.activation_settings) for layer in layers]),
    )


def stage_activations(case: PlanningCase, stage: StageContents, layers: LayerBytes) -> Activations:
    """Return the bytes that a stage keeps and needs while it trains."""
    flights = in_flight(case.layout, stage.index, case.batch.microbatches)
    total = KeptBytes(stream=sum(flights) * case.share.tokens * BATCH_BYTES_PER_TOKEN)
    for chunk, count in zip(stage.chunks, flights, strict=True):
        total += kept_by_chunk(case, chunk, layers) * count
    if stage.output:
        total += _kept_by_output(case) * flights[-1]
    loss = loss_bytes(case) + flights[-1] * slope_bytes(case) if stage.output else 0
    needed = _working_bytes(case, layers)
    if not case.spec.memory.offload_activations:
        return Activations(total, needed, loss, 0)
    # One layer's worth waits for its copy out, another for its copy in.
    staying = min(total.total, 2 * max(layer_kept.total for layer_kept in layers.kept))
    return Activations(KeptBytes(stream=staying), needed, loss, total.total - staying)


def loss_bytes(case: PlanningCase) -> int:
    """Hidden states before the output projection, with their gradient; logits of a chunk; the projection's gradient."""
    share = case.share
    # With sequence parallelism the hidden states are gathered first.
    copies = 2 if share.sequence > 1 else 1
    states = (1 + len(case.shape.mtp_layers)) * copies * share.tokens * share.hidden * share.element_bytes
    width = case.vocabulary // case.shape.hidden
    logits = min(share.tokens, LOSS_CHUNK_TOKENS) * width * (share.element_bytes + FLOAT32_BYTES)
    # Chunks add their part of the weight gradient up in float32.
    return states + logits + output_parameters(case) * FLOAT32_BYTES


def slope_bytes(case: PlanningCase) -> int:
    """Return the slopes that the losses of one microbatch keep for the backward pass."""
    share, width = case.share, case.vocabulary // case.shape.hidden
    return (1 + len(case.shape.mtp_layers)) * kept_slope_bytes(case.spec, share.tokens, width, share.element_bytes)


def kept_by_chunk(case: PlanningCase, chunk: range, layers: LayerBytes) -> KeptBytes:
    """Return the bytes that one microbatch leaves in the layers of one chunk."""
    recompute = case.spec.training.recompute
    size = recompute.layers or 1
    if recompute.granularity is not RecomputeGranularity.FULL:
        return _kept_by_range(case, chunk.start, chunk.stop, layers)
    if recompute.method is RecomputeMethod.BLOCK:
        dropped = min(size, len(chunk))
        inputs = KeptBytes(stream=dropped * layer_input_bytes(case.share))
        return inputs + _kept_by_range(case, chunk.start + dropped, chunk.stop, layers)
    return KeptBytes(stream=ceil_div(len(chunk), size) * layer_input_bytes(case.share))


def _kept_by_range(case: PlanningCase, start: int, stop: int, layers: LayerBytes) -> KeptBytes:
    total = KeptBytes()
    for layer_kept, count in zip(layers.kept, case.kinds.count_layers(start, stop), strict=True):
        if count:
            total += layer_kept * count
    return total


def _kept_by_output(case: PlanningCase) -> KeptBytes:
    """Input and output of the last norm; for every further token its layer, and what is kept beside it."""
    input_bytes = layer_input_bytes(case.share)
    total = KeptBytes(stream=2 * input_bytes)
    for layer in case.shape.mtp_layers:
        inside = (
            KeptBytes(stream=input_bytes)
            if case.spec.training.recompute.granularity is RecomputeGranularity.FULL
            else kept_by_layer(layer, case.share, case.activation_settings)
        )
        total += inside + KeptBytes(stream=mtp_module_bytes(case.share))
    return total


def mtp_module_bytes(share: MicrobatchShare) -> int:
    """Return the bytes that an MTP module keeps beside its layer: embedding, projection, last norm.

    Its three norms keep a number of each token.
    """
    return 5 * layer_input_bytes(share) + 3 * share.sequence_tokens * FLOAT32_BYTES


def _working_bytes(case: PlanningCase, layers: LayerBytes) -> int:
    """The busiest layer's gradients, and what is computed again for it."""
    recomputed_layers = _layers_recomputed(case)
    if recomputed_layers:
        return max(
            layer_working + recomputed_layers * all_kept.total
            for layer_working, all_kept in zip(layers.working, layers.without_recompute, strict=True)
        )
    return max(
        working + without_recompute.total - layer_kept.total
        for working, without_recompute, layer_kept in zip(
            layers.working, layers.without_recompute, layers.kept, strict=True
        )
    )


def _layers_recomputed(case: PlanningCase) -> int:
    """Layers whose activations are all there again at once."""
    recompute = case.spec.training.recompute
    if recompute.granularity is not RecomputeGranularity.FULL:
        return 0
    return 1 if recompute.method is RecomputeMethod.BLOCK else recompute.layers or 1
