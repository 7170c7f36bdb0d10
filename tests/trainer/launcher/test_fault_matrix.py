"""Every process of a pod meets every signal in every phase of a real run, and the run still comes to its end.

A chain holds the ranks of one run where a phase begins, sends the signal to the process, and lets the run go on until
its ranks enter the next phase together. The test stands in for who starts launchers again: `moejob run`, an operator.
Where MOEJOB_FAULT_TABLE names a file, the seconds of each cell are added to it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from moejob_api.contract.pods import ExitCode, RunPhase
from trainer import random_model
from trainer.launcher.held_rank import held_note, holding
from trainer.launcher.launchers import Gang, Launcher, await_result, is_alive
from trainer.runs import TINY, read_steps

Make = Callable[..., Gang]
DEADLINE_SECONDS = 15
PHASES = (
    RunPhase.JOINING,
    RunPhase.READING_MODEL,
    RunPhase.PREPARING_DATA,
    RunPhase.BUILDING,
    RunPhase.RESTORING,
    RunPhase.FIRST_STEP,
    RunPhase.STEPPING,
    RunPhase.FINISHING,
    RunPhase.EXPORTING,
)
RANKS = 2


class Victim(StrEnum):
    """The process that a fault meets."""

    LAUNCHER = "launcher"
    FORK_SERVER = "fork server"
    RANKS_STORE = "ranks' store"
    FIRST_RANK = "rank 0"
    LAST_RANK = "rank 1"


RANK_VICTIMS = (Victim.FIRST_RANK, Victim.LAST_RANK)


@dataclass
class SupervisedRun:
    """A run whose launcher is started again, as `moejob run` does it, until the run is done."""

    gang: Gang
    launcher: Launcher
    attempt: int = 1
    stopped_at: float | None = None

    def supervise(self) -> None:
        """Start the next attempt where the launcher has ended before the run was done."""
        if self.stopped_at is not None and time.monotonic() - self.stopped_at >= DEADLINE_SECONDS:
            # It has given no answer for the deadline.
            self.launcher.kill()
        if self.launcher.process.is_alive() or self.launcher.process.exitcode == ExitCode.DONE:
            return
        assert self.launcher.process.exitcode != ExitCode.BAD_CONFIGURATION, self.log()
        self.attempt, self.stopped_at = self.attempt + 1, None
        self.launcher = self.gang.start("train_and_hold", attempt=self.attempt)

    def held(self, phase: RunPhase, after: tuple[int, int] = (0, 0)) -> tuple[tuple[int, int], dict[int, int]]:
        """Return a start, later than that one, whose living ranks are all held in a phase, and their process ids."""

        def look() -> tuple[tuple[int, int], dict[int, int]] | None:
            self.supervise()
            assert self.launcher.process.exitcode != ExitCode.DONE, f"{phase} was not reached:\n{self.log()}"
            for start in ((self.attempt, restart) for restart in range(3 * len(PHASES))):
                notes = [held_note(self.gang.run_folder, phase, start, rank) for rank in range(RANKS)]
                if start <= after or not all(note.exists() for note in notes):
                    continue
                pids = [int(note.read_text()) for note in notes]
                if all(is_alive(pid) for pid in pids):
                    return start, dict(enumerate(pids))
            return None

        return await_result(look, f"the phase {phase}")

    def done(self) -> bool:
        """Return whether the run has come to its end."""
        self.supervise()
        return self.launcher.process.exitcode == ExitCode.DONE

    def send(self, victim: Victim, number: signal.Signals, ranks: dict[int, int]) -> None:
        """Send a signal to a process of the run."""
        if victim is Victim.LAUNCHER:
            self.stopped_at = time.monotonic() if number is signal.SIGSTOP else None
        with suppress(ProcessLookupError):
            os.kill(self._pid(victim, ranks), number)

    def log(self) -> str:
        return "\n".join(launcher.log.read_text(errors="replace") for launcher in self.gang.launchers)

    def _pid(self, victim: Victim, ranks: dict[int, int]) -> int:
        server = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
        match victim:
            case Victim.LAUNCHER:
                return self.launcher.pid
            case Victim.FORK_SERVER:
                return server
            case Victim.RANKS_STORE:
                children = map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
                return next(pid for pid in children if is_alive(pid) and pid not in ranks.values())
            case Victim.FIRST_RANK:
                return ranks[0]
            case _:
                return ranks[1]


def write_cell(*cells: object) -> None:
    if table := os.environ.get("MOEJOB_FAULT_TABLE"):
        with Path(table).open("a") as file:
            file.write("| " + " | ".join(map(str, cells)) + " |\n")


def run_chain(
    gang: Make, folder: Path, victim: Victim, number: signal.Signals, phases: tuple[RunPhase, ...]
) -> SupervisedRun:
    random_model.write(folder / "model")
    job: dict[str, Any] = TINY | {
        "model": {"source": str(folder / "model"), "dtype": "float32"},
        "parallelism": {"expert": RANKS},
        "checkpoint": {"everySteps": 1},
        "resources": TINY["resources"] | {"gpusPerNode": RANKS},
    }
    made = gang(
        progress_deadline=DEADLINE_SECONDS,
        idle_import_seconds=5.0,
        preload=("torch", "moejob_trainer.rank"),
        grace=30,
        job=job,
    )
    made.run_folder.mkdir()
    holding(made.run_folder, phases[0]).touch()
    # A rank that is asked to stop, and a server that stands still once ranks run, may let a start go on for a while.
    ends_start = number is signal.SIGKILL or (number is signal.SIGTERM and victim not in RANK_VICTIMS)
    run, after = SupervisedRun(made, made.start("train_and_hold", attempt=1)), (0, 0)
    for phase, following in zip(phases, [*phases[1:], None], strict=True):
        start, ranks = run.held(phase, after)
        after = start if ends_start else (0, 0)
        if following is not None:
            holding(made.run_folder, following).touch()
        began = time.monotonic()
        run.send(victim, number, ranks)
        holding(made.run_folder, phase).unlink()
        if following is None:
            await_result(run.done, "the end of the run")
        else:
            run.held(following, after)
        write_cell(phase.name, victim, number.name, f"{time.monotonic() - began:.0f}")
    assert {step.step for step in read_steps(made.run_folder)} == {1, 2, 3}
    assert list((made.run_folder / "export").glob("*.safetensors"))
    return run


@pytest.mark.slow
def test_a_rank_that_dies_in_the_first_step_and_at_the_end_costs_a_restart(gang: Make, tmp_path: Path) -> None:
    run = run_chain(gang, tmp_path, Victim.LAST_RANK, signal.SIGKILL, (RunPhase.FIRST_STEP, RunPhase.EXPORTING))
    assert run.log().count("message='rank 1 was killed by signal 9'") == 2
    assert run.attempt == 1


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("victim", list(Victim))
@pytest.mark.parametrize(
    "phases", [pytest.param(PHASES[:5], id="before the first step"), pytest.param(PHASES[5:], id="from it on")]
)
def test_each_phase_survives_each_signal_to_each_process(
    gang: Make, tmp_path: Path, victim: Victim, number: signal.Signals, phases: tuple[RunPhase, ...]
) -> None:
    if victim is Victim.RANKS_STORE and number is signal.SIGSTOP:
        pytest.skip("ranks that wait for a store that stands still give up after 30 minutes, the patience of gloo")
    run_chain(gang, tmp_path, victim, number, phases)
