"""Our declared parameters against the counts of moejob_api, which are proven against Transformers; and their slices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_configs import ODD, any_config, config
from moejob_api.layout.ranks import ParallelGroup
from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_api.models.parameters import ParameterCounts, model_weights, mtp_weights
from moejob_api.models.shape import Family, ModelShape
from moejob_api.planner.memory.constants import VOCABULARY_MULTIPLE
from moejob_trainer.model.parameters import Coordinates, Parameter, local_shape, local_slices, model_parameters


def declared(shape: ModelShape) -> ParameterCounts:
    """Our parameters counted by how they are divided."""
    found = Counter[str]()
    for parameter in model_parameters(shape):
        if not parameter.is_buffer:
            found[kind(parameter)] += prod(parameter.shape)
    return ParameterCounts(**found)


def kind(parameter: Parameter) -> str:
    groups = {group for _, group in parameter.divided}
    if groups & {ParallelGroup.EXPERT, ParallelGroup.EXPERT_TENSOR}:
        return "routed"
    if parameter.may_be_whole:
        return "key_value"
    return "tensor" if groups else "replicated"


def padded(values: dict[str, Any]) -> ModelShape:
    """The shape of a config, with a vocabulary that needs no padding."""
    return replace(shape_of(values), vocabulary=3 * VOCABULARY_MULTIPLE)


@pytest.mark.parametrize(("family", "changes"), [pytest.param(*odd[1:], id=odd[0]) for odd in ODD])
def test_an_odd_model_has_as_many_parameters_as_are_counted(family: Family, changes: dict[str, Any]) -> None:
    shape = padded(config(family, **changes))
    assert declared(shape) == model_weights(shape) + mtp_weights(shape)


@pytest.mark.parametrize("family", list(Family))
@settings(max_examples=40)
@given(data=st.data())
def test_any_model_has_as_many_parameters_as_are_counted(family: Family, data: st.DataObject) -> None:
    shape = padded(data.draw(any_config(family)))
    assert declared(shape) == model_weights(shape) + mtp_weights(shape)


@pytest.mark.parametrize("name", catalog.shipped_names())
def test_every_parameter_of_a_shipped_model_has_a_name_of_its_own(name: str) -> None:
    names = [parameter.name for parameter in model_parameters(shape_of(dict(catalog.find_config(name) or {})))]
    assert len(names) == len(set(names))


def test_the_vocabulary_is_padded_alike_in_every_layout() -> None:
    embedding = model_parameters(shape_of(config(Family.LLAMA, vocab_size=129)))[0]
    assert embedding.shape == (256, 24)


@st.composite
def divided_parameters(draw: st.DrawFn) -> tuple[Parameter, dict[ParallelGroup, int]]:
    """A parameter, and group sizes that divide it."""
    sizes = {
        group: draw(st.integers(1, 4))
        for group in (ParallelGroup.TENSOR, ParallelGroup.EXPERT, ParallelGroup.EXPERT_TENSOR)
    }
    groups = draw(st.lists(st.sampled_from([*sizes, None]), min_size=1, max_size=4).filter(_each_once))
    shape = tuple(draw(st.integers(1, 3)) * (sizes[group] if group else 1) for group in groups)
    divided = tuple((axis, group) for axis, group in enumerate(groups) if group)
    return Parameter("x", shape, divided), sizes


def _each_once(groups: list[ParallelGroup | None]) -> bool:
    named = [group for group in groups if group]
    return len(named) == len(set(named))


def coordinates(sizes: dict[ParallelGroup, int]) -> list[Coordinates]:
    return [
        Coordinates(
            tensor,
            sizes[ParallelGroup.TENSOR],
            expert,
            sizes[ParallelGroup.EXPERT],
            width,
            sizes[ParallelGroup.EXPERT_TENSOR],
        )
        for tensor in range(sizes[ParallelGroup.TENSOR])
        for expert in range(sizes[ParallelGroup.EXPERT])
        for width in range(sizes[ParallelGroup.EXPERT_TENSOR])
    ]


@given(drawn=divided_parameters())
def test_the_slices_of_all_ranks_tile_a_parameter(drawn: tuple[Parameter, dict[ParallelGroup, int]]) -> None:
    parameter, sizes = drawn
    places = coordinates(sizes)
    holders = torch.zeros(parameter.shape, dtype=torch.int)
    for place in places:
        part = holders[local_slices(parameter, place)]
        assert part.shape == local_shape(parameter, place)
        part += 1
    copies = len(places) // prod(sizes[group] for _, group in parameter.divided)
    assert bool((holders == copies).all())


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        pytest.param(8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)], id="as many as divide"),
        pytest.param(2, 4, [(0, 2)] * 4, id="fewer heads than ranks"),
        pytest.param(6, 4, [(0, 6)] * 4, id="heads that do not divide"),
    ],
)
def test_keys_and_values_are_whole_on_ranks_that_do_not_divide_them(
    heads: int, size: int, expected: list[tuple[int, int]]
) -> None:
    parameter = Parameter("key_value", (heads, 2), ((0, ParallelGroup.TENSOR),), may_be_whole=True)
    found = [local_slices(parameter, Coordinates(rank, size))[0] for rank in range(size)]
    assert [(part.start, part.stop) for part in found] == expected


def test_other_parameters_are_never_left_whole_in_silence() -> None:
    with pytest.raises(ValueError, match="4 ranks do not divide axis 0"):
        local_slices(Parameter("query", (6, 2), ((0, ParallelGroup.TENSOR),)), Coordinates(0, 4))
