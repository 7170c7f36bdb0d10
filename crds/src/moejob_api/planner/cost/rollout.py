"""Seconds that GRPO spends beside its updates: scoring, generating, moving weights."""

from __future__ import annotations

from moejob_api.arithmetic import ceil_div
from moejob_api.derived import rollout_layout
from moejob_api.job.grpo import Grpo
from moejob_api.models.parameters import active_parameters, total_parameters
from moejob_api.planner.cost.rates import (
    ENGINE_GEMM_SHARE,
    ENGINE_LAYER_SECONDS,
    ENGINE_SEQUENCE_SECONDS,
    ENGINE_SUM_SECONDS,
    NVLINK_SHARE,
    GpuMachine,
)
from moejob_api.planner.cost.step import TimeByUse, TimeUse, UpdateTime
from moejob_api.planner.memory.case import PlanningCase
from moejob_api.planner.memory.engine import EngineMemory, estimate_engine


def rollout_seconds(case: PlanningCase, update: UpdateTime, machine: GpuMachine) -> TimeByUse:
    """Return the seconds that a step of GRPO adds to its updates; nothing for SFT."""
    grpo = case.spec.grpo
    engine_memory = estimate_engine(case.spec, case.shape, case.layout)
    if grpo is None or engine_memory is None:
        return {}
    # The policy's own probabilities, and the reference's where it differs.
    passes = 1 + (grpo.kl.coefficient > 0)
    return {
        TimeUse.SCORING: passes * case.batch.updates_per_step * update.forward_seconds,
        TimeUse.GENERATION: _generation_seconds(case, grpo, engine_memory, machine),
        TimeUse.SYNC: engine_memory.weights / machine.hardware.host_bytes_per_second,
    }


def _generation_seconds(case: PlanningCase, grpo: Grpo, engine_memory: EngineMemory, machine: GpuMachine) -> float:
    """Tokens come one after the other; each round reads the weights and the caches of all running sequences."""
    sizes = rollout_layout(case.spec, case.layout)
    engines = sizes.engines if sizes is not None else 1
    answers = ceil_div(grpo.prompts_per_step * grpo.group_size, engines)
    at_once = max(
        1,
        min(
            answers, engine_memory.sequences if engine_memory.sequences is not None else engine_memory.useful_sequences
        ),
    )
    round_seconds = (
        _reading_or_computing_seconds(case, engine_memory, at_once, machine) + at_once * ENGINE_SEQUENCE_SECONDS
    )
    layers_seconds = len(case.shape.layers) * (
        ENGINE_LAYER_SECONDS + _summing_seconds(case, engine_memory, at_once, machine)
    )
    return max(1.0, answers / at_once) * grpo.max_new_tokens * (round_seconds + layers_seconds)


def _reading_or_computing_seconds(
    case: PlanningCase, engine_memory: EngineMemory, at_once: int, machine: GpuMachine
) -> float:
    """Weights and caches pass once; an expert's weights pass if any sequence chooses the expert."""
    shape, hardware = case.shape, machine.hardware
    idle = 0.0
    if shape.experts is not None:
        chosen_share = shape.experts.per_token / shape.experts.count
        idle = (total_parameters(shape) - active_parameters(shape)) * (1 - chosen_share) ** (at_once - 1)
    weights = engine_memory.weights - idle * case.element_bytes / engine_memory.gpus
    reading = (weights + at_once * engine_memory.sequence_bytes / 2) / hardware.memory_bytes_per_second
    flops = 2.0 * active_parameters(shape) * at_once / engine_memory.gpus
    return max(reading, flops / (ENGINE_GEMM_SHARE * hardware.bf16_flops_per_second))


def _summing_seconds(case: PlanningCase, engine_memory: EngineMemory, at_once: int, machine: GpuMachine) -> float:
    """The GPUs of an engine, which share a node, sum what attention and experts of a layer give."""
    if engine_memory.gpus == 1:
        return 0.0
    rows = 2 * (engine_memory.gpus - 1) / engine_memory.gpus * at_once * case.shape.hidden * case.element_bytes
    return 2 * (ENGINE_SUM_SECONDS + rows / (machine.hardware.nvlink_bytes_per_second * NVLINK_SHARE))
