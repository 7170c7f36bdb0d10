"""Contradictions between a template and the pod that it is merged into."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from moejob_api.contract.engines import separate_engines
from moejob_api.contract.pods import Label, PodPath, PodRole, TrainingLabel
from moejob_api.contract.torchrun import TORCHRUN_VARIABLES
from moejob_api.job import Spec
from moejob_api.pod_template.fields import Container, Template, TemplateSpec, Volume, VolumeMount
from moejob_api.pod_template.reading import BadTemplateError, parse_template, raw_templates

# Volumes of the operator's; sidecars may mount them.
OPERATOR_VOLUMES = ("shared-memory", "temporary", "storage")
_CLAIM_VOLUME = re.compile(r"claim-[0-9]+")
# Fields of the trainer's and the engine's own container that a template may set.
OWN_CONTAINER_FIELDS = ("name", "env", "envFrom", "resources", "volumeMounts", "securityContext")


def template_complaints(spec: Spec) -> Iterator[str]:
    """Return the faults of the templates of a job, each with its path below spec.podTemplate."""
    for role, raw in raw_templates(spec):
        if role is PodRole.ROLLOUT and not separate_engines(spec):
            yield "rollout: the job has no pods of engines; remove it, or set grpo.rollout.placement: Separate"
        try:
            template = parse_template(raw)
        except BadTemplateError as error:
            yield f"{role}.{error}" if "." in str(error).split(" ")[0] else f"{role}: {error}"
            continue
        yield from (f"{role}.{complaint}" for complaint in _role_complaints(spec, role, template))


def _role_complaints(spec: Spec, role: PodRole, template: Template) -> Iterator[str]:
    own_labels = {*Label, *TrainingLabel}
    metadata = template.metadata
    for key in () if metadata is None else (*(metadata.labels or ()), *(metadata.annotations or ())):
        if key in own_labels:
            yield f"metadata: {key} is set by moejob; remove it"
    if template.spec is None:
        return
    volumes = template.spec.volumes or ()
    yield from _volume_complaints(volumes)
    known_volumes = {*OPERATOR_VOLUMES, *(volume.name for volume in volumes)}
    yield from _container_complaints(role, template.spec)
    for container in all_containers(template.spec):
        yield from _mount_complaints(container, known_volumes)
        yield from _variable_complaints(container)
    for container in template.spec.containers or ():
        if container.name == role:
            yield from _own_complaints(spec, container)
    if template.spec.dns_policy == "None" and template.spec.dns_config is None:
        yield "spec.dnsPolicy: None needs dnsConfig"


def all_containers(spec: TemplateSpec) -> tuple[Container, ...]:
    """Containers and init containers of a template."""
    return (*(spec.containers or ()), *(spec.init_containers or ()))


def _volume_complaints(volumes: Iterable[Volume]) -> Iterator[str]:
    names: set[str] = set()
    for volume in volumes:
        sources = volume.model_dump(exclude_none=True, exclude={"name"})
        if len(sources) != 1:
            yield f"spec.volumes: {volume.name} needs exactly one source, {len(sources)} are given"
        if volume.name in OPERATOR_VOLUMES or _CLAIM_VOLUME.fullmatch(volume.name):
            yield f"spec.volumes: {volume.name} is a volume of moejob's; choose another name"
        if volume.name in names:
            yield f"spec.volumes: {volume.name} is given twice"
        names.add(volume.name)
        if volume.host_path is not None and ".." in volume.host_path.path.split("/"):
            yield f"spec.volumes: the path {volume.host_path.path} of {volume.name} steps back by ..; write it out"
        for source in () if volume.projected is None else volume.projected.sources:
            if len(source.model_dump(exclude_none=True)) != 1:
                yield f"spec.volumes: every source of {volume.name} is exactly one of secret, configMap, downwardAPI"


def _container_complaints(role: PodRole, spec: TemplateSpec) -> Iterator[str]:
    names: set[str] = set()
    for container in all_containers(spec):
        if container.name in names:
            yield f"spec.containers: {container.name} is given twice"
        names.add(container.name)
        if container.name in set(PodRole) - {role}:
            yield f"spec.containers: {container.name} is the container of other pods; choose another name"
        if container.name != role and container.image is None:
            yield f"spec.containers: {container.name} is beside the container {role} and needs an image"
    for container in spec.init_containers or ():
        if container.name == role:
            yield f"spec.initContainers: {role} is the container that trains or answers; patch it in containers"
        probes = (container.startup_probe, container.readiness_probe, container.liveness_probe, container.lifecycle)
        if container.restart_policy is None and any(probe is not None for probe in probes):
            yield f"spec.initContainers: {container.name} has probes or lifecycle, which need restartPolicy: Always"


def _mount_complaints(container: Container, known_volumes: set[str]) -> Iterator[str]:
    paths: set[str] = set()
    for mount in container.volume_mounts or ():
        if mount.name not in known_volumes:
            yield f"spec.containers: {container.name} mounts {mount.name}, which is no volume of the template"
        if mount.mount_path in paths:
            yield f"spec.containers: {container.name} mounts two volumes at {mount.mount_path}"
        paths.add(mount.mount_path)
        if mount.sub_path is not None and ".." in mount.sub_path.split("/"):
            yield f"spec.containers: subPath {mount.sub_path} of {container.name} steps back by .."


def _variable_complaints(container: Container) -> Iterator[str]:
    names: set[str] = set()
    for variable in container.env or ():
        if variable.name in names:
            yield f"spec.containers: variable {variable.name} of {container.name} is given twice"
        names.add(variable.name)
        source = variable.value_from
        if source is None:
            continue
        if variable.value is not None or len(source.model_dump(exclude_none=True)) != 1:
            yield f"spec.containers: variable {variable.name} of {container.name} needs one value or one valueFrom"
    for entry in container.env_from or ():
        if (entry.secret_ref is None) == (entry.config_map_ref is None):
            yield f"spec.containers: every envFrom of {container.name} has exactly one of secretRef and configMapRef"


def _own_complaints(spec: Spec, container: Container) -> Iterator[str]:
    patched_fields = container.model_dump(by_alias=True, exclude_none=True).keys()
    for name in sorted(patched_fields - set(OWN_CONTAINER_FIELDS)):
        fix = "use spec.resources.image" if name == "image" else "remove it"
        yield f"spec.containers: {name} of {container.name} is moejob's; {fix}"
    for variable in container.env or ():
        if variable.name.startswith("MOEJOB_") or variable.name in TORCHRUN_VARIABLES:
            yield f"spec.containers: variable {variable.name} of {container.name} is set by moejob; remove it"
    amounts = container.resources
    rdma = () if spec.resources.rdma is None else (spec.resources.rdma.resource,)
    set_elsewhere = {"cpu", "memory", spec.resources.gpu_resource, *rdma}
    names = () if amounts is None else {*(amounts.limits or ()), *(amounts.requests or ())}
    for name in sorted(set_elsewhere.intersection(names)):
        yield f"spec.containers: {name} of {container.name} follows from spec.resources; set it there"
    for mount in container.volume_mounts or ():
        if (taken := _taken_path(spec, mount)) is not None:
            yield f"spec.containers: {mount.mount_path} would hide {taken}, which moejob mounts; choose another path"


def _taken_path(spec: Spec, mount: VolumeMount) -> str | None:
    path = mount.mount_path.rstrip("/") + "/"
    for operator_path in (spec.storage.mount_path, *PodPath):
        own_folder = operator_path.rstrip("/") + "/"
        if own_folder.startswith(path) or (
            operator_path in (PodPath.CLAIMS, spec.storage.mount_path) and path.startswith(own_folder)
        ):
            return str(operator_path)
    return None
