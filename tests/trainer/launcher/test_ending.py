"""The launchers' rung of the ladder: who is blamed, who may restart, who leaves."""

from __future__ import annotations

import pytest

from moejob_api.contract.pods import TERMINATION_BYTES, PodOutcome, RunProgress, TerminationMessage
from moejob_api.job.status import HubCommit, RepositoryKind
from moejob_api.recovery.restarts import FailureCause
from moejob_trainer.launcher.ending import (
    Ending,
    FailureOrigin,
    Fault,
    blamed_rank,
    build_termination,
    ending_by_fault,
    ending_without_pod,
    launcher_exit_code,
)
from moejob_trainer.launcher.termination_message import fit_termination

FAULT = Fault(FailureCause.RANK_FAILED, "rank 5 was killed", rank=5, exit_code=-9, step=12)


def before(in_place: int, checkpoint: int | None = None) -> Ending:
    return Ending(
        pod=0, token="a", cause=FailureCause.RANK_FAILED, message="", in_place=in_place, checkpoint=checkpoint
    )


def origin(checkpoint: int | None = None, *, is_stopping: bool = False) -> FailureOrigin:
    return FailureOrigin(1, "b", checkpoint, is_stopping)


@pytest.mark.parametrize(
    ("ending", "in_place", "leaves", "delay"),
    [
        pytest.param(ending_by_fault(origin(), FAULT, None), 1, False, 0.0, id="first failure"),
        pytest.param(ending_by_fault(origin(), FAULT, before(1)), 2, False, 2.0, id="second"),
        pytest.param(ending_by_fault(origin(), FAULT, before(2)), 2, True, 2.0, id="third"),
        pytest.param(
            ending_by_fault(origin(10), FAULT, before(2)), 1, False, 0.0, id="third, first checkpoint before it"
        ),
        pytest.param(ending_by_fault(origin(20), FAULT, before(2, 10)), 1, False, 0.0, id="third, newer checkpoint"),
        pytest.param(ending_by_fault(origin(10), FAULT, before(2, 10)), 2, True, 2.0, id="third, same checkpoint"),
        pytest.param(ending_by_fault(origin(5), FAULT, before(2, 10)), 2, True, 2.0, id="third, older checkpoint"),
        pytest.param(ending_by_fault(origin(is_stopping=True), FAULT, None), 0, True, 0.0, id="while stopping"),
        pytest.param(
            ending_by_fault(origin(), Fault(FailureCause.BAD_CONFIGURATION, ""), None),
            0,
            True,
            0.0,
            id="bad configuration",
        ),
        pytest.param(ending_without_pod(3, origin(), "gone", before(1)), 1, True, 0.0, id="another pod is gone"),
        pytest.param(ending_without_pod(3, origin(9), "gone", before(1)), 0, True, 0.0, id="gone after a checkpoint"),
    ],
)
def test_restarts_in_place_are_few_and_forgiven_by_a_checkpoint(
    ending: Ending, in_place: int, leaves: bool, delay: float
) -> None:
    assert (ending.in_place, ending.pod_leaves, ending.delay_seconds) == (in_place, leaves, delay)


def test_the_newest_checkpoint_is_remembered() -> None:
    assert ending_by_fault(origin(5), FAULT, before(1, 10)).checkpoint == 10
    assert ending_by_fault(origin(15), FAULT, before(1, 10)).checkpoint == 15
    assert ending_by_fault(origin(), FAULT, None).checkpoint is None


@pytest.mark.parametrize(
    ("exits", "expected"),
    [
        pytest.param({0: 1, 3: 78}, 3, id="the one that calls the job wrong"),
        pytest.param({0: 1, 3: -9}, 3, id="the one that was killed"),
        pytest.param({0: 0, 2: 1, 3: 1}, 2, id="the lowest that failed"),
        pytest.param({0: 143, 1: -15}, 1, id="not one that has saved"),
    ],
)
def test_the_rank_that_explains_the_others_is_blamed(exits: dict[int, int], expected: int) -> None:
    assert blamed_rank(exits) == expected


@pytest.mark.parametrize(
    ("cause", "outcome", "code"),
    [
        pytest.param(FailureCause.BAD_CONFIGURATION, PodOutcome.BAD_CONFIGURATION, 78, id="bad configuration"),
        pytest.param(FailureCause.HUNG, PodOutcome.HUNG, 1, id="hung"),
        pytest.param(FailureCause.RANK_FAILED, PodOutcome.RANK_FAILED, 1, id="rank failed"),
    ],
)
def test_a_launcher_leaves_as_the_contract_says(cause: FailureCause, outcome: PodOutcome, code: int) -> None:
    fault = Fault(cause, "why", rank=4, exit_code=3, step=9)
    assert launcher_exit_code(fault) == code
    assert build_termination(fault) == TerminationMessage(outcome=outcome, message="why", rank=4, exit_code=3, step=9)


@pytest.mark.parametrize(
    "letter", ["a", "\u00e9", "\U0001f600", "\x01", '"'], ids=["ascii", "two", "four", "escape", "quote"]
)
def test_a_last_word_fits_into_what_kubernetes_keeps(letter: str) -> None:
    word = TerminationMessage(outcome=PodOutcome.RANK_FAILED, message=letter * 2048, rank=1)
    text = fit_termination(word)
    assert len(text) <= TERMINATION_BYTES
    kept = TerminationMessage.model_validate_json(text).message
    assert word.message.startswith(kept)
    assert len(kept) >= 600


def commits(count: int, name: str = "team/data-set-of-some-length") -> tuple[HubCommit, ...]:
    return tuple(
        HubCommit(kind=RepositoryKind.DATASET, name=f"{name}-{number}", commit="a" * 40) for number in range(count)
    )


@pytest.mark.parametrize(
    ("message", "count", "kept"),
    [
        pytest.param("all ranks are done", 30, 30, id="a run that is done leaves its model and 29 data sets"),
        pytest.param("all ranks are done", 64, 0, id="what does not fit leaves none, for some would be taken for all"),
        pytest.param("x" * 2048, 4, 4, id="a long message is cut to make room"),
        pytest.param("\x1b" * 2048, 4, 0, id="a message of escapes is not given up for commits"),
    ],
)
def test_a_termination_message_has_all_commits_of_the_hub_or_none(message: str, count: int, kept: int) -> None:
    word = TerminationMessage.model_construct(
        outcome=PodOutcome.COMPLETED,
        message=message,
        run=RunProgress(step=7, total_steps=7, hub_commits=commits(count)),
    )
    text = fit_termination(word)
    assert len(text) <= TERMINATION_BYTES
    read = TerminationMessage.model_validate_json(text)
    assert read.run is not None
    assert (read.run.step, len(read.run.hub_commits or ())) == (7, kept)
    assert len(read.message) >= min(len(message), 512)
