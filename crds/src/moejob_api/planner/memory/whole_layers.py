"""Weights that stay whole under FSDP beside the layers that replicas gather by turns. The trainer asks for them too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from moejob_api.planner.memory.case import PlanningCase
from moejob_api.planner.memory.constants import FSDP_UNITS, KEPT_WHOLE_BYTES


def count_whole_layers(case: PlanningCase) -> int:
    """Return how many of the first layers keep their weights beside experts whole until the update.

    Experts are most of a mixture's weights, and replicas gather them by turns. The other weights are few: layers that
    keep theirs are gathered once a step and not twice for every micro batch. They may take KEPT_WHOLE_BYTES, or as much
    as the experts that are whole at once if that is more. A model without experts keeps none.
    """
    return _whole_layer_count(case, _beside_experts(case))


def whole_parameters(case: PlanningCase) -> int:
    """Return the parameters that those layers keep whole."""
    beside = _beside_experts(case)
    return sum(beside[: _whole_layer_count(case, beside)])


def gathered_parameters(case: PlanningCase) -> int:
    """Return the parameters beside experts that are gathered for either pass of each micro batch."""
    beside = _beside_experts(case)
    return sum(beside[_whole_layer_count(case, beside) :])


def _whole_layer_count(case: PlanningCase, beside: Sequence[int]) -> int:
    routed = max(part.held.routed for part in case.layers)
    if not routed:
        return 0
    # In bfloat16 2 GiB hold 2^30 parameters: layers with 20 M beside their experts fit 53 times.
    most = max(KEPT_WHOLE_BYTES // case.element_bytes, FSDP_UNITS * routed)
    return sum(parameters <= most for parameters in accumulate(beside))


def _beside_experts(case: PlanningCase) -> list[int]:
    """Return the parameters of each layer on one GPU that are not its experts'."""
    layers = range(len(case.shape.layers))
    dense_of_kind = [part.held.dense for part in case.layers]
    return [dense_of_kind[case.kinds.count_layers(index, index + 1).index(1)] for index in layers]
