"""Objects of a job, compared with the existing objects: which to create, which to delete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from moejob_api.contract.pods import Label, PodRole, RunPhase
from moejob_operator.actions import Action, Delete, Ensure, Kind, Manifest, ObjectReference
from moejob_operator.children.attempt import Attempt
from moejob_operator.children.gangs import pod_group_manifest
from moejob_operator.children.pods import rollout_pod, trainer_pod
from moejob_operator.children.shared import claim_manifest, network_policy_manifest, secret_manifest, service_manifest
from moejob_operator.observed import Pod, PodPhase
from moejob_operator.planning.failures import is_on_lost_node, is_without_secret
from moejob_operator.planning.observed_state import ObservedState, present_attempt, spec_and_layout
from moejob_operator.planning.timestamps import seconds_since, seconds_until

# A manifest takes half a millisecond, in which nothing else runs: a larger gang takes several reconciles.
CREATED_AT_ONCE = 500
# The rest of a failed gang cannot save: a save takes all ranks.
BROKEN_GANG_SECONDS = 5
# An engine that does not live longer than this is not started again at once.
ENGINE_LIFE_SECONDS = 30.0


def missing_objects(s: ObservedState) -> tuple[Ensure, ...]:
    """Return the objects to create next, in the order in which they are needed."""
    attempt = present_attempt(s)
    pods = chain(_missing_trainers(s, attempt), _missing_engines(s, attempt))
    ordered = chain(_missing_shared(s, attempt), _pods_with_access(s, attempt, pods))
    return tuple(islice(ordered, CREATED_AT_ONCE))


def pod_deletions(pods: Iterable[Pod], s: ObservedState, grace_seconds: int | None = None) -> tuple[Delete, ...]:
    """Deletes of pods that are not terminating yet, and forced ones where no kubelet can."""
    return tuple(
        _pod_deletion(pod, s, grace_seconds) for pod in pods if not pod.is_terminating or is_on_lost_node(pod, s)
    )


def charged_pods(s: ObservedState) -> tuple[Pod, ...]:
    """Pods whose failure has been charged, and whose name the next one needs."""
    uids = {entry.uid for entry in s.ladder.replacing}
    return tuple(pod for pod in s.trainers.values() if pod.uid in uids)


def missing_places(s: ObservedState) -> tuple[int, ...]:
    """Indices of the gang that have no pod."""
    _, layout = spec_and_layout(s)
    return tuple(index for index in range(layout.nodes) if index not in s.trainers)


def is_waiting_spare(pod: Pod, s: ObservedState) -> bool:
    """Return whether a pod says in this reconcile that it has no place in the gang."""
    progress = s.observation.progress.get(pod.uid)
    return progress is not None and progress.phase == RunPhase.SPARE


def needs_room_of_spare(s: ObservedState) -> bool:
    """Return whether pod 0 fits no node while the gang waits: no spare has its place before all have met once."""
    first = s.trainers.get(0)
    ready_count = sum(pod.is_ready for pod in s.trainers.values())
    return (
        first is not None
        and first.unschedulable is not None
        and first.node is None
        and ready_count < spec_and_layout(s)[1].nodes
    )


def yielding_spares(s: ObservedState) -> tuple[Pod, ...]:
    """Return a spare that gives its node to pod 0: without it the gang would wait, and the spare with it."""
    if not needs_room_of_spare(s):
        return ()
    spares = [pod for _, pod in sorted(s.trainers.items()) if is_waiting_spare(pod, s)]
    return () if any(pod.is_terminating for pod in s.trainers.values()) else tuple(spares[-1:])


def spent_engines(s: ObservedState) -> tuple[Pod, ...]:
    """Engines whose pods are lost; an engine that ended soon after its start keeps its name for a while."""
    return tuple(pod for pod in s.rollouts if is_lost_engine(pod, s) and engine_wait_seconds(pod, s) <= 0)


def outdated_engines(s: ObservedState) -> tuple[Pod, ...]:
    """Engines that hold the value of a Secret that is gone; the next one will have another."""
    if not is_secret_missed(s):
        return ()
    return tuple(pod for pod in s.rollouts if pod.phase is PodPhase.RUNNING and not is_without_secret(pod, s))


def is_secret_missed(s: ObservedState) -> bool:
    """Return whether the job's Secret is not there: a kubelet waits for it, or the API server was asked."""
    return s.observation.lacks_secret or any(is_without_secret(pod, s) for pod in (*s.trainers.values(), *s.rollouts))


def has_secret_creation(actions: Iterable[Action]) -> bool:
    """Return whether these actions create the job's Secret where it is missing."""
    return any(isinstance(action, Ensure) and action.manifest["kind"] == Kind.SECRET for action in actions)


def is_lost_engine(pod: Pod, s: ObservedState) -> bool:
    """Return whether no kubelet will start it again."""
    return pod.phase.has_ended or (pod.is_terminating and is_on_lost_node(pod, s))


def engine_wait_seconds(pod: Pod, s: ObservedState) -> float:
    """Seconds until a lost engine may be replaced, so that a node that evicts every one is not flooded."""
    return max(0.0, ENGINE_LIFE_SECONDS - seconds_since(pod.created_at, s.now))


def _missing_shared(s: ObservedState, attempt: Attempt) -> Iterator[Ensure]:
    wanted_claim, wanted_group = claim_manifest(attempt), pod_group_manifest(attempt)
    if attempt.service not in s.observation.services:
        yield Ensure(service_manifest(attempt))
    if wanted_claim is not None and attempt.claim_name not in {
        volume_claim.name for volume_claim in s.observation.claims
    }:
        yield Ensure(wanted_claim)
    if wanted_group is not None and attempt.pod_group_name not in s.observation.pod_groups:
        yield Ensure(wanted_group)


def _pods_with_access(s: ObservedState, attempt: Attempt, pods: Iterator[Ensure]) -> Iterator[Ensure]:
    """Yield the Secret and the policy, which the operator cannot see, and after them the pods.

    Both are created once for each attempt, so that a new gang finds them though another client deleted them, and again
    when a kubelet misses the Secret.
    """
    first = next(pods, None)
    if (first is not None and not s.observation.has_access) or is_secret_missed(s):
        policy = network_policy_manifest(attempt)
        yield Ensure(secret_manifest(attempt))
        if policy is not None:
            yield Ensure(policy)
    if first is not None:
        yield first
        yield from pods


def _missing_trainers(s: ObservedState, attempt: Attempt) -> Iterator[Ensure]:
    if seconds_until(s.ladder.start_after, s.now) > 0:
        return
    # A terminating pod keeps its name; once it is gone, it is missing. A spare takes no room that the gang needs: it
    # is created beside a gang that runs.
    count = attempt.trainer_count if s.is_gang_running else attempt.layout.nodes
    yield from (Ensure(trainer_pod(attempt, index)) for index in range(count) if index not in s.trainers)


def _missing_engines(s: ObservedState, attempt: Attempt) -> Iterator[Ensure]:
    present_names = {pod.name for pod in s.rollouts}
    for index in range(attempt.engine_count):
        if attempt.pod_name(PodRole.ROLLOUT, index) not in present_names:
            yield Ensure(rollout_pod(attempt, index))


def _pod_deletion(pod: Pod, s: ObservedState, grace_seconds: int | None) -> Delete:
    ref = ObjectReference(Kind.POD, s.observation.job.namespace, pod.name, pod.uid)
    return Delete(ref, 0 if pod.is_terminating and is_on_lost_node(pod, s) else grace_seconds)


def count_created_pods(actions: Iterable[Action], role: PodRole) -> int:
    """Return the number of pods of a role to create."""
    return sum(isinstance(action, Ensure) and _is_pod(action.manifest, role) for action in actions)


def _is_pod(manifest: Manifest, role: PodRole) -> bool:
    labels = manifest["metadata"]["labels"]
    return bool(manifest["kind"] == Kind.POD and labels.get(Label.ROLE) == role)
