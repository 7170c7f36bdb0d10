"""The demo: the tiny example, trained from nothing, and a question to its model.

Job, question and pins are files of the package, model and data come with the trainer, so a demo needs no checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from moejob_api.contract.pods import RunFile
from moejob_cli.running.folder import hold_run_folder
from moejob_cli.running.machine import CannotRun, installed_trainer, is_trainer_missing
from moejob_cli.running.trainer_environment import FILES, EnvironmentNotMade, cached_environment, make_environment

JOB = FILES / "tiny-sft.yaml"
QUESTION = "count from 2 to 5"
_JOB_NAME = "tiny-sft"


def prepare_trainer(wheels: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the trainer's Python; where there is no trainer, install it first. CannotRun where that fails."""
    if is_trainer_missing(environ):
        try:
            make_environment(cached_environment(environ), wheels, environ)
        except EnvironmentNotMade as failure:
            raise CannotRun(str(failure)) from None
    return installed_trainer(environ)


def clear_run_folder(folder: Path) -> None:
    """Remove an earlier demo, from which this one would resume. CannotRun for a folder of something else, or in use."""
    with hold_run_folder(folder, _JOB_NAME):
        shutil.rmtree(folder)


def ask_model(python: Path, folder: Path) -> str:
    """Return the question and the model's answer; CannotRun where the export cannot be asked."""
    ran = subprocess.run(
        [python, FILES / "ask", folder / RunFile.EXPORT, QUESTION], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise CannotRun(f"the model cannot be asked: {ran.stderr.strip()}")
    return ran.stdout
