"""Findings about pods on a node: containers that wait, in the kubelet's words, and pods that are taken away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta

from moejob_api.contract.pods import PodRole, engine_ends_text
from moejob_api.diagnosis.blockers import Blocker
from moejob_api.diagnosis.evidence import (
    DISRUPTION,
    EVICTION_BY_KUEUE,
    ContainerEvidence,
    NodeEvidence,
    PodEvidence,
)
from moejob_api.diagnosis.findings import Finding

# A kubelet that is alive confirms the end of a pod within seconds of the end of its grace.
KUBELET_SILENCE = timedelta(seconds=30)
_IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "ImageInspectError"})
_USUAL_REASONS = frozenset({"ContainerCreating", "PodInitializing"})
_IMAGE = re.compile(r'image \\?"([^"\\]+)\\?"')
_DENIED = re.compile(
    r"\b40[13]\b|unauthorized|authorization failed|access denied|no basic auth|insufficient_scope|denied:",
    re.IGNORECASE,
)
_NOT_FOUND = re.compile(r"not found|manifest unknown|does not exist|is not present", re.IGNORECASE)
_MISSING_SECRET = re.compile(r'secret "([^"]+)" not found|in Secret \S*?/?([^/\s"]+)$', re.IGNORECASE)
_MISSING_CONFIG_MAP = re.compile(r'configmap "([^"]+)" not found|in ConfigMap \S*?/?([^/\s"]+)$', re.IGNORECASE)
_TAKEN = {
    "PreemptionByScheduler": (Blocker.PREEMPTED, "a pod of higher priority takes the place of {}"),
    "DeletionByTaintManager": (Blocker.NODE_LOST, "the cluster takes {} from node {node}, which has a taint"),
    "DeletionByPodGC": (Blocker.NODE_LOST, "{} is deleted, for its node {node} is gone"),
    "TerminationByKubelet": (Blocker.EVICTED, "node {node} has put {} out"),
    "EvictionByEvictionAPI": (Blocker.EVICTED, "{} is evicted from node {node}, as by a drain"),
}


def container_findings(pods: tuple[PodEvidence, ...]) -> Iterator[Finding]:
    """Yield what containers wait for."""
    for pod in pods:
        waiting = pod.waiting
        if waiting is None or waiting.reason in _USUAL_REASONS or pod.ends_by is not None:
            continue
        if waiting.reason in _IMAGE_REASONS or waiting.reason == "InvalidImageName":
            yield _image_finding(pod, waiting)
        elif pod.role == PodRole.ROLLOUT and waiting.reason == "CrashLoopBackOff":
            yield _engine_finding(pod, waiting)
        else:
            yield _configuration_finding(pod, waiting)


def _image_finding(pod: PodEvidence, waiting: ContainerEvidence) -> Finding:
    """Return what is wrong with an image. ErrImagePull and ImagePullBackOff take turns, and mean the same."""
    named = _IMAGE.search(waiting.message)
    image, since = named[1] if named else waiting.image, pod.created_at
    if waiting.reason == "InvalidImageName":
        return Finding(Blocker.IMAGE_NAME, f"{waiting.image or image} is no name of an image", since, image)
    if waiting.reason == "ErrImageNeverPull":
        text = f"node {pod.node} lacks image {image}, which it must not pull (resources.imagePullPolicy Never)"
        return Finding(Blocker.IMAGE_MISSING, text, since, image)
    if _DENIED.search(waiting.message):
        return Finding(Blocker.IMAGE_PULL_DENIED, f"the registry refuses image {image} to the pods", since, image)
    if _NOT_FOUND.search(waiting.message):
        return Finding(Blocker.IMAGE_MISSING, f"there is no image {image}", since, image)
    reason = waiting.message.rpartition("desc = ")[2] if "desc = " in waiting.message else "the kubelet gives no reason"
    return Finding(Blocker.IMAGE_PULL_FAILED, f"image {image} cannot be pulled: {reason}", since, image)


def _configuration_finding(pod: PodEvidence, waiting: ContainerEvidence) -> Finding:
    return object_finding(waiting.message, pod.created_at) or Finding(
        Blocker.CONTAINER_REFUSED, f"{pod.name} does not start ({waiting.reason}): {waiting.message}", pod.created_at
    )


def object_finding(message: str, since: datetime | None) -> Finding | None:
    """Return the finding that a kubelet's message names a Secret or ConfigMap that is missing, or lacks a key."""
    for pattern, kind, blocker in (
        (_MISSING_SECRET, "Secret", Blocker.SECRET_MISSING),
        (_MISSING_CONFIG_MAP, "ConfigMap", Blocker.CONFIG_MAP_MISSING),
    ):
        if match := pattern.search(message):
            name = match[1] or match[2]
            key = re.search(r"find key (\S+)", message)
            text = f"{kind} {name} has no key {key[1]}" if key else f"there is no {kind} {name}"
            return Finding(blocker, text, since, name)
    return None


def _engine_finding(pod: PodEvidence, waiting: ContainerEvidence) -> Finding:
    if waiting.last_reason == "OOMKilled":
        return Finding(
            Blocker.HOST_OUT_OF_MEMORY, f"engine {pod.name} was killed: out of host memory", pod.created_at, pod.name
        )
    end = waiting.last_line or f"exit code {waiting.last_exit_code}"
    return Finding(Blocker.ENGINE_NOT_READY, f"engine {pod.name} ends again and again: {end}", pod.created_at, pod.name)


def engine_findings(pods: tuple[PodEvidence, ...]) -> Iterator[Finding]:
    """Yield engines that run and cannot generate yet."""
    for pod in pods:
        unready = pod.find_condition("Ready", "False")
        if pod.role == PodRole.ROLLOUT and pod.phase == "Running" and pod.waiting is None and unready is not None:
            text = f"engine {pod.name} has not generated a token yet"
            if pod.restarts:
                end = f": {pod.last_line}" if pod.last_line else ""
                text = f"{engine_ends_text({pod.index: pod.restarts})}{end}"
            yield Finding(Blocker.ENGINE_NOT_READY, text, unready.since, pod.name)
            return


def disruption_findings(pods: tuple[PodEvidence, ...], nodes: tuple[NodeEvidence, ...]) -> Iterator[Finding]:
    """Yield pods that the cluster takes away, and pods of nodes that are not heard of."""
    for pod in pods:
        if (taken := pod.find_condition(EVICTION_BY_KUEUE, "True")) is not None:
            text = f"Kueue has stopped {pod.name}" + (f": {taken.message}" if taken.message else "")
            yield Finding(Blocker.QUEUE_EVICTED, text, taken.since)
        elif (taken := pod.find_condition(DISRUPTION, "True")) is not None:
            blocker, text = _TAKEN.get(taken.reason, (Blocker.EVICTED, "the cluster takes {} away"))
            yield Finding(blocker, text.format(pod.name, node=pod.node), taken.since, pod.node)
        elif pod.reason == "Evicted":
            yield Finding(Blocker.EVICTED, f"node {pod.node} has put {pod.name} out: {pod.message}", None, pod.node)
        elif (silent := _silence_of_node(pod, nodes)) is not None:
            yield Finding(
                Blocker.NODE_LOST, f"nothing is heard of node {pod.node}, where {pod.name} runs", silent, pod.node
            )


def _silence_of_node(pod: PodEvidence, nodes: tuple[NodeEvidence, ...]) -> datetime | None:
    """Return since when the node of a pod is silent: as the node says, or its pods, which the cluster calls unready."""
    ready = next((node.ready for node in nodes if node.name == pod.node), None)
    if ready is not None and ready.status == "Unknown":
        return ready.since
    unready, containers = pod.find_condition("Ready", "False"), pod.find_condition("ContainersReady", "True")
    return None if unready is None or containers is None else unready.since


def ending_findings(pods: tuple[PodEvidence, ...], now: datetime) -> Iterator[Finding]:
    """Yield pods that end, and those whose end no kubelet confirms."""
    ending = [pod for pod in pods if pod.ends_by is not None]
    for pod in ending:
        if pod.node and pod.ends_by is not None and now - pod.ends_by >= KUBELET_SILENCE:
            text = f"{pod.name} should have ended, and node {pod.node} does not confirm it"
            yield Finding(Blocker.POD_STUCK, text, pod.ends_by, pod.node)
    if ending:
        text = f"{ending[0].name} ends, and the next pods wait for it: two gangs would write to one volume"
        yield Finding(Blocker.POD_ENDING, text)
