"""Host memory of routing replay: the experts that engines chose for each token of a step, in every layer that has some.

Every rank has those of the whole step, as numbers of the smallest type.
"""

from __future__ import annotations

import math

from moejob_api.derived import choice_bytes
from moejob_api.job.grpo import Grpo
from moejob_api.planner.memory.case import Case

# Copies of a step's choices that a rank has at once: what rank 0 sent and the arrays read of it, later these and micro
# batches. Rank 0 has five while it sends them, the answers themselves among them. Measured with two ranks.
COPIES = 2
FIRST_RANK_COPIES = 5


def replay_bytes(case: Case) -> int:
    """Return the bytes of replayed routing in the pod of rank 0, which has most; 0 without replay."""
    grpo, experts = case.spec.grpo, case.shape.experts
    if grpo is None or not grpo.routing_replay or experts is None:
        return 0
    # The longest answers that the job allows.
    tokens = grpo.answers_per_step * case.spec.data.max_length
    choices = tokens * len(case.shape.routed_layers) * experts.per_token * choice_bytes(experts.count)
    return choices * (_first_rank_copies(grpo) + (case.layout.gpus_per_pod - 1) * COPIES)


def _first_rank_copies(grpo: Grpo) -> int:
    if grpo.dynamic_sampling is None:
        return FIRST_RANK_COPIES
    # Answers without signal are held until the step is full, and those of the step before until then.
    return max(FIRST_RANK_COPIES, 1 + math.ceil(grpo.dynamic_sampling.over_sampling))
