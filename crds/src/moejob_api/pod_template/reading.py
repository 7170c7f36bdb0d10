"""Templates of a job as models, and the first thing that is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from moejob_api.contract.pods import PodRole
from moejob_api.job import Spec
from moejob_api.pod_template.fields import Template

# etcd holds 1.5 MiB of a job, with its status.
MOST_BYTES = 64 * 1024


class BadTemplateError(ValueError):
    """A template that is no patch of a pod."""


def raw_templates(spec: Spec) -> Iterator[tuple[PodRole, Mapping[str, Any]]]:
    """The templates of a job, by the role of the pods that each is for."""
    if spec.pod_template is None:
        return
    for role, raw in ((PodRole.TRAINER, spec.pod_template.trainer), (PodRole.ROLLOUT, spec.pod_template.rollout)):
        if raw is not None:
            yield role, raw


def readable_templates(spec: Spec) -> Iterator[tuple[PodRole, Template]]:
    """The templates that can be read; the rules of jobs refuse the others."""
    for role, raw in raw_templates(spec):
        try:
            yield role, parse_template(raw)
        except BadTemplateError:
            continue


def parse_template(raw: Mapping[str, Any]) -> Template:
    """A template as models; BadTemplateError names the first field that is wrong."""
    text = json.dumps(raw)
    if len(text) > MOST_BYTES:
        raise BadTemplateError(f"has {len(text)} bytes as JSON, of {MOST_BYTES} at most; put files into a ConfigMap")
    try:
        return Template.model_validate_json(text, by_alias=True, by_name=False)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).lstrip(".")
        if first["type"] == "extra_forbidden":
            raise BadTemplateError(
                f"{place} is no field of a template; {_field_advice(str(first['loc'][-1]))}"
            ) from None
        raise BadTemplateError(f"{place}: {first['msg'].lower()}") from None


# Fields of a pod that stay as they are, and what a job has in their place.
UNTOUCHED: Mapping[str, str] = {
    "restartPolicy": "moejob decides about restarts",
    "hostname": "peers find a pod by its name",
    "subdomain": "peers find a pod by its name",
    "nodeName": "a pod that no scheduler has placed can be placed twice; use affinity or nodeSelector",
    "schedulerName": "use spec.resources.schedulerName",
    "priorityClassName": "use spec.resources.priorityClassName",
    "serviceAccountName": "use spec.resources.serviceAccount",
    "imagePullSecrets": "use spec.resources.imagePullSecrets",
    "automountServiceAccountToken": "pods of jobs have no token",
    "serviceAccountToken": "pods of jobs have no token",
    "terminationGracePeriodSeconds": "it follows from how long a save takes",
    "activeDeadlineSeconds": "use spec.lifecycle.activeDeadlineSeconds",
    "hostPID": "processes of other pods would be in reach",
    "hostIPC": "memory of other pods would be in reach",
    "shareProcessNamespace": "the launcher is process 1 of its container",
    "schedulingGates": "use a queue",
    "resourceClaims": "use extended resources",
    "namespaces": "pods of other namespaces are not for a job to be placed by",
    "namespaceSelector": "pods of other namespaces are not for a job to be placed by",
    "mountPropagation": "mounts of a pod stay in it",
    "volumeDevices": "use volumeMounts",
}


def _field_advice(name: str) -> str:
    return UNTOUCHED.get(name, "remove it")
