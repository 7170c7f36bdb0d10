"""Layouts on given numbers of GPUs, nearest to an asked one first, found by A* over the group sizes.

Sizes are chosen one after another: the GPU count, tensor, pipeline with its split, expert, context; data is the rest.
Distance is a sum over the sizes. Chosen sizes have their exact cost; open ones cost at least the distance of their
product from the product asked for:

    bound = chosen sizes + |log2(GPUs left / product of the sizes asked for and still open)|

A spec is foreign text: highly composite sizes have millions of layouts. The work is bounded by a count of the sizes
considered and not by a clock, so that a job gets the same layouts on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import gcd, log2, prod
from typing import NamedTuple, Self

from moejob_api.arithmetic import divisors
from moejob_api.job import Spec
from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.layout.sizes import count_gpus
from moejob_api.layout.stages import StageSplit, stage_splits
from moejob_api.models.shape import ModelShape
from moejob_api.planner.pruning import can_divide_batch, can_divide_matrices, can_divide_sequences

# Sizes put beside the others before the search ends with what it has; some 10 ms.
SIZES_CONSIDERED = 2000
GPU_DOUBLING_COST = 2.0
SPLIT_COST = 0.5

# Sizes that are chosen; data follows.
_COMPLETE = 4
_PLAIN = StageSplit()


def layout_distance(parallelism: Parallelism, candidate: Parallelism, wanted_gpus: int) -> float:
    """Return the stated cost of a suggestion."""
    sizes = ("tensor", "pipeline", "expert", "context", "data")
    doublings = sum(_count_doublings(getattr(candidate, name), getattr(parallelism, name)) for name in sizes)
    if parallelism.expert_tensor is not None and parallelism.expert_layout is ExpertLayout.FOLDED:
        doublings += _count_doublings(candidate.expert_tensor or 1, parallelism.expert_tensor)
    splits = ((parallelism.virtual_pipeline or 1) != (candidate.virtual_pipeline or 1)) + (
        _stage_split(parallelism) != _stage_split(candidate)
    )
    return doublings + SPLIT_COST * splits + GPU_DOUBLING_COST * _count_doublings(count_gpus(candidate), wanted_gpus)


def nearest_layouts(
    spec: Spec, shape: ModelShape | None, counts: Sequence[int], wanted_gpus: int
) -> Iterator[Parallelism]:
    """Yield layouts on any of the counts whose sizes divide what they must divide, nearest first."""
    search = _NearestSearch.for_job(spec, shape)
    # Among equals the deepest first, then the smallest sizes: an answer is reached before its siblings are opened.
    queue: list[_QueueEntry] = []
    for count in counts:
        search.push_choice(
            queue, _PartialLayout((), count, count, GPU_DOUBLING_COST * _count_doublings(count, wanted_gpus))
        )
    considered = 0
    while queue:
        choice = heappop(queue)[-1]
        if len(choice.sizes) == _COMPLETE:
            yield search.build_parallelism(choice)
        elif considered < SIZES_CONSIDERED:
            considered += len(search.size_options(choice))
            for longer_choice in search.extend_choice(choice):
                search.push_choice(queue, longer_choice)


class _PartialLayout(NamedTuple):
    """Sizes chosen so far and what they cost. left: GPUs that the open sizes share.

    A tuple, for thousands are made in a review, and a changed copy of a frozen dataclass takes three times as long.
    """

    sizes: tuple[int, ...]
    total: int
    left: int
    cost: float
    virtual_pipeline: int | None = None
    split: StageSplit = _PLAIN


# No two choices have the same key.
_QueueEntry = tuple[tuple[float, int, tuple[int, ...], int, int], _PartialLayout]


@dataclass(frozen=True, slots=True)
class _NearestSearch:
    spec: Spec
    shape: ModelShape | None
    # Asked for, in the order in which sizes are chosen; and the products of those still open after each choice.
    sizes: tuple[int, ...]
    open_products: tuple[int, ...]
    split: StageSplit

    @classmethod
    def for_job(cls, spec: Spec, shape: ModelShape | None) -> Self:
        """Return the search for layouts near to the one that a job asks for."""
        parallelism = spec.parallelism
        # The experts of Folded share no GPUs.
        experts = 1 if parallelism.expert_layout is ExpertLayout.FOLDED else parallelism.expert
        grid = (parallelism.tensor, parallelism.pipeline, experts, parallelism.context, parallelism.data)
        products = tuple(prod(grid[chosen:]) for chosen in range(len(grid)))
        sizes = (parallelism.tensor, parallelism.pipeline, parallelism.expert, parallelism.context)
        return cls(spec, shape, sizes, products, _stage_split(parallelism))

    @property
    def _job_parallelism(self) -> Parallelism:
        return self.spec.parallelism

    @property
    def _is_folded(self) -> bool:
        return self._job_parallelism.expert_layout is ExpertLayout.FOLDED

    def push_choice(self, queue: list[_QueueEntry], choice: _PartialLayout) -> None:
        """Queue a choice under the least that any layout with these sizes costs."""
        bound = choice.cost + self._least_remaining_cost(choice)
        key = (round(bound, 6), -len(choice.sizes), choice.sizes, choice.total, choice.virtual_pipeline or 0)
        heappush(queue, (key, choice))

    def size_options(self, choice: _PartialLayout) -> Sequence[int]:
        """Return the values that the next size may have by the GPUs alone."""
        tensor = choice.sizes[0] if choice.sizes else 1
        match len(choice.sizes):
            case 0:
                return divisors(gcd(choice.total, min(choice.total, self.spec.resources.gpus_per_node)))
            case 2 if self.shape is not None:
                inside = choice.left * tensor if self._is_folded else choice.left
                return divisors(gcd(inside, self.shape.experts.count if self.shape.experts else 1))
            case 2 if self._is_folded:
                return divisors(choice.left * tensor)
            case _:
                return divisors(choice.left)

    def extend_choice(self, choice: _PartialLayout) -> Iterator[_PartialLayout]:
        """Yield the choice with its next size, for every value that divides what it must divide."""
        for size in self.size_options(choice):
            match len(choice.sizes):
                case 0 if self.shape is None or can_divide_matrices(self.spec, self.shape, size):
                    yield self._with_size(choice, size, choice.left // size)
                case 1:
                    yield from self._with_cuts(self._with_size(choice, size, choice.left // size))
                case 2:
                    yield self._with_size(choice, size, choice.left if self._is_folded else choice.left // size)
                case 3 if can_divide_sequences(self.spec, self.shape, choice.sizes[0], size):
                    data = choice.left // size
                    if can_divide_batch(self.spec, data, self.spec.training.micro_batch_size):
                        yield self._complete_choice(self._with_size(choice, size, data))
                case _:
                    pass

    def build_parallelism(self, choice: _PartialLayout) -> Parallelism:
        """Return the complete choice as a job would have it."""
        tensor, pipeline, expert, context = choice.sizes
        return self._job_parallelism.model_copy(
            update={
                "tensor": tensor,
                "pipeline": pipeline,
                "context": context,
                "expert": expert,
                "data": choice.left,
                "expert_tensor": self._expert_tensor(choice),
                "virtual_pipeline": choice.virtual_pipeline,
                "first_stage_layers": choice.split.first_stage_layers,
                "last_stage_layers": choice.split.last_stage_layers,
                "embedding_counts_as_layer": choice.split.embedding_counts_as_layer,
                "loss_counts_as_layer": choice.split.loss_counts_as_layer,
            }
        )

    def _with_size(self, choice: _PartialLayout, size: int, left: int) -> _PartialLayout:
        doublings = _count_doublings(size, self.sizes[len(choice.sizes)])
        return choice._replace(sizes=(*choice.sizes, size), left=left, cost=choice.cost + doublings)

    def _with_cuts(self, choice: _PartialLayout) -> Iterator[_PartialLayout]:
        """Yield the ways to cut the layers, first with the chunks that were asked for, then without."""
        parallelism, pipeline = self._job_parallelism, choice.sizes[-1]
        for chunks in dict.fromkeys((parallelism.virtual_pipeline if pipeline > 1 else None, None)):
            for split in self._possible_splits(pipeline, chunks or 1):
                differs = ((parallelism.virtual_pipeline or 1) != (chunks or 1)) + (self.split != split)
                yield choice._replace(virtual_pipeline=chunks, split=split, cost=choice.cost + SPLIT_COST * differs)

    def _possible_splits(self, pipeline: int, chunks: int) -> tuple[StageSplit, ...]:
        if self.shape is None:
            return (self.split,)
        return stage_splits(len(self.shape.layers), pipeline, chunks)[:1]

    def _complete_choice(self, choice: _PartialLayout) -> _PartialLayout:
        doublings = _count_doublings(choice.left, self._job_parallelism.data)
        if self._job_parallelism.expert_tensor is not None and self._is_folded:
            doublings += _count_doublings(self._expert_tensor(choice) or 1, self._job_parallelism.expert_tensor)
        return choice._replace(cost=choice.cost + doublings)

    def _expert_tensor(self, choice: _PartialLayout) -> int | None:
        _, pipeline, expert, _ = choice.sizes
        share = self._job_parallelism.expert_tensor or 1
        if not self._is_folded or share == 1 or choice.total // pipeline % (share * expert):
            return None
        return share

    def _least_remaining_cost(self, choice: _PartialLayout) -> float:
        """Return the least distance that the open sizes together can have."""
        if len(choice.sizes) == _COMPLETE:
            return 0.0
        return _count_doublings(choice.left, self.open_products[len(choice.sizes)])


def _count_doublings(size: int, wanted_size: int) -> float:
    return abs(log2(size / wanted_size))


def _stage_split(parallelism: Parallelism) -> StageSplit:
    return StageSplit(
        parallelism.first_stage_layers,
        parallelism.last_stage_layers,
        parallelism.embedding_counts_as_layer,
        parallelism.loss_counts_as_layer,
    )
