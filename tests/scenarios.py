"""Everything that happens to a job, as one table: each row a story of verbs, and what is to be seen after each of them.

The stories know nothing of how the operator works. A test that runs them brings a world with these verbs and settles
after every one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest

from fake_world import World
from moejob_api.contract.pods import ExitCode, PodOutcome, PodRole, RankFault, TerminationMessage
from moejob_api.job.status import ConditionType, Status
from moejob_api.profiles.fields import ProfileKind

Verb = Callable[[World], None]


@dataclass(frozen=True)
class Expected:
    """The status to be seen; what is None does not matter here."""

    phase: str | None = None
    pods: str | None = None
    engines: str | None = None
    attempt: int | None = None
    # Failures charged since the last checkpoint.
    spent: int | None = None
    uncounted: int | None = None
    # Reason of condition Running: what the job waits for.
    why: str | None = None
    says: str = ""
    failure: str | None = None


@dataclass(frozen=True)
class Scenario:
    """One story. `job` is laid over a small job of two pods; `apis` are the gang APIs of the cluster."""

    id: str
    story: tuple[tuple[Verb, Expected], ...]
    job: Mapping[str, Any] = field(default_factory=dict)
    apis: frozenset[str] = frozenset()


def scenario(title: str, /, *story: tuple[Verb, Expected], apis: frozenset[str] = frozenset(), **job: Any) -> Scenario:
    """A story; sections of the job are keywords."""
    return Scenario(title, story, job, apis)


def play_scenario(scenario: Scenario, world: World) -> World:
    """A whole story in a new world, with everything seen that was to be seen. Returns the world after it."""
    world.apply(**scenario.job)
    for number, (verb, see) in enumerate(scenario.story):
        verb(world)
        world.settle()
        _check_status(world, see, number)
    return world


def _check_status(world: World, see: Expected, number: int) -> None:
    """Compare what is there with what is to be seen."""
    if see.phase == "gone" or world.is_gone:
        assert (see.phase, world.is_gone) == ("gone", True), f"step {number}"
        return
    restarts = world.status.restarts
    failure = world.status.last_failure
    messages = " ".join(
        [*(condition.message for condition in world.status.conditions), failure.message if failure else ""]
    )
    actual = Expected(
        phase=world.status.phase,
        pods=" ".join(world.pod_names()),
        engines=" ".join(world.pod_names(PodRole.ROLLOUT)),
        attempt=world.status.attempt,
        spent=restarts.since_checkpoint,
        uncounted=restarts.ladder.uncounted,
        why=world.condition(ConditionType.RUNNING).partition(" ")[2],
        failure=failure.reason if failure else None,
    )
    expected = {name: value for name, value in vars(see).items() if value is not None and name != "says"}
    assert {name: getattr(actual, name) for name in expected} == expected, f"step {number}"
    assert see.says in messages, f"step {number}"
    assert_all_time_is_counted(world.status)


def assert_all_time_is_counted(status: Status) -> None:
    """Each second since pods were first created is in one sum, and in one alone."""
    goodput = status.goodput
    if goodput is None:
        return
    uses = (goodput.productive_seconds, goodput.starting_seconds, goodput.lost_seconds, goodput.suspended_seconds)
    assert min(uses) >= 0
    began, until = (datetime.fromisoformat(text or "") for text in (status.start_time, goodput.updated_at))
    assert sum(uses) == pytest.approx((until - began).total_seconds(), abs=0.2)


# --- verbs ------------------------------------------------------------------------------------------------------------


def nothing_happens(world: World) -> None:
    """Only the operator reconciles."""


def pods_run(world: World) -> None:
    """All pods start."""
    world.run()


def pods_start(world: World) -> None:
    """All pods start, and those that start now have no ranks yet: such as spares."""
    world.start()


def pod_gets_ready(index: int) -> Verb:
    """The ranks of a pod have sent heartbeats: a spare has taken a place."""
    return lambda world: world.get_ready(index)


def time_passes(seconds: float) -> Verb:
    """Time passes."""
    return lambda world: world.wait(seconds)


def pod_ends(index: int, code: int, outcome: PodOutcome | None = None, **more: Any) -> Verb:
    """A trainer pod ends."""
    termination = (
        None
        if outcome is None
        else TerminationMessage(outcome=outcome, message="its last line", rank=index, exit_code=code)
    )
    return lambda world: world.end_pod(index, code, termination, **more)


def all_pods_end(code: int, outcome: PodOutcome | None = None, **said: Any) -> Verb:
    """The whole gang ends alike."""
    return lambda world: world.end_all_pods(
        code, None if outcome is None else TerminationMessage(outcome=outcome, **said)
    )


def profile_given(image: str, *, cluster_wide: bool = False, **resources: Any) -> Verb:
    """Someone creates or changes the profile `shared`."""
    kind = ProfileKind.CLUSTER if cluster_wide else ProfileKind.NAMESPACED
    spec = {"resources": {"image": image, **resources}, "podTemplate": {"trainer": _SIDECAR}}
    return lambda world: world.cluster.give_profile(kind, "shared", spec)


def profile_deleted(world: World) -> None:
    """Someone deletes the profile `shared` of the namespace."""
    world.cluster.delete_profile(ProfileKind.NAMESPACED, "shared")


def pods_have_image(image: str) -> Verb:
    """Each trainer pod has an image, and the sidecar of the profile; nothing happens."""

    def check_pods(world: World) -> None:
        for pod in world.cluster.pods(PodRole.TRAINER):
            assert pod["spec"]["containers"][0]["image"] == image
            assert [beside["name"] for beside in pod["spec"]["initContainers"]] == ["logs"]

    return check_pods


_SIDECAR = {"spec": {"containers": [{"name": "logs", "image": "logs:1"}]}}


def all_at_once(*verbs: Verb) -> Verb:
    """Several things happen before the operator reconciles."""

    def run_verbs(world: World) -> None:
        for verb in verbs:
            verb(world)

    return run_verbs


def lifecycle_patched(**fields: Any) -> Verb:
    """kubectl patch of spec.lifecycle."""
    return lambda world: world.set_lifecycle(**fields)


def pods_report(step: int, **more: Any) -> Verb:
    """Time for the next question passes, and pods answer it."""

    def answer(world: World) -> None:
        world.wait(31)
        world.report_progress(step, **more)

    return answer


def pod_is_silent(index: int) -> Verb:
    """A pod answers the operator no longer."""
    return lambda world: world.fall_silent(index)


def node_is_unheard(index: int) -> Verb:
    """The cluster has not heard of a pod's node for as long as it waits."""
    return lambda world: world.lose_sight(index)


def node_lost(index: int, *, is_known: bool = True) -> Verb:
    """The node of a pod is cut off."""
    return lambda world: world.lose_node(index, is_known=is_known)


def pod_deleted(index: int, role: PodRole = PodRole.TRAINER) -> Verb:
    """kubectl delete pod."""
    return lambda world: world.delete_pod(index, role)


def pod_evicted(index: int, role: PodRole = PodRole.TRAINER) -> Verb:
    """A kubelet takes the place away."""
    return lambda world: world.evict_pod(index, role)


def pod_preempted(index: int) -> Verb:
    """The scheduler takes the place away."""
    return lambda world: world.preempt_pod(index)


def evicted_by_kueue(*indices: int) -> Verb:
    """Kueue gives the quota to another job, and the pods do not end in time."""

    def evict(world: World) -> None:
        for index in indices:
            world.preempt_pod(index, 137, condition="TerminationTarget")

    return evict


def quota_denies(message: str | None) -> Verb:
    """A quota denies pods, or no longer does."""
    return lambda world: world.cluster.deny_pods(message)


def pod_unschedulable(index: int, reason: str, message: str) -> Verb:
    """The scheduler finds no place."""
    return lambda world: world.hold_pod(index, condition={"reason": reason, "message": message})


def image_pull_fails(index: int, reason: str = "ImagePullBackOff") -> Verb:
    """The kubelet gets no image."""
    return lambda world: world.hold_pod(index, waiting={"reason": reason, "message": "no such image"})


def engine_ends(index: int, code: int, log: str) -> Verb:
    """The container of an engine ends, and is started again later."""
    return lambda world: world.end_engine(index, code, log)


def engine_starts_again(index: int, restarts: int, log: str) -> Verb:
    """An engine that has ended that many times runs again, and generates nothing yet."""
    return lambda world: world.start_engine_again(index, restarts, log)


def claim_reaches(phase: str) -> Verb:
    """The volume controller says something of the claim."""
    return lambda world: world.bind_claim(phase)


def job_deleted(world: World) -> None:
    """kubectl delete."""
    world.delete_job()


def job_deleted_in_foreground(world: World) -> None:
    """kubectl delete --cascade=foreground."""
    world.delete_job_in_foreground()


# --- the table --------------------------------------------------------------------------------------------------------

BOTH = "0-0 0-1"
KUEUE = frozenset({"kueue.x-k8s.io"})
STARTED = (nothing_happens, Expected("Pending", BOTH, attempt=0, spent=0, why="Starting"))
RUNNING = (pods_run, Expected("Running", BOTH, attempt=0, spent=0, why="AllPodsRun"))
KILLED = RankFault(outcome=PodOutcome.RANK_FAILED, message="rank 1 was killed by signal 9", rank=1, exit_code=-9)
# What became of pod 0 is not known yet.
GIVEN_UP = (
    all_at_once(pod_is_silent(0), time_passes(20), pod_ends(1, 1, PodOutcome.LOST_PEERS)),
    Expected("Running", BOTH, attempt=0, spent=0, why="LostPeers", says="nothing is heard of job-trainer-0-00000"),
)
GRPO: Mapping[str, Any] = {
    "method": "GRPO",
    "data": {"maxLength": 512},
    "grpo": {
        "rewards": [{"name": "math"}],
        "maxNewTokens": 256,
        "promptsPerStep": 2,
        "rollout": {"placement": "Separate", "replicas": 2},
    },
}
GOES_ON = "and another job goes on from there with checkpoint: {resumeFrom: pvc://job-storage/job, resume: Run}"
MANY: Mapping[str, Any] = {"parallelism": {"data": 4}}
FOUR = "0-0 0-1 0-2 0-3"
FOUR_STARTED = (nothing_happens, Expected("Pending", FOUR, attempt=0, spent=0, why="Starting"))

SPARE: Mapping[str, Any] = {"resources": {"spares": 1}}
THREE = "0-0 0-1 0-2"
SPARE_MADE = (pods_run, Expected("Running", THREE, attempt=0, spent=0, why="AllPodsRun", says="0 of 1 spares run"))
SPARE_WAITS = (pods_start, Expected("Running", THREE, why="AllPodsRun", says="1 of 1 spares run"))
NO_ROOM = "0/3 nodes are available"

SCENARIOS: tuple[Scenario, ...] = (
    scenario(
        "a spare is made beside a gang that runs, and goes once the gang has ended well",
        STARTED,
        SPARE_MADE,
        SPARE_WAITS,
        (pod_ends(0, 0), Expected("Running", THREE)),
        (pod_ends(1, 0), Expected("Succeeded", BOTH, why="Completed")),
        **SPARE,
    ),
    scenario(
        "a gang runs with its spare while a lost pod is made again, which is the next spare",
        STARTED,
        SPARE_MADE,
        SPARE_WAITS,
        (pod_ends(1, 1), Expected("Running", THREE, attempt=0, spent=1, failure="PodFailed")),
        (all_at_once(pods_start, pod_gets_ready(2)), Expected("Running", THREE, spent=1)),
        (pod_ends(2, 1), Expected("Running", THREE, attempt=0, spent=2)),
        (all_at_once(pods_start, pod_gets_ready(1)), Expected("Running", THREE, spent=2)),
        (all_at_once(pod_ends(0, 0), pod_ends(1, 0)), Expected("Succeeded", "0-0 0-1")),
        **SPARE,
    ),
    scenario(
        "a spare that is lost when the gang has ended well is no failure",
        STARTED,
        SPARE_MADE,
        SPARE_WAITS,
        (
            all_at_once(pod_ends(0, 0), pod_ends(1, 0), pod_evicted(2)),
            Expected("Succeeded", attempt=0, spent=0, uncounted=0),
        ),
        **SPARE,
    ),
    scenario(
        "a spare on a lost node is made again, and the gang runs on",
        STARTED,
        SPARE_MADE,
        SPARE_WAITS,
        (node_lost(2), Expected("Running", THREE, attempt=0, spent=0, uncounted=1, failure="NodeLost")),
        SPARE_WAITS,
        lifecycle={"backoffLimit": 0},
        **SPARE,
    ),
    scenario(
        "a spare that fits no node holds nothing up",
        STARTED,
        SPARE_MADE,
        (
            pod_unschedulable(2, "Unschedulable", NO_ROOM),
            Expected("Running", THREE, why="Unschedulable", says="job-trainer-0-00002: 0/3"),
        ),
        (pods_report(5), Expected("Running", THREE)),
        (all_at_once(pod_ends(0, 0), pod_ends(1, 0)), Expected("Succeeded", BOTH)),
        **SPARE,
    ),
    scenario(
        "pod 0 that fits no node gets the node of a spare",
        STARTED,
        SPARE_MADE,
        SPARE_WAITS,
        (pods_report(5, spare_pod=2), Expected("Running", THREE)),
        (pod_ends(0, 137), Expected("Running", THREE, attempt=0, spent=1)),
        (
            all_at_once(pod_unschedulable(0, "Unschedulable", NO_ROOM), pods_report(5, spare_pod=2)),
            Expected("Restarting", BOTH, attempt=0, spent=1, why="Unschedulable"),
        ),
        (pods_run, Expected("Running", THREE, attempt=0, spent=1)),
        (all_at_once(pods_start, pods_report(6, spare_pod=2)), Expected("Running", THREE, attempt=0, spent=1)),
        **SPARE,
    ),
    scenario(
        "a pod that has taken a place keeps it though pod 0 fits no node",
        STARTED,
        SPARE_MADE,
        SPARE_WAITS,
        (pods_report(5), Expected("Running", THREE)),
        (pod_ends(0, 137), Expected("Running", THREE, attempt=0, spent=1)),
        (
            all_at_once(pod_unschedulable(0, "Unschedulable", NO_ROOM), pods_report(5)),
            Expected("Running", THREE, attempt=0, spent=1, why="Unschedulable"),
        ),
        **SPARE,
    ),
    scenario(
        "a spare has rank 0 once pod 0 is lost, and the next pod 0 is the next spare",
        STARTED,
        SPARE_MADE,
        SPARE_WAITS,
        (pods_report(5, spare_pod=2), Expected("Running", THREE)),
        (pod_ends(0, 137), Expected("Running", THREE, attempt=0, spent=1, failure="PodFailed")),
        (all_at_once(pods_start, pod_gets_ready(2)), Expected("Running", THREE, spent=1)),
        # A new checkpoint, which pod 0 cannot know of: the budget is whole again.
        (pods_report(8, saved=7, spare_pod=0, first_pod=2), Expected("Running", THREE, attempt=0, spent=0)),
        (pod_ends(2, 1), Expected("Running", THREE, attempt=0, spent=1)),
        (all_at_once(pods_start, pod_gets_ready(0)), Expected("Running", THREE, spent=1)),
        (all_at_once(pod_ends(0, 0), pod_ends(1, 0)), Expected("Succeeded", "0-0 0-1")),
        **SPARE,
    ),
    scenario(
        "a spare has rank 0 while the node of pod 0 is lost, and the job ends well without that pod",
        STARTED,
        SPARE_MADE,
        SPARE_WAITS,
        (node_lost(0), Expected("Running", THREE, attempt=0, spent=0, uncounted=1, failure="NodeLost")),
        (pod_gets_ready(2), Expected("Running", THREE, attempt=0)),
        (all_at_once(pod_ends(1, 0), pod_ends(2, 0)), Expected("Succeeded", "0-1 0-2")),
        lifecycle={"backoffLimit": 0},
        **SPARE,
    ),
    scenario(
        "a spare has no ranks that could be silent",
        STARTED,
        SPARE_MADE,
        SPARE_WAITS,
        (
            all_at_once(time_passes(700), pods_report(5, spare_pod=2)),
            Expected("Running", THREE, attempt=0, spent=0),
        ),
        (
            all_at_once(time_passes(700), pods_report(5, age=740, hung_pod=1, spare_pod=2)),
            Expected("Running", THREE, attempt=0, spent=1, failure="Hung"),
        ),
        lifecycle={"progressDeadlineSeconds": 600},
        **SPARE,
    ),
    scenario(
        "a whole gang that is lost takes its spare with it",
        STARTED,
        SPARE_MADE,
        SPARE_WAITS,
        (all_pods_end(1), Expected("Restarting", "1-0 1-1", attempt=1, spent=1)),
        (pods_run, Expected("Running", "1-0 1-1 1-2", attempt=1, spent=1)),
        **SPARE,
    ),
    scenario(
        "a job with a spare is suspended and resumed",
        STARTED,
        SPARE_MADE,
        SPARE_WAITS,
        (lifecycle_patched(suspend=True), Expected("Suspended", "")),
        (lifecycle_patched(suspend=False), Expected(pods="1-0 1-1", attempt=1)),
        (pods_run, Expected("Running", "1-0 1-1 1-2")),
        **SPARE,
    ),
    scenario(
        "a job runs to its end", STARTED, RUNNING, (all_pods_end(0), Expected("Succeeded", BOTH, why="Completed"))
    ),
    scenario(
        "one rank that is done does not make a success",
        STARTED,
        RUNNING,
        (pod_ends(0, 0), Expected("Running", BOTH)),
        (pod_ends(1, 0), Expected("Succeeded", BOTH)),
    ),
    scenario(
        "a rank that fails takes its pod, which is replaced alone",
        STARTED,
        RUNNING,
        (
            pod_ends(1, 1, PodOutcome.RANK_FAILED),
            Expected("Restarting", BOTH, attempt=0, spent=1, failure="RankFailed"),
        ),
        (pods_run, Expected("Running", BOTH, attempt=0, spent=1, why="AllPodsRun")),
        (all_pods_end(0), Expected("Succeeded")),
    ),
    scenario(
        "a pod without a last word is replaced",
        STARTED,
        RUNNING,
        (pod_ends(1, 137), Expected("Restarting", BOTH, attempt=0, spent=1, failure="PodFailed", says="exit code 137")),
        (pods_run, Expected("Running", spent=1)),
    ),
    scenario(
        "pod 0 is replaced alone",
        STARTED,
        RUNNING,
        (pod_ends(0, 1), Expected("Restarting", BOTH, attempt=0, spent=1)),
        (pods_run, Expected("Running", BOTH, attempt=0, spent=1)),
        (all_pods_end(0), Expected("Succeeded")),
    ),
    scenario(
        "pods that fail together are one failure",
        STARTED,
        RUNNING,
        (all_pods_end(1), Expected("Restarting", "1-0 1-1", attempt=1, spent=1)),
    ),
    scenario(
        "peers that fail while a pod is replaced are not charged again",
        FOUR_STARTED,
        (pods_run, Expected("Running", FOUR)),
        (pod_ends(2, 1), Expected("Restarting", FOUR, attempt=0, spent=1)),
        (pod_ends(1, 1, PodOutcome.LOST_PEERS), Expected("Restarting", FOUR, attempt=0, spent=1)),
        (pods_run, Expected("Running", FOUR, attempt=0, spent=1)),
        **MANY,
    ),
    scenario(
        "pod 0 that fails while another is replaced is replaced too, at no further charge",
        FOUR_STARTED,
        (pods_run, Expected("Running", FOUR)),
        (pod_ends(2, 1), Expected("Restarting", FOUR, attempt=0, spent=1)),
        (pod_ends(0, 1, PodOutcome.LOST_PEERS), Expected("Restarting", FOUR, attempt=0, spent=1)),
        (pods_run, Expected("Running", FOUR, attempt=0, spent=1)),
        **MANY,
    ),
    scenario(
        "pod 0 and another that are lost at once are replaced, and the others live on",
        FOUR_STARTED,
        (pods_run, Expected("Running", FOUR)),
        (
            all_at_once(pod_ends(0, 137), pod_ends(2, 137)),
            Expected("Restarting", FOUR, attempt=0, spent=1, failure="PodFailed"),
        ),
        (pods_run, Expected("Running", FOUR, attempt=0, spent=1)),
        **MANY,
    ),
    scenario(
        "the last pods that wait for another pod 0 take the gang with them, at no further charge",
        FOUR_STARTED,
        (pods_run, Expected("Running", FOUR)),
        (pod_ends(0, 137), Expected("Restarting", FOUR, attempt=0, spent=1)),
        (
            all_at_once(pod_ends(1, 1, PodOutcome.LOST_PEERS), pod_ends(2, 1, PodOutcome.LOST_PEERS)),
            Expected("Restarting", FOUR, attempt=0, spent=1),
        ),
        (pod_ends(3, 1, PodOutcome.LOST_PEERS), Expected("Restarting", "1-0 1-1 1-2 1-3", attempt=1, spent=1)),
        (pods_run, Expected("Running", attempt=1, spent=1)),
        **MANY,
    ),
    scenario(
        "pod 0 that fails again and again takes the gang with it",
        STARTED,
        RUNNING,
        (pod_ends(0, 1), Expected("Restarting", BOTH, attempt=0, spent=1)),
        (all_at_once(pods_run, pod_ends(0, 1)), Expected("Restarting", BOTH, attempt=0, spent=2)),
        (all_at_once(pods_run, pod_ends(0, 1)), Expected("Restarting", "", attempt=1, spent=3, why="BackingOff")),
        (time_passes(4), Expected("Restarting", "1-0 1-1", attempt=1, spent=3)),
    ),
    scenario(
        "pod 0 that saved and stopped is replaced alone, and not counted",
        STARTED,
        RUNNING,
        (
            pod_ends(0, 143, PodOutcome.PREEMPTED),
            Expected("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="Preempted"),
        ),
        (pods_run, Expected("Running", BOTH, attempt=0, spent=0)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a deleted pod 0 is replaced alone, and not counted",
        STARTED,
        RUNNING,
        (pod_deleted(0), Expected("Restarting", BOTH, attempt=0, spent=0, uncounted=1, says="was deleted")),
        (pods_run, Expected("Running", BOTH, attempt=0, spent=0)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "pod 0 that runs out of memory is replaced alone",
        STARTED,
        RUNNING,
        (
            pod_ends(0, 137, container_reason="OOMKilled"),
            Expected("Restarting", BOTH, attempt=0, spent=1, failure="OutOfMemory"),
        ),
        (pods_run, Expected("Running", BOTH, attempt=0, spent=1)),
    ),
    scenario(
        "pod 0 on a node that is lost is replaced alone",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running")),
        (
            all_at_once(pod_is_silent(0), node_is_unheard(0)),
            Expected("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="NodeLost", says="node-trainer-0"),
        ),
        (pods_run, Expected("Running", BOTH, attempt=0, spent=0)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "pod 0 whose ranks alone are silent is replaced alone",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running")),
        (
            all_at_once(time_passes(600), pods_report(5, age=640, hung_pod=0)),
            Expected("Restarting", BOTH, attempt=0, spent=1, failure="Hung"),
        ),
        (pods_run, Expected("Running", BOTH, attempt=0, spent=1)),
        lifecycle={"progressDeadlineSeconds": 600},
    ),
    scenario(
        "a pod that fails again right after it was replaced is charged again",
        STARTED,
        RUNNING,
        (pod_ends(1, 1), Expected("Restarting", BOTH, attempt=0, spent=1)),
        (all_at_once(pods_run, pod_ends(1, 1)), Expected("Restarting", BOTH, attempt=0, spent=2)),
        (pods_run, Expected("Running", spent=2)),
    ),
    scenario(
        "a pod that keeps failing takes the gang with it",
        STARTED,
        RUNNING,
        (pod_ends(1, 1), Expected(attempt=0, spent=1)),
        (pods_run, Expected("Running")),
        (all_at_once(time_passes(60), pod_ends(1, 1)), Expected(attempt=0, spent=2)),
        (pods_run, Expected("Running")),
        (all_at_once(time_passes(60), pod_ends(1, 1)), Expected("Restarting", attempt=1, spent=3)),
    ),
    scenario(
        "delays grow, and are kept",
        STARTED,
        RUNNING,
        (all_pods_end(1), Expected("Restarting", "1-0 1-1", spent=1)),
        (all_at_once(pods_run, all_pods_end(1)), Expected("Restarting", "2-0 2-1", spent=2)),
        (all_at_once(pods_run, all_pods_end(1)), Expected("Restarting", "", spent=3, why="BackingOff")),
        (time_passes(4), Expected("Restarting", "3-0 3-1", spent=3)),
        (all_at_once(pods_run, all_pods_end(1)), Expected("Restarting", "", spent=4, why="BackingOff")),
        (time_passes(4), Expected("Restarting", "", spent=4, why="BackingOff")),
        (time_passes(4), Expected("Restarting", "4-0 4-1", spent=4)),
    ),
    scenario(
        "a job gives up when its budget is spent",
        STARTED,
        RUNNING,
        (pod_ends(1, 1), Expected("Restarting", spent=1)),
        (pods_run, Expected("Running")),
        (pod_ends(1, 1), Expected("Failed", why="BackoffLimitExceeded", spent=1, says="backoffLimit is 1")),
        (nothing_happens, Expected("Failed", "0-1")),
        lifecycle={"backoffLimit": 1},
    ),
    scenario(
        "without a budget the first failure is the last",
        STARTED,
        RUNNING,
        (pod_ends(1, 1), Expected("Failed", "0-1", spent=0)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a new checkpoint renews the budget",
        STARTED,
        RUNNING,
        (pods_report(10), Expected("Running", spent=0)),
        (pod_ends(1, 1), Expected("Restarting", spent=1)),
        (pods_run, Expected("Running", spent=1)),
        (pods_report(15, saved=12), Expected("Running", spent=0)),
        (pod_ends(1, 1), Expected("Restarting", spent=1)),
        (pods_run, Expected("Running", spent=1)),
        (pods_report(15, saved=12), Expected("Running", spent=1)),
        lifecycle={"backoffLimit": 1},
    ),
    scenario(
        "a checkpoint that is damaged and made again renews nothing",
        STARTED,
        RUNNING,
        (pods_report(12, saved=12), Expected("Running", spent=0)),
        (pod_ends(1, 1), Expected("Restarting", spent=1)),
        (pods_run, Expected("Running", spent=1)),
        (pods_report(9, saved=8), Expected("Running", spent=1)),
        (pods_report(12, saved=12), Expected("Running", spent=1)),
        (pod_ends(1, 1), Expected("Failed", why="BackoffLimitExceeded", spent=1)),
        lifecycle={"backoffLimit": 1},
    ),
    scenario(
        "a bad configuration is final at once",
        STARTED,
        RUNNING,
        (
            pod_ends(1, ExitCode.BAD_CONFIGURATION, PodOutcome.BAD_CONFIGURATION),
            Expected(
                "Failed", "0-1", why="BadConfiguration", spent=0, failure="BadConfiguration", says="its last line"
            ),
        ),
    ),
    scenario(
        "a job that has failed says how another goes on with what it saved, before it takes that along",
        STARTED,
        RUNNING,
        (pods_report(15, saved=12), Expected("Running")),
        (
            pod_ends(1, ExitCode.BAD_CONFIGURATION, PodOutcome.BAD_CONFIGURATION),
            Expected(
                "Failed", says=f"step 12 is saved, or a later one, {GOES_ON}; job-storage is deleted with this job"
            ),
        ),
    ),
    scenario(
        "what was saved on a claim of somebody else's stays",
        STARTED,
        RUNNING,
        (pods_report(15, saved=12), Expected("Running")),
        (
            pod_ends(1, ExitCode.BAD_CONFIGURATION, PodOutcome.BAD_CONFIGURATION),
            # What is said next is another condition's: nothing of a claim that is deleted.
            Expected(
                "Failed",
                says=f"step 12 is saved, or a later one, {GOES_ON.replace('job-storage', 'shared')} its last line",
            ),
        ),
        storage={"size": None, "claimName": "shared"},
    ),
    scenario(
        "running out of memory counts and is named",
        STARTED,
        RUNNING,
        (pod_ends(1, 137, container_reason="OOMKilled"), Expected("Restarting", spent=1, failure="OutOfMemory")),
    ),
    scenario(
        "preemption is not counted",
        STARTED,
        RUNNING,
        (pod_preempted(1), Expected("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="Preempted")),
        (pods_run, Expected("Running", BOTH, spent=0)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a gang that saved and stopped is not counted",
        STARTED,
        RUNNING,
        (all_pods_end(143, PodOutcome.PREEMPTED), Expected("Restarting", "1-0 1-1", attempt=1, spent=0, uncounted=1)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "eviction is not counted",
        STARTED,
        RUNNING,
        (pod_evicted(1), Expected("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="Preempted")),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a pod that somebody deletes is not counted",
        STARTED,
        RUNNING,
        (pod_deleted(1), Expected("Restarting", BOTH, attempt=0, spent=0, uncounted=1, says="was deleted")),
        (pods_run, Expected("Running", BOTH)),
        (pod_deleted(0), Expected("Restarting", BOTH, attempt=0, spent=0, uncounted=2)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a lost node is not counted, and its pod is not waited for",
        STARTED,
        RUNNING,
        (node_lost(1), Expected("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="NodeLost")),
        (pods_run, Expected("Running", BOTH)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a pod is only taken by force from a node that is lost",
        STARTED,
        RUNNING,
        (node_lost(1, is_known=False), Expected("Running", "0-0 0-1+", attempt=0, spent=0, why="PodEnding")),
        (time_passes(200), Expected("Running", "0-0 0-1+", attempt=0, spent=0)),
        # The grace period and what a living kubelet may take have passed.
        (time_passes(131), Expected("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="NodeLost")),
    ),
    scenario(
        "a pod that nobody hears of is replaced before its node is given up",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running")),
        (
            all_at_once(lambda world: world.fall_silent(1), lambda world: world.lose_sight(1)),
            Expected("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="NodeLost", says="node-trainer-1"),
        ),
    ),
    scenario(
        "a pod that answers outlives the word of its node",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running")),
        (lambda world: world.lose_sight(1), Expected("Running", BOTH, attempt=0, spent=0)),
        (pods_report(8), Expected("Running", BOTH, attempt=0, spent=0)),
    ),
    scenario(
        "a peer that gives up on a pod before its node is called lost is no failure",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running", BOTH, spent=0)),
        GIVEN_UP,
        (
            all_at_once(time_passes(40), node_is_unheard(0)),
            Expected("Restarting", "1-0 1-1", attempt=1, spent=0, uncounted=1, failure="NodeLost"),
        ),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a peer that gives up on a pod before that is deleted is no failure",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running", BOTH, spent=0)),
        GIVEN_UP,
        (pod_deleted(0), Expected("Restarting", "1-0 1-1", attempt=1, spent=0, uncounted=1, failure="Preempted")),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a peer that gives up on a pod before that is seen to fail is not blamed",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running", BOTH, spent=0)),
        GIVEN_UP,
        (
            pod_ends(0, 137),
            Expected("Restarting", "1-0 1-1", attempt=1, spent=1, failure="PodFailed", says="exit code 137"),
        ),
    ),
    scenario(
        "peers that give up on a pod of which nothing is said are charged once in the end",
        FOUR_STARTED,
        (pods_run, Expected("Running", FOUR)),
        (pods_report(5), Expected("Running", FOUR, spent=0)),
        (
            all_at_once(pod_is_silent(0), time_passes(20), pod_ends(1, 1, PodOutcome.LOST_PEERS)),
            Expected("Running", FOUR, spent=0, why="LostPeers"),
        ),
        (
            all_at_once(time_passes(5), pod_ends(2, 1, PodOutcome.LOST_PEERS)),
            Expected("Running", FOUR, spent=0, why="LostPeers"),
        ),
        (time_passes(40), Expected("Running", FOUR, spent=0, why="LostPeers")),
        (time_passes(30), Expected("Restarting", FOUR, attempt=0, spent=1, failure="LostPeers", says="its last line")),
        **MANY,
    ),
    scenario(
        "a peer that gives up on a pod that answers is charged at once",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running", BOTH, spent=0)),
        (pod_ends(1, 1, PodOutcome.LOST_PEERS), Expected("Restarting", BOTH, attempt=0, spent=1, failure="LostPeers")),
    ),
    scenario(
        "a peer whose node has another time is charged at once",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running", BOTH, spent=0)),
        (
            all_at_once(pod_is_silent(0), time_passes(3600), pod_ends(1, 1, PodOutcome.LOST_PEERS), time_passes(-3600)),
            Expected("Restarting", BOTH, attempt=0, spent=1, failure="LostPeers"),
        ),
    ),
    scenario(
        "an old gang on a dead node holds the next one back",
        STARTED,
        RUNNING,
        (
            all_at_once(lambda world: world.dead_nodes.add("node-trainer-1"), pod_ends(0, 1)),
            Expected("Restarting", "0-1+", attempt=1, spent=1, why="OldPodsLeft"),
        ),
        (time_passes(400), Expected("Restarting", "0-1+", attempt=1, why="OldPodsLeft", says="node-trainer-1")),
        (lambda world: world.dead_nodes.clear(), Expected("Restarting", "1-0 1-1", attempt=1, spent=1)),
        apis=KUEUE,
        lifecycle={"queue": "team"},
    ),
    scenario(
        "a hung rank is named and its pod replaced",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running")),
        (all_at_once(time_passes(600), pods_report(5, age=100)), Expected("Running", spent=0)),
        (
            all_at_once(time_passes(600), pods_report(5, age=640)),
            Expected("Restarting", attempt=1, spent=1, failure="Hung", says="rank 0 silent"),
        ),
        (pods_run, Expected("Running", "1-0 1-1", attempt=1, spent=1)),
        lifecycle={"progressDeadlineSeconds": 600},
    ),
    scenario(
        "ranks that are never heard are hung too",
        STARTED,
        (lambda world: world.start(), Expected("Running")),
        (time_passes(620), Expected("Running")),
        (time_passes(20), Expected("Restarting", attempt=1, spent=1, failure="Hung", says="no rank has been heard")),
        lifecycle={"progressDeadlineSeconds": 600},
    ),
    scenario(
        "nobody is hung while the gang is not complete",
        STARTED,
        (all_at_once(lambda world: world.start(), lambda world: world.hold_pod(1)), Expected("Running")),
        (pod_ends(1, 1), Expected("Restarting", BOTH, spent=1)),
        (time_passes(5000), Expected("Restarting", BOTH, spent=1)),
        lifecycle={"progressDeadlineSeconds": 600},
    ),
    scenario(
        "ranks that the launcher restarted are charged",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running", spent=0)),
        (pods_report(8, restarts=1), Expected("Running", BOTH, attempt=0, spent=1, failure="RankFailed")),
        (pods_report(9, restarts=1), Expected("Running", BOTH, attempt=0, spent=1)),
        (pods_report(10, restarts=2), Expected("Running", BOTH, attempt=0, spent=2)),
        (pods_report(11, restarts=3), Expected("Restarting", "0-1", attempt=0, spent=3)),
        (time_passes(4), Expected("Restarting", BOTH, attempt=0, spent=3)),
        (pods_run, Expected("Running", BOTH, attempt=0, spent=3)),
        (pods_report(11), Expected("Running", attempt=0, spent=3)),
        (pods_report(12), Expected("Running", attempt=0, spent=3)),
    ),
    scenario(
        "ranks that were restarted before their pods were first asked are charged",
        STARTED,
        (
            all_at_once(pods_run, pods_report(5, restarts=1, fault=KILLED)),
            Expected("Running", BOTH, attempt=0, spent=1, failure="RankFailed"),
        ),
        (pods_report(9, restarts=1), Expected("Running", BOTH, attempt=0, spent=1)),
        (all_pods_end(137), Expected("Restarting", "1-0 1-1", attempt=1, spent=2, failure="PodFailed")),
        (
            all_at_once(pods_run, pods_report(9, restarts=1)),
            Expected("Running", "1-0 1-1", attempt=1, spent=3, failure="RankFailed"),
        ),
        (pods_report(10, restarts=1), Expected("Running", attempt=1, spent=3)),
        (lifecycle_patched(suspend=True), Expected("Suspended", "", attempt=2)),
        (lifecycle_patched(suspend=False), Expected("Pending", "2-0 2-1", attempt=2)),
        (all_at_once(pods_run, pods_report(11, restarts=1)), Expected("Running", attempt=2, spent=4)),
    ),
    scenario(
        "what a rank died of is told though its pod lives on",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running", spent=0)),
        (
            pods_report(8, restarts=1, fault=KILLED),
            Expected("Running", BOTH, spent=1, failure="RankFailed", says="rank 1 was killed"),
        ),
        (all_pods_end(0), Expected("Succeeded", spent=1, failure="RankFailed")),
    ),
    scenario(
        "ranks that the launcher restarted for their silence were hung",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running", spent=0)),
        (
            pods_report(8, restarts=1, fault=RankFault(outcome=PodOutcome.HUNG, message="rank 1 silent", rank=1)),
            Expected("Running", BOTH, spent=1, failure="Hung", says="rank 1 silent"),
        ),
    ),
    scenario(
        "a restart of ranks shortly before the end is told by the last words",
        STARTED,
        RUNNING,
        (pods_report(5), Expected("Running", spent=0)),
        (
            all_pods_end(0, PodOutcome.COMPLETED, restarts=1, fault=KILLED),
            Expected("Succeeded", failure="RankFailed", says="rank 1 was killed"),
        ),
    ),
    scenario(
        "ranks that were restarted for a pod that was replaced are no failure of their own",
        STARTED,
        RUNNING,
        (pod_ends(1, 137), Expected("Restarting", BOTH, attempt=0, spent=1, failure="PodFailed", says="exit code 137")),
        (pods_run, Expected("Running", BOTH, attempt=0, spent=1)),
        (
            all_pods_end(0, PodOutcome.COMPLETED, restarts=1, fault=KILLED),
            Expected("Succeeded", failure="PodFailed", says="exit code 137"),
        ),
    ),
    scenario(
        "suspending stops the pods and keeps the volume",
        STARTED,
        RUNNING,
        (lifecycle_patched(suspend=True), Expected("Suspended", "", attempt=1, spent=0, why="SuspendRequested")),
        (lifecycle_patched(suspend=False), Expected("Pending", "1-0 1-1", attempt=1, spent=0)),
        (pods_run, Expected("Running", "1-0 1-1")),
        (all_pods_end(0), Expected("Succeeded")),
    ),
    scenario(
        "a job that is born suspended creates nothing",
        (nothing_happens, Expected("Suspended", "", attempt=0)),
        (lifecycle_patched(suspend=False), Expected("Pending", BOTH, attempt=0)),
        lifecycle={"suspend": True},
    ),
    scenario(
        "suspending between two gangs forgets the delay",
        STARTED,
        RUNNING,
        (all_pods_end(1), Expected("Restarting", spent=1)),
        (all_at_once(pods_run, all_pods_end(1)), Expected("Restarting", spent=2)),
        (all_at_once(pods_run, all_pods_end(1)), Expected("Restarting", "", attempt=3, spent=3, why="BackingOff")),
        (lifecycle_patched(suspend=True), Expected("Suspended", "", attempt=3, spent=3)),
        (lifecycle_patched(suspend=False), Expected("Pending", "3-0 3-1", attempt=3, spent=3)),
    ),
    scenario(
        "suspending a run that has just ended changes nothing",
        STARTED,
        RUNNING,
        (all_at_once(all_pods_end(0), lifecycle_patched(suspend=True)), Expected("Succeeded", BOTH)),
    ),
    scenario(
        "a finished job whose claim goes with it is deleted after its time",
        STARTED,
        RUNNING,
        (all_pods_end(0), Expected("Succeeded", BOTH)),
        (time_passes(30), Expected("Succeeded", BOTH)),
        (time_passes(31), Expected("gone")),
        lifecycle={"ttlSecondsAfterFinished": 60},
        storage={"reclaim": "Delete"},
    ),
    scenario(
        "a finished job on a claim that was there is deleted after its time",
        STARTED,
        RUNNING,
        (all_pods_end(0), Expected("Succeeded", BOTH)),
        (time_passes(61), Expected("gone")),
        lifecycle={"ttlSecondsAfterFinished": 60},
        storage={"size": None, "claimName": "team"},
    ),
    scenario(
        "a finished job with a claim of its own keeps it after its time, and no pod",
        STARTED,
        RUNNING,
        (all_pods_end(0), Expected("Succeeded", BOTH)),
        (time_passes(30), Expected("Succeeded", BOTH)),
        (time_passes(31), Expected("Succeeded", "")),
        (time_passes(100_000), Expected("Succeeded", "")),
        lifecycle={"ttlSecondsAfterFinished": 60},
    ),
    scenario(
        "a deadline ends the job",
        STARTED,
        RUNNING,
        (time_passes(580), Expected("Running")),
        (time_passes(20), Expected("Failed", "", why="DeadlineExceeded", spent=0)),
        lifecycle={"activeDeadlineSeconds": 600},
    ),
    scenario(
        "time in suspension does not count against the deadline",
        STARTED,
        RUNNING,
        (all_at_once(time_passes(300), lifecycle_patched(suspend=True)), Expected("Suspended", "")),
        (all_at_once(time_passes(10_000), lifecycle_patched(suspend=False)), Expected("Pending", "1-0 1-1")),
        (pods_run, Expected("Running")),
        (time_passes(250), Expected("Running")),
        (time_passes(60), Expected("Failed", "", why="DeadlineExceeded")),
        lifecycle={"activeDeadlineSeconds": 600},
    ),
    scenario(
        "a deadline that passed while the run was ending does not undo its success",
        STARTED,
        RUNNING,
        (all_at_once(time_passes(700), all_pods_end(0)), Expected("Succeeded", BOTH)),
        lifecycle={"activeDeadlineSeconds": 600},
    ),
    scenario(
        "a quota that denies pods is told, and tried again",
        (
            quota_denies("exceeded quota: gpus"),
            Expected("Pending", "", why="QuotaExceeded", says="exceeded quota: gpus"),
        ),
        (time_passes(31), Expected("Pending", "", why="QuotaExceeded")),
        (
            all_at_once(quota_denies(None), time_passes(31)),
            Expected("Pending", BOTH, attempt=0, spent=0, why="Starting"),
        ),
        RUNNING,
    ),
    scenario(
        "a quota that denies the next gang does not charge it",
        STARTED,
        RUNNING,
        (
            all_at_once(quota_denies("exceeded quota: gpus"), all_pods_end(1)),
            Expected("Restarting", "", attempt=1, spent=1, why="QuotaExceeded"),
        ),
        (time_passes(31), Expected("Restarting", "", attempt=1, spent=1, why="QuotaExceeded")),
        (all_at_once(quota_denies(None), time_passes(31)), Expected("Restarting", "1-0 1-1", attempt=1, spent=1)),
    ),
    scenario(
        "an image that cannot be pulled is told",
        STARTED,
        (image_pull_fails(1), Expected("Pending", BOTH, why="ImagePullBackOff", says="no such image")),
        RUNNING,
    ),
    scenario(
        "a pod that finds no node is told",
        STARTED,
        (
            pod_unschedulable(0, "Unschedulable", "0/3 nodes have 8 GPUs"),
            Expected("Pending", BOTH, why="Unschedulable"),
        ),
        RUNNING,
    ),
    scenario(
        "a claim without a volume is told",
        STARTED,
        (
            all_at_once(
                claim_reaches("Pending"),
                pod_unschedulable(0, "Unschedulable", "0/2 nodes: pod has unbound immediate PersistentVolumeClaims"),
            ),
            Expected("Pending", BOTH, why="ClaimPending"),
        ),
        (claim_reaches("Bound"), Expected("Pending", BOTH, why="Starting")),
    ),
    scenario(
        "a job whose name is still taken waits",
        (nothing_happens, Expected("Pending", BOTH)),
        (all_at_once(job_deleted, lambda world: world.apply()), Expected("Pending", BOTH, attempt=0)),
    ),
    scenario(
        "deleting a job while it starts leaves nothing",
        STARTED,
        (job_deleted, Expected("gone", "")),
    ),
    scenario(
        "nothing is created for a job that is being deleted",
        STARTED,
        (all_at_once(job_deleted_in_foreground, pod_deleted(0), pod_deleted(1)), Expected("Pending", "")),
    ),
    scenario(
        "a job that cannot fit is refused in words",
        (nothing_happens, Expected("Pending", "", why="Invalid", says="layers")),
        (time_passes(600), Expected("Pending", "")),
        parallelism={"data": 1, "pipeline": 64},
    ),
    scenario(
        "a model that nobody here can see is trusted, and that is said",
        (nothing_happens, Expected("Pending", BOTH)),
        RUNNING,
        model={"source": "pvc://models/mine"},
    ),
    scenario(
        "a gang scheduler that is not there is told",
        (nothing_happens, Expected("Pending", "", why="GangApiMissing", says="scheduling.volcano.sh/v1beta1")),
        lifecycle={"gang": "Volcano"},
    ),
    scenario(
        "a gang waits in its queue",
        STARTED,
        (pod_unschedulable(0, "SchedulingGated", ""), Expected("Pending", BOTH, why="Queued")),
        RUNNING,
        (pod_ends(0, 1), Expected("Restarting", "1-0 1-1", attempt=1)),
        apis=KUEUE,
        lifecycle={"queue": "team"},
    ),
    scenario(
        "a pod of a Kueue group keeps its name until the group has ended, so the gang is replaced",
        STARTED,
        RUNNING,
        (pod_ends(1, 1), Expected("Restarting", "1-0 1-1", attempt=1, spent=1)),
        (pods_run, Expected("Running", "1-0 1-1", attempt=1, spent=1)),
        apis=KUEUE,
        lifecycle={"queue": "team"},
    ),
    scenario(
        "a gang that Kueue evicts is not counted",
        STARTED,
        RUNNING,
        (
            evicted_by_kueue(0, 1),
            Expected("Restarting", "1-0 1-1", attempt=1, spent=0, uncounted=1, failure="Preempted"),
        ),
        apis=KUEUE,
        lifecycle={"queue": "team", "backoffLimit": 0},
    ),
    scenario(
        "engines start beside the gang and end with the job",
        (nothing_happens, Expected("Pending", BOTH, "0-0 0-1")),
        (pods_run, Expected("Running", BOTH, "0-0 0-1")),
        (all_pods_end(0), Expected("Succeeded", BOTH, "")),
        **GRPO,
    ),
    scenario(
        "a lost engine is replaced alone",
        (nothing_happens, Expected("Pending", BOTH, "0-0 0-1")),
        (all_at_once(pods_run, time_passes(60)), Expected("Running", BOTH, "0-0 0-1")),
        (pod_evicted(1, PodRole.ROLLOUT), Expected("Running", BOTH, "0-0 0-1", attempt=0, spent=0, uncounted=0)),
        (pod_deleted(0, PodRole.ROLLOUT), Expected("Running", BOTH, "0-0 0-1", attempt=0, spent=0, uncounted=0)),
        **GRPO,
    ),
    scenario(
        "an engine that ends again and again is shown with the last line of its log",
        (nothing_happens, Expected("Pending", BOTH, "0-0 0-1")),
        (pods_run, Expected("Running", BOTH, "0-0 0-1")),
        (
            engine_ends(1, 1, "INFO loading\nRuntimeError: no kernel for this GPU\n"),
            Expected(
                "Running", BOTH, "0-0 0-1", spent=0, why="CrashLoopBackOff", says="exit code 1: RuntimeError: no kernel"
            ),
        ),
        **GRPO,
    ),
    scenario(
        "an engine that has ended again and again is named also while it starts once more",
        (nothing_happens, Expected("Pending", BOTH, "0-0 0-1")),
        (pods_run, Expected("Running", BOTH, "0-0 0-1", why="AllPodsRun")),
        (
            engine_starts_again(1, 4, "INFO loading\nRuntimeError: no kernel for this GPU\n"),
            Expected(
                "Running",
                BOTH,
                "0-0 0-1",
                spent=0,
                why="EngineEnds",
                says="engine 1 has ended 4 times: ended with exit code 1: RuntimeError: no kernel",
            ),
        ),
        **GRPO,
    ),
    scenario(
        "an engine that calls the job wrong ends it",
        (nothing_happens, Expected("Pending", BOTH, "0-0 0-1")),
        (pods_run, Expected("Running", BOTH, "0-0 0-1")),
        (
            engine_ends(0, ExitCode.BAD_CONFIGURATION, "INFO starting\nmoejob-rollout: MOEJOB_SPEC is not set\n"),
            Expected(
                "Failed",
                why="BadConfiguration",
                spent=0,
                failure="BadConfiguration",
                says="rollout: MOEJOB_SPEC is not",
            ),
        ),
        **GRPO,
    ),
    scenario(
        "engines outlive the gang",
        (nothing_happens, Expected("Pending", BOTH, "0-0 0-1")),
        (pods_run, Expected("Running", BOTH, "0-0 0-1")),
        (all_pods_end(1), Expected("Restarting", "1-0 1-1", "0-0 0-1", attempt=1, spent=1)),
        (lifecycle_patched(suspend=True), Expected("Suspended", "", "", attempt=2)),
        (lifecycle_patched(suspend=False), Expected("Pending", "2-0 2-1", "0-0 0-1", attempt=2)),
        **GRPO,
    ),
    scenario(
        "a succeeded pod cannot meet a new one, so the gang is replaced",
        FOUR_STARTED,
        (pods_run, Expected("Running", FOUR)),
        (pod_ends(1, 0), Expected("Running", FOUR)),
        (pod_ends(2, 1), Expected("Restarting", "1-0 1-1 1-2 1-3", attempt=1, spent=1)),
        **MANY,
    ),
    scenario(
        "a job waits for its profile, and keeps the values with which it was accepted",
        (nothing_happens, Expected("Pending", "", why="ProfileMissing", says="no MoETrainingProfile shared")),
        (all_at_once(profile_given("first:1"), time_passes(30)), Expected("Pending", BOTH, why="Starting")),
        (all_at_once(profile_given("second:1"), pods_run, pods_have_image("first:1")), Expected("Running", BOTH)),
        (all_pods_end(1), Expected("Restarting", "1-0 1-1", attempt=1)),
        (all_at_once(pods_have_image("first:1"), profile_deleted), Expected("Restarting", "1-0 1-1")),
        (lifecycle_patched(suspend=True), Expected("Suspended", "", attempt=2)),
        (lifecycle_patched(suspend=False), Expected("Pending", "2-0 2-1", attempt=2)),
        (all_at_once(pods_have_image("first:1"), pods_run), Expected("Running", "2-0 2-1")),
        profile="shared",
    ),
    scenario(
        "a job that is suspended from the beginning has its profile from when it was accepted",
        (nothing_happens, Expected("Suspended", "")),
        (profile_given("first:1"), Expected("Suspended", "")),
        (profile_given("second:1"), Expected("Suspended", "")),
        (lifecycle_patched(suspend=False), Expected("Pending", BOTH)),
        (all_at_once(pods_have_image("first:1"), pods_run), Expected("Running", BOTH)),
        profile="shared",
        lifecycle={"suspend": True},
    ),
    scenario(
        "a job that its profile makes impossible is accepted when the profile is corrected",
        (
            all_at_once(profile_given("first:1", gpuType="GB200"), time_passes(30)),
            Expected("Pending", "", why="Invalid"),
        ),
        (all_at_once(profile_given("second:1"), time_passes(30)), Expected("Pending", BOTH, why="Starting")),
        (all_at_once(pods_have_image("second:1"), pods_run), Expected("Running", BOTH)),
        profile="shared",
    ),
    scenario(
        "a profile of the namespace hides that of the cluster",
        (
            all_at_once(profile_given("far:1", cluster_wide=True), profile_given("near:1"), time_passes(30)),
            Expected("Pending", BOTH),
        ),
        (pods_have_image("near:1"), Expected("Pending", BOTH)),
        profile="shared",
    ),
    scenario(
        "a job with an image of its own takes the rest from the profile of the cluster",
        (all_at_once(profile_given("far:1", cluster_wide=True), time_passes(30)), Expected("Pending", BOTH)),
        (pods_have_image("own:1"), Expected("Pending", BOTH)),
        profile="shared",
        resources={"image": "own:1"},
    ),
)
