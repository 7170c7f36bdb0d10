"""The objective of a run with its data: supervised fine-tuning on documents, or GRPO on prompts and engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from moejob_api.job import Method
from moejob_trainer.data.loader import BatchLoader
from moejob_trainer.evaluation.run_evaluations import Evaluator, RankedEvaluations
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.objectives import Objective
from moejob_trainer.objectives.sft import SupervisedFineTuning
from moejob_trainer.runtime.heartbeats import Heartbeat
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.data import RunData, load_data
from moejob_trainer.setup.grpo import build_grpo
from moejob_trainer.setup.model import RunModel
from moejob_trainer.setup.prompts import RunPrompts, load_prompts
from moejob_trainer.setup.rewards import RunRewards, try_rewards
from moejob_trainer.setup.rollouts import connect_engines
from moejob_trainer.training import UpdateResult


@dataclass(frozen=True, slots=True)
class RunObjective:
    """The objective, and the numbers that a run reports beside its updates' numbers."""

    objective: Objective
    epoch: Callable[[], float | None]
    waited: Callable[[], float]
    evaluations: RankedEvaluations
    measured: Callable[[], Mapping[str, float]] = dict
    # Called with each step, by its number in the step log, and its updates before it is reported.
    record: Callable[[int, Sequence[UpdateResult]], None] = lambda *_: None


def load_inputs(context: RankContext, model: RunModel, rewards: RunRewards | None) -> RunData | RunPrompts:
    """Read the training data of the run, which says how many steps there are; rewards are tried on its first prompt."""
    if context.spec.method is not Method.GRPO:
        return load_data(context, model)
    prompts = load_prompts(context, model)
    try_rewards(context, rewards, prompts.sets)
    return prompts


def build_objective(
    context: RankContext,
    engine: MegatronTrainingEngine,
    inputs: RunData | RunPrompts,
    rewards: RunRewards | None,
    stack: ExitStack,
) -> RunObjective:
    """Build the objective that the job's method names; what it starts ends with the stack."""
    if isinstance(inputs, RunData):
        return _build_supervised(context, inputs, engine, stack)
    engines = connect_engines(context, engine, inputs, stack)
    run = build_grpo(context, inputs, engines, rewards, stack)
    evaluate = partial(run.objective.evaluate, engine=engine)
    evaluations = RankedEvaluations(context.spec, inputs.total_steps, context.ranks, evaluate)
    return RunObjective(
        run.objective,
        lambda: run.epoch,
        run.objective.waited_seconds,
        evaluations,
        run.objective.metrics,
        run.objective.record_step,
    )


def _build_supervised(
    context: RankContext, data: RunData, engine: MegatronTrainingEngine, stack: ExitStack
) -> RunObjective:
    source = BatchLoader(data.training, data.share)
    stack.callback(source.close)
    objective = SupervisedFineTuning(source)
    evaluator = Evaluator(
        engine=engine,
        objective=objective,
        sets=data.evaluation,
        prompts=data.prompts,
        size=data.training.size,
        share=data.share,
        beat=Heartbeat.for_rank().beat,
    )
    evaluations = RankedEvaluations(context.spec, data.total_steps, context.ranks, evaluator.evaluate_sets)
    return RunObjective(objective, lambda: source.epoch, source.waited_seconds, evaluations)
