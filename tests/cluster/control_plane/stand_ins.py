"""Definitions in place of those of other projects: they take any object, and nothing results from it."""

from __future__ import annotations

from typing import Any


def definition(api_version: str, kind: str) -> dict[str, Any]:
    """A definition of a kind in a namespace."""
    group, _, version = api_version.partition("/")
    plural = f"{kind.lower()}s"
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything, "status": anything}}}
    return {
        "metadata": {
            "name": f"{plural}.{group}",
            # Names under k8s.io are protected.
            "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }
