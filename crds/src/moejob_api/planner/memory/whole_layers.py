"""Weights that stay whole under FSDP beside the layers that replicas gather by turns. The trainer asks for them too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from moejob_api.planner.memory.case import Case
from moejob_api.planner.memory.constants import FSDP_UNITS, KEPT_WHOLE_BYTES


def layers_kept_whole(case: Case) -> int:
    """Return how many of the first layers keep their weights beside experts whole until the update.

    Experts are most of a mixture's weights, and replicas gather them by turns. The other weights are few: layers that
    keep theirs are gathered once a step and not twice for every micro batch. They may take KEPT_WHOLE_BYTES, or as much
    as the experts that are whole at once if that is more. A model without experts keeps none.
    """
    return _kept(case, _beside_experts(case))


def kept_whole(case: Case) -> int:
    """Return the parameters that those layers keep whole."""
    beside = _beside_experts(case)
    return sum(beside[: _kept(case, beside)])


def gathered_by_turns(case: Case) -> int:
    """Return the parameters beside experts that are gathered for either pass of each micro batch."""
    beside = _beside_experts(case)
    return sum(beside[_kept(case, beside) :])


def _kept(case: Case, beside: Sequence[int]) -> int:
    routed = max(part.held.routed for part in case.layers)
    if not routed:
        return 0
    # In bfloat16 2 GiB hold 2^30 parameters: layers with 20 M beside their experts fit 53 times.
    most = max(KEPT_WHOLE_BYTES // case.element_bytes, FSDP_UNITS * routed)
    return sum(kept <= most for kept in accumulate(beside))


def _beside_experts(case: Case) -> list[int]:
    """Return the parameters of each layer on one GPU that are not its experts'."""
    layers = range(len(case.shape.layers))
    of_kind = [part.held.dense for part in case.layers]
    return [of_kind[case.kinds.counts(index, index + 1).index(1)] for index in layers]
