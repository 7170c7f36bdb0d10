"""Weights that stay whole under FSDP, beside the layers that are gathered by turns."""

from __future__ import annotations

import pytest

from builders import dense_model, latent_model, moe_model, spec
from moejob_api.layout.sizes import derive_layout
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.case import PlanningCase, prepare_case
from moejob_api.planner.memory.constants import KEPT_WHOLE_BYTES
from moejob_api.planner.memory.whole_layers import count_whole_layers, gathered_parameters, whole_parameters


def case(shape: ModelShape, **parallelism: int) -> PlanningCase:
    job = spec(parallelism=parallelism, memory={"sharding": "FSDP"})
    return prepare_case(job, shape, derive_layout(job.parallelism, job.resources.gpus_per_node))


# Attention, norms and router of one layer.
BESIDE_EXPERTS = 2048 * 4096 * 2 + 2048 * 1024 + 2 * 128 + 2 * 2048 + 2048 * 128


def test_a_mixture_keeps_all_but_its_experts_whole() -> None:
    of = case(moe_model(), data=8)
    assert (count_whole_layers(of), gathered_parameters(of)) == (48, 0)
    assert whole_parameters(of) == 48 * BESIDE_EXPERTS


def test_a_model_without_experts_gathers_every_layer_by_turns() -> None:
    of = case(dense_model(), data=8)
    assert (count_whole_layers(of), whole_parameters(of)) == (0, 0)
    assert gathered_parameters(of) == sum(part.held.dense for part in of.layers) * len(of.shape.layers)


@pytest.mark.parametrize(
    ("experts", "most"),
    [
        pytest.param(8, KEPT_WHOLE_BYTES // 2, id="little"),
        pytest.param(1024, 2 * 1024 * 3 * 2048 * 768, id="as much as the experts of two layers"),
    ],
)
def test_layers_stay_whole_up_to_a_bound(experts: int, most: int) -> None:
    of = case(moe_model(layers=600, experts=experts), data=2)
    assert 1 < count_whole_layers(of) < 600
    beside = of.layers[0].held.dense
    assert whole_parameters(of) == count_whole_layers(of) * beside
    assert most - beside < whole_parameters(of) <= most


def test_layers_of_two_kinds_are_counted_from_the_first() -> None:
    of = case(latent_model(), expert=8, data=2)
    first, later = (part.held.dense for part in of.layers)
    kept = count_whole_layers(of)
    assert 3 < kept < 61
    assert whole_parameters(of) == 3 * first + (kept - 3) * later
