"""The sizes of every parallel group, derived from spec.parallelism.

Megatron factors the same GPUs twice, and both must be exact:

    layers without experts:  tensor x context x data x pipeline              = GPUs
    experts:                 expertTensor x expert x expertData x pipeline   = GPUs

For tensor 2, pipeline 2, data 4 and expert 8 (Folded): 2 x 1 x 4 x 2 = 16, and 1 x 8 x 1 x 2 = 16.
"""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.arithmetic import ceil_div
from moejob_api.job.parallelism import ExpertLayout, Parallelism


@dataclass(frozen=True, slots=True)
class Layout:
    """Group sizes in Megatron's terms, and the pods they are packed into."""

    tensor: int
    pipeline: int
    virtual_pipeline: int
    context: int
    data: int
    expert: int
    expert_tensor: int
    expert_data: int
    sequence_parallel: bool
    gpus: int
    nodes: int
    gpus_per_pod: int


def count_gpus(parallelism: Parallelism) -> int:
    """GPUs that the trainer needs."""
    dense = parallelism.tensor * parallelism.pipeline * parallelism.context * parallelism.data
    match parallelism.expert_layout:
        case ExpertLayout.PRODUCT:
            return dense * parallelism.expert
        case ExpertLayout.FOLDED:
            return dense


def expert_tensor_size(parallelism: Parallelism) -> int:
    """GPUs that share the matrices of one expert."""
    match parallelism.expert_layout:
        case ExpertLayout.PRODUCT:
            return parallelism.tensor
        case ExpertLayout.FOLDED:
            return parallelism.expert_tensor or 1


def derive_layout(parallelism: Parallelism, gpus_per_node: int) -> Layout:
    """The layout of a parallelism whose two grids are exact; whether they are is for moejob_api.rules to say."""
    world = count_gpus(parallelism)
    dense_model = parallelism.tensor * parallelism.pipeline * parallelism.context
    expert_model = expert_tensor_size(parallelism) * parallelism.expert * parallelism.pipeline
    return Layout(
        tensor=parallelism.tensor,
        pipeline=parallelism.pipeline,
        virtual_pipeline=parallelism.virtual_pipeline or 1,
        context=parallelism.context,
        # Under Product, ranks with other experts are replicas of all other layers: this is data x expert.
        data=world // dense_model,
        expert=parallelism.expert,
        expert_tensor=expert_tensor_size(parallelism),
        expert_data=world // expert_model,
        sequence_parallel=parallelism.sequence_parallel,
        gpus=world,
        nodes=ceil_div(world, gpus_per_node),
        # A job smaller than a node is one pod with fewer GPUs.
        gpus_per_pod=min(world, gpus_per_node),
    )
