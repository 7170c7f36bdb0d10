"""The ending of one start of all ranks, and its consequence: the launchers' rung of the recovery ladder. Pure.

The launcher that writes an ending first decides for all pods, so that one failure is one ending, named once and charged
once, however many ranks it takes down. Pods and gangs are the operator's rungs: where ranks may not be restarted in
place any more, the launcher at fault leaves and its pod is replaced, while the others wait for the new one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from moejob_api.contract.pods import ExitCode, PodOutcome, RankFault, TerminationMessage
from moejob_api.recovery.restarts import RESTARTS_IN_PLACE, FailureCause, delay_seconds

FAILED = 1


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why ranks of this pod can no longer run."""

    cause: FailureCause
    message: str
    rank: int | None = None
    exit_code: int | None = None
    step: int | None = None
    # The ranks live, and have not saved in time.
    was_asked_to_save: bool = False


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The exit code and termination message of a launcher."""

    exit_code: int
    termination: TerminationMessage


class Ending(BaseModel):
    """The end of one round, the same for every pod. `in_place`: restarts in place since the last new checkpoint."""

    model_config = ConfigDict(frozen=True)

    pod: int
    # The process of that pod: a pod that was replaced has the index of the one before.
    token: str
    cause: FailureCause
    message: str
    rank: int | None = None
    exit_code: int | None = None
    step: int | None = None
    in_place: int = 0
    checkpoint: int | None = None
    pod_leaves: bool = False
    # A new process has the index of that pod: the old one, if it still lives, has no place any more.
    pod_was_taken_over: bool = False

    @property
    def is_final(self) -> bool:
        """True when no restart can help."""
        return self.cause is FailureCause.BAD_CONFIGURATION

    @property
    def is_end_of_first_pod(self) -> bool:
        """True when pod 0, which hosts the rendezvous, has been asked to stop."""
        return self.cause is FailureCause.PREEMPTED and self.pod_leaves

    @property
    def delay_seconds(self) -> float:
        """The back-off before ranks are restarted."""
        return delay_seconds(self.in_place)


@dataclass(frozen=True, slots=True)
class FailureOrigin:
    """The launcher that writes an ending, and its knowledge of the run."""

    pod: int
    token: str
    checkpoint: int | None = None
    is_stopping: bool = False


def ending_by_fault(origin: FailureOrigin, fault: Fault, before: Ending | None) -> Ending:
    """Return the ending for a fault in the pod of the launcher that writes it."""
    spent_restarts = _spent_restarts(before, origin.checkpoint)
    may_restart = (
        not origin.is_stopping
        and fault.cause is not FailureCause.BAD_CONFIGURATION
        and spent_restarts < RESTARTS_IN_PLACE
    )
    return Ending(
        pod=origin.pod,
        token=origin.token,
        cause=fault.cause,
        message=fault.message,
        rank=fault.rank,
        exit_code=fault.exit_code,
        step=fault.step,
        in_place=spent_restarts + 1 if may_restart else spent_restarts,
        checkpoint=_newest_checkpoint(before, origin.checkpoint),
        pod_leaves=not may_restart,
    )


def ending_without_pod(pod: int, origin: FailureOrigin, message: str, before: Ending | None) -> Ending:
    """Return the ending for a pod that is gone. The operator charges it: it is no restart in place."""
    return Ending(
        pod=pod,
        token=origin.token,
        cause=FailureCause.POD_FAILED,
        message=message,
        in_place=_spent_restarts(before, origin.checkpoint),
        checkpoint=_newest_checkpoint(before, origin.checkpoint),
        pod_leaves=True,
    )


def ending_by_stop(origin: FailureOrigin, before: Ending | None) -> Ending:
    """The ending that pod 0 writes when all ranks have saved and stopped because a pod was asked to."""
    return Ending(
        pod=origin.pod,
        token=origin.token,
        cause=FailureCause.PREEMPTED,
        message="all ranks have saved and stopped, for a pod was asked to",
        in_place=_spent_restarts(before, origin.checkpoint),
        checkpoint=_newest_checkpoint(before, origin.checkpoint),
        pod_leaves=origin.is_stopping,
    )


def rank_fault(ending: Ending) -> RankFault:
    """Return the fault to report for ranks that were restarted in place."""
    termination = build_termination(ending)
    return RankFault(
        outcome=termination.outcome,
        message=termination.message[:512],
        rank=termination.rank,
        exit_code=termination.exit_code,
    )


def build_termination(ending: Ending | Fault) -> TerminationMessage:
    """Return the termination message of a launcher that leaves because of it."""
    outcomes = {FailureCause.BAD_CONFIGURATION: PodOutcome.BAD_CONFIGURATION, FailureCause.HUNG: PodOutcome.HUNG}
    return TerminationMessage(
        outcome=outcomes.get(ending.cause, PodOutcome.RANK_FAILED),
        message=ending.message[:2048],
        rank=ending.rank,
        exit_code=ending.exit_code,
        step=ending.step,
    )


def launcher_exit_code(ending: Ending | Fault) -> int:
    """The exit code of a launcher that leaves because of it."""
    return ExitCode.BAD_CONFIGURATION if ending.cause is FailureCause.BAD_CONFIGURATION else FAILED


def blamed_rank(exits: dict[int, int]) -> int:
    """Return the rank to blame: a rank that refuses the configuration, else a killed rank, else the lowest.

    The exits are all that were seen at one moment; peers of a dead rank fail a little later, on a broken connection.
    """
    failures = {rank: code for rank, code in exits.items() if is_failure(code)}
    wrong = [rank for rank, code in failures.items() if code == ExitCode.BAD_CONFIGURATION]
    killed = [rank for rank, code in failures.items() if code < 0]
    return min(wrong or killed or failures)


def is_failure(code: int) -> bool:
    """Return whether a rank that ends so takes the others down. A negative code is a signal."""
    return code not in (ExitCode.DONE, ExitCode.SAVED_AND_STOPPED)


def _spent_restarts(before: Ending | None, checkpoint: int | None) -> int:
    """Restarts in place that still count: a newer checkpoint forgives what came before it."""
    if before is None:
        return 0
    is_newer = checkpoint is not None and (before.checkpoint is None or checkpoint > before.checkpoint)
    return 0 if is_newer else before.in_place


def _newest_checkpoint(before: Ending | None, checkpoint: int | None) -> int | None:
    steps = [step for step in (checkpoint, None if before is None else before.checkpoint) if step is not None]
    return max(steps, default=None)
