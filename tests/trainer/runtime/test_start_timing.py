"""The duration of a start, part by part, of the slowest pod."""

from __future__ import annotations

import time

from moejob_trainer.runtime.start_timing import (
    START,
    LauncherTiming,
    StartTimer,
    StartTiming,
    process_began_at,
    slowest_start,
)

# In binary fractions, so that sums are exact.
CAME = LauncherTiming(ending_seconds=0.5, import_seconds=0.0, rendezvous_seconds=4.0, met_at=100.0)


def test_a_rank_adds_joining_and_loading_to_what_its_launcher_tells() -> None:
    times = iter([102.0, 110.0])
    timer = StartTimer(CAME, clock=lambda: next(times))
    timer.mark_joined()
    assert timer.finish_start() == StartTiming(0.5, 0.0, 4.0, joining_seconds=2.0, loading_seconds=8.0)


def test_what_a_launcher_tells_comes_through_an_environment() -> None:
    timer = StartTimer.for_rank({START: CAME.as_text()})
    timer.mark_joined()
    start = timer.finish_start()
    assert start is not None
    assert (start.ending_seconds, start.rendezvous_seconds) == (0.5, 4.0)


def test_a_rank_without_a_launcher_tells_nothing() -> None:
    timer = StartTimer.for_rank({})
    timer.mark_joined()
    assert timer.finish_start() is None


def test_of_each_part_the_longest_counts_and_of_waiting_that_of_the_last_to_come() -> None:
    survivor = StartTiming(1.0, 0.0, 9.0, 0.25, 2.0)
    replaced = StartTiming(0.0, 8.0, 0.5, 0.5, 1.0)
    assert slowest_start([survivor, replaced]) == StartTiming(1.0, 8.0, 0.5, 0.5, 2.0)


def test_a_process_knows_when_it_began() -> None:
    # Tests import for seconds before the first of them runs.
    assert 0.0 < time.monotonic() - process_began_at() < 24 * 3600.0
