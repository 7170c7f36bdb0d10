"""The events that a launcher records in each round. Decides nothing: agent.py says what happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from moejob_api.contract.pods import RunPhase
from moejob_api.contract.record import MOST_LINES_BYTES, RunEventKind
from moejob_api.recovery.restarts import FailureCause
from moejob_trainer.launcher.ending import Ending, ExitReport, Fault
from moejob_trainer.launcher.pod import TrainerPod
from moejob_trainer.launcher.rank_processes import RankProcesses
from moejob_trainer.launcher.record import LauncherRecord
from moejob_trainer.runtime.start_timing import LauncherTiming

# Ranks of a round whose last lines are kept, and the bytes of a rank that is not to blame.
_MOST_RANKS, _PEER_BYTES = 8, 4 * 1024


@dataclass(slots=True)
class RoundRecord:
    """The events of one launcher, with the number of the round that they belong to."""

    record: LauncherRecord
    pod: TrainerPod
    ranks: RankProcesses
    _restart: int = field(init=False, default=0)
    _phase: RunPhase | None = field(init=False, default=None)
    _is_stopping: bool = field(init=False, default=False)
    _blamed_rank: int | None = field(init=False, default=None)
    _is_hung: bool = field(init=False, default=False)
    _has_lines: bool = field(init=False, default=False)

    def add_start(self) -> None:
        """Add the beginning of this launcher, with its place."""
        pod = self.pod
        last = pod.first_rank + pod.ranks_per_node
        numbers = () if pod.index >= pod.nodes else tuple(range(pod.first_rank, last))
        self.record.add(RunEventKind.LAUNCHER_STARTED, node=pod.node or None, host=pod.host, ranks=numbers)

    def take_place(self, pod: TrainerPod) -> None:
        """Add the place that a spare has taken: the newest beginning of a pod says which ranks it has."""
        self.pod = pod
        self.add_start()

    def add_round(self, number: int, timing: LauncherTiming) -> None:
        """Add the start of all ranks, with the parts of the time before."""
        parts = {name: round(value, 3) for name, value in asdict(timing).items() if name != "met_at"}
        self._restart, self._phase, self._has_lines = number, None, True
        self._blamed_rank, self._is_hung = None, False
        self.record.add(RunEventKind.RANKS_STARTED, restart=number, seconds=parts)

    def add_phase(self, phase: RunPhase | None) -> None:
        """Add a phase when it begins."""
        if phase is not None and phase is not self._phase:
            self._phase = phase
            self.record.add(RunEventKind.PHASE, restart=self._restart, state=phase.value)

    def add_stop_request(self, step: int | None) -> None:
        """Add the first request to stop."""
        if not self._is_stopping:
            self._is_stopping = True
            self.record.add(RunEventKind.STOP_REQUESTED, restart=self._restart, step=step)

    def add_result(self, result: Fault | Ending) -> None:
        """Add the reason why the ranks of this round have ended."""
        kind = RunEventKind.RANKS_FAILED if isinstance(result, Fault) else RunEventKind.ROUND_ENDED
        self._is_hung = result.cause is FailureCause.HUNG
        self._blamed_rank = result.rank if isinstance(result, Fault) else None
        self.record.add(
            kind,
            restart=self._restart,
            message=result.message,
            state=result.cause.value,
            rank=result.rank,
            exit_code=result.exit_code,
            step=result.step,
        )

    def add_last_lines(self) -> None:
        """Add the last lines of ranks, once for each round: of the blamed rank most."""
        if not self._has_lines:
            return
        self._has_lines = False
        first = self.pod.first_rank
        numbers = sorted(range(first, first + self.pod.ranks_per_node), key=lambda rank: rank != self._blamed_rank)
        for rank in numbers[:_MOST_RANKS]:
            # The rank for which silent ranks wait is known by its stacks only.
            most_bytes = MOST_LINES_BYTES if rank == self._blamed_rank or self._is_hung else _PEER_BYTES
            self.record.add_last_lines(rank, self._restart, self.ranks.read_tail(rank), most_bytes)

    def add_restart(self, ending: Ending) -> None:
        """Add the decision to restart all ranks in place."""
        seconds = {"delay": ending.delay_seconds}
        message = f"restart in place {ending.in_place} since the last new checkpoint"
        self.record.add(RunEventKind.RESTARTING, restart=self._restart, message=message, seconds=seconds)

    def add_end(self, report: ExitReport) -> None:
        """Add the end of this launcher."""
        termination = report.termination
        self.record.add(
            RunEventKind.LAUNCHER_ENDED,
            restart=self._restart,
            message=termination.message,
            state=termination.outcome.value,
            rank=termination.rank,
            exit_code=int(report.exit_code),
            step=termination.step,
        )


def needs_stacks(result: Fault | Ending) -> bool:
    """Return whether living ranks are killed because they do not answer: their stacks say why."""
    return result.cause is FailureCause.HUNG or (isinstance(result, Fault) and result.was_asked_to_save)
