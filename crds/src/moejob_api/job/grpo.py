"""Group relative policy optimization: rollouts, rewards and the loss."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from moejob_api.job.base import ApiModel, Count, Fraction, GroupSize, LongText, NonNegative, Positive, ShortText


class KlKind(StrEnum):
    """Estimator of the divergence from the reference model."""

    K1 = "K1"
    K2 = "K2"
    K3 = "K3"
    ABS = "Abs"


class Kl(ApiModel):
    """Penalty for leaving the reference model."""

    kind: Annotated[
        KlKind, Field(description="Estimator: K1 log-ratio, K2 half its square, K3 unbiased and positive.")
    ] = KlKind.K3
    coefficient: Annotated[
        NonNegative, Field(description="Weight of the penalty. 0: no reference model is loaded.")
    ] = 0.0


class Advantage(StrEnum):
    """How rewards of a group become advantages."""

    GRPO = "GRPO"
    DR_GRPO = "DrGRPO"


class LossAggregation(StrEnum):
    """Over what the policy loss is averaged."""

    TOKEN = "Token"
    SEQUENCE = "Sequence"
    GROUP = "Group"


class Importance(StrEnum):
    """Level of the importance ratio."""

    TOKEN = "Token"
    SEQUENCE = "Sequence"


class Reward(ApiModel):
    """One reward; exactly one of name, module and url is given."""

    name: Annotated[ShortText | None, Field(description="A built-in reward.")] = None
    module: Annotated[
        ShortText | None, Field(description="A Python function, package.module:function, present in the image.")
    ] = None
    url: Annotated[LongText | None, Field(description="An HTTP service that scores a batch of answers.")] = None
    weight: Annotated[float, Field(ge=-1e6, le=1e6, description="Factor of this reward in the sum.")] = 1.0


class Placement(StrEnum):
    """Where answers are generated."""

    COLOCATED = "Colocated"
    SEPARATE = "Separate"


class Sync(StrEnum):
    """How new weights reach the rollout engines."""

    AUTO = "Auto"
    IPC = "IPC"
    NCCL = "NCCL"
    GLOO = "Gloo"
    DISK = "Disk"


class Rollout(ApiModel):
    """The vLLM engines that generate answers."""

    placement: Annotated[
        Placement,
        Field(
            description=(
                "Colocated: on the trainer's GPUs, asleep while it trains. Separate: pods and GPUs of their own."
            )
        ),
    ] = Placement.COLOCATED
    replicas: Annotated[
        GroupSize | None, Field(description="Separate only: engines, each of `tensor` GPUs. Absent: 1.")
    ] = None
    tensor: Annotated[GroupSize, Field(description="GPUs one engine spans, inside one node.")] = 1
    gpu_memory_utilization: Annotated[
        float | None,
        Field(
            ge=0.05,
            le=0.98,
            description="Share of GPU memory an engine may take. Absent: 0.9 for Separate; 0.6 for Colocated, which "
            "leaves room for what the trainer keeps while it waits.",
        ),
    ] = None
    sync: Annotated[Sync, Field(description="Auto: IPC when colocated, NCCL when separate, Disk on CPU.")] = Sync.AUTO

    @property
    def engine_share(self) -> float:
        """Share of GPU memory an engine may take."""
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        return 0.6 if self.placement is Placement.COLOCATED else 0.9


class Grpo(ApiModel):
    """Settings of GRPO."""

    group_size: Annotated[
        int, Field(ge=2, le=4096, description="Answers generated for every prompt; their rewards are compared.")
    ] = 8
    prompts_per_step: Annotated[Count, Field(description="Prompts per step.")] = 32
    temperature: Annotated[float, Field(gt=0.0, le=10.0, description="Sampling temperature.")] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0, description="Nucleus sampling; 1 is off.")] = 1.0
    max_new_tokens: Annotated[Count, Field(description="Longest answer in tokens.")] = 1024
    clip_low: Annotated[Fraction, Field(description="Lower clip: ratios below 1 - clipLow are clipped.")] = 0.2
    clip_high: Annotated[Positive, Field(description="Upper clip: ratios above 1 + clipHigh are clipped.")] = 0.2
    kl: Annotated[Kl, Field(description="Penalty for leaving the reference model.")] = Kl()
    advantage: Annotated[Advantage, Field(description="GRPO divides by the group's deviation; DrGRPO does not.")] = (
        Advantage.GRPO
    )
    loss_aggregation: Annotated[
        LossAggregation, Field(description="Mean over all tokens, over sequences of their means, or over groups.")
    ] = LossAggregation.TOKEN
    importance: Annotated[
        Importance, Field(description="Token: a ratio for each token. Sequence: one for each answer (GSPO).")
    ] = Importance.TOKEN
    truncated_importance_sampling: Annotated[
        Positive | None,
        Field(description="Largest ratio of the trainer's to the engine's probability used as a weight. Absent: off."),
    ] = None
    routing_replay: Annotated[
        bool, Field(description="Train on the experts the engine chose instead of routing anew.")
    ] = False
    dynamic_sampling: Annotated[bool, Field(description="Replace groups whose answers all got the same reward.")] = (
        False
    )
    rewards: Annotated[
        tuple[Reward, ...], Field(min_length=1, max_length=32, description="Rewards; their weighted sum counts.")
    ]
    rollout: Annotated[Rollout, Field(description="The engines that generate answers.")] = Rollout()
