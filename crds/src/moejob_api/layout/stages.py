"""The layers of each pipeline stage, as Megatron divides them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moejob_api.job.parallelism import Parallelism


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The layers of one pipeline stage, chunk by chunk (one chunk unless the schedule is interleaved)."""

    chunks: tuple[range, ...]

    @property
    def layer_count(self) -> int:
        """Layers of all chunks."""
        return sum(len(chunk) for chunk in self.chunks)


def layers_per_stage(parallelism: Parallelism, layers: int) -> tuple[int, ...] | None:
    """Layers of every stage, or None when they do not divide evenly."""
    slots = _slots_per_stage(parallelism, layers)
    if slots is None:
        return None
    counts = list(slots)
    counts[0] -= parallelism.embedding_counts_as_layer
    counts[-1] -= parallelism.loss_counts_as_layer
    return tuple(counts)


def pipeline_stages(parallelism: Parallelism, layers: int) -> tuple[StageLayers, ...] | None:
    """Every stage with the indices of its layers, or None when the layers do not divide.

    Interleaved chunks are laid out chunk by chunk over all stages: chunk 0 of every stage comes before chunk 1 of any.
    """
    slots = _slots_per_stage(parallelism, layers)
    chunks = parallelism.virtual_pipeline or 1
    if slots is None or any(count % chunks for count in slots):
        return None
    sizes = [[count // chunks for count in slots] for _ in range(chunks)]
    sizes[0][0] -= parallelism.embedding_counts_as_layer
    sizes[-1][-1] -= parallelism.loss_counts_as_layer
    if min(min(row) for row in sizes) < 0:
        return None
    start = 0
    stage_ranges: list[list[range]] = [[] for _ in slots]
    for row in sizes:
        for stage, size in enumerate(row):
            stage_ranges[stage].append(range(start, start + size))
            start += size
    return tuple(StageLayers(tuple(ranges)) for ranges in stage_ranges)


def _slots_per_stage(parallelism: Parallelism, layers: int) -> list[int] | None:
    """Slots of every stage; the embedding and the loss may take one each."""
    first, last = parallelism.first_stage_layers, parallelism.last_stage_layers
    size = parallelism.pipeline
    if size == 1:
        # A single stage holds everything, whatever the split of first and last says.
        all_slots = layers + parallelism.embedding_counts_as_layer + parallelism.loss_counts_as_layer
        return [all_slots] if first in (None, layers) and last in (None, layers) else None
    if first is not None or last is not None:
        return _uneven_slots(size, layers, first, last)
    slots = layers + parallelism.embedding_counts_as_layer + parallelism.loss_counts_as_layer
    return [slots // size] * size if slots % size == 0 else None


def _uneven_slots(size: int, layers: int, first: int | None, last: int | None) -> list[int] | None:
    between = size - (first is not None) - (last is not None)
    remaining_layers = layers - (first or 0) - (last or 0)
    if remaining_layers < 0 or (between == 0) != (remaining_layers == 0) or (between and remaining_layers % between):
        return None
    middle = [remaining_layers // between] * between if between else []
    return ([first] if first is not None else []) + middle + ([last] if last is not None else [])


@dataclass(frozen=True, slots=True)
class StageSplit:
    """The cut of the layers into stages: the four settings of spec.parallelism that decide it."""

    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    embedding_counts_as_layer: bool = False
    loss_counts_as_layer: bool = False


# Bounded: a strange spec asks for sizes that no other ever has.
@lru_cache(maxsize=4096)
def stage_splits(layers: int, pipeline: int, chunks: int = 1) -> tuple[StageSplit, ...]:
    """The splits that work, most even first; at most three, none when there are too few layers.

    A plain even split is returned alone: nothing beats it.
    """
    if pipeline * chunks > layers + 2:
        return ()
    if layers % (pipeline * chunks) == 0:
        return (StageSplit(),)
    if pipeline == 1:
        return ()
    counted = [
        StageSplit(embedding_counts_as_layer=embedding, loss_counts_as_layer=loss)
        for embedding, loss in ((True, True), (False, True), (True, False))
        if (layers + embedding + loss) % (pipeline * chunks) == 0
    ]
    return (*counted, *_uneven_splits(layers, pipeline, chunks))[:3]


def _uneven_splits(layers: int, pipeline: int, chunks: int) -> list[StageSplit]:
    """Splits with a first and a last stage of their own; the ends also hold the embedding and the loss."""
    candidates: list[tuple[int, int, StageSplit]] = []
    even = layers // pipeline
    for middle in {max(chunks, (even + step) // chunks * chunks) for step in (-chunks, 0, chunks)}:
        ends = layers - middle * (pipeline - 2)
        last = ends // 2 // chunks * chunks
        first = ends - last
        if last < 1 or first % chunks:
            continue
        fullest = max(first, last, middle if pipeline > 2 else 0)
        candidates.append((fullest, abs(first - middle) + abs(last - middle), StageSplit(first, last)))
    ranked = sorted(candidates, key=lambda entry: entry[:2])
    return [split for _, _, split in ranked]
