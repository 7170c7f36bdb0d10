"""Stand-ins for the APIs of gang schedulers: their published kinds and fields, with no scheduler behind them.

Volcano 1.13, scheduler-plugins 0.33 and Kueue 0.14. What is not a field of theirs is pruned, so a field that reads back
as it was sent is one that they know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cluster.control_plane.api import RefusedError
from cluster.control_plane.plane import ControlPlane
from cluster.waiting import until

_TEXT: Mapping[str, Any] = {"type": "string"}
_INT: Mapping[str, Any] = {"type": "integer", "format": "int32"}
_AMOUNTS = {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}}

VOLCANO_FIELDS: Mapping[str, Any] = {
    "minMember": _INT,
    "minTaskMember": {"type": "object", "additionalProperties": _INT},
    "minResources": _AMOUNTS,
    "queue": {"type": "string", "default": "default"},
    "priorityClassName": _TEXT,
    "networkTopology": {
        "type": "object",
        "properties": {
            "mode": {"type": "string", "enum": ["hard", "soft"], "default": "hard"},
            "highestTierAllowed": {"type": "integer", "default": 1},
        },
    },
}
COSCHEDULING_FIELDS: Mapping[str, Any] = {
    "minMember": {**_INT, "minimum": 1},
    "minResources": _AMOUNTS,
    "scheduleTimeoutSeconds": _INT,
}


def definition(group: str, version: str, kind: str, plural: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A CRD whose spec has these fields."""
    schema = {
        "type": "object",
        "properties": {
            "spec": {"type": "object", "properties": dict(fields)},
            "status": {"type": "object", "properties": {"phase": _TEXT}},
        },
    }
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # Groups of the community ask for a word of approval.
            "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in for tests"},
        },
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "scope": "Namespaced",
            "versions": [served],
        },
    }


VOLCANO = definition("scheduling.volcano.sh", "v1beta1", "PodGroup", "podgroups", VOLCANO_FIELDS)
COSCHEDULING = definition("scheduling.x-k8s.io", "v1alpha1", "PodGroup", "podgroups", COSCHEDULING_FIELDS)
KUEUE = definition("kueue.x-k8s.io", "v1beta1", "LocalQueue", "localqueues", {"clusterQueue": _TEXT})


@contextmanager
def served(plane: ControlPlane, *definitions: Mapping[str, Any]) -> Iterator[None]:
    """The cluster has these APIs for as long as the block lasts."""
    for found in definitions:
        plane.kubectl("apply", "-f", "-", stdin=json.dumps(found))
    for found in definitions:
        until(lambda found=found: _lists(plane, found), waiting_for=f"{_path(found)} to be served")  # type: ignore[misc]
    try:
        yield
    finally:
        for found in definitions:
            plane.kubectl("delete", "crd", found["metadata"]["name"], "--wait=true")


def _path(found: Mapping[str, Any]) -> str:
    spec = found["spec"]
    return f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"


def _lists(plane: ControlPlane, found: Mapping[str, Any]) -> bool:
    try:
        plane.api.get(_path(found))
    except RefusedError:
        return False
    return True
