"""The operator as a real process against a real API server with RBAC on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.control_plane.api import RefusedError
from cluster.control_plane.components import Component
from cluster.control_plane.jobs import body, path, text
from cluster.control_plane.operators import Home, Operator, installed
from cluster.control_plane.plane import ControlPlane, KubectlError
from cluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("definition")]

JOB: dict[str, Any] = {
    "parallelism": {"tensor": 4, "expert": 4},
    "resources": {"gpusPerNode": 8, "gpuType": "H100"},
    "storage": {"size": None, "claimName": "checkpoints"},
}
NO_LAYOUT: dict[str, Any] = {"parallelism": {"tensor": 3}, "resources": {"gpusPerNode": 8, "gpuType": "H100"}}


@pytest.fixture
def home(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Home]:
    with installed(control_plane, namespace, tmp_path) as found:
        yield found


def pods(plane: ControlPlane, namespace: str) -> dict[str, Any]:
    """By name."""
    listed = plane.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    return {pod["metadata"]["name"]: pod for pod in listed}


def applied(home: Home, name: str = "job", **sections: Any) -> None:
    home.plane.kubectl("apply", f"--namespace={home.namespace}", "-f", "-", stdin=text(body(name, **JOB | sections)))


def refusals(home: Home) -> list[str]:
    """Return what the operator has no right to and asked for.

    A namespace that goes away refuses as well, in other words.
    """
    account = f"system:serviceaccount:{home.namespace}:moejob-operator"
    lines = home.plane.audited()
    mine = (line["responseStatus"] for line in lines if line["user"]["username"] == account)
    return [said["message"] for said in mine if said.get("code") == 403 and " cannot " in said.get("message", "")]


# --- leading --------------------------------------------------------------------------------------------------------


def two_replicas(home: Home) -> tuple[Operator, Operator]:
    """The leader and the follower."""
    for _ in range(2):
        home.replica().start()
    leader = home.leader()
    [follower] = [replica for replica in home.replicas if replica is not leader]
    return leader, follower


@pytest.mark.slow
def test_a_follower_takes_over_from_a_killed_leader(home: Home) -> None:
    leader, follower = two_replicas(home)
    until(lambda: follower.is_ready, waiting_for=home.tails)
    assert home.leaders == [leader]
    assert [line["event"] for line in leader.log()].count("leading") == 1
    leader.process.stop()
    until(lambda: follower.leads, waiting_for=home.tails)
    applied(home)
    until(lambda: len(pods(home.plane, home.namespace)) == 2, waiting_for=home.tails)
    assert refusals(home) == []


def test_a_leader_that_is_asked_to_stop_hands_over_at_once(home: Home) -> None:
    leader, follower = two_replicas(home)
    leader.signal(signal.SIGTERM)
    until(lambda: follower.leads, waiting_for=home.tails)
    until(lambda: leader.process.pid is None, waiting_for=home.tails)
    assert [line["event"] for line in leader.log()][-1] == "stopped"
    assert leader.log()[-1]["exit_code"] == 0


@pytest.mark.slow
def test_a_leader_that_slept_too_long_finds_that_another_leads(home: Home) -> None:
    leader, follower = two_replicas(home)
    leader.signal(signal.SIGSTOP)
    until(lambda: follower.leads, waiting_for=home.tails)
    leader.signal(signal.SIGCONT)
    until(lambda: not leader.leads and leader.is_ready, waiting_for=home.tails)
    assert home.leaders == [follower]


# --- jobs -----------------------------------------------------------------------------------------------------------


def test_a_job_gets_its_pods_and_they_go_with_it(home: Home) -> None:
    home.replica().start()
    applied(home)
    until(lambda: len(pods(home.plane, home.namespace)) == 2, waiting_for=home.tails)
    until(
        lambda: home.plane.api.get(path(home.namespace, "job")).get("status", {}).get("phase") == "Pending",
        waiting_for=home.tails,
    )
    events = ("get", "events", f"--namespace={home.namespace}")
    # What it waits for, or that it runs.
    until(lambda: "moetrainingjob/job" in home.plane.kubectl(*events), waiting_for=home.tails)
    assert refusals(home) == []
    home.plane.api.delete(path(home.namespace, "job"))
    # The garbage collector learns of a new kind every half minute.
    until(lambda: not pods(home.plane, home.namespace), waiting_for="the end of the pods")


def test_kopf_runs_the_operator_by_its_own_command_as_well(home: Home) -> None:
    operator = home.replica_of_kopf()
    operator.start()
    applied(home)
    until(lambda: len(pods(home.plane, home.namespace)) == 2, waiting_for=home.tails)
    until(lambda: operator.is_ready, waiting_for=home.tails)
    assert refusals(home) == []
    operator.signal(signal.SIGTERM)
    until(lambda: operator.process.pid is None, waiting_for=home.tails)
    lease = home.plane.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{home.namespace}/leases/moejob-operator")
    assert not lease["spec"].get("holderIdentity"), "it was not given up"


def test_at_rest_nothing_is_written(home: Home) -> None:
    home.replica().start()
    applied(home)
    until(lambda: len(pods(home.plane, home.namespace)) == 2, waiting_for=home.tails)
    settled = until(lambda: same_after(3, home), waiting_for="the writes to end")
    assert same_after(5, home) == settled


def same_after(seconds: float, home: Home) -> list[str] | None:
    """Return what was written so far, when for some seconds nothing was added to it."""
    before = writes(home)
    time.sleep(seconds)
    return before if writes(home) == before else None


def writes(home: Home) -> list[str]:
    """Return what the operator wrote, the Lease left out."""
    account = f"system:serviceaccount:{home.namespace}:moejob-operator"
    lines = home.plane.audited()
    return [
        f"{line['verb']} {line['requestURI']}"
        for line in lines
        if line["user"]["username"] == account
        and line["verb"] not in ("get", "list", "watch")
        and "/leases" not in line["requestURI"]
    ]


def test_a_pod_that_vanished_while_the_watch_was_expired_is_missed(home: Home) -> None:
    operator = home.replica("--resync-seconds=3600")
    operator.start()
    applied(home)
    until(lambda: len(pods(home.plane, home.namespace)) == 2, waiting_for=home.tails)
    uids = {pod["metadata"]["uid"] for pod in pods(home.plane, home.namespace).values()}
    operator.signal(signal.SIGSTOP)
    # A new API server remembers no events from before its start: a watch of the old one is answered 410.
    home.plane.api.delete(f"/api/v1/namespaces/{home.namespace}/pods/job-trainer-0-00001?gracePeriodSeconds=0")
    home.plane.restart(Component.API_SERVER)
    operator.signal(signal.SIGCONT)

    def is_replaced() -> bool:
        found = pods(home.plane, home.namespace)
        return len(found) == 2 and {pod["metadata"]["uid"] for pod in found.values()} != uids

    until(is_replaced, waiting_for=home.tails)
    assert operator.process.pid is not None


@pytest.mark.slow
@pytest.mark.parametrize("component", [Component.API_SERVER, Component.ETCD])
def test_without_an_api_a_leader_stops_leading_and_goes_on_where_it_was_when_there_is_one(
    home: Home, component: Component
) -> None:
    operator = home.replica()
    operator.start()
    home.leader()
    # Stopping a component takes seconds itself, in which the leader already goes without.
    begun = time.monotonic()
    home.plane.stop(component)
    until(lambda: not operator.leads, waiting_for=home.tails)
    assert time.monotonic() - begun > 5, "a short loss is no reason to stop"
    assert operator.said("/healthz") is not None
    home.plane.start(component)
    until(lambda: operator.leads, waiting_for=home.tails)
    applied(home)
    until(lambda: len(pods(home.plane, home.namespace)) == 2, waiting_for=home.tails)
    assert not [line for line in operator.log() if line["level"] == "error"]


# --- the webhook ----------------------------------------------------------------------------------------------------


@pytest.fixture
def webhook(home: Home) -> Iterator[Operator]:
    """A replica that the API server asks about every job, with the names and the certificate of a cluster."""
    operator = home.replica()
    plane, namespace = home.plane, home.namespace
    # In a cluster the Service has an address; here its name leads to this machine.
    plane.api.create(
        f"/api/v1/namespaces/{namespace}/services",
        {"metadata": {"name": "moejob-webhook"}, "spec": {"type": "ExternalName", "externalName": "localhost"}},
    )
    hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    configuration = home.chart.find_one("ValidatingWebhookConfiguration")
    [hook] = configuration["webhooks"]
    hook["clientConfig"]["service"]["port"] = operator.webhook_port
    # Jobs of these tests are where the operator is.
    del hook["namespaceSelector"]
    plane.api.create(hooks, configuration)
    operator.start()
    until(lambda: operator.is_ready, waiting_for=home.tails)
    try:
        yield operator
    finally:
        plane.api.delete(f"{hooks}/moejob")


def denied(home: Home, **sections: Any) -> str:
    with pytest.raises(KubectlError) as refused:
        applied(home, **sections)
    return str(refused.value)


@pytest.mark.usefixtures("webhook")
def test_a_job_that_cannot_work_is_denied_by_the_webhook_by_name(home: Home) -> None:
    until(lambda: is_asked(home), waiting_for=home.tails)
    said = denied(home, **NO_LAYOUT)
    assert 'admission webhook "validate.moejob.dev" denied the request' in said
    assert "spec.parallelism" in said
    assert refusals(home) == []


@pytest.mark.usefixtures("webhook")
def test_a_model_that_cannot_be_seen_is_accepted_with_a_warning(home: Home) -> None:
    until(lambda: is_asked(home), waiting_for=home.tails)
    job = text(body("job", **JOB | {"model": {"source": "pvc://models/mine"}}))
    # kubectl says warnings where only errors are shown here.
    with pytest.raises(KubectlError, match=r"Warning: spec\.model\.source: not checked"):
        home.plane.kubectl(
            "create", f"--namespace={home.namespace}", "--dry-run=server", "--warnings-as-errors", "-f", "-", stdin=job
        )


def is_asked(home: Home) -> bool:
    """Return whether the API server has learnt of the webhook: it reads its configuration every second or so."""
    try:
        home.plane.api.create(path(home.namespace, is_tried_only=True), body("probe", **JOB | NO_LAYOUT))
    except RefusedError as refused:
        return "denied the request" in refused.message
    return False
