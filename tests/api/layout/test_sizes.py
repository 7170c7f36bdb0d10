"""Group sizes: both of Megatron's grids are exact for every layout the rules accept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import spec
from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.layout.sizes import Layout, count_gpus, derive_layout

SIZE = st.sampled_from((1, 2, 3, 4, 6, 8))


def sizes(**values: object) -> Parallelism:
    return spec(parallelism=values).parallelism


@pytest.mark.parametrize(
    ("asked", "is_split"),
    [
        pytest.param({"tensor": 2}, True, id="by itself"),
        pytest.param({"tensor": 2, "sequence": False}, False, id="not where that is asked for"),
        pytest.param({"sequence": True}, False, id="over one GPU there is nothing to split"),
    ],
)
def test_a_sequence_is_split_over_a_tensor_group(asked: dict[str, object], is_split: bool) -> None:
    assert derive_layout(sizes(**asked), gpus_per_node=8).sequence_parallel is is_split


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param(
            {"pipeline": 16, "expert": 32},
            {"gpus": 512, "nodes": 64, "data": 32, "expert_tensor": 1, "expert_data": 1},
            id="DeepSeek-V3 as a product takes 512 GPUs",
        ),
        pytest.param(
            {"tensor": 2, "pipeline": 2, "expert": 4},
            {"gpus": 16, "nodes": 2, "data": 4, "expert_tensor": 2, "expert_data": 1},
            id="product makes every expert group a data group",
        ),
        pytest.param(
            {"tensor": 4, "pipeline": 8, "expert": 4, "expertLayout": "Folded"},
            {"gpus": 32, "nodes": 4, "data": 1, "expert_tensor": 1, "expert_data": 1},
            id="folded experts lie across the tensor group",
        ),
        pytest.param(
            {"tensor": 2, "context": 2, "expert": 2, "data": 3},
            {"gpus": 24, "data": 6, "expert_data": 6},
            id="context ranks replicate experts under product",
        ),
        pytest.param(
            {"tensor": 2, "data": 4, "expert": 2, "expertTensor": 2, "expertLayout": "Folded"},
            {"gpus": 8, "nodes": 1, "gpus_per_pod": 8, "expert_data": 2},
            id="expert tensor of its own",
        ),
        pytest.param({"data": 4}, {"gpus": 4, "nodes": 1, "gpus_per_pod": 4}, id="one partial node"),
    ],
)
def test_a_parallelism_gives_these_sizes(asked: dict[str, object], expected: dict[str, int]) -> None:
    result = derive_layout(sizes(**asked), gpus_per_node=8)
    assert {name: getattr(result, name) for name in expected} == expected


@given(SIZE, SIZE, SIZE, SIZE, SIZE)
def test_product_always_satisfies_both_grids(tensor: int, pipeline: int, expert: int, context: int, data: int) -> None:
    asked = Parallelism(tensor=tensor, pipeline=pipeline, expert=expert, context=context, data=data)
    assert both_grids_are_exact(derive_layout(asked, 8))
    assert count_gpus(asked) == tensor * pipeline * expert * context * data


@given(SIZE, SIZE, SIZE, st.data())
def test_folded_satisfies_both_grids_when_experts_divide_a_stage(
    tensor: int, context: int, data: int, draw: st.DataObject
) -> None:
    inside = tensor * context * data
    share = draw.draw(st.sampled_from([d for d in range(1, inside + 1) if inside % d == 0]))
    asked = Parallelism(
        tensor=tensor, context=context, data=data, expert=share, expert_layout=ExpertLayout.FOLDED, pipeline=2
    )
    assert both_grids_are_exact(derive_layout(asked, 8))


def both_grids_are_exact(sizes: Layout) -> bool:
    dense = sizes.tensor * sizes.context * sizes.data * sizes.pipeline
    experts = sizes.expert_tensor * sizes.expert * sizes.expert_data * sizes.pipeline
    return dense == experts == sizes.gpus
