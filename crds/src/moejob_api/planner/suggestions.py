"""Acceptable layouts near a rejected layout.

Distance, the stated cost of a suggestion, counts doublings: 1 for every factor of two by which a size changes, 0.5 for
another split of the layers into stages, and 2 for every factor of two in the number of GPUs, because GPUs are what
people cannot change. Nothing but spec.parallelism is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import log2

from moejob_api.arithmetic import ceil_div, divisors
from moejob_api.job import Spec
from moejob_api.job.parallelism import Parallelism
from moejob_api.models.shape import ModelShape
from moejob_api.planner.nearest import layout_distance, nearest_layouts

SAME_COUNT_LIMIT = 3
OTHER_COUNT_LIMIT = 3
# Bounds on the work, so that a job nothing can save is refused in milliseconds too.
CANDIDATES_TRIED = 60


@dataclass(frozen=True, slots=True)
class LayoutFit:
    """The size of an accepted layout."""

    gpus: int
    nodes: int
    per_gpu_bytes: int | None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A layout that would be accepted, and how far it is from what was asked."""

    parallelism: Parallelism
    fit: LayoutFit
    distance: float


# Validates a whole job: None when it is refused.
Validator = Callable[[Spec], LayoutFit | None]


def find_suggestions(
    spec: Spec, shape: ModelShape | None, wanted_gpus: int, validate: Validator
) -> tuple[Suggestion, ...]:
    """Accepted layouts on the wanted GPUs, nearest first, then on the nearest other counts."""
    same = [wanted_gpus] if _can_fill_nodes(wanted_gpus, spec.resources.gpus_per_node) else []
    other_counts = [count for count in _other_counts(wanted_gpus, spec.resources.gpus_per_node) if count not in same]
    accepted = partial(_accepted_suggestions, spec, shape, validate, wanted_gpus)
    return (
        *islice(accepted(same), SAME_COUNT_LIMIT),
        *islice(accepted(other_counts), OTHER_COUNT_LIMIT),
    )


def _accepted_suggestions(
    spec: Spec, shape: ModelShape | None, validate: Validator, wanted: int, counts: list[int]
) -> Iterator[Suggestion]:
    for candidate in islice(nearest_layouts(spec, shape, counts, wanted), CANDIDATES_TRIED):
        fit = validate(spec.model_copy(update={"parallelism": candidate}))
        if fit is not None:
            yield Suggestion(candidate, fit, layout_distance(spec.parallelism, candidate, wanted))


def _can_fill_nodes(count: int, per_node: int) -> bool:
    return count <= per_node or count % per_node == 0


def _other_counts(wanted: int, per_node: int) -> list[int]:
    """The nearest counts that fill nodes: the neighbours, and halves and doubles for what needs more than a nudge."""
    if wanted < per_node:
        inside = [d for d in divisors(per_node) if d != wanted]
        return [*inside, 2 * per_node, 4 * per_node]
    nodes = ceil_div(wanted, per_node)
    node_counts = {nodes - 1, nodes, nodes + 1, nodes // 2, nodes * 2, nodes * 4, nodes * 8}
    return sorted(
        (n * per_node for n in node_counts if n >= 1 and n * per_node != wanted), key=lambda n: abs(log2(n / wanted))
    )
