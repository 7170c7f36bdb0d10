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
from moejob_api.job.resources import Accelerator
from moejob_api.problems import Problem, Rule

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
# Labels by which Services of a namespace select its pods are mostly without a prefix, and those that tools write for
# people's own use mostly with one.
_PREFIXED = "*/*"
LabelPairs = tuple[
    Annotated[
        str,
        Field(max_length=512, pattern=r"^(\*|\*/\*|[A-Za-z0-9][-A-Za-z0-9_./]*(\*|=[-A-Za-z0-9_./:]*\*?))$"),
    ],
    ...,
]


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
    queues: Annotated[Names | None, Field(description="Queues of Kueue and Volcano, also as labels.")] = None
    networks: Annotated[
        Names | None, Field(description="Networks of Multus, name or namespace/name, also as annotations.")
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
        Names, Field(description="Keys that no label and no annotation of a job may have, whatever else is allowed.")
    ] = ("moejob.dev/*", "app.kubernetes.io/*")


DEFAULT_LIMITS = JobLimits()


@dataclass(frozen=True, slots=True)
class _Asked:
    """One thing that a job names, and the field that names it."""

    path: str
    name: str


@dataclass(frozen=True, slots=True)
class Limited:
    """One limit: `asked` are the names in a job, and `cel` is the list of them in `object`."""

    limit: str
    noun: str
    asked: Callable[[Spec], Iterator[_Asked]]
    cel: str

    @property
    def field(self) -> str:
        """The name of the limit in the chart's values."""
        return to_camel(self.limit)


def limit_problems(spec: Spec, limits: JobLimits) -> Iterator[Problem]:
    """Everything that a job asks for beyond the limits."""
    for limited in LIMITED:
        allowed: tuple[str, ...] | None = getattr(limits, limited.limit)
        for asked in () if allowed is None else limited.asked(spec):
            if not is_among(asked.name, allowed or ()):
                yield Problem(Rule.LIMIT, asked.path, _refusal(limited, asked, allowed or ()))
    for asked in _keys(spec):
        if is_among(asked.name, limits.reserved):
            message = f"the key {asked.name} is reserved here ({', '.join(limits.reserved)}); choose another"
            yield Problem(Rule.LIMIT, asked.path, message)


def is_among(name: str, allowed: tuple[str, ...]) -> bool:
    """Return whether a name is one of those, or begins like one of those that end in a star."""
    return any(_is_meant(name, given) for given in allowed)


def _is_meant(name: str, given: str) -> bool:
    if given == _PREFIXED:
        # No value of a label has a slash.
        return "/" in name
    return name.startswith(given[:-1]) if given.endswith("*") else name == given


def _refusal(limited: Limited, asked: _Asked, allowed: tuple[str, ...]) -> str:
    may = ", ".join(allowed) or "none"
    return (
        f"{limited.noun} {asked.name or 'without a name'} is beyond the limits of this installation, which "
        f"allow {may}; remove it, or ask those who run the operator for limits.{limited.field}"
    )


def _given(path: str, name: str | None) -> Iterator[_Asked]:
    return iter(()) if name is None else iter((_Asked(path, name),))


def _images(spec: Spec) -> Iterator[_Asked]:
    yield from _given("spec.resources.image", spec.resources.image)
    yield from _given("spec.resources.rolloutImage", spec.resources.rollout_image)


def _secrets(spec: Spec) -> Iterator[_Asked]:
    resources = spec.resources
    for index, variable in enumerate(resources.env):
        yield from _given(f"spec.resources.env[{index}]", None if variable.secret is None else variable.secret.name)
    for index, source in enumerate(resources.env_from):
        yield from _given(f"spec.resources.envFrom[{index}]", source.secret)
    for index, name in enumerate(resources.image_pull_secrets):
        yield _Asked(f"spec.resources.imagePullSecrets[{index}]", name)


def _config_maps(spec: Spec) -> Iterator[_Asked]:
    for index, variable in enumerate(spec.resources.env):
        found = None if variable.config_map is None else variable.config_map.name
        yield from _given(f"spec.resources.env[{index}]", found)
    for index, source in enumerate(spec.resources.env_from):
        yield from _given(f"spec.resources.envFrom[{index}]", source.config_map)


def _claims(spec: Spec) -> Iterator[_Asked]:
    yield from _given("spec.storage.claimName", spec.storage.claim_name)
    yield from (_Asked(path, claim) for path, claim in claims_of_sources(spec))


def _queues(spec: Spec) -> Iterator[_Asked]:
    yield from _given("spec.lifecycle.queue", spec.lifecycle.queue)
    yield from _of_keys(spec, _QUEUE_KEYS)


def _networks(spec: Spec) -> Iterator[_Asked]:
    rdma = spec.resources.rdma
    texts = (
        *_given("spec.resources.rdma.networks", None if rdma is None else rdma.networks),
        *_of_keys(spec, _NETWORK_KEYS),
    )
    for text in texts:
        # What is written as JSON begins with a bracket, as no name that can be allowed.
        names = (part.strip().partition("@")[0] for part in text.name.split(","))
        yield from (_Asked(text.path, name) for name in names if name)


def _tolerations(spec: Spec) -> Iterator[_Asked]:
    for index, toleration in enumerate(spec.resources.tolerations):
        yield _Asked(f"spec.resources.tolerations[{index}]", toleration.key or "")


def _extended_resources(spec: Spec) -> Iterator[_Asked]:
    resources = spec.resources
    if resources.accelerator is not Accelerator.CPU:
        yield _Asked("spec.resources.gpuResource", resources.gpu_resource)
    yield from _given("spec.resources.rdma.resource", None if resources.rdma is None else resources.rdma.resource)


def _of_keys(spec: Spec, keys: tuple[str, ...]) -> Iterator[_Asked]:
    for name, texts in _texts(spec):
        yield from (_Asked(f"spec.resources.{name}", texts[key]) for key in keys if key in texts)


def _keys(spec: Spec) -> Iterator[_Asked]:
    for name, texts in _texts(spec):
        yield from (_Asked(f"spec.resources.{name}", key) for key in texts)


def _texts(spec: Spec) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield "labels", spec.resources.labels
    yield "annotations", spec.resources.annotations


def _pairs(name: str, texts: Mapping[str, str]) -> Iterator[_Asked]:
    return (_Asked(f"spec.resources.{name}", f"{key}={value}") for key, value in texts.items())


_QUEUE_KEYS = ("kueue.x-k8s.io/queue-name", "scheduling.volcano.sh/queue-name", "volcano.sh/queue-name")
_NETWORK_KEYS = ("k8s.v1.cni.cncf.io/networks", "v1.multus-cni.io/default-network")

_PODS = "object.spec.resources"


def _optional(path: str) -> str:
    """CEL of a field that may be absent, as a list."""
    return f"(has({path}) ? [{path}] : [])"


def _chosen(items: str, path: str, name: str) -> str:
    """CEL of what some items have at a path."""
    return f"{items}.filter(i, has(i.{path})).map(i, i.{name})"


def _values(keys: tuple[str, ...]) -> str:
    """CEL of what labels and annotations hold under some keys."""
    return " + ".join(
        f"{list(keys)}.filter(k, k in {_PODS}.{name}).map(k, {_PODS}.{name}[k])" for name in ("labels", "annotations")
    )


def _all_pairs(name: str) -> str:
    return f"{_PODS}.{name}.map(k, k + '=' + {_PODS}.{name}[k])"


_SOURCES = (
    "([object.spec.model.source] + object.spec.data.train.map(d, d.source) + object.spec.data.eval.map(d, d.source) + "
    f"{_optional('object.spec.checkpoint.resumeFrom')})"
)
_NETWORKS = f"(has({_PODS}.rdma) ? {_optional(f'{_PODS}.rdma.networks')} : []) + {_values(_NETWORK_KEYS)}"

LIMITED: tuple[Limited, ...] = (
    Limited(
        "service_accounts",
        "service account",
        lambda spec: _given("spec.resources.serviceAccount", spec.resources.service_account),
        _optional(f"{_PODS}.serviceAccount"),
    ),
    Limited("images", "image", _images, f"{_optional(f'{_PODS}.image')} + {_optional(f'{_PODS}.rolloutImage')}"),
    Limited(
        "secrets",
        "Secret",
        _secrets,
        f"{_chosen(f'{_PODS}.env', 'secret', 'secret.name')} + {_chosen(f'{_PODS}.envFrom', 'secret', 'secret')} + "
        f"{_PODS}.imagePullSecrets",
    ),
    Limited(
        "config_maps",
        "ConfigMap",
        _config_maps,
        f"{_chosen(f'{_PODS}.env', 'configMap', 'configMap.name')} + "
        f"{_chosen(f'{_PODS}.envFrom', 'configMap', 'configMap')}",
    ),
    Limited(
        "claims",
        "claim",
        _claims,
        f"{_optional('object.spec.storage.claimName')} + "
        f"{_SOURCES}.filter(s, s.startsWith('{SCHEME}')).map(s, s.substring({len(SCHEME)}).split('/')[0])",
    ),
    Limited(
        "storage_classes",
        "storage class",
        lambda spec: _given("spec.storage.storageClass", spec.storage.storage_class),
        _optional("object.spec.storage.storageClass"),
    ),
    Limited(
        "priority_classes",
        "priority class",
        lambda spec: _given("spec.resources.priorityClassName", spec.resources.priority_class_name),
        _optional(f"{_PODS}.priorityClassName"),
    ),
    Limited(
        "runtime_classes",
        "runtime class",
        lambda spec: _given("spec.resources.runtimeClassName", spec.resources.runtime_class_name),
        _optional(f"{_PODS}.runtimeClassName"),
    ),
    Limited(
        "schedulers",
        "scheduler",
        lambda spec: _given("spec.resources.schedulerName", spec.resources.scheduler_name),
        _optional(f"{_PODS}.schedulerName"),
    ),
    Limited("queues", "queue", _queues, f"{_optional('object.spec.lifecycle.queue')} + {_values(_QUEUE_KEYS)}"),
    Limited(
        "networks",
        "network",
        _networks,
        f"({_NETWORKS}).join(',').split(',').map(n, n.trim().split('@')[0]).filter(n, n != '')",
    ),
    Limited("tolerations", "toleration", _tolerations, f"{_PODS}.tolerations.map(t, has(t.key) ? t.key : '')"),
    Limited(
        "extended_resources",
        "extended resource",
        _extended_resources,
        f"({_PODS}.accelerator == '{Accelerator.CPU}' ? [] : [{_PODS}.gpuResource]) + "
        f"(has({_PODS}.rdma) ? [{_PODS}.rdma.resource] : [])",
    ),
    Limited(
        "node_selectors",
        "node selector",
        lambda spec: _pairs("nodeSelector", spec.resources.node_selector),
        _all_pairs("nodeSelector"),
    ),
    Limited("labels", "label", lambda spec: _pairs("labels", spec.resources.labels), _all_pairs("labels")),
    Limited(
        "annotations",
        "annotation",
        lambda spec: _pairs("annotations", spec.resources.annotations),
        _all_pairs("annotations"),
    ),
)
_KEYS = f"{_PODS}.labels.map(k, k) + {_PODS}.annotations.map(k, k)"


def limits_in_cel() -> JsonValue:
    """Return the places of names in a job, by limit as the chart calls it, for its ValidatingAdmissionPolicy."""
    limits: JsonValue = {limited.field: {"noun": limited.noun, "asked": limited.cel} for limited in LIMITED}
    return {"limits": limits, "reserved": _KEYS}
