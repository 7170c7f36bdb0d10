"""The recovery ladder: the smallest action that helps, a budget that is kept exactly, and one reason in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejob_api.contract.pods import ExitCode, PodOutcome
from moejob_api.recovery.restarts import (
    LONGEST_DELAY_SECONDS,
    Failure,
    FailureCause,
    GiveUp,
    ReplaceGang,
    ReplacePods,
    RestartBudget,
    RestartRanks,
    cause_of_exit,
    delay_seconds,
    recovery_action,
)

FRESH = RestartBudget(limit=3)


def rank_died(pod: int = 1) -> Failure:
    return Failure(pod, FailureCause.RANK_FAILED, pod_alive=True, message="rank 5 exited with 1")


def pod_died(pod: int = 1, cause: FailureCause = FailureCause.POD_FAILED) -> Failure:
    return Failure(pod, cause)


@pytest.mark.parametrize(
    ("failures", "budget", "kind", "spent"),
    [
        pytest.param((rank_died(),), FRESH, RestartRanks, 1, id="a rank is restarted in its pod"),
        pytest.param((rank_died(0), rank_died(1)), FRESH, RestartRanks, 1, id="ranks that die together count once"),
        pytest.param((pod_died(1),), FRESH, ReplacePods, 1, id="a lost pod is replaced"),
        pytest.param(
            (pod_died(1), rank_died(0)), FRESH, ReplacePods, 1, id="its peers' ranks are not a second failure"
        ),
        pytest.param((pod_died(0),), FRESH, ReplacePods, 1, id="pod 0 is a pod as any"),
        pytest.param((pod_died(0), rank_died(1)), FRESH, ReplacePods, 1, id="ranks beside pod 0 are no second failure"),
        pytest.param((pod_died(0), pod_died(1)), FRESH, ReplacePods, 1, id="pod 0 and another"),
        pytest.param(
            (rank_died(),), RestartBudget(3, in_place=2), ReplacePods, 1, id="a pod whose ranks keep dying is replaced"
        ),
        pytest.param((rank_died(0),), RestartBudget(3, in_place=2), ReplacePods, 1, id="pod 0 whose ranks keep dying"),
        pytest.param(
            (pod_died(1),), RestartBudget(3, pods=2), ReplaceGang, 1, id="pods that keep dying take the gang with them"
        ),
        pytest.param((pod_died(1),), RestartBudget(3, spent=3), GiveUp, 3, id="the budget is spent"),
        pytest.param((pod_died(1),), RestartBudget(0), GiveUp, 0, id="no retries wanted"),
        pytest.param((pod_died(1, FailureCause.PREEMPTED),), RestartBudget(0), ReplacePods, 0, id="preemption is free"),
        pytest.param(
            (pod_died(1, FailureCause.SECRET_LOST),),
            RestartBudget(0),
            ReplaceGang,
            0,
            id="a lost secret takes the gang",
        ),
        pytest.param(
            (pod_died(1, FailureCause.NODE_LOST), rank_died(0)),
            RestartBudget(0),
            ReplacePods,
            0,
            id="a lost node explains its peers",
        ),
        pytest.param(
            (pod_died(2, FailureCause.BAD_CONFIGURATION), rank_died()),
            FRESH,
            GiveUp,
            0,
            id="bad configuration is final",
        ),
    ],
)
def test_the_smallest_action_that_helps_is_chosen(
    failures: tuple[Failure, ...], budget: RestartBudget, kind: type, spent: int
) -> None:
    decision = recovery_action(failures, budget)
    assert decision is not None
    assert type(decision) is kind
    assert decision.budget.spent == spent


def test_ranks_beside_a_new_pod_0_and_of_a_new_gang_are_restarted_in_place_again() -> None:
    budget = RestartBudget(9)
    history = []
    for _ in range(9):
        decision = recovery_action((rank_died(0),), budget)
        assert decision is not None
        budget = decision.budget
        history.append(type(decision))
    in_place = [RestartRanks, RestartRanks]
    assert history == [*in_place, ReplacePods, *in_place, ReplacePods, *in_place, ReplaceGang]


def test_nothing_failed_means_nothing_to_decide() -> None:
    assert recovery_action((), FRESH) is None


def test_only_the_lost_pods_are_replaced() -> None:
    decision = recovery_action((pod_died(3), rank_died(1), pod_died(2)), FRESH)
    assert isinstance(decision, ReplacePods)
    assert decision.pods == (2, 3)


@pytest.mark.parametrize(
    ("cause", "spent"),
    [
        pytest.param(FailureCause.NODE_LOST, 0, id="a lost node"),
        pytest.param(FailureCause.OUT_OF_MEMORY, 1, id="a pod that failed"),
        pytest.param(FailureCause.LOST_PEERS, 1, id="nothing that is known"),
    ],
)
def test_pods_that_lost_their_peers_are_not_to_blame_where_another_is(cause: FailureCause, spent: int) -> None:
    failures = (pod_died(1, FailureCause.LOST_PEERS), pod_died(2, cause), pod_died(3, FailureCause.LOST_PEERS))
    decision = recovery_action(failures, FRESH)
    assert isinstance(decision, ReplacePods)
    assert (decision.pods, decision.budget.spent) == ((1, 2, 3), spent)
    assert decision.reason == f"{cause} in pod {1 if cause is FailureCause.LOST_PEERS else 2}"


def test_giving_up_says_what_failed_and_what_was_spent() -> None:
    decision = recovery_action((rank_died(),), RestartBudget(3, spent=3))
    assert isinstance(decision, GiveUp)
    assert decision.reason == (
        "RankFailed in pod 1: rank 5 exited with 1; 3 restarts since the last checkpoint, backoffLimit is 3"
    )


def test_a_refusal_is_the_sentence_about_the_job_and_nothing_before_it() -> None:
    refused = Failure(0, FailureCause.BAD_CONFIGURATION, message="spec.parallelism.tensor: change tensor to 2")
    decision = recovery_action((rank_died(), refused), FRESH)
    assert decision == GiveUp(FRESH, "spec.parallelism.tensor: change tensor to 2")


def test_a_new_checkpoint_renews_the_budget() -> None:
    assert RestartBudget(3, spent=3, in_place=2, pods=2, uncounted=9).after_checkpoint() == FRESH


@given(
    st.lists(
        st.lists(st.builds(Failure, st.integers(0, 7), st.sampled_from(list(FailureCause)), st.booleans()), min_size=1),
        max_size=30,
    ),
    st.integers(0, 10),
)
def test_a_job_fails_after_exactly_its_limit_of_counted_failures(history: list[list[Failure]], limit: int) -> None:
    budget, counted = RestartBudget(limit), 0
    for failures in history:
        decision = recovery_action(tuple(failures), budget)
        assert decision is not None
        if isinstance(decision, GiveUp):
            permanent = any(failure.cause is FailureCause.BAD_CONFIGURATION for failure in failures)
            assert permanent or counted == limit
            return
        counted += decision.budget.spent - budget.spent
        budget = decision.budget
        assert budget.spent == counted <= limit
        assert 0.0 <= decision.after_seconds <= LONGEST_DELAY_SECONDS


@given(st.integers(1, 10_000))
def test_delays_grow_and_are_bounded(restarts: int) -> None:
    assert delay_seconds(restarts) <= delay_seconds(restarts + 1) <= LONGEST_DELAY_SECONDS


@pytest.mark.parametrize(
    ("code", "outcome", "expected"),
    [
        pytest.param(ExitCode.DONE, None, None, id="done"),
        pytest.param(ExitCode.BAD_CONFIGURATION, None, FailureCause.BAD_CONFIGURATION, id="bad configuration"),
        pytest.param(ExitCode.SAVED_AND_STOPPED, PodOutcome.PREEMPTED, FailureCause.PREEMPTED, id="saved and stopped"),
        pytest.param(1, PodOutcome.RANK_FAILED, FailureCause.RANK_FAILED, id="a rank failed"),
        pytest.param(1, PodOutcome.HUNG, FailureCause.HUNG, id="hung"),
        pytest.param(1, PodOutcome.LOST_PEERS, FailureCause.LOST_PEERS, id="gave up on its peers"),
        pytest.param(137, None, FailureCause.POD_FAILED, id="killed without a last word"),
    ],
)
def test_an_exit_code_has_this_cause(code: int, outcome: PodOutcome | None, expected: FailureCause | None) -> None:
    assert cause_of_exit(code, outcome) is expected
