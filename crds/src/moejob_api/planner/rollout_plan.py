"""The trainer and the engines of a job side by side: who waits for whom in a step, and what would change that.

Times are those of planner/cost, for answers of usual length. Jobs on CPUs have none: cores are shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moejob_api.derived import rollout_layout
from moejob_api.hardware import job_hardware
from moejob_api.job import Spec
from moejob_api.job.grpo import RolloutPlacement
from moejob_api.job.resources import Accelerator
from moejob_api.layout.sizes import Layout
from moejob_api.models.shape import ModelShape
from moejob_api.planner.cost.estimate import prepare_cost_case, rollout_times, step_seconds
from moejob_api.planner.cost.generation import TYPICAL_SHARE
from moejob_api.planner.cost.rates import GpuMachine
from moejob_api.planner.cost.rollout import RolloutTime
from moejob_api.planner.cost.staleness import StalenessTime
from moejob_api.planner.plan import Plan
from moejob_api.rules.object_rules.grpo_rules import MOST_STALENESS

# Further values of rollout.staleness that are compared.
COMPARED = (0, 1, 2, 4, 8)
# Older answers are a choice for those who measured what they learn from them.
MOST_ADVISED = 4
# A shorter wait is within the error of the estimate.
NOTABLE_WAIT = 0.1
# As many times the job's engines are looked at.
MOST_ENGINES_FACTOR = 8


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """A step of the job, the same with other staleness, and sentences about both."""

    current: StalenessTime
    compared: tuple[StalenessTime, ...]
    engines: int
    mean_tokens: int
    longest_tokens: int
    advice: tuple[str, ...]


def rollout_of_plan(plan: Plan) -> RolloutPlan | None:
    """Return the waits of a planned job, where its layout holds."""
    if plan.layout is None or plan.shape is None or plan.memory is None:
        return None
    return plan_rollout(plan.spec, plan.shape, plan.layout)


def plan_rollout(spec: Spec, shape: ModelShape, layout: Layout) -> RolloutPlan | None:
    """Return the waits of a job; None for SFT and for jobs on CPUs."""
    if spec.grpo is None or spec.resources.accelerator is Accelerator.CPU:
        return None
    hardware, engines = job_hardware(spec.resources), rollout_layout(spec, layout)
    rollout = rollout_times(spec, shape, layout, hardware)
    if rollout is None or engines is None:
        return None
    case = prepare_cost_case(spec, shape, layout)
    learning = sum(step_seconds(case, GpuMachine(hardware, layout.gpus_per_pod)).values())
    staleness = spec.grpo.rollout.staleness
    choices = {staleness, *(choice for choice in COMPARED if choice <= MOST_STALENESS)}
    steps = tuple(rollout.with_staleness(choice, learning) for choice in sorted(choices))
    current = next(step for step in steps if step.staleness == staleness)
    waits = _StepWaits(spec, shape, rollout, engines.engines, current)
    return RolloutPlan(
        current=current,
        compared=steps,
        engines=engines.engines,
        mean_tokens=round(TYPICAL_SHARE * spec.grpo.max_new_tokens),
        longest_tokens=spec.grpo.max_new_tokens,
        advice=(*_wait_sentences(waits), *_gain_sentences(current, steps)),
    )


@dataclass(frozen=True, slots=True)
class _StepWaits:
    spec: Spec
    shape: ModelShape
    rollout: RolloutTime
    engines: int
    step: StalenessTime

    @property
    def is_separate(self) -> bool:
        return self.rollout.grpo.rollout.placement is RolloutPlacement.SEPARATE

    def with_engines(self, count: int) -> StalenessTime:
        """Return the step with another number of engines."""
        engine = replace(self.rollout.engine, answers=-(-self.rollout.grpo.answers_per_step // count))
        return replace(self.rollout, engine=engine).with_staleness(self.step.staleness, self.step.learning)


def _wait_sentences(waits: _StepWaits) -> Iterator[str]:
    step = waits.step
    if step.staleness == 0:
        whose = "" if waits.is_separate else " on the same GPUs"
        yield (
            f"trainer and engines{whose} take turns: the trainer waits {step.trainer_idle_share:.0%} of a step for "
            f"engines, engines wait {step.engine_idle_share:.0%} for the trainer"
        )
    elif step.is_held_by_longest and step.trainer_idle_share >= NOTABLE_WAIT:
        yield _longest_answer_sentence(waits)
    elif not waits.is_separate:
        yield "trainer and engines take turns on the same GPUs; unfinished answers are carried over to the next step"
    elif step.trainer_idle_share >= NOTABLE_WAIT:
        yield _more_engines_sentence(waits)
    elif step.engine_idle_share >= NOTABLE_WAIT:
        yield _fewer_engines_sentence(waits)
    else:
        yield "trainer and engines keep each other busy"


def _longest_answer_sentence(waits: _StepWaits) -> str:
    step, grpo = waits.step, waits.rollout.grpo
    further = (choice for choice in COMPARED if step.staleness < choice <= MOST_STALENESS)
    steps = (waits.rollout.with_staleness(choice, step.learning) for choice in further)
    enough = next((choice.staleness for choice in steps if choice.trainer_idle_share < NOTABLE_WAIT), None)
    remedy = "fewer maxNewTokens" if enough is None else f"staleness {enough} or fewer maxNewTokens"
    return (
        f"the trainer waits {step.trainer_idle_share:.0%} of a step for answers of maxNewTokens "
        f"{grpo.max_new_tokens:,}, which would become older than staleness {step.staleness} allows; {remedy} would end "
        "that"
    )


def _more_engines_sentence(waits: _StepWaits) -> str:
    words = f"the trainer waits {waits.step.trainer_idle_share:.0%} of a step for engines"
    most = min(waits.rollout.grpo.answers_per_step, MOST_ENGINES_FACTOR * waits.engines)
    best_seconds = waits.with_engines(most).seconds
    enough = next(n for n in range(waits.engines, most + 1) if waits.with_engines(n).seconds <= 1.05 * best_seconds)
    if enough == waits.engines:
        return f"{words}; further engines would not change that"
    return f"{words}; replicas: {enough} would shorten it to {waits.with_engines(enough).seconds:.1f} s"


def _fewer_engines_sentence(waits: _StepWaits) -> str:
    words = f"engines wait {waits.step.engine_idle_share:.0%} of a step for the trainer"
    enough = next(n for n in range(1, waits.engines + 1) if waits.with_engines(n).seconds <= waits.step.seconds * 1.02)
    if enough == waits.engines:
        return words
    return f"{words}; replicas: {enough} would be enough"


def _gain_sentences(current: StalenessTime, steps: tuple[StalenessTime, ...]) -> Iterator[str]:
    best = min((step for step in steps if step.staleness <= MOST_ADVISED), key=lambda step: step.weighted_seconds)
    if best.staleness > current.staleness:
        yield (
            f"rollout.staleness: {best.staleness} would make a step {current.seconds / best.seconds:.2f} times as fast "
            f"({best.seconds:.1f} s instead of {current.seconds:.1f})"
        )
    if best.staleness < current.staleness:
        yield f"rollout.staleness: {best.staleness} is {_slowness_words(best, current)}, with answers of newer weights"


def _slowness_words(best: StalenessTime, current: StalenessTime) -> str:
    slower = best.seconds / current.seconds - 1
    return "as fast" if slower < 0.005 else f"only {slower:.0%} slower"
