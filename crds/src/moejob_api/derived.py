"""Settings that a job leaves open, derived from the rest of the job. The estimate and the trainer read them here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from moejob_api.arithmetic import ceil_div, round_up
from moejob_api.contract.engines import colocated_per_pod
from moejob_api.job import Method, Spec
from moejob_api.job.base import Dtype
from moejob_api.job.grpo import Grpo, KlTarget, MismatchCorrection, RolloutPlacement
from moejob_api.job.model import Implementation
from moejob_api.job.moe import BalancingMethod
from moejob_api.job.resources import Accelerator, GpuType
from moejob_api.job.training import ComputeType, Recompute, RecomputeGranularity, RecomputeModule
from moejob_api.layout.sizes import Layout
from moejob_api.models.shape import ModelShape
from moejob_api.quantities import GIB

DEFAULT_MODULES = frozenset(
    {RecomputeModule.NORMS, RecomputeModule.EXPERT_INPUT, RecomputeModule.EXPERT_ACTIVATION, RecomputeModule.MLP}
)
# Slopes of 16,384 tokens and 152,000 words in bfloat16 are 4.6 GiB, and save a fourth of the output layer's products.
MOST_SLOPE_BYTES = 5 * GIB
# Hopper and Blackwell, as the trainer's layers/kernels/quack.py names them.
SUMMING_GPUS = frozenset({GpuType.H100, GpuType.H200, GpuType.B200, GpuType.GB200})
# Files of tokens/ that a run keeps; examples/recompute_step.py reads them.
RECORDED_STEPS = 100
NO_MODULES: frozenset[RecomputeModule] = frozenset()


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The batch of one optimizer update, seen from one data-parallel rank."""

    sequences: int
    micro_tokens: int
    microbatches: int
    updates_per_step: int


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """Engines of a GRPO job; `gpus` and `nodes` count only GPUs and nodes beside the trainer's."""

    engines: int
    tensor: int
    gpus: int
    nodes: int


def update_batch(spec: Spec, layout: Layout) -> UpdateBatch:
    """Return the division of the global batch over ranks; sizes that do not divide are rounded up."""
    training = spec.training
    sequences = global_batch_size(spec)
    rank_sequences = max(1, sequences // layout.data)
    micro = training.micro_batch_size
    tokens = training.dynamic_batch_tokens
    if tokens is None:
        microbatches = ceil_div(rank_sequences, micro)
    else:
        # Before the data is read, every sample may be the longest; shorter samples give fewer microbatches.
        microbatches = round_up(
            ceil_div(rank_sequences * spec.data.max_length, tokens),
            layout.pipeline if layout.virtual_pipeline > 1 else 1,
        )
    return UpdateBatch(
        sequences=sequences,
        micro_tokens=tokens or micro * spec.data.max_length,
        microbatches=microbatches,
        updates_per_step=updates_per_step(spec),
    )


def global_batch_size(spec: Spec) -> int:
    """Sequences of one optimizer update."""
    if spec.training.global_batch_size is not None:
        return spec.training.global_batch_size
    return max(1, spec.grpo.answers_per_step // (spec.grpo.updates_per_step or 1)) if spec.grpo else 1


def updates_per_step(spec: Spec) -> int:
    """Updates of the weights in a step: its answers divided by the global batch, times the epochs.

    32 prompts with 8 answers each in global batches of 64, in 2 epochs: 256 / 64 x 2 = 8 updates.
    """
    if spec.grpo is None:
        return 1
    return max(1, spec.grpo.answers_per_step // global_batch_size(spec)) * spec.grpo.epochs_per_step


def sequence_divisor(layout: Layout) -> int:
    """Return the number that divides every sequence length.

    Each context rank takes two chunks, the first from the front and the second from the back, so that causal attention
    costs all ranks the same. Sequence parallelism divides the tokens of a context rank once more.
    """
    chunks = 2 * layout.context if layout.context > 1 else 1
    return chunks * (layout.tensor if layout.sequence_parallel else 1)


def uses_megatron_models(spec: Spec) -> bool:
    """Return whether layers of Megatron-Core train, and not our own. Auto is Native: it was measured to be faster."""
    return spec.model.implementation is Implementation.MEGATRON


def balancing_method(spec: Spec) -> BalancingMethod:
    """Return the method that keeps the load of the experts even."""
    if spec.moe.balancing is not None:
        return spec.moe.balancing
    if uses_megatron_models(spec):
        return BalancingMethod.NONE
    return BalancingMethod.NONE if spec.method is Method.GRPO else BalancingMethod.AUX_LOSS


def needs_choice_count(spec: Spec) -> bool:
    """Return whether the global batch passes through the model once more, to count the choices of its tokens."""
    return balancing_method(spec) is BalancingMethod.GLOBAL_AUX_LOSS and spec.moe.aux_loss_coefficient > 0


def choice_bytes(experts: int) -> int:
    """Return the bytes of a replayed choice: a number for each expert, and 0 for tokens that route by themselves."""
    return 1 if experts < 2**8 else 2


def has_frozen_router(spec: Spec) -> bool:
    """Return whether the router keeps its weights."""
    if spec.training.lora is not None:
        return True
    return spec.method is Method.GRPO if spec.moe.freeze_router is None else spec.moe.freeze_router


def has_reference(spec: Spec) -> bool:
    """Return whether answers are compared with the model as it was before training."""
    return spec.grpo is not None and spec.grpo.kl.coefficient > 0


def mismatch_correction(grpo: Grpo) -> MismatchCorrection | None:
    """Return the correction of losses for the difference of the engine's probabilities from the trainer's.

    Answers of older weights always get a correction: by default each token's weight, truncated at 2.
    """
    if grpo.mismatch is None and grpo.rollout.staleness > 0:
        return MismatchCorrection()
    return grpo.mismatch


def needs_old_probabilities(grpo: Grpo, updates: int) -> bool:
    """Return whether a step of this many updates computes the trainer's log-probabilities of its answers beforehand.

    The only update of a step computes them anyway, by the weights that the step begins with.
    """
    return updates > 1 or (grpo.kl.coefficient > 0 and grpo.kl.apply_to is KlTarget.REWARD)


def trained_shape(shape: ModelShape, spec: Spec) -> ModelShape:
    """The model as a job trains it: without MTP modules where the job does not train them."""
    is_learned = spec.method is Method.SFT and spec.training.lora is None and spec.training.mtp_loss_coefficient > 0
    return shape if is_learned or not shape.mtp_layers else replace(shape, mtp_layers=())


def recomputed_modules(recompute: Recompute) -> frozenset[RecomputeModule]:
    """The modules that Selective drops; whole layers are not among them."""
    match recompute.granularity:
        case RecomputeGranularity.SELECTIVE:
            return frozenset(recompute.modules) or DEFAULT_MODULES
        case RecomputeGranularity.NONE | RecomputeGranularity.FULL:
            return NO_MODULES
        case _:
            assert_never(recompute.granularity)


def share_dtype(spec: Spec) -> Dtype:
    """Return the type of a weight's share where replicas divide the weight: a share has the type of its gradients.

    Float32 gradients make a float32 share, which replicas round each time that they gather it.
    """
    return spec.model.dtype if spec.training.precision.gradients is spec.model.dtype else Dtype.FLOAT32


def can_sum_in_products(spec: Spec) -> bool:
    """Return whether products of experts add their weights' gradients to the sums: quack-kernels does, on its GPUs."""
    is_able = spec.resources.gpu_type in SUMMING_GPUS and not spec.training.deterministic
    is_summed = spec.training.lora is None and not spec.memory.sharding.has_weight_shards
    return is_able and is_summed and spec.model.dtype is Dtype.BFLOAT16


def has_float8_products(spec: Spec) -> bool:
    """Return whether products of layers are of FP8 numbers."""
    return spec.training.precision.compute is ComputeType.FP8


def has_shared_roundings(spec: Spec, layout: Layout) -> bool:
    """Return whether a weight is rounded to FP8 once for all micro batches, instead of for each product.

    Replicas that divide weights hold no more than a layer or two, so they round for each product.
    """
    is_kept = not spec.memory.sharding.has_weight_shards and update_batch(spec, layout).microbatches > 1
    return has_float8_products(spec) and is_kept


def has_overlapped_gradient_reduction(spec: Spec) -> bool:
    """Return whether replicas sum gradients beside the backward pass; gloo would need the cores that compute it."""
    setting = spec.training.communication.overlap_gradient_reduction
    return spec.resources.accelerator is Accelerator.GPU if setting is None else setting


def has_overlapped_parameter_gather(spec: Spec) -> bool:
    """Return whether updated weights arrive beside the next forward pass; GRPO publishes them before it."""
    is_wanted = spec.training.communication.overlap_parameter_gather and spec.method is Method.SFT
    return is_wanted and has_overlapped_gradient_reduction(spec) and not spec.memory.sharding.has_weight_shards


def has_replica_reads(spec: Spec) -> bool:
    """Return whether experts' shares are copied from the memory of replicas, which must not move meanwhile."""
    if not spec.memory.sharding.has_weight_shards or spec.memory.offload_parameters:
        return False
    setting = spec.training.communication.read_replicas
    return spec.resources.accelerator is Accelerator.GPU if setting is None else setting


def kept_slope_bytes(spec: Spec, tokens: int, words: int, element_bytes: int) -> int:
    """Return the bytes of slopes that the loss keeps for the backward pass; 0 where it computes the logits again."""
    # Slopes are derivatives of log-probabilities; the gradient of an entropy needs the probabilities themselves.
    learns_entropy = spec.grpo is not None and spec.grpo.entropy_coefficient > 0
    recomputes_all = spec.training.recompute.granularity is RecomputeGranularity.FULL
    is_scarce = learns_entropy or recomputes_all or spec.memory.offload_activations
    size = tokens * words * element_bytes
    return 0 if is_scarce or size > MOST_SLOPE_BYTES else size


def rollout_layout(spec: Spec, layout: Layout) -> RolloutLayout | None:
    """The engines that follow from the job; None for SFT."""
    if spec.grpo is None:
        return None
    rollout = spec.grpo.rollout
    match rollout.placement:
        case RolloutPlacement.COLOCATED:
            engines = layout.nodes * colocated_per_pod(spec, layout.gpus_per_pod)
            return RolloutLayout(max(1, engines), rollout.tensor, gpus=0, nodes=0)
        case RolloutPlacement.SEPARATE:
            engines = rollout.replicas or 1
            per_node = max(1, spec.resources.gpus_per_node // rollout.tensor)
            return RolloutLayout(engines, rollout.tensor, engines * rollout.tensor, ceil_div(engines, per_node))
