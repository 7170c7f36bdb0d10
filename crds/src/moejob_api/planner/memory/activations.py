"""Activations of one pipeline stage: what is kept for every microbatch in flight, and what one layer needs on top."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moejob_api.arithmetic import ceil_div
from moejob_api.derived import NO_MODULES, kept_slope_bytes
from moejob_api.job.training import RecomputeGranularity, RecomputeMethod
from moejob_api.planner.memory.case import Case, output_parameters
from moejob_api.planner.memory.constants import LOSS_CHUNK_TOKENS
from moejob_api.planner.memory.in_flight import in_flight
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES, Kept, kept, layer_input
from moejob_api.planner.memory.kinds import StageContents
from moejob_api.planner.memory.microbatch_share import Share
from moejob_api.planner.memory.temporaries import working

# Token ids, labels, positions and loss mask, eight bytes each.
BATCH_BYTES_PER_TOKEN = 32


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer of each kind: kept with what the job recomputes, kept when nothing is, and working."""

    kept: tuple[Kept, ...]
    whole: tuple[Kept, ...]
    working: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one stage. working and loss are not alive at the same time; offloaded are in host memory."""

    kept: Kept
    working: int
    loss: int
    offloaded: int

    @property
    def peak(self) -> int:
        """The most at once on the GPU."""
        return self.kept.total + max(self.working, self.loss)


def layer_bytes(case: Case) -> LayerBytes:
    """Return the bytes that one layer of each kind keeps and needs."""
    layers = case.kinds.layers
    some = tuple([kept(layer, case.share, case.keeping) for layer in layers])
    nothing = replace(case.keeping, recomputed=NO_MODULES)
    return LayerBytes(
        kept=some,
        whole=tuple([kept(layer, case.share, nothing) for layer in layers]) if case.keeping.recomputed else some,
        working=tuple([working(layer, case.share, case.keeping) for layer in layers]),
    )


def activations(case: Case, stage: StageContents, layers: LayerBytes) -> Activations:
    """Return the bytes that a stage keeps and needs while it trains."""
    flights = in_flight(case.layout, stage.index, case.batch.microbatches)
    total = Kept(stream=sum(flights) * case.share.tokens * BATCH_BYTES_PER_TOKEN)
    for chunk, count in zip(stage.chunks, flights, strict=True):
        total += kept_by_chunk(case, chunk, layers) * count
    if stage.output:
        total += _output(case) * flights[-1]
    loss = loss_bytes(case) + flights[-1] * slope_bytes(case) if stage.output else 0
    needed = _working(case, layers)
    if not case.spec.memory.offload_activations:
        return Activations(total, needed, loss, 0)
    # One layer's worth waits for its copy out, another for its copy in.
    staying = min(total.total, 2 * max(one.total for one in layers.kept))
    return Activations(Kept(stream=staying), needed, loss, total.total - staying)


def loss_bytes(case: Case) -> int:
    """Hidden states before the output projection, with their gradient; logits of a chunk; the projection's gradient."""
    share = case.share
    # With sequence parallelism the hidden states are gathered first.
    copies = 2 if share.sequence > 1 else 1
    states = (1 + len(case.shape.mtp_layers)) * copies * share.tokens * share.hidden * share.element_bytes
    width = case.vocabulary // case.shape.hidden
    logits = min(share.tokens, LOSS_CHUNK_TOKENS) * width * (share.element_bytes + FLOAT32_BYTES)
    # Chunks add their part of the weight gradient up in float32.
    return states + logits + output_parameters(case) * FLOAT32_BYTES


def slope_bytes(case: Case) -> int:
    """Return the slopes that the losses of one microbatch keep for the backward pass."""
    share, width = case.share, case.vocabulary // case.shape.hidden
    return (1 + len(case.shape.mtp_layers)) * kept_slope_bytes(case.spec, share.tokens, width, share.element_bytes)


def kept_by_chunk(case: Case, chunk: range, layers: LayerBytes) -> Kept:
    """Return the bytes that one microbatch leaves in the layers of one chunk."""
    recompute = case.spec.training.recompute
    size = recompute.layers or 1
    if recompute.granularity is not RecomputeGranularity.FULL:
        return _layers(case, chunk.start, chunk.stop, layers)
    if recompute.method is RecomputeMethod.BLOCK:
        dropped = min(size, len(chunk))
        inputs = Kept(stream=dropped * layer_input(case.share))
        return inputs + _layers(case, chunk.start + dropped, chunk.stop, layers)
    return Kept(stream=ceil_div(len(chunk), size) * layer_input(case.share))


def _layers(case: Case, start: int, stop: int, layers: LayerBytes) -> Kept:
    total = Kept()
    for one, count in zip(layers.kept, case.kinds.counts(start, stop), strict=True):
        if count:
            total += one * count
    return total


def _output(case: Case) -> Kept:
    """Input and output of the last norm; for every further token its layer, and what is kept beside it."""
    one = layer_input(case.share)
    total = Kept(stream=2 * one)
    for layer in case.shape.mtp_layers:
        inside = Kept(stream=one) if _is_full(case) else kept(layer, case.share, case.keeping)
        total += inside + Kept(stream=beside_mtp_layer(case.share))
    return total


def beside_mtp_layer(share: Share) -> int:
    """Return the bytes that an MTP module keeps beside its layer: embedding, projection, last norm.

    Its three norms keep a number of each token.
    """
    return 5 * layer_input(share) + 3 * share.sequence_tokens * FLOAT32_BYTES


def _working(case: Case, layers: LayerBytes) -> int:
    """The busiest layer's gradients, and what is computed again for it."""
    again = _layers_recomputed(case)
    if again:
        return max(working + again * whole.total for working, whole in zip(layers.working, layers.whole, strict=True))
    return max(
        working + whole.total - some.total
        for working, whole, some in zip(layers.working, layers.whole, layers.kept, strict=True)
    )


def _layers_recomputed(case: Case) -> int:
    """Layers whose activations are all there again at once."""
    recompute = case.spec.training.recompute
    if recompute.granularity is not RecomputeGranularity.FULL:
        return 0
    return 1 if recompute.method is RecomputeMethod.BLOCK else recompute.layers or 1


def _is_full(case: Case) -> bool:
    return case.spec.training.recompute.granularity is RecomputeGranularity.FULL
