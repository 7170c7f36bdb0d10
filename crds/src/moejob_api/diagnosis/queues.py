"""Findings about queues and gangs: gates of pods, Kueue's Workload, and the PodGroup of a gang scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moejob_api.diagnosis.blockers import Blocker
from moejob_api.diagnosis.evidence import GroupEvidence, PodEvidence
from moejob_api.diagnosis.findings import Finding

# The first that a message of Kueue holds decides.
_QUEUE_RULES = (
    (re.compile(r"doesn't exist|does not exist|not found", re.IGNORECASE), Blocker.QUEUE_MISSING),
    (re.compile(r"request > maximum capacity|exceeds? the maximum", re.IGNORECASE), Blocker.QUEUE_TOO_SMALL),
    (re.compile(r"inactive|stopped|isn't active", re.IGNORECASE), Blocker.QUEUE_INACTIVE),
    (re.compile(r"insufficient (?:unused )?quota|borrowing limit", re.IGNORECASE), Blocker.QUEUE_QUOTA),
)
_UNREADY_CHECKS = ("Pending", "Retry", "Rejected")


def queue_findings(pods: tuple[PodEvidence, ...], groups: tuple[GroupEvidence, ...]) -> Iterator[Finding]:
    """Yield what keeps pods behind the gate of their queue, and gangs from their nodes."""
    workload_findings = [finding for group in groups for finding in _group_findings(group)]
    yield from workload_findings
    gated = next((pod for pod in pods if _is_gated(pod)), None)
    if gated is not None and not workload_findings:
        queue = f"queue {gated.queue}" if gated.queue else "its queue, which the job does not name,"
        condition = gated.find_condition("PodScheduled", "False")
        text = f"{queue} has not admitted the job"
        yield Finding(Blocker.QUEUE_PENDING, text, None if condition is None else condition.since, gated.queue)


def _is_gated(pod: PodEvidence) -> bool:
    condition = pod.find_condition("PodScheduled", "False")
    return condition is not None and condition.reason == "SchedulingGated" and pod.ends_by is None


def _group_findings(group: GroupEvidence) -> Iterator[Finding]:
    if group.kind == "Workload":
        yield from _workload_findings(group)
        return
    for kind, status in (("PodGroupScheduled", "False"), ("Unschedulable", "True")):
        condition = group.find_condition(kind, status)
        # Volcano leaves an old condition beside a newer phase.
        if condition is not None and group.phase not in ("Running", "Completed", "Finished"):
            text = f"not all pods of gang {group.name} fit at once: {_without_counts(condition.message)}"
            yield Finding(Blocker.GANG_INCOMPLETE, text, condition.since, group.name)
            return


def _workload_findings(workload: GroupEvidence) -> Iterator[Finding]:
    """Yield the first thing that a Workload waits for. An eviction counts as long as no quota is reserved again."""
    if workload.find_condition("Finished", "True") is not None:
        return
    evicted, unreserved = workload.find_condition("Evicted", "True"), workload.find_condition("QuotaReserved", "False")
    if not workload.is_active:
        reason = f": {evicted.message}" if evicted is not None else ""
        since = None if evicted is None else evicted.since
        yield Finding(Blocker.QUEUE_DEACTIVATED, f"Kueue has deactivated the job{reason}", since, workload.name)
    elif evicted is not None and (unreserved is not None or workload.find_condition("Admitted", "True") is not None):
        yield Finding(Blocker.QUEUE_EVICTED, f"Kueue has evicted the job: {evicted.message}", evicted.since)
    elif unreserved is not None:
        blocker = next(
            (blocker for pattern, blocker in _QUEUE_RULES if pattern.search(unreserved.message)), Blocker.QUEUE_PENDING
        )
        yield Finding(blocker, f"Kueue has not admitted the job: {unreserved.message}", unreserved.since)
    else:
        yield from _check_findings(workload)


def _check_findings(workload: GroupEvidence) -> Iterator[Finding]:
    if workload.find_condition("Admitted", "True") is not None:
        return
    for check in workload.checks:
        if check.status in _UNREADY_CHECKS:
            text = f"admission check {check.type} is {check.status}" + (f": {check.message}" if check.message else "")
            yield Finding(Blocker.QUEUE_CHECK, text, check.since, check.type)


def _without_counts(message: str) -> str:
    """Return a message of a gang scheduler without the counts that change while nothing else does."""
    return re.sub(r"(?<![-\w])\d+(?:/\d+)? ", "", message).strip(" .")
