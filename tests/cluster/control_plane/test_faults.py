"""Faults in the middle of restarts: whatever breaks, nothing is lost, nothing doubled, and every failure charged once.

MOEJOB_FAULTS=full kills the operator 30 times and lets the API misbehave for a minute; otherwise it is a third of that,
with three jobs in the middle of a restart at each kill.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from builders import merge_sections
from cluster.control_plane.components import Component
from cluster.control_plane.faulty_proxy import FaultyProxy, faulty_proxy
from cluster.control_plane.gang_watch import GangWatch, gang_watch
from cluster.control_plane.jobs import body, path
from cluster.control_plane.operators import ACCOUNT, Home, installed
from cluster.control_plane.plane import ControlPlane
from cluster.control_plane.volumes import VOLUMES, create_bound_claim
from cluster.extent import IS_FULL
from cluster.waiting import until
from fake_world import SMALL
from moejob_api.contract.pods import Label

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("definition")]

KILLS = 30 if IS_FULL else 10
FAULTY_SECONDS = 60 if IS_FULL else 20
# From the failure of a pod to the last pod of the next gang it takes about this long.
RESTART_SECONDS = 0.5
# On CPU, so that many fit; played by kwok, whose pods answer nothing.
JOB: dict[str, Any] = merge_sections(SMALL, {"resources": {"accelerator": "CPU"}, "lifecycle": {"gang": "None"}}) | {
    "storage": {"size": None, "claimName": "checkpoints"}
}
QUICK = ("--no-webhook", "--progress-seconds=0.1")
ALONE = (*QUICK, "--no-leader-election")
# A leader is replaced within 6 seconds.
SHORT_TERMS = (*QUICK, "--lease-seconds=5", "--renew-deadline-seconds=3", "--retry-seconds=1")


@dataclass
class Fleet:
    """Jobs of two pods each, and the watches over them."""

    home: Home
    witness: GangWatch

    @property
    def plane(self) -> ControlPlane:
        return self.home.plane

    def apply(self, names: Sequence[str]) -> None:
        """kubectl apply."""
        for name in names:
            self.plane.api.create(path(self.home.namespace), body(name, **JOB))

    def wait_until_running(self, names: Sequence[str]) -> None:
        """Return when every job runs in its first attempt, on two pods."""
        until(
            lambda: not self.waiting(names),
            waiting_for=lambda: f"{self.waiting(names)}\n{self.home.tails()}",
        )

    def waiting(self, names: Sequence[str]) -> list[str]:
        """Jobs that do not run as they should, and how they are."""
        pods = self.pods()
        jobs = {job["metadata"]["name"]: job for job in self.plane.api.get(path(self.home.namespace))["items"]}
        wrong = []
        for name in names:
            status = jobs[name].get("status", {})
            running = sum(_is_running(pod, name) for pod in pods)
            if (status.get("phase"), status.get("attempt"), running) != ("Running", 0, 2):
                wrong.append(f"{name}: {status.get('phase')}, attempt {status.get('attempt')}, {running} pods run")
        return wrong

    def charges(self, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Of each job: replaced pods, replaced gangs, and the failures that its budget has paid."""
        jobs = {job["metadata"]["name"]: job for job in self.plane.api.get(path(self.home.namespace))["items"]}
        counts = {name: jobs[name].get("status", {}).get("restarts", {}) for name in names}
        kinds = ("pods", "total", "sinceCheckpoint")
        return {name: tuple(count.get(kind, 0) for kind in kinds) for name, count in counts.items()}

    def pods(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.plane.api.get(f"/api/v1/namespaces/{self.home.namespace}/pods")["items"]
        return listed

    def fail(self, name: str) -> None:
        """The first rank of a job dies, and its pod with it."""
        ended = {"exitCode": 1, "reason": "Error", "finishedAt": None, "startedAt": None}
        container = {"name": "trainer", "image": "", "imageID": "", "ready": False, "restartCount": 0}
        failed = {"phase": "Failed", "containerStatuses": [container | {"state": {"terminated": ended}}]}
        pod = f"/api/v1/namespaces/{self.home.namespace}/pods/{name}-trainer-0-00000"
        self.plane.api.merge(f"{pod}/status", {"status": failed})

    def assert_restarted_once(self, names: Sequence[str]) -> None:
        """One failure, one charge, one next pod 0, and never a pod too many."""
        once = dict.fromkeys(names, (1, 0, 1))
        # A pod that fails is seen a moment later, and its replacement is counted when it is there.
        until(lambda: self.charges(names) == once, waiting_for=lambda: f"{self.charges(names)}\n{self.home.tails()}")
        self.wait_until_running(names)
        assert self.charges(names) == once
        assert self.witness.doubled == []
        ever = self.witness.pods_of(self.home.namespace)
        for name in names:
            mine = Counter(pod["metadata"]["name"] for pod in ever if pod["metadata"]["labels"][Label.JOB] == name)
            assert mine == {f"{name}-trainer-0-00000": 2, f"{name}-trainer-0-00001": 1}


def _is_running(pod: dict[str, Any], job: str) -> bool:
    labels = pod["metadata"]["labels"]
    is_mine = (labels[Label.JOB], labels[Label.ATTEMPT]) == (job, "0")
    return is_mine and pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]


@pytest.fixture
def fleet(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Fleet]:
    create_bound_claim(control_plane, namespace, "checkpoints")
    with installed(control_plane, namespace, tmp_path) as home, gang_watch(control_plane) as witness:
        yield Fleet(home, witness)
    for job in control_plane.api.get(path(namespace))["items"]:
        control_plane.api.delete(path(namespace, job["metadata"]["name"]))
    for volume in control_plane.api.get(VOLUMES)["items"]:
        control_plane.api.delete(f"{VOLUMES}/{volume['metadata']['name']}")


def names(count: int) -> list[str]:
    return [f"job-{number}" for number in range(count)]


def test_an_operator_that_is_killed_at_any_moment_of_a_restart_restarts_every_gang_once(fleet: Fleet) -> None:
    chance = random.Random(4)
    batches = [[f"job-{kill}-{number}" for number in range(3)] for kill in range(KILLS)]
    every = [name for batch in batches for name in batch]
    operator = fleet.home.replica(*ALONE)
    operator.start()
    fleet.apply(every)
    fleet.wait_until_running(every)
    for batch in batches:
        until(lambda: operator.is_ready, waiting_for=fleet.home.tails)
        for name in batch:
            fleet.fail(name)
        time.sleep(chance.uniform(0, RESTART_SECONDS))
        operator.signal(signal.SIGKILL)
        until(lambda: operator.process.pid is None, waiting_for="the end of the operator")
        operator.start()
    fleet.assert_restarted_once(every)


@pytest.mark.parametrize("component", [Component.API_SERVER, Component.ETCD])
def test_a_restart_survives_that_of_the_api(fleet: Fleet, component: Component) -> None:
    every = names(8)
    fleet.home.replica(*QUICK).start()
    fleet.apply(every)
    fleet.wait_until_running(every)
    for name in every:
        fleet.fail(name)
    # Some have bumped, some have deleted, some have created: eight restarts take longer than this.
    fleet.plane.restart(component)
    fleet.assert_restarted_once(every)


def test_an_api_that_refuses_loses_answers_and_ends_watches_charges_nothing_twice(fleet: Fleet) -> None:
    chance = random.Random(5)
    with faulty_proxy(fleet.plane, seed=6) as proxy:
        kubeconfig = fleet.plane.service_account_kubeconfig(fleet.home.namespace, ACCOUNT, by_way_of=proxy.url)
        operator = fleet.home.replica(*QUICK, kubeconfig=kubeconfig)
        operator.start()
        until(lambda: operator.leads, waiting_for=fleet.home.tails)
        proxy.share = 0.3
        every = lived_through_faults(fleet, proxy, chance)
        proxy.share = 0.0
        fleet.assert_restarted_once(every)
    errors = [str(line.get("traceback", line)) for line in operator.log() if line["level"] == "error"]
    assert not errors, "".join(errors)


def lived_through_faults(fleet: Fleet, proxy: FaultyProxy, chance: random.Random) -> list[str]:
    """Jobs that were applied and failed once, one after another, three at the least and until each fault was seen."""
    every: list[str] = []
    until_seconds = time.monotonic() + FAULTY_SECONDS
    while time.monotonic() < until_seconds or len(every) < 3 or proxy.codes != {"409", "410", "429", "500"}:
        name = f"job-{len(every)}"
        fleet.apply([name])
        fleet.wait_until_running([name])
        fleet.fail(name)
        every.append(name)
        time.sleep(chance.uniform(0, RESTART_SECONDS))
    return every


def test_a_leader_that_is_cut_off_stops_and_its_follower_goes_on_where_it_was(fleet: Fleet) -> None:
    every = names(4)
    with faulty_proxy(fleet.plane, seed=7) as proxy:
        kubeconfig = fleet.plane.service_account_kubeconfig(fleet.home.namespace, ACCOUNT, by_way_of=proxy.url)
        leader = fleet.home.replica(*SHORT_TERMS, kubeconfig=kubeconfig)
        leader.start()
        until(lambda: leader.leads, waiting_for=fleet.home.tails)
        follower = fleet.home.replica(*SHORT_TERMS)
        follower.start()
        fleet.apply(every)
        fleet.wait_until_running(every)
        for name in every[:2]:
            fleet.fail(name)
        proxy.is_cut = True
        for name in every[2:]:
            fleet.fail(name)
        until(lambda: follower.leads, waiting_for=fleet.home.tails)
        assert not leader.leads, "it stopped before another began"
        fleet.wait_until_running(every)
        proxy.is_cut = False
        until(lambda: leader.is_ready, waiting_for=fleet.home.tails)
        fleet.assert_restarted_once(every)
        assert fleet.home.leaders == [follower]
