"""The distance of two curves, counted by hand."""

from __future__ import annotations

from benchmarks.trainer.loss_curves import distance


def test_curves_are_as_far_apart_as_their_steps_say() -> None:
    assert distance([5.0, 4.0, 3.0, 2.0], [5.0, 4.25, 3.5]) == {
        "steps": 3,
        "second": 0.25,
        "largest": 0.5,
        "largestAtStep": 3,
        "meanOfLast": 0.25,
    }
