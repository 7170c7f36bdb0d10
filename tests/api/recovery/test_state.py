"""The state machine of recovery: every failure is charged once, whichever of both callers drives it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejob_api.job.status import MAX_REPLACED
from moejob_api.recovery.restarts import (
    Failure,
    FailureCause,
    GiveUp,
    ReplaceGang,
    ReplacePods,
    RestartBudget,
    RestartRanks,
)
from moejob_api.recovery.state import (
    GangReport,
    Recovery,
    RecoveryState,
    decide_recovery,
    state_after_checkpoint,
    state_after_report,
)

FRESH = RecoveryState(RestartBudget(limit=6))
RUNNING = GangReport(nodes=100, rank_restarts=0)


def lost(*pods: int) -> list[Failure]:
    return [Failure(pod, FailureCause.POD_FAILED) for pod in pods]


def recovered(failures: list[Failure], gang: GangReport = RUNNING, state: RecoveryState = FRESH) -> Recovery:
    found = decide_recovery(failures, gang, state)
    assert found is not None
    return found


def test_nothing_follows_from_no_failure() -> None:
    assert decide_recovery([], RUNNING, FRESH) is None


def test_a_replaced_pod_is_charged_once_until_its_gang_is_ready_and_forgiven_by_a_checkpoint() -> None:
    first = recovered(lost(1))
    assert (first.action.__class__, first.state.budget.spent, first.is_continuation) == (ReplacePods, 1, False)
    beside = recovered(lost(2), state=first.state)
    assert (beside.action.__class__, beside.state.budget.spent, beside.is_continuation) == (ReplacePods, 1, True)
    assert beside.state.replacing == {1, 2}
    assert state_after_report(RUNNING, beside.state) == beside.state
    ready = state_after_report(replace(RUNNING, is_ready=True), beside.state)
    assert ready.replacing == frozenset()
    again = recovered(lost(2), state=ready)
    assert (again.state.budget.spent, again.is_continuation) == (2, False)
    assert state_after_checkpoint(again.state, 10).budget.spent == 0


@pytest.mark.parametrize(
    ("failures", "gang", "state", "action", "spent"),
    [
        pytest.param(lost(1), RUNNING, FRESH, ReplacePods, 1, id="one pod"),
        pytest.param(lost(0), RUNNING, FRESH, ReplacePods, 1, id="pod 0"),
        pytest.param(lost(0), replace(RUNNING, nodes=2), FRESH, ReplacePods, 1, id="pod 0 of two"),
        pytest.param(lost(0), replace(RUNNING, nodes=1), FRESH, ReplaceGang, 1, id="the only pod"),
        pytest.param(
            lost(1),
            replace(RUNNING, nodes=2),
            replace(FRESH, replacing=frozenset({0})),
            ReplaceGang,
            0,
            id="the last pod that was not lost",
        ),
        pytest.param(lost(1), replace(RUNNING, can_replace_pods=False), FRESH, ReplaceGang, 1, id="names are kept"),
        pytest.param(lost(1), replace(RUNNING, succeeded=frozenset({2})), FRESH, ReplaceGang, 1, id="another is done"),
        pytest.param(lost(*range(1, MAX_REPLACED + 1)), RUNNING, FRESH, ReplacePods, 1, id="as many as are kept"),
        pytest.param(lost(*range(1, MAX_REPLACED + 2)), RUNNING, FRESH, ReplaceGang, 1, id="more than are kept"),
        pytest.param(
            [Failure(1, FailureCause.RANK_FAILED, pod_alive=True)],
            GangReport(nodes=3, rank_restarts=1),
            FRESH,
            RestartRanks,
            1,
            id="ranks restarted in place",
        ),
        pytest.param(
            lost(0), RUNNING, replace(FRESH, replacing=frozenset({1})), ReplacePods, 0, id="pod 0 beside another"
        ),
        pytest.param(
            [Failure(2, FailureCause.BAD_CONFIGURATION)],
            RUNNING,
            replace(FRESH, replacing=frozenset({1})),
            GiveUp,
            0,
            id="a wrong configuration beside another",
        ),
        pytest.param(
            lost(1), RUNNING, replace(FRESH, replacing=frozenset({1})), ReplacePods, 1, id="the replaced one again"
        ),
    ],
)
def test_the_action_and_its_price(
    failures: list[Failure], gang: GangReport, state: RecoveryState, action: type, spent: int
) -> None:
    found = recovered(failures, gang, state)
    assert (type(found.action), found.state.budget.spent) == (action, spent)


@pytest.mark.parametrize(
    ("known", "reported", "ready", "kept"),
    [
        pytest.param(0, 3, False, 0, id="the first report of a gang may tell of a failure"),
        pytest.param(None, 3, False, 3, id="the first report beside a replaced pod is none"),
        pytest.param(3, 2, False, 2, id="a pod was replaced, and its count with it"),
        pytest.param(2, 3, False, 2, id="a restart that is still to be charged"),
        pytest.param(2, None, True, 2, id="not every pod has reported"),
    ],
)
def test_the_count_of_restarts_in_place(known: int | None, reported: int | None, ready: bool, kept: int) -> None:
    state = state_after_report(
        GangReport(nodes=3, rank_restarts=reported, is_ready=ready), replace(FRESH, rank_restarts=known)
    )
    assert state.rank_restarts == kept


def test_a_gang_begins_without_restarts() -> None:
    assert FRESH.rank_restarts == 0
    assert (
        recovered(lost(0), GangReport(nodes=1, rank_restarts=2), replace(FRESH, rank_restarts=2)).state.rank_restarts
        == 0
    )


def test_restarts_beside_a_replaced_pod_are_no_failures() -> None:
    state = recovered(lost(1)).state
    assert state_after_report(GangReport(nodes=3, rank_restarts=0), state).rank_restarts is None
    assert state_after_report(GangReport(nodes=3, rank_restarts=2, is_ready=True), state).rank_restarts == 2


@given(
    pods=st.lists(st.sets(st.integers(1, 7), min_size=1), min_size=1, max_size=6),
    ready=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_only_a_failure_that_continues_no_other_is_charged(pods: list[set[int]], ready: list[bool]) -> None:
    state, spent = replace(FRESH, budget=RestartBudget(limit=100)), 0
    for failed, is_ready in zip(pods, ready, strict=False):
        found = recovered(lost(*sorted(failed)), state=state)
        spent += not found.is_continuation
        assert found.state.budget.spent == spent
        assert found.is_continuation == (bool(state.replacing) and not failed & state.replacing)
        state = state_after_report(replace(RUNNING, is_ready=is_ready), found.state)


COUNTED = [cause for cause in FailureCause if cause.is_counted and cause is not FailureCause.BAD_CONFIGURATION]
HAPPENINGS = st.one_of(
    st.integers(0, 12),
    st.lists(st.builds(Failure, st.integers(0, 3), st.sampled_from(COUNTED), st.booleans()), min_size=1, max_size=4),
    st.builds(GangReport, rank_restarts=st.none() | st.integers(0, 5), is_ready=st.booleans()),
)


@given(st.lists(HAPPENINGS, max_size=120), st.integers(0, 4))
def test_a_history_without_a_new_highest_checkpoint_ends_after_backoff_limit_restarts(
    history: list[int | list[Failure] | GangReport], limit: int
) -> None:
    """A number is a checkpoint of that step as pods report it, be it an older one because the newest is damaged."""
    state, highest, restarts = RecoveryState(RestartBudget(limit)), -1, 0
    for happening in history:
        match happening:
            case int(step):
                state = state_after_checkpoint(state, step)
                highest, restarts = (step, 0) if step > highest else (highest, restarts)
            case GangReport():
                state = state_after_report(happening, state)
            case _:
                found = recovered(happening, state=state)
                if isinstance(found.action, GiveUp):
                    assert restarts == limit
                    return
                restarts += not found.is_continuation
                state = found.state
        assert state.budget.spent == restarts <= limit


def test_a_run_whose_newest_checkpoint_is_damaged_each_time_gives_up() -> None:
    state, restarts = state_after_checkpoint(replace(FRESH, budget=RestartBudget(2)), 3), 0
    while restarts < 50:
        state = state_after_checkpoint(state_after_checkpoint(state, 2), 3)
        found = recovered(lost(0), state=state)
        if isinstance(found.action, GiveUp):
            break
        state, restarts = found.state, restarts + 1
    assert restarts == 2
