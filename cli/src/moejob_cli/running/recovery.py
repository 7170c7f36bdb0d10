"""Failures of launchers, by their exits and their silence; moejob_api.recovery decides the action.

Pure. Knows neither processes nor clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moejob_api.contract.pods import ExitCode, LastWord, PodProgress
from moejob_api.recovery.restarts import LAUNCHER_FIRST_SECONDS, Cause, Failure, cause_of_exit, restarted_in_place
from moejob_api.recovery.state import GangReport, Recovery, RecoveryState, recover, renewed, settled

_RANKS_NAMED = 8


@dataclass(frozen=True, slots=True)
class PodReport:
    """One launcher: its exit, or its last progress. `quiet_seconds` have passed since one of its ranks reported."""

    index: int
    exit_code: int | None = None
    word: LastWord | None = None
    progress: PodProgress | None = None
    seconds: float = 0.0
    quiet_seconds: float = 0.0

    @property
    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return self.exit_code is None

    @property
    def is_ready(self) -> bool:
        """Return whether all its ranks have reported, or are done."""
        return self.exit_code == ExitCode.DONE or (
            self.is_running and self.progress is not None and self.progress.ready
        )


def polled(pods: Sequence[PodReport], nodes: int, state: RecoveryState) -> RecoveryState:
    """Return the state after a poll: a new checkpoint renews the budget, and a complete gang ends a recovery."""
    state = renewed(state, _saved_step(pods))
    return state if len(pods) < nodes else settled(_gang(pods, nodes), state)


def recovery(pods: Sequence[PodReport], nodes: int, state: RecoveryState, deadline_seconds: int) -> Recovery | None:
    """Return the action on all failures since the last decision; None without a failure."""
    return recover(_failures(pods, nodes, state, deadline_seconds), _gang(pods, nodes), state)


def exit_code_of(pods: Sequence[PodReport]) -> int:
    """Return the exit code of `moejob run` when it gives up."""
    is_permanent = any(pod.exit_code == ExitCode.BAD_CONFIGURATION for pod in pods)
    return ExitCode.BAD_CONFIGURATION if is_permanent else 1


# --- what failed ------------------------------------------------------------------------------------------------------


def _failures(
    pods: Sequence[PodReport], nodes: int, state: RecoveryState, deadline_seconds: int
) -> tuple[Failure, ...]:
    ended = tuple(_ended(pods))
    # A preempted launcher saves first, and all ranks save together: wait for the other launchers to end, too.
    if all(failure.cause is Cause.PREEMPTED for failure in ended) and any(pod.is_running for pod in pods):
        ended = ()
    if ended or state.replacing or len(pods) < nodes:
        return ended
    limit = deadline_seconds + LAUNCHER_FIRST_SECONDS
    return tuple(_silent(pods, limit)) or tuple(_restarted(pods, nodes, state))


def _ended(pods: Sequence[PodReport]) -> Iterator[Failure]:
    for pod in pods:
        if pod.exit_code is None:
            continue
        cause = cause_of_exit(pod.exit_code, None if pod.word is None else pod.word.outcome)
        if cause is not None:
            yield Failure(pod.index, cause, message=_why(pod))


def _why(pod: PodReport) -> str:
    if pod.word is not None and pod.word.message:
        return pod.word.message
    code = pod.exit_code or 0
    return f"its launcher was killed by signal {-code}" if code < 0 else f"its launcher ended with exit code {code}"


def _silent(pods: Sequence[PodReport], limit: float) -> Iterator[Failure]:
    # Ranks wait for each other: silence means nothing before all launchers run long enough, or after one has ended.
    if not all(pod.is_running for pod in pods) or min(pod.seconds for pod in pods) < limit:
        return
    for pod in pods:
        ranks = sorted(beat.rank for beat in pod.progress.ranks if beat.age_seconds >= limit) if pod.progress else []
        if ranks:
            named = ", ".join(map(str, ranks[:_RANKS_NAMED])) + (" ..." if len(ranks) > _RANKS_NAMED else "")
            noun = "rank" if len(ranks) == 1 else "ranks"
            yield Failure(pod.index, Cause.HUNG, message=f"{noun} {named} silent for {limit:.0f} s")
        elif pod.quiet_seconds >= limit:
            yield Failure(pod.index, Cause.HUNG, message=f"no rank has been heard for {limit:.0f} s")


def _restarted(pods: Sequence[PodReport], nodes: int, state: RecoveryState) -> Iterator[Failure]:
    reported = _gang(pods, nodes).rank_restarts
    if state.rank_restarts is None or reported is None or reported <= state.rank_restarts:
        return
    most = max(pods, key=lambda pod: pod.progress.restarts if pod.progress else 0)
    yield restarted_in_place(most.index, most.progress.fault if most.progress else None)


def _gang(pods: Sequence[PodReport], nodes: int) -> GangReport:
    counts = [pod.progress.restarts for pod in pods if pod.progress is not None]
    return GangReport(
        succeeded=frozenset(pod.index for pod in pods if pod.exit_code == ExitCode.DONE),
        rank_restarts=sum(counts) if len(counts) == len(pods) == nodes else None,
        is_ready=len(pods) == nodes and all(pod.is_ready for pod in pods),
    )


def _saved_step(pods: Sequence[PodReport]) -> int | None:
    first = next((pod.progress for pod in pods if pod.index == 0), None)
    return None if first is None or first.run is None else first.run.last_checkpoint_step
