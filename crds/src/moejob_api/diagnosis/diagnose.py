"""The diagnosis: all findings, and the choice of the one to tell.

Misconfiguration comes before waiting, for no wait ends it; conditions before events, which outlive what they report;
what holds now before the failure that led to it. Equal evidence gives an equal diagnosis, and a diagnosis stays as it
was written while it means the same: a status is written when something changed, not because time passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

from moejob_api import api_bodies
from moejob_api.contract.names import PodRole
from moejob_api.diagnosis.blockers import ADVICE, Blocker
from moejob_api.diagnosis.containers import (
    container_findings,
    disruption_findings,
    ending_findings,
    engine_findings,
)
from moejob_api.diagnosis.evidence import Evidence, PodEvidence, sorted_pods
from moejob_api.diagnosis.failures import failure_finding, final_findings
from moejob_api.diagnosis.findings import Finding
from moejob_api.diagnosis.queues import queue_findings
from moejob_api.diagnosis.refusals import refusal_findings
from moejob_api.diagnosis.scheduling import scheduling_findings, sentence_findings
from moejob_api.diagnosis.volumes import claim_findings, event_findings
from moejob_api.job.reasons import Reason
from moejob_api.job.status import Condition, ConditionStatus, ConditionType, Diagnosis, Phase, Status

# An operator that runs writes a first status within seconds.
OPERATOR_SILENCE = timedelta(seconds=60)
_MOST_MESSAGE, _MOST_ADVICE = 4096, 1024
# Reasons of condition Running that no other object explains better.
_OF_REASONS: Mapping[str, Blocker] = MappingProxyType(
    {
        Reason.DELETION_REFUSED: Blocker.DELETION_REFUSED,
        Reason.GANG_API_MISSING: Blocker.GANG_SCHEDULER_MISSING,
        Reason.NAME_TAKEN: Blocker.POD_ENDING,
        Reason.OLD_PODS_LEFT: Blocker.POD_ENDING,
        Reason.POD_ENDING: Blocker.POD_ENDING,
        Reason.LOST_PEERS: Blocker.PEERS_LOST,
        Reason.SECRET_LOST: Blocker.SECRET_LOST,
        Reason.ENGINE_ENDS: Blocker.ENGINE_NOT_READY,
        Reason.CLAIM_LOST: Blocker.CLAIM_LOST,
    }
)
# Conditions of a job that trains, and may learn little.
_TRAINING_BLOCKERS: Mapping[ConditionType, Blocker] = MappingProxyType(
    {
        ConditionType.ROUTER_COLLAPSED: Blocker.ROUTER_COLLAPSED,
        ConditionType.NOTHING_LEARNED: Blocker.NOTHING_LEARNED,
    }
)


def diagnose_job(evidence: Evidence, now: datetime) -> Diagnosis | None:
    """Return what is in the way of a job; None when it trains, or has succeeded."""
    # The first of equals: each rule yields what it knows best first.
    finding = min(_job_findings(evidence, now), key=lambda candidate: candidate.rank, default=None)
    return None if finding is None else _diagnosis_of(finding, evidence, now)


def keep_diagnosis(before: Diagnosis | None, after: Diagnosis | None) -> Diagnosis | None:
    """Return the diagnosis to write: the one before as long as it says the same, with the time since which it holds."""
    if before is None or after is None or before.blocker != after.blocker:
        return after
    return after.model_copy(update={"since": before.since})


def _diagnosis_of(finding: Finding, evidence: Evidence, now: datetime) -> Diagnosis:
    advice, job = ADVICE[finding.blocker], evidence.job
    names = {"job": job.name, "namespace": job.namespace, "object": finding.subject or "that is named"}
    return Diagnosis(
        blocker=finding.blocker,
        since=_format_time(finding.since or now),
        message=finding.message[:_MOST_MESSAGE],
        next=_next_text(finding, evidence, advice.next.format_map(names))[:_MOST_ADVICE],
        fix=advice.fix.format_map(names)[:_MOST_ADVICE],
    )


def _next_text(finding: Finding, evidence: Evidence, text: str) -> str:
    """Return what follows. Of a failed job nothing does, and a restart that waits has its time in the status."""
    status = evidence.job.status
    if status.phase is Phase.FAILED:
        return ADVICE[Blocker.BACKOFF_EXHAUSTED].next
    start_after = status.restarts.ladder.start_after
    running = _written_condition(status, ConditionType.RUNNING)
    if finding.is_past and start_after is not None and running is not None and running.reason == Reason.BACKING_OFF:
        return f"{text}; it starts at {start_after}"
    return text


def _format_time(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- all findings -----------------------------------------------------------------------------------------------------


def _job_findings(evidence: Evidence, now: datetime) -> Iterator[Finding]:
    if evidence.job.deleted_at is not None:
        yield _ending_job(evidence)
    elif evidence.job.status.phase is None:
        yield _unseen_job(evidence, now)
    else:
        yield from _findings_in_phase(evidence, evidence.job.status.phase, now)


def _findings_in_phase(evidence: Evidence, phase: Phase, now: datetime) -> Iterator[Finding]:
    match phase:
        case Phase.SUCCEEDED:
            yield from _expiring_job(evidence)
        case Phase.FAILED:
            yield from final_findings(evidence.job.status)
        case Phase.SUSPENDED:
            yield from _suspended_job(evidence)
        case Phase.RUNNING:
            yield from _running_findings(evidence, now)
        case Phase.PENDING | Phase.RESTARTING:
            yield from _waiting_findings(evidence, now)


def _ending_job(evidence: Evidence) -> Finding:
    job = evidence.job
    held = f"; {', '.join(job.finalizers)} holds it" if job.finalizers else ""
    pods = f", pods that are left: {len(evidence.pods)}" if evidence.pods else ""
    return Finding(Blocker.JOB_ENDING, f"the job is being deleted{pods}{held}", job.deleted_at)


def _unseen_job(evidence: Evidence, now: datetime) -> Finding:
    created_at = evidence.job.created_at
    if created_at is not None and now - created_at >= OPERATOR_SILENCE:
        return Finding(Blocker.OPERATOR_ABSENT, "no operator has taken up the job: its status is empty", created_at)
    return Finding(Blocker.STARTING, "the operator has not taken up the job yet", created_at)


def _expiring_job(evidence: Evidence) -> Iterator[Finding]:
    completed_at = api_bodies.as_time(evidence.job.status.completion_time)
    if evidence.job.ttl_seconds is None or completed_at is None:
        return
    end = completed_at + timedelta(seconds=evidence.job.ttl_seconds)
    text = f"the job has succeeded, and is deleted at {_format_time(end)} (lifecycle.ttlSecondsAfterFinished)"
    yield Finding(Blocker.JOB_EXPIRING, text, completed_at)


def _suspended_job(evidence: Evidence) -> Iterator[Finding]:
    condition = _written_condition(evidence.job.status, ConditionType.SUSPENDED)
    since = None if condition is None else api_bodies.as_time(condition.last_transition_time)
    yield Finding(Blocker.SUSPENDED, "the job is suspended (lifecycle.suspend is true)", since)


def _running_findings(evidence: Evidence, now: datetime) -> Iterator[Finding]:
    """Yield what threatens a gang that runs. Engines count here: ranks wait for them. Spares come last."""
    present_pods = _present_pods(evidence)
    # A gang runs without a pod of its own only while a spare stands in, and then the pod is the next spare.
    spares = tuple(pod for pod in present_pods if (pod.role, pod.phase) == (PodRole.TRAINER, "Pending"))
    pods = tuple(pod for pod in present_pods if pod not in spares)
    running = _written_condition(evidence.job.status, ConditionType.RUNNING)
    yield from container_findings(pods)
    yield from scheduling_findings(pods, evidence.nodes, now)
    yield from disruption_findings(pods, evidence.nodes)
    yield from ending_findings(pods, now)
    yield from engine_findings(pods)
    if running is not None:
        yield from _condition_findings(running, evidence, has_pods=True)
    for kind, blocker in _TRAINING_BLOCKERS.items():
        condition = _written_condition(evidence.job.status, kind)
        if condition is not None and condition.status is ConditionStatus.TRUE:
            yield Finding(blocker, condition.message, _since_of(condition))
    for finding in (*container_findings(spares), *scheduling_findings(spares, evidence.nodes, now)):
        yield replace(finding, message=f"the gang runs, and a spare waits: {finding.message}")


def _waiting_findings(evidence: Evidence, now: datetime) -> Iterator[Finding]:
    status, pods = evidence.job.status, _present_pods(evidence)
    running = _written_condition(status, ConditionType.RUNNING)
    accepted = _written_condition(status, ConditionType.ACCEPTED)
    if accepted is not None and accepted.status is ConditionStatus.FALSE:
        yield _unaccepted_job(accepted, running)
        return
    yield from container_findings(pods)
    yield from scheduling_findings(pods, evidence.nodes, now)
    yield from claim_findings(evidence.claims, evidence.events, now)
    yield from queue_findings(pods, evidence.groups)
    yield from disruption_findings(pods, evidence.nodes)
    yield from ending_findings(tuple(sorted(evidence.pods, key=lambda pod: pod.name)), now)
    yield from event_findings(pods, evidence.events)
    if running is not None:
        yield from _condition_findings(running, evidence, has_pods=bool(pods))
    if status.phase is Phase.RESTARTING and status.last_failure is not None:
        yield failure_finding(status.last_failure, is_past=True)
    yield Finding(Blocker.STARTING, "the pods of the job start", _since_of(running))


def _unaccepted_job(accepted: Condition, running: Condition | None) -> Finding:
    since = api_bodies.as_time(accepted.last_transition_time)
    if running is None or running.reason != Reason.PROFILE_MISSING:
        return Finding(Blocker.JOB_REFUSED, accepted.message, since)
    return Finding(Blocker.PROFILE_MISSING, running.message, since)


def _condition_findings(running: Condition, evidence: Evidence, *, has_pods: bool) -> Iterator[Finding]:
    """Yield what the operator alone knows; where no pod could be read, also what it has read in them."""
    since = api_bodies.as_time(running.last_transition_time)
    if running.reason in (Reason.QUOTA_EXCEEDED, Reason.CREATION_REFUSED):
        yield from refusal_findings(running.message, since)
    elif running.reason == Reason.BACKING_OFF:
        yield Finding(Blocker.BACKING_OFF, f"the run {running.message}", since)
    elif running.reason in _OF_REASONS:
        yield Finding(_OF_REASONS[running.reason], running.message, since)
    elif running.reason == Reason.UNSCHEDULABLE and not has_pods:
        pod, _, sentence = running.message.partition(": ")
        yield from sentence_findings(pod, sentence, since, evidence.nodes)
    elif running.reason == Reason.CLAIM_PENDING and not evidence.claims:
        yield Finding(Blocker.CLAIM_UNBOUND, running.message, since)
    elif running.reason == Reason.QUEUED and not has_pods:
        yield Finding(Blocker.QUEUE_PENDING, running.message, since)


def _present_pods(evidence: Evidence) -> tuple[PodEvidence, ...]:
    return sorted_pods(evidence.pods, evidence.job.status.attempt)


def _written_condition(status: Status, kind: ConditionType) -> Condition | None:
    return next((entry for entry in status.conditions if entry.type is kind), None)


def _since_of(condition: Condition | None) -> datetime | None:
    return None if condition is None else api_bodies.as_time(condition.last_transition_time)
