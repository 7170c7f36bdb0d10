"""Bodies as an API server gives them, with what matters to a diagnosis: a builder says only what its story is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Body = dict[str, Any]

CREATED, SEEN, NOW = "2030-01-01T00:00:00Z", "2030-01-01T00:10:00Z", "2030-01-01T00:30:00Z"
GPU = "nvidia.com/gpu"


def job(
    phase: str | None = "Pending",
    running: tuple[str, str] = ("Starting", "waiting for the pods to start"),
    failure: Mapping[str, Any] | None = None,
    conditions: tuple[Body, ...] = (),
    spec: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **status: Any,
) -> Body:
    """A job whose operator has written this of it."""
    about = {"name": "job", "namespace": "team", "uid": "job-uid", "creationTimestamp": CREATED} | dict(metadata or {})
    running_condition = _condition("Running", str(phase == "Running"), *running)
    written = (
        {"phase": phase, "attempt": 0, "conditions": [running_condition, *conditions]}
        | ({"lastFailure": {"time": SEEN, **failure}} if failure is not None else {})
        | status
    )
    return {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": about,
        "spec": {"storage": {"size": "1Ti"}, **(spec or {})},
        "status": {} if phase is None else written,
    }


def failed_job(reason: str, message: str, failure: Mapping[str, Any] | None, **status: Any) -> Body:
    """A job that has failed for good."""
    return job("Failed", (reason, message), failure, (_condition("Failed", "True", reason, message),), **status)


def pod(
    index: int = 0,
    *conditions: Body,
    role: str = "trainer",
    waiting: Mapping[str, str] | None = None,
    node: str | None = None,
    labels: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    container: Mapping[str, Any] | None = None,
    **status: Any,
) -> Body:
    """A pod of the job. With a node it is scheduled, without one it is not."""
    name = f"job-{role}-0-{index:05d}"
    own_labels = {
        "moejob.dev/job": "job",
        "moejob.dev/job-uid": "job-uid",
        "moejob.dev/role": role,
        "moejob.dev/attempt": "0",
        "moejob.dev/index": str(index),
    }
    statuses = []
    if waiting is not None or container is not None:
        state = {"name": role, "image": "moejob-trainer:1", "imageID": "", "ready": False, "restartCount": 0}
        statuses = [state | {"state": {"waiting": dict(waiting or {})}} | dict(container or {})]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", "creationTimestamp": CREATED}
        | {"labels": own_labels | dict(labels or {})}
        | dict(metadata or {}),
        "spec": {"schedulerName": "default-scheduler"} | ({} if node is None else {"nodeName": node}),
        "status": {"phase": "Pending", "conditions": list(conditions), "containerStatuses": statuses} | status,
    }


def condition(kind: str, status: str, reason: str, message: str = "") -> Body:
    """A condition."""
    return _condition(kind, status, reason, message)


def unschedulable(message: str) -> Body:
    """The scheduler's word about a pod."""
    return _condition("PodScheduled", "False", "Unschedulable", message)


def gated() -> Body:
    """A pod behind a gate, as the API server words it."""
    return _condition(
        "PodScheduled", "False", "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates"
    )


def claim(
    name: str = "job-storage", phase: str = "Pending", storage_class: str | None = "fast", **metadata: Any
) -> Body:
    """A volume claim of the job."""
    labels = {"moejob.dev/job": "job", "moejob.dev/job-uid": "job-uid"}
    about = {"name": name, "namespace": "team", "uid": f"uid-{name}", "creationTimestamp": CREATED, "labels": labels}
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": about | metadata,
        "spec": spec | ({} if storage_class is None else {"storageClassName": storage_class}),
        "status": {"phase": phase},
    }


def event(about: Body, reason: str, message: str, seen: str = SEEN) -> Body:
    """An event of the core API about an object."""
    metadata = about["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.17e1", "namespace": "team", "creationTimestamp": CREATED},
        "involvedObject": {"kind": about["kind"], "name": metadata["name"], "uid": metadata["uid"]},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "firstTimestamp": CREATED,
        "lastTimestamp": seen,
        "count": 7,
    }


def workload(*conditions: Body, active: bool = True, checks: tuple[Body, ...] = ()) -> Body:
    """Kueue's Workload of a group of pods: they own it."""
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "Workload",
        "metadata": {
            "name": "job-0",
            "namespace": "team",
            "creationTimestamp": CREATED,
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "job-trainer-0-00000", "uid": "u"}],
        },
        "spec": {"active": active, "queueName": "team"},
        "status": {"conditions": list(conditions), "admissionChecks": list(checks)},
    }


def pod_group(api: str, *conditions: Body, phase: str = "") -> Body:
    """The gang's object of one of the schedulers."""
    return {
        "apiVersion": api,
        "kind": "PodGroup",
        "metadata": {
            "name": "job",
            "namespace": "team",
            "creationTimestamp": CREATED,
            "labels": {"moejob.dev/job": "job", "moejob.dev/job-uid": "job-uid"},
        },
        "spec": {},
        "status": {"conditions": list(conditions)} | ({"phase": phase} if phase else {}),
    }


def node(name: str = "gpu-1", gpus: int | None = 8, ready: str = "True") -> Body:
    """A node that offers GPUs, or none."""
    devices = {} if gpus is None else {GPU: str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "status": {
            "allocatable": {"cpu": "96", "memory": "1000Gi", "pods": "110"} | devices,
            "conditions": [_condition("Ready", ready, "NodeStatusUnknown", "Kubelet stopped posting node status.")],
        },
    }


def _condition(kind: str, status: str, reason: str, message: str = "") -> Body:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": SEEN}
