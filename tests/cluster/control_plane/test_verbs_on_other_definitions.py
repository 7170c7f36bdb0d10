"""The verbs of `moejob` on a cluster without the CRD, or with the CRD of an older release: one sentence and a fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from cluster.control_plane import jobs
from cluster.control_plane.api import RefusedError
from cluster.control_plane.conftest import DEFINITION
from cluster.control_plane.plane import ControlPlane, KubectlError
from cluster.control_plane.plane import control_plane as running_control_plane
from cluster.control_plane.releases import fields_of
from cluster.control_plane.test_verbs import ALL, DOCTOR, SUBMIT, name_verb, run_verb
from cluster.waiting import until

pytestmark = pytest.mark.cluster

AT = "--namespace=default"
# A field of the spec that submit's example sets, and the section that suspend and resume change.
UNKNOWN_FIELDS = ("checkpoint", "lifecycle")


@pytest.fixture(scope="module")
def plane(programs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of our own: the definition on the shared one belongs to all its tests."""
    with running_control_plane(tmp_path_factory.mktemp("definitions"), programs) as started:
        yield started


@pytest.fixture
def _older_definition(plane: ControlPlane, tmp_path: Path) -> Iterator[None]:
    """The CRD without some fields, until the end of the test."""
    definition = yaml.load(DEFINITION.read_text(), yaml.CSafeLoader)
    for fields in fields_of(definition):
        for name in UNKNOWN_FIELDS:
            del fields[name]
    file = tmp_path / "older.yaml"
    file.write_text(yaml.safe_dump(definition))
    plane.kubectl("create", "-f", file)
    until(lambda: serves_jobs(plane) and publishes_schema(plane), waiting_for="the older definition")
    yield
    plane.kubectl("delete", "-f", file)
    until(lambda: not serves_jobs(plane), waiting_for="the end of the older definition")


def serves_jobs(plane: ControlPlane) -> bool:
    """Return whether jobs can be listed."""
    try:
        plane.api.get(jobs.path("default"))
    except RefusedError:
        return False
    return True


def publishes_schema(plane: ControlPlane) -> bool:
    """Return whether fields of jobs are published, which comes after the first list."""
    try:
        return bool(plane.kubectl("explain", "mtj.spec"))
    except KubectlError:
        return False


@pytest.mark.parametrize("verb", ALL, ids=name_verb)
def test_a_cluster_without_the_definition_is_one_sentence(plane: ControlPlane, verb: list[str]) -> None:
    code, _, errors = run_verb(plane.kubeconfig, *verb, AT)
    assert (code, len(errors.splitlines())) == (3, 1), errors
    assert "does not know MoETrainingJobs" in errors
    assert "install or upgrade the chart" in errors


def test_doctor_names_the_definition_that_is_not_there(plane: ControlPlane) -> None:
    code, output, errors = run_verb(plane.kubeconfig, *DOCTOR, AT)
    assert (code, errors) == (1, "")
    assert "the cluster does not know MoETrainingJob" in output


@pytest.mark.usefixtures("_older_definition")
def test_an_older_definition_refuses_what_it_would_drop_and_serves_the_rest(plane: ControlPlane) -> None:
    plane.api.create(jobs.path("default"), jobs.body())
    for verb, field in ((SUBMIT, "checkpoint"), (["suspend", "job"], "lifecycle"), (["resume", "job"], "lifecycle")):
        code, output, errors = run_verb(plane.kubeconfig, *verb, AT)
        assert (code, output, len(errors.splitlines())) == (1, "", 1), errors
        assert "the cluster's CRD is older than this moejob" in errors
        assert f'unknown field "spec.{field}"' in errors
        assert "upgrade the chart" in errors
    code, output, _ = run_verb(plane.kubeconfig, *DOCTOR, AT)
    assert (code, "the CRD is older than this moejob; it lacks" in output) == (1, True)
    code, output, errors = run_verb(plane.kubeconfig, "get", "job", AT)
    assert (code, errors, output.splitlines()[1].split()[0]) == (0, "", "job")
    assert run_verb(plane.kubeconfig, "cancel", "job", AT)[0] == 0
