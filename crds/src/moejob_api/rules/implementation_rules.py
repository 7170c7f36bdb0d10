"""Rules of `model.implementation: Megatron`: what Megatron's own models do not do yet is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.derived import balancing_method, has_float8_products, uses_megatron_models
from moejob_api.job import Spec
from moejob_api.job.moe import BalancingMethod, DispatcherKind
from moejob_api.job.training import RecomputeGranularity
from moejob_api.models.shape import GroupedAttention, ModelShape
from moejob_api.models.trainable import MEGATRON_FAMILIES, UNTRAINED_BY_MEGATRON
from moejob_api.problems import Problem, Rule


def implementation_problems(spec: Spec, shape: ModelShape | None) -> Iterator[Problem]:
    """Every field that the chosen implementation does not obey."""
    if not uses_megatron_models(spec):
        if spec.model.transformer is not None:
            yield _problem(
                "model.transformer", "only Megatron's layers read it; set implementation: Megatron or remove"
            )
        return
    yield from _method_problems(spec)
    yield from _expert_problems(spec)
    if shape is not None:
        yield from _model_problems(spec, shape)


def _method_problems(spec: Spec) -> Iterator[Problem]:
    if spec.grpo is not None and spec.grpo.routing_replay:
        yield _problem("grpo.routingReplay", "experts that engines chose are given to our own layers only; remove it")
    if spec.training.lora is not None:
        yield _problem("training.lora", "our own layers alone have adapters; remove lora, or implementation: Megatron")
    if spec.memory.sharding.has_weight_shards:
        yield _problem(
            "memory.sharding", f"{spec.memory.sharding} divides our own layers only; use DistributedOptimizer"
        )
    if spec.memory.offload_activations:
        yield _problem("memory.offloadActivations", "only activations of our own layers move to the host; remove it")
    if has_float8_products(spec):
        yield _problem("training.precision.compute", "only our own layers multiply in FP8; remove it")
    if spec.training.recompute.granularity is RecomputeGranularity.SELECTIVE:
        yield _problem("training.recompute.granularity", "modules to recompute are our own layers'; use Full or None")


def _expert_problems(spec: Spec) -> Iterator[Problem]:
    if balancing_method(spec) is not BalancingMethod.NONE:
        yield _problem("moe.balancing", f"{spec.moe.balancing} acts in our own layers only; set it to None")
    if spec.moe.z_loss_coefficient:
        yield _problem("moe.zLossCoefficient", "the z-loss acts in our own layers only; remove it")
    if spec.moe.capacity_factor is not None:
        yield _problem("moe.capacityFactor", "only our own layers drop tokens; remove it")
    if spec.moe.dispatcher is not DispatcherKind.ALL_TO_ALL:
        yield _problem("moe.dispatcher", f"{spec.moe.dispatcher} moves tokens of our own layers only; use AllToAll")


def _model_problems(spec: Spec, shape: ModelShape) -> Iterator[Problem]:
    if shape.family not in MEGATRON_FAMILIES:
        reason = UNTRAINED_BY_MEGATRON.get(shape.family, f"{shape.family} was not measured on Megatron's layers")
        families = ", ".join(sorted(MEGATRON_FAMILIES))
        yield _problem("model.implementation", f"{reason}; use Native, or a model of {families}")
        return
    if shape.mtp_layers:
        yield _problem(
            "training.mtpLossCoefficient", "MTP modules are of our own layers only; set it to 0 to train without them"
        )
    for attention in shape.attention_kinds():
        if isinstance(attention, GroupedAttention) and attention.key_value_heads % spec.parallelism.tensor:
            yield _problem(
                "parallelism.tensor",
                f"{spec.parallelism.tensor} tensor ranks would share {attention.key_value_heads} key-value heads, "
                "which our own layers alone can; lower tensor to a divisor",
            )


def _problem(path: str, message: str) -> Problem:
    return Problem(Rule.IMPLEMENTATION, f"spec.{path}", message)
