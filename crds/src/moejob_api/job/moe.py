"""What only Mixture-of-Experts models have, and what lives where in memory."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from moejob_api.job.base import ApiModel, Dtype, Fraction, NonNegative, Positive


class Balancing(StrEnum):
    """How the load of the experts is kept even."""

    AUX_LOSS = "AuxLoss"
    SEQ_AUX_LOSS = "SeqAuxLoss"
    GLOBAL_AUX_LOSS = "GlobalAuxLoss"
    EXPERT_BIAS = "ExpertBias"
    NONE = "None"


class Dispatcher(StrEnum):
    """How tokens travel to their experts."""

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
        Balancing | None,
        Field(
            description="AuxLoss per microbatch, SeqAuxLoss per sequence (not with packing), GlobalAuxLoss per global "
            "batch, ExpertBias without a loss, None. Absent: AuxLoss for SFT, None for GRPO."
        ),
    ] = None
    aux_loss_coefficient: Annotated[NonNegative, Field(description="Weight of the balancing loss.")] = 1e-3
    z_loss_coefficient: Annotated[NonNegative, Field(description="Weight of the router z-loss; 0 is off.")] = 0.0
    expert_bias_update_rate: Annotated[NonNegative, Field(description="Step of the routing bias under ExpertBias.")] = (
        1e-3
    )
    capacity_factor: Annotated[
        Positive | None,
        Field(description="Tokens an expert takes, as a multiple of an even share; more are dropped. Absent: no drop."),
    ] = None
    dispatcher: Annotated[
        Dispatcher,
        Field(description="AllToAll; AllGather suits few experts per token's worth of GPUs; Flex is DeepEP."),
    ] = Dispatcher.ALL_TO_ALL


class Sharding(StrEnum):
    """What data-parallel ranks divide among themselves."""

    DISTRIBUTED_OPTIMIZER = "DistributedOptimizer"
    FSDP = "FSDP"


class Memory(ApiModel):
    """What is moved to host memory and what is divided over data-parallel ranks."""

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
            description="DistributedOptimizer divides optimizer state over data-parallel ranks (ZeRO-1); FSDP "
            "divides weights and gradients too (ZeRO-3)."
        ),
    ] = Sharding.DISTRIBUTED_OPTIMIZER
