"""Findings about claims and mounts: a claim's own state first, then events that no later event has overtaken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from moejob_api.diagnosis.blockers import Blocker
from moejob_api.diagnosis.containers import object_finding
from moejob_api.diagnosis.evidence import ClaimEvidence, EventEvidence, PodEvidence
from moejob_api.diagnosis.findings import Finding

# The API server fills in the default class at once, and volumes without a class are bound within a minute.
_DEFAULT_CLASS_SECONDS = timedelta(seconds=60)
_CLASS_NOT_FOUND = re.compile(r'storageclass(?:\.storage\.k8s\.io)? "([^"]+)" not found')
_NO_CLASS = "no storage class is set"
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def claim_findings(
    claims: tuple[ClaimEvidence, ...], events: tuple[EventEvidence, ...], now: datetime
) -> Iterator[Finding]:
    """Yield what keeps claims from their volumes."""
    for claim in claims:
        if claim.deleted_at is not None:
            yield Finding(Blocker.CLAIM_ENDING, f"claim {claim.name} is being deleted", claim.deleted_at, claim.name)
        elif claim.phase == "Lost":
            yield Finding(Blocker.CLAIM_LOST, f"the volume of claim {claim.name} is gone", None, claim.name)
        elif claim.phase == "Pending":
            yield _unbound_finding(claim, events, now)


def _unbound_finding(claim: ClaimEvidence, events: tuple[EventEvidence, ...], now: datetime) -> Finding:
    latest = max((event for event in events if event.uid == claim.uid), key=_event_time, default=None)
    latest_text = "" if latest is None else latest.message
    if missing := _CLASS_NOT_FOUND.search(latest_text):
        text = f"claim {claim.name} needs storage class {missing[1]}, which does not exist"
        return Finding(Blocker.STORAGE_CLASS_MISSING, text, claim.created_at, claim.name)
    is_old = claim.created_at is not None and now - claim.created_at >= _DEFAULT_CLASS_SECONDS
    if _NO_CLASS in latest_text or (claim.storage_class is None and is_old):
        text = f"claim {claim.name} names no storage class, and the cluster has no default"
        return Finding(Blocker.STORAGE_CLASS_MISSING, text, claim.created_at, claim.name)
    if latest is not None and latest.reason == "ProvisioningFailed":
        text = f"the volume of claim {claim.name} cannot be made: {latest_text}"
        return Finding(Blocker.PROVISIONING_FAILED, text, claim.created_at, claim.name)
    named_class = f" of storage class {claim.storage_class}" if claim.storage_class else ""
    text = f"claim {claim.name}{named_class} is not bound to a volume yet"
    return Finding(Blocker.CLAIM_UNBOUND, text, claim.created_at, claim.name)


def event_findings(pods: tuple[PodEvidence, ...], events: tuple[EventEvidence, ...]) -> Iterator[Finding]:
    """Yield what the newest events say of pods whose containers are not there yet."""
    for pod in pods:
        if pod.phase != "Pending" or not pod.node or pod.ends_by is not None:
            continue
        # Only the newest counts: a pod that has come further says so by another event.
        latest = max((event for event in events if event.uid == pod.uid), key=_event_time, default=None)
        if latest is not None and (finding := _pod_event_finding(pod, latest)) is not None:
            yield finding


def _pod_event_finding(pod: PodEvidence, latest: EventEvidence) -> Finding | None:
    if latest.reason == "Pulling":
        return Finding(Blocker.IMAGE_PULLING, f"node {pod.node} pulls the image of {pod.name}", latest.seen_at)
    match latest.reason:
        case "FailedAttachVolume":
            text = f"the volume of {pod.name} is held by another node: {latest.message}"
            return Finding(Blocker.VOLUME_ATTACHED, text, latest.seen_at)
        case "FailedMount":
            return object_finding(latest.message, latest.seen_at) or Finding(
                Blocker.MOUNT_FAILED, f"a volume of {pod.name} cannot be mounted: {latest.message}", latest.seen_at
            )
        case "FailedCreatePodSandBox" | "NetworkNotReady":
            text = f"node {pod.node} cannot set up {pod.name}: {latest.message}"
            return Finding(Blocker.SANDBOX_FAILED, text, latest.seen_at)
        case _:
            return None


def _event_time(event: EventEvidence) -> datetime:
    return event.seen_at or _LONG_AGO
