"""A spec comes from a stranger: answering it takes a bounded number of calls, whatever sizes it asks for."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest

from builders import dense_model, latent_model, moe_model, spec
from calls import count_calls
from moejob_api.arithmetic import divisors
from moejob_api.job import Spec
from moejob_api.job.base import MOST_RANKS_OF_A_POD
from moejob_api.layout.sizes import count_gpus
from moejob_api.models.shape import ModelShape
from moejob_api.planner.nearest import layout_distance, nearest_layouts
from moejob_api.planner.plan import plan_job

# Some 100 ms of a core.
CALLS = 400_000
COMPOSITE = (1, 2, 4, 12, 24, 60, 120, 240, 360, 512, 840, 1260, 2520, 5040, 10_080, 27_720, 50_400)
MODELS: tuple[ModelShape | None, ...] = (None, moe_model(), latent_model())


@pytest.mark.parametrize("shape", MODELS, ids=["unseen", "experts", "latent"])
@pytest.mark.parametrize("layout", ["Product", "Folded"])
def test_highly_composite_sizes_are_refused_with_bounded_work(shape: ModelShape | None, layout: str) -> None:
    sizes = {"tensor": 60, "pipeline": 12, "context": 7, "data": 24, "expertLayout": layout}
    asked = spec(parallelism=sizes, training={"globalBatchSize": 720_720}, resources={"gpusPerNode": 60})
    assert count_calls(lambda: plan_job(asked, shape)) < CALLS


@pytest.mark.parametrize("seed", range(40))
def test_drawn_hostile_sizes_take_bounded_work(seed: int) -> None:
    draw = random.Random(seed)
    sizes: dict[str, Any] = {
        name: draw.choice(COMPOSITE)
        for name in ("tensor", "pipeline", "expert", "context", "data")
        if draw.random() < 0.5
    }
    sizes |= {"expertLayout": draw.choice(("Product", "Folded")), "virtualPipeline": draw.choice((None, 2, 3, 7))}
    sections: dict[str, Any] = {
        "method": draw.choice(("SFT", "GRPO")),
        "parallelism": sizes,
        "training": {"globalBatchSize": draw.choice((1, 7, 5040, 720_720))},
        "resources": {
            "gpusPerNode": draw.choice([size for size in COMPOSITE if size <= MOST_RANKS_OF_A_POD]),
            "gpuMemoryGiB": draw.choice((None, 1, 16, 80)),
            "memory": draw.choice((None, "1Gi")),
        },
    }
    asked, shape = spec(**sections), draw.choice(MODELS)
    assert count_calls(lambda: plan_job(asked, shape)) < CALLS


def test_the_layers_of_a_deep_model_are_not_compared_for_every_size() -> None:
    """Found by climbing: 94 layers, and a global batch and a context that nearly every size divides."""
    deep = moe_model(layers=94)
    sizes = {"tensor": 8, "pipeline": 2, "expert": 360, "data": 128, "expertTensor": 4, "expertLayout": "Folded"}
    asked = spec(
        method="GRPO",
        parallelism=sizes,
        training={"globalBatchSize": 720_720, "lora": {"rank": 16}},
        memory={"sharding": "ZeRO2"},
        resources={"gpusPerNode": 4},
        grpo={"rollout": {"tensor": 8}},
    )
    assert count_calls(lambda: plan_job(asked, deep)) < CALLS


def test_layouts_that_only_the_memory_of_the_host_refuses_are_not_explained_one_by_one() -> None:
    """Found by climbing: each of 120 layouts fits its GPUs, and none a pod of so little memory."""
    sizes: dict[str, Any] = {"tensor": 4, "pipeline": 12, "expert": 720, "context": 128, "data": 4}
    asked = spec(
        parallelism=sizes | {"expertTensor": 2, "virtualPipeline": 7, "expertLayout": "Folded", "firstStageLayers": 3},
        training={"globalBatchSize": 55_440, "microBatchSize": 1, "lora": {"rank": 16}},
        resources={"gpusPerNode": 64, "gpuMemoryGiB": 141, "memory": "1Gi"},
    )
    assert count_calls(lambda: plan_job(asked, dense_model(layers=126, heads=128))) < CALLS


def test_what_no_setting_makes_fit_is_refused_with_bounded_work() -> None:
    asked = spec(method="GRPO", parallelism={"expert": 8}, resources={"gpuMemoryGiB": 1})
    assert count_calls(lambda: plan_job(asked, moe_model())) < CALLS


@pytest.mark.parametrize("layout", ["Product", "Folded"])
@pytest.mark.parametrize("shape", [None, moe_model()], ids=["unseen", "experts"])
def test_layouts_come_nearest_first_and_none_is_missing(layout: str, shape: ModelShape | None) -> None:
    asked = spec(
        parallelism={"tensor": 2, "pipeline": 3, "expert": 4, "expertLayout": layout, "expertTensor": None},
        training={"globalBatchSize": 1024},
    )
    found = list(nearest_layouts(asked, shape, [16, 32], 32))
    away = [round(layout_distance(asked.parallelism, layout, 32), 6) for layout in found]
    assert away == sorted(away)
    assert len(found) == len(set(found)) == len(set(every_layout(asked, shape, (16, 32))))


def every_layout(asked: Spec, shape: ModelShape | None, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the group sizes of all layouts that divide, found by trying them all."""
    folded = asked.parallelism.expert_layout == "Folded"
    return [
        (tensor, pipeline, context, expert, data)
        for count in counts
        for tensor in divisors(8)
        for pipeline in divisors(count)
        for context in divisors(count)
        for expert in divisors(count)
        for data in divisors(count)
        if tensor * pipeline * context * data * (1 if folded else expert) == count
        and count // pipeline % expert == 0
        and (shape is None or (shape.experts is not None and shape.experts.count % expert == 0))
        and (shape is None or tensor_and_pipeline_suit(shape, tensor, pipeline))
    ]


def tensor_and_pipeline_suit(shape: ModelShape, tensor: int, pipeline: int) -> bool:
    """Return true when 48 layers can be cut so: evenly, with counted ends, or with ends of their own."""
    heads = all(getattr(attention, "heads", tensor) % tensor == 0 for attention in shape.attention_kinds())
    return heads and pipeline <= len(shape.layers)


def test_an_ordinary_refusal_still_gets_layouts_on_the_same_gpus() -> None:
    asked = spec(parallelism={"tensor": 3, "expert": 8}, training={"globalBatchSize": 96})
    result = plan_job(asked, moe_model())
    assert {found.fit.gpus for found in result.suggestions[:1]} == {24}
    assert all(count_gpus(found.parallelism) == found.fit.gpus for found in result.suggestions)


def test_the_same_job_gets_the_same_layouts_however_many_are_taken() -> None:
    asked = spec(parallelism={"tensor": 60, "data": 84}, resources={"gpusPerNode": 60})
    first = list(islice(nearest_layouts(asked, None, [5040], 5040), 5))
    assert first == list(nearest_layouts(asked, None, [5040], 5040))[:5]
