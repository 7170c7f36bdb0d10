"""Lives of jobs on two real nodes: watched, left alone, stopped, moved to another layout, made to wait, refused.

Two lives tell most of it. `steady` keeps its pods while the operator is upgraded, taken away and put back, and trains
where there is none; its losses are those of a run that nothing happened to. `wide` is stopped halfway; `narrow`, which
had to wait for its processors, continues its run in another layout, and `wide` continues in its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from builders import merge_sections
from charts import CHART
from cluster.control_plane.api import RefusedError
from cluster.control_plane.plane import ControlPlane, KubectlError
from cluster.control_plane.releases import DEFINITION, Release
from cluster.nodes.cluster import Cluster, shell_image
from cluster.nodes.faults import pause_rank, resume_rank, standing_still
from cluster.nodes.kubectl_output import compare_with_file, normalise_description, normalise_table
from cluster.nodes.node import Programs
from cluster.nodes.pods import build_claim
from cluster.nodes.recovery import GangPod, find_gang_pods
from cluster.nodes.training import ROOT, VALUES, Job, SubmittedJob, over_two_nodes, read_example, submit_job
from cluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# Few: a rank stands still while operators come and go, which hundreds of steps would fill else.
STEADY_STEPS = 60
STEPS = 24
SAVED_EVERY = 5
# Two stages instead of shared experts, on a volume that is there already.
STAGES: dict[str, Any] = {"parallelism": {"expert": 1, "pipeline": 2}, "storage": {"size": None, "claimName": "runs"}}
RESUMING: dict[str, Any] = {"checkpoint": {"resumeFrom": "pvc://wide-storage/wide", "resume": "Run"}}
# What kubectl was asked, and what it said.
Screens = list[tuple[str, str]]
GROUP_PROTECTION = "scheduling.k8s.io/podgroup-protection"
OPERATORS = "labelSelector=app.kubernetes.io/component=operator"
WRONG = ROOT / "examples" / "wrong"
# Ends when it is asked to, or when a file says so, as a trainer does that has finished.
HOLDER = "moejob.test/holder:1"
HOLDS = "trap 'exit 143' TERM; until [ -e /moejob/done ]; do sleep 0.1; done"


def build_job(name: str, steps: int, **sections: Any) -> Job:
    """The example over two nodes. Its rate knows no end of the run: runs of other lengths take the same steps."""
    base_job = over_two_nodes(read_example())
    spec = base_job["spec"]
    spec["data"] |= {"maxLength": 64}
    spec["training"] |= {"maxSteps": steps, "evalEvery": None, "scheduler": {"kind": "Constant"}}
    spec["checkpoint"] = {"everySteps": SAVED_EVERY, "exportHuggingFace": False}
    spec["storage"] = {"size": "2Gi"}
    return base_job | {"metadata": {"name": name}, "spec": merge_sections(spec, sections)}


def read_screens(submitted_job: SubmittedJob) -> Screens:
    """Return what people see of a job."""
    kubectl, at = submitted_job.nodes.plane.kubectl, f"--namespace={submitted_job.namespace}"
    resource = ("mtj", submitted_job.name)
    return [
        (f"get mtj {submitted_job.name}", normalise_table(kubectl("get", *resource, at))),
        (
            f"get mtj {submitted_job.name} --output=wide",
            normalise_table(kubectl("get", *resource, at, "--output=wide")),
        ),
        (f"describe mtj {submitted_job.name}", normalise_description(kubectl("describe", *resource, at))),
    ]


def assert_golden(name: str, submitted_job: SubmittedJob, sections: Screens) -> None:
    """The same as in the file, but for what moves."""
    shown, expected = compare_with_file(name, sections, submitted_job.namespace)
    assert shown == expected


@pytest.fixture(scope="module")
def namespace(nodes: Cluster) -> Iterator[str]:
    """One for all jobs that train here, which share a volume."""
    with temporary_namespace(nodes.plane) as made:
        yield made


@contextmanager
def temporary_namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace that is gone afterwards, and says what is stuck when it is not."""
    created = plane.api.create("/api/v1/namespaces", {"metadata": {"generateName": "lives-"}})
    name: str = created["metadata"]["name"]
    until(lambda: plane.has_service_account(name), waiting_for=f"a service account in {name}")
    try:
        yield name
    finally:
        if exists(plane, f"/api/v1/namespaces/{name}"):
            plane.api.delete(f"/api/v1/namespaces/{name}")
        await_end_of_namespace(plane, name)


def await_end_of_namespace(plane: ControlPlane, name: str) -> None:
    """Return when it is gone."""
    path = f"/api/v1/namespaces/{name}"
    until(
        lambda: not exists(plane, path),
        waiting_for=lambda: f"the end of {name}: {plane.api.get(path)['status']}",
    )


def exists(plane: ControlPlane, path: str) -> bool:
    try:
        plane.api.get(path)
    except RefusedError as refused:
        if refused.reason == "NotFound":
            return False
        raise
    return True


# --- jobs that compete for GPUs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def holder(nodes: Cluster, node_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image that stands in for a trainer where a job asks for GPUs, of which these nodes have none to compute on."""
    archive = shell_image(tmp_path_factory.mktemp("holder") / "holder.tar", node_programs, HOLDS, user="65532")
    nodes.load_images({HOLDER: archive})
    return HOLDER


def build_gpu_job(name: str, image: str) -> Job:
    """Two pods of five GPUs: two such jobs want more than the sixteen of both nodes, and a node holds one pod."""
    # The plan would request 20 cores and 20 GiB, which no machine under the nodes need have; it cannot see this model.
    gpus = {"accelerator": "GPU", "gpusPerNode": 5, "cpu": "50m", "memory": "64Mi", "image": image}
    sections = {"model": {"source": "example/unpublished"}, "training": {"globalBatchSize": 10}}
    return build_job(name, STEPS, parallelism={"expert": 1, "data": 10}, resources=gpus, **sections)


def test_of_two_jobs_that_each_want_more_than_half_the_gpus_one_waits_whole_until_the_other_has_ended(
    nodes: Cluster, home: Release, holder: str
) -> None:
    del home
    with temporary_namespace(nodes.plane) as namespace:
        jobs = [submit_job(nodes, namespace, build_gpu_job(name, holder)) for name in ("one", "two")]
        [first] = until(lambda: [each for each in jobs if each.phase == "Running"], waiting_for=jobs[0].describe)
        [second] = (each for each in jobs if each is not first)
        why = until(lambda: unschedulable_reason(second), waiting_for=second.describe)
        assert "Insufficient nvidia.com/gpu" in why
        assert sorted(first.pod_nodes().values()) == ["node-1", "node-2"]
        assert list(second.pod_nodes().values()) == ["", ""]
        ended = finish_job(first)
        until(lambda: second.phase == "Running", waiting_for=second.describe)
        assert sorted(second.pod_nodes().values()) == ["node-1", "node-2"]
        assert all(started >= max(ended) for started in scheduled_times(second))
        finish_job(second)


def finish_job(job: SubmittedJob) -> list[str]:
    """End its pods as trainers end that are done; when they did."""
    (job.run().folder.parent / "done").touch()
    until(lambda: job.phase == "Succeeded", waiting_for=job.describe)
    states = [pod["status"]["containerStatuses"][0]["state"] for pod in job.list_pods()]
    return [state["terminated"]["finishedAt"] for state in states]


def scheduled_times(job: SubmittedJob) -> list[str]:
    """Return when its pods got their nodes."""
    conditions = [condition for pod in job.list_pods() for condition in pod["status"]["conditions"]]
    return [condition["lastTransitionTime"] for condition in conditions if condition["type"] == "PodScheduled"]


# --- jobs that fit nowhere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        pytest.param("llama-70b-grpo-16gpu", "GiB", id="its GPUs are too small"),
        pytest.param("qwen3-235b-sft-last-stage", "94 layers", id="its layers do not divide"),
    ],
)
def test_a_job_that_cannot_fit_is_refused_and_what_is_suggested_is_accepted_as_it_is_printed(
    nodes: Cluster, home: Release, namespace: str, wrong: str, says: str
) -> None:
    del home
    refused = yaml.safe_load((WRONG / f"{wrong}.yaml").read_text())
    with pytest.raises(KubectlError, match=r'admission webhook "validate\.moejob\.dev" denied the request') as refusal:
        submit_job(nodes, namespace, refused)
    message = str(refusal.value)
    assert says in message
    printed = re.findall(r"(parallelism: \{.*?\}) on (\d+) GPUs", message)
    assert len(printed) >= 3
    for number, (layout, gpus) in enumerate(printed):
        # No cluster of ours has these GPUs: it is accepted, and waits to be started.
        spec = merge_sections(refused["spec"], {"lifecycle": {"suspend": True}}) | yaml.safe_load(layout)
        fits = submit_job(nodes, namespace, refused | {"metadata": {"name": f"fits-{number}"}, "spec": spec})
        until(lambda: fits.phase == "Suspended", waiting_for="the operator")  # noqa: B023
        status = fits.read()["status"]
        assert {said["type"]: said["status"] for said in status["conditions"]}["Accepted"] == "True"
        assert status["layout"]["gpus"] == int(gpus)
        nodes.plane.kubectl("delete", "mtj", fits.name, f"--namespace={namespace}")


# --- a job that is left alone ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobWithoutOperator:
    """Observations while there was no operator."""

    # Steps done when it was gone, and some time later.
    alone: int
    later: int
    # What Kubernetes keeps from being deleted until a finalizer is removed.
    finalizers: dict[str, list[str]]
    is_defined: bool


@dataclass(frozen=True)
class SteadyJob:
    """A job, and what was seen on its way."""

    job: SubmittedJob
    running: Screens
    finished: Screens
    # UIDs of its pods: before anything was done, after the upgrade, with the next operator, at the end.
    pods: list[dict[str, str]]
    # UIDs of the operator's pods: before and after the upgrade.
    operators: list[dict[str, str]]
    unwatched: JobWithoutOperator


@pytest.fixture(scope="module")
def held_job(nodes: Cluster, home: Release, holder: str) -> Iterator[SubmittedJob]:
    """A job in a namespace of its own, which runs and does not end."""
    del home
    with temporary_namespace(nodes.plane) as namespace:
        running = submit_job(nodes, namespace, build_gpu_job("held", holder))
        until(lambda: running.phase == "Running", waiting_for=running.describe)
        yield running


@pytest.fixture(scope="module")
def steady_job(nodes: Cluster, home: Release, namespace: str, held_job: SubmittedJob) -> SteadyJob:
    """It lives through an upgrade of the operator, trains while there is none, and ends under the next one."""
    steady_job = submit_job(
        nodes, namespace, build_job("steady", STEADY_STEPS, checkpoint={"everySteps": STEADY_STEPS - 10})
    )
    until(lambda: steady_job.phase == "Running", waiting_for=steady_job.describe)
    steady_job.await_steps(2)
    pods, operators = [steady_job.pod_uids()], [operator_pods(nodes, home)]
    member = find_gang_pods(steady_job)[1]
    with standing_still(member):
        home.upgrade(CHART, VALUES | {"settings": {"logLevel": "DEBUG"}})
        await_end_of_operators(nodes, home, operators[0])
        pods.append(steady_job.pod_uids())
        operators.append(operator_pods(nodes, home))
        until(lambda: steady_job.read()["status"].get("progress"), waiting_for=steady_job.describe)
        running = read_screens(steady_job)
        with uninstall_operator(nodes, home):
            unwatched = observe_without_operator(steady_job, held_job, member)
    pods.append(steady_job.pod_uids())
    steady_job.await_end()
    pods.append(steady_job.pod_uids())
    return SteadyJob(steady_job, running, read_screens(steady_job), pods, operators, unwatched)


@contextmanager
def uninstall_operator(nodes: Cluster, home: Release) -> Iterator[None]:
    """There is no operator meanwhile."""
    home.helm("uninstall")
    try:
        await_end_of_operators(nodes, home, operator_pods(nodes, home))
        yield
    finally:
        home.install(VALUES)


def observe_without_operator(steady_job: SubmittedJob, held_job: SubmittedJob, member: GangPod) -> JobWithoutOperator:
    """Some steps of one job, a member of which stood still, and the end of the other with its namespace."""
    nodes, alone = steady_job.nodes, steady_job.run().last_step()
    finalizers = {**finalizers_of(nodes, steady_job.namespace), **finalizers_of(nodes, held_job.namespace)}
    resume_rank(member)
    until(lambda: steady_job.run().last_step() >= alone + 5, waiting_for=steady_job.describe)
    pause_rank(member)
    later = steady_job.run().last_step()
    nodes.plane.api.delete(f"/api/v1/namespaces/{held_job.namespace}")
    await_end_of_namespace(nodes.plane, held_job.namespace)
    return JobWithoutOperator(alone, later, finalizers, exists(nodes.plane, DEFINITION))


def await_end_of_operators(nodes: Cluster, home: Release, named: Collection[str]) -> None:
    """Return when none of these pods is left."""
    until(
        lambda: not set(named) & set(operator_pods(nodes, home)),
        waiting_for=lambda: f"the end of {sorted(named)}",
    )


def operator_pods(nodes: Cluster, home: Release) -> dict[str, str]:
    """Their UIDs."""
    listed = nodes.plane.api.get(f"/api/v1/namespaces/{home.namespace}/pods?{OPERATORS}")["items"]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in listed}


def finalizers_of(nodes: Cluster, namespace: str) -> dict[str, list[str]]:
    """Of every object that moejob has made, or was given, in a namespace."""
    kinds = "mtj,pod,service,podgroups.scheduling.k8s.io"
    listed = yaml.safe_load(nodes.plane.kubectl("get", kinds, f"--namespace={namespace}", "--output=json"))["items"]
    return {f"{found['kind']}/{found['metadata']['name']}": found["metadata"].get("finalizers", []) for found in listed}


def test_an_upgrade_of_the_chart_changes_every_operator_pod_and_no_pod_of_a_job(steady_job: SteadyJob) -> None:
    before, after = steady_job.operators
    assert len(before) == len(after) == 2
    assert not set(before.values()) & set(after.values())
    assert len(steady_job.pods[0]) == 2
    assert steady_job.pods[1] == steady_job.pods[0]


def test_without_an_operator_a_job_trains_on_and_its_definition_stays(steady_job: SteadyJob) -> None:
    assert steady_job.unwatched.alone + 5 <= steady_job.unwatched.later < STEADY_STEPS
    assert steady_job.unwatched.is_defined


def test_nothing_waits_for_an_operator_to_be_deleted(steady_job: SteadyJob) -> None:
    """And a namespace with a job that ran was deleted while there was none."""
    found = steady_job.unwatched.finalizers
    assert {name.partition("/")[0] for name in found} == {"MoETrainingJob", "Pod", "Service", "PodGroup"}
    # Kubernetes keeps the group of a gang as long as there are pods of it, and lets it go by itself.
    own = {"PodGroup/held", "PodGroup/steady"}
    assert {name: kept for name, kept in found.items() if kept} == {name: [GROUP_PROTECTION] for name in own}


def test_the_next_operator_takes_a_job_over_to_its_good_end(steady_job: SteadyJob) -> None:
    status = steady_job.job.read()["status"]
    assert status["phase"] == "Succeeded"
    assert (status["progress"]["step"], status["restarts"]["total"], status["restarts"]["pods"]) == (STEADY_STEPS, 0, 0)
    assert steady_job.pods[2] == steady_job.pods[3] == steady_job.pods[0]


def test_every_step_was_done_once_whatever_became_of_the_operator(steady_job: SteadyJob) -> None:
    assert steady_job.job.run().steps() == [(0, 0, step) for step in range(1, STEADY_STEPS + 1)]


@pytest.mark.parametrize("state", ["running", "finished"])
def test_kubectl_shows_a_job(steady_job: SteadyJob, state: str) -> None:
    assert_golden(state, steady_job.job, getattr(steady_job, state))


def test_kubectl_explains_a_job(nodes: Cluster, steady_job: SteadyJob) -> None:
    asked = ("mtj", "mtj.spec.parallelism", "mtj.status.restarts")
    assert_golden(
        "explain", steady_job.job, [(f"explain {path}", nodes.plane.kubectl("explain", path)) for path in asked]
    )


# --- a job that is stopped, and one that takes its place --------------------------------------------------------------


@dataclass(frozen=True)
class MovedJob:
    """A job that was stopped, the one that went on with its run, and what was seen on the way."""

    wide: SubmittedJob
    narrow: SubmittedJob
    # Why the second one waited and where its pods were meanwhile; then what the first one left when it had stopped.
    waited: str
    waited_on: list[str]
    saved: set[int]
    stopped_at: int
    stopped_pods: dict[str, str]
    claim: Mapping[str, Any]
    suspended: Screens


@pytest.fixture(scope="module")
def moved_job(nodes: Cluster, steady_job: SteadyJob, namespace: str) -> MovedJob:
    """The processors are enough for one of them at a time."""
    del steady_job  # They would be three.
    nodes.plane.api.create(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", build_claim("runs", "2Gi", None))
    wide = submit_job(nodes, namespace, build_job("wide", STEPS))
    until(lambda: wide.phase == "Running", waiting_for=wide.describe)
    narrow = submit_job(nodes, namespace, build_job("narrow", STEPS, **STAGES, **RESUMING))
    waited = until(lambda: unschedulable_reason(narrow), waiting_for=narrow.describe)
    waited_on = list(narrow.pod_nodes().values())

    until(lambda: wide.run().checkpoints(), waiting_for=wide.describe)
    # The step after the one in which it was saved tells of it.
    wide.await_steps(2)
    # Or its last word may be the first that is heard of it.
    with standing_still(find_gang_pods(wide)[1]):
        until(wide.has_reported_checkpoint, waiting_for=wide.describe)
    wide.await_steps(1)
    wide.set_suspended()
    until(lambda: wide.phase == "Suspended" and not wide.pod_uids(), waiting_for=wide.describe)
    kept = nodes.plane.api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/wide-storage")
    saved, stopped_at, suspended = {*wide.run().checkpoints()}, wide.run().last_step(), read_screens(wide)
    stopped = wide.pod_uids()
    narrow.await_end()
    wide.set_suspended(suspended=False)
    wide.await_end()
    return MovedJob(wide, narrow, waited, waited_on, saved, stopped_at, stopped, kept, suspended)


def unschedulable_reason(job: SubmittedJob) -> str:
    """Return what it says when there is no room for it."""
    why = job.running_reason()
    return why if why.startswith("Unschedulable") else ""


def test_a_job_for_which_there_is_no_room_says_so_and_takes_none(moved_job: MovedJob) -> None:
    assert "Insufficient cpu" in moved_job.waited
    assert moved_job.waited_on == ["", ""]


def test_a_suspended_job_has_saved_its_last_step_and_keeps_its_volume_alone(moved_job: MovedJob) -> None:
    assert SAVED_EVERY < moved_job.stopped_at < STEPS
    assert max(moved_job.saved) == moved_job.stopped_at
    assert moved_job.stopped_pods == {}
    assert moved_job.claim["status"]["phase"] == "Bound"


def test_it_goes_on_from_there_with_the_losses_of_a_run_that_was_never_stopped(
    moved_job: MovedJob, steady_job: SteadyJob
) -> None:
    run = moved_job.wide.run()
    assert [step for _, _, step in run.steps()] == list(range(1, STEPS + 1))
    assert [attempt for attempt, _, step in run.steps() if step > moved_job.stopped_at] == [1] * (
        STEPS - moved_job.stopped_at
    )
    assert run.losses() == pytest.approx(undisturbed(steady_job, run.losses()), rel=1e-6)


def test_another_job_goes_on_with_it_in_another_layout_with_the_same_losses(
    moved_job: MovedJob, steady_job: SteadyJob
) -> None:
    """Two stages instead of shared experts: sums are rounded in another order, and every step carries that on."""
    assert [moved_job.wide.read()["status"]["layout"][size] for size in ("expert", "pipeline")] == [2, 1]
    assert [moved_job.narrow.read()["status"]["layout"][size] for size in ("expert", "pipeline")] == [1, 2]
    run = moved_job.narrow.run()
    assert list(run.losses()) == list(range(moved_job.stopped_at + 1, STEPS + 1))
    assert run.losses() == pytest.approx(undisturbed(steady_job, run.losses()), rel=1e-4)


def undisturbed(steady_job: SteadyJob, steps: Mapping[int, float]) -> dict[int, float]:
    losses = steady_job.job.run().losses()
    return {step: losses[step] for step in steps}


def test_kubectl_shows_a_suspended_job(moved_job: MovedJob) -> None:
    assert_golden("suspended", moved_job.wide, moved_job.suspended)


def test_a_job_of_a_name_that_was_taken_is_told_how_to_go_on_with_what_lies_there(
    nodes: Cluster, moved_job: MovedJob, namespace: str
) -> None:
    """As by those who delete a job to change its layout, on a volume that outlives it. No rank is ever started."""
    first = moved_job.narrow.read()["metadata"]["uid"]
    nodes.plane.kubectl("delete", "mtj", "narrow", f"--namespace={namespace}")
    until(lambda: not moved_job.narrow.pod_nodes(), waiting_for="the end of its pods")
    one_pod = {"gpusPerNode": 2}
    again = submit_job(nodes, namespace, build_job("narrow", STEPS, resources=one_pod, storage=STAGES["storage"]))
    until(lambda: again.phase == "Failed", waiting_for=again.describe)
    until(lambda: failed_pods(again) == 1, waiting_for=again.describe)
    failure = again.read()["status"]["lastFailure"]
    assert (failure["exitCode"], failure["reason"]) == (78, "BadConfiguration")
    assert f"belongs to job narrow (uid {first})" in failure["message"]
    assert "checkpoint.resumeFrom narrow and resume Run" in failure["message"]
    assert again.run().last_step() == STEPS, "what lies there is as it was"
    # Whether the pod was seen to run, or asked how it is, before it failed is a race without a right winner.
    raced = re.compile(r"^ *(?:Rank Restarts|Starting Seconds|Lost Seconds|Lost Gpu Hours): .*\n", re.MULTILINE)
    shown = [(asked, raced.sub("", said)) for asked, said in read_screens(again)]
    assert_golden("failed", again, shown)


def failed_pods(of: SubmittedJob) -> int:
    """As its status counts them, a moment after it has failed."""
    [trainers] = of.read()["status"]["replicaStatuses"]
    failed: int = trainers["failed"]
    return failed
