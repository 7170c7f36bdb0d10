"""Group relative policy optimization: rollouts, rewards and the loss."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from moejob_api.job.base import (
    ApiModel,
    Count,
    CountOrZero,
    Fraction,
    GroupSize,
    LongText,
    NonNegative,
    Positive,
    Seconds,
    ShortText,
)
from moejob_api.job.resources import EnvName


class KlKind(StrEnum):
    """Estimator of the divergence from the reference model."""

    K1 = "K1"
    K2 = "K2"
    K3 = "K3"
    ABS = "Abs"


class KlTarget(StrEnum):
    """The place of the penalty: in the loss or in the reward."""

    LOSS = "Loss"
    REWARD = "Reward"


class KlPenalty(ApiModel):
    """Penalty for leaving the reference model."""

    kind: Annotated[
        KlKind,
        Field(description="Estimator: K1 log-ratio, Abs its size, K2 half its square, K3 unbiased and positive."),
    ] = KlKind.K3
    coefficient: Annotated[
        NonNegative, Field(description="Weight of the penalty. 0: no reference model is loaded.")
    ] = 0.0
    apply_to: Annotated[
        KlTarget, Field(description="Loss: added to the loss of each token. Reward: taken from the answer's reward.")
    ] = KlTarget.LOSS


class AdvantageEstimator(StrEnum):
    """The estimator of advantages from the rewards of a group."""

    GRPO = "GRPO"
    DR_GRPO = "DrGRPO"
    RLOO = "RLOO"
    REINFORCE_PLUS_PLUS = "ReinforcePlusPlus"


class PolicyLoss(StrEnum):
    """The bound on the importance ratio."""

    CLIP = "Clip"
    CISPO = "CISPO"


class LossAggregation(StrEnum):
    """Over what the policy loss is averaged."""

    TOKEN = "Token"
    SEQUENCE = "Sequence"
    GROUP = "Group"
    CONSTANT = "Constant"


class ImportanceLevel(StrEnum):
    """Level of the importance ratio."""

    TOKEN = "Token"
    SEQUENCE = "Sequence"


class MismatchMode(StrEnum):
    """The treatment of a weight beyond its bounds."""

    TRUNCATE = "Truncate"
    MASK = "Mask"


class MismatchCorrection(ApiModel):
    """Importance sampling against the mismatch of trainer and engine: their probabilities of the same token differ."""

    level: Annotated[
        ImportanceLevel,
        Field(description="Token: a weight for each token. Sequence: one for each answer, their product."),
    ] = ImportanceLevel.TOKEN
    mode: Annotated[
        MismatchMode, Field(description="Truncate: weights above maximum become maximum. Mask: out of bounds, 0.")
    ] = MismatchMode.TRUNCATE
    maximum: Annotated[
        Positive, Field(description="Largest ratio of the trainer's to the engine's probability used as a weight.")
    ] = 2.0
    minimum: Annotated[NonNegative, Field(description="Mask only: smallest ratio that is used.")] = 0.0


class OverlongAnswers(ApiModel):
    """Answers that reach maxNewTokens, or come near."""

    filter: Annotated[bool, Field(description="Leave answers without an end out of the loss.")] = False
    penalty: Annotated[
        NonNegative, Field(description="Taken from the reward of an answer of maxNewTokens; 0 is off.")
    ] = 0.0
    penalty_tokens: Annotated[
        Count, Field(description="The penalty grows from 0 over so many last tokens before maxNewTokens.")
    ] = 1


class DynamicSampling(ApiModel):
    """Replace groups whose answers all got the same reward: they carry no signal."""

    over_sampling: Annotated[
        float,
        Field(
            ge=1.0,
            le=100.0,
            description="Most prompts a step asks for, as a multiple of promptsPerStep. Then it takes what it has.",
        ),
    ] = 3.0


class BuiltInReward(StrEnum):
    """Rewards that come with the trainer."""

    EXACT_MATCH = "exact-match"
    NUMERIC = "numeric"
    MATH = "math"
    FORMAT = "format"
    LENGTH = "length"


class RewardFailure(StrEnum):
    """The consequence of a reward that raises, takes too long or is no number."""

    DROP_GROUP = "DropGroup"
    STOP = "Stop"


class HeaderFrom(ApiModel):
    """One header of the requests to a service, from an environment variable."""

    header: Annotated[
        str, Field(max_length=127, pattern=r"^[A-Za-z][-A-Za-z0-9]*$", description="Its name, such as Authorization.")
    ]
    variable: Annotated[
        EnvName,
        Field(description="Variable of resources.env or resources.envFrom with the whole value, e.g. from a Secret."),
    ]


class Reward(ApiModel):
    """One reward; exactly one of name, module and url is given."""

    name: Annotated[
        BuiltInReward | None,
        Field(
            description="A built-in reward. exact-match: the answer is the reference; numeric: its last number is; "
            "math: math-verify calls them equal; format: the pattern matches; length: tokens by maxNewTokens."
        ),
    ] = None
    module: Annotated[
        ShortText | None,
        Field(description="A Python function, package.module:function, in the image or in the folder modulePath."),
    ] = None
    url: Annotated[LongText | None, Field(description="An HTTP service that scores a batch of answers.")] = None
    metric_name: Annotated[
        str | None,
        Field(
            max_length=63,
            pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.:]*$",
            description="Name in metrics, samples and logs. Absent: name, module, or url without user and query.",
        ),
    ] = None
    headers_from: Annotated[
        tuple[HeaderFrom, ...],
        Field(max_length=16, description="url only: headers with secrets, which are in no log and no metric."),
    ] = ()
    weight: Annotated[float, Field(ge=-1e6, le=1e6, description="Factor of this reward in the sum.")] = 1.0
    pattern: Annotated[
        LongText | None, Field(description="format only: a regular expression that the whole answer must match.")
    ] = None
    reference: Annotated[ShortText, Field(description="Field of the prompt's record that holds the right answer.")] = (
        "answer"
    )
    module_path: Annotated[LongText | None, Field(description="module only: a folder that is searched first.")] = None
    conversational: Annotated[
        bool,
        Field(
            description="module only: prompts and completions are lists of messages, as TRL has them for "
            "conversational data. False: text."
        ),
    ] = False
    batch_size: Annotated[
        int, Field(ge=1, le=65_536, description="url and module: most answers that are scored at once.")
    ] = 64
    retries: Annotated[
        int, Field(ge=0, le=100, description="url only: further tries after an error or a time-out.")
    ] = 3
    timeout_seconds: Annotated[
        Seconds, Field(description="Longest time that one batch may take; what takes longer has failed.")
    ] = 60
    start_timeout_seconds: Annotated[
        Seconds, Field(description="module, math and format: longest start of a process, with all that it imports.")
    ] = 300
    unavailable_timeout_seconds: Annotated[
        Seconds,
        Field(description="url only: how long a service that is away is waited for; then the run is tried again."),
    ] = 1800
    concurrency: Annotated[
        int, Field(ge=1, le=256, description="Batches that are scored at once: processes, or requests to a service.")
    ] = 2


class RolloutPlacement(StrEnum):
    """The place where answers are generated."""

    COLOCATED = "Colocated"
    SEPARATE = "Separate"


class WeightTransport(StrEnum):
    """The transport of new weights to the rollout engines."""

    AUTO = "Auto"
    IPC = "IPC"
    NCCL = "NCCL"
    GLOO = "Gloo"
    DISK = "Disk"


class CacheAcrossVersions(StrEnum):
    """The use of keys and values of older weights by an unfinished answer that new weights continue."""

    CLEAR = "Clear"
    KEEP = "Keep"


class ProbeMismatch(StrEnum):
    """The consequence of an engine that computes something else than the trainer."""

    STOP = "Stop"
    WARN = "Warn"


class PublicationProbe(ApiModel):
    """The comparison of each engine with the trainer after a publication, on prompts of the job."""

    bound: Annotated[
        Positive | None,
        Field(
            description="Largest mean |log-probability of the trainer - of an engine|. Absent: four times what "
            "rounding does to the trainer's own, which is measured."
        ),
    ] = None
    on_mismatch: Annotated[
        ProbeMismatch,
        Field(description="Stop: publish again, then end the run. Warn: say so in the log, and train on."),
    ] = ProbeMismatch.STOP


class RolloutSettings(ApiModel):
    """The vLLM engines that generate answers."""

    placement: Annotated[
        RolloutPlacement,
        Field(
            description=(
                "Colocated: on the trainer's GPUs, asleep while it trains. Separate: pods and GPUs of their own."
            )
        ),
    ] = RolloutPlacement.COLOCATED
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
    sync: Annotated[
        WeightTransport, Field(description="Auto: IPC when colocated, NCCL when separate, Disk on CPU.")
    ] = WeightTransport.AUTO
    staleness: Annotated[
        CountOrZero,
        Field(
            description="Versions that tokens of answers may be older than the weights that learn from them. 0: a step "
            "waits for its own answers. Above 0 engines generate ahead."
        ),
    ] = 0
    answer_timeout_seconds: Annotated[
        Seconds,
        Field(
            description="Longest time from the request of a prompt's answers to the last of them, where a step waits "
            "for them; then they are requested again."
        ),
    ] = 7200
    cache_across_versions: Annotated[
        CacheAcrossVersions,
        Field(
            description="New weights and an unfinished answer. Clear: the engine reads its text again. Keep: it "
            "continues with keys and values of the older weights."
        ),
    ] = CacheAcrossVersions.CLEAR
    probe: Annotated[
        PublicationProbe, Field(description="The comparison of engines with the trainer after each publication.")
    ] = PublicationProbe()

    @property
    def engine_share(self) -> float:
        """Share of GPU memory an engine may take."""
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        return 0.6 if self.placement is RolloutPlacement.COLOCATED else 0.9


class Evaluation(ApiModel):
    """The sampling of answers to evaluation data."""

    samples: Annotated[
        int, Field(ge=1, le=4096, description="Answers for every prompt (k): mean@k, and pass@k of full reward.")
    ] = 1
    temperature: Annotated[
        Positive | None, Field(description="Sampling temperature of evaluations. Absent: the one of training.")
    ] = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, description="Nucleus sampling of evaluations; 1 is off.")] = 1.0


class Grpo(ApiModel):
    """Settings of GRPO."""

    group_size: Annotated[
        int, Field(ge=2, le=4096, description="Answers generated for every prompt; their rewards are compared.")
    ] = 8
    prompts_per_step: Annotated[Count, Field(description="Prompts per step.")] = 32
    updates_per_step: Annotated[
        Count | None,
        Field(description="Updates that share the answers of a step. Absent: follows from globalBatchSize, else 1."),
    ] = None
    epochs_per_step: Annotated[Count, Field(description="How often a step learns from its answers.")] = 1
    temperature: Annotated[float, Field(gt=0.0, le=10.0, description="Sampling temperature.")] = 1.0
    top_p: Annotated[
        float,
        Field(
            gt=0.0, le=1.0, description="1: training samples from all of the vocabulary. evaluation.topP may be less."
        ),
    ] = 1.0
    max_new_tokens: Annotated[Count, Field(description="Longest answer in tokens.")] = 1024
    policy_loss: Annotated[
        PolicyLoss,
        Field(description="Clip: the clipped surrogate of PPO. CISPO: clipped weights of the log-probability."),
    ] = PolicyLoss.CLIP
    clip_low: Annotated[Fraction, Field(description="Lower clip: ratios below 1 - clipLow are clipped.")] = 0.2
    clip_high: Annotated[Positive, Field(description="Upper clip: ratios above 1 + clipHigh are clipped.")] = 0.2
    dual_clip: Annotated[
        float | None,
        Field(gt=1.0, le=1e9, description="Largest ratio that counts where the advantage is negative. Absent: off."),
    ] = None
    entropy_coefficient: Annotated[
        NonNegative,
        Field(description="Bonus for uncertainty: so many times a token's entropy is taken from its loss. 0: none."),
    ] = 0.0
    kl: Annotated[KlPenalty, Field(description="Penalty for leaving the reference model.")] = KlPenalty()
    advantage: Annotated[
        AdvantageEstimator,
        Field(
            description="GRPO: less the group's mean, by its deviation. DrGRPO: less the mean. RLOO: less the mean of "
            "the others. ReinforcePlusPlus: rewards to go, normalised over the step."
        ),
    ] = AdvantageEstimator.GRPO
    loss_aggregation: Annotated[
        LossAggregation,
        Field(
            description="Mean over all tokens, over sequences of their means, over groups of theirs; Constant: sum "
            "over tokens by answers x maxNewTokens (Dr. GRPO)."
        ),
    ] = LossAggregation.TOKEN
    importance: Annotated[
        ImportanceLevel, Field(description="Token: a ratio for each token. Sequence: one for each answer (GSPO).")
    ] = ImportanceLevel.TOKEN
    mismatch: Annotated[
        MismatchCorrection | None,
        Field(description="Importance sampling from the engine's to the trainer's probabilities. Absent: off."),
    ] = None
    routing_replay: Annotated[
        bool,
        Field(description="Train on the experts that the engine chose for each token, not the trainer's own (R3)."),
    ] = False
    dynamic_sampling: Annotated[
        DynamicSampling | None,
        Field(description="Replace groups whose answers all got the same reward. Absent: they are kept."),
    ] = None
    overlong: Annotated[OverlongAnswers, Field(description="Answers that reach maxNewTokens.")] = OverlongAnswers()
    rewards: Annotated[
        tuple[Reward, ...], Field(min_length=1, max_length=32, description="Rewards; their weighted sum counts.")
    ]
    reward_failure: Annotated[
        RewardFailure,
        Field(description="When a reward fails: DropGroup leaves its group out of the step, Stop ends the run."),
    ] = RewardFailure.DROP_GROUP
    evaluation: Annotated[
        Evaluation, Field(description="How data.eval is answered every training.evalEvery steps.")
    ] = Evaluation()
    logged_answers: Annotated[
        CountOrZero, Field(description="Most answers of a step that are written to samples/ of the run folder.")
    ] = 64
    record_tokens: Annotated[
        bool,
        Field(
            description="Write all that a step is computed from to tokens/ of the run folder, for the last 100 steps."
        ),
    ] = False
    rollout: Annotated[RolloutSettings, Field(description="The engines that generate answers.")] = RolloutSettings()

    @property
    def answers_per_step(self) -> int:
        """Answers that a step learns from."""
        return self.prompts_per_step * self.group_size
