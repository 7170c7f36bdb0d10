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

from builders import merge_sections
from charts import CHART, Values
from cluster.control_plane.jobs import body
from cluster.control_plane.plane import ControlPlane, KubectlError
from cluster.control_plane.releases import Release
from cluster.extent import in_full
from cluster.nodes.cluster import Cluster
from cluster.nodes.images import write_variant
from cluster.nodes.pods import VOLUME
from cluster.nodes.strangers import ProbePod, Try, await_address, count_connections, make_namespace, start_stranger
from cluster.nodes.test_strangers import IMAGE, build_endless_job
from cluster.nodes.training import JOBS, VALUES, VERSION, SubmittedJob, read_example, submit_job
from cluster.waiting import until
from images import build_image
from limit_cases import ALLOWED, BEYOND, LimitCase
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
class CrowdResults:
    """A launcher that joined while strangers held the ports of the first one."""

    # Connections at each port of pod 0 just before the launcher came.
    connections_held: Mapping[int, int]
    # UIDs before and after.
    first: tuple[str, str]
    joined: tuple[str, str]
    # Steps before and after: in the run's log, and as the operator has heard of them.
    steps_done: tuple[int, int]
    steps_reported: tuple[int, int]
    outcomes: Mapping[Try, str]


@pytest.fixture(scope="module")
def tenant_namespace(nodes: Cluster, home: Release) -> Iterator[str]:
    """The namespace of all of them."""
    del home
    with make_namespace(nodes) as name:
        yield name


@pytest.fixture(scope="module")
def job(nodes: Cluster, tenant_namespace: str) -> Iterator[SubmittedJob]:
    """A job of two launchers that trains."""
    found = submit_job(
        nodes, tenant_namespace, merge_sections(build_endless_job(), {"spec": {"checkpoint": {"everySteps": 20}}})
    )
    until(lambda: found.phase == "Running", waiting_for=found.describe)
    until(lambda: found.run().last_step() > 0, waiting_for=found.describe)
    yield found
    nodes.plane.api.delete(f"{JOBS.format(tenant_namespace)}/{found.name}")


@pytest.fixture(scope="module")
def neighbour_pod(nodes: Cluster, tenant_namespace: str, job: SubmittedJob) -> ProbePod:
    """A pod in the namespace of the job, on its claim."""
    return start_stranger(nodes, tenant_namespace, IMAGE, "node-1", claim=f"{job.name}-storage")


@pytest.fixture(scope="module")
def crowd_results(nodes: Cluster, tenant_namespace: str, job: SubmittedJob, neighbour_pod: ProbePod) -> CrowdResults:
    """Crowd the first launcher, let another come, and stay until the job has trained and its status says so."""
    before, first, last = job.pod_uids(), min(job.pod_nodes()), max(job.pod_nodes())
    host = await_address(nodes, tenant_namespace, first)
    crowds = [("crowd", host, port) for port in MOST]
    with ThreadPoolExecutor() as threads:
        pending_tries = [threads.submit(neighbour_pod.run_tries, [crowd]) for crowd in crowds]
        for port, most in MOST.items():
            await_crowd(nodes, tenant_namespace, first, port, most)
        connections_held = {port: count_connections(nodes, tenant_namespace, first, port) for port in MOST}
        nodes.plane.kubectl("delete", "pod", last, f"--namespace={tenant_namespace}")
        until(lambda: job.pod_uids().get(last, before[last]) != before[last], waiting_for=job.describe)
        done, heard = job.run().last_step(), reported_steps(job)
        until(lambda: job.run().last_step() > done, waiting_for=job.describe)
        until(lambda: reported_steps(job) > heard, waiting_for=job.describe)
        after = job.pod_uids()
        assert not any(each.done() for each in pending_tries), [each.result() for each in pending_tries if each.done()]
        nodes.plane.kubectl("exec", neighbour_pod.pod, f"--namespace={tenant_namespace}", "--", "touch", "/tmp/enough")
        outcomes = {crowd: answer for each in pending_tries for crowd, answer in each.result().items()}
    return CrowdResults(
        connections_held,
        (before[first], after[first]),
        (before[last], after[last]),
        (done, job.run().last_step()),
        (heard, reported_steps(job)),
        outcomes,
    )


def await_crowd(nodes: Cluster, namespace: str, pod: str, port: int, most: int) -> None:
    until(lambda: count_connections(nodes, namespace, pod, port) >= most, waiting_for=f"a crowd at {port}")


def test_a_launcher_joins_and_the_operator_hears_of_steps_past_a_crowd_that_says_nothing(
    crowd_results: CrowdResults,
) -> None:
    assert crowd_results.first[0] == crowd_results.first[1]
    assert crowd_results.joined[0] != crowd_results.joined[1]
    assert crowd_results.steps_done[0] < crowd_results.steps_done[1]
    assert crowd_results.steps_reported[0] < crowd_results.steps_reported[1]
    # Each was turned away again and again.
    for (_, _, port), answer in crowd_results.outcomes.items():
        assert int(answer.removeprefix("opened ")) > MOST[port], answer


def test_a_claim_that_another_writes_on_the_volume_of_a_job_supersedes_no_run_and_keeps_none_from_starting(
    nodes: Cluster, tenant_namespace: str, job: SubmittedJob, neighbour_pod: ProbePod, crowd_results: CrowdResults
) -> None:
    del crowd_results
    folder = f"{VOLUME}/{job.name}/{RunFile.CLAIMS}"
    [listed] = neighbour_pod.run_tries([("claim", folder, FAR)]).values()
    assert f"{FAR}.{FAR}" in listed.split()
    saved = max(job.run().checkpoints(), default=0)
    until(lambda: max(job.run().checkpoints(), default=0) > saved, waiting_for=job.describe)
    attempt = job.read()["status"]["attempt"]
    # A new attempt, which reads all claims before it starts.
    nodes.plane.kubectl("delete", "pod", min(job.pod_nodes()), f"--namespace={tenant_namespace}")
    until(lambda: job.read()["status"]["attempt"] > attempt and job.phase == "Running", waiting_for=job.describe)
    saved = max(job.run().checkpoints())
    until(lambda: max(job.run().checkpoints()) > saved, waiting_for=job.describe)
    logs = nodes.plane.kubectl("logs", min(job.pod_nodes()), f"--namespace={tenant_namespace}")
    assert "claims that are not proven to be this job's are ignored" in logs
    assert f"{FAR}.{FAR}" in logs


# --- jobs that mean harm to the operator ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatterResults:
    """The operator after it asked pods that answer with what they like."""

    strange: Mapping[str, Any]
    events: tuple[str, ...]
    logs: str
    # Of its processes that need most, before and after. [KiB]
    memory: tuple[int, int]
    leaders: tuple[str, str]
    # Steps of another's job that it heard of meanwhile.
    steps_reported: tuple[int, int]


@pytest.fixture(scope="module")
def chatter_results(
    nodes: Cluster,
    home: Release,
    tenant_namespace: str,
    job: SubmittedJob,
    tmp_path_factory: pytest.TempPathFactory,
) -> ChatterResults:
    """Have a tenant create two jobs, whose pods the operator asks as it asks all."""
    start = {"Entrypoint": ["python", "-c", CHATTER], "Cmd": ()}
    nodes.load_images(
        {CHATTER_IMAGE: write_variant(tmp_path_factory.mktemp("chatter") / "image", build_image("trainer-cpu"), start)}
    )
    admit_tenant(nodes.plane, tenant_namespace)
    before = measure_peak_memory(nodes, home), find_leader(home), reported_steps(job)
    for kind in ("flood", "strange"):
        created = yaml.safe_dump(build_chatter_job(kind))
        nodes.plane.kubectl("create", "-f", "-", TENANT, f"--namespace={tenant_namespace}", stdin=created)
    flood, strange = SubmittedJob(nodes, tenant_namespace, "flood"), SubmittedJob(nodes, tenant_namespace, "strange")
    until(lambda: strange.phase == "Failed", waiting_for=strange.describe)
    until(lambda: count_questions(flood) >= FLOOD_ASKED, waiting_for=flood.describe)
    until(lambda: reported_steps(job) > before[2], waiting_for=job.describe)
    after = measure_peak_memory(nodes, home), find_leader(home), reported_steps(job)
    strange_job = strange.read()
    for each in (flood, strange):
        nodes.plane.api.delete(f"{JOBS.format(tenant_namespace)}/{each.name}")
    events_listed = nodes.plane.api.get(f"/api/v1/namespaces/{tenant_namespace}/events")["items"]
    logs = "".join(nodes.plane.kubectl("logs", pod, f"--namespace={home.namespace}") for pod in operator_pods(home))
    events = tuple(
        str(event["message"]) for event in events_listed if event["involvedObject"]["name"].startswith("strange")
    )
    return ChatterResults(strange_job, events, logs, *zip(before, after, strict=True))  # type: ignore[arg-type]


def build_chatter_job(kind: str) -> dict[str, Any]:
    """A job of one pod with an image of its author's."""
    small = {"image": CHATTER_IMAGE, "gpusPerNode": 1, "cpu": "50m", "memory": "2Gi", "sharedMemory": "16Mi"}
    sections = {
        "metadata": {"name": kind},
        "spec": {
            "parallelism": {"expert": 1},
            "resources": small | {"env": [{"name": "CHATTER", "value": kind}]},
        },
    }
    return merge_sections(read_example(), sections)


def count_questions(job: SubmittedJob) -> int:
    """Count the times that the operator has asked the pod of a job."""
    return sum(
        job.nodes.plane.kubectl("logs", pod, f"--namespace={job.namespace}").count("asked") for pod in job.pod_nodes()
    )


def reported_steps(job: SubmittedJob) -> int:
    """The steps of a job as the operator knows them."""
    step: int = job.read()["status"].get("progress", {}).get("step", 0)
    return step


def operator_pods(home: Release) -> list[str]:
    """The pods of the operator."""
    listed = home.get("pods?labelSelector=app.kubernetes.io/component=operator")["items"]
    return [pod["metadata"]["name"] for pod in listed]


def find_leader(home: Release) -> str:
    """The replica that decides."""
    [lease] = home.get("coordination.k8s.io/v1:leases")["items"]
    return str(lease["spec"]["holderIdentity"])


def measure_peak_memory(nodes: Cluster, home: Release) -> int:
    """The most memory that a process of the operator has ever had. [KiB]"""
    pids = [pid for pod in operator_pods(home) for pid in nodes.pids(home.namespace, pod)]
    return max(_parse_peak(Path(f"/proc/{pid}/status").read_text()) for pid in pids)


def _parse_peak(status: str) -> int:
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def iterate_strings(value: object) -> Iterator[str]:
    """All texts in JSON, also keys."""
    match value:
        case str():
            yield value
        case dict():
            for key, inner in value.items():
                yield key
                yield from iterate_strings(inner)
        case list():
            for inner in value:
                yield from iterate_strings(inner)
        case _:
            pass


def test_interim_answers_without_end_and_strange_ones_neither_fill_the_operator_nor_stop_it(
    chatter_results: ChatterResults,
) -> None:
    before, after = chatter_results.memory
    assert after - before < 30 * 1024
    assert after < 150 * 1024
    assert chatter_results.leaders[0] == chatter_results.leaders[1]
    assert chatter_results.steps_reported[0] < chatter_results.steps_reported[1]


def test_what_a_pod_says_reaches_status_events_and_logs_without_what_a_terminal_obeys(
    chatter_results: ChatterResults,
) -> None:
    said = [*iterate_strings(chatter_results.strange["status"]), *chatter_results.events]
    assert any(LAST_WORDS in text for text in said), json.dumps(chatter_results.strange["status"])
    assert [text for text in said if printable_text(text) != text] == []
    assert all(printable_text(line) == line for line in chatter_results.logs.splitlines())


def test_numbers_beyond_all_bounds_are_no_bug_in_a_reconcile(chatter_results: ChatterResults) -> None:
    assert "bug in a reconcile" not in chatter_results.logs
    assert "Traceback" not in chatter_results.logs


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def limited_release(home: Release) -> Iterator[Release]:
    """The chart with limits on everything; afterwards with its own again."""
    upgrade_release(home, VALUES | {"limits": ALLOWED})
    yield home
    upgrade_release(home, VALUES)


def upgrade_release(home: Release, values: Values) -> None:
    """Return when all pods of the operator have other values: those that end still answer for a moment."""
    before = {*operator_pods(home)}
    home.upgrade(CHART, values)
    until(lambda: before.isdisjoint(operator_pods(home)), waiting_for="the operator's pods to be replaced")


def admit_tenant(plane: ControlPlane, namespace: str) -> None:
    """Let a user create jobs in a namespace, and nothing else."""
    at = f"--namespace={namespace}"
    plane.kubectl("create", "role", "jobs", "--verb=create", "--resource=moetrainingjobs.moejob.dev", at)
    plane.kubectl("create", "rolebinding", "jobs", "--role=jobs", "--user=tenant", at)


def find_job_refusal(plane: ControlPlane, namespace: str, case: LimitCase, *flags: str) -> str:
    """Return what is said to the tenant against a job; nothing when it is created."""
    job = yaml.safe_dump(body(**case.sections))
    return find_command_refusal(plane, "create", "-f", "-", f"--namespace={namespace}", *flags, stdin=job)


def find_command_refusal(plane: ControlPlane, *words: str, stdin: str | None = None) -> str:
    """Return why a command of the tenant's fails; nothing when it works."""
    try:
        plane.kubectl(*words, TENANT, stdin=stdin)
    except KubectlError as refused:
        return str(refused) or "no"
    return ""


def test_one_who_may_only_create_jobs_gets_no_pod_of_what_limits_forbid(
    limited_release: Release, nodes: Cluster, namespace: str
) -> None:
    del limited_release
    plane, at = nodes.plane, f"--namespace={namespace}"
    admit_tenant(plane, namespace)
    until(
        lambda: find_job_refusal(plane, namespace, BEYOND[0], "--dry-run=server"), waiting_for="limits to be in force"
    )
    for case in BEYOND:
        assert case.says in find_job_refusal(plane, namespace, case), case.id
    listed = (JOBS.format(namespace), f"/api/v1/namespaces/{namespace}/pods")
    assert [plane.api.get(path)["items"] for path in listed] == [[], []]
    for right in ("create pods", "get secrets", "update moetrainingjobs.moejob.dev", "create services"):
        assert find_command_refusal(plane, "auth", "can-i", *right.split(), at), right
    # What a job names no one for is its tenant_namespace: it is created, and its author can read no Secret of it.
    assert find_job_refusal(plane, namespace, LimitCase("a job that names nothing"), "--dry-run=server") == ""
