"""Dispatchers, sharding, offloading and what they exclude."""

from __future__ import annotations

from moejob_api.job import Spec
from moejob_api.job.moe import DispatcherKind
from moejob_api.job.resources import Accelerator
from moejob_api.job.training import RecomputeGranularity
from moejob_api.problems import Rule
from moejob_api.rules.object_rules.object_rule import ON_GPU, Complaint, ObjectRule


def _replay_of_all_choices(spec: Spec) -> Complaint:
    factor = spec.moe.capacity_factor
    if spec.grpo is None or not spec.grpo.routing_replay or factor is None:
        return None
    return (
        f"capacityFactor {factor:g} drops choices of experts that the engine has computed with, and routingReplay "
        "trains on all of them; remove one of the two"
    )


def _gather_of_dynamic_batches(spec: Spec) -> Complaint:
    if spec.moe.dispatcher is DispatcherKind.ALL_GATHER and spec.training.dynamic_batch_tokens is not None:
        return (
            "dispatcher AllGather needs microbatches of one length, dynamicBatchTokens makes them differ; use AllToAll"
        )
    return None


def _sharding_conflicts(spec: Spec) -> Complaint:
    sharding = spec.memory.sharding
    if not sharding.has_weight_shards:
        return None
    if spec.parallelism.pipeline > 1:
        return (
            f"{sharding} gathers every layer on every GPU and does not combine with pipeline "
            f"{spec.parallelism.pipeline}, which would divide nothing further and gather in every microbatch; use "
            "pipeline: 1 with more data, or DistributedOptimizer"
        )
    if spec.memory.offload_optimizer > 0:
        return (
            f"{sharding} keeps the float32 weights that it divides on the GPU and has no host copy for "
            f"offloadOptimizer {spec.memory.offload_optimizer:g}; set it to 0 or use DistributedOptimizer"
        )
    return None


def _host_offload_on_cpu(spec: Spec) -> Complaint:
    memory = spec.memory
    offloads = (
        memory.offload_optimizer > 0
        or memory.offload_activations
        or memory.offload_parameters
        or memory.offload_gradients
    )
    if spec.resources.accelerator is Accelerator.CPU and offloads:
        return "on CPU everything is in host memory already; remove the offload settings"
    return None


def _activations_to_offload(spec: Spec) -> Complaint:
    if spec.memory.offload_activations and spec.training.recompute.granularity is RecomputeGranularity.FULL:
        return "recompute Full keeps no activations that offloadActivations could move; choose one of the two"
    return None


MEMORY_RULES: tuple[ObjectRule, ...] = (
    ObjectRule(
        Rule.ROUTING,
        "spec.grpo.routingReplay",
        _replay_of_all_choices,
        "!has(self.grpo) || !has(self.grpo.routingReplay) || !self.grpo.routingReplay || !has(self.moe.capacityFactor)",
        "capacityFactor drops choices of experts that routingReplay trains on; remove one of the two",
    ),
    ObjectRule(
        Rule.ROUTING,
        "spec.moe.dispatcher",
        _gather_of_dynamic_batches,
        "self.moe.dispatcher != 'AllGather' || !has(self.training.dynamicBatchTokens)",
        "dispatcher AllGather needs microbatches of one length",
    ),
    ObjectRule(
        Rule.SHARDING,
        "spec.memory.sharding",
        _sharding_conflicts,
        "self.memory.sharding == 'DistributedOptimizer' || (self.parallelism.pipeline == 1 && "
        "self.memory.offloadOptimizer == 0.0)",
        "ZeRO2 and FSDP do not combine with pipeline or offloadOptimizer",
    ),
    ObjectRule(
        Rule.OFFLOAD,
        "spec.memory",
        _host_offload_on_cpu,
        f"{ON_GPU} || [self.memory].all(m, m.offloadOptimizer == 0.0 && !m.offloadActivations && "
        "!m.offloadParameters && !m.offloadGradients)",
        "on CPU there is nothing to offload",
    ),
    ObjectRule(
        Rule.OFFLOAD,
        "spec.memory.offloadActivations",
        _activations_to_offload,
        "!self.memory.offloadActivations || self.training.recompute.granularity != 'Full'",
        "recompute Full keeps no activations to offload",
    ),
)
