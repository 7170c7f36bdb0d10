"""The ledger of a run: each second from its beginning to its end, and what each failure cost. Pure.

A row of the step log covers [time - evaluateSeconds - seconds, time]. What lies between two rows of one start of the
ranks belongs to the second of them. Before the first row the run starts, or recovers if the start before it failed;
behind the last row it saves and exports. So the seconds of all kinds add up to the time of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from moejob_api.contract.record import RecordEvent, RunEventKind

# Pieces of one start: more would be narrower than a pixel.
_MOST_PIECES = 240
_FAILURES = (RunEventKind.RANKS_FAILED, RunEventKind.ROUND_ENDED)
_ENDS = (*_FAILURES, RunEventKind.LAUNCHER_ENDED)
_GOOD_ENDS = ("Completed", "Preempted")


class TimeKind(StrEnum):
    """The kinds of seconds."""

    STARTING = "starting"
    TRAINING = "training"
    WAITING = "waiting"
    SAVING = "saving"
    EVALUATING = "evaluating"
    RECOVERING = "recovering"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class StepRow:
    """The times of one line of the step log."""

    step: int
    time: float
    seconds: float = 0.0
    wait_seconds: float = 0.0
    stall_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    # The parts of the start before it, in the first line of a start.
    start_seconds: float = 0.0

    @property
    def began_at(self) -> float:
        """The moment at which the step began."""
        return self.time - self.evaluate_seconds - self.seconds


@dataclass(frozen=True, slots=True)
class LedgerPiece:
    """A piece of the run's time, with the seconds of each kind in it."""

    begin: float
    end: float
    seconds: Mapping[TimeKind, float]


@dataclass(frozen=True, slots=True)
class FailureCost:
    """A failure: the seconds until the next step, and the seconds of steps that were done again."""

    time: float
    attempt: int
    restart: int
    message: str
    step: int | None
    recovery_seconds: float
    repeated_seconds: float
    repeated_steps: int


@dataclass(frozen=True, slots=True)
class RankStart:
    """One start of all ranks: its rows and its events."""

    attempt: int
    restart: int
    rows: Sequence[StepRow] = ()
    events: Sequence[RecordEvent] = ()

    @property
    def began_at(self) -> float:
        """The moment at which launchers began to bring it about."""
        times = [event.time for event in self.events]
        if self.rows:
            times.append(self.rows[0].began_at - self.rows[0].start_seconds)
        return min(times)

    @property
    def first_step_at(self) -> float | None:
        """The moment at which its first step began."""
        return self.rows[0].began_at if self.rows else None

    @property
    def ended_at(self) -> float:
        """The moment at which it ended, or was seen last."""
        return max([event.time for event in self.events] + [row.time for row in self.rows[-1:]])

    @property
    def failure(self) -> RecordEvent | None:
        """The event of its failure."""
        return next((event for event in self.events if event.kind in _FAILURES), None)

    @property
    def has_ended_well(self) -> bool:
        """True when the launcher of a pod says so."""
        return any(event.kind is RunEventKind.LAUNCHER_ENDED and event.state in _GOOD_ENDS for event in self.events)


@dataclass(slots=True)
class Ledger:
    """The time of a run."""

    pieces: list[LedgerPiece] = field(default_factory=list)
    failures: list[FailureCost] = field(default_factory=list)

    def totals(self) -> dict[str, float]:
        """Return the seconds of each kind."""
        return {kind.value: sum(piece.seconds.get(kind, 0.0) for piece in self.pieces) for kind in TimeKind}


def build_ledger(starts: Sequence[RankStart]) -> Ledger:
    """Return the ledger of the starts of a run, in their order."""
    ledger, before = Ledger(), None
    for start in starts:
        _add_start(ledger, before, start)
        before = start
    return ledger


def _add_start(ledger: Ledger, before: RankStart | None, start: RankStart) -> None:
    begin = start.began_at if before is None else max(start.began_at, before.ended_at)
    is_recovery = before is not None and not before.has_ended_well
    if before is not None:
        gap = TimeKind.RECOVERING if is_recovery else TimeKind.STOPPED
        _add_piece(ledger, before.ended_at, begin, {gap: begin - before.ended_at})
    first_step_at = max(begin, start.first_step_at if start.first_step_at is not None else start.ended_at)
    kind = TimeKind.RECOVERING if is_recovery else TimeKind.STARTING
    _add_piece(ledger, begin, first_step_at, {kind: first_step_at - begin})
    for piece in _step_pieces(start.rows, first_step_at):
        _add_piece(ledger, piece.begin, piece.end, piece.seconds)
    end = max(start.ended_at, start.rows[-1].time if start.rows else first_step_at)
    last = start.rows[-1].time if start.rows else first_step_at
    _add_piece(ledger, last, end, {TimeKind.SAVING: end - last})
    if before is not None and is_recovery:
        ledger.failures.append(_failure_cost(before, start, first_step_at))


def _add_piece(ledger: Ledger, begin: float, end: float, seconds: Mapping[TimeKind, float]) -> None:
    if end > begin:
        ledger.pieces.append(LedgerPiece(begin, end, seconds))


def _step_pieces(rows: Sequence[StepRow], first_step_at: float) -> list[LedgerPiece]:
    """Return the steps in pieces of equally many."""
    pieces, stalled_before, begin = [], 0.0, first_step_at
    rows_per_piece = max(1, -(-len(rows) // _MOST_PIECES))
    for first in range(0, len(rows), rows_per_piece):
        seconds = dict.fromkeys((TimeKind.TRAINING, TimeKind.WAITING, TimeKind.SAVING, TimeKind.EVALUATING), 0.0)
        piece_rows = rows[first : first + rows_per_piece]
        for row in piece_rows:
            # A line repeats the stall of the last save until the next one.
            stall = row.stall_seconds if row.stall_seconds != stalled_before else 0.0
            stalled_before = row.stall_seconds
            saving = min(stall, row.seconds)
            waiting = min(row.wait_seconds, row.seconds - saving)
            seconds[TimeKind.SAVING] += saving
            seconds[TimeKind.WAITING] += waiting
            seconds[TimeKind.EVALUATING] += row.evaluate_seconds
        end = max(begin, piece_rows[-1].time)
        others = sum(seconds.values())
        seconds[TimeKind.TRAINING] = max(0.0, end - begin - others)
        pieces.append(LedgerPiece(begin, end, seconds))
        begin = end
    return pieces


def _failure_cost(before: RankStart, start: RankStart, first_step_at: float) -> FailureCost:
    failure = before.failure
    first_step = start.rows[0].step if start.rows else None
    repeated = [row for row in before.rows if first_step is not None and row.step >= first_step]
    return FailureCost(
        time=before.ended_at,
        attempt=before.attempt,
        restart=before.restart,
        message=failure.message if failure is not None else "ended without a word: its pods were killed from outside",
        step=before.rows[-1].step if before.rows else None,
        recovery_seconds=first_step_at - before.ended_at,
        repeated_seconds=sum(row.seconds for row in repeated),
        repeated_steps=len(repeated),
    )
