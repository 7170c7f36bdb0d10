"""Events about a change of the status: one for every transition, none for mere progress."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.job.status import ConditionType, Phase, Status
from moejob_operator.actions import Event, EventReason, Severity
from moejob_operator.planning.decision import Reason
from moejob_operator.status.conditions import condition, holds

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


def events(before: Status, after: Status) -> tuple[Event, ...]:
    """Events about the way from one status to the next."""
    return (
        *_of_acceptance(before, after),
        *_of_restarts(before, after),
        *_of_phase(before, after),
        *_of_hold(before, after),
    )


def _of_acceptance(before: Status, after: Status) -> Iterator[Event]:
    was, accepted = condition(before, ConditionType.ACCEPTED), condition(after, ConditionType.ACCEPTED)
    if accepted is not None and (was is None or (was.status, was.message) != (accepted.status, accepted.message)):
        if not holds(after, ConditionType.ACCEPTED):
            yield Event(Severity.WARNING, EventReason.NOT_ACCEPTED, accepted.message)
        # Of a job that was right from the start its condition says so, and its pods.
        elif was is not None:
            yield Event(Severity.NORMAL, EventReason.ACCEPTED, "the job can work; its pods are created")
    if holds(after, ConditionType.MODEL_UNCHECKED) and not holds(before, ConditionType.MODEL_UNCHECKED):
        found = condition(after, ConditionType.MODEL_UNCHECKED)
        yield Event(Severity.NORMAL, EventReason.MODEL_UNCHECKED, "" if found is None else found.message)
    if holds(after, ConditionType.CHECKPOINTED) and not holds(before, ConditionType.CHECKPOINTED):
        yield Event(Severity.NORMAL, EventReason.CHECKPOINTED, "the first checkpoint is saved")


def _of_restarts(before: Status, after: Status) -> Iterator[Event]:
    why = after.last_failure
    message = "" if why is None else f"{why.reason} in {why.pod}" + (f": {why.message}" if why.message else "")
    counts = (
        (EventReason.GANG_RESTARTED, before.restarts.total, after.restarts.total),
        (EventReason.PODS_REPLACED, before.restarts.pods, after.restarts.pods),
        (EventReason.RANKS_RESTARTED, before.restarts.ranks, after.restarts.ranks),
    )
    for reason, old, new in counts:
        if new > old:
            yield Event(Severity.WARNING, reason, message)


def _of_phase(before: Status, after: Status) -> Iterator[Event]:
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
            yield Event(Severity.NORMAL, EventReason.SUCCEEDED, _message(after, ConditionType.SUCCEEDED))
        case Phase.FAILED:
            found = condition(after, ConditionType.FAILED)
            yield Event(
                Severity.WARNING,
                EventReason.FAILED if found is None else found.reason,
                _message(after, ConditionType.FAILED),
            )
        case Phase.PENDING | Phase.RESTARTING:
            if before.phase is Phase.SUSPENDED:
                yield Event(Severity.NORMAL, EventReason.RESUMED, "lifecycle.suspend is false again")


def _of_hold(before: Status, after: Status) -> Iterator[Event]:
    """Yield the events of a new hold, when a person may have to do something about it."""
    if after.phase not in (Phase.PENDING, Phase.RESTARTING):
        return
    was, found = condition(before, ConditionType.RUNNING), condition(after, ConditionType.RUNNING)
    if found is None or found.reason in _USUAL or (was is not None and was.reason == found.reason):
        return
    # Volumes are made while the job starts.
    severity = Severity.NORMAL if found.reason == Reason.CLAIM_PENDING else Severity.WARNING
    yield Event(severity, found.reason, found.message)


def _message(status: Status, kind: ConditionType) -> str:
    found = condition(status, kind)
    return "" if found is None else found.message
