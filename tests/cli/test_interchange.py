"""`moejob import` and `moejob export` say what is missing before they start anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moejob_api.contract.pods import ExitCode
from moejob_cli.app import app
from moejob_cli.interchange import CheckpointChoice, export_checkpoint


def run(*arguments: str, python: Path) -> tuple[int, str]:
    """The exit code of `moejob`, and what it prints, with one Python named as the trainer's."""
    result = CliRunner().invoke(app, arguments, env={"MOEJOB_TRAINER_PYTHON": str(python)})
    return result.exit_code, result.output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return tmp_path / "model"


def test_a_missing_environment_is_named_with_its_fix(model: Path, tmp_path: Path) -> None:
    arguments = ("export", str(model), "--to", "megatron", "--out", str(tmp_path / "out"))
    code, printed = run(*arguments, python=tmp_path / "none")
    assert code == ExitCode.BAD_CONFIGURATION
    assert "set MOEJOB_TRAINER_PYTHON to the Python of the trainer" in " ".join(printed.split())


def test_a_python_without_the_trainer_is_named(model: Path, tmp_path: Path) -> None:
    arguments = ("import", str(model), "--config", str(model), "--out", str(tmp_path / "out"))
    code, printed = run(*arguments, python=Path(sys.executable))
    assert code == ExitCode.BAD_CONFIGURATION
    assert "has no moejob_trainer" in " ".join(printed.split())


def test_a_model_is_not_exported_as_what_it_is(model: Path, tmp_path: Path) -> None:
    code, printed = run("export", str(model), "--out", str(tmp_path / "out"), python=tmp_path / "none")
    assert code == ExitCode.BAD_CONFIGURATION
    assert "is a Hugging Face folder already" in printed


def test_weights_to_merge_with_are_for_merging_only(tmp_path: Path) -> None:
    arguments = ("export", str(tmp_path), "--out", str(tmp_path / "out"), "--base", str(tmp_path))
    code, printed = run(*arguments, python=tmp_path / "none")
    assert code == 2
    assert "--merge-adapters" in printed


def test_a_checkpoint_is_named_by_its_step_or_as_the_best(tmp_path: Path) -> None:
    arguments = ("export", str(tmp_path), "--out", str(tmp_path / "out"), "--step")
    code, printed = run(*arguments, "newest", python=tmp_path / "none")
    assert code == 2
    assert "give a number, or best" in printed
    for step in ("best", "7"):
        assert run(*arguments, step, python=tmp_path / "none")[0] == ExitCode.BAD_CONFIGURATION


def test_a_checkpoint_of_a_run_goes_to_megatron_only_where_the_trainer_is_installed(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    arguments = ("export", str(tmp_path / "run"), "--to", "megatron", "--out", str(tmp_path / "out"))
    code, printed = run(*arguments, python=tmp_path / "none")
    assert code == ExitCode.BAD_CONFIGURATION
    assert "which is no program" in printed
    assert not (tmp_path / "out").exists()


# Stands in for the trainer's Python: it has a trainer, whose work fails when 43 % are done.
_FAILING = """#!{python}
import os, sys
if "--shares-to" in sys.argv:
    os.write(int(sys.argv[sys.argv.index("--shares-to") + 1]), b"exporting: 43 %\\n")
    sys.exit("the volume is full")
"""


def test_how_much_is_done_reaches_the_user_and_not_the_message_of_a_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "python"
    program.write_text(_FAILING.format(python=sys.executable))
    program.chmod(0o755)
    environ = {"MOEJOB_TRAINER_PYTHON": str(program)}
    conversion = export_checkpoint(tmp_path / "run", tmp_path / "out", CheckpointChoice(), environ)
    assert (conversion.exit_code, conversion.message) == (1, "the volume is full")
    assert capfd.readouterr().err == "exporting: 43 %\n"
