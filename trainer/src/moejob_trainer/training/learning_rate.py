"""The learning rate over the run, as a pure function of the step: a warm-up, then constant, linear, cosine or WSD."""

from __future__ import annotations

import math
from typing import assert_never

from moejob_api.job.training import Optimizer, Scheduler, SchedulerKind


def learning_rate(step: int, total_steps: int, optimizer: Optimizer, scheduler: Scheduler) -> float:
    """The learning rate of a step, counted from 0: the first step of a warm-up is not wasted on a rate of zero."""
    peak, minimum = optimizer.learning_rate, scheduler.minimum_learning_rate
    if step < scheduler.warmup_steps:
        return peak * (step + 1) / scheduler.warmup_steps
    decayed_share = _decayed_share(step, total_steps, scheduler)
    match scheduler.kind:
        case SchedulerKind.CONSTANT:
            return peak
        case SchedulerKind.LINEAR | SchedulerKind.WSD:
            return minimum + (peak - minimum) * (1.0 - decayed_share)
        case SchedulerKind.COSINE:
            return minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * decayed_share))
        case _:
            assert_never(scheduler.kind)


def _decayed_share(step: int, total_steps: int, scheduler: Scheduler) -> float:
    """Return the share of the decay that is done: 0 before it begins, 1 from its end on."""
    after_warmup = max(1, total_steps - scheduler.warmup_steps)
    length = scheduler.decay_steps or after_warmup
    # A stable phase comes before the decay; the other shapes decay at once.
    first = total_steps - length if scheduler.kind is SchedulerKind.WSD else scheduler.warmup_steps
    return min(1.0, max(0.0, (step - first) / length))
