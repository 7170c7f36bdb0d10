"""Events about a change of the status: one for every transition, none for mere progress."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.job.status import ConditionType, Phase, Status
from moejob_operator.actions import Event, EventReason, Severity
from moejob_operator.planning.decision import Reason
from moejob_operator.status.conditions import is_condition_true, written_condition

# Waiting for these is part of every start.
_USUAL = frozenset(
    {
        Reason.STARTING,
        Reason.BACKING_OFF,
        Reason.OLD_PODS_LEFT,
        Reason.GANG_RESTARTED,
        Reason.PODS_REPLACED,
        Reason.LOST_PEERS,
        Reason.SUSPENDED,
        Reason.INVALID,
    }
)

# Of conditions about what a run learns: the events of their beginning and their end.
_TROUBLES = {
    ConditionType.ROUTER_COLLAPSED: (EventReason.ROUTER_COLLAPSED, EventReason.ROUTER_RECOVERED),
    ConditionType.NOTHING_LEARNED: (EventReason.NOTHING_LEARNED, EventReason.LEARNING_AGAIN),
}


def transition_events(before: Status, after: Status) -> tuple[Event, ...]:
    """Events about the way from one status to the next."""
    return (
        *_acceptance_events(before, after),
        *_restart_events(before, after),
        *_phase_events(before, after),
        *_wait_events(before, after),
        *_training_events(before, after),
    )


def _acceptance_events(before: Status, after: Status) -> Iterator[Event]:
    was, accepted = written_condition(before, ConditionType.ACCEPTED), written_condition(after, ConditionType.ACCEPTED)
    if accepted is not None and (was is None or (was.status, was.message) != (accepted.status, accepted.message)):
        if not is_condition_true(after, ConditionType.ACCEPTED):
            yield Event(Severity.WARNING, EventReason.NOT_ACCEPTED, accepted.message)
        # Of a job that was right from the start its condition says so, and its pods.
        elif was is not None:
            yield Event(Severity.NORMAL, EventReason.ACCEPTED, "the job can work; its pods are created")
    if is_condition_true(after, ConditionType.MODEL_UNCHECKED) and not is_condition_true(
        before, ConditionType.MODEL_UNCHECKED
    ):
        unchecked = written_condition(after, ConditionType.MODEL_UNCHECKED)
        yield Event(Severity.NORMAL, EventReason.MODEL_UNCHECKED, "" if unchecked is None else unchecked.message)
    if is_condition_true(after, ConditionType.CHECKPOINTED) and not is_condition_true(
        before, ConditionType.CHECKPOINTED
    ):
        yield Event(Severity.NORMAL, EventReason.CHECKPOINTED, "the first checkpoint is saved")


def _restart_events(before: Status, after: Status) -> Iterator[Event]:
    failure = after.last_failure
    message = (
        ""
        if failure is None
        else f"{failure.reason} in {failure.pod}" + (f": {failure.message}" if failure.message else "")
    )
    counts = (
        (EventReason.GANG_RESTARTED, before.restarts.total, after.restarts.total),
        (EventReason.PODS_REPLACED, before.restarts.pods, after.restarts.pods),
        (EventReason.RANKS_RESTARTED, before.restarts.ranks, after.restarts.ranks),
    )
    for reason, old, new in counts:
        if new > old:
            yield Event(Severity.WARNING, reason, message)


def _phase_events(before: Status, after: Status) -> Iterator[Event]:
    if after.phase is None or after.phase is before.phase:
        return
    match after.phase:
        case Phase.RUNNING:
            yield Event(Severity.NORMAL, EventReason.RUNNING, "every trainer pod runs")
        case Phase.SUSPENDED:
            yield Event(
                Severity.NORMAL, EventReason.SUSPENDED, "pods are stopped; the volume and its checkpoints are kept"
            )
        case Phase.SUCCEEDED:
            yield Event(Severity.NORMAL, EventReason.SUCCEEDED, _condition_message(after, ConditionType.SUCCEEDED))
        case Phase.FAILED:
            failed_condition = written_condition(after, ConditionType.FAILED)
            yield Event(
                Severity.WARNING,
                EventReason.FAILED if failed_condition is None else failed_condition.reason,
                _condition_message(after, ConditionType.FAILED),
            )
        case Phase.PENDING | Phase.RESTARTING:
            if before.phase is Phase.SUSPENDED:
                yield Event(Severity.NORMAL, EventReason.RESUMED, "lifecycle.suspend is false again")


def _wait_events(before: Status, after: Status) -> Iterator[Event]:
    """Yield the events of a new hold, when a person may have to do something about it."""
    if after.phase not in (Phase.PENDING, Phase.RESTARTING):
        return
    was, running = written_condition(before, ConditionType.RUNNING), written_condition(after, ConditionType.RUNNING)
    if running is None or running.reason in _USUAL or (was is not None and was.reason == running.reason):
        return
    # Volumes are made while the job starts.
    severity = Severity.NORMAL if running.reason == Reason.CLAIM_PENDING else Severity.WARNING
    yield Event(severity, running.reason, running.message)


def _training_events(before: Status, after: Status) -> Iterator[Event]:
    """Yield an event when a trouble of training begins and when it is over; the condition follows the rest."""
    for kind, (began, ended) in _TROUBLES.items():
        was, is_now = is_condition_true(before, kind), is_condition_true(after, kind)
        if is_now and not was:
            yield Event(Severity.WARNING, began, _condition_message(after, kind))
        elif was and not is_now:
            yield Event(Severity.NORMAL, ended, _condition_message(after, kind))


def _condition_message(status: Status, kind: ConditionType) -> str:
    entry = written_condition(status, kind)
    return "" if entry is None else entry.message
