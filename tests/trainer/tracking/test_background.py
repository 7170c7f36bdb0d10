"""No sink can stop a run, delay its steps or its end by more than it may, or fail in silence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moejob_trainer.tracking import BackgroundBackend, Tracker, TrackerBackend
from trainer.tracking.runs import DEADLINE_SECONDS, Hanging, Kept, numbers, until

PATIENCE = 0.2


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    backend = Hanging()
    yield backend
    backend.released.set()


def _ended(*backends: BackgroundBackend, patience_seconds: float = DEADLINE_SECONDS) -> None:
    with Tracker(backends, patience_seconds):
        pass


def test_a_sink_gets_every_step_in_order_and_is_closed_when_all_is_sent(said: list[str]) -> None:
    kept = Kept()
    backend = BackgroundBackend("kept", lambda: kept, said.append)
    for step in range(1, 201):
        backend.write(numbers(step))
    _ended(backend)
    assert kept.steps == [*range(1, 201)]
    assert (kept.ended, said, backend.lost) == ([False], [], 0)


def test_what_a_sink_raises_is_said_once_and_counted(said: list[str]) -> None:
    kept = Kept(broken=frozenset({2, 3, 5}))
    backend = BackgroundBackend("kept", lambda: kept, said.append)
    for step in range(1, 7):
        backend.write(numbers(step))
    _ended(backend)
    assert kept.steps == [1, 4, 6]
    assert kept.ended == [False]
    assert said == [
        (
            "kept: ConnectionError: no route for step 2; the run continues, and steps.jsonl in the run folder has "
            "all of them"
        ),
        "kept lacks the numbers of 3 steps; steps.jsonl in the run folder has all of them",
    ]


def test_a_sink_that_cannot_be_opened_loses_every_step_but_not_the_run(said: list[str]) -> None:
    def refused() -> TrackerBackend:
        raise PermissionError("api key missing")

    backend = BackgroundBackend("closed", refused, said.append)
    for step in (1, 2):
        backend.write(numbers(step))
    _ended(backend)
    assert backend.lost == 2
    assert "PermissionError: api key missing" in said[0]
    assert len(said) == 2


def test_a_sink_that_hangs_delays_neither_steps_nor_the_end(hanging: Hanging, said: list[str]) -> None:
    kept = Kept()
    behind = BackgroundBackend("hanging", lambda: hanging, said.append, most_waiting=10)
    beside = BackgroundBackend("kept", lambda: kept, said.append)
    with Tracker([behind, beside], PATIENCE) as tracker:
        tracker.write(1, {"loss": 1.0})
        until(hanging.is_reached.is_set)
        # Returns although nothing takes them out of the queue.
        for step in range(2, 1001):
            tracker.write(step, {"loss": 1.0})
        until(lambda: len(kept.steps) == 1000)
    assert kept.ended == [False]
    # One is in its hands.
    assert behind.lost == 999
    assert "10 steps behind" in said[0]
    assert said[1] == "hanging did not finish in time and was left behind"


def test_a_sink_that_hangs_as_it_opens_is_left_behind(hanging: Hanging, said: list[str]) -> None:
    def opened() -> TrackerBackend:
        hanging.write(numbers(1))
        return hanging

    backend = BackgroundBackend("hanging", opened, said.append)
    _ended(backend, patience_seconds=PATIENCE)
    assert said == ["hanging did not finish in time and was left behind"]


@pytest.mark.parametrize(
    ("raised", "has_failed"),
    [
        pytest.param(ValueError("diverged"), True, id="a failure"),
        pytest.param(SystemExit(143), False, id="asked to stop"),
    ],
)
def test_sinks_learn_how_the_run_ended(raised: BaseException, has_failed: bool) -> None:
    kept = Kept()
    with pytest.raises(type(raised)), Tracker([BackgroundBackend("kept", lambda: kept)], DEADLINE_SECONDS):
        raise raised
    assert kept.ended == [has_failed]
