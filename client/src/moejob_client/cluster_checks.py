"""Checks of all that jobs of a namespace need: server, definition, rights, storage, nodes, images and queues.

Each check asks for what any user may ask for, or says that the rights do not let it be seen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from moejob_api import api_bodies
from moejob_api.api_bodies import Raw
from moejob_api.contract.names import Label
from moejob_api.job import GROUP, KIND, PLURAL, VERSION
from moejob_client.errors import Forbidden, NotFound
from moejob_client.failures import explained_failures

if TYPE_CHECKING:
    from moejob_client.api_client import ApiClient

_GPU = "nvidia.com/gpu"
_RDMA_WORDS = ("rdma", "hca", "/efa", "roce", "infiniband")
# GPU feature discovery labels nodes with the driver that they have.
_DRIVER_LABELS = ("nvidia.com/cuda.driver-version.major", "nvidia.com/cuda.driver.major")
_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_SHOWN_NODES = 4
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
    yield await _check_images(http, namespace)
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
    return [finding, *_check_drivers(nodes), CheckFinding("RDMA", CheckResult.OK, words)]


def _check_drivers(nodes: Iterable[Raw]) -> Iterator[CheckFinding]:
    """Yield what the nodes with GPUs say about their drivers; nothing where no node has a GPU."""
    from moejob_api.hardware import OLDEST_DRIVER  # noqa: PLC0415 it builds models that no other verb waits for

    drivers = {_node_name(node): _driver_version(node) for node in nodes if _has_gpu(node)}
    if not drivers:
        return
    old = {name: version for name, version in drivers.items() if version is not None and version < OLDEST_DRIVER}
    silent = [name for name, version in drivers.items() if version is None]
    if old:
        text = (
            f"images need NVIDIA's driver {OLDEST_DRIVER} or later; {_node_words(sorted(old))} has {min(old.values())}"
        )
        fix = "update it, or keep jobs away from these nodes with resources.nodeSelector"
        yield CheckFinding("drivers", CheckResult.WARNING, text, fix)
    elif silent:
        text = f"{_node_words(silent)} does not report its driver, for GPU feature discovery does not label it"
        yield CheckFinding("drivers", CheckResult.UNKNOWN, f"{text}; images need driver {OLDEST_DRIVER} or later")
    else:
        versions = sorted({version for version in drivers.values() if version is not None})
        yield CheckFinding("drivers", CheckResult.OK, f"GPU nodes have driver {', '.join(map(str, versions))}")


def _has_gpu(node: Raw) -> bool:
    offer = api_bodies.as_mapping(api_bodies.as_mapping(node.get("status")).get("allocatable"))
    return bool(api_bodies.as_count(offer.get(_GPU)))


def _driver_version(node: Raw) -> int | None:
    labels = api_bodies.as_mapping(api_bodies.object_metadata(node).get("labels"))
    return next((version for key in _DRIVER_LABELS if (version := api_bodies.as_count(labels.get(key)))), None)


def _node_name(node: Raw) -> str:
    return api_bodies.as_text(api_bodies.object_metadata(node).get("name"))


def _node_words(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NODES} more" if len(names) > _SHOWN_NODES else ""
    return ", ".join(names[:_SHOWN_NODES]) + more


async def _check_images(http: ApiClient, namespace: str) -> CheckFinding:
    """Check the images of the jobs and of their pods: which cannot be pulled, and which may change under their name."""
    try:
        jobs = await _list_objects(http, f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}")
    except NotFound:
        # There are no jobs without their definition, which has a check of its own.
        jobs = []
    pods = await _list_objects(http, f"/api/v1/namespaces/{namespace}/pods")
    if jobs is None or pods is None:
        plural = "pods" if pods is None else PLURAL
        return CheckFinding("images", CheckResult.UNKNOWN, f"your rights do not let you list {plural}")
    of_jobs = [pod for pod in pods if api_bodies.find_label(pod, Label.JOB)]
    for pod in of_jobs:
        for status in api_bodies.as_mappings(api_bodies.as_mapping(pod.get("status")).get("containerStatuses")):
            waiting = api_bodies.as_mapping(api_bodies.as_mapping(status.get("state")).get("waiting"))
            if waiting.get("reason") in _PULL_REASONS:
                return _pull_finding(pod, status, waiting)
    images = sorted({*_job_images(jobs), *_pod_images(of_jobs)})
    if not images:
        return CheckFinding("images", CheckResult.OK, f"no job of {namespace} names one; the chart's are used")
    loose = [image for image in images if _is_loose_image(image)]
    if loose:
        text = f"{', '.join(loose)} may be another image at the next start of a pod"
        return CheckFinding("images", CheckResult.WARNING, text, "name a version or a digest in resources.image")
    return CheckFinding("images", CheckResult.OK, f"each of {len(images)} has a version or a digest; no pull fails now")


def _pull_finding(pod: Raw, status: Raw, waiting: Raw) -> CheckFinding:
    node = api_bodies.as_text(api_bodies.as_mapping(pod.get("spec")).get("nodeName"))
    reason = api_bodies.as_text(waiting.get("message")) or api_bodies.as_text(waiting.get("reason"))
    text = f"{node} cannot pull {api_bodies.as_text(status.get('image'))} for {_node_name(pod)}: {reason}"
    fix = "correct resources.image, or name the registry's Secret in resources.imagePullSecrets"
    return CheckFinding("images", CheckResult.WARNING, text, fix)


def _job_images(jobs: Iterable[Raw]) -> Iterator[str]:
    for job in jobs:
        resources = api_bodies.as_mapping(api_bodies.as_mapping(job.get("spec")).get("resources"))
        for key in ("image", "rolloutImage"):
            if image := api_bodies.as_text(resources.get(key)):
                yield image


def _pod_images(pods: Iterable[Raw]) -> Iterator[str]:
    for pod in pods:
        containers = api_bodies.as_mappings(api_bodies.as_mapping(pod.get("spec")).get("containers"))
        yield from filter(None, (api_bodies.as_text(container.get("image")) for container in containers))


def _is_loose_image(image: str) -> bool:
    """Return whether a name may stand for another image tomorrow."""
    name, _, digest = image.partition("@")
    # A colon in front of a slash is that of a port.
    tag = name.rpartition("/")[2].partition(":")[2]
    return not digest and tag in ("", "latest")


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
