"""Length of the training, and the update of weights."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from moejob_api.job.base import (
    ApiModel,
    Count,
    CountOrZero,
    Dtype,
    Fraction,
    NonNegative,
    Positive,
    ShortText,
)
from moejob_api.job.grpo import BuiltInReward

AnswerReward = Literal[BuiltInReward.EXACT_MATCH, BuiltInReward.NUMERIC]
GradientDtype = Literal[Dtype.FLOAT32, Dtype.BFLOAT16]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Optimizer(ApiModel):
    """Adam with decoupled weight decay."""

    learning_rate: Annotated[float, Field(gt=0.0, le=10.0, description="Peak learning rate.")] = 1e-5
    weight_decay: Annotated[NonNegative, Field(description="Decoupled weight decay; norms and biases get none.")] = 0.01
    beta1: Annotated[Beta, Field(description="Decay of the first moment.")] = 0.9
    beta2: Annotated[Beta, Field(description="Decay of the second moment.")] = 0.95
    epsilon: Annotated[Positive, Field(description="Added to the root of the second moment.")] = 1e-8


class SchedulerKind(StrEnum):
    """Shape of the learning rate over the run."""

    CONSTANT = "Constant"
    LINEAR = "Linear"
    COSINE = "Cosine"
    WSD = "WSD"


class Scheduler(ApiModel):
    """Learning rate over the run."""

    kind: Annotated[
        SchedulerKind, Field(description="Shape after the warm-up. WSD: constant, then a decay over decaySteps.")
    ] = SchedulerKind.COSINE
    warmup_steps: Annotated[CountOrZero, Field(description="Steps from zero to the peak.")] = 0
    minimum_learning_rate: Annotated[NonNegative, Field(description="Learning rate at the end of the decay.")] = 0.0
    decay_steps: Annotated[
        Count | None, Field(description="Steps of the decay. Absent: all after the warm-up; WSD needs it.")
    ] = None


class ComputeType(StrEnum):
    """A type that layers multiply in, other than their weights' type."""

    FP8 = "FP8"


class Precision(ApiModel):
    """Types of products, and of what the optimizer keeps.

    Weights are model.dtype; the optimizer's own copy is always float32.
    """

    compute: Annotated[
        ComputeType | None,
        Field(
            description="Type of layers' products. FP8: rows of e4m3 numbers with a scale each, forward and for "
            "gradients of inputs; weights' gradients, routers and the output layer stay in model.dtype. Faster where "
            "matrices are wide, on H100 and later; a CPU computes the same numbers, slower. SFT only. Absent: "
            "model.dtype."
        ),
    ] = None
    gradients: Annotated[GradientDtype, Field(description="Type in which gradients are accumulated and reduced.")] = (
        Dtype.FLOAT32
    )
    moments: Annotated[GradientDtype, Field(description="Type of Adam's two moments.")] = Dtype.FLOAT32


class RecomputeGranularity(StrEnum):
    """The share of the forward pass that is done again in the backward pass."""

    NONE = "None"
    SELECTIVE = "Selective"
    FULL = "Full"


class RecomputeMethod(StrEnum):
    """The choice of layers that are recomputed under Full."""

    UNIFORM = "Uniform"
    BLOCK = "Block"


class RecomputeModule(StrEnum):
    """The modules that Selective recomputes."""

    CORE_ATTENTION = "CoreAttention"
    LATENT_UP_PROJECTION = "LatentUpProjection"
    NORMS = "Norms"
    MLP = "MLP"
    EXPERT_INPUT = "ExpertInput"
    EXPERT_ACTIVATION = "ExpertActivation"
    SHARED_EXPERTS = "SharedExperts"
    EXPERTS = "Experts"


class Recompute(ApiModel):
    """Trades compute for activation memory."""

    granularity: Annotated[
        RecomputeGranularity,
        Field(description="None keeps everything, Selective drops the named modules, Full drops whole layers."),
    ] = RecomputeGranularity.NONE
    modules: Annotated[
        tuple[RecomputeModule, ...],
        Field(
            max_length=8,
            description="For Selective. Absent: Norms, ExpertInput and ExpertActivation (MLP for dense layers).",
        ),
    ] = ()
    method: Annotated[
        RecomputeMethod | None,
        Field(
            description="For Full. Uniform keeps the input of every group of `layers` layers; Block recomputes the "
            "first `layers` layers of each stage. Absent: Uniform."
        ),
    ] = None
    layers: Annotated[Count | None, Field(description="For Full: see method. Absent: 1.")] = None


class LoraTarget(StrEnum):
    """Matrices that get an adapter."""

    QUERY_KEY_VALUE = "QueryKeyValue"
    ATTENTION_OUTPUT = "AttentionOutput"
    GATE_UP = "GateUp"
    DOWN = "Down"
    EXPERT_GATE_UP = "ExpertGateUp"
    EXPERT_DOWN = "ExpertDown"


class Lora(ApiModel):
    """Low-rank adapters; everything else is frozen."""

    rank: Annotated[int, Field(ge=1, le=4096, description="Rank of the two matrices of an adapter.")] = 16
    alpha: Annotated[Positive, Field(description="The adapter's output is scaled by alpha / rank.")] = 32.0
    dropout: Annotated[Fraction, Field(description="Dropout in front of the adapters.")] = 0.0
    targets: Annotated[
        tuple[LoraTarget, ...], Field(min_length=1, max_length=6, description="Matrices that get an adapter.")
    ] = (LoraTarget.QUERY_KEY_VALUE, LoraTarget.ATTENTION_OUTPUT, LoraTarget.GATE_UP, LoraTarget.DOWN)


class Profile(ApiModel):
    """Steps that are traced, bounded: a trace grows with every operation of every step."""

    first_step: Annotated[
        Count, Field(description="First step that is traced; the first of a run is slower than the others.")
    ] = 2
    steps: Annotated[int, Field(ge=1, le=8, description="Steps of the trace.")] = 1
    ranks: Annotated[
        tuple[CountOrZero, ...],
        Field(min_length=1, max_length=8, description="Global ranks that write a trace each."),
    ] = (0,)
    memory: Annotated[
        bool,
        Field(description="Record allocations as well; on GPUs also as a snapshot for pytorch.org/memory_viz."),
    ] = False


class Communication(ApiModel):
    """Exchanges beside the computation, or between two parts of it. Results are the same."""

    overlap_gradient_reduction: Annotated[
        bool | None,
        Field(description="Sum gradients over replicas beside the step's last backward pass. Absent: on GPUs."),
    ] = None
    overlap_parameter_gather: Annotated[
        bool,
        Field(
            description="Gather updated weights from replicas beside the next forward pass, for replicas on several "
            "nodes. SFT only, with overlapGradientReduction."
        ),
    ] = False
    overlap_optimizer_copies: Annotated[
        bool,
        Field(
            description="With memory.offloadOptimizer: copy gradients of the next parameters while the host updates "
            "others."
        ),
    ] = False
    read_replicas: Annotated[
        bool | None,
        Field(
            description="With memory.sharding FSDP or ZeRO2: copy experts' shares and gradients from the memory of "
            "replicas on the same node, where each GPU reaches the others, instead of by NCCL. Absent: on GPUs."
        ),
    ] = None


class EarlyStop(ApiModel):
    """The end of a run whose evaluations no longer improve."""

    patience: Annotated[
        Count, Field(description="Evaluations in a row without an improvement after which the run ends, as succeeded.")
    ]
    minimum_improvement: Annotated[
        NonNegative, Field(description="Least change of training.bestBy for the better that counts as one.")
    ] = 0.0


class EvalAnswers(ApiModel):
    """Answers to evaluation prompts, bounded: every token of an answer costs a pass over its prompt."""

    prompts: Annotated[int, Field(ge=1, le=256, description="Prompts of each set that are asked: its first.")] = 16
    max_new_tokens: Annotated[int, Field(ge=1, le=512, description="Longest answer in tokens.")] = 64
    reward: Annotated[
        AnswerReward,
        Field(description="Score of an answer. exact-match: it is the reference; numeric: its last number is."),
    ] = BuiltInReward.EXACT_MATCH
    reference: Annotated[ShortText, Field(description="Field of the prompt's record that holds the right answer.")] = (
        "answer"
    )


class Training(ApiModel):
    """Length of the run, batches, optimizer."""

    max_steps: Annotated[
        Count | None, Field(description="Steps to train. Exactly one of maxSteps and epochs is given.")
    ] = None
    epochs: Annotated[Positive | None, Field(description="Passes over the training data.")] = None
    global_batch_size: Annotated[
        Count | None,
        Field(
            description="Sequences per optimizer update over all GPUs (packed rows when packing). Required for SFT; "
            "GRPO takes promptsPerStep x groupSize when absent."
        ),
    ] = None
    micro_batch_size: Annotated[
        Count, Field(description="Sequences one GPU handles at once; the rest is accumulated.")
    ] = 1
    dynamic_batch_tokens: Annotated[
        Count | None,
        Field(description="Instead of microBatchSize: fill microbatches with documents up to this many tokens."),
    ] = None
    optimizer: Annotated[Optimizer, Field(description="Adam and its settings.")] = Optimizer()
    scheduler: Annotated[Scheduler, Field(description="Learning rate over the run.")] = Scheduler()
    clip_grad: Annotated[NonNegative, Field(description="Largest global gradient norm; 0 does not clip.")] = 1.0
    seed: Annotated[CountOrZero, Field(description="Seed of initialisation, dropout and sampling.")] = 42
    precision: Annotated[Precision, Field(description="Types of products, gradients and moments.")] = Precision()
    recompute: Annotated[Recompute, Field(description="Recompute activations to save memory.")] = Recompute()
    communication: Annotated[Communication, Field(description="Exchanges that run beside the computation.")] = (
        Communication()
    )
    eval_every: Annotated[Count | None, Field(description="Steps between evaluations. Absent: only at the end.")] = None
    best_by: Annotated[
        ShortText | None,
        Field(
            description="Number of steps.jsonl by which evaluations are compared: evalLoss, evalLoss/NAME of one set; "
            "for answers evalMean@1, for GRPO evalMean@k or evalPass@k. Absent: evalLoss; without one, evalMean."
        ),
    ] = None
    eval_answers: Annotated[
        EvalAnswers,
        Field(
            description="SFT only: how the model answers data.eval of format Prompts, the likeliest token each time."
        ),
    ] = EvalAnswers()
    early_stop: Annotated[
        EarlyStop | None,
        Field(description="End the run when evaluations no longer improve. Absent: it makes all steps."),
    ] = None
    mtp_loss_coefficient: Annotated[
        NonNegative,
        Field(
            description="Weight of the loss of predicting further tokens, for models with MTP modules; 0 trains and "
            "exports without these, as do LoRA and GRPO."
        ),
    ] = 0.1
    lora: Annotated[Lora | None, Field(description="Train adapters only. Absent: all weights.")] = None
    deterministic: Annotated[
        bool,
        Field(
            description="Compute the same bits in every run of the job on the same machines: torch's deterministic "
            "algorithms and slower attention. SFT only."
        ),
    ] = False
    profile: Annotated[
        Profile | None, Field(description="Trace a few steps with torch.profiler, into profile/ of the run folder.")
    ] = None
