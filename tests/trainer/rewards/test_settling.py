"""Every completion that waits for a reward gets a score or a failure, whatever a process or a service does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moejob_api.job.grpo import Reward, RewardFailure
from moejob_trainer.rewards.completion import Completion
from moejob_trainer.rewards.scorer import Scorer
from trainer.rewards import strange_rewards, strange_services
from trainer.rewards.strange_services import strange_service

FOLDER = str(Path(__file__).parent)
LONGEST_SECONDS = 280


def _settled(reward: Mapping[str, Any], texts: Sequence[str]) -> tuple[list[float], Scorer]:
    """Return what each completion is worth; the deadline is that of a run that would hang for ever."""

    async def scored() -> tuple[list[float], Scorer]:
        scorer = Scorer([Reward.model_validate(reward)], RewardFailure.DROP_GROUP)
        async with asyncio.timeout(LONGEST_SECONDS), scorer:
            completions = [Completion("1 + 1", text, len(text), 10) for text in texts]
            return [score.total for score in await asyncio.gather(*map(scorer.score_completion, completions))], scorer

    return asyncio.run(scored())


def _process(**more: Any) -> dict[str, Any]:
    return {"module": "strange_rewards:by_name", "modulePath": FOLDER, **more}


REASONS = [
    ("raise", "exception: ValueError: no [" + FOLDER + "/strange_rewards.py:"),
    ("raise_unprintable", "exception: Unprintable: (its message cannot be printed)"),
    ("exit", "exception: SystemExit: 0"),
    ("die", "process died: its process died with exit code 0"),
    ("die_inside_a_line", "process died: its process died with exit code 0"),
    ("write_a_line", "unreadable answer"),
    ("write_megabytes", "unreadable answer"),
    ("hang", "time-out: it took longer than 2 s"),
    ("hang_for_good", "time-out: it took longer than 2 s"),
    ("stop", "time-out: it took longer than 2 s"),
    ("close_everything", "process died"),
    ("fork_and_die", "process died"),
    ("nan", "not finite: it returned nan"),
    ("huge", "not finite: it returned"),
    ("text", "wrong type: it returned '1.0'"),
    ("none", "wrong type: it returned None"),
    ("object", "wrong type: it returned an object of type Unshown"),
]


@pytest.mark.parametrize(("behaviour", "reason"), REASONS)
def test_a_process_that_gives_no_score_has_failed_by_name(behaviour: str, reason: str) -> None:
    values, scorer = _settled(_process(timeoutSeconds=2, concurrency=1), [behaviour])
    assert math.isnan(values[0])
    assert reason in scorer.last_failure["strange_rewards:by_name"]


def test_every_behaviour_of_a_process_has_its_row() -> None:
    assert [name for name, _ in REASONS] == list(strange_rewards.BEHAVIOURS)


@pytest.mark.parametrize("behaviour", strange_rewards.GOOD)
def test_what_a_process_does_beside_its_scores_is_no_failure(behaviour: str) -> None:
    assert _settled(_process(batchSize=2, concurrency=1), [behaviour] * 5)[0] == [1.0] * 5


@pytest.mark.parametrize(("function", "kind"), [("too_many", "wrong count"), ("no_list", "wrong type")])
def test_a_function_that_returns_no_list_of_scores_has_failed_by_name(function: str, kind: str) -> None:
    _, scorer = _settled(_process(module=f"strange_rewards:{function}"), ["good"])
    assert scorer.last_failure[f"strange_rewards:{function}"].startswith(f"{kind}: it returned")


@pytest.mark.thorough
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    texts=st.lists(st.sampled_from([*strange_rewards.BEHAVIOURS, *strange_rewards.GOOD]), min_size=1, max_size=8),
    batch=st.sampled_from([1, 2, 3, 64]),
    concurrency=st.integers(1, 3),
)
def test_processes_settle_every_completion(texts: list[str], batch: int, concurrency: int) -> None:
    values, _ = _settled(_process(timeoutSeconds=4, batchSize=batch, concurrency=concurrency), texts)
    for text, value in zip(texts, values, strict=True):
        assert text in strange_rewards.GOOD or math.isnan(value)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    texts=st.lists(
        st.sampled_from([*sorted(set(strange_services.BAD) - {"silence", "drip"}), *strange_services.GOOD]),
        min_size=1,
        max_size=12,
    ),
    retries=st.integers(0, 1),
    concurrency=st.integers(1, 4),
)
def test_services_settle_every_completion(texts: list[str], retries: int, concurrency: int) -> None:
    with strange_service() as url:
        values, _ = _settled({"url": url, "retries": retries, "batchSize": 1, "concurrency": concurrency}, texts)
    for text, value in zip(texts, values, strict=True):
        assert value == 0.5 if text in strange_services.GOOD else math.isnan(value)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("huge integer", "not finite: it returned 1000"),
        ("integer without end", "unreadable answer"),
        ("deep JSON", "unreadable answer"),
        ("NaN", "not finite: it returned nan"),
        ("infinite", "not finite: it returned inf"),
        ("text", "wrong type: it returned '1'"),
        ("too few", "wrong count: it returned 0 scores for 1"),
        ("bad gzip", "unreadable answer: its answer is encoded (gzip)"),
        ("cut in the body", "service error: RemoteProtocolError"),
        ("silence", "time-out: it took longer than 1 s"),
        ("drip", "time-out: it took longer than 1 s"),
        ("400", "service error: "),
        ("500", "service error: ServerError: HTTP 500"),
    ],
)
def test_a_service_that_gives_no_score_has_failed_by_name(behaviour: str, reason: str) -> None:
    with strange_service() as url:
        values, scorer = _settled({"url": url, "retries": 0, "timeoutSeconds": 1}, [behaviour])
    assert math.isnan(values[0])
    assert scorer.last_failure[url].startswith(reason)
