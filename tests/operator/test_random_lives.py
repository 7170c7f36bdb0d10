"""Lives drawn at random: failures, lagging watches, conflicts and crashes in any order.

While it lasts nothing forbidden may happen; when it is over the job must find its way back.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_cluster import Body, FakeCluster, unavailable_error
from fake_world import World
from moejob_api.contract.pods import ExitCode, Label, PodOutcome, PodRole, TerminationMessage
from moejob_api.diagnosis.reading import read_status
from moejob_api.job.status import Phase, Status
from moejob_operator.actions import Kind, ObjectReference
from moejob_operator.cluster import Raw, Retryable
from scenarios import GRPO, assert_all_time_is_counted

LONG_SECONDS = 400.0
COUNTED = (1, 137)
# A reconcile has seldom more halves of changes than this.
HALVES = 24


@dataclass(eq=False)
class WatchedCluster(FakeCluster):
    """A cluster that objects to whatever an operator must never do."""

    counted_ends: int = 0
    charges: int = 0
    # Another client changes the job right before the next status is written.
    interloper: bool = False
    failed_for: list[str] = field(default_factory=list)

    async def delete(self, ref: ObjectReference, *, grace_seconds: int | None) -> None:
        there = self.objects.get((ref.kind, ref.namespace, ref.name))
        if ref.kind is Kind.POD and there is not None and there["metadata"]["uid"] == ref.uid:
            assert self._may_go(there), f"{ref.name} did nothing wrong and was deleted"
            assert grace_seconds != 0 or there["spec"]["nodeName"] in self.lost_nodes, f"{ref.name} may still run"
        await super().delete(ref, grace_seconds=grace_seconds)

    async def write_status(self, job: Raw, status: Raw) -> None:
        if self.interloper:
            self.interloper = False
            self.store_changed(self._job)
        before = self._status
        await super().write_status(job, status)
        self._judge(before, self._status)

    @property
    def _job(self) -> Body:
        return next(body for (kind, _, _), body in self.objects.items() if kind is Kind.JOB)

    @property
    def _status(self) -> Status:
        return read_status(self._job.get("status"))

    def _may_go(self, pod: Body) -> bool:
        status, labels = self._status, pod["metadata"]["labels"]
        is_over = status.phase is not None and (status.phase.is_finished or status.phase is Phase.SUSPENDED)
        is_suspended = self._job["spec"].get("lifecycle", {}).get("suspend", False)
        if is_over or is_suspended or "deletionTimestamp" in pod["metadata"]:
            return True
        if labels[Label.ROLE] == PodRole.ROLLOUT:
            return pod["status"]["phase"] in ("Failed", "Succeeded")
        answered = {entry.uid for entry in status.restarts.ladder.replacing}
        return int(labels[Label.ATTEMPT]) < status.attempt or pod["metadata"]["uid"] in answered

    def _judge(self, before: Status, after: Status) -> None:
        charged = after.restarts.since_checkpoint - before.restarts.since_checkpoint
        assert charged <= 1, "one reconcile charged more than one failure"
        self.charges += max(0, charged)
        assert self.charges <= self.counted_ends, "more was charged than has failed"
        assert after.attempt >= before.attempt
        assert_all_time_is_counted(after)
        assert after.restarts.total >= before.restarts.total
        if before.phase is not None and before.phase.is_finished:
            assert after.phase is before.phase, "a finished job came back"
        if after.phase is Phase.SUCCEEDED:
            gang = [
                pod
                for pod in self.pods(PodRole.TRAINER)
                if pod["metadata"]["labels"][Label.ATTEMPT] == str(after.attempt)
            ]
            ended = [pod["status"]["phase"] for pod in gang]
            assert after.layout is not None
            assert ended.count("Succeeded") >= after.layout.nodes, "a job succeeded with ranks that had not"
            assert len(gang) <= after.layout.nodes + after.layout.spares


class Lives(RuleBasedStateMachine):
    """One job. Rules are what people, nodes and the API server do; the operator looks whenever hypothesis says so."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = WatchedCluster()
        self.world = World(cluster=self.cluster)
        self.limit = 0
        self.was_final = False

    @initialize(
        size=st.sampled_from([(1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 2)]),
        limit=st.integers(0, 3),
        has_engines=st.booleans(),
        lags=st.booleans(),
    )
    def a_job_is_applied(self, size: tuple[int, int], limit: int, has_engines: bool, lags: bool) -> None:
        nodes, spares = size
        job: dict[str, Any] = {"parallelism": {"data": nodes}, "lifecycle": {"backoffLimit": limit}}
        job["resources"] = {"spares": spares}
        self.limit = limit
        self.world.apply(**{**(GRPO if has_engines else {}), **job})
        self.cluster.lags = lags
        self.cluster.sync()

    # --- the operator ------------------------------------------------------------------------------------------------

    @rule()
    def the_operator_looks(self) -> None:
        crashes = self.world.crashes
        with suppress(Retryable):
            self.world.reconcile()
        if self.world.crashes > crashes:
            # The next process lists everything before it begins.
            self.cluster.sync()

    @rule(halves=st.integers(0, HALVES))
    def the_operator_will_crash(self, halves: int) -> None:
        self.cluster.crash_at = self.cluster.halves + halves

    @rule()
    def the_watches_catch_up(self) -> None:
        self.cluster.sync()

    @rule(calls=st.integers(1, 3))
    def the_api_server_will_not_answer(self, calls: int) -> None:
        self.cluster.faults = [unavailable_error() for _ in range(calls)]

    @rule()
    def somebody_will_touch_the_job(self) -> None:
        self.cluster.interloper = True

    @rule(is_denied=st.booleans())
    def quota_changes(self, is_denied: bool) -> None:
        self.cluster.refuses = lambda manifest: "exceeded quota" if is_denied and manifest["kind"] == "Pod" else None

    @rule(seconds=st.sampled_from([0.4, 1.0, 3.0, 31.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    # --- people ------------------------------------------------------------------------------------------------------

    @rule(suspend=st.booleans())
    def somebody_suspends_or_resumes(self, suspend: bool) -> None:
        self.world.set_lifecycle(suspend=suspend)

    @precondition(lambda self: self.pods())
    @rule(data=st.data())
    def somebody_deletes_a_pod(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([pod["metadata"]["name"] for pod in self.pods()]))
        self.cluster.delete_object((Kind.POD, "team", name))

    # --- nodes -------------------------------------------------------------------------------------------------------

    @rule()
    def pods_start(self) -> None:
        self.world.run()

    @rule()
    def kubelets_delete(self) -> None:
        self.world.kubelets_delete()

    @precondition(lambda self: self.running())
    @rule(data=st.data(), code=st.sampled_from([0, 1, 137, 143, 143, ExitCode.BAD_CONFIGURATION.value]))
    def a_pod_ends(self, data: st.DataObject, code: int) -> None:
        self.world.end_pod(data.draw(st.sampled_from(self.running())), code)
        self.cluster.counted_ends += code in COUNTED
        self.was_final = self.was_final or code == ExitCode.BAD_CONFIGURATION

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def a_pod_loses_its_peers(self, data: st.DataObject) -> None:
        self.world.end_pod(
            data.draw(st.sampled_from(self.running())), 1, TerminationMessage(outcome=PodOutcome.LOST_PEERS)
        )
        self.cluster.counted_ends += 1

    @precondition(lambda self: self.running())
    @rule()
    def the_run_is_done(self) -> None:
        for index in self.running():
            self.world.end_pod(index, 0)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def a_pod_is_evicted(self, data: st.DataObject) -> None:
        self.world.evict_pod(data.draw(st.sampled_from(self.running())))

    @precondition(lambda self: self.running(PodRole.ROLLOUT))
    @rule(data=st.data())
    def an_engine_is_evicted(self, data: st.DataObject) -> None:
        self.world.evict_pod(data.draw(st.sampled_from(self.running(PodRole.ROLLOUT))), PodRole.ROLLOUT)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def a_node_is_lost(self, data: st.DataObject) -> None:
        self.world.lose_node(data.draw(st.sampled_from(self.running())))

    @rule()
    def nodes_come_back(self) -> None:
        self.world.dead_nodes.clear()
        self.cluster.lost_nodes = frozenset()

    @precondition(lambda self: self.running())
    @rule(step=st.integers(1, 90), saved=st.none() | st.integers(1, 90))
    def the_run_moves(self, step: int, saved: int | None) -> None:
        self.world.report_progress(step, saved=saved)

    @precondition(lambda self: self.running())
    @rule(step=st.integers(1, 90), restarts=st.integers(1, 3))
    def ranks_are_restarted_in_their_pods(self, step: int, restarts: int) -> None:
        self.world.report_progress(step, restarts=restarts)
        self.cluster.counted_ends += 1

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def no_pod_is_ahead_of_the_status(self) -> None:
        attempts = [int(pod["metadata"]["labels"][Label.ATTEMPT]) for pod in self.cluster.pods(PodRole.TRAINER)]
        assert max(attempts, default=0) <= self.world.status.attempt

    @invariant()
    def the_budget_is_kept(self) -> None:
        assert self.world.status.restarts.since_checkpoint <= self.limit

    # --- the way back ------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if (Kind.JOB, "team", "job") not in self.cluster.objects:
            return
        self.cluster.faults, self.cluster.crash_at, self.cluster.interloper = [], None, False
        self.quota_changes(is_denied=False)
        self.nodes_come_back()
        self.cluster.lags = False
        self.world.set_lifecycle(suspend=False)
        for _ in range(3):
            self.world.settle()
            self.world.wait(LONG_SECONDS)
        self._ends_well()
        self._rests()

    def _ends_well(self) -> None:
        if self.world.status.phase is not None and self.world.status.phase.is_finished:
            return
        layout = self.world.status.layout
        assert layout is not None
        attempt = self.world.status.attempt
        names = [f"{attempt}-{index}" for index in range(layout.nodes + layout.spares)]
        # Spares are made beside a gang that runs.
        assert set(names[: layout.nodes]) <= set(self.world.pod_names()) <= set(names)
        self.world.run()
        assert self._settled_phase() is Phase.RUNNING
        assert self.world.pod_names() == names
        self.world.end_all_pods(0)
        assert self._settled_phase() is Phase.SUCCEEDED

    def _settled_phase(self) -> Phase | None:
        self.world.settle()
        return self.world.status.phase

    def _rests(self) -> None:
        self.world.settle()
        before = (self.cluster.versions, len(self.cluster.events))
        for _ in range(2):
            self.world.reconcile()
        assert (self.cluster.versions, len(self.cluster.events)) == before

    # --- what is there -----------------------------------------------------------------------------------------------

    def pods(self) -> list[Body]:
        return list(self.cluster.pods())

    def running(self, role: PodRole = PodRole.TRAINER) -> list[int]:
        return [
            int(pod["metadata"]["labels"][Label.INDEX])
            for pod in self.cluster.pods(role)
            if pod["status"]["phase"] == "Running"
        ]


TestLives = Lives.TestCase
TestLives.settings = settings(settings(), max_examples=150, stateful_step_count=40)
