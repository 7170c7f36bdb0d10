"""A process that is killed while it saves, at least twenty times in one run folder."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from moejob_trainer.checkpoints import find_latest_checkpoint
from moejob_trainer.checkpoints.names import parse_step_folder
from trainer.checkpoints import saver
from trainer.checkpoints.stand_ins import files_below

KILLS = 20
TESTS = Path(__file__).parents[2]


@dataclass
class SaverRuns:
    """Saving processes in one folder, and the seconds that a save takes here and now: a busy machine takes longer."""

    folder: Path
    save_seconds: float = 0.0

    def output_until_killed(self, attempt: int, saves: int, share: float) -> list[str]:
        """Return the output of a process that is killed after this many saves and this share of the next one."""
        with subprocess.Popen(
            [sys.executable, "-m", "trainer.checkpoints.saver", str(self.folder), str(attempt)],
            env=os.environ | {"PYTHONPATH": str(TESTS)},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            for _ in range(saves):
                began = time.monotonic()
                lines.append(process.stdout.readline())
                self.save_seconds = time.monotonic() - began
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(share * self.save_seconds)
            process.kill()
            return [*map(str.strip, lines), *process.stdout.read().splitlines()]


@pytest.mark.slow
def test_a_run_killed_at_random_moments_of_saving_always_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    folder, moments = tmp_path / "sft", random.Random(20)
    newest, unfinished, runs = "None", 0, SaverRuns(folder)
    for attempt in range(KILLS):
        (tmp_path / "owner").write_text(str(attempt))
        # Every second one saves at least once, so that the run moves however slow the machine is.
        output = runs.output_until_killed(attempt, saves=(attempt + 1) % 2, share=moments.uniform(0, 1))
        assert output[0] == f"resumed {newest}"
        checkpoint = find_latest_checkpoint(folder / "checkpoints").checkpoint
        promised = output[-1].removeprefix("saved ") if len(output) > 1 else newest
        newest = "None" if checkpoint is None else checkpoint.folder.name
        assert promised == "None" or _order(newest) >= _order(promised)
        if checkpoint is not None:
            files = files_below(checkpoint.path)
            assert {name: files[name] for name in saver.heavy_state(newest)} == saver.heavy_state(newest)
        unfinished += any(not (path / "complete.json").exists() for path in (folder / "checkpoints").iterdir())
    assert _order(newest)[0] >= KILLS // 2
    # Else the moments were not those of saving.
    assert unfinished >= KILLS // 2


def _order(name: str) -> tuple[int, int]:
    folder = parse_step_folder(name)
    assert folder is not None
    return folder.step, folder.token.attempt
