"""A process that is killed while it saves, at least twenty times in one run folder."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from moejob_trainer.checkpoints import latest
from moejob_trainer.checkpoints.names import step_folder
from trainer.checkpoints import saver
from trainer.checkpoints.worlds import files_below

KILLS, MOST_KILLS = 20, 200
TESTS = Path(__file__).parents[2]


def output_until_killed(folder: Path, attempt: int, seconds: float) -> list[str]:
    """Return the output of a saving process that is killed this long after it has begun to save."""
    with subprocess.Popen(
        [sys.executable, "-m", "trainer.checkpoints.saver", str(folder), str(attempt)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()
        return [first.strip(), *process.stdout.read().splitlines()]


@pytest.mark.slow
def test_a_run_killed_at_random_moments_of_saving_always_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    folder, moments = tmp_path / "sft", random.Random(20)
    newest, unfinished = "None", 0
    for attempt in range(MOST_KILLS):
        (tmp_path / "owner").write_text(str(attempt))
        said = output_until_killed(folder, attempt, moments.uniform(0, 0.3))
        assert said[0] == f"resumed {newest}"
        found = latest(folder / "checkpoints").found
        promised = said[-1].removeprefix("saved ") if len(said) > 1 else newest
        newest = "None" if found is None else found.folder.name
        assert promised == "None" or _order(newest) >= _order(promised)
        if found is not None:
            lies = files_below(found.path)
            assert {name: lies[name] for name in saver.heavy_state(newest)} == saver.heavy_state(newest)
        unfinished += any(not (path / "complete.json").exists() for path in (folder / "checkpoints").iterdir())
        # A busy machine saves less before each kill.
        if attempt >= KILLS and newest != "None" and _order(newest)[0] >= KILLS // 2:
            break
    else:
        pytest.fail(f"{MOST_KILLS} processes that were killed came to {newest}")
    # Else the moments were not those of saving.
    assert unfinished >= KILLS // 2


def _order(name: str) -> tuple[int, int]:
    folder = step_folder(name)
    assert folder is not None
    return folder.step, folder.token.attempt
