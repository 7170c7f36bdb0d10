"""Failures of launchers, by their exits and their silence; moejob_api.recovery decides the action.

Pure. Knows neither processes nor clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moejob_api.contract.pods import ExitCode, PodProgress, TerminationMessage
from moejob_api.recovery.restarts import (
    LAUNCHER_FIRST_SECONDS,
    Failure,
    FailureCause,
    cause_of_exit,
    rank_restart_failure,
)
from moejob_api.recovery.state import (
    GangReport,
    Recovery,
    RecoveryState,
    decide_recovery,
    state_after_checkpoint,
    state_after_report,
)

_RANKS_NAMED = 8


@dataclass(frozen=True, slots=True)
class PodReport:
    """One launcher: its exit, or its last progress. `quiet_seconds` have passed since one of its ranks reported."""

    index: int
    exit_code: int | None = None
    termination_message: TerminationMessage | None = None
    progress: PodProgress | None = None
    seconds: float = 0.0
    quiet_seconds: float = 0.0

    @property
    def is_running(self) -> bool:
        """Return whether the launcher had not ended when it was asked."""
        return self.exit_code is None

    @property
    def is_ready(self) -> bool:
        """Return whether all its ranks have reported, or are done."""
        return self.exit_code == ExitCode.DONE or (
            self.is_running and self.progress is not None and self.progress.ready
        )


def state_after_poll(pods: Sequence[PodReport], nodes: int, state: RecoveryState) -> RecoveryState:
    """Return the state after a poll: a new checkpoint renews the budget, and a complete gang ends a recovery."""
    state = state_after_checkpoint(state, _saved_step(pods))
    return state if len(pods) < nodes else state_after_report(_gang_report(pods, nodes), state)


def choose_recovery(
    pods: Sequence[PodReport], nodes: int, state: RecoveryState, deadline_seconds: int
) -> Recovery | None:
    """Return the action on all failures since the last decision; None without a failure."""
    return decide_recovery(_failures(pods, nodes, state, deadline_seconds), _gang_report(pods, nodes), state)


def final_exit_code(pods: Sequence[PodReport]) -> int:
    """Return the exit code of `moejob run` when it gives up."""
    is_permanent = any(pod.exit_code == ExitCode.BAD_CONFIGURATION for pod in pods)
    return ExitCode.BAD_CONFIGURATION if is_permanent else 1


# --- what failed ------------------------------------------------------------------------------------------------------


def _failures(
    pods: Sequence[PodReport], nodes: int, state: RecoveryState, deadline_seconds: int
) -> tuple[Failure, ...]:
    ended = tuple(_exit_failures(pods))
    # All ranks save together. Where only one launcher was asked to stop, the others wait for its replacement then.
    is_saving = any(pod.is_running and pod.is_ready for pod in pods)
    if is_saving and all(failure.cause is FailureCause.PREEMPTED for failure in ended):
        ended = ()
    if ended or state.replacing or len(pods) < nodes:
        return ended
    limit = deadline_seconds + LAUNCHER_FIRST_SECONDS
    return tuple(_silence_failures(pods, limit)) or tuple(_restart_failures(pods, nodes, state))


def _exit_failures(pods: Sequence[PodReport]) -> Iterator[Failure]:
    for pod in pods:
        if pod.exit_code is None:
            continue
        exit_cause = cause_of_exit(
            pod.exit_code, None if pod.termination_message is None else pod.termination_message.outcome
        )
        if exit_cause is not None:
            yield Failure(pod.index, exit_cause, message=_exit_reason(pod))


def _exit_reason(pod: PodReport) -> str:
    if pod.termination_message is not None and pod.termination_message.message:
        return pod.termination_message.message
    code = pod.exit_code or 0
    return f"its launcher was killed by signal {-code}" if code < 0 else f"its launcher ended with exit code {code}"


def _silence_failures(pods: Sequence[PodReport], limit: float) -> Iterator[Failure]:
    # Ranks wait for each other: silence means nothing before all launchers run long enough, or after one has ended.
    if not all(pod.is_running for pod in pods) or min(pod.seconds for pod in pods) < limit:
        return
    for pod in pods:
        ranks = sorted(beat.rank for beat in pod.progress.ranks if beat.age_seconds >= limit) if pod.progress else []
        if ranks:
            rank_names = ", ".join(map(str, ranks[:_RANKS_NAMED])) + (" ..." if len(ranks) > _RANKS_NAMED else "")
            noun = "rank" if len(ranks) == 1 else "ranks"
            yield Failure(pod.index, FailureCause.HUNG, message=f"{noun} {rank_names} silent for {limit:.0f} s")
        elif pod.quiet_seconds >= limit:
            yield Failure(pod.index, FailureCause.HUNG, message=f"no rank has been heard for {limit:.0f} s")


def _restart_failures(pods: Sequence[PodReport], nodes: int, state: RecoveryState) -> Iterator[Failure]:
    reported = _gang_report(pods, nodes).rank_restarts
    if state.rank_restarts is None or reported is None or reported <= state.rank_restarts:
        return
    most_restarted = max(pods, key=lambda pod: pod.progress.restarts if pod.progress else 0)
    yield rank_restart_failure(most_restarted.index, most_restarted.progress.fault if most_restarted.progress else None)


def _gang_report(pods: Sequence[PodReport], nodes: int) -> GangReport:
    counts = [pod.progress.restarts for pod in pods if pod.progress is not None]
    return GangReport(
        nodes=nodes,
        succeeded=frozenset(pod.index for pod in pods if pod.exit_code == ExitCode.DONE),
        rank_restarts=sum(counts) if len(counts) == len(pods) == nodes else None,
        is_ready=len(pods) == nodes and all(pod.is_ready for pod in pods),
    )


def _saved_step(pods: Sequence[PodReport]) -> int | None:
    first = next((pod.progress for pod in pods if pod.index == 0), None)
    return None if first is None or first.run is None else first.run.last_checkpoint_step
