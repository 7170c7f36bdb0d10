"""A job's life in a FakeCluster: what people, nodes and time do to it, as verbs, and the operator that answers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from builders import GRPO, SFT, merge_sections
from fake_cluster import NAMESPACE, Body, FakeCluster, OperatorCrash, format_time
from moejob_api.contract.pods import (
    Label,
    PodProgress,
    PodRole,
    RankFault,
    ReportedHeartbeat,
    RunPhase,
    RunProgress,
    TerminationMessage,
)
from moejob_api.diagnosis.blockers import Blocker
from moejob_api.diagnosis.reading import read_status
from moejob_api.job.resources import GpuType
from moejob_api.job.status import ConditionType, Status
from moejob_operator.actions import WRITE_ONLY, Kind
from moejob_operator.children.attempt import Images, JobNetwork
from moejob_operator.children.gangs import GangApi
from moejob_operator.cluster import Conflict, JobKey
from moejob_operator.expiring_cache import ExpiringCache
from moejob_operator.planning.observed_state import OperatorSetting
from moejob_operator.reconcile import Reconciler, reconcile_job
from moejob_operator.status.job_status import SETTLING_SECONDS
from moejob_operator.validation import Validator

KEY = JobKey(NAMESPACE, "job")
IMAGES = Images(
    trainer="moejob-trainer:test", trainer_colocated="moejob-trainer-colocated:test", rollout="moejob-rollout:test"
)
# Two pods of one rank each, so that a job is small and still a gang.
SMALL: Mapping[str, Any] = {
    "model": {"source": "moejob/tiny-moe"},
    "parallelism": {"data": 2},
    "resources": {"gpusPerNode": 1},
    "data": {"maxLength": 512},
    "storage": {"size": "100Gi"},
}
# No story waits longer than this without saying so.
PATIENCE_SECONDS = 3.0
# A real API server dates a pod later than the reconcile began that creates it.
COUNTING_SECONDS = SETTLING_SECONDS + 10.0
MAX_RECONCILES = 60


@dataclass(eq=False)
class World:
    """One job called `job`, its cluster and its operator. Nothing happens by itself but what the verbs say."""

    cluster: FakeCluster = field(default_factory=FakeCluster)
    key: JobKey = KEY
    small: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    gang_apis: frozenset[GangApi] = frozenset()
    network: JobNetwork | None = None
    schedulers: tuple[str, ...] | None = None
    gpu_nodes: Mapping[GpuType, Mapping[str, str]] = field(default_factory=dict)
    validator: Validator = field(default_factory=Validator)
    poll_times: ExpiringCache[datetime] = field(default_factory=ExpiringCache)
    access: ExpiringCache[int] = field(default_factory=ExpiringCache)
    # Kubelets that do not answer delete nothing.
    dead_nodes: set[str] = field(default_factory=set)
    crashes: int = 0

    # --- the operator ------------------------------------------------------------------------------------------------

    def reconcile(self) -> float | None:
        """One reconcile of the job; one that crashed is done again by the next process."""
        reconciler = Reconciler(
            self.validator,
            OperatorSetting(IMAGES, self.gang_apis, self.network, self.schedulers, self.gpu_nodes),
            lambda: self.cluster.now,
            poll_times=self.poll_times,
            access_attempts=self.access,
        )
        try:
            return self.cluster.run_reconcile(reconcile_job(self.key, self.cluster, reconciler))
        except OperatorCrash:
            self.crashes += 1
            self.restart_operator()
            return 0.0
        except Conflict:
            return 0.0

    def restart_operator(self) -> None:
        """The next process remembers nothing of this one's."""
        self.validator, self.poll_times, self.access = Validator(), ExpiringCache(), ExpiringCache()

    def settle(self) -> None:
        """Let the operator reconcile whenever it would, and kubelets delete what they have to, until it waits.

        Of what it wrote itself no watch tells it: only what others do, objects that vanish and time make it look again.
        """
        versions, waited = self.cluster.object_versions(), 0.0
        for _ in range(MAX_RECONCILES):
            crashes = self.crashes
            again = self.reconcile()
            versions_after = self.cluster.object_versions()
            self.kubelets_delete()
            self.cluster.controllers_act()
            vanished, versions = versions.keys() - versions_after.keys(), self.cluster.object_versions()
            has_news = self.crashes > crashes or bool(vanished) or versions != versions_after
            patience = PATIENCE_SECONDS if self._pods_are_counted() else COUNTING_SECONDS
            if has_news or again == 0:
                waited = 0.0
                continue
            if again is None or waited + again > patience:
                return
            self.wait(again)
            waited += again
        raise AssertionError(f"no fixed point after {MAX_RECONCILES} reconciles:\n" + "\n".join(self.cluster.log[-20:]))

    def _pods_are_counted(self) -> bool:
        """Return whether the status says how many pods run: it may wait with that until they have settled."""
        if self.is_gone:
            return True
        phases = Counter(
            (role.value, pod["status"].get("phase", "Pending")) for role in PodRole for pod in self.cluster.pods(role)
        )
        return all(
            (phases[counted.role, "Pending"], phases[counted.role, "Running"]) == (counted.pending, counted.running)
            for counted in self.status.replica_statuses
        )

    # --- people ------------------------------------------------------------------------------------------------------

    def apply(self, **sections: Any) -> None:
        """kubectl apply of a small SFT job, with the given sections laid over it."""
        base = GRPO if sections.get("method") == "GRPO" else SFT
        self.apply_spec(merge_sections(merge_sections(base, self.small), sections))

    def apply_spec(self, spec: Mapping[str, Any]) -> None:
        """kubectl apply of any spec."""
        stored = self.cluster.objects.get(self._job_id)
        metadata: Body = {
            "name": self.key.name,
            "namespace": self.key.namespace,
            "generation": 1,
            "creationTimestamp": format_time(self.cluster.now),
        }
        if stored is not None:
            metadata = stored["metadata"] | {"generation": stored["metadata"]["generation"] + 1}
        status = {} if stored is None else {"status": stored.get("status", {})}
        body = {"apiVersion": "moejob.dev/v1alpha1", "kind": "MoETrainingJob", "metadata": metadata, "spec": dict(spec)}
        self.cluster.store_changed(body | status)

    def set_lifecycle(self, **fields: Any) -> None:
        """kubectl patch of spec.lifecycle."""
        spec = self.job["spec"]
        self.apply_spec({**spec, "lifecycle": {**spec.get("lifecycle", {}), **fields}})

    def delete_job(self) -> None:
        """kubectl delete, in the background as by default."""
        self.cluster.remove_object(self._job_id)

    def delete_job_in_foreground(self) -> None:
        """kubectl delete --cascade=foreground: the job stays until its objects are gone."""
        body = self.job
        self.cluster.store_changed(
            body | {"metadata": body["metadata"] | {"deletionTimestamp": format_time(self.cluster.now)}}
        )

    def delete_pod(self, index: int, role: PodRole = PodRole.TRAINER) -> None:
        """kubectl delete pod."""
        self.cluster.delete_object((Kind.POD, self.key.namespace, self.pod(index, role)["metadata"]["name"]))

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.cluster.now += timedelta(seconds=seconds)

    # --- nodes -------------------------------------------------------------------------------------------------------

    def kubelets_delete(self) -> None:
        """Kubelets that live confirm that pods have ended."""
        for pod in list(self.cluster.pods()):
            metadata = pod["metadata"]
            if "deletionTimestamp" in metadata and pod["spec"].get("nodeName") not in self.dead_nodes:
                self.cluster.remove_object((Kind.POD, self.key.namespace, metadata["name"]))

    def run(self) -> None:
        """Every pod that can be is scheduled, starts and gets ready."""
        for pod in list(self.cluster.pods()):
            if pod["status"]["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                self._set_pod_status(pod, phase="Running", ready=True)

    def start(self) -> None:
        """As `run`, but no rank has sent a heartbeat yet."""
        for pod in list(self.cluster.pods()):
            if pod["status"]["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                self._set_pod_status(pod, phase="Running", ready=False)

    def get_ready(self, index: int) -> None:
        """The ranks of a pod have sent heartbeats."""
        self._set_pod_status(self.pod(index), ready=True)

    def end_pod(self, index: int, code: int, termination: TerminationMessage | None = None, **more: Any) -> None:
        """A trainer pod ends; `more` goes into its status, `reason` into its container's."""
        reason = more.pop("container_reason", "Completed" if code == 0 else "Error")
        terminated = {
            "exitCode": code,
            "reason": reason,
            "finishedAt": format_time(self.cluster.now),
            "startedAt": self._started_at(index),
            "message": "" if termination is None else termination.model_dump_json(by_alias=True, exclude_none=True),
        }
        state = [_container({"terminated": terminated})]
        phase = "Succeeded" if code == 0 else "Failed"
        self._set_pod_status(self.pod(index), phase=phase, ready=False, containerStatuses=state, **more)

    def end_all_pods(self, code: int, termination: TerminationMessage | None = None) -> None:
        """Every trainer pod of the present gang ends alike."""
        for index in sorted(int(pod["metadata"]["labels"][Label.INDEX]) for pod in self.cluster.pods(PodRole.TRAINER)):
            self.end_pod(index, code, termination)

    def evict_pod(self, index: int, role: PodRole = PodRole.TRAINER) -> None:
        """The kubelet takes a pod's place away."""
        target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        pod = self.pod(index, role)
        self._set_pod_status(
            pod, phase="Failed", ready=False, reason="Evicted", message="The node was low on memory", more=target
        )

    def preempt_pod(self, index: int, code: int = 143, condition: str = "DisruptionTarget") -> None:
        """A scheduler wants the place: the pod saves, ends and is deleted."""
        target = {"type": condition, "status": "True", "reason": "PreemptionByScheduler"}
        self._set_pod_status(self.pod(index), more=target)
        self.delete_pod(index)
        self.end_pod(index, code)

    def lose_node(self, index: int, *, is_known: bool = True) -> None:
        """The node of a pod is cut off; after a while the node controller wants its pods gone."""
        pod = self.pod(index)
        node = pod["spec"]["nodeName"]
        self.dead_nodes.add(node)
        target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        self._set_pod_status(pod, ready=False, more=target)
        self.delete_pod(index)
        if is_known:
            self.cluster.lose_node(node)

    def lose_sight(self, index: int) -> None:
        """The node controller has not heard of a pod's node for too long, and says so of its pods."""
        pod = self.pod(index)
        node = pod["spec"]["nodeName"]
        self.dead_nodes.add(node)
        self._set_pod_status(pod, ready=False, more={"type": "ContainersReady", "status": "True"})
        self.cluster.lose_node(node)

    def fall_silent(self, index: int) -> None:
        """A pod that has answered so far does not."""
        self.cluster.answers.pop(self.pod(index)["metadata"]["uid"], None)

    def hold_pod(
        self, index: int, *, condition: Mapping[str, Any] | None = None, waiting: Mapping[str, Any] | None = None
    ) -> None:
        """A pod does not start: `condition` is PodScheduled, `waiting` the container's state."""
        state = [_container({"waiting": dict(waiting)})] if waiting is not None else []
        more = {"type": "PodScheduled", "status": "False", **condition} if condition is not None else None
        self._set_pod_status(self.pod(index), more=more, containerStatuses=state)

    def end_engine(self, index: int, code: int, log: str) -> None:
        """The container of an engine ends, and the kubelet is about to start it again."""
        end = {
            "exitCode": code,
            "reason": "Error",
            "message": log,
            "containerID": "",
            "finishedAt": format_time(self.cluster.now),
        }
        waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}
        state = _container({"waiting": waiting}) | {"name": "rollout", "lastState": {"terminated": end}}
        self._set_pod_status(self.pod(index, PodRole.ROLLOUT), ready=False, containerStatuses=[state])

    def start_engine_again(self, index: int, restarts: int, log: str) -> None:
        """The kubelet starts an engine that has ended that many times, the last time with these lines."""
        end = {"exitCode": 1, "reason": "Error", "message": log, "finishedAt": format_time(self.cluster.now)}
        state = _container({"running": {"startedAt": format_time(self.cluster.now)}}) | {
            "name": "rollout",
            "restartCount": restarts,
            "lastState": {"terminated": end},
        }
        self._set_pod_status(self.pod(index, PodRole.ROLLOUT), ready=False, containerStatuses=[state])

    def bind_claim(self, phase: str) -> None:
        """The volume controller says something of the job's claim."""
        claim = self.cluster.objects[(Kind.CLAIM, self.key.namespace, "job-storage")]
        self.cluster.store_changed(claim | {"status": {"phase": phase}})

    def report_progress(
        self,
        step: int,
        *,
        saved: int | None = None,
        age: float = 1.0,
        hung_pod: int | None = None,
        spare_pod: int | None = None,
        first_pod: int = 0,
        restarts: int = 0,
        fault: RankFault | None = None,
        **run: Any,
    ) -> None:
        """Every running trainer pod answers: the run is at `step`, ranks (of `hung_pod`) were heard `age` s ago.

        `spare_pod` answers that it has no place, `first_pod` has rank 0.
        """
        for pod in self.cluster.pods(PodRole.TRAINER):
            labels = pod["metadata"]["labels"]
            index = int(labels[Label.INDEX])
            if index == spare_pod:
                self.cluster.answers[pod["metadata"]["uid"]] = PodProgress(
                    attempt=int(labels[Label.ATTEMPT]), index=index, phase=RunPhase.SPARE
                )
                continue
            metadata = RunProgress(step=step, total_steps=100, last_checkpoint_step=saved, **run)
            self.cluster.answers[pod["metadata"]["uid"]] = PodProgress(
                attempt=int(labels[Label.ATTEMPT]),
                index=index,
                ready=True,
                restarts=restarts,
                fault=fault,
                ranks=(
                    ReportedHeartbeat(
                        rank=index, pid=7, step=step, age_seconds=1.0 if hung_pod not in (None, index) else age
                    ),
                ),
                run=metadata if index == first_pod else None,
            )

    # --- what is seen ------------------------------------------------------------------------------------------------

    @property
    def job(self) -> Body:
        """The job as it is."""
        return self.cluster.objects[self._job_id]

    @property
    def is_gone(self) -> bool:
        """Return whether the job is no more."""
        return self._job_id not in self.cluster.objects

    @property
    def status(self) -> Status:
        """Return what the operator has written."""
        return read_status(self.job.get("status"))

    def condition(self, kind: ConditionType) -> str:
        """A condition in short: its status and reason; empty when there is none."""
        found = next((found for found in self.status.conditions if found.type is kind), None)
        return "" if found is None else f"{found.status} {found.reason}"

    def message(self, kind: ConditionType) -> str:
        """The message of a condition."""
        return next((found.message for found in self.status.conditions if found.type is kind), "")

    def pod_names(self, role: PodRole = PodRole.TRAINER) -> list[str]:
        """Pods of a role as attempt-index, those that are ending with a cross."""
        return list(self._pod_names(role))

    def pod(self, index: int, role: PodRole = PodRole.TRAINER) -> Body:
        """The newest pod of a role with this index."""
        found = [pod for pod in self.cluster.pods(role) if pod["metadata"]["labels"][Label.INDEX] == str(index)]
        assert found, f"there is no {role} pod {index}"
        return max(found, key=lambda pod: int(pod["metadata"]["labels"][Label.ATTEMPT]))

    def fixed_point(self) -> Any:
        """All that is to be the same however the operator got here: everything but times and UIDs.

        Nothing says any more how a pod ended that vanished before its failure was written: of the last failure
        only whose it was and its cause are compared.
        """
        status = {} if self.is_gone else json.loads(self.status.model_dump_json(exclude_none=True))
        if "last_failure" in status:
            status["last_failure"] = {name: status["last_failure"][name] for name in ("pod", "reason")}
        if "why" in status:
            # Its texts have the message of that failure.
            status["why"] = status["why"]["blocker"]
        if status.get("why") == Blocker.SCHEDULER_ABSENT:
            # No scheduler runs here; how long the operator took decides whether it has noticed.
            del status["why"]
        kinds = sorted((kind, _without_uid(kind, name)) for kind, _, name in self.cluster.objects)
        return kinds, _without_times(status)

    # --- inside ------------------------------------------------------------------------------------------------------

    @property
    def _job_id(self) -> tuple[Kind, str, str]:
        return Kind.JOB, self.key.namespace, self.key.name

    def _started_at(self, index: int) -> str:
        """Return when a pod's container did; one that was not seen to start did just now."""
        there: list[Body] = self.pod(index)["status"].get("containerStatuses") or [_container({})]
        started: str = there[0]["state"].get("running", {}).get("startedAt", format_time(self.cluster.now))
        return started

    def _pod_names(self, role: PodRole) -> Iterator[str]:
        for pod in self.cluster.pods(role):
            about = pod["metadata"]
            cross = "+" if "deletionTimestamp" in about else ""
            yield f"{about['labels'][Label.ATTEMPT]}-{about['labels'][Label.INDEX]}{cross}"

    def _set_pod_status(
        self, pod: Body, *, ready: bool | None = None, more: Mapping[str, Any] | None = None, **status: Any
    ) -> None:
        now, before = format_time(self.cluster.now), pod.get("status", {})
        conditions = {found["type"]: found for found in before.get("conditions", ())}
        if ready is not None:
            state = "True" if ready else "False"
            if conditions.get("Ready", {}).get("status") != state:
                conditions["Ready"] = {"type": "Ready", "status": state, "lastTransitionTime": now}
        if more is not None:
            conditions[more["type"]] = {"lastTransitionTime": now, **more}
        if status.get("phase") == "Running":
            status["containerStatuses"] = [_container({"running": {"startedAt": now}})]
            conditions["PodScheduled"] = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now}
            index = pod["metadata"]["labels"][Label.INDEX]
            pod = pod | {"spec": pod["spec"] | {"nodeName": f"node-{pod['metadata']['labels'][Label.ROLE]}-{index}"}}
        self.cluster.store_changed(pod | {"status": before | status | {"conditions": list(conditions.values())}})


def running_world() -> World:
    """Return a world whose job has been accepted and whose gang runs."""
    world = World()
    world.apply()
    world.settle()
    world.run()
    world.settle()
    return world


def _container(state: Body) -> Body:
    return {"name": "trainer", "image": "", "imageID": "", "ready": False, "restartCount": 0, "state": state}


_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_TIMES = frozenset(
    {
        "last_transition_time",
        "start_time",
        "completion_time",
        "start_after",
        "time",
        "updated_at",
        "uid",
        "goodput",
        "eta",
    }
)


def _without_uid(kind: Kind, name: str) -> str:
    """The name of an object; nothing of one that has its job's UID in it."""
    return "" if kind in WRITE_ONLY else name


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(inner) for key, inner in value.items() if key not in _TIMES}
    if isinstance(value, list):
        return [_without_times(inner) for inner in value]
    return _TIME.sub("then", value) if isinstance(value, str) else value
