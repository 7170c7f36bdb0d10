"""Manifests of the operator hold no field that the API server does not know: to the operator it would not say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cluster.control_plane.api import RefusedError
from cluster.control_plane.plane import ControlPlane
from golden_manifests import FOLDER, GOLDEN
from moejob_operator.actions import Kind
from moejob_operator.children.gangs import GangApi
from moejob_operator.kube_api.live_lists import collection_path

# Only stand-ins of the others are served.
SERVED = ("v1", GangApi.NATIVE)
EVERY = pytest.mark.parametrize("name", [golden.name for golden in GOLDEN])
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture(autouse=True, scope="module")
def priority(control_plane: ControlPlane) -> Iterator[None]:
    """The priority class that some of the jobs name."""
    about = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "training"}}
    control_plane.api.create(PRIORITIES, about | {"value": 1})
    yield
    control_plane.api.delete(f"{PRIORITIES}/training")


@EVERY
def test_the_api_server_knows_every_field_of_what_is_created(
    name: str, control_plane: ControlPlane, namespace: str
) -> None:
    manifests = [body for body in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()) if _is_served(body)]
    assert manifests
    for body in manifests:
        _try(control_plane, namespace, body)


def test_a_field_that_it_does_not_know_is_refused_here(control_plane: ControlPlane, namespace: str) -> None:
    body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [], "portz": []}}
    with pytest.raises(RefusedError, match="portz"):
        _try(control_plane, namespace, body)


def _try(plane: ControlPlane, namespace: str, body: dict[str, Any]) -> None:
    path = collection_path(Kind(body["kind"]), namespace, body["apiVersion"])
    tried = body | {"metadata": body["metadata"] | {"namespace": namespace}}
    plane.api.create(f"{path}?dryRun=All&fieldValidation=Strict", tried)


def _is_served(body: dict[str, Any]) -> bool:
    return body["apiVersion"] in SERVED
