"""Users who may create jobs or pods beside a job of another, and what they can do to it and to the operator.

No policy is enforced, so that what is kept off is the merit of the job and of the operator themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import merged
from charts import CHART, Values
from cluster.control_plane.jobs import body
from cluster.control_plane.plane import ControlPlane, KubectlError
from cluster.control_plane.releases import Release
from cluster.extent import in_full
from cluster.nodes.cluster import Cluster
from cluster.nodes.images import write_variant
from cluster.nodes.pods import VOLUME
from cluster.nodes.strangers import Inside, Try, address, connections, namespace_of, stranger
from cluster.nodes.test_strangers import IMAGE, endless
from cluster.nodes.training import JOBS, VALUES, VERSION, Submitted, example, submitted
from cluster.waiting import until
from images import built
from limit_cases import ALLOWED, BEYOND, Limited
from moejob_api.contract.pods import PodPort, RunFile, printable_text

pytestmark = [pytest.mark.cluster, pytest.mark.slow, in_full]

CHATTER = (Path(__file__).parent / "chatter.py").read_text()
CHATTER_IMAGE = f"moejob.test/chatter:{VERSION}"
# What a port of a launcher holds of those who have proved nothing; see SECURITY.md.
MOST = {PodPort.PROGRESS.value: 32, PodPort.RENDEZVOUS.value: 256}
FAR = 9_999_999_999
TENANT = "--as=tenant"
FLOOD_ASKED = 4
LAST_WORDS = "all is well"


@dataclass(frozen=True, slots=True)
class Crowded:
    """A launcher that joined while strangers held the ports of the first one."""

    # Connections at each port of pod 0 just before the launcher came.
    held: Mapping[int, int]
    # UIDs before and after.
    first: tuple[str, str]
    joined: tuple[str, str]
    # Steps before and after: in the run's log, and as the operator has heard of them.
    done: tuple[int, int]
    heard: tuple[int, int]
    said: Mapping[Try, str]


@pytest.fixture(scope="module")
def own(nodes: Cluster, home: Release) -> Iterator[str]:
    """The namespace of all of them."""
    del home
    with namespace_of(nodes) as name:
        yield name


@pytest.fixture(scope="module")
def job(nodes: Cluster, own: str) -> Iterator[Submitted]:
    """A job of two launchers that trains."""
    found = submitted(nodes, own, merged(endless(), {"spec": {"checkpoint": {"everySteps": 20}}}))
    until(lambda: found.phase == "Running", waiting_for=found.told)
    until(lambda: found.run().done() > 0, waiting_for=found.told)
    yield found
    nodes.plane.api.delete(f"{JOBS.format(own)}/{found.name}")


@pytest.fixture(scope="module")
def neighbour(nodes: Cluster, own: str, job: Submitted) -> Inside:
    """A pod in the namespace of the job, on its claim."""
    return stranger(nodes, own, IMAGE, "node-1", claim=f"{job.name}-storage")


@pytest.fixture(scope="module")
def crowded(nodes: Cluster, own: str, job: Submitted, neighbour: Inside) -> Crowded:
    """Crowd the first launcher, let another come, and stay until the job has trained and its status says so."""
    before, first, last = job.uids(), min(job.pods()), max(job.pods())
    host = address(nodes, own, first)
    crowds = [("crowd", host, port) for port in MOST]
    with ThreadPoolExecutor() as threads:
        saying = [threads.submit(neighbour.tries, [crowd]) for crowd in crowds]
        for port, most in MOST.items():
            await_crowd(nodes, own, first, port, most)
        held = {port: connections(nodes, own, first, port) for port in MOST}
        nodes.plane.kubectl("delete", "pod", last, f"--namespace={own}")
        until(lambda: job.uids().get(last, before[last]) != before[last], waiting_for=job.told)
        done, heard = job.run().done(), reported(job)
        until(lambda: job.run().done() > done, waiting_for=job.told)
        until(lambda: reported(job) > heard, waiting_for=job.told)
        after = job.uids()
        assert not any(each.done() for each in saying), [each.result() for each in saying if each.done()]
        nodes.plane.kubectl("exec", neighbour.pod, f"--namespace={own}", "--", "touch", "/tmp/enough")
        said = {crowd: answer for each in saying for crowd, answer in each.result().items()}
    return Crowded(
        held,
        (before[first], after[first]),
        (before[last], after[last]),
        (done, job.run().done()),
        (heard, reported(job)),
        said,
    )


def await_crowd(nodes: Cluster, namespace: str, pod: str, port: int, most: int) -> None:
    until(lambda: connections(nodes, namespace, pod, port) >= most, waiting_for=f"a crowd at {port}")


def test_a_launcher_joins_and_the_operator_hears_of_steps_past_a_crowd_that_says_nothing(crowded: Crowded) -> None:
    assert crowded.first[0] == crowded.first[1]
    assert crowded.joined[0] != crowded.joined[1]
    assert crowded.done[0] < crowded.done[1]
    assert crowded.heard[0] < crowded.heard[1]
    # Each was turned away again and again.
    for (_, _, port), answer in crowded.said.items():
        assert int(answer.removeprefix("opened ")) > MOST[port], answer


def test_a_claim_that_another_writes_on_the_volume_of_a_job_supersedes_no_run_and_keeps_none_from_starting(
    nodes: Cluster, own: str, job: Submitted, neighbour: Inside, crowded: Crowded
) -> None:
    del crowded
    folder = f"{VOLUME}/{job.name}/{RunFile.CLAIMS}"
    [listed] = neighbour.tries([("claim", folder, FAR)]).values()
    assert f"{FAR}.{FAR}" in listed.split()
    saved = max(job.run().checkpoints(), default=0)
    until(lambda: max(job.run().checkpoints(), default=0) > saved, waiting_for=job.told)
    attempt = job.read()["status"]["attempt"]
    # A new attempt, which reads all claims before it starts.
    nodes.plane.kubectl("delete", "pod", min(job.pods()), f"--namespace={own}")
    until(lambda: job.read()["status"]["attempt"] > attempt and job.phase == "Running", waiting_for=job.told)
    saved = max(job.run().checkpoints())
    until(lambda: max(job.run().checkpoints()) > saved, waiting_for=job.told)
    logs = nodes.plane.kubectl("logs", min(job.pods()), f"--namespace={own}")
    assert "claims that are not proven to be this job's are ignored" in logs
    assert f"{FAR}.{FAR}" in logs


# --- jobs that mean harm to the operator ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """The operator after it asked pods that answer with what they like."""

    strange: Mapping[str, Any]
    events: tuple[str, ...]
    logs: str
    # Of its processes that need most, before and after. [KiB]
    memory: tuple[int, int]
    leaders: tuple[str, str]
    # Steps of another's job that it heard of meanwhile.
    reported: tuple[int, int]


@pytest.fixture(scope="module")
def answered(
    nodes: Cluster,
    home: Release,
    own: str,
    job: Submitted,
    tmp_path_factory: pytest.TempPathFactory,
) -> Answered:
    """Have a tenant create two jobs, whose pods the operator asks as it asks all."""
    start = {"Entrypoint": ["python", "-c", CHATTER], "Cmd": ()}
    nodes.load(
        {CHATTER_IMAGE: write_variant(tmp_path_factory.mktemp("chatter") / "image", built("trainer-cpu"), start)}
    )
    admit_tenant(nodes.plane, own)
    before = memory(nodes, home), leader(home), reported(job)
    for kind in ("flood", "strange"):
        created = yaml.safe_dump(chatting(kind))
        nodes.plane.kubectl("create", "-f", "-", TENANT, f"--namespace={own}", stdin=created)
    flood, strange = Submitted(nodes, own, "flood"), Submitted(nodes, own, "strange")
    until(lambda: strange.phase == "Failed", waiting_for=strange.told)
    until(lambda: asked(flood) >= FLOOD_ASKED, waiting_for=flood.told)
    until(lambda: reported(job) > before[2], waiting_for=job.told)
    after = memory(nodes, home), leader(home), reported(job)
    found = strange.read()
    for each in (flood, strange):
        nodes.plane.api.delete(f"{JOBS.format(own)}/{each.name}")
    spoken = nodes.plane.api.get(f"/api/v1/namespaces/{own}/events")["items"]
    logs = "".join(nodes.plane.kubectl("logs", pod, f"--namespace={home.namespace}") for pod in operators(home))
    events = tuple(str(event["message"]) for event in spoken if event["involvedObject"]["name"].startswith("strange"))
    return Answered(found, events, logs, *zip(before, after, strict=True))  # type: ignore[arg-type]


def chatting(kind: str) -> dict[str, Any]:
    """A job of one pod with an image of its author's."""
    small = {"image": CHATTER_IMAGE, "gpusPerNode": 1, "cpu": "50m", "memory": "2Gi", "sharedMemory": "16Mi"}
    sections = {
        "metadata": {"name": kind},
        "spec": {
            "parallelism": {"expert": 1},
            "resources": small | {"env": [{"name": "CHATTER", "value": kind}]},
        },
    }
    return merged(example(), sections)


def asked(job: Submitted) -> int:
    """Count the times that the operator has asked the pod of a job."""
    return sum(
        job.nodes.plane.kubectl("logs", pod, f"--namespace={job.namespace}").count("asked") for pod in job.pods()
    )


def reported(job: Submitted) -> int:
    """The steps of a job as the operator knows them."""
    step: int = job.read()["status"].get("progress", {}).get("step", 0)
    return step


def operators(home: Release) -> list[str]:
    """The pods of the operator."""
    listed = home.get("pods?labelSelector=app.kubernetes.io/component=operator")["items"]
    return [pod["metadata"]["name"] for pod in listed]


def leader(home: Release) -> str:
    """The replica that decides."""
    [lease] = home.get("coordination.k8s.io/v1:leases")["items"]
    return str(lease["spec"]["holderIdentity"])


def memory(nodes: Cluster, home: Release) -> int:
    """The most memory that a process of the operator has ever had. [KiB]"""
    pids = [pid for pod in operators(home) for pid in nodes.pids(home.namespace, pod)]
    return max(_peak(Path(f"/proc/{pid}/status").read_text()) for pid in pids)


def _peak(status: str) -> int:
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def strings(value: object) -> Iterator[str]:
    """All texts in JSON, also keys."""
    match value:
        case str():
            yield value
        case dict():
            for key, inner in value.items():
                yield key
                yield from strings(inner)
        case list():
            for inner in value:
                yield from strings(inner)
        case _:
            pass


def test_interim_answers_without_end_and_strange_ones_neither_fill_the_operator_nor_stop_it(answered: Answered) -> None:
    before, after = answered.memory
    assert after - before < 30 * 1024
    assert after < 150 * 1024
    assert answered.leaders[0] == answered.leaders[1]
    assert answered.reported[0] < answered.reported[1]


def test_what_a_pod_says_reaches_status_events_and_logs_without_what_a_terminal_obeys(answered: Answered) -> None:
    said = [*strings(answered.strange["status"]), *answered.events]
    assert any(LAST_WORDS in text for text in said), json.dumps(answered.strange["status"])
    assert [text for text in said if printable_text(text) != text] == []
    assert all(printable_text(line) == line for line in answered.logs.splitlines())


def test_numbers_beyond_all_bounds_are_no_bug_in_a_reconcile(answered: Answered) -> None:
    assert "bug in a reconcile" not in answered.logs
    assert "Traceback" not in answered.logs


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def limited(home: Release) -> Iterator[Release]:
    """The chart with limits on everything; afterwards with its own again."""
    upgraded(home, VALUES | {"limits": ALLOWED})
    yield home
    upgraded(home, VALUES)


def upgraded(home: Release, values: Values) -> None:
    """Return when all pods of the operator have other values: those that end still answer for a moment."""
    before = {*operators(home)}
    home.upgrade(CHART, values)
    until(lambda: before.isdisjoint(operators(home)), waiting_for="the operator's pods to be replaced")


def admit_tenant(plane: ControlPlane, namespace: str) -> None:
    """Let a user create jobs in a namespace, and nothing else."""
    at = f"--namespace={namespace}"
    plane.kubectl("create", "role", "jobs", "--verb=create", "--resource=moetrainingjobs.moejob.dev", at)
    plane.kubectl("create", "rolebinding", "jobs", "--role=jobs", "--user=tenant", at)


def refusal(plane: ControlPlane, namespace: str, case: Limited, *flags: str) -> str:
    """Return what is said to the tenant against a job; nothing when it is created."""
    job = yaml.safe_dump(body(**case.sections))
    return said(plane, "create", "-f", "-", f"--namespace={namespace}", *flags, stdin=job)


def said(plane: ControlPlane, *words: str, stdin: str | None = None) -> str:
    """Return why a command of the tenant's fails; nothing when it works."""
    try:
        plane.kubectl(*words, TENANT, stdin=stdin)
    except KubectlError as refused:
        return str(refused) or "no"
    return ""


def test_one_who_may_only_create_jobs_gets_no_pod_of_what_limits_forbid(
    limited: Release, nodes: Cluster, namespace: str
) -> None:
    del limited
    plane, at = nodes.plane, f"--namespace={namespace}"
    admit_tenant(plane, namespace)
    until(lambda: refusal(plane, namespace, BEYOND[0], "--dry-run=server"), waiting_for="limits to be in force")
    for case in BEYOND:
        assert case.says in refusal(plane, namespace, case), case.id
    listed = (JOBS.format(namespace), f"/api/v1/namespaces/{namespace}/pods")
    assert [plane.api.get(path)["items"] for path in listed] == [[], []]
    for right in ("create pods", "get secrets", "update moetrainingjobs.moejob.dev", "create services"):
        assert said(plane, "auth", "can-i", *right.split(), at), right
    # What a job names no one for is its own: it is created, and its author can read no Secret of it.
    assert refusal(plane, namespace, Limited("a job that names nothing"), "--dry-run=server") == ""
