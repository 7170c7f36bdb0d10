"""Host memory of routing replay: the experts that engines chose for each token of a step, in every layer that has some.

Every rank has those of the whole step, as numbers of the smallest type, and once more those in its micro batches, which
are its replica's share. Rank 0 has the answers as they came beside the arrays that it makes of them. Of two ranks each
was measured at 2.2 times the choices, all else included; rank 0 at 5.2 where four times as many groups may be asked.
"""

from __future__ import annotations

import math

from moejob_api.arithmetic import ceil_div
from moejob_api.derived import choice_bytes
from moejob_api.job.grpo import Grpo
from moejob_api.planner.memory.case import Case


def replay_bytes(case: Case) -> int:
    """Return the bytes of replayed routing in the pod of rank 0, which has most; 0 without replay."""
    grpo, experts = case.spec.grpo, case.shape.experts
    if grpo is None or not grpo.routing_replay or experts is None:
        return 0
    # The longest answers that the job allows.
    tokens = grpo.answers_per_step * case.spec.data.max_length
    choices = tokens * len(case.shape.routed_layers) * experts.per_token * choice_bytes(experts.count)
    others = case.layout.gpus_per_pod - 1
    return choices * (_steps_asked(grpo) + 1) + others * (choices + ceil_div(choices, case.layout.data))


def _steps_asked(grpo: Grpo) -> int:
    """Return the steps' worth of answers that are held until one is full; those without signal may be needed for it."""
    return 1 if grpo.dynamic_sampling is None else math.ceil(grpo.dynamic_sampling.over_sampling)
