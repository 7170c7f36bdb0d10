"""Both versions of a job are one job, and the first release and this one take over from each other in either order."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broken_specs import BROKEN_SPECS
from charts import CHART
from cluster.control_plane.api import RefusedError
from cluster.control_plane.gang_stand_ins import KUEUE, served
from cluster.control_plane.jobs import body, path
from cluster.control_plane.operators import Home, Operator
from cluster.control_plane.plane import ControlPlane
from cluster.control_plane.plane import control_plane as running_control_plane
from cluster.control_plane.releases import DEFINITION, Release, release
from cluster.control_plane.test_chart import create_job, trainers
from cluster.control_plane.test_gangs import merge_pod, pods
from cluster.waiting import until
from image_builds.recipes import ROOT

pytestmark = pytest.mark.cluster

# The changelog has named the release since the commit that made it.
HEADING = "## 0.1.0 - 2026"
THIS_DEFINITION = ROOT / "crds" / "moetrainingjobs.yaml"
# Ten reconciles, which follow a change within half a second.
QUIET_SECONDS = 5.0


@pytest.fixture(scope="module")
def plane(programs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of our own: the definition on the shared one belongs to all its tests."""
    with running_control_plane(tmp_path_factory.mktemp("versions"), programs, nodes=2) as started:
        yield started


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the first release."""
    git = shutil.which("git") or "git"
    search = [git, "log", "--reverse", "--format=%H", f"-S{HEADING}", "--", "CHANGELOG.md"]
    commits = subprocess.run(search, cwd=ROOT, check=False, capture_output=True, text=True).stdout.split()
    if not commits:
        pytest.skip(f"the history of this checkout lacks the commit that wrote {HEADING}")
    folder = tmp_path_factory.mktemp("first")
    archive = folder / "first.tar"
    parts = ("charts", "crds", "operator")
    subprocess.run([git, "archive", f"--output={archive}", commits[0], *parts], cwd=ROOT, check=True)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder


@pytest.fixture
def installed(plane: ControlPlane, first: Path, tmp_path: Path) -> Iterator[Release]:
    """The first release, installed by its own chart."""
    with release(plane, tmp_path) as made:
        made.helm("install", first / "charts" / "moejob")
        yield made


@contextmanager
def running(home: Home, sources: Path = ROOT) -> Iterator[Operator]:
    """One replica of the operator that lies in a tree, leading."""
    tree = os.pathsep.join(str(sources / package / "src") for package in ("crds", "operator"))
    operator = home.replica(environment={"PYTHONPATH": tree})
    operator.start()
    try:
        until(lambda: operator.leads and operator.is_ready, waiting_for=home.tails)
        yield operator
    finally:
        operator.process.stop()


def gang(plane: ControlPlane, namespace: str, without: frozenset[str] = frozenset()) -> dict[str, str]:
    """The whole gang, none of whose pods is one of those."""

    def whole_gang() -> dict[str, str]:
        pods = trainers(plane, namespace)
        return pods if len(pods) == 2 and without.isdisjoint(pods.values()) else {}

    return until(whole_gang, waiting_for=lambda: f"two pods without {sorted(without)}: {trainers(plane, namespace)}")


def lose_second_pod(plane: ControlPlane, namespace: str, pods: dict[str, str]) -> dict[str, str]:
    """Delete a pod that is not the first; return the gang with the next one."""
    name = max(pods)
    plane.kubectl("delete", "pod", name, f"--namespace={namespace}", "--grace-period=0", "--force")
    return gang(plane, namespace, without=frozenset({pods[name]}))


def beta_path(namespace: str, name: str = "") -> str:
    return path(namespace, name).replace("v1alpha1", "v1beta1")


def job_version(plane: ControlPlane, namespace: str) -> str:
    version: str = plane.api.get(path(namespace, "job"))["metadata"]["resourceVersion"]
    return version


def versions_of(plane: ControlPlane) -> list[str]:
    return [version["name"] for version in plane.api.get(DEFINITION)["spec"]["versions"]]


def test_an_operator_of_this_release_works_beside_the_first_definition(plane: ControlPlane, installed: Release) -> None:
    with running(installed.home):
        create_job(plane, installed.namespace)
        pods = gang(plane, installed.namespace)
        lose_second_pod(plane, installed.namespace, pods)
        # What that definition drops must not be written again and again.
        until(lambda: is_quiet(plane, installed.namespace), waiting_for="a job that stays as it is")


def is_quiet(plane: ControlPlane, namespace: str) -> bool:
    before = job_version(plane, namespace)
    time.sleep(QUIET_SECONDS)
    return job_version(plane, namespace) == before


def test_an_operator_of_the_first_release_keeps_its_jobs_beside_this_definition(
    plane: ControlPlane, installed: Release, first: Path
) -> None:
    with running(installed.home, first):
        create_job(plane, installed.namespace)
        pods = gang(plane, installed.namespace)
        plane.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={THIS_DEFINITION}")
        until(lambda: "v1beta1" in versions_of(plane), waiting_for="this definition")
        pods = lose_second_pod(plane, installed.namespace, pods)
    with running(installed.home, first):
        time.sleep(QUIET_SECONDS)
        assert trainers(plane, installed.namespace) == pods


def test_an_upgrade_keeps_the_jobs_of_the_first_release_and_a_rollback_too(
    plane: ControlPlane, installed: Release, first: Path
) -> None:
    with running(installed.home, first):
        create_job(plane, installed.namespace)
        pods = gang(plane, installed.namespace)
    installed.upgrade(CHART)
    with running(installed.home):
        time.sleep(QUIET_SECONDS)
        assert trainers(plane, installed.namespace) == pods
        pods = lose_second_pod(plane, installed.namespace, pods)
    installed.helm("rollback", "1")
    assert versions_of(plane) == ["v1alpha1"]
    with running(installed.home, first):
        time.sleep(QUIET_SECONDS)
        assert trainers(plane, installed.namespace) == pods
        lose_second_pod(plane, installed.namespace, pods)


def test_a_gang_that_kueue_holds_outlives_an_upgrade_and_is_replaced_whole(
    plane: ControlPlane, installed: Release, first: Path
) -> None:
    namespace = installed.namespace
    with served(plane, KUEUE):
        with running(installed.home, first):
            create_job(plane, namespace, lifecycle={"gang": "Kueue", "queue": "team"})
            uids = gang(plane, namespace)
        held = pods(plane, namespace)
        for pod in held:
            merge_pod(plane, pod, {"metadata": {"finalizers": ["kueue.x-k8s.io/managed"]}})
        installed.upgrade(CHART)
        with running(installed.home):
            time.sleep(QUIET_SECONDS)
            assert trainers(plane, namespace) == uids
            merge_pod(plane, held[1], {"status": {"phase": "Failed"}}, part="/status")
            until(
                lambda: all("deletionTimestamp" in pod["metadata"] for pod in pods(plane, namespace)),
                waiting_for="all pods of the group to be asked to end",
            )
            assert trainers(plane, namespace) == uids
            for pod in pods(plane, namespace):
                merge_pod(plane, pod, {"metadata": {"finalizers": None}})
            gang(plane, namespace, without=frozenset(uids.values()))
            groups = {pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] for pod in pods(plane, namespace)}
            assert groups == {"job-1"}


def test_a_job_is_the_same_in_both_versions_and_is_held_to_the_same_rules(plane: ControlPlane, tmp_path: Path) -> None:
    with release(plane, tmp_path) as made:
        made.install({"webhook": {"enabled": False}})
        namespace = made.namespace
        create_job(plane, namespace)
        alpha, beta = (plane.api.get(where(namespace, "job")) for where in (path, beta_path))
        assert without_version(alpha) == without_version(beta)
        assert plane.api.get(DEFINITION)["status"]["storedVersions"] == ["v1alpha1"]
        # An API server hears of a new policy a little later.
        for case in BROKEN_SPECS[:3]:
            until(partial(refusal, plane, namespace, **case.sections), waiting_for=f"a refusal of {case.id}")
        assert "label app=redis" in refusal(plane, namespace, resources={"labels": {"app": "redis"}})
        assert refusal(plane, namespace) == ""


def without_version(raw: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {name: value for name, value in raw["metadata"].items() if name != "managedFields"}
    return {**raw, "apiVersion": "", "metadata": metadata}


def refusal(plane: ControlPlane, namespace: str, **sections: Any) -> str:
    """The words in which a job of the later version is refused; none if it is not."""
    asked = body("tried", **sections) | {"apiVersion": "moejob.dev/v1beta1"}
    try:
        plane.api.create(f"{beta_path(namespace)}&dryRun=All", asked)
    except RefusedError as refused:
        return refused.message
    return ""
