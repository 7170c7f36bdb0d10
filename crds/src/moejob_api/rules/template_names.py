"""Names that the templates of a job ask for, by limit: in Python, and in CEL over variables of pod_template/in_cel.py.

Lists inside of lists are joined and split again: CEL in the API server has no word for making them flat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from moejob_api.job import Spec
from moejob_api.pod_template.checks import all_containers
from moejob_api.pod_template.fields import (
    Container,
    ContainerSecurity,
    NodeTerm,
    PodSecurity,
    TemplateSpec,
)
from moejob_api.pod_template.reading import readable_templates

# Between names. A name that holds it falls apart into parts that are each looked at.
_SEPARATOR = "'\\u001f'"
# Of every container; the others are devices.
_PLAIN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_HUGE_PAGES = "hugepages-"
_DEVICES_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
# Stands for a path that steps back out of its folder, and for a toleration without a key: no limit can name them.
STEPS_BACK, EVERY_TAINT = "(steps back)", "(every taint)"

Names = Callable[[TemplateSpec], Iterator[str]]


@dataclass(frozen=True, slots=True)
class TemplateNames:
    """Names of one limit in a template's spec."""

    names: Names
    cel: str


def flat_cel(items: str, name: str, inner: str) -> str:
    """CEL of the names in the lists that each item has."""
    join = f".join({_SEPARATOR})"
    return f"{items}.map({name}, ({inner}){join}){join}.split({_SEPARATOR}).filter(n, n != '')"


def template_references(spec: Spec, names: Names) -> Iterator[tuple[str, str]]:
    """The names in all templates of a job, with the path of the template's spec."""
    for role, template in readable_templates(spec):
        if template.spec is not None:
            yield from ((f"spec.podTemplate.{role}.spec", name) for name in names(template.spec))


def template_metadata(spec: Spec) -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """Labels and annotations of all templates: their kind, their path and their texts."""
    for role, template in readable_templates(spec):
        if template.metadata is None:
            continue
        path = f"spec.podTemplate.{role}.metadata"
        yield "labels", f"{path}.labels", template.metadata.labels or {}
        yield "annotations", f"{path}.annotations", template.metadata.annotations or {}


# --- names in Python ------------------------------------------------------------------------------------------------


def _image_names(spec: TemplateSpec) -> Iterator[str]:
    return (container.image for container in all_containers(spec) if container.image is not None)


def _secrets(spec: TemplateSpec) -> Iterator[str]:
    for container in all_containers(spec):
        for variable in container.env or ():
            if variable.value_from is not None and variable.value_from.secret_key_ref is not None:
                yield variable.value_from.secret_key_ref.name
        yield from (entry.secret_ref.name for entry in container.env_from or () if entry.secret_ref is not None)
    for volume in spec.volumes or ():
        if volume.secret is not None:
            yield volume.secret.secret_name
        for source in () if volume.projected is None else volume.projected.sources:
            if source.secret is not None:
                yield source.secret.name


def _config_maps(spec: TemplateSpec) -> Iterator[str]:
    for container in all_containers(spec):
        for variable in container.env or ():
            if variable.value_from is not None and variable.value_from.config_map_key_ref is not None:
                yield variable.value_from.config_map_key_ref.name
        yield from (entry.config_map_ref.name for entry in container.env_from or () if entry.config_map_ref is not None)
    for volume in spec.volumes or ():
        if volume.config_map is not None:
            yield volume.config_map.name
        for source in () if volume.projected is None else volume.projected.sources:
            if source.config_map is not None:
                yield source.config_map.name


def _claim_names(spec: TemplateSpec) -> Iterator[str]:
    claims = (volume.persistent_volume_claim for volume in spec.volumes or ())
    return (claim.claim_name for claim in claims if claim is not None)


def _storage_classes(spec: TemplateSpec) -> Iterator[str]:
    claims = (
        volume.ephemeral.volume_claim_template.spec for volume in spec.volumes or () if volume.ephemeral is not None
    )
    return (claim.storage_class_name for claim in claims if claim.storage_class_name is not None)


def _runtime_classes(spec: TemplateSpec) -> Iterator[str]:
    return iter(() if spec.runtime_class_name is None else (spec.runtime_class_name,))


def _tolerations(spec: TemplateSpec) -> Iterator[str]:
    return (toleration.key or EVERY_TAINT for toleration in spec.tolerations or ())


def _extended_resources(spec: TemplateSpec) -> Iterator[str]:
    for container in all_containers(spec):
        amounts = container.resources
        for name in () if amounts is None else (*(amounts.limits or ()), *(amounts.requests or ())):
            if name not in _PLAIN_RESOURCES and not name.startswith(_HUGE_PAGES):
                yield name
        yield from (entry.name for entry in container.env or () if entry.name == _DEVICES_VARIABLE)


def _node_selectors(spec: TemplateSpec) -> Iterator[str]:
    yield from (f"{key}={value}" for key, value in (spec.node_selector or {}).items())
    for term in _node_terms(spec):
        for requirement in term.match_expressions:
            if requirement.operator == "In":
                yield from (f"{requirement.key}={value}" for value in requirement.values or ())
            else:
                # No value of a label begins so: only a limit that allows every value of the key allows this.
                yield f"{requirement.key}=!{requirement.operator}"


def _node_terms(spec: TemplateSpec) -> Iterator[NodeTerm]:
    nodes = None if spec.affinity is None else spec.affinity.node_affinity
    if nodes is None:
        return
    if nodes.required_during_scheduling_ignored_during_execution is not None:
        yield from nodes.required_during_scheduling_ignored_during_execution.node_selector_terms
    for preferred in nodes.preferred_during_scheduling_ignored_during_execution or ():
        yield preferred.preference


def _host_paths(spec: TemplateSpec) -> Iterator[str]:
    for volume in spec.volumes or ():
        if volume.host_path is not None:
            yield STEPS_BACK if ".." in volume.host_path.path.split("/") else volume.host_path.path


def _privilege_names(spec: TemplateSpec) -> Iterator[str]:
    if spec.host_network:
        yield "hostNetwork"
    if spec.security_context is not None:
        yield from _process_privileges(spec.security_context)
        yield from (f"sysctls/{sysctl.name}" for sysctl in spec.security_context.sysctls or ())
    for container in all_containers(spec):
        yield from _container_privileges(container)


def _container_privileges(container: Container) -> Iterator[str]:
    yield from ("hostPort" for port in container.ports or () if port.host_port is not None)
    security = container.security_context
    if security is None:
        return
    yield from _process_privileges(security)
    if security.privileged:
        yield "privileged"
    if security.allow_privilege_escalation:
        yield "allowPrivilegeEscalation"
    if security.capabilities is not None:
        yield from (f"capabilities/{name}" for name in security.capabilities.add or ())


def _process_privileges(security: PodSecurity | ContainerSecurity) -> Iterator[str]:
    if security.run_as_user == 0 or security.run_as_non_root is False:
        yield "root"
    for kind, profile in (("seccomp", security.seccomp_profile), ("appArmor", security.app_armor_profile)):
        if profile is not None and profile.type != "RuntimeDefault":
            yield f"{kind}/{profile.type}"


# --- names in CEL ---------------------------------------------------------------------------------------------------

_CONTAINERS, _VOLUMES, _SPECS = "variables.containers", "variables.volumes", "variables.podSpecs"


def _objects_cel(reference: str, source: str, volumes: str, projected: str) -> str:
    """CEL of the Secrets or ConfigMaps of variables and volumes."""
    env = f"has(c.env) ? c.env.filter(e, has(e.valueFrom) && has(e.valueFrom.{reference}))"
    from_env = f"has(c.envFrom) ? c.envFrom.filter(e, has(e.{source})).map(e, e.{source}.name) : []"
    files = f"has(v.projected) ? v.projected.sources.filter(s, has(s.{projected})).map(s, s.{projected}.name) : []"
    return " + ".join(
        (
            flat_cel(_CONTAINERS, "c", f"({env}.map(e, e.valueFrom.{reference}.name) : []) + ({from_env})"),
            volumes,
            flat_cel(_VOLUMES, "v", files),
        )
    )


def _process_cel(path: str) -> str:
    """CEL of the privileges that a security context has, as a list."""
    profiles = " + ".join(
        f"(has({path}.{field}) && {path}.{field}.type != 'RuntimeDefault' ? ['{kind}/' + {path}.{field}.type] : [])"
        for kind, field in (("seccomp", "seccompProfile"), ("appArmor", "appArmorProfile"))
    )
    root = (
        f"(has({path}.runAsUser) && {path}.runAsUser == 0) || (has({path}.runAsNonRoot) && !{path}.runAsNonRoot) ? "
        "['root'] : []"
    )
    return f"({root}) + {profiles}"


def _privileges_cel() -> str:
    security = "s.securityContext"
    pods = (
        "(has(s.hostNetwork) && s.hostNetwork ? ['hostNetwork'] : []) + "
        f"(has({security}) ? {_process_cel(security)} + "
        f"(has({security}.sysctls) ? {security}.sysctls.map(y, 'sysctls/' + y.name) : []) : [])"
    )
    of_container = "c.securityContext"
    flags = " + ".join(
        f"(has({of_container}.{name}) && {of_container}.{name} ? ['{name}'] : [])"
        for name in ("privileged", "allowPrivilegeEscalation")
    )
    added = f"{of_container}.capabilities"
    capabilities = f"(has({added}) && has({added}.add) ? {added}.add.map(a, 'capabilities/' + a) : [])"
    containers = (
        "(has(c.ports) && c.ports.exists(p, has(p.hostPort)) ? ['hostPort'] : []) + "
        f"(has({of_container}) ? {_process_cel(of_container)} + {flags} + {capabilities} : [])"
    )
    return f"{flat_cel(_SPECS, 's', pods)} + {flat_cel(_CONTAINERS, 'c', containers)}"


def _node_selectors_cel() -> str:
    pairs = "has(s.nodeSelector) ? s.nodeSelector.map(k, k + '=' + s.nodeSelector[k]) : []"
    nodes = "s.affinity.nodeAffinity"
    required, preferred = (
        f"{nodes}.{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred")
    )
    terms = (
        f"(has({required}) ? {required}.nodeSelectorTerms : []) + "
        f"(has({preferred}) ? {preferred}.map(p, p.preference) : [])"
    )
    expression = (
        f"x.operator == 'In' ? (has(x.values) ? x.values : []).map(w, x.key + '=' + w).join({_SEPARATOR}) : "
        "x.key + '=!' + x.operator"
    )
    of_term = f"t.matchExpressions.map(x, {expression}).join({_SEPARATOR})"
    affine = f"has(s.affinity) && has({nodes}) ? ({terms}).map(t, {of_term}) : []"
    return f"{flat_cel(_SPECS, 's', pairs)} + {flat_cel(_SPECS, 's', affine)}"


def _extended_resources_cel() -> str:
    plain = f"k in {list(_PLAIN_RESOURCES)} || k.startsWith('{_HUGE_PAGES}')"
    amounts = " + ".join(
        f"(has(c.resources.{name}) ? c.resources.{name}.map(k, k).filter(k, !({plain})) : [])"
        for name in ("limits", "requests")
    )
    devices = f"has(c.env) ? c.env.filter(e, e.name == '{_DEVICES_VARIABLE}').map(e, e.name) : []"
    return flat_cel(_CONTAINERS, "c", f"(has(c.resources) ? {amounts} : []) + ({devices})")


def _volumes_cel(field: str, name: str) -> str:
    return f"{_VOLUMES}.filter(v, has(v.{field})).map(v, v.{name})"


_CLAIM = "v.ephemeral.volumeClaimTemplate.spec"
TEMPLATE_NAMES: Mapping[str, TemplateNames] = {
    "images": TemplateNames(_image_names, f"{_CONTAINERS}.filter(c, has(c.image)).map(c, c.image)"),
    "secrets": TemplateNames(
        _secrets, _objects_cel("secretKeyRef", "secretRef", _volumes_cel("secret", "secret.secretName"), "secret")
    ),
    "config_maps": TemplateNames(
        _config_maps,
        _objects_cel("configMapKeyRef", "configMapRef", _volumes_cel("configMap", "configMap.name"), "configMap"),
    ),
    "claims": TemplateNames(_claim_names, _volumes_cel("persistentVolumeClaim", "persistentVolumeClaim.claimName")),
    "storage_classes": TemplateNames(
        _storage_classes,
        f"{_VOLUMES}.filter(v, has(v.ephemeral) && has({_CLAIM}.storageClassName)).map(v, {_CLAIM}.storageClassName)",
    ),
    "runtime_classes": TemplateNames(
        _runtime_classes, f"{_SPECS}.filter(s, has(s.runtimeClassName)).map(s, s.runtimeClassName)"
    ),
    "tolerations": TemplateNames(
        _tolerations,
        flat_cel(
            _SPECS,
            "s",
            f"has(s.tolerations) ? s.tolerations.map(t, has(t.key) && t.key != '' ? t.key : '{EVERY_TAINT}') : []",
        ),
    ),
    "extended_resources": TemplateNames(_extended_resources, _extended_resources_cel()),
    "node_selectors": TemplateNames(_node_selectors, _node_selectors_cel()),
    "host_paths": TemplateNames(
        _host_paths,
        f"{_VOLUMES}.filter(v, has(v.hostPath)).map(v, "
        f"v.hostPath.path.split('/').exists(p, p == '..') ? '{STEPS_BACK}' : v.hostPath.path)",
    ),
    "privileges": TemplateNames(_privilege_names, _privileges_cel()),
}
