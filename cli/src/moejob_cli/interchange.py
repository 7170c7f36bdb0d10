"""`moejob import` and `moejob export`: starts the Python of the environment that knows the formats.

The trainer's environment makes a Hugging Face folder of a run's checkpoint. The environment of Megatron-Bridge makes a
Megatron checkpoint of that folder.
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

# Python that Megatron-Bridge is installed in, for `moejob import` and `export`; else .venv/bridge of the checkout.
MEGATRON_PYTHON = "MOEJOB_MEGATRON_PYTHON"
CONFIG = "config.json"
# Where an editable installation finds its checkout.
_CHECKOUT = Path(__file__).parents[3]
_CHECK_BRIDGE = (
    "import importlib.util as u, sys; "
    "sys.exit(0 if all(map(u.find_spec, ('moejob_trainer.interchange', 'megatron.bridge'))) else 3)"
)


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
    """Run a conversion in the environment of Megatron-Bridge."""
    try:
        python = megatron_python(environ)
    except CannotRun as refused:
        return Conversion(ExitCode.BAD_CONFIGURATION, str(refused))
    return _run_program([python, "-W", "ignore", "-m", "moejob_trainer.interchange", *arguments], environ)


def export_checkpoint(
    run: Path, out: Path, wanted: CheckpointChoice, environ: Mapping[str, str] = os.environ
) -> Conversion:
    """Export a checkpoint of a run as a Hugging Face folder, in the trainer's environment."""
    if (run / CONFIG).is_file():
        message = f"{run} is a Hugging Face folder already; name the folder of a run, or add --to megatron"
        return Conversion(ExitCode.BAD_CONFIGURATION, message)
    try:
        python = installed_trainer(environ)
    except CannotRun as refused:
        return Conversion(ExitCode.BAD_CONFIGURATION, str(refused))
    module = "moejob_trainer.checkpoint_export"
    return _run_program([python, "-W", "ignore", "-m", module, run, "--out", out, *wanted.arguments], environ)


def export_to_megatron(
    run: Path, out: Path, wanted: CheckpointChoice, environ: Mapping[str, str] = os.environ
) -> Conversion:
    """Export a run, or a Hugging Face folder, as a checkpoint of Megatron's."""
    folder = next((place for place in (run, run / RunFile.EXPORT) if (place / CONFIG).is_file()), None)
    if folder is not None and wanted == CheckpointChoice():
        return run_conversion(["export", folder, "--out", out], environ)
    try:
        # Fail now, and not after minutes of reading and writing.
        megatron_python(environ)
    except CannotRun as refused:
        return Conversion(ExitCode.BAD_CONFIGURATION, str(refused))
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


def _run_program(command: Sequence[str | Path], environ: Mapping[str, str]) -> Conversion:
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(environ))
    return Conversion(process.returncode, (process.stderr if process.returncode else process.stdout).strip())


def megatron_python(environ: Mapping[str, str], checkout: Path = _CHECKOUT) -> Path:
    """Return the Python that has Megatron-Bridge: the one that was named, else the project's own."""
    configured_python = environ.get(MEGATRON_PYTHON)
    # The path is not resolved: Python finds its virtual environment by the link that started it.
    python = Path(configured_python) if configured_python else checkout / ".venv/bridge/bin/python"
    fix = (
        f"run `make setup-megatron` in the checkout of moejob, or set {MEGATRON_PYTHON} to the Python of an "
        "environment with moejob-trainer[megatron]"
    )
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise CannotRun(f"Megatron-Bridge is not here: {python} is no program; {fix}")
    process = subprocess.run([python, "-c", _CHECK_BRIDGE], capture_output=True, text=True, check=False)
    if process.returncode:
        raise CannotRun(f"{python} has no Megatron-Bridge; {fix}")
    return python.absolute()
