"""Requests of an account, as the API server's audit log has them, and those that its roles allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.control_plane.plane import ControlPlane

RBAC = "/apis/rbac.authorization.k8s.io/v1"
EVERYWHERE = ""


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """To do one thing to one resource; `name` where the right is to one object, `namespace` where it holds."""

    verb: str
    group: str
    resource: str
    name: str = ""
    namespace: str = EVERYWHERE

    def __str__(self) -> str:
        at = f" in {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}.{self.group or 'core'} {self.name}{at}".rstrip()


def entries(plane: ControlPlane, namespace: str, account: str) -> Iterator[dict[str, Any]]:
    """Yield what a service account asked, oldest first."""
    user = f"system:serviceaccount:{namespace}:{account}"
    yield from (entry for entry in plane.audited() if entry["user"]["username"] == user)


def granted(plane: ControlPlane, namespace: str, account: str) -> frozenset[Right]:
    """Each right that a service account has been given by name, one verb and one resource at a time."""
    found: set[Right] = set()
    for kind in ("rolebindings", "clusterrolebindings"):
        for binding in plane.api.get(f"{RBAC}/{kind}")["items"]:
            subjects = binding.get("subjects") or ()
            if any(who["name"] == account and who.get("namespace") == namespace for who in subjects):
                found |= set(_rights(plane, binding))
    return frozenset(found)


def _rights(plane: ControlPlane, binding: dict[str, Any]) -> Iterator[Right]:
    where = binding["metadata"].get("namespace", EVERYWHERE)
    reference = binding["roleRef"]
    at = f"namespaces/{where}/roles" if reference["kind"] == "Role" else "clusterroles"
    for rule in plane.api.get(f"{RBAC}/{at}/{reference['name']}")["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for name in rule.get("resourceNames") or ("",):
                    yield from (Right(verb, group, resource, name, where) for verb in rule["verbs"])


def uses(right: Right, entry: dict[str, Any]) -> bool:
    """Return whether an entry of the log is a use of a right. One that failed for another reason than rights is one."""
    asked = entry.get("objectRef") or {}
    resource = "/".join(filter(None, (asked.get("resource"), asked.get("subresource"))))
    return (
        entry["responseStatus"].get("code") != 403
        and (entry["verb"], asked.get("apiGroup", ""), resource) == (right.verb, right.group, right.resource)
        and right.name in ("", asked.get("name"))
        and right.namespace in (EVERYWHERE, asked.get("namespace"))
    )
