"""Seconds that GRPO spends beside its updates: scoring, generating, moving weights."""

from __future__ import annotations

from moejob_api.arithmetic import ceil_div
from moejob_api.derived import rollout_layout
from moejob_api.job.grpo import Grpo
from moejob_api.models.parameters import active_parameters, parameters
from moejob_api.planner.cost.rates import (
    ENGINE_GEMM_SHARE,
    ENGINE_LAYER_SECONDS,
    ENGINE_SEQUENCE_SECONDS,
    ENGINE_SUM_SECONDS,
    NVLINK_SHARE,
    Machine,
)
from moejob_api.planner.cost.step import Seconds, Spent, Update
from moejob_api.planner.memory.case import Case
from moejob_api.planner.memory.engine import EngineMemory, engine


def rollout_seconds(case: Case, update: Update, machine: Machine) -> Seconds:
    """Return the seconds that a step of GRPO adds to its updates; nothing for SFT."""
    grpo = case.spec.grpo
    one = engine(case.spec, case.shape, case.layout)
    if grpo is None or one is None:
        return {}
    # The policy's own probabilities, and the reference's where it differs.
    passes = 1 + (grpo.kl.coefficient > 0)
    return {
        Spent.SCORING: passes * case.batch.updates_per_step * update.forward_seconds,
        Spent.GENERATION: _generation(case, grpo, one, machine),
        Spent.SYNC: one.weights / machine.hardware.host_bytes_per_second,
    }


def _generation(case: Case, grpo: Grpo, one: EngineMemory, machine: Machine) -> float:
    """Tokens come one after the other; each round reads the weights and the caches of all running sequences."""
    sizes = rollout_layout(case.spec, case.layout)
    engines = sizes.engines if sizes is not None else 1
    answers = ceil_div(grpo.prompts_per_step * grpo.group_size, engines)
    at_once = max(1, min(answers, one.sequences if one.sequences is not None else one.useful_sequences))
    of_round = _reading_or_computing(case, one, at_once, machine) + at_once * ENGINE_SEQUENCE_SECONDS
    of_layers = len(case.shape.layers) * (ENGINE_LAYER_SECONDS + _summing(case, one, at_once, machine))
    return max(1.0, answers / at_once) * grpo.max_new_tokens * (of_round + of_layers)


def _reading_or_computing(case: Case, one: EngineMemory, at_once: int, machine: Machine) -> float:
    """Weights and caches pass once; of experts those that any of the sequences chooses."""
    shape, hardware = case.shape, machine.hardware
    idle = 0.0
    if shape.experts is not None:
        chosen = shape.experts.per_token / shape.experts.count
        idle = (parameters(shape) - active_parameters(shape)) * (1 - chosen) ** (at_once - 1)
    weights = one.weights - idle * case.element_bytes / one.gpus
    reading = (weights + at_once * one.sequence_bytes / 2) / hardware.memory_bytes_per_second
    flops = 2.0 * active_parameters(shape) * at_once / one.gpus
    return max(reading, flops / (ENGINE_GEMM_SHARE * hardware.bf16_flops_per_second))


def _summing(case: Case, one: EngineMemory, at_once: int, machine: Machine) -> float:
    """The GPUs of an engine, which share a node, sum what attention and experts of a layer give."""
    if one.gpus == 1:
        return 0.0
    rows = 2 * (one.gpus - 1) / one.gpus * at_once * case.shape.hidden * case.element_bytes
    return 2 * (ENGINE_SUM_SECONDS + rows / (machine.hardware.nvlink_bytes_per_second * NVLINK_SHARE))
