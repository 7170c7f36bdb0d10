"""`moejob import`, `export` and `push`: starts the trainer's Python, which knows the formats and the hub.

One of its modules makes a Hugging Face folder of a run's checkpoint, another a Megatron checkpoint of that folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moejob_api.contract.pods import ExitCode, RunFile
from moejob_cli.running.machine import CannotRun, installed_trainer

CONFIG = "config.json"
ADAPTERS = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Conversion:
    """The end of a conversion: its exit code, and what it printed."""

    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class CheckpointChoice:
    """The choice of a checkpoint and of its form; by default the newest one, as the job trains it."""

    step: str | None = None
    merge_adapters: bool = False
    dtype: str | None = None
    base: Path | None = None

    @property
    def arguments(self) -> list[str | Path]:
        """The choices as the trainer's module takes them."""
        options: tuple[tuple[str, str | Path | None], ...] = (
            ("--step", self.step),
            ("--dtype", self.dtype),
            ("--base", self.base),
        )
        named_arguments = [part for option, value in options if value is not None for part in (option, value)]
        return [*named_arguments, *(["--merge-adapters"] if self.merge_adapters else [])]


def run_conversion(arguments: Sequence[str | Path], environ: Mapping[str, str] = os.environ) -> Conversion:
    """Run a conversion from or to Megatron's checkpoints."""
    return _run_module("moejob_trainer.interchange", arguments, environ)


def export_checkpoint(
    run: Path, out: Path, wanted: CheckpointChoice, environ: Mapping[str, str] = os.environ
) -> Conversion:
    """Export a checkpoint of a run as a Hugging Face folder, in the trainer's environment."""
    if (run / CONFIG).is_file():
        message = f"{run} is a Hugging Face folder already; name the folder of a run, or add --to megatron"
        return Conversion(ExitCode.BAD_CONFIGURATION, message)
    return _run_module("moejob_trainer.checkpoint_export", [run, "--out", out, *wanted.arguments], environ)


def export_to_megatron(
    run: Path, out: Path, wanted: CheckpointChoice, environ: Mapping[str, str] = os.environ
) -> Conversion:
    """Export a run, or a Hugging Face folder, as a checkpoint of Megatron's."""
    folder = next((place for place in (run, run / RunFile.EXPORT) if (place / CONFIG).is_file()), None)
    if folder is not None and wanted == CheckpointChoice():
        return run_conversion(["export", folder, "--out", out], environ)
    model_folder = out.with_name(f".{out.name}.model")
    try:
        exported = export_checkpoint(run, model_folder, wanted, environ)
        if exported.exit_code:
            return exported
        if not (model_folder / CONFIG).is_file():
            message = f"{run} holds adapters, and Megatron's checkpoints hold models; add --merge-adapters"
            return Conversion(ExitCode.BAD_CONFIGURATION, message)
        return run_conversion(["export", model_folder, "--out", out], environ)
    finally:
        shutil.rmtree(model_folder, ignore_errors=True)


def push_model(
    place: Path, repository: str, arguments: Sequence[str | Path], environ: Mapping[str, str] = os.environ
) -> Conversion:
    """Upload an export, or that of a run, to a hub; models and adapters alike."""
    folders = (place, place / RunFile.EXPORT)
    folder = next((each for each in folders if (each / CONFIG).is_file() or (each / ADAPTERS).is_file()), None)
    if folder is None:
        message = f"{place} holds no exported model; write one: `moejob export {place} --out FOLDER`"
        return Conversion(ExitCode.BAD_CONFIGURATION, message)
    module = "moejob_trainer.checkpoint_export.hub_upload"
    return _run_module(module, [folder, "--to", repository, *arguments], environ)


def _run_module(module: str, arguments: Sequence[str | Path], environ: Mapping[str, str]) -> Conversion:
    """Run a module of the trainer in its environment."""
    try:
        python = installed_trainer(environ)
    except CannotRun as refused:
        return Conversion(ExitCode.BAD_CONFIGURATION, str(refused))
    # The module's own standard error is quoted when it fails; how much is done goes past it to the user.
    shown = os.dup(2)
    command = [python, "-W", "ignore", "-m", module, *arguments, "--shares-to", str(shown)]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, env=dict(environ), pass_fds=(shown,)
        )
    finally:
        os.close(shown)
    return Conversion(process.returncode, (process.stderr if process.returncode else process.stdout).strip())
