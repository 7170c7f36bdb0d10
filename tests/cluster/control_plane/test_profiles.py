"""Profiles on a real API server: their schema, and a policy of limits that refuses what no job may ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.control_plane.api import RefusedError
from cluster.control_plane.jobs import body, path
from cluster.control_plane.plane import ControlPlane
from cluster.control_plane.plane import control_plane as running_control_plane
from cluster.control_plane.releases import release
from cluster.waiting import until
from limit_cases import ALLOWED, BEYOND, LimitCase
from moejob_api.profiles.fields import API_VERSION, ProfileKind

pytestmark = pytest.mark.cluster

NAMES_OF_PROFILES = [case for case in BEYOND if case.split_by_profile()[0] and not case.split_by_profile()[1]]
WHOLE: dict[str, Any] = {
    "resources": {
        "gpuType": "H100",
        "gpusPerNode": 8,
        "image": "registry.example.com/ml/trainer:1",
        "nodeSelector": {"pool": "training"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "rdma": {"resource": "rdma/hca", "count": 8},
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    },
    "storage": {"storageClass": "shared"},
    "lifecycle": {"queue": "team", "gang": "Volcano"},
    "podTemplate": {"trainer": {"metadata": {"labels": {"example.com/team": "nlp"}}}},
}


@pytest.fixture(scope="module")
def plane(programs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of our own: a policy of limits would hold other tests too."""
    with running_control_plane(tmp_path_factory.mktemp("profiles"), programs, nodes=1) as found:
        yield found


def profile_path(kind: ProfileKind, namespace: str) -> str:
    where = "" if kind is ProfileKind.CLUSTER else f"namespaces/{namespace}/"
    return f"/apis/{API_VERSION}/{where}{kind.plural}?fieldValidation=Strict&dryRun=All"


def refusal(plane: ControlPlane, kind: ProfileKind, namespace: str, spec: Any) -> str:
    """Return what the API server says against a profile; nothing when it is allowed."""
    profile = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "tried"}, "spec": spec}
    try:
        plane.api.create(profile_path(kind, namespace), profile)
    except RefusedError as refused:
        return refused.message
    return ""


def test_the_api_server_refuses_profiles_beyond_the_limits_without_an_operator(
    plane: ControlPlane, tmp_path: Path
) -> None:
    with release(plane, tmp_path) as found:
        found.install({"webhook": {"enabled": False}, "limits": ALLOWED})
        beyond: LimitCase = NAMES_OF_PROFILES[0]
        for kind in ProfileKind:
            until(
                lambda: refusal(plane, kind, found.namespace, beyond.sections),  # noqa: B023
                waiting_for="the policy to be in force",
            )
            assert refusal(plane, kind, found.namespace, {}) == ""
            assert refusal(plane, kind, found.namespace, WHOLE) == ""
            missed = {
                case.id: said
                for case in NAMES_OF_PROFILES
                if case.says not in (said := refusal(plane, kind, found.namespace, case.sections))
            }
            assert missed == {}
            odd = {"podTemplate": {"trainer": {"spec": {"hostPID": True}}}}
            assert "fields that a template cannot set" in refusal(plane, kind, found.namespace, odd)


@pytest.mark.usefixtures("definition")
@pytest.mark.parametrize("kind", ProfileKind)
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(WHOLE, "", id="a whole profile"),
        pytest.param({"resources": {"accelerator": "CPU"}}, 'unknown field "spec.resources.accelerator"', id="no CPU"),
        pytest.param({"model": {"source": "a"}}, 'unknown field "spec.model"', id="no model"),
        pytest.param({"resources": {"gpusPerNode": 65}}, "spec.resources.gpusPerNode", id="bounds of jobs"),
        pytest.param({"resources": {"gpuType": "V100"}}, "spec.resources.gpuType", id="choices of jobs"),
    ],
)
def test_the_schema_of_a_profile_is_that_of_a_job(
    control_plane: ControlPlane, namespace: str, kind: ProfileKind, spec: Any, message: str
) -> None:
    said = refusal(control_plane, kind, namespace, spec)
    assert message in said
    assert bool(said) is bool(message)


@pytest.mark.usefixtures("definition")
def test_a_profile_gives_no_scalar_that_it_was_not_given(control_plane: ControlPlane, namespace: str) -> None:
    """A default in a profile would win against that of the job, which is none."""
    profile = {"apiVersion": API_VERSION, "kind": ProfileKind.NAMESPACED, "metadata": {"name": "empty"}, "spec": {}}
    stored = control_plane.api.create(profile_path(ProfileKind.NAMESPACED, namespace), profile)["spec"]
    assert stored.pop("resources") == {
        name: kind()
        for kind, names in (
            (list, ("env", "envFrom", "imagePullSecrets", "tolerations")),
            (dict, ("annotations", "labels", "nodeSelector")),
        )
        for name in names
    }
    assert stored == {"lifecycle": {}, "storage": {}}


@pytest.mark.usefixtures("definition")
def test_the_profile_of_a_job_never_changes(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.api.create(path(namespace), body(profile="shared"))
    for change in ({"profile": "other"}, {"profile": None}):
        with pytest.raises(RefusedError, match=r"spec\.profile is immutable"):
            control_plane.api.merge(path(namespace, "job"), {"spec": change})


@pytest.mark.usefixtures("definition")
def test_the_rules_leave_to_the_merge_what_a_profile_may_heal(control_plane: ControlPlane, namespace: str) -> None:
    # 12 GPUs fill no nodes of 8, but those of 4.
    sections: dict[str, Any] = {"parallelism": {"tensor": 4, "data": 3}, "training": {"globalBatchSize": 48}}
    with pytest.raises(RefusedError, match="must fill whole nodes"):
        control_plane.api.create(path(namespace, is_tried_only=True), body(**sections))
    control_plane.api.create(path(namespace, is_tried_only=True), body(profile="shared", **sections))
