"""Jobs that make little sense, past the webhook, on a real API server: others are served as before."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from any_job import AnyJob
from cluster.control_plane.api import RefusedError
from cluster.control_plane.jobs import body, path, with_spec
from cluster.control_plane.operators import Home, installed
from cluster.control_plane.plane import ControlPlane
from cluster.extent import IS_FULL
from cluster.waiting import until
from fake_world import SMALL
from moejob_api.contract.pods import Label
from moejob_operator.observed.jobs import SpecCache, read_job
from moejob_operator.validation import Validation, validate_spec

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("definition")]

JOBS = 200 if IS_FULL else 100
# Between two healthy jobs.
BATCH = 50
FEW_PODS = 8


@pytest.fixture
def home(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Home]:
    with installed(control_plane, namespace, tmp_path) as found:
        yield found
    control_plane.kubectl("delete", "moetrainingjobs", "--all", "--wait=false", f"--namespace={namespace}")


def test_whatever_the_crd_lets_through_is_answered_and_stops_nobody(home: Home) -> None:
    operator = home.replica("--no-webhook", "--no-leader-election")
    operator.start()
    drawn, outcomes = AnyJob(2027), Counter[str]()
    for number in range(JOBS):
        spec = drawn.spec() if number % 4 == 0 else drawn.nearly_sound_spec()
        outcomes[applied(home, f"any-{number}", spec)] += 1
        if number % BATCH == BATCH - 1:
            assert_served(home, f"healthy-{number}")
    assert outcomes["taken"] > JOBS / 4, outcomes
    assert min(outcomes[kind] for kind in ("refused by the CRD", "not for Python")) > JOBS / 40, outcomes
    until(lambda: not unanswered(home), waiting_for=lambda: f"{unanswered(home)}\n{home.tails()}")
    assert operator.process.pid is not None
    assert [line for line in operator.log() if line["level"] == "error"] == []


def applied(home: Home, name: str, spec: dict[str, Any]) -> str:
    """Create a job, and say what became of it."""
    if is_large(spec):
        return "left out"
    try:
        made = home.plane.api.create(path(home.namespace), with_spec(spec, name))
    except RefusedError as refused:
        if refused.reason not in ("Invalid", "BadRequest"):
            raise
        return "refused by the CRD"
    return "taken" if judged(made).is_accepted else "not for Python"


def judged(job: dict[str, Any]) -> Validation:
    """Return what the operator will say of it."""
    found = read_job(job, SpecCache())
    return Validation(found.problems) if found.spec is None else validate_spec(found.spec)


def is_large(spec: dict[str, Any]) -> bool:
    """Return whether two cores would have to make hundreds of pods: what limits those is tested elsewhere."""
    found = judged(
        {"apiVersion": "moejob.dev/v1alpha1", "kind": "MoETrainingJob", "metadata": {"name": "x"}, "spec": spec}
    )
    engines = 0 if found.rollout is None or not found.rollout.gpus else found.rollout.engines
    return found.layout is not None and found.layout.nodes + engines > FEW_PODS


def assert_served(home: Home, name: str) -> None:
    """A job that is as it should be gets its pods soon."""
    home.plane.api.create(path(home.namespace), body(name, **SMALL))
    pods = f"/api/v1/namespaces/{home.namespace}/pods?labelSelector={Label.JOB}%3D{name}"
    until(lambda: len(home.plane.api.get(pods)["items"]) == 2, waiting_for=home.tails)


def unanswered(home: Home) -> list[str]:
    """Jobs whose condition Accepted is not what it should be."""
    wrong = []
    for job in home.plane.api.get(path(home.namespace))["items"]:
        about = {"apiVersion": "moejob.dev/v1alpha1", "kind": "MoETrainingJob"} | job
        found = {said["type"]: said["status"] for said in job.get("status", {}).get("conditions", ())}
        # No profile is there.
        is_accepted = judged(about).is_accepted and "profile" not in job["spec"]
        if found.get("Accepted") != str(is_accepted):
            wrong.append(f"{job['metadata']['name']}: {json.dumps(job.get('status', {}).get('conditions', ()))[:300]}")
    return wrong
