"""Layouts near a rejected one that would be accepted.

Distance, the stated cost of a suggestion, counts doublings: 1 for every factor of two by which a size changes, 0.5 for
another split of the layers into stages, and 2 for every factor of two in the number of GPUs, because GPUs are what
people cannot change. Nothing but spec.parallelism is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import gcd, log2

from moejob_api.arithmetic import ceil_div, divisors
from moejob_api.job import Spec
from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.layout.sizes import gpus
from moejob_api.layout.stages import StageSplit, stage_splits
from moejob_api.models.shape import Attention, GroupedAttention, LatentAttention, LinearAttention, ModelShape

SAME_COUNT_LIMIT = 3
OTHER_COUNT_LIMIT = 3
# Bounds on the work, so that a job nothing can save is refused in milliseconds too.
CANDIDATES_TRIED = 250
GPU_DOUBLING_COST = 2.0
SPLIT_COST = 0.5


@dataclass(frozen=True, slots=True)
class Fit:
    """What an accepted layout takes."""

    gpus: int
    nodes: int
    per_gpu_bytes: int | None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A layout that would be accepted, and how far it is from what was asked."""

    parallelism: Parallelism
    fit: Fit
    distance: float


# Judges a whole job: None when it is refused.
Judge = Callable[[Spec], Fit | None]


def suggestions(spec: Spec, shape: ModelShape | None, wanted_gpus: int, judge: Judge) -> tuple[Suggestion, ...]:
    """Accepted layouts on the wanted GPUs, nearest first, then on the nearest other counts."""
    same = [wanted_gpus] if _fills_nodes(wanted_gpus, spec.resources.gpus_per_node) else []
    others = [count for count in _other_counts(wanted_gpus, spec.resources.gpus_per_node) if count not in same]
    return (
        *islice(_accepted(spec, _ranked(spec, shape, same, wanted_gpus), judge), SAME_COUNT_LIMIT),
        *islice(_accepted(spec, _ranked(spec, shape, others, wanted_gpus), judge), OTHER_COUNT_LIMIT),
    )


def distance(asked: Parallelism, candidate: Parallelism, wanted_gpus: int) -> float:
    """The stated cost of a suggestion."""
    sizes = ("tensor", "pipeline", "expert", "context", "data")
    moved = sum(abs(log2(getattr(candidate, name) / getattr(asked, name))) for name in sizes)
    if asked.expert_tensor is not None and asked.expert_layout is ExpertLayout.FOLDED:
        moved += abs(log2((candidate.expert_tensor or 1) / asked.expert_tensor))
    splits = ((asked.virtual_pipeline or 1) != (candidate.virtual_pipeline or 1)) + (
        _split_of(asked) != _split_of(candidate)
    )
    return moved + SPLIT_COST * splits + GPU_DOUBLING_COST * abs(log2(gpus(candidate) / wanted_gpus))


def _ranked(
    spec: Spec, shape: ModelShape | None, counts: list[int], wanted_gpus: int
) -> list[tuple[float, Parallelism]]:
    """Candidates on any of the counts with their distances, nearest first."""
    candidates = [
        (distance(spec.parallelism, candidate, wanted_gpus), candidate)
        for count in counts
        for candidate in _candidates(spec, shape, count)
    ]
    # Ties are broken by the sizes themselves, so that the same job always gets the same advice.
    candidates.sort(key=lambda entry: (round(entry[0], 6), entry[1].tensor, entry[1].pipeline, entry[1].expert))
    return candidates[:CANDIDATES_TRIED]


def _accepted(spec: Spec, ranked: list[tuple[float, Parallelism]], judge: Judge) -> Iterator[Suggestion]:
    for cost, candidate in ranked:
        fit = judge(spec.model_copy(update={"parallelism": candidate}))
        if fit is not None:
            yield Suggestion(candidate, fit, cost)


def _candidates(spec: Spec, shape: ModelShape | None, count: int) -> Iterator[Parallelism]:
    """Layouts on exactly `count` GPUs whose sizes divide what they must divide."""
    per_pod = min(count, spec.resources.gpus_per_node)
    heads, experts, layers = _head_divisor(shape), _expert_count(shape), len(shape.layers) if shape else None
    for tensor in divisors(per_pod):
        if heads is not None and heads % tensor:
            continue
        for pipeline in divisors(count // tensor):
            if layers is not None and pipeline > layers + 2:
                break
            rest = count // tensor // pipeline
            for split in _splits(spec.parallelism, layers, pipeline):
                yield from _spread(spec.parallelism, (tensor, pipeline, rest), experts, split)


def _spread(
    asked: Parallelism, sizes: tuple[int, int, int], experts: int | None, split: dict[str, object]
) -> Iterator[Parallelism]:
    """Every way to share what tensor and pipeline leave over among context, expert and data."""
    tensor, pipeline, rest = sizes
    for context in divisors(rest):
        folded = asked.expert_layout is ExpertLayout.FOLDED
        inside = rest * tensor if folded else rest // context
        for expert in divisors(inside):
            if experts is not None and experts % expert:
                continue
            share = asked.expert_tensor or 1
            yield asked.model_copy(
                update={
                    "tensor": tensor,
                    "pipeline": pipeline,
                    "context": context,
                    "expert": expert,
                    "data": rest // context if folded else rest // context // expert,
                    "expert_tensor": share if folded and share > 1 and inside % (share * expert) == 0 else None,
                    **split,
                }
            )


def _splits(asked: Parallelism, layers: int | None, pipeline: int) -> Iterator[dict[str, object]]:
    """Ways to cut the layers, first with the chunks that were asked for, then without."""
    for chunks in dict.fromkeys((asked.virtual_pipeline if pipeline > 1 else None, None)):
        splits = (_split_of(asked),) if layers is None else stage_splits(layers, pipeline, chunks or 1)[:1]
        for split in splits:
            yield {
                "virtual_pipeline": chunks,
                "first_stage_layers": split.first_stage_layers,
                "last_stage_layers": split.last_stage_layers,
                "embedding_counts_as_layer": split.embedding_counts_as_layer,
                "loss_counts_as_layer": split.loss_counts_as_layer,
            }


def _split_of(parallelism: Parallelism) -> StageSplit:
    return StageSplit(
        parallelism.first_stage_layers,
        parallelism.last_stage_layers,
        parallelism.embedding_counts_as_layer,
        parallelism.loss_counts_as_layer,
    )


def _fills_nodes(count: int, per_node: int) -> bool:
    return count <= per_node or count % per_node == 0


def _other_counts(wanted: int, per_node: int) -> list[int]:
    """The nearest counts that fill nodes: the neighbours, and halves and doubles for what needs more than a nudge."""
    if wanted < per_node:
        inside = [d for d in divisors(per_node) if d != wanted]
        return [*inside, 2 * per_node, 4 * per_node]
    nodes = ceil_div(wanted, per_node)
    near = {nodes - 1, nodes, nodes + 1, nodes // 2, nodes * 2, nodes * 4, nodes * 8}
    return sorted(
        (n * per_node for n in near if n >= 1 and n * per_node != wanted), key=lambda n: abs(log2(n / wanted))
    )


def _head_divisor(shape: ModelShape | None) -> int | None:
    """What the tensor size must divide for the heads' sake; None without a model."""
    if shape is None:
        return None
    return gcd(*(_heads(attention) for attention in shape.attentions()))


def _heads(attention: Attention) -> int:
    match attention:
        case GroupedAttention() | LatentAttention():
            return attention.heads
        case LinearAttention():
            return attention.key_heads


def _expert_count(shape: ModelShape | None) -> int | None:
    if shape is None:
        return None
    return shape.experts.count if shape.experts is not None else 1
