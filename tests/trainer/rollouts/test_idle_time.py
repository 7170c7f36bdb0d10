"""Idle time of engines, by a clock that the test reads."""

from __future__ import annotations

import pytest

from moejob_trainer.rollouts.idle_time import IdleClock, mean_idle_share


def test_an_engine_is_idle_until_it_has_something_to_compute_and_behind_it() -> None:
    clock = IdleClock(10.0)
    clock.set_busy(12.0, is_busy=True)
    clock.set_busy(19.0, is_busy=False)
    assert clock.take_share(20.0) == pytest.approx(0.3)


def test_each_share_is_of_the_time_since_the_one_before() -> None:
    clock = IdleClock(0.0)
    clock.set_busy(4.0, is_busy=True)
    assert clock.take_share(8.0) == pytest.approx(0.5)
    assert clock.take_share(10.0) == 0.0
    clock.set_busy(11.0, is_busy=False)
    assert clock.take_share(14.0) == pytest.approx(0.75)


def test_to_say_again_that_an_engine_is_busy_changes_nothing() -> None:
    clock = IdleClock(0.0)
    for now in (2.0, 3.0, 4.0):
        clock.set_busy(now, is_busy=True)
    assert clock.take_share(4.0) == pytest.approx(0.5)


def test_no_time_has_no_idle_share() -> None:
    assert IdleClock(5.0).take_share(5.0) == 0.0


def test_the_share_of_engines_is_the_mean_of_theirs() -> None:
    working, idle = IdleClock(0.0), IdleClock(0.0)
    working.set_busy(2.0, is_busy=True)
    assert mean_idle_share([working, idle], 10.0) == pytest.approx(0.6)
