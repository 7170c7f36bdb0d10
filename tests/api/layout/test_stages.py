"""Pipeline stages hold every layer exactly once, in order, as evenly as was asked."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejob_api.job.parallelism import Parallelism
from moejob_api.layout.stages import layers_per_stage, pipeline_stages, stage_splits


@pytest.mark.parametrize(
    ("asked", "layers", "expected"),
    [
        pytest.param(Parallelism(pipeline=4), 32, (8, 8, 8, 8), id="even"),
        pytest.param(Parallelism(), 61, (61,), id="one stage"),
        pytest.param(
            Parallelism(pipeline=16, first_stage_layers=3, last_stage_layers=2), 61, (3, *(4,) * 14, 2), id="both ends"
        ),
        pytest.param(Parallelism(pipeline=8, last_stage_layers=10), 94, (*(12,) * 7, 10), id="last only"),
        pytest.param(Parallelism(pipeline=4, first_stage_layers=13), 61, (13, 16, 16, 16), id="first only"),
        pytest.param(
            Parallelism(pipeline=8, embedding_counts_as_layer=True, loss_counts_as_layer=True),
            94,
            (11, *(12,) * 6, 11),
            id="embedding and loss take a slot each",
        ),
        pytest.param(Parallelism(pipeline=8), 94, None, id="uneven without a split"),
        pytest.param(Parallelism(pipeline=16, last_stage_layers=6), 94, None, id="what is left does not divide"),
        pytest.param(Parallelism(pipeline=3, first_stage_layers=4, last_stage_layers=4), 8, None, id="empty middle"),
        pytest.param(Parallelism(pipeline=2, first_stage_layers=5, last_stage_layers=4), 8, None, id="ends too long"),
    ],
)
def test_layers_divide_like_this(asked: Parallelism, layers: int, expected: tuple[int, ...] | None) -> None:
    assert layers_per_stage(asked, layers) == expected


def test_interleaved_chunks_go_round_all_stages() -> None:
    asked = Parallelism(pipeline=2, virtual_pipeline=2)
    found = pipeline_stages(asked, 8)
    assert found is not None
    assert [stage.chunks for stage in found] == [(range(2), range(4, 6)), (range(2, 4), range(6, 8))]


def test_chunks_that_do_not_divide_a_stage_are_no_split() -> None:
    assert pipeline_stages(Parallelism(pipeline=16, virtual_pipeline=32), 128) is None


@given(
    st.integers(1, 130),
    st.integers(1, 20),
    st.integers(1, 4),
)
def test_every_proposed_split_places_every_layer_once_and_leaves_no_stage_empty(
    layers: int, pipeline: int, chunks: int
) -> None:
    for split in stage_splits(layers, pipeline, chunks):
        asked = Parallelism(pipeline=pipeline, virtual_pipeline=chunks, **asdict(split))
        found = pipeline_stages(asked, layers)
        assert found is not None
        in_order = [layer for chunk in range(chunks) for stage in found for layer in stage.chunks[chunk]]
        assert in_order == list(range(layers))
        if pipeline * chunks <= layers and not (split.embedding_counts_as_layer or split.loss_counts_as_layer):
            assert all(stage.layer_count for stage in found)


def test_the_published_split_of_deepseek_is_proposed() -> None:
    first = stage_splits(61, 16)[0]
    assert (first.first_stage_layers, first.last_stage_layers) == (3, 2)
