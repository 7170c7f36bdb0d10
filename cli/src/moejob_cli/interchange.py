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
_HAS_BRIDGE = (
    "import importlib.util as u, sys; "
    "sys.exit(0 if all(map(u.find_spec, ('moejob_trainer.interchange', 'megatron.bridge'))) else 3)"
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """The end of a conversion: its exit code, and what it printed."""

    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """The choice of a checkpoint and of its form; by default the newest one, as the job trains it."""

    step: str | None = None
    merge_adapters: bool = False
    dtype: str | None = None
    base: Path | None = None

    @property
    def arguments(self) -> list[str | Path]:
        """The choices as the trainer's module takes them."""
        given: tuple[tuple[str, str | Path | None], ...] = (
            ("--step", self.step),
            ("--dtype", self.dtype),
            ("--base", self.base),
        )
        named = [part for option, value in given if value is not None for part in (option, value)]
        return [*named, *(["--merge-adapters"] if self.merge_adapters else [])]


def converted(arguments: Sequence[str | Path], environ: Mapping[str, str] = os.environ) -> Conversion:
    """Run a conversion in the environment of Megatron-Bridge."""
    try:
        python = megatron_python(environ)
    except CannotRun as refused:
        return Conversion(ExitCode.BAD_CONFIGURATION, str(refused))
    return _ran([python, "-W", "ignore", "-m", "moejob_trainer.interchange", *arguments], environ)


def exported(run: Path, out: Path, wanted: FromCheckpoint, environ: Mapping[str, str] = os.environ) -> Conversion:
    """Export a checkpoint of a run as a Hugging Face folder, in the trainer's environment."""
    if (run / CONFIG).is_file():
        what = f"{run} is a Hugging Face folder already; name the folder of a run, or add --to megatron"
        return Conversion(ExitCode.BAD_CONFIGURATION, what)
    try:
        python = installed_trainer(environ)
    except CannotRun as refused:
        return Conversion(ExitCode.BAD_CONFIGURATION, str(refused))
    module = "moejob_trainer.checkpoint_export"
    return _ran([python, "-W", "ignore", "-m", module, run, "--out", out, *wanted.arguments], environ)


def exported_to_megatron(
    run: Path, out: Path, wanted: FromCheckpoint, environ: Mapping[str, str] = os.environ
) -> Conversion:
    """Export a run, or a Hugging Face folder, as a checkpoint of Megatron's."""
    folder = next((place for place in (run, run / RunFile.EXPORT) if (place / CONFIG).is_file()), None)
    if folder is not None and wanted == FromCheckpoint():
        return converted(["export", folder, "--out", out], environ)
    try:
        # Fail now, and not after minutes of reading and writing.
        megatron_python(environ)
    except CannotRun as refused:
        return Conversion(ExitCode.BAD_CONFIGURATION, str(refused))
    between = out.with_name(f".{out.name}.model")
    try:
        first = exported(run, between, wanted, environ)
        if first.exit_code:
            return first
        if not (between / CONFIG).is_file():
            what = f"{run} holds adapters, and Megatron's checkpoints hold models; add --merge-adapters"
            return Conversion(ExitCode.BAD_CONFIGURATION, what)
        return converted(["export", between, "--out", out], environ)
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _ran(command: Sequence[str | Path], environ: Mapping[str, str]) -> Conversion:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(environ))
    return Conversion(done.returncode, (done.stderr if done.returncode else done.stdout).strip())


def megatron_python(environ: Mapping[str, str], checkout: Path = _CHECKOUT) -> Path:
    """Return the Python that has Megatron-Bridge: the one that was named, else the project's own."""
    named = environ.get(MEGATRON_PYTHON)
    # The path is not resolved: Python finds its virtual environment by the link that started it.
    found = Path(named) if named else checkout / ".venv/bridge/bin/python"
    fix = (
        f"run `make setup-megatron` in the checkout of moejob, or set {MEGATRON_PYTHON} to the Python of an "
        "environment with moejob-trainer[megatron]"
    )
    if not (found.is_file() and os.access(found, os.X_OK)):
        raise CannotRun(f"Megatron-Bridge is not here: {found} is no program; {fix}")
    answer = subprocess.run([found, "-c", _HAS_BRIDGE], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise CannotRun(f"{found} has no Megatron-Bridge; {fix}")
    return found.absolute()
