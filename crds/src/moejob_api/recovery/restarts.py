"""The recovery ladder: given what failed, the smallest action that helps, and when to give up.

Pure. The operator and `moejob run` decide by the same function; neither keeps budgets of its own. Ranks restarted in
place are the launcher's rung, pods and gangs are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from moejob_api.contract.pods import ExitCode, PodOutcome, RankFault

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 300.0
# Ranks that die again and again in the same pods point at the pod or its node: a new pod is tried after this many.
RESTARTS_IN_PLACE = 2
# One pod that is replaced again and again without a new checkpoint in between drags the others through a rendezvous
# each time; a whole new gang is tried after this many.
PODS_BEFORE_GANG = 2
# A launcher restarts silent ranks itself. Where it has not after these further seconds, its pod is replaced.
LAUNCHER_FIRST_SECONDS = 30.0


class FailureCause(StrEnum):
    """The cause of a failure."""

    RANK_FAILED = "RankFailed"
    POD_FAILED = "PodFailed"
    HUNG = "Hung"
    # The launcher gave up on another pod: a consequence of that pod's failure, blamed only where no other is known.
    LOST_PEERS = "LostPeers"
    # Said by the container's status, never by an exit code alone: 137 is any SIGKILL.
    OUT_OF_MEMORY = "OutOfMemory"
    # The cluster took the pod away; the job did nothing wrong.
    PREEMPTED = "Preempted"
    NODE_LOST = "NodeLost"
    # Another client deleted the job's Secret: pods that run hold a value that no new pod gets.
    SECRET_LOST = "SecretLost"
    BAD_CONFIGURATION = "BadConfiguration"

    @property
    def is_counted(self) -> bool:
        """Return whether this failure spends budget."""
        return self not in (FailureCause.PREEMPTED, FailureCause.NODE_LOST, FailureCause.SECRET_LOST)

    @property
    def needs_new_gang(self) -> bool:
        """Return whether no pod of the gang can go on beside a new one."""
        return self is FailureCause.SECRET_LOST


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that failed. `pod` is the index in the gang; failures seen together are one decision."""

    pod: int
    cause: FailureCause
    # Whether the launcher and its container still live, so that ranks can be restarted inside.
    pod_alive: bool = False
    message: str = ""


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """The restarts spent since the last newly committed checkpoint."""

    limit: int
    spent: int = 0
    in_place: int = 0
    pods: int = 0
    # Uncounted restarts in a row: they grow the delay though they cost nothing.
    uncounted: int = 0

    def after_checkpoint(self) -> RestartBudget:
        """The budget after a new checkpoint: the run moves, so everything before is forgiven."""
        return RestartBudget(self.limit)

    def with_new_pods(self) -> RestartBudget:
        """The budget of a new gang: restarts in the old pods say nothing about the new ones."""
        return replace(self, in_place=0)

    def without_pods(self, pods: Sequence[int]) -> RestartBudget:
        """The budget once these pods are replaced. The launchers' own count of restarts in place goes with pod 0."""
        return self.with_new_pods() if 0 in pods else self


@dataclass(frozen=True, slots=True)
class RestartRanks:
    """Restart the ranks inside the living pods."""

    after_seconds: float
    budget: RestartBudget
    reason: str


@dataclass(frozen=True, slots=True)
class ReplacePods:
    """Replace these pods; the ranks of the others are restarted in place."""

    pods: tuple[int, ...]
    after_seconds: float
    budget: RestartBudget
    reason: str


@dataclass(frozen=True, slots=True)
class ReplaceGang:
    """Replace every pod under the next attempt."""

    after_seconds: float
    budget: RestartBudget
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Fail the job."""

    budget: RestartBudget
    reason: str


RecoveryAction = RestartRanks | ReplacePods | ReplaceGang | GiveUp


def recovery_action(failures: tuple[Failure, ...], budget: RestartBudget) -> RecoveryAction | None:
    """Return the action on everything that failed since the last decision; None when nothing did.

    Failures that are seen together are one failure: a rank that dies takes its peers with it, and charging each of them
    would spend a budget of six on a gang of eight at once.
    """
    if not failures:
        return None
    first = find_culprit(failures)
    if first.cause is FailureCause.BAD_CONFIGURATION:
        return GiveUp(budget, _failure_reason(first))
    charged = _charge_budget(first, budget)
    if charged.spent > charged.limit:
        return GiveUp(
            budget,
            f"{_failure_reason(first)}; {budget.spent} restarts since the last checkpoint, backoffLimit is "
            f"{budget.limit}",
        )
    return _smallest_action(failures, charged, _failure_reason(first))


def cause_of_exit(code: int, outcome: PodOutcome | None = None) -> FailureCause | None:
    """The cause behind a launcher's exit code; None when it did what it was asked to do."""
    if outcome is PodOutcome.HUNG:
        return FailureCause.HUNG
    match code:
        case ExitCode.DONE:
            return None
        case ExitCode.BAD_CONFIGURATION:
            return FailureCause.BAD_CONFIGURATION
        case ExitCode.SAVED_AND_STOPPED:
            return FailureCause.PREEMPTED
        case _ if outcome is PodOutcome.RANK_FAILED:
            return FailureCause.RANK_FAILED
        case _ if outcome is PodOutcome.LOST_PEERS:
            return FailureCause.LOST_PEERS
        case _:
            return FailureCause.POD_FAILED


def rank_restart_failure(index: int, fault: RankFault | None) -> Failure:
    """The failure after which the launcher of a pod restarted its ranks, as the launcher reports it."""
    cause = FailureCause.HUNG if fault is not None and fault.outcome is PodOutcome.HUNG else FailureCause.RANK_FAILED
    restart_text = "its ranks were restarted in place"
    message = f"{fault.message}; {restart_text}" if fault is not None and fault.message else restart_text
    return Failure(index, cause, pod_alive=True, message=message)


def delay_seconds(restarts: int) -> float:
    """Return the delay before restart number `restarts` (from 1): the first is at once, then it doubles."""
    if restarts <= 1:
        return 0.0
    # The exponent is bounded because 2.0 ** 1024 overflows long before a job gives up with a large backoffLimit.
    return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(restarts - 1, 16))


def find_culprit(failures: tuple[Failure, ...]) -> Failure:
    """The failure that explains the others: a final failure, else the cluster's, else a lost pod's, else the first.

    A failure that reports lost peers is a consequence, and explains no other one.
    """
    failures = tuple(failure for failure in failures if failure.cause is not FailureCause.LOST_PEERS) or failures
    permanent = next((failure for failure in failures if failure.cause is FailureCause.BAD_CONFIGURATION), None)
    uncounted = next((failure for failure in failures if not failure.cause.is_counted), None)
    lost_pod = next((failure for failure in failures if not failure.pod_alive), None)
    return permanent or uncounted or lost_pod or failures[0]


def _charge_budget(failure: Failure, budget: RestartBudget) -> RestartBudget:
    if failure.cause.is_counted:
        return replace(budget, spent=budget.spent + 1)
    return replace(budget, uncounted=budget.uncounted + 1)


def _smallest_action(failures: tuple[Failure, ...], charged: RestartBudget, reason: str) -> RecoveryAction:
    """The first rung of the ladder that can hold."""
    delay = delay_seconds(charged.spent + charged.uncounted)
    lost_pods = tuple(sorted({failure.pod for failure in failures if not failure.pod_alive}))
    if not lost_pods and charged.in_place < RESTARTS_IN_PLACE:
        return RestartRanks(delay, replace(charged, in_place=charged.in_place + 1), reason)
    if charged.pods >= PODS_BEFORE_GANG or any(failure.cause.needs_new_gang for failure in failures):
        return ReplaceGang(delay, charged.with_new_pods(), reason)
    suspects = lost_pods or tuple(sorted({failure.pod for failure in failures}))
    return ReplacePods(suspects, delay, replace(charged, pods=charged.pods + 1).without_pods(suspects), reason)


def _failure_reason(failure: Failure) -> str:
    if failure.cause is FailureCause.BAD_CONFIGURATION and failure.message:
        # The message says what is wrong with the job and how to mend it; the pod that said it first is of no interest.
        return failure.message
    text = f"{failure.cause} in pod {failure.pod}"
    return f"{text}: {failure.message}" if failure.message else text
