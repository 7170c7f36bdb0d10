"""The state that guards decide on, computed once: pods by role and attempt, and what the status keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType

from moejob_api.contract.pods import PodRole, RunProgress
from moejob_api.job import Spec
from moejob_api.job.lifecycle import GangScheduler
from moejob_api.job.resources import GpuType
from moejob_api.job.status import Phase, RestartLadder, Restarts, Status
from moejob_api.layout.sizes import Layout
from moejob_api.recovery.state import state_after_checkpoint
from moejob_operator.children.attempt import Attempt, Images, JobNetwork, former_service_name, service_name
from moejob_operator.children.gangs import GangApi, chosen_gang
from moejob_operator.observed import Observation, Pod, PodPhase
from moejob_operator.planning.recovery_state import forget_gang, recovery_state, restarts_with_state
from moejob_operator.planning.timestamps import parse_time
from moejob_operator.validation import Validation

# Until a save was measured. A pod that has saved ends before this is over.
DEFAULT_GRACE_SECONDS = 300
_SHORTEST_GRACE_SECONDS = 60
_LONGEST_GRACE_SECONDS = 3600
# No job gets there: a gang a minute takes two years.
_MOST_ATTEMPTS = 1_000_000


@dataclass(frozen=True, slots=True)
class OperatorSetting:
    """The operator's own configuration: images for jobs that name none, gang APIs, who may reach pods, GPU nodes."""

    images: Images
    gang_apis: frozenset[GangApi] = frozenset()
    network: JobNetwork | None = None
    # The schedulers that jobs may ask for; None allows any.
    schedulers: tuple[str, ...] | None = None
    # Labels of the nodes with GPUs of a type.
    gpu_nodes: Mapping[GpuType, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObservedState:
    """One job in one reconcile. Trainers are those of the present attempt, by index; spares are beyond the gang.

    Launchers say among themselves which pods have the places of the gang: a pod that was replaced is a spare once
    another has its place. Unplanned pods have names of the job and no place in it: their attempt has not begun, or
    their index is beyond gang and spares. Another client has created them.
    """

    observation: Observation
    validation: Validation
    setting: OperatorSetting
    now: datetime
    attempt: int
    restarts: Restarts
    trainers: Mapping[int, Pod]
    old_pods: tuple[Pod, ...]
    rollouts: tuple[Pod, ...]
    unplanned_pods: tuple[Pod, ...]
    # The API server's refusal of this reconcile's actions, after which the job is decided again.
    refusal: str | None = None

    @property
    def status(self) -> Status:
        """The status as it was written last."""
        return self.observation.job.status

    @property
    def ladder(self) -> RestartLadder:
        """Return the ladder's state between reconciles, after a new checkpoint has renewed the budget."""
        return self.restarts.ladder

    @property
    def is_gang_running(self) -> bool:
        """Return whether as many trainer pods as the gang has run, or have ended well while others still run."""
        phases = [pod.phase for pod in self.trainers.values()]
        return self._is_as_large_as_gang(phases.count(PodPhase.RUNNING) + phases.count(PodPhase.SUCCEEDED))

    @property
    def has_gang_succeeded(self) -> bool:
        """Return whether as many trainer pods as the gang has ended well. A spare that waits does not end."""
        return self._is_as_large_as_gang(sum(pod.phase is PodPhase.SUCCEEDED for pod in self.trainers.values()))

    def _is_as_large_as_gang(self, count: int) -> bool:
        layout = self.validation.layout
        return layout is not None and count >= layout.nodes

    @property
    def run_progress(self) -> RunProgress | None:
        """Return the report of the pod of rank 0: its answer, or its termination message, also of a stopped gang."""
        # What a gang saved while it was stopped is in the messages of its pods alone.
        before = tuple(pod for pod in self.old_pods if pod.attempt == self.attempt - 1)
        pods = tuple(pod for _, pod in sorted(self.trainers.items())) or before
        answers = [self.observation.progress[pod.uid] for pod in pods if pod.uid in self.observation.progress]
        # A pod that has lost its place to a spare unseen, and waits for others, still has its last report.
        answers.sort(key=lambda answer: not answer.ready)
        messages = [
            pod.ended.termination for pod in pods if pod.ended is not None and pod.ended.termination is not None
        ]
        runs = (*(answer.run for answer in answers), *(message.run for message in messages))
        return next((run for run in runs if run is not None), None)


def observed_state(
    observation: Observation,
    validation: Validation,
    setting: OperatorSetting,
    now: datetime,
    refusal: str | None = None,
) -> ObservedState:
    """Return the state that guards decide on."""
    attempt = _present_attempt_number(observation)
    gang = tuple(pod for pod in observation.pods if pod.role is PodRole.TRAINER)
    count = _trainer_count(observation, validation)
    present = {pod.index: pod for pod in gang if pod.attempt == attempt and pod.index < count}
    state = ObservedState(
        observation=observation,
        validation=validation,
        setting=setting,
        now=now,
        attempt=attempt,
        restarts=_recorded_restarts(observation),
        trainers=MappingProxyType(present),
        old_pods=tuple(pod for pod in gang if pod.attempt < attempt),
        rollouts=tuple(pod for pod in observation.pods if pod.role is PodRole.ROLLOUT),
        unplanned_pods=tuple(pod for pod in gang if pod.attempt >= attempt and present.get(pod.index) is not pod),
        refusal=refusal,
    )
    return replace(state, restarts=_renew_budget(state))


def _trainer_count(observation: Observation, validation: Validation) -> int:
    """Return the number of trainer pods that the job may have: of the gang, and spares."""
    spec, layout = observation.job.spec, validation.layout
    spares = 0 if spec is None else spec.resources.spares
    return 0 if layout is None else layout.nodes + spares


def _present_attempt_number(observation: Observation) -> int:
    """Return the attempt that runs or is about to: what the status says, which is written before any of its pods.

    Where the status was lost, the pods' labels have it: the present gang must not become an old one.
    """
    if observation.job.status.phase is not None:
        return observation.job.status.attempt
    attempts = (pod.attempt for pod in observation.pods if pod.role is PodRole.TRAINER)
    return max((attempt for attempt in attempts if attempt <= _MOST_ATTEMPTS), default=observation.job.status.attempt)


def _recorded_restarts(observation: Observation) -> Restarts:
    """Return the recorded restarts; before the first status, or after a lost status, a new gang's."""
    status = observation.job.status
    return forget_gang(status.restarts) if status.phase is None else status.restarts


def _renew_budget(s: ObservedState) -> Restarts:
    """The budget, renewed when a checkpoint is newer than any before."""
    spec = s.observation.job.spec
    state = recovery_state(s.restarts, 0 if spec is None else spec.lifecycle.backoff_limit)
    renewed_state = state_after_checkpoint(
        state, None if s.run_progress is None else s.run_progress.last_checkpoint_step
    )
    return s.restarts if renewed_state == state else restarts_with_state(s.restarts, renewed_state)


def spec_and_layout(s: ObservedState) -> tuple[Spec, Layout]:
    """Return the spec and the layout of an accepted job; guards after the one against invalid jobs may rely on them."""
    spec, layout = s.observation.job.spec, s.validation.layout
    if spec is None or layout is None:
        raise AssertionError(
            f"{s.observation.job.namespace}/{s.observation.job.name} was planned without being accepted"
        )
    return spec, layout


def gang_scheduler(s: ObservedState) -> GangScheduler:
    """The gang scheduler of the job."""
    spec, _ = spec_and_layout(s)
    # A job that has its group already was accepted before the limit.
    has_group = s.observation.job.name in s.observation.pod_groups
    return chosen_gang(spec, s.setting.gang_apis, None if has_group else s.setting.schedulers)


def present_attempt(s: ObservedState) -> Attempt:
    """Return the facts from which the manifests of the present attempt follow."""
    spec, layout = spec_and_layout(s)
    job = s.observation.job
    return Attempt(
        name=job.name,
        namespace=job.namespace,
        uid=job.uid,
        spec=spec,
        layout=layout,
        rollout=s.validation.rollout,
        service=_gang_service(s),
        number=s.attempt,
        gang=gang_scheduler(s),
        images=s.setting.images,
        pod_resources=s.validation.pod_resources,
        gpu_node_labels=_gpu_node_labels(spec, s.setting),
        trainer_grace_seconds=grace_seconds(s.status),
        network=s.setting.network,
    )


def _gpu_node_labels(spec: Spec, setting: OperatorSetting) -> Mapping[str, str]:
    gpu_type = spec.resources.gpu_type
    return {} if gpu_type is None else setting.gpu_nodes.get(gpu_type, {})


def _gang_service(s: ObservedState) -> str:
    """Return the Service of the gang; before it exists, the Service of the engines, which outlive gangs.

    A pod's environment names the others by it, and a pod's host name exists in one Service only.
    """
    former = former_service_name(s.observation.job.name)
    pods = tuple(s.trainers.values()) or s.rollouts
    return former if any(pod.subdomain == former for pod in pods) else service_name(s.observation.job.name)


def grace_seconds(status: Status) -> int:
    """Return the grace of a pod that is asked to stop: twice what the last save took, and time to stop ranks."""
    measured = None if status.progress is None else status.progress.save_seconds
    if measured is None:
        return DEFAULT_GRACE_SECONDS
    return max(_SHORTEST_GRACE_SECONDS, min(_LONGEST_GRACE_SECONDS, round(2 * measured) + 30))


def job_start_time(s: ObservedState) -> datetime | None:
    """Return when pods of the job were first created."""
    recorded = parse_time(s.status.start_time)
    created = [pod.created_at for pod in s.observation.pods if pod.created_at is not None]
    return recorded if recorded is not None else min(created, default=None)


def restarting_or_pending(s: ObservedState) -> Phase:
    """The phase of a gang that does not run."""
    return Phase.RESTARTING if s.ladder.start_after is not None else Phase.PENDING
