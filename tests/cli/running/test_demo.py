"""The folder of the demo, and what it refuses; tests/builds/test_wheels.py runs the whole of it from wheels."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from image_builds.recipes import ROOT
from moejob_cli.app import app
from moejob_cli.running.demo import JOB, ask_model, clear_run_folder
from moejob_cli.running.folder import hold_run_folder
from moejob_cli.running.machine import CannotRun


def test_the_job_is_the_tiny_example() -> None:
    assert JOB.read_bytes() == (ROOT / "examples" / "tiny-sft.yaml").read_bytes()


def test_an_earlier_demo_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with hold_run_folder(folder, "tiny-sft"):
        (folder / "steps.jsonl").write_text("{}")
    clear_run_folder(folder)
    assert not folder.exists()


def test_a_run_of_another_job_stays(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with hold_run_folder(folder, "months-of-work"):
        (folder / "steps.jsonl").write_text("{}")
    with pytest.raises(CannotRun, match="is the run folder of job months-of-work"):
        clear_run_folder(folder)
    assert (folder / "steps.jsonl").exists()


def test_a_folder_of_something_else_stays(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("Dear")
    with pytest.raises(CannotRun, match="holds something that is no run"):
        clear_run_folder(tmp_path)
    assert (tmp_path / "letters.txt").exists()


def test_a_demo_that_runs_keeps_its_folder(tmp_path: Path) -> None:
    with (
        hold_run_folder(tmp_path / "demo", "tiny-sft"),
        pytest.raises(CannotRun, match="is in use by another moejob run"),
    ):
        clear_run_folder(tmp_path / "demo")


def test_a_trainer_that_is_not_there_is_named_in_a_sentence() -> None:
    answer = CliRunner().invoke(app, ["demo"], env={"MOEJOB_TRAINER_PYTHON": "/nowhere/python"})
    assert answer.exit_code == 78
    assert "/nowhere/python, which is no program" in answer.output


def test_a_question_without_an_answer_says_why(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="the model cannot be asked: "):
        ask_model(Path("/bin/false"), tmp_path)
