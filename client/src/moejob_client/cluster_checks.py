"""Checks of all that jobs of a namespace need: server, definition, rights, storage, GPUs, networks and queues.

Each check asks for what any user may ask for, or says that the rights do not let it be seen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moejob_api import api_bodies
from moejob_api.api_bodies import Raw
from moejob_api.job import GROUP, KIND, PLURAL, VERSION
from moejob_client.api_client import ApiClient, NotFound
from moejob_client.errors import Forbidden
from moejob_client.failures import explained_failures

_GPU = "nvidia.com/gpu"
_RDMA_WORDS = ("rdma", "hca", "/efa", "roce", "infiniband")
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_SHOWN_FIELDS = 8
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class CheckResult(StrEnum):
    """The result of a check."""

    OK = "ok"
    # Some jobs or commands will not work.
    WARNING = "warning"
    # No job will work.
    FAILED = "failed"
    # The rights do not let it be seen.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One check with its result, and what to do about it."""

    check: str
    result: CheckResult
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class _Right:
    verb: str
    resource: str
    group: str = ""

    def attributes(self, namespace: str) -> dict[str, str]:
        resource, _, subresource = self.resource.partition("/")
        wanted = {"namespace": namespace, "verb": self.verb, "group": self.group, "resource": resource}
        return wanted | ({"subresource": subresource} if subresource else {})


# What each group of commands asks for, and the role that brings it.
_RIGHTS: Mapping[tuple[str, str], tuple[_Right, ...]] = {
    ("get, watch", "view"): tuple(_Right(verb, PLURAL, GROUP) for verb in ("get", "list", "watch")),
    ("logs, why", "view"): (
        _Right("list", "pods"),
        _Right("watch", "pods"),
        _Right("get", "pods/log"),
        _Right("list", "events"),
        _Right("list", "persistentvolumeclaims"),
    ),
    ("submit, suspend, resume, cancel", "edit"): tuple(
        _Right(verb, PLURAL, GROUP) for verb in ("create", "patch", "delete")
    ),
    ("stacks, steps, samples, cp, export, open", "edit"): (
        _Right("create", "pods/exec"),
        _Right("create", "pods"),
        _Right("delete", "pods"),
    ),
}


async def run_checks(http: ApiClient, namespace: str) -> AsyncIterator[CheckFinding]:
    """Yield the finding of each check."""
    with explained_failures("cannot ask for the version"):
        version = await http.get("/version")
    text = f"{http.host} answers, Kubernetes {api_bodies.as_text(version.get('gitVersion'))}"
    yield CheckFinding("API server", CheckResult.OK, text)
    yield await _check_definition(http)
    for (commands, role), rights in _RIGHTS.items():
        yield await _check_rights(http, namespace, rights, f"{commands}: ", role)
    yield await _check_storage(http)
    for finding in await _check_nodes(http):
        yield finding
    yield await _check_queues(http, namespace)


async def _check_definition(http: ApiClient) -> CheckFinding:
    fix = "install or upgrade the chart, which brings the CRD"
    with explained_failures("cannot read the definition of jobs"):
        try:
            document = await http.get(f"/openapi/v3/apis/{GROUP}/{VERSION}")
        except NotFound:
            text = f"the cluster does not know {KIND} in {GROUP}/{VERSION}"
            return CheckFinding("definition", CheckResult.FAILED, text, fix)
    missing = sorted(_own_fields() - set(_served_fields(document)))
    if not missing:
        return CheckFinding("definition", CheckResult.OK, f"{GROUP}/{VERSION} has every field of this moejob")
    more = f" and {len(missing) - _SHOWN_FIELDS} more" if len(missing) > _SHOWN_FIELDS else ""
    text = f"the CRD is older than this moejob; it lacks {', '.join(missing[:_SHOWN_FIELDS])}{more}"
    return CheckFinding("definition", CheckResult.WARNING, text, f"{fix}, or leave out these fields")


def _served_fields(document: Raw) -> Iterable[str]:
    schemas = api_bodies.as_mapping(api_bodies.as_mapping(document.get("components")).get("schemas"))
    for name, schema in schemas.items():
        if name.endswith(f".{KIND}"):
            yield from _field_paths(schema)


def _own_fields() -> set[str]:
    from moejob_api.crd.definition import crd_definition  # noqa: PLC0415 it builds all models of a job

    versions = api_bodies.as_mappings(api_bodies.as_mapping(crd_definition().get("spec")).get("versions"))
    [version] = [each for each in versions if each.get("name") == VERSION]
    return set(_field_paths(api_bodies.as_mapping(version.get("schema")).get("openAPIV3Schema")))


def _field_paths(schema: Any, path: str = "") -> Iterable[str]:
    """Yield the paths of the fields of spec, as spec.data.train."""
    body = api_bodies.as_mapping(schema)
    for key, inner in api_bodies.as_mapping(body.get("properties")).items():
        name = f"{path}.{key}".lstrip(".")
        if name.split(".")[0] == "spec":
            yield name
            yield from _field_paths(inner, name)
    if path and "items" in body:
        yield from _field_paths(body["items"], path)


async def _check_rights(
    http: ApiClient, namespace: str, rights: tuple[_Right, ...], commands: str, role: str
) -> CheckFinding:
    missing = []
    for right in rights:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": right.attributes(namespace)},
        }
        with explained_failures("cannot ask for rights"):
            review = await http.post(_REVIEWS, body)
        if api_bodies.as_mapping(review.get("status")).get("allowed") is not True:
            missing.append(f"{right.verb} {right.resource}")
    if not missing:
        return CheckFinding("rights", CheckResult.OK, f"{commands}all rights in {namespace}")
    text = f"{commands}no right to {', '.join(missing)} in {namespace}"
    return CheckFinding("rights", CheckResult.WARNING, text, f"ask for the role {role} in {namespace}")


async def _check_storage(http: ApiClient) -> CheckFinding:
    classes = await _list_objects(http, "/apis/storage.k8s.io/v1/storageclasses")
    if classes is None:
        return CheckFinding("storage", CheckResult.UNKNOWN, "your rights do not let you list StorageClasses")
    annotated = {name: api_bodies.as_mapping(about.get("annotations")) for name, about in _named_metadata(classes)}
    default = [name for name, annotations in annotated.items() if annotations.get(_DEFAULT_CLASS) == "true"]
    if default:
        return CheckFinding("storage", CheckResult.OK, f"the default StorageClass is {default[0]}")
    names = ", ".join(annotated) or "none"
    fix = "name one in spec.storage.storageClass, or an existing claim in spec.storage.claimName"
    return CheckFinding("storage", CheckResult.WARNING, f"there is no default StorageClass; there is {names}", fix)


async def _check_nodes(http: ApiClient) -> list[CheckFinding]:
    nodes = await _list_objects(http, "/api/v1/nodes")
    if nodes is None:
        text = "your rights do not let you list nodes, so GPUs and RDMA devices are not seen"
        return [CheckFinding("nodes", CheckResult.UNKNOWN, text)]
    offers = [api_bodies.as_mapping(api_bodies.as_mapping(node.get("status")).get("allocatable")) for node in nodes]
    gpus = sum(api_bodies.as_count(offer.get(_GPU)) or 0 for offer in offers)
    networks = sorted({name for offer in offers for name in offer if any(word in name for word in _RDMA_WORDS)})
    if gpus:
        count = sum(1 for offer in offers if api_bodies.as_count(offer.get(_GPU)))
        finding = CheckFinding("GPUs", CheckResult.OK, f"{gpus} of {_GPU} on {count} of {len(nodes)} nodes")
    else:
        fix = "install NVIDIA's device plugin or GPU operator, or train on CPUs with resources.accelerator: CPU"
        finding = CheckFinding("GPUs", CheckResult.WARNING, f"none of {len(nodes)} nodes offers {_GPU}", fix)
    words = f"nodes offer {', '.join(networks)}" if networks else "no node offers RDMA devices; pods use TCP"
    return [finding, CheckFinding("RDMA", CheckResult.OK, words)]


async def _check_queues(http: ApiClient, namespace: str) -> CheckFinding:
    path = f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/localqueues"
    try:
        queues = await _list_objects(http, path)
    except NotFound:
        return CheckFinding("queue", CheckResult.OK, "Kueue is not installed; jobs start without a queue")
    if queues is None:
        return CheckFinding("queue", CheckResult.UNKNOWN, "your rights do not let you list LocalQueues")
    names = [name for name, _ in _named_metadata(queues)]
    if names:
        return CheckFinding("queue", CheckResult.OK, f"{namespace} has the queues {', '.join(names)}")
    fix = f"ask for a LocalQueue in {namespace}, and name it in the job"
    return CheckFinding("queue", CheckResult.WARNING, f"Kueue is installed, and {namespace} has no LocalQueue", fix)


async def _list_objects(http: ApiClient, path: str) -> list[Raw] | None:
    """Return a whole collection; None where the rights do not let it be listed."""
    objects: list[Raw] = []
    try:
        async for page in http.list_pages(path, {}):
            objects += page.items
    except Forbidden:
        return None
    return objects


def _named_metadata(objects: Iterable[Raw]) -> list[tuple[str, Raw]]:
    abouts = map(api_bodies.object_metadata, objects)
    return [(api_bodies.as_text(about.get("name")), about) for about in abouts]
