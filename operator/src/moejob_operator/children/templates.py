"""A job's patch of its pods, merged over what the operator makes.

As a strategic merge: containers, volumes and variables by their names, mounts by their paths, maps by their keys.
Tolerations, terms of affinity and volumes are added to the operator's. A container beside the trainer or engine becomes
a native sidecar: the sidecar starts before the trainer, and ends with it. An ordinary container that never ends would
keep a finished pod, and its GPUs, for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moejob_api.contract.pods import PodRole
from moejob_api.job import Spec
from moejob_api.pod_template.reading import raw_templates

# Sidecars keep to the restricted profile of Pod Security unless they say otherwise.
_SIDECAR_SECURITY: Mapping[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_REPLACED = ("topologySpreadConstraints", "hostNetwork", "hostAliases", "dnsPolicy", "dnsConfig", "runtimeClassName")


def template_part(spec: Spec, role: PodRole, part: str) -> dict[str, Any]:
    """Return `metadata` or `spec` of the template for a role, without nulls; empty where the job has none."""
    fields: dict[str, Any] = _without_nulls(dict(raw_templates(spec)).get(role, {})).get(part, {})
    return fields


def merge_pod_spec(pod_spec: dict[str, Any], patch: Mapping[str, Any], job_variables: int) -> dict[str, Any]:
    """Merge a template's spec over a pod's. Of the variables, the first `job_variables` are the job's."""
    if not patch:
        return pod_spec
    merged = pod_spec | {name: patch[name] for name in _REPLACED if name in patch}
    if patch.get("hostNetwork") and "dnsPolicy" not in patch:
        # Peers are found by the cluster's DNS, which a pod in its node's network does not ask by itself.
        merged["dnsPolicy"] = "ClusterFirstWithHostNet"
    for name in ("nodeSelector", "securityContext"):
        if name in patch:
            merged[name] = merged.get(name, {}) | patch[name]
    for name in ("tolerations", "volumes"):
        if name in patch:
            merged[name] = [*merged.get(name, ()), *patch[name]]
    if "affinity" in patch:
        merged["affinity"] = _merge_affinity(merged.get("affinity", {}), patch["affinity"])
    return merged | _merge_containers(pod_spec["containers"], patch, job_variables)


def _merge_containers(containers: list[dict[str, Any]], patch: Mapping[str, Any], job_variables: int) -> dict[str, Any]:
    [container] = containers
    beside = [entry for entry in patch.get("containers", ()) if entry["name"] != container["name"]]
    init_containers = [
        *(_secure_container(entry) for entry in patch.get("initContainers", ())),
        *(_secure_container(entry | {"restartPolicy": "Always"}) for entry in beside),
    ]
    own_patch: dict[str, Any] = next(
        (entry for entry in patch.get("containers", ()) if entry["name"] == container["name"]), {}
    )
    return {
        **({"initContainers": init_containers} if init_containers else {}),
        "containers": [_merge_container(container, own_patch, job_variables)],
    }


def _merge_container(container: dict[str, Any], patch: Mapping[str, Any], job_variables: int) -> dict[str, Any]:
    merged = dict(container)
    if "env" in patch:
        # Variables of the contract come last, so that nothing overrides them.
        env = container["env"]
        job_env = _merge_by_name(env[:job_variables], patch["env"])
        merged["env"] = [*job_env, *env[job_variables:]]
    if "envFrom" in patch:
        merged["envFrom"] = [*container.get("envFrom", ()), *patch["envFrom"]]
    if "volumeMounts" in patch:
        merged["volumeMounts"] = [*container["volumeMounts"], *patch["volumeMounts"]]
    if "securityContext" in patch:
        merged["securityContext"] = _merge_security(container["securityContext"], patch["securityContext"])
    if "resources" in patch:
        amounts, patched_amounts = container["resources"], patch["resources"]
        merged["resources"] = {
            name: dict(amounts.get(name, {})) | patched_amounts.get(name, {})
            for name in ("limits", "requests")
            if name in amounts or name in patched_amounts
        }
    return merged


def _secure_container(container: dict[str, Any]) -> dict[str, Any]:
    security = _merge_security(_SIDECAR_SECURITY, container.get("securityContext", {}))
    return container | {"securityContext": security}


def _merge_security(security: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**security, **patch}
    if "capabilities" in security and "capabilities" in patch:
        merged["capabilities"] = {**security["capabilities"], **patch["capabilities"]}
    if patch.get("privileged") and "allowPrivilegeEscalation" not in patch:
        # The API server refuses a privileged container that may not raise its privileges.
        del merged["allowPrivilegeEscalation"]
    return merged


def _merge_affinity(affinity: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        kind: {
            name: _merge_terms(affinity.get(kind, {}).get(name), patch.get(kind, {}).get(name))
            for name in {**affinity.get(kind, {}), **patch.get(kind, {})}
        }
        for kind in {**affinity, **patch}
    }


def _merge_terms(terms: Any, added: Any) -> Any:
    if terms is None or added is None:
        return added if terms is None else terms
    # The operator has terms about pods alone, which are lists.
    return [*terms, *added]


def _merge_by_name(entries: list[dict[str, Any]], patch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {entry["name"]: entry for entry in entries} | {entry["name"]: entry for entry in patch}
    return list(by_name.values())


def _without_nulls(value: Any) -> Any:
    match value:
        case Mapping():
            return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
        case list() | tuple():
            return [_without_nulls(inner) for inner in value]
        case _:
            return value
