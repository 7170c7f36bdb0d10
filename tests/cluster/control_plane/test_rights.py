"""The operator has every right that it needs and no other: it lives whole lives of jobs, and the audit log is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.control_plane.audit import Right, entries, granted, uses
from cluster.control_plane.jobs import Body, body, path, text
from cluster.control_plane.operators import ACCOUNT, Home
from cluster.control_plane.plane import ControlPlane, KubectlError
from cluster.control_plane.plane import control_plane as running_control_plane
from cluster.control_plane.releases import DEFINITIONS, release
from cluster.control_plane.stand_ins import definition
from cluster.waiting import until
from moejob_api.profiles.fields import API_VERSION, ProfileKind
from moejob_operator.children.gangs import GangApi

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# Gang schedulers that are no part of Kubernetes, by what a job calls them.
STAND_INS = {"Volcano": GangApi.VOLCANO, "Coscheduling": GangApi.COSCHEDULING}
GANGS = {"Native": GangApi.NATIVE, **STAND_INS}
NODES = 2
# Rights that no life here uses, each with the reason why it is granted all the same.
UNUSED: Mapping[Right, str] = {}


@pytest.fixture(scope="module")
def plane(programs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of our own, with every gang scheduler's API."""
    with running_control_plane(tmp_path_factory.mktemp("rights"), programs, NODES) as found:
        for api in STAND_INS.values():
            found.api.create(DEFINITIONS, definition(api, "PodGroup"))
        yield found


@pytest.fixture(params=["all namespaces", "one namespace"])
def home(request: pytest.FixtureRequest, plane: ControlPlane, tmp_path: Path) -> Iterator[Home]:
    """An operator that is installed with Helm and runs outside of its pods."""
    with release(plane, tmp_path) as found:
        # With a webhook it needs cert-manager, which keeps the certificate then.
        named = {"webhook": {"enabled": False}, "namespaces": [found.namespace]}
        found.install({} if request.param == "all namespaces" else named)
        home = found.home
        # No other test may hold what the lives here need, nor be what they look for.
        plane.kubectl("scale", "deployment/moejob-operator", "--replicas=0", f"--namespace={found.namespace}")
        # A rest of a second: what comes every two minutes comes at once.
        operator = home.replica("--resync-seconds=2")
        operator.start()
        until(lambda: operator.leads and operator.is_ready, waiting_for=home.tails)
        yield home
        operator.process.stop()


def make_job_body(name: str, **sections: Any) -> Body:
    """A job of one pod that needs no GPU."""
    small = {
        "model": {"source": "moejob/tiny-moe"},
        "data": {"maxLength": 256},
        "parallelism": {"expert": 2},
        "resources": {"accelerator": "CPU", "gpusPerNode": 2},
        "storage": {"size": "1Gi"},
    }
    return body(name, **small | sections)


class Lives:
    """Actions on jobs, and waits."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.api = home.plane.api

    def apply(self, found: Body) -> None:
        def is_applied() -> bool:
            try:
                self.home.plane.kubectl("apply", f"--namespace={self.home.namespace}", "-f", "-", stdin=text(found))
            except KubectlError as refused:
                if "no matches for kind" in str(refused):
                    return False
                raise
            return True

        until(is_applied, waiting_for="jobs to be served")

    def pods(self, name: str) -> list[Any]:
        query = f"labelSelector=moejob.dev/job={name}"
        found: list[Any] = self.api.get(f"/api/v1/namespaces/{self.home.namespace}/pods?{query}")["items"]
        return found

    def uids(self, name: str) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods(name)}

    def secrets(self) -> list[str]:
        found = self.api.get(f"/api/v1/namespaces/{self.home.namespace}/secrets")["items"]
        return [secret["metadata"]["name"] for secret in found]

    def status(self, name: str) -> Any:
        return self.api.get(path(self.home.namespace, name)).get("status", {})

    def reaches(self, name: str, what: Any) -> None:
        until(lambda: what(self.status(name)), waiting_for=lambda: f"{name}: {self.status(name)}")

    def runs(self, name: str) -> None:
        self.reaches(name, lambda status: status.get("phase") in ("Running", "Pending"))
        until(lambda: self.pods(name), waiting_for=lambda: f"pods of {name}: {self.status(name)}")

    def start(self, pod: str) -> None:
        """Let a pod run as its kubelet would say it."""
        self._say(pod, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, is_ready=True)

    def end(self, pod: str, code: int) -> None:
        """Let a pod end as its kubelet would say it."""
        ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
        self._say(pod, "Failed" if code else "Succeeded", {"terminated": ended}, is_ready=False)

    def _say(self, pod: str, phase: str, state: Body, *, is_ready: bool) -> None:
        container = {"name": "trainer", "image": "i", "imageID": "", "restartCount": 0}
        conditions = [{"type": "Ready", "status": str(is_ready)}]
        said = [container | {"ready": is_ready, "state": state}]
        status = {"phase": phase, "conditions": conditions, "containerStatuses": said}
        self.home.plane.kubectl(
            "patch", "pod", pod, f"--namespace={self.home.namespace}", "--subresource=status", "--type=merge",
            f"--patch={json.dumps({'status': status})}",
        )  # fmt: skip


def live(home: Home) -> None:
    """Every kind of thing that can happen to jobs, once."""
    lives = Lives(home)
    suspended_and_resumed(lives)
    with_a_profile(lives)
    failed_restarted_and_cleaned_up(lives)
    for gang in GANGS:
        lives.apply(make_job_body(f"gang-{gang.lower()}", lifecycle={"gang": gang}))
        until(lambda: lives.pods(f"gang-{gang.lower()}"), waiting_for=home.tails)  # noqa: B023
    in_the_way(lives)
    on_a_lost_node(lives)
    with_and_without_its_secret(lives)
    without_a_lease(lives)


def suspended_and_resumed(lives: Lives) -> None:
    lives.apply(make_job_body("paused"))
    lives.runs("paused")
    lives.apply(make_job_body("paused", lifecycle={"suspend": True}))
    lives.reaches("paused", lambda status: status.get("phase") == "Suspended")
    until(lambda: not lives.pods("paused"), waiting_for="its pods to go")
    lives.apply(make_job_body("paused"))
    lives.runs("paused")
    lives.api.delete(path(lives.home.namespace, "paused"))


def with_a_profile(lives: Lives) -> None:
    """A job that comes before its profile looks for it in its namespace and in the cluster."""
    lives.apply(make_job_body("profiled", profile="late"))
    lives.reaches("profiled", lambda status: (status.get("why") or {}).get("blocker") == "ProfileMissing")
    profiles = f"/apis/{API_VERSION}/namespaces/{lives.home.namespace}/{ProfileKind.NAMESPACED.plural}"
    profile = {"apiVersion": API_VERSION, "kind": ProfileKind.NAMESPACED, "metadata": {"name": "late"}}
    lives.api.create(profiles, {**profile, "spec": {"resources": {"image": "profiled:1"}}})
    lives.runs("profiled")
    [pod] = lives.pods("profiled")
    assert pod["spec"]["containers"][0]["image"] == "profiled:1"
    lives.api.delete(path(lives.home.namespace, "profiled"))


def failed_restarted_and_cleaned_up(lives: Lives) -> None:
    # A job whose claim is kept stays beside it.
    storage = {"size": "1Gi", "reclaim": "Delete"}
    lives.apply(make_job_body("mortal", storage=storage, lifecycle={"ttlSecondsAfterFinished": 1}))
    lives.runs("mortal")
    lives.end("mortal-trainer-0-00000", 1)
    until(
        lambda: [pod["metadata"]["name"] for pod in lives.pods("mortal")] == ["mortal-trainer-1-00000"],
        waiting_for=lambda: f"the next attempt: {lives.status('mortal')}",
    )
    lives.end("mortal-trainer-1-00000", 0)
    gone = path(lives.home.namespace).partition("?")[0]
    until(
        lambda: "mortal" not in {found["metadata"]["name"] for found in lives.api.get(gone)["items"]},
        waiting_for=lambda: f"the end of the job: {lives.status('mortal')}",
    )


def in_the_way(lives: Lives) -> None:
    """Names that another object has taken are read before the job's status says so."""
    namespace = lives.home.namespace
    space = f"/api/v1/namespaces/{namespace}"
    one = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    lives.api.create(f"{space}/services", {"metadata": {"name": "no-service-moejob"}, "spec": {"ports": [{"port": 1}]}})
    lives.api.create(f"{space}/persistentvolumeclaims", {"metadata": {"name": "no-claim-storage"}, "spec": one})
    lives.api.create(f"{space}/pods", {"metadata": {"name": "no-pod-trainer-0-00000"}, "spec": restricted()})
    taken = {"no-service": "None", "no-claim": "None", "no-pod": "None"}
    for gang, api in GANGS.items():
        name = f"no-{gang.lower()}"
        spec = {"schedulingPolicy": {"gang": {"minCount": 1}}} if api is GangApi.NATIVE else {"minMember": 1}
        group = {"apiVersion": api.value, "kind": "PodGroup", "metadata": {"name": name}, "spec": spec}
        lives.api.create(f"/apis/{api}/namespaces/{namespace}/podgroups", group)
        taken[name] = gang
    for name, gang in taken.items():
        lives.apply(make_job_body(name, lifecycle={"gang": gang}))
    for name in taken:
        lives.reaches(name, lambda status: "in the way" in json.dumps(status))


def restricted() -> Body:
    """Return what a pod says in a namespace that holds pods to the restricted standard."""
    confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "c", "image": "i", "securityContext": confined}
    profile = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return {"securityContext": profile, "containers": [container]}


def on_a_lost_node(lives: Lives) -> None:
    """A pod that should have ended long ago: is there still anybody to end it?"""
    lives.apply(make_job_body("stuck", lifecycle={"gang": "None"}))
    lives.runs("stuck")
    name = "stuck-trainer-0-00000"
    pod = f"/api/v1/namespaces/{lives.home.namespace}/pods/{name}"
    # No controller here makes volumes, for which the scheduler would wait.
    binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": lives.home.plane.nodes[0]}}
    lives.api.create(f"{pod}/binding", binding)
    # What holds it back stands for a kubelet that says nothing.
    lives.api.merge(pod, {"metadata": {"finalizers": ["example.com/silent-kubelet"]}})
    lives.api.delete(f"{pod}?gracePeriodSeconds=1")
    wanted = Right("get", "", "nodes")
    until(lambda: is_used(lives.home, wanted), waiting_for=lives.home.tails)
    lives.api.merge(pod, {"metadata": {"finalizers": None}})


def with_and_without_its_secret(lives: Lives) -> None:
    """A process that has created nothing yet may read no Secret, and finds out by a dry run whether one is there."""
    first = {name: f"{name}-trainer-0-00001" for name in ("kept", "robbed")}
    for name in first:
        lives.apply(make_job_body(name, resources={"gpusPerNode": 1}, lifecycle={"gang": "None"}))
        until(lambda: len(lives.pods(name)) == 2, waiting_for=lives.home.tails)  # noqa: B023
        for index in range(2):
            lives.start(f"{name}-trainer-0-{index:05}")
        lives.reaches(name, lambda status: status.get("phase") == "Running")
    before = {name: lives.uids(name) for name in first}
    [secret] = [found for found in lives.secrets() if found.startswith("robbed-")]
    lives.api.delete(f"/api/v1/namespaces/{lives.home.namespace}/secrets/{secret}")
    [operator] = lives.home.replicas
    operator.process.stop()
    for pod in first.values():
        lives.end(pod, 137)
    operator.start()
    until(lambda: secret in lives.secrets(), waiting_for=lives.home.tails)
    lives.reaches("robbed", lambda status: status.get("lastFailure", {}).get("reason") == "SecretLost")
    until(
        lambda: [len(lives.pods(name)) for name in first] == [2, 2] and not lives.uids("robbed") & before["robbed"],
        waiting_for=lives.home.tails,
    )
    assert len(lives.uids("kept") & before["kept"]) == 1, "the one that failed, and no other, is replaced"


def without_a_lease(lives: Lives) -> None:
    """The Lease is deleted: a replica leads again, under a new one."""
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{lives.home.namespace}/leases/moejob-operator"
    lives.api.delete(lease)
    wanted = Right("create", "coordination.k8s.io", "leases", namespace=lives.home.namespace)
    until(lambda: is_used(lives.home, wanted), waiting_for=lives.home.tails)
    lives.home.leader()


def is_used(home: Home, right: Right) -> bool:
    return any(uses(right, entry) for entry in entries(home.plane, home.namespace, ACCOUNT))


def test_no_right_is_missing_and_none_is_unused(home: Home) -> None:
    rights = granted(home.plane, home.namespace, ACCOUNT)
    assert len(rights) > 30
    live(home)
    asked = list(entries(home.plane, home.namespace, ACCOUNT))
    refused = [entry["responseStatus"]["message"] for entry in asked if entry["responseStatus"].get("code") == 403]
    assert [message for message in refused if " cannot " in message] == []
    unused = {right for right in rights if not any(uses(right, entry) for entry in asked)}
    assert sorted(map(str, unused)) == sorted(map(str, UNUSED))


def test_a_right_that_nobody_uses_is_found(home: Home) -> None:
    """The proof above can fail."""
    assert not is_used(home, Right("deletecollection", "", "pods"))
    group = "coordination.k8s.io"
    assert not is_used(home, Right("get", group, "leases", "another-lease", home.namespace))
    assert not is_used(home, Right("get", group, "leases", "moejob-operator", "another-namespace"))
    until(
        lambda: is_used(home, Right("get", group, "leases", "moejob-operator", home.namespace)),
        waiting_for=home.tails,
    )


def test_the_operator_has_no_rights_but_those_by_name(home: Home) -> None:
    """Not one that its groups or the cluster's defaults would bring: it cannot read a Secret or make a token."""
    plane = home.plane
    account = f"system:serviceaccount:{home.namespace}:{ACCOUNT}"
    for question in (
        ("get", "secrets"),
        ("delete", "secrets"),
        ("list", "secrets"),
        ("create", "serviceaccounts", "--subresource=token"),
        ("create", "pods", "--subresource=exec"),
        ("update", "moetrainingjobs.moejob.dev"),
        ("bind", "clusterroles"),
    ):
        # kubectl ends with 1 after a no.
        with pytest.raises(KubectlError):
            plane.kubectl("auth", "can-i", *question, f"--as={account}", f"--namespace={home.namespace}")
