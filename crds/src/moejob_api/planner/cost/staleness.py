"""Seconds of a step of GRPO whose answers may be N versions older than the weights, and who waits for whom. Pure.

Of one step, with N = `rollout.staleness`:

    S  publication of the weights, during which engines stand still
    U  scoring and updates
    W  the answers of the step, from the first request to the last token
    R  as many answers, where engines always have further ones to generate
    L  one answer of maxNewTokens
    r  reading unfinished answers again after a publication

    N = 0                S + W + U
    N > 0, Separate      S + max(U, R + r, (L + N r + U) / (N + 1))
    N > 0, Colocated     S + U + max(R + r, (L + N r) / (N + 1))

The last term is the wait for an answer that would become too old: a step with weights v + N waits for the last answer
that was requested with weights v. By then N steps and the wait have passed.
"""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.job.grpo import RolloutPlacement
from moejob_api.planner.cost.generation import GenerationTime

# Answers that are a version older have to make a step so much faster.
GAIN_OF_VERSION = 0.03


@dataclass(frozen=True, slots=True)
class StalenessTime:
    """One step with this staleness. waiting: the trainer's, for answers. working: the engines' at their full pace."""

    staleness: int
    seconds: float
    sync: float
    learning: float
    waiting: float
    working: float
    # Engines could be faster, or more of them, and the step would still wait for one long answer.
    is_held_by_longest: bool

    @property
    def weighted_seconds(self) -> float:
        """Seconds of the step, longer by what older answers must gain: for choosing a staleness."""
        return self.seconds * (1 + GAIN_OF_VERSION * self.staleness)

    @property
    def trainer_idle_share(self) -> float:
        """The share of the step in which the trainer waits for answers."""
        return self.waiting / self.seconds

    @property
    def engine_idle_share(self) -> float:
        """The share of the step in which engines generate nothing, or less than they could."""
        return max(0.0, 1 - (self.working + self.sync) / self.seconds)


def staleness_time(
    placement: RolloutPlacement, staleness: int, sync: float, learning: float, generation: GenerationTime
) -> StalenessTime:
    """Return the time of a step; `generation` is that of the same staleness."""
    if staleness == 0:
        waiting, working, is_held = generation.all_answers, generation.all_answers, False
    else:
        working = generation.steady + generation.reading
        oldest = generation.longest + staleness * generation.reading
        is_separate = placement is RolloutPlacement.SEPARATE
        held = (oldest + learning * is_separate) / (staleness + 1)
        hidden = learning if is_separate else 0.0
        waiting, is_held = max(hidden, working, held) - hidden, held > max(hidden, working)
    seconds = sync + learning + waiting
    return StalenessTime(staleness, seconds, sync, learning, waiting, min(working, seconds - sync), is_held)
