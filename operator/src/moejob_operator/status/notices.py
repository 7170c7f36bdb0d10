"""What to tell about a change of the status: one event for every transition, none for what merely moves on."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.job.status import ConditionType, Phase, Status
from moejob_operator.actions import Notice, Severity
from moejob_operator.planning.step import Reason
from moejob_operator.status.conditions import condition, holds

# Waiting for these is part of every start.
_USUAL = frozenset(
    {
        Reason.STARTING,
        Reason.BACKING_OFF,
        Reason.OLD_PODS_LEFT,
        Reason.GANG_RESTARTED,
        Reason.PODS_REPLACED,
        Reason.SUSPENDED,
        Reason.INVALID,
    }
)


def notices(before: Status, after: Status) -> tuple[Notice, ...]:
    """Events about the way from one status to the next."""
    return (
        *_of_acceptance(before, after),
        *_of_restarts(before, after),
        *_of_phase(before, after),
        *_of_hold(before, after),
    )


def _of_acceptance(before: Status, after: Status) -> Iterator[Notice]:
    was, accepted = condition(before, ConditionType.ACCEPTED), condition(after, ConditionType.ACCEPTED)
    if accepted is not None and (was is None or (was.status, was.message) != (accepted.status, accepted.message)):
        if holds(after, ConditionType.ACCEPTED):
            yield Notice(Severity.NORMAL, "Accepted", "the job can work; its pods are created")
        else:
            yield Notice(Severity.WARNING, "NotAccepted", accepted.message)
    if holds(after, ConditionType.MODEL_UNCHECKED) and not holds(before, ConditionType.MODEL_UNCHECKED):
        found = condition(after, ConditionType.MODEL_UNCHECKED)
        yield Notice(Severity.NORMAL, "ModelUnchecked", "" if found is None else found.message)
    if holds(after, ConditionType.CHECKPOINTED) and not holds(before, ConditionType.CHECKPOINTED):
        yield Notice(Severity.NORMAL, "Checkpointed", "the first checkpoint is saved")


def _of_restarts(before: Status, after: Status) -> Iterator[Notice]:
    why = after.last_failure
    said = "" if why is None else f"{why.reason} in {why.pod}" + (f": {why.message}" if why.message else "")
    counts = (
        ("GangRestarted", before.restarts.total, after.restarts.total),
        ("PodsReplaced", before.restarts.pods, after.restarts.pods),
        ("RanksRestarted", before.restarts.ranks, after.restarts.ranks),
    )
    for reason, old, new in counts:
        if new > old:
            yield Notice(Severity.WARNING, reason, said)


def _of_phase(before: Status, after: Status) -> Iterator[Notice]:
    if after.phase is None or after.phase is before.phase:
        return
    match after.phase:
        case Phase.RUNNING:
            yield Notice(Severity.NORMAL, "Running", "every trainer pod runs")
        case Phase.SUSPENDED:
            yield Notice(Severity.NORMAL, "Suspended", "pods are stopped; the volume and its checkpoints are kept")
        case Phase.SUCCEEDED:
            yield Notice(Severity.NORMAL, "Succeeded", _message(after, ConditionType.SUCCEEDED))
        case Phase.FAILED:
            found = condition(after, ConditionType.FAILED)
            yield Notice(
                Severity.WARNING, "Failed" if found is None else found.reason, _message(after, ConditionType.FAILED)
            )
        case Phase.PENDING | Phase.RESTARTING:
            if before.phase is Phase.SUSPENDED:
                yield Notice(Severity.NORMAL, "Resumed", "lifecycle.suspend is false again")


def _of_hold(before: Status, after: Status) -> Iterator[Notice]:
    """What a job newly waits for, when a person may have to do something about it."""
    if after.phase not in (Phase.PENDING, Phase.RESTARTING):
        return
    was, found = condition(before, ConditionType.RUNNING), condition(after, ConditionType.RUNNING)
    if found is None or found.reason in _USUAL or (was is not None and was.reason == found.reason):
        return
    # Volumes are made while the job starts.
    severity = Severity.NORMAL if found.reason == Reason.CLAIM_PENDING else Severity.WARNING
    yield Notice(severity, found.reason, found.message)


def _message(status: Status, kind: ConditionType) -> str:
    found = condition(status, kind)
    return "" if found is None else found.message
