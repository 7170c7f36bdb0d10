"""How long a start took is told part by part, as the slowest pod had it."""

from __future__ import annotations

import time

from moejob_trainer.starting import START, Start, Watch, Way, process_began_at, slowest

# In binary fractions, so that sums are exact.
CAME = Way(ending_seconds=0.5, import_seconds=0.0, meeting_seconds=4.0, met_at=100.0)


def test_a_rank_adds_joining_and_loading_to_what_its_launcher_tells() -> None:
    times = iter([102.0, 110.0])
    watch = Watch(CAME, clock=lambda: next(times))
    watch.joined()
    assert watch.begun() == Start(0.5, 0.0, 4.0, joining_seconds=2.0, loading_seconds=8.0)


def test_what_a_launcher_tells_comes_through_an_environment() -> None:
    watch = Watch.for_rank({START: CAME.as_text()})
    watch.joined()
    start = watch.begun()
    assert start is not None
    assert (start.ending_seconds, start.meeting_seconds) == (0.5, 4.0)


def test_a_rank_without_a_launcher_tells_nothing() -> None:
    watch = Watch.for_rank({})
    watch.joined()
    assert watch.begun() is None


def test_of_each_part_the_longest_counts_and_of_waiting_that_of_the_last_to_come() -> None:
    survivor = Start(1.0, 0.0, 9.0, 0.25, 2.0)
    replaced = Start(0.0, 8.0, 0.5, 0.5, 1.0)
    assert slowest([survivor, replaced]) == Start(1.0, 8.0, 0.5, 0.5, 2.0)


def test_a_process_knows_when_it_began() -> None:
    # Tests import for seconds before the first of them runs.
    assert 0.0 < time.monotonic() - process_began_at() < 24 * 3600.0
