"""Gang schedulers, which start all pods or none: the API of each, its object, and what it reads from the pods.

Fields are those of the published APIs: scheduling.k8s.io/v1alpha2 (Kubernetes 1.36), scheduling.volcano.sh/v1beta1,
scheduling.x-k8s.io/v1alpha1 (scheduler-plugins), and Kueue's labels for groups of plain pods.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from moejob_api.contract import Label, Role
from moejob_api.job.lifecycle import Gang, Lifecycle
from moejob_operator.actions import Kind
from moejob_operator.children.blueprint import Blueprint, metadata
from moejob_operator.children.placement import pods_per_group


class GangApi(StrEnum):
    """The API that a cluster has to serve for each of them."""

    NATIVE = "scheduling.k8s.io/v1alpha2"
    VOLCANO = "scheduling.volcano.sh/v1beta1"
    COSCHEDULING = "scheduling.x-k8s.io/v1alpha1"
    # Kueue reads labels, so any version of its own objects will do.
    KUEUE = "kueue.x-k8s.io"


_APIS = {
    Gang.NATIVE: GangApi.NATIVE,
    Gang.VOLCANO: GangApi.VOLCANO,
    Gang.COSCHEDULING: GangApi.COSCHEDULING,
    Gang.KUEUE: GangApi.KUEUE,
}
_SCHEDULERS = {Gang.VOLCANO: "volcano", Gang.COSCHEDULING: "scheduler-plugins-scheduler"}


@dataclass(frozen=True, slots=True)
class GangMarks:
    """The fields of a pod that a gang scheduler reads."""

    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)


def chosen_gang(lifecycle: Lifecycle, apis: frozenset[GangApi]) -> Gang:
    """The gang scheduler of a job, never Auto."""
    if lifecycle.gang is not Gang.AUTO:
        return lifecycle.gang
    if lifecycle.queue is not None:
        only_volcano = GangApi.VOLCANO in apis and GangApi.KUEUE not in apis
        return Gang.VOLCANO if only_volcano else Gang.KUEUE
    return Gang.NATIVE if GangApi.NATIVE in apis else Gang.NONE


def missing_api(gang: Gang, apis: frozenset[GangApi]) -> GangApi | None:
    """The API that this gang scheduler needs and the cluster does not serve."""
    needed = _APIS.get(gang)
    return None if needed is None or needed in apis else needed


def pod_group(blueprint: Blueprint) -> dict[str, Any] | None:
    """The gang's object; None where pods alone say it."""
    match blueprint.gang:
        case Gang.NATIVE:
            return _object(blueprint, GangApi.NATIVE, _native(blueprint))
        case Gang.VOLCANO:
            return _object(blueprint, GangApi.VOLCANO, _volcano(blueprint))
        case Gang.COSCHEDULING:
            return _object(blueprint, GangApi.COSCHEDULING, {"minMember": blueprint.layout.nodes})
        case Gang.KUEUE | Gang.NONE | Gang.AUTO:
            return None


def gang_marks(blueprint: Blueprint, role: Role) -> GangMarks:
    """Return the marks by which the gang scheduler knows a pod's gang."""
    if role is Role.ROLLOUT:
        return _marks_of_engine(blueprint)
    scheduler = _scheduler(blueprint)
    match blueprint.gang:
        case Gang.NATIVE:
            return GangMarks(spec={"schedulingGroup": {"podGroupName": blueprint.pod_group}})
        case Gang.VOLCANO:
            # The second is what later versions read first.
            names = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
            return GangMarks(annotations=dict.fromkeys(names, blueprint.pod_group), spec=scheduler)
        case Gang.COSCHEDULING:
            return GangMarks(labels={"scheduling.x-k8s.io/pod-group": blueprint.pod_group}, spec=scheduler)
        case Gang.KUEUE:
            return _kueue(blueprint)
        case Gang.NONE | Gang.AUTO:
            return GangMarks()


def _object(blueprint: Blueprint, api: GangApi, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": api.value,
        "kind": Kind.POD_GROUP.value,
        "metadata": metadata(blueprint, blueprint.pod_group),
        "spec": spec,
    }


def _native(blueprint: Blueprint) -> dict[str, Any]:
    key = blueprint.spec.resources.topology_key
    priority = blueprint.spec.resources.priority_class_name
    # The constraint holds for the whole group: it fits only a gang that is one domain's worth of talk.
    in_one_domain = key is not None and pods_per_group(blueprint.layout) == blueprint.layout.nodes
    return {
        "schedulingPolicy": {"gang": {"minCount": blueprint.layout.nodes}},
        **({"schedulingConstraints": {"topology": [{"key": key}]}} if in_one_domain else {}),
        **({"priorityClassName": priority} if priority is not None else {}),
    }


def _volcano(blueprint: Blueprint) -> dict[str, Any]:
    priority = blueprint.spec.resources.priority_class_name
    queue = blueprint.spec.lifecycle.queue
    return {
        "minMember": blueprint.layout.nodes,
        **({"queue": queue} if queue is not None else {}),
        **({"priorityClassName": priority} if priority is not None else {}),
    }


def _marks_of_engine(blueprint: Blueprint) -> GangMarks:
    """Engines come and go: they are in no gang, but in its queue, and never left to a second scheduler of its nodes."""
    queue = blueprint.spec.lifecycle.queue
    match blueprint.gang:
        case Gang.KUEUE:
            return GangMarks(labels=_queue(blueprint))
        case Gang.VOLCANO:
            annotations = {} if queue is None else {"scheduling.volcano.sh/queue-name": queue}
            return GangMarks(annotations=annotations, spec=_scheduler(blueprint))
        case _:
            return GangMarks(spec=_scheduler(blueprint))


def _kueue(blueprint: Blueprint) -> GangMarks:
    return GangMarks(
        # A group that has ended stays ended for Kueue: every attempt is a group of its own.
        labels=_queue(blueprint) | {"kueue.x-k8s.io/pod-group-name": f"{blueprint.name}-{blueprint.attempt}"},
        annotations={
            "kueue.x-k8s.io/pod-group-total-count": str(blueprint.layout.nodes),
            "kueue.x-k8s.io/pod-group-pod-index-label": Label.INDEX.value,
            # Kueue holds an ended pod by a finalizer until another takes its place in the group, which no pod of ours
            # does. With it, Kueue lets go of all of them once the last has ended, and of their quota.
            "kueue.x-k8s.io/retriable-in-group": "false",
        }
        | _kueue_topology(blueprint),
    )


def _kueue_topology(blueprint: Blueprint) -> dict[str, str]:
    key, nodes = blueprint.spec.resources.topology_key, blueprint.layout.nodes
    if key is None:
        return {}
    size = pods_per_group(blueprint.layout)
    if size == nodes:
        return {"kueue.x-k8s.io/podset-required-topology": key}
    whole_gang = {"kueue.x-k8s.io/podset-preferred-topology": key}
    if size == 1 or nodes % size != 0:
        return whole_gang
    # Kueue cuts slices in the order of the indices, as the groups are.
    return whole_gang | {
        "kueue.x-k8s.io/podset-slice-required-topology": key,
        "kueue.x-k8s.io/podset-slice-size": str(size),
    }


def _queue(blueprint: Blueprint) -> dict[str, str]:
    queue = blueprint.spec.lifecycle.queue
    return {} if queue is None else {"kueue.x-k8s.io/queue-name": queue}


def _scheduler(blueprint: Blueprint) -> dict[str, Any]:
    # One that the job names wins: both schedulers may run under other names.
    given = blueprint.spec.resources.scheduler_name
    return {"schedulerName": given or _SCHEDULERS[blueprint.gang]} if blueprint.gang in _SCHEDULERS else {}
