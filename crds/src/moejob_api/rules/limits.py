"""Limits of an installation: names that jobs may ask for, and the refusal of a job that asks for others.

A right to create jobs is one to have pods created, so what pods are made of is bounded here. What runs in them is the
job's own code, which no limit reads. Every limit stands once in Python and once in CEL, for the chart's
ValidatingAdmissionPolicy; a test holds the two against each other on a real API server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic.alias_generators import to_camel

from moejob_api.job import Spec
from moejob_api.job.claims import SCHEME, claims_of_sources
from moejob_api.job.lifecycle import GANG_SCHEDULER_NAMES
from moejob_api.job.resources import Accelerator
from moejob_api.pod_template.in_cel import profile_templates_cel, template_variables_cel
from moejob_api.problems import Problem, Rule
from moejob_api.rules.template_names import TEMPLATE_NAMES, template_metadata, template_references

# A name, or the beginning of names and a star.
Names = tuple[Annotated[str, Field(max_length=512, pattern=r"^[A-Za-z0-9][-A-Za-z0-9_./:@]*\*?$")], ...]
# The beginning ends behind a registry's name: "registry.example.com*" is that of registry.example.com.elsewhere, too.
ImageNames = tuple[
    Annotated[
        str, Field(max_length=512, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_./:@]*|[-A-Za-z0-9_.:]*/[-A-Za-z0-9_./:@]*\*)$")
    ],
    ...,
]
Pairs = tuple[
    Annotated[str, Field(max_length=512, pattern=r"^[A-Za-z0-9][-A-Za-z0-9_./]*(\*|=[-A-Za-z0-9_./:]*\*?)$")], ...
]
# Services mostly select pods by labels without a prefix; labels that tools write for people mostly have a prefix.
_PREFIXED = "*/*"
LabelPairs = tuple[
    Annotated[
        str,
        Field(max_length=512, pattern=r"^(\*|\*/\*|[A-Za-z0-9][-A-Za-z0-9_./]*(\*|=[-A-Za-z0-9_./:]*\*?))$"),
    ],
    ...,
]
HostPaths = tuple[Annotated[str, Field(max_length=512, pattern=r"^/[-A-Za-z0-9_./]*\*?$")], ...]
# Keys of labels and annotations; *.k8s.io/* is any whose prefix ends so.
Keys = tuple[
    Annotated[
        str, Field(max_length=512, pattern=r"^(\*\.[A-Za-z0-9][-A-Za-z0-9.]*/\*|[A-Za-z0-9][-A-Za-z0-9_./]*\*?)$")
    ],
    ...,
]
# Schedulers, quotas, kubelets and container runtimes read these keys, which would say again what other limits forbid:
# a priority of Kueue's, another queue, or devices of the node by cdi.k8s.io and by injectors of NRI.
RESERVED_KEYS = (
    "moejob.dev/*",
    "kubernetes.io/*",
    "*.kubernetes.io/*",
    "k8s.io/*",
    "*.k8s.io/*",
    "*.x-k8s.io/*",
    "io.kubernetes.*",
    "scheduling.*",
    "volcano.sh/*",
    "training.kubeflow.org/*",
    "devices.gke.io/*",
    "devices.nri.io/*",
    "devices.noderesource.dev/*",
)


class JobLimits(BaseModel):
    """Names that jobs may ask for. A limit that is absent allows any, an empty one none."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="forbid", frozen=True)

    service_accounts: Annotated[Names | None, Field(description="ServiceAccounts.")] = None
    images: Annotated[
        ImageNames | None, Field(description="Images that jobs name; those of the operator are always allowed.")
    ] = None
    secrets: Annotated[
        Names | None, Field(description="Secrets: of variables, read whole, and with credentials of registries.")
    ] = None
    config_maps: Annotated[Names | None, Field(description="ConfigMaps: of variables, and read whole.")] = None
    claims: Annotated[
        Names | None, Field(description="Claims that are there: storage.claimName, and pvc:// of sources.")
    ] = None
    storage_classes: Annotated[Names | None, Field(description="Storage classes of new claims.")] = None
    priority_classes: Annotated[Names | None, Field(description="PriorityClasses.")] = None
    runtime_classes: Annotated[Names | None, Field(description="RuntimeClasses.")] = None
    schedulers: Annotated[Names | None, Field(description="Schedulers.")] = None
    queues: Annotated[
        Names | None, Field(description="Queues, also as labels of Kueue, Volcano, YuniKorn, KAI and Run:ai.")
    ] = None
    require_queue: Annotated[bool, Field(description="Whether each job has to name its queue.")] = False
    networks: Annotated[
        Names | None, Field(description="Networks of Multus and GKE, name or namespace/name, also as annotations.")
    ] = None
    tolerations: Annotated[
        Names | None, Field(description="Keys of tolerated taints; one without a key needs a limit that is absent.")
    ] = None
    extended_resources: Annotated[
        Names | None, Field(description="Extended resources: of GPUs, and of cards for RDMA.")
    ] = None
    node_selectors: Annotated[Pairs | None, Field(description="Labels of nodes, as key=value.")] = None
    labels: Annotated[
        LabelPairs,
        Field(description="Further labels of pods, as key=value; */* is any whose key has a prefix, * any at all."),
    ] = (_PREFIXED,)
    annotations: Annotated[Pairs | None, Field(description="Further annotations of pods, as key=value.")] = None
    reserved: Annotated[
        Keys,
        Field(description="Keys that a label or annotation has only where its limit names the whole key and a value."),
    ] = RESERVED_KEYS
    host_paths: Annotated[
        HostPaths | None, Field(description="Paths of nodes that templates mount; /dev/shm/* is all below a folder.")
    ] = ()
    privileges: Annotated[
        Names | None,
        Field(
            description="Rights on nodes that templates ask for: hostNetwork, hostPort, privileged, root, "
            "allowPrivilegeEscalation, capabilities/NAME, seccomp/TYPE, appArmor/TYPE, sysctls/NAME."
        ),
    ] = ()
    unserved_namespaces: Annotated[
        Names, Field(description="Namespaces whose jobs are refused where all others are served.")
    ] = ("kube-*",)


DEFAULT_LIMITS = JobLimits()


@dataclass(frozen=True, slots=True)
class _NameReference:
    """One thing that a job names, and the field that names it."""

    path: str
    name: str


@dataclass(frozen=True, slots=True)
class LimitedName:
    """One limit: `cel` is the list of names in `object`, a job; `profile_cel`, where it differs, that in a profile.

    A profile lacks the values that a job always has, and the fields that only a job has.
    """

    limit: str
    noun: str
    references: Callable[[Spec], Iterator[_NameReference]]
    cel: str
    profile_cel: str | None = None

    @property
    def value_name(self) -> str:
        """The name of the limit in the chart's values."""
        return to_camel(self.limit)


def limit_problems(spec: Spec, limits: JobLimits) -> Iterator[Problem]:
    """Everything that a job asks for beyond the limits."""
    for limited in LIMITED_NAMES:
        allowed: tuple[str, ...] | None = getattr(limits, limited.limit)
        references = () if allowed is None else (*limited.references(spec), *_template_references(spec, limited.limit))
        for reference in references:
            if not is_among(reference.name, allowed or ()):
                yield Problem(Rule.LIMIT, reference.path, _refusal_message(limited, reference, allowed or ()))
    for reference in _key_references(spec, limits):
        if is_among(reference.name, limits.reserved):
            yield Problem(Rule.LIMIT, reference.path, _reserved_message(reference.name, limits.reserved))
    if limits.require_queue and spec.lifecycle.queue is None:
        yield Problem(Rule.LIMIT, "spec.lifecycle.queue", REQUIRED_QUEUE)


def namespace_problems(namespace: str, limits: JobLimits) -> Iterator[Problem]:
    """The problem of a job in a namespace that is not served."""
    if is_among(namespace, limits.unserved_namespaces):
        message = (
            f"jobs in the namespace {namespace} are not served here ({', '.join(limits.unserved_namespaces)}); create "
            "the job in another namespace"
        )
        yield Problem(Rule.LIMIT, "metadata.namespace", message)


def is_among(name: str, allowed: tuple[str, ...]) -> bool:
    """Return whether a name equals an allowed name, or begins with an allowed name that ends in a star."""
    return any(_is_match(name, pattern) for pattern in allowed)


def _is_match(name: str, pattern: str) -> bool:
    if pattern == _PREFIXED:
        # No value of a label has a slash.
        return "/" in name
    if pattern.startswith("*."):
        # A key has one slash, behind its prefix.
        return pattern[1:-1] in name
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _refusal_message(limited: LimitedName, reference: _NameReference, allowed: tuple[str, ...]) -> str:
    allowed_text = ", ".join(allowed) or "none"
    return (
        f"{limited.noun} {reference.name or 'without a name'} is beyond the limits of this installation, which "
        f"allow {allowed_text}; remove it, or ask those who run the operator for limits.{limited.value_name}"
    )


def _reserved_message(key: str, reserved: tuple[str, ...]) -> str:
    return (
        f"the key {key} is reserved here ({', '.join(reserved)}); choose another, or the field of the job that stands "
        "for it"
    )


def _optional_reference(path: str, name: str | None) -> Iterator[_NameReference]:
    return iter(()) if name is None else iter((_NameReference(path, name),))


def _image_references(spec: Spec) -> Iterator[_NameReference]:
    yield from _optional_reference("spec.resources.image", spec.resources.image)
    yield from _optional_reference("spec.resources.rolloutImage", spec.resources.rollout_image)


def _secret_references(spec: Spec) -> Iterator[_NameReference]:
    resources = spec.resources
    for index, variable in enumerate(resources.env):
        yield from _optional_reference(
            f"spec.resources.env[{index}]", None if variable.secret is None else variable.secret.name
        )
    for index, source in enumerate(resources.env_from):
        yield from _optional_reference(f"spec.resources.envFrom[{index}]", source.secret)
    for index, name in enumerate(resources.image_pull_secrets):
        yield _NameReference(f"spec.resources.imagePullSecrets[{index}]", name)


def _config_map_references(spec: Spec) -> Iterator[_NameReference]:
    for index, variable in enumerate(spec.resources.env):
        config_map = None if variable.config_map is None else variable.config_map.name
        yield from _optional_reference(f"spec.resources.env[{index}]", config_map)
    for index, source in enumerate(spec.resources.env_from):
        yield from _optional_reference(f"spec.resources.envFrom[{index}]", source.config_map)


def _claim_references(spec: Spec) -> Iterator[_NameReference]:
    yield from _optional_reference("spec.storage.claimName", spec.storage.claim_name)
    yield from (_NameReference(path, claim) for path, claim in claims_of_sources(spec))


def _queue_references(spec: Spec) -> Iterator[_NameReference]:
    yield from _optional_reference("spec.lifecycle.queue", spec.lifecycle.queue)
    yield from _references_under_keys(spec, _QUEUE_KEYS)


def _scheduler_references(spec: Spec) -> Iterator[_NameReference]:
    if spec.resources.scheduler_name is not None:
        yield _NameReference("spec.resources.schedulerName", spec.resources.scheduler_name)
    elif spec.lifecycle.gang in GANG_SCHEDULER_NAMES:
        yield _NameReference("spec.lifecycle.gang", GANG_SCHEDULER_NAMES[spec.lifecycle.gang])


def _priority_references(spec: Spec) -> Iterator[_NameReference]:
    yield from _optional_reference("spec.resources.priorityClassName", spec.resources.priority_class_name)
    yield from _references_under_keys(spec, _PRIORITY_KEYS)


def _node_selector_references(spec: Spec) -> Iterator[_NameReference]:
    yield from _pair_references("spec.resources.nodeSelector", spec.resources.node_selector)
    yield from _pairs_under_keys(spec, _NODE_POOL_KEYS)


def _network_references(spec: Spec) -> Iterator[_NameReference]:
    rdma = spec.resources.rdma
    texts = (
        *_optional_reference("spec.resources.rdma.networks", None if rdma is None else rdma.networks),
        *_references_under_keys(spec, _NETWORK_KEYS),
    )
    for text in texts:
        # What is written as JSON begins with a bracket, as no name that can be allowed.
        names = (part.strip().partition("@")[0] for part in text.name.split(","))
        yield from (_NameReference(text.path, name) for name in names if name)


def _toleration_references(spec: Spec) -> Iterator[_NameReference]:
    for index, toleration in enumerate(spec.resources.tolerations):
        yield _NameReference(f"spec.resources.tolerations[{index}]", toleration.key or "")


def _extended_resource_references(spec: Spec) -> Iterator[_NameReference]:
    resources = spec.resources
    if resources.accelerator is not Accelerator.CPU:
        yield _NameReference("spec.resources.gpuResource", resources.gpu_resource)
    yield from _optional_reference(
        "spec.resources.rdma.resource", None if resources.rdma is None else resources.rdma.resource
    )
    for index, variable in enumerate(resources.env):
        if variable.name == _DEVICES_VARIABLE:
            yield _NameReference(f"spec.resources.env[{index}]", variable.name)
    yield from _present_keys(spec, _GPU_SHARE_KEYS)


def _template_references(spec: Spec, limit: str) -> Iterator[_NameReference]:
    names = TEMPLATE_NAMES.get(limit)
    if names is not None:
        yield from (_NameReference(path, name) for path, name in template_references(spec, names.names))


def _references_under_keys(spec: Spec, keys: tuple[str, ...]) -> Iterator[_NameReference]:
    for _, path, texts in _pod_metadata(spec):
        yield from (_NameReference(path, texts[key]) for key in keys if key in texts)


def _pairs_under_keys(spec: Spec, keys: tuple[str, ...]) -> Iterator[_NameReference]:
    for _, path, texts in _pod_metadata(spec):
        yield from (_NameReference(path, f"{key}={texts[key]}") for key in keys if key in texts)


def _present_keys(spec: Spec, keys: tuple[str, ...]) -> Iterator[_NameReference]:
    for _, path, texts in _pod_metadata(spec):
        yield from (_NameReference(path, key) for key in keys if key in texts)


def _key_references(spec: Spec, limits: JobLimits) -> Iterator[_NameReference]:
    """Keys of a job that its limits do not name whole: to write a reserved key there is to allow it."""
    for name, path, texts in _pod_metadata(spec):
        pairs: tuple[str, ...] = getattr(limits, name) or ()
        for key in texts:
            if not any(pair.startswith(f"{key}=") for pair in pairs):
                yield _NameReference(path, key)


def _pod_metadata(spec: Spec) -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """Labels and annotations: their kind, their path and their texts."""
    yield "labels", "spec.resources.labels", spec.resources.labels
    yield "annotations", "spec.resources.annotations", spec.resources.annotations
    yield from template_metadata(spec)


def _metadata_references(spec: Spec, kind: str) -> Iterator[_NameReference]:
    for name, path, texts in _pod_metadata(spec):
        if name == kind:
            yield from _pair_references(path, texts)


def _pair_references(path: str, texts: Mapping[str, str]) -> Iterator[_NameReference]:
    return (_NameReference(path, f"{key}={value}") for key, value in texts.items())


# Of Kueue, Volcano, YuniKorn (both), KAI and Run:ai (both).
_QUEUE_KEYS = (
    "kueue.x-k8s.io/queue-name",
    "scheduling.volcano.sh/queue-name",
    "volcano.sh/queue-name",
    "yunikorn.apache.org/queue",
    "queue",
    "kai.scheduler/queue",
    "runai/queue",
    "project",
)
# Of Kueue, KAI and Run:ai.
_PRIORITY_KEYS = ("kueue.x-k8s.io/priority-class", "priorityClassName")
_NETWORK_KEYS = (
    "k8s.v1.cni.cncf.io/networks",
    "v1.multus-cni.io/default-network",
    "networking.gke.io/interfaces",
    "networking.gke.io/default-interface",
)
_NODE_POOL_KEYS = ("kai.scheduler/node-pool", "runai/node-pool")
# KAI and Run:ai give a pod a part of a GPU for these, although it asks for no resource.
_GPU_SHARE_KEYS = ("gpu-fraction", "gpu-memory", "gpu-fraction-num-devices")
# NVIDIA's container runtime gives a container the GPUs that this variable names, as many as there are.
_DEVICES_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
REQUIRED_QUEUE = "a job has to name its queue here (limits.requireQueue); set queue"

_PODS = "object.spec.resources"


def _optional_cel(path: str) -> str:
    """CEL of a field that may be absent, as a list."""
    return f"(has({path}) ? [{path}] : [])"


def _filtered_cel(items: str, path: str, name: str) -> str:
    """CEL of what some items have at a path."""
    return f"{items}.filter(i, has(i.{path})).map(i, i.{name})"


def _metadata_cel(*kinds: str) -> tuple[str, ...]:
    """CEL of the labels, the annotations or both, of a job and its templates."""
    return tuple(
        path
        for kind in kinds
        for path in (
            f"{_PODS}.{kind}",
            f"variables.trainer{kind.capitalize()}",
            f"variables.rollout{kind.capitalize()}",
        )
    )


def _values_cel(keys: tuple[str, ...]) -> str:
    """CEL of what labels and annotations hold under some keys."""
    maps = _metadata_cel("labels", "annotations")
    return " + ".join(f"{list(keys)}.filter(k, k in {path}).map(k, {path}[k])" for path in maps)


def _pairs_of_keys_cel(keys: tuple[str, ...]) -> str:
    """CEL of the labels and annotations under some keys, as key=value."""
    maps = _metadata_cel("labels", "annotations")
    return " + ".join(f"{list(keys)}.filter(k, k in {path}).map(k, k + '=' + {path}[k])" for path in maps)


def _present_keys_cel(keys: tuple[str, ...]) -> str:
    """CEL of the keys among some that a label or annotation has."""
    return " + ".join(f"{list(keys)}.filter(k, k in {path})" for path in _metadata_cel("labels", "annotations"))


def _pairs_cel(name: str) -> str:
    return " + ".join(f"{path}.map(k, k + '=' + {path}[k])" for path in _metadata_cel(name))


_SOURCES = (
    "([object.spec.model.source] + object.spec.data.train.map(d, d.source) + object.spec.data.eval.map(d, d.source) + "
    f"{_optional_cel('object.spec.model.config')} + {_optional_cel('object.spec.checkpoint.resumeFrom')})"
)
_SCHEDULER_NAMES = {gang.value: name for gang, name in GANG_SCHEDULER_NAMES.items()}
_GANG = "object.spec.lifecycle.gang"
_GANG_SCHEDULERS = f"{_GANG} in {_SCHEDULER_NAMES} ? [{_SCHEDULER_NAMES}[{_GANG}]] : []"
_NETWORKS = f"(has({_PODS}.rdma) ? {_optional_cel(f'{_PODS}.rdma.networks')} : []) + {_values_cel(_NETWORK_KEYS)}"

_DEVICES = (
    f"(has({_PODS}.rdma) ? [{_PODS}.rdma.resource] : []) + "
    f"{_PODS}.env.filter(i, i.name == '{_DEVICES_VARIABLE}').map(i, i.name) + {_present_keys_cel(_GPU_SHARE_KEYS)}"
)

LIMITED_NAMES: tuple[LimitedName, ...] = (
    LimitedName(
        "service_accounts",
        "service account",
        lambda spec: _optional_reference("spec.resources.serviceAccount", spec.resources.service_account),
        _optional_cel(f"{_PODS}.serviceAccount"),
    ),
    LimitedName(
        "images",
        "image",
        _image_references,
        f"{_optional_cel(f'{_PODS}.image')} + {_optional_cel(f'{_PODS}.rolloutImage')}",
    ),
    LimitedName(
        "secrets",
        "Secret",
        _secret_references,
        f"{_filtered_cel(f'{_PODS}.env', 'secret', 'secret.name')} + "
        f"{_filtered_cel(f'{_PODS}.envFrom', 'secret', 'secret')} + "
        f"{_PODS}.imagePullSecrets",
    ),
    LimitedName(
        "config_maps",
        "ConfigMap",
        _config_map_references,
        f"{_filtered_cel(f'{_PODS}.env', 'configMap', 'configMap.name')} + "
        f"{_filtered_cel(f'{_PODS}.envFrom', 'configMap', 'configMap')}",
    ),
    LimitedName(
        "claims",
        "claim",
        _claim_references,
        f"{_optional_cel('object.spec.storage.claimName')} + "
        f"{_SOURCES}.filter(s, s.startsWith('{SCHEME}')).map(s, s.substring({len(SCHEME)}).split('/')[0])",
        profile_cel="[]",
    ),
    LimitedName(
        "storage_classes",
        "storage class",
        lambda spec: _optional_reference("spec.storage.storageClass", spec.storage.storage_class),
        _optional_cel("object.spec.storage.storageClass"),
    ),
    LimitedName(
        "priority_classes",
        "priority class",
        _priority_references,
        f"{_optional_cel(f'{_PODS}.priorityClassName')} + {_values_cel(_PRIORITY_KEYS)}",
    ),
    LimitedName(
        "runtime_classes",
        "runtime class",
        lambda spec: _optional_reference("spec.resources.runtimeClassName", spec.resources.runtime_class_name),
        _optional_cel(f"{_PODS}.runtimeClassName"),
    ),
    LimitedName(
        "schedulers",
        "scheduler",
        _scheduler_references,
        f"(has({_PODS}.schedulerName) ? [{_PODS}.schedulerName] : {_GANG_SCHEDULERS})",
        profile_cel=f"(has({_PODS}.schedulerName) ? [{_PODS}.schedulerName] : has({_GANG}) && {_GANG_SCHEDULERS})",
    ),
    LimitedName(
        "queues",
        "queue",
        _queue_references,
        f"{_optional_cel('object.spec.lifecycle.queue')} + {_values_cel(_QUEUE_KEYS)}",
    ),
    LimitedName(
        "networks",
        "network",
        _network_references,
        f"({_NETWORKS}).join(',').split(',').map(n, n.trim().split('@')[0]).filter(n, n != '')",
    ),
    LimitedName(
        "tolerations", "toleration", _toleration_references, f"{_PODS}.tolerations.map(t, has(t.key) ? t.key : '')"
    ),
    LimitedName(
        "extended_resources",
        "extended resource",
        _extended_resource_references,
        f"({_PODS}.accelerator == '{Accelerator.CPU}' ? [] : [{_PODS}.gpuResource]) + {_DEVICES}",
        profile_cel=f"{_optional_cel(f'{_PODS}.gpuResource')} + {_DEVICES}",
    ),
    LimitedName(
        "node_selectors",
        "node selector",
        _node_selector_references,
        f"{_PODS}.nodeSelector.map(k, k + '=' + {_PODS}.nodeSelector[k]) + {_pairs_of_keys_cel(_NODE_POOL_KEYS)}",
    ),
    LimitedName("labels", "label", lambda spec: _metadata_references(spec, "labels"), _pairs_cel("labels")),
    LimitedName(
        "annotations",
        "annotation",
        lambda spec: _metadata_references(spec, "annotations"),
        _pairs_cel("annotations"),
    ),
    LimitedName("host_paths", "path of a node", lambda _: iter(()), "[]"),
    LimitedName("privileges", "privilege", lambda _: iter(()), "[]"),
)


def limits_in_cel() -> JsonValue:
    """Return the places of names in a job, by limit as the chart calls it, for its ValidatingAdmissionPolicy."""
    limits: JsonValue = {
        limited.value_name: {
            "noun": limited.noun,
            "asked": _asked_cel(limited, limited.cel),
            **({} if limited.profile_cel is None else {"profiled": _asked_cel(limited, limited.profile_cel)}),
        }
        for limited in LIMITED_NAMES
    }
    keys: JsonValue = {
        name: "(" + " + ".join(f"{path}.map(k, k)" for path in _metadata_cel(name)) + ")"
        for name in ("labels", "annotations")
    }
    return {
        "variables": dict[str, JsonValue](template_variables_cel()),
        "limits": limits,
        "keys": keys,
        # The operator looks for the queue in the job that is merged with its profile.
        "hasQueue": "has(object.spec.lifecycle.queue) || has(object.spec.profile)",
        "requiredQueue": REQUIRED_QUEUE,
        "profileTemplates": profile_templates_cel(),
    }


def _asked_cel(limited: LimitedName, cel: str) -> str:
    names = TEMPLATE_NAMES.get(limited.limit)
    return cel if names is None else f"({cel}) + {names.cel}"
