"""Our rank map and stage split against what Megatron itself builds, on torch's fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from moejob_api.job.moe import DispatcherKind
from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.layout.expert_nodes import expert_nodes
from moejob_api.layout.ranks import ParallelGroup, group_members, rank_place
from moejob_api.layout.sizes import Layout, derive_layout
from moejob_api.layout.stages import pipeline_stages
from moejob_trainer.distributed.groups import ALONE, Group
from moejob_trainer.megatron.topology import start_groups

FOLDED = ExpertLayout.FOLDED
LAYOUTS = [
    pytest.param(Parallelism(tensor=2, pipeline=2, expert=2), id="8 ranks product"),
    pytest.param(Parallelism(tensor=2, context=2, data=2, expert=4, expert_layout=FOLDED), id="8 ranks folded"),
    pytest.param(
        Parallelism(tensor=2, data=4, expert=2, expert_tensor=2, expert_layout=FOLDED), id="8 ranks expert tensor"
    ),
    pytest.param(Parallelism(tensor=2, pipeline=2, expert=2, context=2), id="16 ranks product with context"),
    pytest.param(
        Parallelism(tensor=4, pipeline=2, data=2, expert=8, expert_layout=FOLDED), id="16 ranks experts across tensor"
    ),
    pytest.param(Parallelism(tensor=2, pipeline=4, expert=2, context=2, data=2), id="64 ranks product"),
    pytest.param(
        Parallelism(tensor=4, pipeline=2, context=2, data=4, expert=8, expert_tensor=2, expert_layout=FOLDED),
        id="64 ranks folded",
    ),
    pytest.param(Parallelism(pipeline=16, expert=4), id="64 ranks DeepSeek-V3"),
]


@pytest.mark.parametrize("asked", LAYOUTS)
def test_every_rank_has_the_groups_megatron_gives_it(asked: Parallelism) -> None:
    sizes = derive_layout(asked, gpus_per_node=8)
    for rank in sampled(sizes):
        with megatron(sizes, rank):
            assert megatron_groups() == {group: group_members(sizes, group, rank) for group in ParallelGroup}
            assert megatron_coordinates() == coordinates(sizes, rank)


@pytest.mark.parametrize(
    ("asked", "node"),
    [
        pytest.param(Parallelism(expert=8), 4, id="2 nodes of 4"),
        pytest.param(Parallelism(expert=8), 2, id="4 nodes of 2"),
        pytest.param(Parallelism(expert=8), 8, id="1 node of 8"),
        pytest.param(Parallelism(tensor=2, expert=4), 4, id="2 nodes of 4, TP2 and ETP2"),
        pytest.param(Parallelism(tensor=2, data=4, expert=8, expert_layout=FOLDED), 4, id="2 nodes of 4, TP2"),
        pytest.param(Parallelism(context=2, data=4, expert=4, expert_layout=FOLDED), 2, id="4 nodes of 2, CP2"),
        pytest.param(Parallelism(pipeline=2, expert=4), 2, id="4 nodes of 2, PP2"),
    ],
)
def test_groups_over_nodes_are_those_of_the_layout(asked: Parallelism, node: int) -> None:
    sizes = derive_layout(asked, node)
    nodes = expert_nodes(sizes, DispatcherKind.FLEX)
    for rank in range(sizes.gpus):
        with fake_world(sizes, rank):
            made = start_groups(sizes, DispatcherKind.FLEX)
            across, inside = made.expert_across, made.expert_inside
            if nodes is None:
                assert (across, inside) == (ALONE, ALONE)
                continue
            assert _ranks(across) == nodes.ranks_across_nodes(rank)
            assert _ranks(inside) == nodes.ranks_inside_node(rank)
            assert made.expert.rank == across.rank * inside.size + inside.rank


def _ranks(group: Group) -> tuple[int, ...]:
    assert group.handle is not None
    return tuple(dist.get_process_group_ranks(group.handle))


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        pytest.param(Parallelism(pipeline=4), 32, id="even"),
        pytest.param(Parallelism(pipeline=16, first_stage_layers=3, last_stage_layers=2), 61, id="both ends"),
        pytest.param(Parallelism(pipeline=4, first_stage_layers=13), 61, id="first only"),
        pytest.param(
            Parallelism(pipeline=8, embedding_counts_as_layer=True, loss_counts_as_layer=True), 94, id="counted ends"
        ),
        pytest.param(Parallelism(pipeline=4, virtual_pipeline=3), 48, id="interleaved"),
        pytest.param(
            Parallelism(pipeline=4, virtual_pipeline=2, first_stage_layers=4, last_stage_layers=6),
            26,
            id="uneven interleaved",
        ),
        pytest.param(
            Parallelism(pipeline=4, virtual_pipeline=2, embedding_counts_as_layer=True, loss_counts_as_layer=True),
            30,
            id="counted ends interleaved",
        ),
    ],
)
def test_every_chunk_has_the_layers_megatron_builds(asked: Parallelism, layers: int) -> None:
    found = pipeline_stages(asked, layers)
    assert found is not None
    config = transformer_config(asked, layers)
    sizes = derive_layout(asked, gpus_per_node=8)
    with megatron(sizes, rank=0):
        built = megatron_layers(asked, config)
    assert built == {
        (stage, chunk): len(held) for stage, entry in enumerate(found) for chunk, held in enumerate(entry.chunks)
    }


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        pytest.param(Parallelism(pipeline=8), 94, id="uneven without a split"),
        pytest.param(Parallelism(pipeline=16, last_stage_layers=6), 94, id="what is left does not divide"),
        pytest.param(Parallelism(pipeline=3, first_stage_layers=4, last_stage_layers=4), 8, id="empty middle"),
        pytest.param(Parallelism(pipeline=4, virtual_pipeline=5), 48, id="chunks"),
    ],
)
def test_what_has_no_stages_megatron_refuses_too(asked: Parallelism, layers: int) -> None:
    assert pipeline_stages(asked, layers) is None
    with megatron(derive_layout(asked, gpus_per_node=8), rank=0), pytest.raises((ValueError, AssertionError)):
        megatron_layers(asked, transformer_config(asked, layers))


def megatron_layers(asked: Parallelism, config: TransformerConfig) -> dict[tuple[int, int], int]:
    return {
        (stage, chunk): get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
        for stage in range(asked.pipeline)
        for chunk in range(asked.virtual_pipeline or 1)
    }


def transformer_config(asked: Parallelism, layers: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=asked.pipeline,
        virtual_pipeline_model_parallel_size=asked.virtual_pipeline,
        num_layers_in_first_pipeline_stage=asked.first_stage_layers,
        num_layers_in_last_pipeline_stage=asked.last_stage_layers,
        account_for_embedding_in_pipeline_split=asked.embedding_counts_as_layer,
        account_for_loss_in_pipeline_split=asked.loss_counts_as_layer,
        pipeline_dtype=torch.float32,
    )


def sampled(sizes: Layout) -> list[int]:
    """All ranks of small worlds; of large ones the corners and some between, so that the test stays within seconds."""
    if sizes.gpus <= 16:
        return list(range(sizes.gpus))
    return sorted({0, 1, 7, 13, sizes.gpus // 2 - 1, sizes.gpus // 2, sizes.gpus - 2, sizes.gpus - 1})


@contextmanager
def megatron(sizes: Layout, rank: int) -> Iterator[None]:
    """Megatron's groups as one rank of the layout builds them, without the other ranks."""
    with fake_world(sizes, rank):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            # Gloo would wait for the ranks that are not there.
            create_gloo_process_groups=False,
        )
        yield


@contextmanager
def fake_world(sizes: Layout, rank: int) -> Iterator[None]:
    """One rank of the layout, without the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes.gpus)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def megatron_groups() -> dict[ParallelGroup, tuple[int, ...]]:
    groups = {
        ParallelGroup.TENSOR: parallel_state.get_tensor_model_parallel_group(),
        ParallelGroup.CONTEXT: parallel_state.get_context_parallel_group(),
        ParallelGroup.DATA: parallel_state.get_data_parallel_group(),
        ParallelGroup.PIPELINE: parallel_state.get_pipeline_model_parallel_group(),
        ParallelGroup.EXPERT_TENSOR: parallel_state.get_expert_tensor_parallel_group(),
        ParallelGroup.EXPERT: parallel_state.get_expert_model_parallel_group(),
        ParallelGroup.EXPERT_DATA: parallel_state.get_expert_data_parallel_group(),
    }
    return {name: tuple(dist.get_process_group_ranks(group)) for name, group in groups.items()}


def megatron_coordinates() -> tuple[int, ...]:
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
    )


def coordinates(sizes: Layout, rank: int) -> tuple[int, ...]:
    here = rank_place(sizes, rank)
    return (
        here.tensor,
        here.context,
        here.data,
        here.pipeline,
        here.expert_tensor,
        here.expert,
        here.expert_data,
    )
