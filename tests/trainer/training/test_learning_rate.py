"""The learning rate of each step, by the formulas of docs/trainer/losses.md worked out by hand."""

from __future__ import annotations

import pytest

from moejob_api.job.training import Optimizer, Scheduler, SchedulerKind
from moejob_trainer.training.learning_rate import learning_rate

PEAK, TOTAL = 1.0, 8


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        pytest.param(Scheduler(kind=SchedulerKind.CONSTANT), [1.0] * 8, id="constant"),
        pytest.param(
            Scheduler(kind=SchedulerKind.CONSTANT, warmup_steps=4),
            [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0],
            id="the first step of a warm-up is not wasted",
        ),
        pytest.param(
            Scheduler(kind=SchedulerKind.LINEAR, warmup_steps=4, minimum_learning_rate=0.2),
            [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4],
            id="linear to the minimum of the step behind the last",
        ),
        pytest.param(
            Scheduler(kind=SchedulerKind.COSINE, decay_steps=4),
            [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0.0, 0.0, 0.0, 0.0],
            id="cosine, then the minimum",
        ),
        pytest.param(
            Scheduler(kind=SchedulerKind.WSD, decay_steps=4),
            [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25],
            id="constant, then a decay before the end",
        ),
    ],
)
def test_a_schedule_has_its_shape(scheduler: Scheduler, expected: list[float]) -> None:
    optimizer = Optimizer(learning_rate=PEAK)
    assert [learning_rate(step, TOTAL, optimizer, scheduler) for step in range(TOTAL)] == pytest.approx(expected)
