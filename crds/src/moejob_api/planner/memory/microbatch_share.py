"""The share of a microbatch that one GPU computes and keeps for the backward pass: sizes only, no layers."""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.arithmetic import ceil_div
from moejob_api.derived import balancing_method, can_sum_in_products, has_float8_products, recomputed_modules
from moejob_api.job import Spec
from moejob_api.job.moe import BalancingMethod, DispatcherKind
from moejob_api.job.training import LoraTarget, RecomputeModule
from moejob_api.layout.sizes import Layout
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.constants import IMBALANCE_BALANCED, IMBALANCE_UNBALANCED

EVERY_TARGET = frozenset(LoraTarget)


@dataclass(frozen=True, slots=True)
class MicrobatchShare:
    """The part of a microbatch that one GPU computes, and by how much each matrix is divided.

    tokens: of the microbatch on one context rank. sequence: by how much they are divided between the matrices.
    expert_rows: rows that reach the experts of the fullest GPU, as a multiple of an even share.
    """

    hidden: int
    tokens: int
    tensor: int
    sequence: int
    context: int
    expert: int
    expert_tensor: int
    expert_rows: float
    element_bytes: int

    @property
    def sequence_tokens(self) -> int:
        """Tokens of one rank between the matrices, where sequence parallelism divides them."""
        return ceil_div(self.tokens, self.sequence)

    def count_rows(self, per_token: int) -> int:
        """Rows that reach the experts of this GPU."""
        return round(self.sequence_tokens * per_token * self.expert_tensor * self.expert_rows)


@dataclass(frozen=True, slots=True)
class ActivationSettings:
    """The inputs that decide how much of a layer is kept.

    recomputed: modules that the backward pass computes again. inputs: the trained matrices, whose inputs the backward
    pass needs. adapter_rank: the rank of LoRA, 0 without it. sums_in_products: products add experts' gradients to their
    sums, so no gradient takes memory of its own. float8: rows are rounded before they are multiplied.
    """

    recomputed: frozenset[RecomputeModule]
    inputs: frozenset[LoraTarget]
    adapter_rank: int
    router_bytes: int
    gathers: bool
    sums_in_products: bool
    float8: bool


def microbatch_share(spec: Spec, shape: ModelShape, layout: Layout, micro_tokens: int) -> MicrobatchShare:
    """The part of a microbatch of `micro_tokens` that one GPU of the layout computes."""
    return MicrobatchShare(
        hidden=shape.hidden,
        tokens=ceil_div(micro_tokens, layout.context),
        tensor=layout.tensor,
        sequence=layout.tensor if layout.sequence_parallel else 1,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        expert_rows=expert_rows(spec, layout.expert),
        element_bytes=spec.model.dtype.size_bytes,
    )


def expert_rows(spec: Spec, expert: int) -> float:
    """Rows of the fullest GPU of an expert group, as a multiple of an even share."""
    if spec.moe.capacity_factor is not None:
        return spec.moe.capacity_factor
    if expert == 1:
        # Every expert is here, so every row is, however uneven the routing.
        return 1.0
    return IMBALANCE_UNBALANCED if balancing_method(spec) is BalancingMethod.NONE else IMBALANCE_BALANCED


def activation_settings(spec: Spec) -> ActivationSettings:
    """Return the bearing of the job's recomputation, adapters and dispatcher on the activations that a layer keeps."""
    lora = spec.training.lora
    return ActivationSettings(
        recomputed=recomputed_modules(spec.training.recompute),
        inputs=EVERY_TARGET if lora is None else frozenset(lora.targets),
        adapter_rank=0 if lora is None else lora.rank,
        router_bytes=spec.moe.router_dtype.size_bytes,
        gathers=spec.moe.dispatcher is DispatcherKind.ALL_GATHER,
        sums_in_products=can_sum_in_products(spec),
        float8=has_float8_products(spec),
    )
