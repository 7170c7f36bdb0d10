"""GRPO in a run: the objective between engines, rewards and prompts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from moejob_api.derived import mismatch_correction, updates_per_step
from moejob_trainer.data.packing import batch_plan
from moejob_trainer.objectives.grpo.collecting import RolloutCollector
from moejob_trainer.objectives.grpo.objective import GroupRelativePolicyOptimization, GrpoSettings, StepServices
from moejob_trainer.objectives.grpo.rank_exchange import PeerRanks
from moejob_trainer.objectives.grpo.sampling import GroupSampler
from moejob_trainer.objectives.grpo.step_record import StepRecorder, recorded_settings
from moejob_trainer.rollouts.interface import AnswerGenerator, RoutedLayers, SamplingParams, WeightPublisher
from moejob_trainer.runtime.heartbeats import BackgroundHeartbeat, Heartbeat
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.prompts import RunPrompts, answer_decoder
from moejob_trainer.setup.rewards import RunRewards


@dataclass(frozen=True, slots=True)
class RolloutEngines:
    """The engines of a run: the generator of answers, which rank 0 alone has, and the publisher of weights."""

    generator: AnswerGenerator | None
    publisher: WeightPublisher
    # The layers whose routing is replayed; None: none.
    routed: RoutedLayers | None = None


@dataclass(frozen=True, slots=True)
class GrpoRun:
    """The objective of a run, and rank 0's part of it."""

    objective: GroupRelativePolicyOptimization
    collector: RolloutCollector | None

    @property
    def epoch(self) -> float | None:
        """Return the collector's epoch; None on ranks without a collector."""
        return None if self.collector is None else self.collector.epoch


def build_grpo(
    context: RankContext, prompts: RunPrompts, engines: RolloutEngines, rewards: RunRewards | None, stack: ExitStack
) -> GrpoRun:
    """Build the objective; the stack ends its collector."""
    spec = context.spec
    if spec.grpo is None:
        raise ValueError("only a job of method GRPO has this objective")
    collector = _build_collector(context, prompts, engines, rewards)
    if collector is not None:
        stack.enter_context(collector)
    # Answers of older weights are weighed by default.
    grpo = spec.grpo.model_copy(update={"mismatch": mismatch_correction(spec.grpo)})
    settings = GrpoSettings(
        grpo,
        batch_plan(spec, context.layout, pad_token=0),
        updates_per_step(spec) // spec.grpo.epochs_per_step,
        spec.training.seed,
    )
    waiting = partial(BackgroundHeartbeat, Heartbeat.for_rank())
    peers = PeerRanks(context.environment.rank, context.control, context.groups.data, context.placement.device)
    recorder = _build_recorder(context, collector)
    services = StepServices(peers, engines.publisher, collector, waiting, recorder, context.stop.has_agreed)
    return GrpoRun(GroupRelativePolicyOptimization(settings, services), collector)


def _build_recorder(context: RankContext, collector: RolloutCollector | None) -> StepRecorder | None:
    grpo = context.spec.grpo
    if grpo is None or not grpo.record_tokens or collector is None:
        return None
    return StepRecorder(context.environment.folder, recorded_settings(context.spec), lambda: collector.last_sampled)


def _build_collector(
    context: RankContext, prompts: RunPrompts, engines: RolloutEngines, rewards: RunRewards | None
) -> RolloutCollector | None:
    grpo = context.spec.grpo
    if grpo is None or prompts.sets is None or engines.generator is None or rewards is None:
        return None
    decode_answer, seed = answer_decoder(prompts.recipe), context.spec.training.seed
    sampler = GroupSampler(engines.generator, rewards.scorer, decode_answer, seed, rewards.loop)
    params = SamplingParams(
        grpo.temperature, grpo.top_p, grpo.max_new_tokens, tuple(prompts.stop_tokens), engines.routed
    )
    return RolloutCollector(grpo, sampler, prompts.sets, params, context.environment.folder)
