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

Verb = Callable[[World], None]


@dataclass(frozen=True)
class See:
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
    story: tuple[tuple[Verb, See], ...]
    job: Mapping[str, Any] = field(default_factory=dict)
    apis: frozenset[str] = frozenset()


def scenario(title: str, /, *story: tuple[Verb, See], apis: frozenset[str] = frozenset(), **job: Any) -> Scenario:
    """A story; sections of the job are keywords."""
    return Scenario(title, story, job, apis)


def live(scenario: Scenario, world: World) -> World:
    """A whole story in a new world, with everything seen that was to be seen. Returns the world after it."""
    world.apply(**scenario.job)
    for number, (verb, see) in enumerate(scenario.story):
        verb(world)
        world.settle()
        _check(world, see, number)
    return world


def _check(world: World, see: See, number: int) -> None:
    """Compare what is there with what is to be seen."""
    if see.phase == "gone" or world.is_gone:
        assert (see.phase, world.is_gone) == ("gone", True), f"step {number}"
        return
    restarts = world.status.restarts
    failure = world.status.last_failure
    told = " ".join([*(found.message for found in world.status.conditions), failure.message if failure else ""])
    actual = See(
        phase=world.status.phase,
        pods=" ".join(world.names()),
        engines=" ".join(world.names(PodRole.ROLLOUT)),
        attempt=world.status.attempt,
        spent=restarts.since_checkpoint,
        uncounted=restarts.ladder.uncounted,
        why=world.condition(ConditionType.RUNNING).partition(" ")[2],
        failure=failure.reason if failure else None,
    )
    wanted = {name: value for name, value in vars(see).items() if value is not None and name != "says"}
    assert {name: getattr(actual, name) for name in wanted} == wanted, f"step {number}"
    assert see.says in told, f"step {number}"
    assert_all_time_is_told(world.status)


def assert_all_time_is_told(status: Status) -> None:
    """Each second since pods were first created is in one sum, and in one alone."""
    found = status.goodput
    if found is None:
        return
    uses = (found.productive_seconds, found.starting_seconds, found.lost_seconds, found.suspended_seconds)
    assert min(uses) >= 0
    begun, until = (datetime.fromisoformat(text or "") for text in (status.start_time, found.updated_at))
    assert sum(uses) == pytest.approx((until - begun).total_seconds(), abs=0.2)


# --- verbs ------------------------------------------------------------------------------------------------------------


def nothing(world: World) -> None:
    """Only the operator reconciles."""


def runs(world: World) -> None:
    """All pods start."""
    world.run()


def waits(seconds: float) -> Verb:
    """Time passes."""
    return lambda world: world.wait(seconds)


def ends(index: int, code: int, outcome: PodOutcome | None = None, **more: Any) -> Verb:
    """A trainer pod ends."""
    word = (
        None
        if outcome is None
        else TerminationMessage(outcome=outcome, message="its last line", rank=index, exit_code=code)
    )
    return lambda world: world.end(index, code, word, **more)


def all_end(code: int, outcome: PodOutcome | None = None, **said: Any) -> Verb:
    """The whole gang ends alike."""
    return lambda world: world.end_all(code, None if outcome is None else TerminationMessage(outcome=outcome, **said))


def both(*verbs: Verb) -> Verb:
    """Several things happen before the operator reconciles."""

    def happen(world: World) -> None:
        for verb in verbs:
            verb(world)

    return happen


def lifecycle(**fields: Any) -> Verb:
    """kubectl patch of spec.lifecycle."""
    return lambda world: world.set_lifecycle(**fields)


def says(step: int, **more: Any) -> Verb:
    """Time for the next question passes, and pods answer it."""

    def answer(world: World) -> None:
        world.wait(31)
        world.say(step, **more)

    return answer


def silent(index: int) -> Verb:
    """A pod answers the operator no longer."""
    return lambda world: world.fall_silent(index)


def unheard(index: int) -> Verb:
    """The cluster has not heard of a pod's node for as long as it waits."""
    return lambda world: world.lose_sight(index)


def node_lost(index: int, *, is_known: bool = True) -> Verb:
    """The node of a pod is cut off."""
    return lambda world: world.lose_node(index, is_known=is_known)


def pod_deleted(index: int, role: PodRole = PodRole.TRAINER) -> Verb:
    """kubectl delete pod."""
    return lambda world: world.delete_pod(index, role)


def evicted(index: int, role: PodRole = PodRole.TRAINER) -> Verb:
    """A kubelet takes the place away."""
    return lambda world: world.evict(index, role)


def preempted(index: int) -> Verb:
    """The scheduler takes the place away."""
    return lambda world: world.preempt(index)


def evicted_by_kueue(*indices: int) -> Verb:
    """Kueue gives the quota to another job, and the pods do not end in time."""

    def evict(world: World) -> None:
        for index in indices:
            world.preempt(index, 137, condition="TerminationTarget")

    return evict


def quota(message: str | None) -> Verb:
    """A quota denies pods, or no longer does."""
    return lambda world: world.cluster.deny_pods(message)


def scheduled_not(index: int, reason: str, message: str) -> Verb:
    """The scheduler finds no place."""
    return lambda world: world.hold(index, condition={"reason": reason, "message": message})


def pulled_not(index: int, reason: str = "ImagePullBackOff") -> Verb:
    """The kubelet gets no image."""
    return lambda world: world.hold(index, waiting={"reason": reason, "message": "no such image"})


def engine_ends(index: int, code: int, log: str) -> Verb:
    """The container of an engine ends, and is started again later."""
    return lambda world: world.end_engine(index, code, log)


def claim(phase: str) -> Verb:
    """The volume controller says something of the claim."""
    return lambda world: world.bind_claim(phase)


def job_deleted(world: World) -> None:
    """kubectl delete."""
    world.delete_job()


def deleted_in_foreground(world: World) -> None:
    """kubectl delete --cascade=foreground."""
    world.delete_job_in_foreground()


# --- the table --------------------------------------------------------------------------------------------------------

BOTH = "0-0 0-1"
KUEUE = frozenset({"kueue.x-k8s.io"})
STARTED = (nothing, See("Pending", BOTH, attempt=0, spent=0, why="Starting"))
RUNNING = (runs, See("Running", BOTH, attempt=0, spent=0, why="AllPodsRun"))
KILLED = RankFault(outcome=PodOutcome.RANK_FAILED, message="rank 1 was killed by signal 9", rank=1, exit_code=-9)
# What became of pod 0 is not known yet.
GIVEN_UP = (
    both(silent(0), waits(20), ends(1, 1, PodOutcome.LOST_PEERS)),
    See("Running", BOTH, attempt=0, spent=0, why="LostPeers", says="nothing is heard of job-trainer-0-00000"),
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
FOUR_STARTED = (nothing, See("Pending", FOUR, attempt=0, spent=0, why="Starting"))

SCENARIOS: tuple[Scenario, ...] = (
    scenario("a job runs to its end", STARTED, RUNNING, (all_end(0), See("Succeeded", BOTH, why="Completed"))),
    scenario(
        "one rank that is done does not make a success",
        STARTED,
        RUNNING,
        (ends(0, 0), See("Running", BOTH)),
        (ends(1, 0), See("Succeeded", BOTH)),
    ),
    scenario(
        "a rank that fails takes its pod, which is replaced alone",
        STARTED,
        RUNNING,
        (ends(1, 1, PodOutcome.RANK_FAILED), See("Restarting", BOTH, attempt=0, spent=1, failure="RankFailed")),
        (runs, See("Running", BOTH, attempt=0, spent=1, why="AllPodsRun")),
        (all_end(0), See("Succeeded")),
    ),
    scenario(
        "a pod without a last word is replaced",
        STARTED,
        RUNNING,
        (ends(1, 137), See("Restarting", BOTH, attempt=0, spent=1, failure="PodFailed", says="exit code 137")),
        (runs, See("Running", spent=1)),
    ),
    scenario(
        "without pod 0 the whole gang is replaced",
        STARTED,
        RUNNING,
        (ends(0, 1), See("Restarting", "1-0 1-1", attempt=1, spent=1)),
        (runs, See("Running", "1-0 1-1", attempt=1, spent=1)),
        (all_end(0), See("Succeeded")),
    ),
    scenario(
        "pods that fail together are one failure",
        STARTED,
        RUNNING,
        (all_end(1), See("Restarting", "1-0 1-1", attempt=1, spent=1)),
    ),
    scenario(
        "peers that fail while a pod is replaced are not charged again",
        FOUR_STARTED,
        (runs, See("Running", FOUR)),
        (ends(2, 1), See("Restarting", FOUR, attempt=0, spent=1)),
        (ends(1, 1, PodOutcome.LOST_PEERS), See("Restarting", FOUR, attempt=0, spent=1)),
        (runs, See("Running", FOUR, attempt=0, spent=1)),
        **MANY,
    ),
    scenario(
        "pod 0 that fails while another is replaced takes the gang, at no further charge",
        FOUR_STARTED,
        (runs, See("Running", FOUR)),
        (ends(2, 1), See("Restarting", FOUR, attempt=0, spent=1)),
        (ends(0, 1, PodOutcome.LOST_PEERS), See("Restarting", "1-0 1-1 1-2 1-3", attempt=1, spent=1)),
        (runs, See("Running", attempt=1, spent=1)),
        **MANY,
    ),
    scenario(
        "a pod that fails again right after it was replaced is charged again",
        STARTED,
        RUNNING,
        (ends(1, 1), See("Restarting", BOTH, attempt=0, spent=1)),
        (both(runs, ends(1, 1)), See("Restarting", BOTH, attempt=0, spent=2)),
        (runs, See("Running", spent=2)),
    ),
    scenario(
        "a pod that keeps failing takes the gang with it",
        STARTED,
        RUNNING,
        (ends(1, 1), See(attempt=0, spent=1)),
        (runs, See("Running")),
        (both(waits(60), ends(1, 1)), See(attempt=0, spent=2)),
        (runs, See("Running")),
        (both(waits(60), ends(1, 1)), See("Restarting", attempt=1, spent=3)),
    ),
    scenario(
        "delays grow, and are kept",
        STARTED,
        RUNNING,
        (ends(0, 1), See("Restarting", "1-0 1-1", spent=1)),
        (both(runs, ends(0, 1)), See("Restarting", "2-0 2-1", spent=2)),
        (both(runs, ends(0, 1)), See("Restarting", "", spent=3, why="BackingOff")),
        (waits(4), See("Restarting", "3-0 3-1", spent=3)),
        (both(runs, ends(0, 1)), See("Restarting", "", spent=4, why="BackingOff")),
        (waits(4), See("Restarting", "", spent=4, why="BackingOff")),
        (waits(4), See("Restarting", "4-0 4-1", spent=4)),
    ),
    scenario(
        "a job gives up when its budget is spent",
        STARTED,
        RUNNING,
        (ends(1, 1), See("Restarting", spent=1)),
        (runs, See("Running")),
        (ends(1, 1), See("Failed", why="BackoffLimitExceeded", spent=1, says="backoffLimit is 1")),
        (nothing, See("Failed", "0-1")),
        lifecycle={"backoffLimit": 1},
    ),
    scenario(
        "without a budget the first failure is the last",
        STARTED,
        RUNNING,
        (ends(1, 1), See("Failed", "0-1", spent=0)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a new checkpoint renews the budget",
        STARTED,
        RUNNING,
        (says(10), See("Running", spent=0)),
        (ends(1, 1), See("Restarting", spent=1)),
        (runs, See("Running", spent=1)),
        (says(15, saved=12), See("Running", spent=0)),
        (ends(1, 1), See("Restarting", spent=1)),
        (runs, See("Running", spent=1)),
        (says(15, saved=12), See("Running", spent=1)),
        lifecycle={"backoffLimit": 1},
    ),
    scenario(
        "a checkpoint that is damaged and made again renews nothing",
        STARTED,
        RUNNING,
        (says(12, saved=12), See("Running", spent=0)),
        (ends(1, 1), See("Restarting", spent=1)),
        (runs, See("Running", spent=1)),
        (says(9, saved=8), See("Running", spent=1)),
        (says(12, saved=12), See("Running", spent=1)),
        (ends(1, 1), See("Failed", why="BackoffLimitExceeded", spent=1)),
        lifecycle={"backoffLimit": 1},
    ),
    scenario(
        "a bad configuration is final at once",
        STARTED,
        RUNNING,
        (
            ends(1, ExitCode.BAD_CONFIGURATION, PodOutcome.BAD_CONFIGURATION),
            See("Failed", "0-1", why="BadConfiguration", spent=0, failure="BadConfiguration", says="its last line"),
        ),
    ),
    scenario(
        "a job that has failed says how another goes on with what it saved, before it takes that along",
        STARTED,
        RUNNING,
        (says(15, saved=12), See("Running")),
        (
            ends(1, ExitCode.BAD_CONFIGURATION, PodOutcome.BAD_CONFIGURATION),
            See("Failed", says=f"step 12 is saved, or a later one, {GOES_ON}; job-storage is deleted with this job"),
        ),
    ),
    scenario(
        "what was saved on a claim of somebody else's stays",
        STARTED,
        RUNNING,
        (says(15, saved=12), See("Running")),
        (
            ends(1, ExitCode.BAD_CONFIGURATION, PodOutcome.BAD_CONFIGURATION),
            # What is said next is another condition's: nothing of a claim that is deleted.
            See(
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
        (ends(1, 137, container_reason="OOMKilled"), See("Restarting", spent=1, failure="OutOfMemory")),
    ),
    scenario(
        "preemption is not counted",
        STARTED,
        RUNNING,
        (preempted(1), See("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="Preempted")),
        (runs, See("Running", BOTH, spent=0)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a gang that saved and stopped is not counted",
        STARTED,
        RUNNING,
        (all_end(143, PodOutcome.PREEMPTED), See("Restarting", "1-0 1-1", attempt=1, spent=0, uncounted=1)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "eviction is not counted",
        STARTED,
        RUNNING,
        (evicted(1), See("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="Preempted")),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a pod that somebody deletes is not counted",
        STARTED,
        RUNNING,
        (pod_deleted(1), See("Restarting", BOTH, attempt=0, spent=0, uncounted=1, says="was deleted")),
        (runs, See("Running", BOTH)),
        (pod_deleted(0), See("Restarting", "1-0 1-1", attempt=1, spent=0, uncounted=2)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a lost node is not counted, and its pod is not waited for",
        STARTED,
        RUNNING,
        (node_lost(1), See("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="NodeLost")),
        (runs, See("Running", BOTH)),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a pod is only taken by force from a node that is lost",
        STARTED,
        RUNNING,
        (node_lost(1, is_known=False), See("Running", "0-0 0-1+", attempt=0, spent=0, why="PodEnding")),
        (waits(200), See("Running", "0-0 0-1+", attempt=0, spent=0)),
        # The grace period and what a living kubelet may take have passed.
        (waits(131), See("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="NodeLost")),
    ),
    scenario(
        "a pod that nobody hears of is replaced before its node is given up",
        STARTED,
        RUNNING,
        (says(5), See("Running")),
        (
            both(lambda world: world.fall_silent(1), lambda world: world.lose_sight(1)),
            See("Restarting", BOTH, attempt=0, spent=0, uncounted=1, failure="NodeLost", says="node-trainer-1"),
        ),
    ),
    scenario(
        "a pod that answers outlives the word of its node",
        STARTED,
        RUNNING,
        (says(5), See("Running")),
        (lambda world: world.lose_sight(1), See("Running", BOTH, attempt=0, spent=0)),
        (says(8), See("Running", BOTH, attempt=0, spent=0)),
    ),
    scenario(
        "a peer that gives up on a pod before its node is called lost is no failure",
        STARTED,
        RUNNING,
        (says(5), See("Running", BOTH, spent=0)),
        GIVEN_UP,
        (
            both(waits(40), unheard(0)),
            See("Restarting", "1-0 1-1", attempt=1, spent=0, uncounted=1, failure="NodeLost"),
        ),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a peer that gives up on a pod before that is deleted is no failure",
        STARTED,
        RUNNING,
        (says(5), See("Running", BOTH, spent=0)),
        GIVEN_UP,
        (pod_deleted(0), See("Restarting", "1-0 1-1", attempt=1, spent=0, uncounted=1, failure="Preempted")),
        lifecycle={"backoffLimit": 0},
    ),
    scenario(
        "a peer that gives up on a pod before that is seen to fail is not blamed",
        STARTED,
        RUNNING,
        (says(5), See("Running", BOTH, spent=0)),
        GIVEN_UP,
        (ends(0, 137), See("Restarting", "1-0 1-1", attempt=1, spent=1, failure="PodFailed", says="exit code 137")),
    ),
    scenario(
        "peers that give up on a pod of which nothing is said are charged once in the end",
        FOUR_STARTED,
        (runs, See("Running", FOUR)),
        (says(5), See("Running", FOUR, spent=0)),
        (both(silent(0), waits(20), ends(1, 1, PodOutcome.LOST_PEERS)), See("Running", FOUR, spent=0, why="LostPeers")),
        (both(waits(5), ends(2, 1, PodOutcome.LOST_PEERS)), See("Running", FOUR, spent=0, why="LostPeers")),
        (waits(40), See("Running", FOUR, spent=0, why="LostPeers")),
        (waits(30), See("Restarting", FOUR, attempt=0, spent=1, failure="LostPeers", says="its last line")),
        **MANY,
    ),
    scenario(
        "a peer that gives up on a pod that answers is charged at once",
        STARTED,
        RUNNING,
        (says(5), See("Running", BOTH, spent=0)),
        (ends(1, 1, PodOutcome.LOST_PEERS), See("Restarting", BOTH, attempt=0, spent=1, failure="LostPeers")),
    ),
    scenario(
        "a peer whose node has another time is charged at once",
        STARTED,
        RUNNING,
        (says(5), See("Running", BOTH, spent=0)),
        (
            both(silent(0), waits(3600), ends(1, 1, PodOutcome.LOST_PEERS), waits(-3600)),
            See("Restarting", BOTH, attempt=0, spent=1, failure="LostPeers"),
        ),
    ),
    scenario(
        "an old gang on a dead node holds the next one back",
        STARTED,
        RUNNING,
        (
            both(lambda world: world.dead_nodes.add("node-trainer-1"), ends(0, 1)),
            See("Restarting", "0-1+", attempt=1, spent=1, why="OldPodsLeft"),
        ),
        (waits(400), See("Restarting", "0-1+", attempt=1, why="OldPodsLeft", says="node-trainer-1")),
        (lambda world: world.dead_nodes.clear(), See("Restarting", "1-0 1-1", attempt=1, spent=1)),
    ),
    scenario(
        "a hung rank is named and its pod replaced",
        STARTED,
        RUNNING,
        (says(5), See("Running")),
        (both(waits(600), says(5, age=100)), See("Running", spent=0)),
        (
            both(waits(600), says(5, age=640)),
            See("Restarting", attempt=1, spent=1, failure="Hung", says="rank 0 silent"),
        ),
        (runs, See("Running", "1-0 1-1", attempt=1, spent=1)),
        lifecycle={"progressDeadlineSeconds": 600},
    ),
    scenario(
        "ranks that are never heard are hung too",
        STARTED,
        (lambda world: world.start(), See("Running")),
        (waits(620), See("Running")),
        (waits(20), See("Restarting", attempt=1, spent=1, failure="Hung", says="no rank has been heard")),
        lifecycle={"progressDeadlineSeconds": 600},
    ),
    scenario(
        "nobody is hung while the gang is not complete",
        STARTED,
        (both(lambda world: world.start(), lambda world: world.hold(1)), See("Running")),
        (ends(1, 1), See("Restarting", BOTH, spent=1)),
        (waits(5000), See("Restarting", BOTH, spent=1)),
        lifecycle={"progressDeadlineSeconds": 600},
    ),
    scenario(
        "ranks that the launcher restarted are charged",
        STARTED,
        RUNNING,
        (says(5), See("Running", spent=0)),
        (says(8, restarts=1), See("Running", BOTH, attempt=0, spent=1, failure="RankFailed")),
        (says(9, restarts=1), See("Running", BOTH, attempt=0, spent=1)),
        (says(10, restarts=2), See("Running", BOTH, attempt=0, spent=2)),
        (says(11, restarts=3), See("Restarting", "", attempt=1, spent=3)),
        (waits(4), See("Restarting", "1-0 1-1", attempt=1, spent=3)),
        (runs, See("Running", attempt=1, spent=3)),
        (says(11), See("Running", attempt=1, spent=3)),
        (says(12), See("Running", attempt=1, spent=3)),
    ),
    scenario(
        "ranks that were restarted before their pods were first asked are charged",
        STARTED,
        (both(runs, says(5, restarts=1, fault=KILLED)), See("Running", BOTH, attempt=0, spent=1, failure="RankFailed")),
        (says(9, restarts=1), See("Running", BOTH, attempt=0, spent=1)),
        (ends(0, 137), See("Restarting", "1-0 1-1", attempt=1, spent=2, failure="PodFailed")),
        (both(runs, says(9, restarts=1)), See("Running", "1-0 1-1", attempt=1, spent=3, failure="RankFailed")),
        (says(10, restarts=1), See("Running", attempt=1, spent=3)),
        (lifecycle(suspend=True), See("Suspended", "", attempt=2)),
        (lifecycle(suspend=False), See("Pending", "2-0 2-1", attempt=2)),
        (both(runs, says(11, restarts=1)), See("Running", attempt=2, spent=4)),
    ),
    scenario(
        "what a rank died of is told though its pod lives on",
        STARTED,
        RUNNING,
        (says(5), See("Running", spent=0)),
        (
            says(8, restarts=1, fault=KILLED),
            See("Running", BOTH, spent=1, failure="RankFailed", says="rank 1 was killed"),
        ),
        (all_end(0), See("Succeeded", spent=1, failure="RankFailed")),
    ),
    scenario(
        "ranks that the launcher restarted for their silence were hung",
        STARTED,
        RUNNING,
        (says(5), See("Running", spent=0)),
        (
            says(8, restarts=1, fault=RankFault(outcome=PodOutcome.HUNG, message="rank 1 silent", rank=1)),
            See("Running", BOTH, spent=1, failure="Hung", says="rank 1 silent"),
        ),
    ),
    scenario(
        "a restart of ranks shortly before the end is told by the last words",
        STARTED,
        RUNNING,
        (says(5), See("Running", spent=0)),
        (
            all_end(0, PodOutcome.COMPLETED, restarts=1, fault=KILLED),
            See("Succeeded", failure="RankFailed", says="rank 1 was killed"),
        ),
    ),
    scenario(
        "ranks that were restarted for a pod that was replaced are no failure of their own",
        STARTED,
        RUNNING,
        (ends(1, 137), See("Restarting", BOTH, attempt=0, spent=1, failure="PodFailed", says="exit code 137")),
        (runs, See("Running", BOTH, attempt=0, spent=1)),
        (
            all_end(0, PodOutcome.COMPLETED, restarts=1, fault=KILLED),
            See("Succeeded", failure="PodFailed", says="exit code 137"),
        ),
    ),
    scenario(
        "suspending stops the pods and keeps the volume",
        STARTED,
        RUNNING,
        (lifecycle(suspend=True), See("Suspended", "", attempt=1, spent=0, why="SuspendRequested")),
        (lifecycle(suspend=False), See("Pending", "1-0 1-1", attempt=1, spent=0)),
        (runs, See("Running", "1-0 1-1")),
        (all_end(0), See("Succeeded")),
    ),
    scenario(
        "a job that is born suspended creates nothing",
        (nothing, See("Suspended", "", attempt=0)),
        (lifecycle(suspend=False), See("Pending", BOTH, attempt=0)),
        lifecycle={"suspend": True},
    ),
    scenario(
        "suspending between two gangs forgets the delay",
        STARTED,
        RUNNING,
        (ends(0, 1), See("Restarting", spent=1)),
        (both(runs, ends(0, 1)), See("Restarting", spent=2)),
        (both(runs, ends(0, 1)), See("Restarting", "", attempt=3, spent=3, why="BackingOff")),
        (lifecycle(suspend=True), See("Suspended", "", attempt=3, spent=3)),
        (lifecycle(suspend=False), See("Pending", "3-0 3-1", attempt=3, spent=3)),
    ),
    scenario(
        "suspending a run that has just ended changes nothing",
        STARTED,
        RUNNING,
        (both(all_end(0), lifecycle(suspend=True)), See("Succeeded", BOTH)),
    ),
    scenario(
        "a finished job is deleted after its time",
        STARTED,
        RUNNING,
        (all_end(0), See("Succeeded", BOTH)),
        (waits(30), See("Succeeded", BOTH)),
        (waits(31), See("gone")),
        lifecycle={"ttlSecondsAfterFinished": 60},
    ),
    scenario(
        "a deadline ends the job",
        STARTED,
        RUNNING,
        (waits(580), See("Running")),
        (waits(20), See("Failed", "", why="DeadlineExceeded", spent=0)),
        lifecycle={"activeDeadlineSeconds": 600},
    ),
    scenario(
        "time in suspension does not count against the deadline",
        STARTED,
        RUNNING,
        (both(waits(300), lifecycle(suspend=True)), See("Suspended", "")),
        (both(waits(10_000), lifecycle(suspend=False)), See("Pending", "1-0 1-1")),
        (runs, See("Running")),
        (waits(250), See("Running")),
        (waits(60), See("Failed", "", why="DeadlineExceeded")),
        lifecycle={"activeDeadlineSeconds": 600},
    ),
    scenario(
        "a deadline that passed while the run was ending does not undo its success",
        STARTED,
        RUNNING,
        (both(waits(700), all_end(0)), See("Succeeded", BOTH)),
        lifecycle={"activeDeadlineSeconds": 600},
    ),
    scenario(
        "a quota that denies pods is told, and tried again",
        (quota("exceeded quota: gpus"), See("Pending", "", why="QuotaExceeded", says="exceeded quota: gpus")),
        (waits(31), See("Pending", "", why="QuotaExceeded")),
        (both(quota(None), waits(31)), See("Pending", BOTH, attempt=0, spent=0, why="Starting")),
        RUNNING,
    ),
    scenario(
        "a quota that denies the next gang does not charge it",
        STARTED,
        RUNNING,
        (
            both(quota("exceeded quota: gpus"), ends(0, 1)),
            See("Restarting", "", attempt=1, spent=1, why="QuotaExceeded"),
        ),
        (waits(31), See("Restarting", "", attempt=1, spent=1, why="QuotaExceeded")),
        (both(quota(None), waits(31)), See("Restarting", "1-0 1-1", attempt=1, spent=1)),
    ),
    scenario(
        "an image that cannot be pulled is told",
        STARTED,
        (pulled_not(1), See("Pending", BOTH, why="ImagePullBackOff", says="no such image")),
        RUNNING,
    ),
    scenario(
        "a pod that finds no node is told",
        STARTED,
        (scheduled_not(0, "Unschedulable", "0/3 nodes have 8 GPUs"), See("Pending", BOTH, why="Unschedulable")),
        RUNNING,
    ),
    scenario(
        "a claim without a volume is told",
        STARTED,
        (
            both(
                claim("Pending"),
                scheduled_not(0, "Unschedulable", "0/2 nodes: pod has unbound immediate PersistentVolumeClaims"),
            ),
            See("Pending", BOTH, why="ClaimPending"),
        ),
        (claim("Bound"), See("Pending", BOTH, why="Starting")),
    ),
    scenario(
        "a job whose name is still taken waits",
        (nothing, See("Pending", BOTH)),
        (both(job_deleted, lambda world: world.apply()), See("Pending", BOTH, attempt=0)),
    ),
    scenario(
        "deleting a job while it starts leaves nothing",
        STARTED,
        (job_deleted, See("gone", "")),
    ),
    scenario(
        "nothing is created for a job that is being deleted",
        STARTED,
        (both(deleted_in_foreground, pod_deleted(0), pod_deleted(1)), See("Pending", "")),
    ),
    scenario(
        "a job that cannot fit is refused in words",
        (nothing, See("Pending", "", why="Invalid", says="layers")),
        (waits(600), See("Pending", "")),
        parallelism={"data": 1, "pipeline": 64},
    ),
    scenario(
        "a model that nobody here can see is trusted, and that is said",
        (nothing, See("Pending", BOTH)),
        RUNNING,
        model={"source": "pvc://models/mine"},
    ),
    scenario(
        "a gang scheduler that is not there is told",
        (nothing, See("Pending", "", why="GangApiMissing", says="scheduling.volcano.sh/v1beta1")),
        lifecycle={"gang": "Volcano"},
    ),
    scenario(
        "a gang waits in its queue",
        STARTED,
        (scheduled_not(0, "SchedulingGated", ""), See("Pending", BOTH, why="Queued")),
        RUNNING,
        (ends(0, 1), See("Restarting", "1-0 1-1", attempt=1)),
        apis=KUEUE,
        lifecycle={"queue": "team"},
    ),
    scenario(
        "a pod of a Kueue group keeps its name until the group has ended, so the gang is replaced",
        STARTED,
        RUNNING,
        (ends(1, 1), See("Restarting", "1-0 1-1", attempt=1, spent=1)),
        (runs, See("Running", "1-0 1-1", attempt=1, spent=1)),
        apis=KUEUE,
        lifecycle={"queue": "team"},
    ),
    scenario(
        "a gang that Kueue evicts is not counted",
        STARTED,
        RUNNING,
        (evicted_by_kueue(0, 1), See("Restarting", "1-0 1-1", attempt=1, spent=0, uncounted=1, failure="Preempted")),
        apis=KUEUE,
        lifecycle={"queue": "team", "backoffLimit": 0},
    ),
    scenario(
        "engines start beside the gang and end with the job",
        (nothing, See("Pending", BOTH, "0-0 0-1")),
        (runs, See("Running", BOTH, "0-0 0-1")),
        (all_end(0), See("Succeeded", BOTH, "")),
        **GRPO,
    ),
    scenario(
        "a lost engine is replaced alone",
        (nothing, See("Pending", BOTH, "0-0 0-1")),
        (both(runs, waits(60)), See("Running", BOTH, "0-0 0-1")),
        (evicted(1, PodRole.ROLLOUT), See("Running", BOTH, "0-0 0-1", attempt=0, spent=0, uncounted=0)),
        (pod_deleted(0, PodRole.ROLLOUT), See("Running", BOTH, "0-0 0-1", attempt=0, spent=0, uncounted=0)),
        **GRPO,
    ),
    scenario(
        "an engine that ends again and again is shown with the last line of its log",
        (nothing, See("Pending", BOTH, "0-0 0-1")),
        (runs, See("Running", BOTH, "0-0 0-1")),
        (
            engine_ends(1, 1, "INFO loading\nRuntimeError: no kernel for this GPU\n"),
            See(
                "Running", BOTH, "0-0 0-1", spent=0, why="CrashLoopBackOff", says="exit code 1: RuntimeError: no kernel"
            ),
        ),
        **GRPO,
    ),
    scenario(
        "an engine that calls the job wrong ends it",
        (nothing, See("Pending", BOTH, "0-0 0-1")),
        (runs, See("Running", BOTH, "0-0 0-1")),
        (
            engine_ends(0, ExitCode.BAD_CONFIGURATION, "INFO starting\nmoejob-rollout: MOEJOB_SPEC is not set\n"),
            See(
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
        (nothing, See("Pending", BOTH, "0-0 0-1")),
        (runs, See("Running", BOTH, "0-0 0-1")),
        (ends(0, 1), See("Restarting", "1-0 1-1", "0-0 0-1", attempt=1, spent=1)),
        (lifecycle(suspend=True), See("Suspended", "", "", attempt=2)),
        (lifecycle(suspend=False), See("Pending", "2-0 2-1", "0-0 0-1", attempt=2)),
        **GRPO,
    ),
    scenario(
        "a succeeded pod cannot meet a new one, so the gang is replaced",
        FOUR_STARTED,
        (runs, See("Running", FOUR)),
        (ends(1, 0), See("Running", FOUR)),
        (ends(2, 1), See("Restarting", "1-0 1-1 1-2 1-3", attempt=1, spent=1)),
        **MANY,
    ),
)
