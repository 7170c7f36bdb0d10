"""Gang schedulers, which start all pods or none: the API of each, its object, and what it reads from the pods.

Fields follow the published APIs: scheduling.k8s.io/v1alpha2 (Kubernetes 1.36), scheduling.volcano.sh/v1beta1,
scheduling.x-k8s.io/v1alpha1 (scheduler-plugins), and Kueue's labels for groups of plain pods.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from moejob_api.contract.pods import Label, PodRole
from moejob_api.job import Spec
from moejob_api.job.lifecycle import GANG_SCHEDULER_NAMES, GangScheduler
from moejob_api.rules.limits import is_among
from moejob_operator.actions import Kind
from moejob_operator.children.attempt import Attempt, job_metadata
from moejob_operator.children.placement import pods_per_group


class GangApi(StrEnum):
    """The API that a cluster has to serve for each gang scheduler."""

    NATIVE = "scheduling.k8s.io/v1alpha2"
    VOLCANO = "scheduling.volcano.sh/v1beta1"
    COSCHEDULING = "scheduling.x-k8s.io/v1alpha1"
    # Kueue reads labels, so any version of its own objects will do.
    KUEUE = "kueue.x-k8s.io"


_APIS = {
    GangScheduler.NATIVE: GangApi.NATIVE,
    GangScheduler.VOLCANO: GangApi.VOLCANO,
    GangScheduler.COSCHEDULING: GangApi.COSCHEDULING,
    GangScheduler.KUEUE: GangApi.KUEUE,
}


@dataclass(frozen=True, slots=True)
class GangMarks:
    """The fields of a pod that a gang scheduler reads."""

    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)


def chosen_gang(spec: Spec, apis: frozenset[GangApi], schedulers: tuple[str, ...] | None) -> GangScheduler:
    """The gang scheduler of a job, never Auto, which stays within the schedulers that jobs may ask for."""
    lifecycle = spec.lifecycle
    if lifecycle.gang is not GangScheduler.AUTO:
        return lifecycle.gang
    if lifecycle.queue is not None:
        only_volcano = GangApi.VOLCANO in apis and GangApi.KUEUE not in apis
        is_allowed = schedulers is None or is_among(volcano_scheduler(spec), schedulers)
        return GangScheduler.VOLCANO if only_volcano and is_allowed else GangScheduler.KUEUE
    return GangScheduler.NATIVE if GangApi.NATIVE in apis else GangScheduler.NONE


def volcano_scheduler(spec: Spec) -> str:
    """The scheduler of a job's pods under Volcano."""
    return spec.resources.scheduler_name or GANG_SCHEDULER_NAMES[GangScheduler.VOLCANO]


def missing_api(gang: GangScheduler, apis: frozenset[GangApi]) -> GangApi | None:
    """The API that this gang scheduler needs and the cluster does not serve."""
    needed = _APIS.get(gang)
    return None if needed is None or needed in apis else needed


def pod_group_manifest(attempt: Attempt) -> dict[str, Any] | None:
    """The gang's object; None for a scheduler that reads pods alone."""
    match attempt.gang:
        case GangScheduler.NATIVE:
            return _group_manifest(attempt, GangApi.NATIVE, _native_spec(attempt))
        case GangScheduler.VOLCANO:
            return _group_manifest(attempt, GangApi.VOLCANO, _volcano_spec(attempt))
        case GangScheduler.COSCHEDULING:
            return _group_manifest(attempt, GangApi.COSCHEDULING, {"minMember": attempt.layout.nodes})
        case GangScheduler.KUEUE | GangScheduler.NONE | GangScheduler.AUTO:
            return None


def gang_marks(attempt: Attempt, role: PodRole) -> GangMarks:
    """Return the marks by which the gang scheduler knows a pod's gang."""
    if role is PodRole.ROLLOUT:
        return _engine_marks(attempt)
    scheduler = _scheduler_field(attempt)
    match attempt.gang:
        case GangScheduler.NATIVE:
            return GangMarks(spec={"schedulingGroup": {"podGroupName": attempt.pod_group_name}})
        case GangScheduler.VOLCANO:
            # Later versions read the second name first.
            names = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
            return GangMarks(annotations=dict.fromkeys(names, attempt.pod_group_name), spec=scheduler)
        case GangScheduler.COSCHEDULING:
            return GangMarks(labels={"scheduling.x-k8s.io/pod-group": attempt.pod_group_name}, spec=scheduler)
        case GangScheduler.KUEUE:
            return _kueue_marks(attempt)
        case GangScheduler.NONE | GangScheduler.AUTO:
            return GangMarks()


def _group_manifest(attempt: Attempt, api: GangApi, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": api.value,
        "kind": Kind.POD_GROUP.value,
        "metadata": job_metadata(attempt, attempt.pod_group_name),
        "spec": spec,
    }


def _native_spec(attempt: Attempt) -> dict[str, Any]:
    key = attempt.spec.resources.topology_key
    priority = attempt.spec.resources.priority_class_name
    # The constraint holds for the whole group: it fits only a gang whose pods all belong in one domain.
    in_one_domain = key is not None and pods_per_group(attempt.layout) == attempt.layout.nodes
    return {
        "schedulingPolicy": {"gang": {"minCount": attempt.layout.nodes}},
        **({"schedulingConstraints": {"topology": [{"key": key}]}} if in_one_domain else {}),
        **({"priorityClassName": priority} if priority is not None else {}),
    }


def _volcano_spec(attempt: Attempt) -> dict[str, Any]:
    priority = attempt.spec.resources.priority_class_name
    queue = attempt.spec.lifecycle.queue
    return {
        "minMember": attempt.layout.nodes,
        **({"queue": queue} if queue is not None else {}),
        **({"priorityClassName": priority} if priority is not None else {}),
    }


def _engine_marks(attempt: Attempt) -> GangMarks:
    """Engines come and go: they are in no gang, but share its queue and scheduler: two schedulers overbook nodes."""
    queue = attempt.spec.lifecycle.queue
    match attempt.gang:
        case GangScheduler.KUEUE:
            return GangMarks(labels=_queue_labels(attempt))
        case GangScheduler.VOLCANO:
            annotations = {} if queue is None else {"scheduling.volcano.sh/queue-name": queue}
            return GangMarks(annotations=annotations, spec=_scheduler_field(attempt))
        case _:
            return GangMarks(spec=_scheduler_field(attempt))


def _kueue_marks(attempt: Attempt) -> GangMarks:
    return GangMarks(
        # A group that has ended stays ended for Kueue: every attempt is a group of its own.
        labels=_queue_labels(attempt) | {"kueue.x-k8s.io/pod-group-name": f"{attempt.name}-{attempt.number}"},
        annotations={
            "kueue.x-k8s.io/pod-group-total-count": str(attempt.layout.nodes),
            "kueue.x-k8s.io/pod-group-pod-index-label": Label.INDEX.value,
            # Kueue holds an ended pod by a finalizer until another takes its place in the group, which no pod of ours
            # does. With it, Kueue lets go of all of them once the last has ended, and of their quota.
            "kueue.x-k8s.io/retriable-in-group": "false",
        }
        | _kueue_topology(attempt),
    )


def _kueue_topology(attempt: Attempt) -> dict[str, str]:
    key, nodes = attempt.spec.resources.topology_key, attempt.layout.nodes
    if key is None:
        return {}
    size = pods_per_group(attempt.layout)
    if size == nodes:
        return {"kueue.x-k8s.io/podset-required-topology": key}
    preferred = {"kueue.x-k8s.io/podset-preferred-topology": key}
    if size == 1 or nodes % size != 0:
        return preferred
    # Kueue cuts slices in the order of the indices, as the groups are.
    return preferred | {
        "kueue.x-k8s.io/podset-slice-required-topology": key,
        "kueue.x-k8s.io/podset-slice-size": str(size),
    }


def _queue_labels(attempt: Attempt) -> dict[str, str]:
    queue = attempt.spec.lifecycle.queue
    return {} if queue is None else {"kueue.x-k8s.io/queue-name": queue}


def _scheduler_field(attempt: Attempt) -> dict[str, Any]:
    # The job's own choice wins: both schedulers may run under other names.
    scheduler_name = attempt.spec.resources.scheduler_name
    default_name = GANG_SCHEDULER_NAMES.get(attempt.gang)
    return {} if default_name is None else {"schedulerName": scheduler_name or default_name}
