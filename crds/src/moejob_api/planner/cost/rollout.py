"""Seconds that GRPO spends beside its updates: scoring, generating, moving weights."""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.derived import needs_old_probabilities
from moejob_api.hardware import Hardware
from moejob_api.job import Spec
from moejob_api.job.grpo import CacheAcrossVersions, Grpo, RolloutPlacement
from moejob_api.models.shape import ModelShape
from moejob_api.planner.cost.generation import EngineSpeed, GenerationTime, engine_speed, generation_time
from moejob_api.planner.cost.staleness import StalenessTime, staleness_time
from moejob_api.planner.cost.step import UpdateTime
from moejob_api.planner.memory.case import PlanningCase


@dataclass(frozen=True, slots=True)
class RolloutTime:
    """The engines of a job, whatever the layout of its trainer, and the seconds of a publication."""

    grpo: Grpo
    engine: EngineSpeed
    sync_seconds: float

    def generation(self, staleness: int) -> GenerationTime:
        """Return the seconds of each engine for the answers of a step."""
        rollout = self.grpo.rollout
        is_kept = rollout.cache_across_versions is CacheAcrossVersions.KEEP
        # A carried answer loses its keys and values when its engine sleeps, or clears them for new weights.
        reads_again = rollout.placement is RolloutPlacement.COLOCATED or not is_kept
        return generation_time(self.engine, staleness, reads_again=reads_again and staleness > 0)

    def with_staleness(self, staleness: int, learning_seconds: float) -> StalenessTime:
        """Return the time of a step of this staleness, whose scoring and updates take so long."""
        placement, generation = self.grpo.rollout.placement, self.generation(staleness)
        return staleness_time(placement, staleness, self.sync_seconds, learning_seconds, generation)


def rollout_time(spec: Spec, grpo: Grpo, shape: ModelShape, engines: int, hardware: Hardware) -> RolloutTime:
    """Return the time of a job's engines, of sequences of usual length."""
    engine = engine_speed(spec, grpo, shape, engines, hardware)
    return RolloutTime(grpo, engine, engine.memory.weights / hardware.host_bytes_per_second)


def scoring_seconds(case: PlanningCase, update: UpdateTime) -> float:
    """Seconds of the forward passes for log-probabilities before the updates: the policy's own, and the reference's."""
    grpo = case.spec.grpo
    if grpo is None:
        return 0.0
    passes = needs_old_probabilities(grpo, case.batch.updates_per_step) + (grpo.kl.coefficient > 0)
    return passes * case.batch.updates_per_step / grpo.epochs_per_step * update.forward_seconds
