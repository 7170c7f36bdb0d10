"""Boxes: a range of a flat tensor is exactly its boxes, in order, and two boxes share exactly what both hold."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from moejob_trainer.checkpoints.shards import ShardSpec, shards_of_range

_SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(_SHAPES)
    elements = math.prod(shape)
    start = draw(st.integers(0, elements))
    return shape, start, draw(st.integers(start, elements))


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], ShardSpec, ShardSpec]:
    shape = draw(_SHAPES)
    return shape, _box_in(draw, shape), _box_in(draw, shape)


def _box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> ShardSpec:
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True))
    return ShardSpec(starts, sizes)


def _whole(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements are their own flat indices."""
    return torch.arange(math.prod(shape)).view(shape)


@given(_ranges())
def test_the_boxes_of_a_range_are_the_range_in_its_order(range_: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = range_
    whole = _whole(shape)
    read = [
        index for shard in shards_of_range(shape, start, stop) for index in whole[shard.index_slices].flatten().tolist()
    ]
    assert read == [*range(start, stop)]


@given(_ranges())
def test_a_range_takes_few_boxes(range_: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = range_
    shards = [*shards_of_range(shape, start, stop)]
    assert len(shards) <= max(1, 2 * len(shape) - 1)
    assert all(shard.element_count > 0 for shard in shards)


@given(_pairs())
def test_an_overlap_is_what_both_hold(pair: tuple[tuple[int, ...], ShardSpec, ShardSpec]) -> None:
    shape, one, other = pair
    whole = _whole(shape)
    shared = {*whole[one.index_slices].flatten().tolist()} & {*whole[other.index_slices].flatten().tolist()}
    common = one.overlap(other)
    assert common == other.overlap(one)
    assert (set() if common is None else {*whole[common.index_slices].flatten().tolist()}) == shared


@given(_pairs())
def test_an_overlap_seen_from_both_boxes_is_the_same_part(pair: tuple[tuple[int, ...], ShardSpec, ShardSpec]) -> None:
    shape, one, other = pair
    whole, common = _whole(shape), one.overlap(other)
    if common is None:
        return
    seen = [
        whole[shard.index_slices][common.shift_by([-at for at in shard.start]).index_slices] for shard in (one, other)
    ]
    assert torch.equal(*seen)
    assert torch.equal(seen[0], whole[common.index_slices])
