"""The machine that a run uses: the trainer's Python, GPUs, cores and variables; errors say how to get a missing one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moejob_api.contract.pods import Environment
from moejob_api.derived import rollout_layout
from moejob_api.job import Spec
from moejob_api.job.resources import Accelerator, EnvVar
from moejob_api.layout.sizes import Layout
from moejob_api.planner.memory import VolumeNeed
from moejob_api.quantities import readable_bytes
from moejob_cli.local_files import claim_sources, unreadable_sources
from moejob_cli.running.trainer_environment import cached_environment

# Python that the trainer is installed in, for `moejob run`, `data` and `export`; else .venv/trainer of the checkout, or
# what `moejob demo` has installed.
TRAINER_PYTHON = "MOEJOB_TRAINER_PYTHON"
# Addresses 127.0.0.1 and on.
MOST_NODES = 254
# Where an editable installation finds its checkout.
_CHECKOUT = Path(__file__).parents[4]
_DEVICE = re.compile(r"nvidia\d+")
_CHECK_TRAINER = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('moejob_trainer.launcher') else 3)"


class CannotRun(Exception):
    """The job cannot run on this machine as it is; the message says what would help."""


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """The resources that launchers are started with. `gpus` are names as CUDA_VISIBLE_DEVICES wants them."""

    python: Path
    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    environment: Mapping[str, str]
    # For engines; a job without them needs none.
    rollout_python: Path = Path("/opt/rollout/bin/python")


def find_local_machine(environ: Mapping[str, str] = os.environ, checkout: Path = _CHECKOUT) -> LocalMachine:
    """Return this machine; CannotRun where no trainer can be started."""
    python = installed_trainer(environ, checkout)
    devices = tuple(path.name for path in Path("/dev").iterdir() if _DEVICE.fullmatch(path.name))
    rollout = Path(environ.get(Environment.ROLLOUT_PYTHON) or checkout / ".venv/rollout/bin/python").absolute()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return LocalMachine(python, visible_gpus(devices, environ), cores, dict(environ), rollout)


def installed_trainer(environ: Mapping[str, str] = os.environ, checkout: Path = _CHECKOUT) -> Path:
    """Return the Python of the trainer's environment, after a check that the trainer is installed there."""
    python = trainer_python(environ, checkout)
    _require_trainer(python)
    return python


def trainer_python(environ: Mapping[str, str], checkout: Path) -> Path:
    """Return the Python that the trainer is installed in: the configured one, else the project's, else the cache's."""
    configured_python = environ.get(TRAINER_PYTHON)
    # The path is not resolved: Python finds its virtual environment by the link that started it.
    python = Path(configured_python) if configured_python else checkout / ".venv/trainer/bin/python"
    if python.is_file() and os.access(python, os.X_OK):
        return python.absolute()
    if configured_python:
        raise CannotRun(
            f"{TRAINER_PYTHON} is {configured_python}, which is no program; set {TRAINER_PYTHON} to the Python of the "
            "trainer"
        )
    environment = cached_environment(environ)
    if environment.is_made:
        return environment.python
    raise CannotRun(
        "there is no trainer here: `moejob demo` installs it; in a checkout of moejob run `make setup`; or set "
        f"{TRAINER_PYTHON} to the Python of an environment with moejob-trainer"
    )


def is_trainer_missing(environ: Mapping[str, str] = os.environ, checkout: Path = _CHECKOUT) -> bool:
    """Return whether no Python is configured for the trainer, and neither checkout nor cache has one."""
    if environ.get(TRAINER_PYTHON):
        return False
    try:
        trainer_python(environ, checkout)
    except CannotRun:
        return True
    return False


def visible_gpus(devices: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that a run may use: all of the driver's, or those in CUDA_VISIBLE_DEVICES."""
    limited = environ.get("CUDA_VISIBLE_DEVICES")
    if not devices or limited is None:
        return tuple(str(number) for number in range(len(devices)))
    # CUDA ignores every name behind a -1.
    return tuple(name.strip() for name in limited.partition("-1")[0].split(",") if name.strip())


def require_capacity(spec: Spec, layout: Layout, machine: LocalMachine) -> None:
    """Raise CannotRun when the job needs what this machine, or `moejob run`, does not have."""
    engines = rollout_layout(spec, layout)
    if engines is not None and not os.access(machine.rollout_python, os.X_OK):
        raise CannotRun(
            f"spec.method {spec.method} needs rollout engines, and {machine.rollout_python} is no program; run "
            f"`make setup` in the checkout of moejob, or set {Environment.ROLLOUT_PYTHON} to the Python of an "
            "environment with moejob-rollout"
        )
    if layout.nodes > MOST_NODES:
        raise CannotRun(f"the job has {layout.nodes} nodes, and moejob run simulates {MOST_NODES} at most")
    if spec.lifecycle.suspend:
        raise CannotRun("spec.lifecycle.suspend is true, so nothing runs; set it to false")
    gpus = layout.gpus + (0 if engines is None else engines.gpus)
    if spec.resources.accelerator is Accelerator.GPU and gpus > len(machine.gpus):
        gpu_words = (
            f"{len(machine.gpus)} GPUs can be seen here" if machine.gpus else "this machine has no GPU that can be seen"
        )
        needed = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        raise CannotRun(
            f"the job needs {needed} and {gpu_words}; `moejob plan --auto --gpus N` finds a layout for those there "
            "are, and spec.resources.accelerator: CPU runs a small model on the CPU"
        )
    missing = [variable.name for variable in spec.resources.env if _is_elsewhere(variable, machine.environment)]
    if missing:
        raise CannotRun(
            f"spec.resources.env takes {', '.join(missing)} from the cluster's Secrets and ConfigMaps; set them in "
            "this shell instead"
        )


def require_sources(spec: Spec) -> None:
    """Raise CannotRun for files and folders of the job that are not here, or cannot be read."""
    problems = [*claim_sources(spec), *unreadable_sources(spec)]
    if problems:
        raise CannotRun("; ".join(problems))


def require_room(need: VolumeNeed, folder: Path) -> None:
    """Raise CannotRun when not even one checkpoint and the export have room beside what is in the run folder."""
    free_bytes, needed_bytes = shutil.disk_usage(folder).free, need.checkpoint + need.export
    if needed_bytes <= free_bytes:
        return
    export = f" and the export {readable_bytes(need.export)}" if need.export else ""
    raise CannotRun(
        f"a checkpoint takes {readable_bytes(need.checkpoint)}{export}, and {folder} has {readable_bytes(free_bytes)} "
        f"left; free {readable_bytes(needed_bytes - free_bytes)}, or name a folder on another disk with --run-dir"
    )


def job_variables(spec: Spec) -> dict[str, str]:
    """Return the variables with a value in the job; the others come from this shell."""
    return {variable.name: variable.value for variable in spec.resources.env if variable.value is not None}


def _is_elsewhere(variable: EnvVar, environ: Mapping[str, str]) -> bool:
    source = variable.secret or variable.config_map
    return source is not None and not source.optional and variable.name not in environ


def _require_trainer(python: Path) -> None:
    try:
        process = subprocess.run(
            [python, "-c", _CHECK_TRAINER], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRun(f"{python} cannot be started: {error}; set {TRAINER_PYTHON} to a Python") from None
    if process.returncode:
        raise CannotRun(
            f"{python} has no moejob_trainer; set {TRAINER_PYTHON} to the Python of an environment that has, or run "
            "`make setup` in the checkout of moejob"
        )
