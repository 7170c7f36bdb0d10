"""A real rank that waits where a phase begins for as long as the test's folder says, so that faults meet that phase."""

from __future__ import annotations

import os
import time
from pathlib import Path

from moejob_api.contract.pods import Environment, RunPhase
from moejob_trainer.rank import run_rank
from moejob_trainer.runtime.heartbeats import Heartbeat
from trainer.launcher.rank_programs import folder, rank, restart


class HeldHeartbeat(Heartbeat):
    """The heartbeat of a rank that is held where it enters a phase."""

    def enter_phase(self, phase: RunPhase) -> None:
        super().enter_phase(phase)
        hold = holding(folder(), phase)
        if not hold.exists():
            return
        attempt = int(os.environ[Environment.ATTEMPT])
        note = held_note(folder(), phase, (attempt, restart()), rank())
        note.with_suffix(".new").write_text(str(os.getpid()))
        note.with_suffix(".new").rename(note)
        while hold.exists():
            # It reads, and is not taken for one that hangs.
            Path("/proc/self/maps").read_bytes()
            time.sleep(0.05)


def holding(run_folder: Path, phase: RunPhase) -> Path:
    """Return the file that holds ranks which enter a phase."""
    return run_folder.parent / f"hold-{phase.name}"


def held_note(run_folder: Path, phase: RunPhase, start: tuple[int, int], number: int) -> Path:
    """Return the file in which a rank that is held says its process id; a start is an attempt and its restart."""
    return run_folder.parent / f"held-{phase.name}-{start[0]}-{start[1]}-{number}"


def train_and_hold() -> int:
    return run_rank(HeldHeartbeat.for_rank())
