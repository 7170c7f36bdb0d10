"""Failures of the present gang that no decision covers yet: ends, losses, silence. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moejob_api.contract.pods import ExitCode, PodProgress, PodRole, RankFault, RunPhase, pod_name
from moejob_api.recovery.restarts import (
    LAUNCHER_FIRST_SECONDS,
    Failure,
    FailureCause,
    cause_of_exit,
    rank_restart_failure,
)
from moejob_operator.observed import TAKEN_BY_TAINT, Pod, PodPhase
from moejob_operator.planning.observed_state import ObservedState, present_attempt, spec_and_layout
from moejob_operator.planning.timestamps import seconds_since, time_after

# A live kubelet deletes a pod within its grace period; this much later the kubelet counts as dead.
KUBELET_SECONDS = 30.0

# A launcher whose ranks are done gives up on the store of pod 0 after 20 s, or at once where a connection breaks. The
# failure of pod 0 shows later: Kubernetes takes up to 55 s to call its node lost, then marks the pods there one by one.
VERDICT_SECONDS = 75.0

# Reasons of pods that a kubelet refused, or gave up with its node: none is the job's fault.
_CLUSTER_REASONS = frozenset(
    {"Evicted", "NodeShutdown", "Terminated", "NodeLost", "NodeAffinity", "UnexpectedAdmissionError", "Preempting"}
)
_NODE_REASONS = frozenset({TAKEN_BY_TAINT, "DeletionByPodGC"})
_RANKS_NAMED = 8
# The kubelet cannot find a Secret or ConfigMap of the container's environment. Its message has the name; it retries.
_CONFIG_ERROR = "CreateContainerConfigError"


@dataclass(frozen=True, slots=True)
class FailedPod:
    """One failure and its pod; without a pod when that is gone without a trace."""

    failure: Failure
    name: str
    pod: Pod | None = None
    rank: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A wait before pods that lost their peers are charged: a silent pod may turn out to be the cause."""

    message: str
    seconds: float


def find_failed_pods(s: ObservedState) -> tuple[FailedPod, ...]:
    """Everything that has failed since the last decision."""
    failed_pods = (*_lost_pods(s), *_refused_engines(s), *_lost_secret(s))
    return failed_pods or tuple(_silent_pods(s)) or tuple(_restarted_ranks(s))


def pending_verdict(s: ObservedState, failed_pods: tuple[FailedPod, ...]) -> Verdict | None:
    """Return the wait before a charge, where pods have lost their peers and another pod is silent.

    The silent pod is to blame once it has failed, is gone, or its node is lost. The status holds nothing of the wait,
    which is counted from the end of the first of these pods, by the clock of that node, which may be wrong.
    """
    silent_pod = next((pod for _, pod in sorted(s.trainers.items()) if _is_not_answering(pod, s)), None)
    ends = [
        failed_pod.pod.ended.ended_at
        for failed_pod in failed_pods
        if failed_pod.pod is not None and failed_pod.pod.ended is not None
    ]
    first = min((end for end in ends if end is not None), default=None)
    is_new = not s.ladder.replacing and all(loss.failure.cause is FailureCause.LOST_PEERS for loss in failed_pods)
    if not is_new or silent_pod is None or first is None or abs(s.now - first).total_seconds() >= VERDICT_SECONDS:
        return None
    message = (
        f"{failed_pods[0].name} gave up on its peers, and nothing is heard of {silent_pod.name}: what became of that "
        f"one is waited for until {time_after(first, VERDICT_SECONDS)}"
    )
    return Verdict(message, VERDICT_SECONDS - (s.now - first).total_seconds())


def _is_not_answering(pod: Pod, s: ObservedState) -> bool:
    """Return whether a pod should run and does not answer."""
    return pod.phase in (PodPhase.RUNNING, PodPhase.UNKNOWN) and pod.uid not in s.observation.progress


def is_on_lost_node(pod: Pod, s: ObservedState) -> bool:
    """Return whether its kubelet can no longer confirm anything.

    Without a right to see nodes, only the pod shows it: the node controller took the pod away, and well after its grace
    period the pod is still there.
    """
    if pod.node is not None and pod.node in s.observation.lost_nodes:
        return True
    is_taken_away = pod.disruption in _NODE_REASONS or pod.reason == "NodeLost"
    return is_taken_away and pod.ends_by is not None and seconds_since(pod.ends_by, s.now) >= KUBELET_SECONDS


# --- pods that ended or are gone ------------------------------------------------------------------------------------


def _lost_pods(s: ObservedState) -> Iterator[FailedPod]:
    spec, layout = spec_and_layout(s)
    if s.has_gang_succeeded:
        # A spare that is lost beside it holds nothing up.
        return
    charged_uids = {entry.index: entry.uid for entry in s.ladder.replacing}
    for index in range(layout.nodes + spec.resources.spares):
        pod = s.trainers.get(index)
        if pod is None:
            # A spare is created late, and gives way to pod 0.
            if index < layout.nodes and s.ladder.gang_was_whole and index not in charged_uids:
                name = pod_name(s.observation.job.name, PodRole.TRAINER, s.attempt, index)
                # Another client has deleted the pod: a failed pod would still exist.
                yield FailedPod(Failure(index, FailureCause.PREEMPTED, message=f"{name} was deleted"), name)
            continue
        cause = _failure_cause(pod, s)
        if cause is not None and charged_uids.get(index) != pod.uid:
            code = None if pod.ended is None else pod.ended.exit_code
            yield FailedPod(
                Failure(index, cause, message=_failure_message(pod)), pod.name, pod, _failed_rank(pod), code
            )


def _refused_engines(s: ObservedState) -> Iterator[FailedPod]:
    """Yield engines that refuse the job's configuration: the kubelet restarts them, and ranks wait in vain."""
    for pod in s.rollouts:
        end = pod.ended_before
        if end is not None and end.exit_code == ExitCode.BAD_CONFIGURATION:
            failure = Failure(0, FailureCause.BAD_CONFIGURATION, message=end.message)
            yield FailedPod(failure, pod.name, pod, exit_code=end.exit_code)


def is_without_secret(pod: Pod, s: ObservedState) -> bool:
    """Return whether a kubelet cannot start a pod because the job's Secret is not there."""
    wait = pod.waiting
    return wait is not None and wait.reason == _CONFIG_ERROR and f'"{present_attempt(s).access_name}"' in wait.message


def _lost_secret(s: ObservedState) -> Iterator[FailedPod]:
    """Yield a failure for a missing Secret whose value running pods hold: a new one would have another value."""
    holder = next((pod for pod in s.trainers.values() if pod.phase is PodPhase.RUNNING), None)
    waiting_pod = next((pod for pod in (*s.trainers.values(), *s.rollouts) if is_without_secret(pod, s)), None)
    if holder is None or (waiting_pod is None and not s.observation.lacks_secret):
        return
    message = f"Secret {present_attempt(s).access_name} is gone, and pods that run hold a value that no new pod gets"
    blamed = waiting_pod or holder
    index = blamed.index if blamed.role is PodRole.TRAINER else 0
    yield FailedPod(Failure(index, FailureCause.SECRET_LOST, message=message), blamed.name, blamed)


def _failure_cause(pod: Pod, s: ObservedState) -> FailureCause | None:
    code = None if pod.ended is None else pod.ended.exit_code
    if code == ExitCode.BAD_CONFIGURATION:
        return FailureCause.BAD_CONFIGURATION
    if pod.phase is PodPhase.SUCCEEDED:
        return None
    if is_on_lost_node(pod, s) and (pod.is_terminating or _is_out_of_reach(pod, s)):
        return FailureCause.NODE_LOST
    # A terminating pod may still be saving: its end has the cause, and its name is taken until then.
    if pod.phase is not PodPhase.FAILED:
        return None
    return _cause_of_failed(pod)


def _is_out_of_reach(pod: Pod, s: ObservedState) -> bool:
    """Return whether a pod is unreachable: the cluster hears nothing of its node, nor we of the pod.

    A run survives the death of a kubelet, and a node that only the API server cannot reach: its pods still reply.
    """
    return pod.is_unheard and s.observation.was_polled and pod.uid not in s.observation.progress


def _cause_of_failed(pod: Pod) -> FailureCause:
    if pod.disruption in _NODE_REASONS or pod.reason == "NodeLost":
        return FailureCause.NODE_LOST
    if pod.disruption is not None or pod.reason in _CLUSTER_REASONS or pod.reason.startswith("OutOf"):
        return FailureCause.PREEMPTED
    if pod.ended is None or pod.ended.exit_code is None:
        return FailureCause.POD_FAILED
    if pod.ended.reason == "OOMKilled":
        return FailureCause.OUT_OF_MEMORY
    outcome = None if pod.ended.termination is None else pod.ended.termination.outcome
    # Exit code 0 in a failed pod comes from a kubelet, not from a launcher.
    return cause_of_exit(pod.ended.exit_code, outcome) or FailureCause.POD_FAILED


def _failure_message(pod: Pod) -> str:
    message = "" if pod.ended is None else pod.ended.message
    if message:
        return message
    if pod.ended is None and pod.is_unheard:
        return f"nothing is heard of node {pod.node}"
    if pod.message or pod.reason:
        return pod.message or pod.reason
    if pod.disruption is not None:
        return pod.disruption
    return "" if pod.ended is None else f"exit code {pod.ended.exit_code}"


def _failed_rank(pod: Pod) -> int | None:
    return None if pod.ended is None or pod.ended.termination is None else pod.ended.termination.rank


# --- ranks that are silent or were restarted -------------------------------------------------------------------------


def _silent_pods(s: ObservedState) -> Iterator[FailedPod]:
    spec, _ = spec_and_layout(s)
    limit = spec.lifecycle.progress_deadline_seconds + LAUNCHER_FIRST_SECONDS
    if not s.observation.was_polled or not _is_gang_undisturbed(s):
        return
    # Before the last pod has started, the rendezvous is incomplete and no rank is late.
    gang_seconds = min(seconds_since(pod.started_at, s.now) for pod in _started_pods(s).values())
    if gang_seconds < limit:
        return
    for index, pod in sorted(_started_pods(s).items()):
        ranks = _silent_ranks(s.observation.progress.get(pod.uid), limit)
        if ranks:
            ranks_text = ", ".join(str(rank) for rank in ranks[:_RANKS_NAMED]) + (
                " ..." if len(ranks) > _RANKS_NAMED else ""
            )
            noun = "rank" if len(ranks) == 1 else "ranks"
            yield FailedPod(
                Failure(index, FailureCause.HUNG, message=f"{noun} {ranks_text} silent"), pod.name, pod, ranks[0]
            )
        elif _is_mute(pod, s, limit):
            yield FailedPod(Failure(index, FailureCause.HUNG, message="no rank has been heard"), pod.name, pod)


def _is_gang_undisturbed(s: ObservedState) -> bool:
    """Return whether no pod has ended, is ending or is about to be replaced: only then does silence mean a hang."""
    charged_uids = {entry.uid for entry in s.ladder.replacing}
    return s.is_gang_running and all(
        pod.phase is PodPhase.RUNNING and not pod.is_terminating and pod.uid not in charged_uids
        for pod in _started_pods(s).values()
    )


def _started_pods(s: ObservedState) -> dict[int, Pod]:
    """Return pods that have started. Beside a gang that runs, a pending pod is a spare to be."""
    return {index: pod for index, pod in s.trainers.items() if pod.phase is not PodPhase.PENDING}


def _silent_ranks(progress: PodProgress | None, limit: float) -> tuple[int, ...]:
    heartbeats = () if progress is None else progress.ranks
    return tuple(sorted(heartbeat.rank for heartbeat in heartbeats if heartbeat.age_seconds >= limit))


def _is_mute(pod: Pod, s: ObservedState, limit: float) -> bool:
    """Return whether no rank has answered a probe of the kubelet or a poll of ours for that long."""
    progress = s.observation.progress.get(pod.uid)
    if pod.is_ready or (progress is not None and (progress.ranks or progress.phase == RunPhase.SPARE)):
        return False
    return seconds_since(pod.ready_changed_at or pod.started_at, s.now) >= limit


def _restarted_ranks(s: ObservedState) -> Iterator[FailedPod]:
    """Yield restarts in place that pods report and no decision has charged; none while a new pod is awaited."""
    charged_restarts = s.ladder.rank_restarts
    reported_restarts = count_rank_restarts(s)
    if charged_restarts is None or reported_restarts is None or reported_restarts <= charged_restarts:
        return
    index, pod = max(_started_pods(s).items(), key=lambda item: s.observation.progress[item[1].uid].restarts)
    yield pod_of_restarted_ranks(index, pod, s.observation.progress[pod.uid].fault)


def pod_of_restarted_ranks(index: int, pod: Pod, fault: RankFault | None) -> FailedPod:
    """Return the fault for which a launcher restarted its ranks, and the pod it blames."""
    failure = rank_restart_failure(index, fault)
    return (
        FailedPod(failure, pod.name, pod)
        if fault is None
        else FailedPod(failure, pod.name, pod, fault.rank, fault.exit_code)
    )


def count_rank_restarts(s: ObservedState) -> int | None:
    """Restarts in place of the present pods; None unless every one of them has answered."""
    pods = _started_pods(s).values()
    if not s.is_gang_running or any(pod.uid not in s.observation.progress for pod in pods):
        return None
    return sum(s.observation.progress[pod.uid].restarts for pod in pods)
