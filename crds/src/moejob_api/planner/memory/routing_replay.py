"""Host memory of routing replay: the experts that engines chose for each token of a step, in every layer that has some.

Every rank has the choices of the whole step, in the smallest integer type, and its replica's share of them once more,
in micro batches. Rank 0 has the answers as they arrived beside the arrays that it makes of them. On two ranks, each was
measured at 2.2 times the choices with all else included, and rank 0 at 5.2 times where a step may ask for four times
as many groups. With `rollout.staleness` N rank 0 has finished groups of N further steps:

    choices = tokens of a step x layers with experts x experts of a token x 1 byte (2 from 256 experts on)
"""

from __future__ import annotations

import math

from moejob_api.arithmetic import ceil_div
from moejob_api.derived import choice_bytes
from moejob_api.job import Spec
from moejob_api.job.grpo import Grpo
from moejob_api.models.shape import ModelShape
from moejob_api.planner.memory.case import PlanningCase


def replay_bytes(case: PlanningCase) -> int:
    """Return the bytes of replayed routing in the pod of rank 0, which has most; 0 without replay."""
    grpo, experts = case.spec.grpo, case.shape.experts
    if grpo is None or not grpo.routing_replay or experts is None:
        return 0
    choices, others = step_choice_bytes(case.spec, grpo, case.shape), case.layout.gpus_per_pod - 1
    return choices * (_buffered_steps(grpo) + 1) + others * (choices + ceil_div(choices, case.layout.data))


def step_choice_bytes(spec: Spec, grpo: Grpo, shape: ModelShape) -> int:
    """Return the bytes of the choices for the answers of one step, all as long as the job allows."""
    if not grpo.routing_replay or shape.experts is None:
        return 0
    tokens = grpo.answers_per_step * spec.data.max_length
    return tokens * len(shape.routed_layers) * shape.experts.per_token * choice_bytes(shape.experts.count)


def _buffered_steps(grpo: Grpo) -> int:
    """Return how many steps' answers are held until one step is full: groups without signal may have to fill it."""
    steps = 1 if grpo.dynamic_sampling is None else math.ceil(grpo.dynamic_sampling.over_sampling)
    return steps + grpo.rollout.staleness
