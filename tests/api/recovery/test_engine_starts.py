"""Starts of engines: which ends count, and when another start is of no use."""

from __future__ import annotations

import pytest

from moejob_api.recovery.engine_starts import STARTED_SECONDS, STARTS, EngineStarts


def ended(*ends: tuple[int, float]) -> EngineStarts:
    starts = EngineStarts()
    for exit_code, ran_seconds in ends:
        starts = starts.after_end(exit_code, ran_seconds)
    return starts


@pytest.mark.parametrize(
    ("ends", "hopeless"),
    [
        pytest.param([], False, id="no end"),
        pytest.param([(1, 3.0)] * (STARTS - 1), False, id="one start less than allowed"),
        pytest.param([(1, 3.0)] * STARTS, True, id="as many as allowed"),
        pytest.param([(1, 3.0)] * (STARTS - 1) + [(-9, STARTED_SECONDS), (1, 3.0)], False, id="one that had started"),
        pytest.param([(1, STARTED_SECONDS)] * 20, False, id="engines that had started"),
        pytest.param([(78, 3.0)], True, id="one that calls the job wrong"),
    ],
)
def test_an_engine_is_given_up_when_it_cannot_start(ends: list[tuple[int, float]], hopeless: bool) -> None:
    assert ended(*ends).is_hopeless is hopeless


def test_the_refusal_begins_with_the_engine_and_ends_with_what_it_wrote() -> None:
    said = ended(*[(1, 3.0)] * STARTS).refusal_message(2, b"INFO loading\npython: No module named moejob_rollout\n\n")
    begins = "engine 2 ended 5 times within 120 s of its start, last with exit code 1"
    assert said == f"{begins}: python: No module named moejob_rollout"
    assert ended((78, 1.0)).refusal_message(0, b"\x1b[31mno such model") == "engine 0 cannot start: [31mno such model"
    assert ended((78, 1.0)).refusal_message(0, b"").endswith("it wrote nothing; see the log of its pod")
