"""Trackio itself reads what the run folder has for it: every step of every start, each once."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from moejob_api.job.lifecycle import Trackio
from moejob_trainer.tracking.trackio_inbox import TrackioInbox
from trainer.tracking.runs import numbers, tracked

ROOT = Path(__file__).parents[3]
MOE = Trackio(project="moe")
# The dashboard imports the inbox in the same way when it is opened.
_READ = """
import json
from trackio.fragments import import_inbox_dir
from trackio.sqlite_storage import SQLiteStorage
imported = import_inbox_dir()
runs = SQLiteStorage.get_run_records("moe")
print(json.dumps({
    "imported": imported,
    "runs": [[run["name"], run["id"]] for run in runs],
    "logs": SQLiteStorage.get_logs("moe", "tiny", run_id="uid-7"),
    "config": SQLiteStorage.get_run_config("moe", "tiny", run_id="uid-7"),
}, default=str))
"""


def read_by_trackio(folder: Path) -> dict[str, Any]:
    """Return what trackio has in its database after it has taken up the inbox."""
    environment = os.environ | {"TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [str(ROOT / ".venv/mlflow/bin/python"), "-c", _READ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def losses(found: dict[str, Any]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in found["logs"]}


def write_steps(folder: Path, *steps: int, restart: int = 0, seconds: float = 4.0) -> TrackioInbox:
    """Write these steps, `seconds` apart, and leave the backend as a killed process would."""
    now = [0.0]
    backend = TrackioInbox(tracked(folder, restart=restart, trackio={"project": "moe"}), MOE, lambda: now[0])
    for step in steps:
        now[0] += seconds
        backend.write(numbers(step, loss=1.0 / step))
    return backend


def test_trackio_reads_every_step_and_the_job(tmp_path: Path) -> None:
    backend = TrackioInbox(tracked(tmp_path), MOE)
    backend.write(numbers(1, **{"loss": 2.0, "evalMean@4": 0.5, "reward/http://score:80/a": 0.25}))
    backend.write(numbers(2, loss=1.5))
    backend.close(has_failed=False)
    found = read_by_trackio(tmp_path)
    assert (found["imported"], found["runs"]) == (2, [["tiny", "uid-7"]])
    first, second = found["logs"]
    assert first == {
        "step": 1,
        "loss": 2.0,
        "evalMean@4": 0.5,
        "reward/http://score:80/a": 0.25,
        "timestamp": "1970-01-01T00:16:41+00:00",
    }
    assert (second["step"], second["loss"]) == (2, 1.5)
    assert found["config"]["data"]["maxLength"] == tracked(tmp_path).spec.data.max_length


def test_the_first_step_can_be_read_at_once_and_others_after_ten_seconds(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    assert losses(read_by_trackio(tmp_path)) == {1: 1.0}
    write_steps(tmp_path, 1, 2, 3, 4, 5, restart=1)
    # Of five steps in 20 seconds the last is not finished; the start before had left steps 2 and 3.
    assert [*losses(read_by_trackio(tmp_path))] == [1, 2, 3, 4]


def test_steps_of_a_killed_start_are_finished_by_the_next_one(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    inbox = tmp_path / "trackio" / "inbox"
    (unfinished,) = inbox.glob("*/fragment.open")
    with unfinished.open("a") as file:
        # Power was lost in the middle of a line.
        file.write('{"v": 1, "kind": "met')
    write_steps(tmp_path, 3, 4, restart=1).close(has_failed=False)
    assert losses(read_by_trackio(tmp_path)) == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25}
    assert [*inbox.rglob("*")] == []


def test_a_step_that_comes_again_is_one_point(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3).close(has_failed=True)
    assert len(read_by_trackio(tmp_path)["logs"]) == 3
    write_steps(tmp_path, 2, 3, 4, restart=1).close(has_failed=False)
    found = read_by_trackio(tmp_path)
    assert [row["step"] for row in found["logs"]] == [1, 2, 3, 4]
    assert found["runs"] == [["tiny", "uid-7"]]


def test_a_dashboard_that_reads_during_the_run_loses_nothing(tmp_path: Path) -> None:
    now = [0.0]
    backend = TrackioInbox(tracked(tmp_path), MOE, lambda: now[0])
    for step in range(1, 7):
        now[0] += 6.0
        backend.write(numbers(step, loss=1.0 / step))
        if step in (1, 4):
            read_by_trackio(tmp_path)
    backend.close(has_failed=False)
    assert [*losses(read_by_trackio(tmp_path))] == [1, 2, 3, 4, 5, 6]
