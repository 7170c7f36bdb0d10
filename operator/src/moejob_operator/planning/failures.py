"""Failures of the present gang that no decision covers yet: ends, losses, silence. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moejob_api.contract.pods import ExitCode, PodProgress, RankFault, Role, pod_name
from moejob_api.recovery.restarts import LAUNCHER_FIRST_SECONDS, Cause, Failure, cause_of_exit, restarted_in_place
from moejob_operator.observed import TAKEN_BY_TAINT, Pod, PodPhase
from moejob_operator.planning.observed_state import ObservedState, present_attempt, spec_and_layout
from moejob_operator.planning.timestamps import later, seconds_since

# A live kubelet deletes a pod within its grace period; this much later the kubelet counts as dead.
KUBELET_SECONDS = 30.0

# A launcher gives up on the store of pod 0 after 20 s, or at once where a connection breaks. The failure of pod 0
# shows later: Kubernetes takes up to 55 s to call its node lost, then marks the pods there one by one.
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
class Loss:
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


def losses(s: ObservedState) -> tuple[Loss, ...]:
    """Everything that has failed since the last decision."""
    lost = (*_lost_pods(s), *_refused_engines(s), *_lost_secret(s))
    return lost or tuple(_silent_pods(s)) or tuple(_restarted_ranks(s))


def pending_verdict(s: ObservedState, lost: tuple[Loss, ...]) -> Verdict | None:
    """Return the wait before a charge, where pods have lost their peers and another pod is silent.

    The silent pod is to blame once it has failed, is gone, or its node is lost. The status holds nothing of the wait,
    which is counted from the end of the first of these pods, by the clock of that node, which may be wrong.
    """
    mute = next((pod for _, pod in sorted(s.trainers.items()) if _may_explain(pod, s)), None)
    ends = [loss.pod.ended.at for loss in lost if loss.pod is not None and loss.pod.ended is not None]
    first = min((end for end in ends if end is not None), default=None)
    is_new = not s.ladder.replacing and all(loss.failure.cause is Cause.LOST_PEERS for loss in lost)
    if not is_new or mute is None or first is None or abs(s.now - first).total_seconds() >= VERDICT_SECONDS:
        return None
    message = (
        f"{lost[0].name} gave up on its peers, and nothing is heard of {mute.name}: what became of that one is waited "
        f"for until {later(first, VERDICT_SECONDS)}"
    )
    return Verdict(message, VERDICT_SECONDS - (s.now - first).total_seconds())


def _may_explain(pod: Pod, s: ObservedState) -> bool:
    """Return whether a pod should run and does not answer."""
    return pod.phase in (PodPhase.RUNNING, PodPhase.UNKNOWN) and pod.uid not in s.seen.progress


def is_on_lost_node(pod: Pod, s: ObservedState) -> bool:
    """Return whether its kubelet can no longer confirm anything.

    Without a right to see nodes, only the pod shows it: the node controller took the pod away, and well after its grace
    period the pod is still there.
    """
    if pod.node is not None and pod.node in s.seen.lost_nodes:
        return True
    taken = pod.disruption in _NODE_REASONS or pod.reason == "NodeLost"
    return taken and pod.ends_by is not None and seconds_since(pod.ends_by, s.now) >= KUBELET_SECONDS


# --- pods that ended or are gone ------------------------------------------------------------------------------------


def _lost_pods(s: ObservedState) -> Iterator[Loss]:
    _, layout = spec_and_layout(s)
    answered = {entry.index: entry.uid for entry in s.ladder.replacing}
    for index in range(layout.nodes):
        pod = s.trainers.get(index)
        if pod is None:
            if s.ladder.gang_was_whole and index not in answered:
                name = pod_name(s.seen.job.name, Role.TRAINER, s.attempt, index)
                # Another client has deleted the pod: a failed pod would still exist.
                yield Loss(Failure(index, Cause.PREEMPTED, message=f"{name} was deleted"), name)
            continue
        cause = _cause(pod, s)
        if cause is not None and answered.get(index) != pod.uid:
            code = None if pod.ended is None else pod.ended.exit_code
            yield Loss(Failure(index, cause, message=_why(pod)), pod.name, pod, _rank(pod), code)


def _refused_engines(s: ObservedState) -> Iterator[Loss]:
    """Yield engines that refuse the job's configuration: the kubelet restarts them, and ranks wait in vain."""
    for pod in s.rollouts:
        end = pod.ended_before
        if end is not None and end.exit_code == ExitCode.BAD_CONFIGURATION:
            failure = Failure(0, Cause.BAD_CONFIGURATION, message=end.message)
            yield Loss(failure, pod.name, pod, exit_code=end.exit_code)


def misses_secret(pod: Pod, s: ObservedState) -> bool:
    """Return whether a kubelet cannot start a pod because the job's Secret is not there."""
    wait = pod.waiting
    return wait is not None and wait.reason == _CONFIG_ERROR and f'"{present_attempt(s).access}"' in wait.message


def _lost_secret(s: ObservedState) -> Iterator[Loss]:
    """Yield a failure for a missing Secret whose value running pods hold: a new one would have another value."""
    holder = next((pod for pod in s.trainers.values() if pod.phase is PodPhase.RUNNING), None)
    missing = next((pod for pod in (*s.trainers.values(), *s.rollouts) if misses_secret(pod, s)), None)
    if holder is None or (missing is None and not s.seen.lacks_secret):
        return
    message = f"Secret {present_attempt(s).access} is gone, and pods that run hold a value that no new pod gets"
    named = missing or holder
    index = named.index if named.role is Role.TRAINER else 0
    yield Loss(Failure(index, Cause.SECRET_LOST, message=message), named.name, named)


def _cause(pod: Pod, s: ObservedState) -> Cause | None:
    code = None if pod.ended is None else pod.ended.exit_code
    if code == ExitCode.BAD_CONFIGURATION:
        return Cause.BAD_CONFIGURATION
    if pod.phase is PodPhase.SUCCEEDED:
        return None
    if is_on_lost_node(pod, s) and (pod.is_terminating or _is_out_of_reach(pod, s)):
        return Cause.NODE_LOST
    # A terminating pod may still be saving: its end has the cause, and its name is taken until then.
    if pod.phase is not PodPhase.FAILED:
        return None
    return _cause_of_failed(pod)


def _is_out_of_reach(pod: Pod, s: ObservedState) -> bool:
    """Return whether a pod is unreachable: the cluster hears nothing of its node, nor we of the pod.

    A run survives the death of a kubelet, and a node that only the API server cannot reach: its pods still reply.
    """
    return pod.is_unheard and s.seen.was_polled and pod.uid not in s.seen.progress


def _cause_of_failed(pod: Pod) -> Cause:
    if pod.disruption in _NODE_REASONS or pod.reason == "NodeLost":
        return Cause.NODE_LOST
    if pod.disruption is not None or pod.reason in _CLUSTER_REASONS or pod.reason.startswith("OutOf"):
        return Cause.PREEMPTED
    if pod.ended is None or pod.ended.exit_code is None:
        return Cause.POD_FAILED
    if pod.ended.reason == "OOMKilled":
        return Cause.OUT_OF_MEMORY
    outcome = None if pod.ended.word is None else pod.ended.word.outcome
    # Exit code 0 in a failed pod comes from a kubelet, not from a launcher.
    return cause_of_exit(pod.ended.exit_code, outcome) or Cause.POD_FAILED


def _why(pod: Pod) -> str:
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


def _rank(pod: Pod) -> int | None:
    return None if pod.ended is None or pod.ended.word is None else pod.ended.word.rank


# --- ranks that are silent or were restarted -------------------------------------------------------------------------


def _silent_pods(s: ObservedState) -> Iterator[Loss]:
    spec, _ = spec_and_layout(s)
    limit = spec.lifecycle.progress_deadline_seconds + LAUNCHER_FIRST_SECONDS
    if not s.seen.was_polled or not _all_run(s):
        return
    # Before the last pod has started, the rendezvous is incomplete and no rank is late.
    whole_seconds = min(seconds_since(pod.started_at, s.now) for pod in s.trainers.values())
    if whole_seconds < limit:
        return
    for index, pod in sorted(s.trainers.items()):
        ranks = _silent_ranks(s.seen.progress.get(pod.uid), limit)
        if ranks:
            named = ", ".join(str(rank) for rank in ranks[:_RANKS_NAMED]) + (
                " ..." if len(ranks) > _RANKS_NAMED else ""
            )
            noun = "rank" if len(ranks) == 1 else "ranks"
            yield Loss(Failure(index, Cause.HUNG, message=f"{noun} {named} silent"), pod.name, pod, ranks[0])
        elif _is_mute(pod, s, limit):
            yield Loss(Failure(index, Cause.HUNG, message="no rank has been heard"), pod.name, pod)


def _all_run(s: ObservedState) -> bool:
    """Return whether no pod has ended, is ending or is about to be replaced: only then does silence mean a hang."""
    answered = {entry.uid for entry in s.ladder.replacing}
    return s.gang_runs and all(
        pod.phase is PodPhase.RUNNING and not pod.is_terminating and pod.uid not in answered
        for pod in s.trainers.values()
    )


def _silent_ranks(answer: PodProgress | None, limit: float) -> tuple[int, ...]:
    heartbeats = () if answer is None else answer.ranks
    return tuple(sorted(heartbeat.rank for heartbeat in heartbeats if heartbeat.age_seconds >= limit))


def _is_mute(pod: Pod, s: ObservedState, limit: float) -> bool:
    """Return whether no rank has answered a probe of the kubelet or a poll of ours for that long."""
    answer = s.seen.progress.get(pod.uid)
    if pod.is_ready or (answer is not None and answer.ranks):
        return False
    return seconds_since(pod.ready_changed_at or pod.started_at, s.now) >= limit


def _restarted_ranks(s: ObservedState) -> Iterator[Loss]:
    """Yield restarts in place that pods report and no decision has charged; none while a new pod is awaited."""
    known = s.ladder.rank_restarts
    reported = rank_restarts(s)
    if known is None or reported is None or reported <= known:
        return
    index, pod = max(s.trainers.items(), key=lambda item: s.seen.progress[item[1].uid].restarts)
    yield loss_of_ranks(index, pod, s.seen.progress[pod.uid].fault)


def loss_of_ranks(index: int, pod: Pod, fault: RankFault | None) -> Loss:
    """Return the fault for which a launcher restarted its ranks, and the pod it blames."""
    failure = restarted_in_place(index, fault)
    return Loss(failure, pod.name, pod) if fault is None else Loss(failure, pod.name, pod, fault.rank, fault.exit_code)


def rank_restarts(s: ObservedState) -> int | None:
    """Restarts in place of the present pods; None unless every one of them has answered."""
    if not s.gang_runs or any(pod.uid not in s.seen.progress for pod in s.trainers.values()):
        return None
    return sum(s.seen.progress[pod.uid].restarts for pod in s.trainers.values())
