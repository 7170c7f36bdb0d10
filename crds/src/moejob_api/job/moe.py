"""Settings of Mixture-of-Experts models, and the placement of tensors in memory."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from moejob_api.job.base import ApiModel, Dtype, Fraction, NonNegative, Positive


class BalancingMethod(StrEnum):
    """The method that keeps the load of experts even."""

    AUX_LOSS = "AuxLoss"
    SEQ_AUX_LOSS = "SeqAuxLoss"
    GLOBAL_AUX_LOSS = "GlobalAuxLoss"
    EXPERT_BIAS = "ExpertBias"
    NONE = "None"


class DispatcherKind(StrEnum):
    """The transport of tokens to their experts."""

    ALL_TO_ALL = "AllToAll"
    ALL_GATHER = "AllGather"
    FLEX = "Flex"


class MoE(ApiModel):
    """Routing and experts."""

    freeze_router: Annotated[
        bool | None, Field(description="Keep the router's weights. Absent: off for SFT, on for GRPO.")
    ] = None
    router_dtype: Annotated[
        Literal[Dtype.FLOAT32, Dtype.FLOAT64], Field(description="Type in which routing is computed.")
    ] = Dtype.FLOAT32
    balancing: Annotated[
        BalancingMethod | None,
        Field(
            description="AuxLoss balances each document, by its tokens, SeqAuxLoss each document alike, GlobalAuxLoss "
            "the global batch (one more forward pass), ExpertBias without a loss. Absent: AuxLoss for SFT, None for "
            "GRPO."
        ),
    ] = None
    aux_loss_coefficient: Annotated[NonNegative, Field(description="Weight of the balancing loss.")] = 1e-3
    z_loss_coefficient: Annotated[NonNegative, Field(description="Weight of the router z-loss; 0 is off.")] = 0.0
    expert_bias_update_rate: Annotated[NonNegative, Field(description="Step of the routing bias under ExpertBias.")] = (
        1e-3
    )
    seq_aux_loss_coefficient: Annotated[
        NonNegative,
        Field(
            description="ExpertBias only: weight of the loss of SeqAuxLoss beside the bias; DeepSeek-V3 trained with "
            "1e-4. 0 is off."
        ),
    ] = 0.0
    capacity_factor: Annotated[
        Positive | None,
        Field(description="Tokens an expert takes, as a multiple of an even share; more are dropped. Absent: no drop."),
    ] = None
    dispatcher: Annotated[
        DispatcherKind,
        Field(
            description="AllToAll goes over any network; AllGather suits few experts per token's worth of GPUs; Flex "
            "writes tokens straight into the memory of the other GPUs of a node, and sends them once to each node "
            "where experts are divided over several."
        ),
    ] = DispatcherKind.ALL_TO_ALL


class Sharding(StrEnum):
    """The tensors that data-parallel ranks divide among themselves."""

    DISTRIBUTED_OPTIMIZER = "DistributedOptimizer"
    ZERO2 = "ZeRO2"
    FSDP = "FSDP"

    @property
    def has_weight_shards(self) -> bool:
        """Return whether a rank owns a shard of the weights, gathered when they compute."""
        return self is not Sharding.DISTRIBUTED_OPTIMIZER


class Memory(ApiModel):
    """The tensors that move to host memory, and the tensors that data-parallel ranks divide."""

    offload_optimizer: Annotated[
        Fraction, Field(description="Fraction of the optimizer state kept and updated in host memory.")
    ] = 0.0
    offload_activations: Annotated[
        bool, Field(description="Move activations to host memory between forward and backward.")
    ] = False
    offload_parameters: Annotated[
        bool, Field(description="GRPO: keep the trainer's weights in host memory while answers are generated.")
    ] = False
    offload_gradients: Annotated[
        bool, Field(description="GRPO: free the gradient buffers while answers are generated.")
    ] = False
    sharding: Annotated[
        Sharding,
        Field(
            description="DistributedOptimizer divides optimizer state over data-parallel ranks (ZeRO-1); ZeRO2 divides "
            "gradients too and gathers weights once a step; FSDP gathers them layer by layer (ZeRO-3)."
        ),
    ] = Sharding.DISTRIBUTED_OPTIMIZER
