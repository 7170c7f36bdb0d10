"""The cost of one training step, part by part, with the speed that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.derived import rollout_layout
from moejob_api.hardware import Hardware
from moejob_api.job import Spec
from moejob_api.job.grpo import RolloutPlacement
from moejob_api.layout.sizes import Layout
from moejob_api.models.parameters import active_mtp_parameters, active_parameters
from moejob_api.models.shape import Attention, GroupedAttention, LatentAttention, LinearAttention, ModelShape
from moejob_api.planner.cost.explained import explain_time
from moejob_api.planner.cost.generation import typical_spec
from moejob_api.planner.cost.rates import GpuMachine
from moejob_api.planner.cost.rollout import RolloutTime, rollout_time, scoring_seconds
from moejob_api.planner.cost.step import TimeByUse, TimeUse, least_update_seconds, update_seconds
from moejob_api.planner.memory.case import PlanningCase, prepare_case
from moejob_api.planner.memory.kinds import LayerKinds


@dataclass(frozen=True, slots=True)
class CostPart:
    """One use of time in a step, and the formula behind it."""

    name: TimeUse
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step. mfu is the share of the GPUs' peak that the model's own arithmetic takes, recomputation not counted."""

    seconds: float
    parts: tuple[CostPart, ...]
    tokens_per_second_per_gpu: float
    mfu: float

    @property
    def bubble_share(self) -> float:
        """The share of the step in which pipeline stages wait for each other."""
        return sum(part.seconds for part in self.parts if part.name is TimeUse.BUBBLE) / self.seconds


def step_cost(spec: Spec, shape: ModelShape, layout: Layout, hardware: Hardware) -> StepCost:
    """The cost of a step; the layout must keep moejob_api.rules."""
    case, machine = prepare_cost_case(spec, shape, layout), GpuMachine(hardware, layout.gpus_per_pod)
    seconds = step_seconds(case, machine)
    seconds |= _rollout_seconds(rollout_times(spec, shape, layout, hardware), sum(seconds.values()))
    total = sum(seconds.values())
    tokens = case.batch.updates_per_step * case.batch.sequences * case.spec.data.max_length
    return StepCost(
        seconds=total,
        parts=tuple(
            CostPart(spent, value, explain_time(case, spent, value / total))
            for spent, value in sorted(seconds.items(), key=lambda entry: -entry[1])
            if value > 0
        ),
        tokens_per_second_per_gpu=tokens / total / _all_gpus(case),
        mfu=tokens
        * model_flops(case.shape, case.spec.data.max_length)
        / total
        / _all_gpus(case)
        / hardware.bf16_flops_per_second,
    )


def prepare_cost_case(spec: Spec, shape: ModelShape, layout: Layout, kinds: LayerKinds | None = None) -> PlanningCase:
    """Prepare a job for the functions of this module: sequences of GRPO have their usual length."""
    return prepare_case(typical_spec(spec), shape, layout, kinds)


def step_seconds(case: PlanningCase, machine: GpuMachine) -> TimeByUse:
    """The seconds of the trainer in a step, without a word of explanation; for searches."""
    update = update_seconds(case, machine)
    seconds = {spent: value * case.batch.updates_per_step for spent, value in update.seconds.items()}
    return {**seconds, TimeUse.SCORING: scoring_seconds(case, update)}


def least_step_seconds(case: PlanningCase, machine: GpuMachine, chunks: int) -> float:
    """Return a lower bound of all cuts into stages of at most `chunks` chunks and all recomputations; for searches."""
    return case.batch.updates_per_step * least_update_seconds(case, machine, chunks)


def rollout_times(spec: Spec, shape: ModelShape, layout: Layout, hardware: Hardware) -> RolloutTime | None:
    """Return the time of the engines of a job; None for SFT."""
    engines = rollout_layout(spec, layout)
    if spec.grpo is None or engines is None:
        return None
    return rollout_time(spec, spec.grpo, shape, engines.engines, hardware)


def _rollout_seconds(rollout: RolloutTime | None, learning_seconds: float) -> TimeByUse:
    """Seconds of a step beside the trainer's work; nothing for SFT."""
    if rollout is None:
        return {}
    settings = rollout.grpo.rollout
    step = rollout.with_staleness(settings.staleness, learning_seconds)
    is_beside = settings.placement is RolloutPlacement.SEPARATE and settings.staleness > 0
    return {TimeUse.SYNC: step.sync, TimeUse.WAITING if is_beside else TimeUse.GENERATION: step.waiting}


def model_flops(shape: ModelShape, document_tokens: float) -> float:
    """Arithmetic of both passes for one token: 6 for each active parameter, and causal attention."""
    # Looking up an embedding is no arithmetic; where it is also the output projection, that is.
    lookup_parameters = 0 if shape.tied_embeddings else shape.vocabulary * shape.hidden
    layers = (*shape.layers, *shape.mtp_layers)
    attention = sum(_attention_flops(layer.attention, document_tokens) for layer in layers)
    return 6.0 * (active_parameters(shape) + active_mtp_parameters(shape) - lookup_parameters) + attention


def _attention_flops(attention: Attention, tokens: float) -> float:
    match attention:
        case GroupedAttention():
            attended_tokens = tokens / 2 if attention.window is None else min(tokens / 2, attention.window)
            return 12.0 * attention.heads * attention.head_dim * attended_tokens
        case LatentAttention():
            width = attention.nope_dim + attention.rope_dim + attention.value_dim
            return 6.0 * attention.heads * width * tokens / 2
        case LinearAttention():
            return 12.0 * attention.value_heads * attention.key_dim * attention.value_dim


def _all_gpus(case: PlanningCase) -> int:
    sizes = rollout_layout(case.spec, case.layout)
    return case.layout.gpus + (sizes.gpus if sizes is not None else 0)
