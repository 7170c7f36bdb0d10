"""Process groups of a layout: Megatron makes them, and the layout's own arithmetic checks them.

8 GPUs with tensor 2, pipeline 2, so data 2: ranks 0 and 1 are a tensor group, 0 and 2 a data group, 0 and 4 a pipeline
group. Megatron numbers tensor ranks first, then data ranks, then stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state

from moejob_api.job.moe import DispatcherKind
from moejob_api.layout.expert_nodes import expert_nodes
from moejob_api.layout.ranks import RankPlace, rank_place
from moejob_api.layout.sizes import Layout
from moejob_trainer.distributed.groups import Group, Groups

# Longer than the slowest rank reads its part of a large model, before the first collective.
_PATIENCE = timedelta(minutes=30)


class WrongTopology(RuntimeError):
    """Megatron numbers ranks otherwise than the plan that was shown to the user."""


def start_groups(layout: Layout, dispatcher: DispatcherKind) -> Groups:
    """Make every group of this rank. All ranks of the world call it."""
    world = dist.get_world_size()
    if world != layout.gpus:
        raise WrongTopology(f"{world} ranks were started, but the layout needs {layout.gpus}")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        # Left out, it would become the tensor size.
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=int(_PATIENCE.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    groups = _megatron_groups()
    _check_ranks(groups, rank_place(layout, dist.get_rank()))
    return _add_node_groups(groups, layout, dispatcher)


def stop_groups() -> None:
    """Forget all groups, so that others can be made by the same processes."""
    parallel_state.destroy_model_parallel()


def _megatron_groups() -> Groups:
    return Groups(
        tensor=_wrap_group(parallel_state.get_tensor_model_parallel_group()),
        context=_wrap_group(parallel_state.get_context_parallel_group()),
        data=_wrap_group(parallel_state.get_data_parallel_group()),
        pipeline=_wrap_group(parallel_state.get_pipeline_model_parallel_group()),
        replicas=_wrap_group(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert=_wrap_group(parallel_state.get_expert_model_parallel_group()),
        expert_tensor=_wrap_group(parallel_state.get_expert_tensor_parallel_group()),
        expert_replicas=_wrap_group(parallel_state.get_expert_data_parallel_group()),
        world=Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD),
    )


def _add_node_groups(groups: Groups, layout: Layout, dispatcher: DispatcherKind) -> Groups:
    """Add the groups for tokens that visit nodes first, which Megatron does not know."""
    nodes = expert_nodes(layout, dispatcher)
    if nodes is None:
        return groups
    return replace(
        groups,
        expert_across=_make_local_group(nodes.ranks_across_nodes),
        expert_inside=_make_local_group(nodes.ranks_inside_node),
    )


def _make_local_group(members: Callable[[int], tuple[int, ...]]) -> Group:
    """Make the groups of all ranks, on all ranks in the same order, and return this rank's."""
    memberships = dict.fromkeys(members(rank) for rank in range(dist.get_world_size()))
    handle, _ = dist.new_subgroups_by_enumeration([[*ranks] for ranks in memberships], timeout=_PATIENCE)
    return _wrap_group(handle)


def _wrap_group(handle: dist.ProcessGroup) -> Group:
    size = handle.size()
    return Group(handle.rank(), size, handle) if size > 1 else Group()


def _check_ranks(groups: Groups, planned: RankPlace) -> None:
    """Raise WrongTopology for other ranks than planned: training would give a wrong model without an error."""
    places = (
        ("tensor", groups.tensor.rank, planned.tensor),
        ("context", groups.context.rank, planned.context),
        ("data", groups.data.rank, planned.data),
        ("pipeline", groups.pipeline.rank, planned.pipeline),
        ("expert tensor", groups.expert_tensor.rank, planned.expert_tensor),
        ("expert", groups.expert.rank, planned.expert),
        ("expert data", groups.expert_replicas.rank, planned.expert_data),
    )
    differences = {name: (actual, expected) for name, actual, expected in places if actual != expected}
    if differences:
        raise WrongTopology(f"rank {planned.rank} has the places {differences} (made, planned); report this as a bug")
