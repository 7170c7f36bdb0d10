"""The trainer's environment of who has no checkout: made on first use in the cache, of pins with hashes.

Its packages are those of `.venv/trainer`, installed by the same scripts, which the wheel has in `trainer_files`; the
trainer itself comes from the index as a wheel of this version, or from a folder. An environment whose stamp is missing
was never finished, and is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from moejob_cli.notices import print_notice
from moejob_cli.running.display import duration_words

FILES = Path(__file__).parent / "trainer_files"
SCRIPTS = FILES / "scripts"
PINS = FILES / "requirements" / "trainer.txt"
# Folder of what is fetched and installed once: uv, packages, the trainer. Default: `~/.cache/moejob`.
CACHE = "MOEJOB_CACHE"
# Megatron-Core needs 3.12; 3.13 comes first, as in a checkout.
PYTHONS = ("3.13", "3.12")
_LINE_SECONDS = 10.0
_LOG_LINES = 12
_STAMP = "complete"


class EnvironmentNotMade(Exception):
    """The trainer's environment cannot be made; the message says why, and what would help."""


@dataclass(frozen=True, slots=True)
class TrainerEnvironment:
    """A folder of the cache for the trainer of one version with its pins."""

    folder: Path
    version: str

    @property
    def python(self) -> Path:
        """The Python that runs the trainer."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def is_made(self) -> bool:
        """Return whether everything has been installed."""
        return (self.folder / _STAMP).exists() and self.python.exists()


def cached_environment(environ: Mapping[str, str]) -> TrainerEnvironment:
    """Return the environment of this moejob, made or not; its name has the version and a hash of the pins."""
    own_version = version("moejob")
    pins = hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]
    return TrainerEnvironment(_cache_folder(environ) / "trainers" / f"{own_version}-{pins}", own_version)


def _cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder that scripts/uv keeps its downloads in, too."""
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get(CACHE) or f"{base}/moejob").expanduser().absolute()


def make_environment(environment: TrainerEnvironment, wheels: Path | None, environ: Mapping[str, str]) -> None:
    """Install the trainer with what it needs, and show how far it is; a second process waits for the first."""
    with _hold_lock(environment.folder):
        if environment.is_made:
            return
        shutil.rmtree(environment.folder, ignore_errors=True)
        environment.folder.mkdir(parents=True)
        count = len(re.findall(r"^[\w.-]+==", PINS.read_text(encoding="utf-8"), re.MULTILINE))
        print_notice(f"installing the trainer with {count} packages, 5 GB, into {environment.folder}; once")
        installer = Installer(environment.folder / "install.log", _installer_variables(environ))
        for command in install_commands(environment, installer.find_python(), wheels):
            installer.run_uv(command)
        (environment.folder / _STAMP).touch()


def install_commands(
    environment: TrainerEnvironment, python: str, wheels: Path | None = None
) -> tuple[tuple[str, ...], ...]:
    """Return what uv does: an environment, the closure by its hashes, and the wheels of this version."""
    venv = str(environment.folder / "venv")
    own_packages = [f"{name}=={environment.version}" for name in ("moejob-api", "moejob-trainer")]
    source = ("--no-index", "--find-links", str(wheels.absolute())) if wheels else ()
    return (
        ("venv", "--python", python, venv),
        # What has no wheel is built by what the closure pins, not by the newest tools of the day.
        ("pip", "sync", "--python", venv, "--require-hashes", "--build-constraints", str(PINS), str(PINS)),
        ("pip", "install", "--python", venv, "--no-deps", *source, *own_packages),
    )


def _installer_variables(environ: Mapping[str, str]) -> dict[str, str]:
    # The Python of this process: `python3` of the PATH may be older. Every file is pinned by its hash, so whichever of
    # the user's indexes has it will do.
    return {"PYTHON": sys.executable, "UV_INDEX_STRATEGY": "unsafe-best-match"} | dict(environ)


@dataclass(frozen=True, slots=True)
class Installer:
    """Runs the scripts of the wheel: uv draws its bars on a terminal, elsewhere a line comes every ten seconds."""

    log: Path
    environ: Mapping[str, str]

    def find_python(self) -> str:
        """Return a Python for the trainer, which uv fetches where there is none."""
        ran = subprocess.run(
            [SCRIPTS / "find_python", *PYTHONS],
            cwd=self.log.parent, env=self.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if ran.returncode:
            raise EnvironmentNotMade(ran.stderr.strip())
        return ran.stdout.strip()

    def run_uv(self, arguments: Sequence[str]) -> None:
        """Run uv to its end."""
        is_terminal = sys.stderr.isatty()
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [SCRIPTS / "uv", *arguments],
                cwd=self.log.parent, env=self.environ, stdin=subprocess.DEVNULL,
                stdout=None if is_terminal else log, stderr=None if is_terminal else log,
            )  # fmt: skip
        try:
            self._wait_for(process, is_terminal)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if process.returncode:
            raise EnvironmentNotMade(_failure_words(arguments, self._last_lines(_LOG_LINES)))

    def _wait_for(self, process: subprocess.Popen[bytes], is_terminal: bool) -> None:
        seconds = 0.0
        while True:
            try:
                process.wait(_LINE_SECONDS)
            except subprocess.TimeoutExpired:
                seconds += _LINE_SECONDS
                if not is_terminal:
                    newest_line = " ".join(self._last_lines(1).split())
                    print_notice(f"installing the trainer for {duration_words(seconds)}: {newest_line}")
            else:
                return

    def _last_lines(self, count: int) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:])


def _failure_words(arguments: Sequence[str], output: str) -> str:
    fix = "run the command again when the network answers: what is there by then is not fetched twice"
    if any(argument.startswith("moejob-trainer==") for argument in arguments):
        fix = "--wheels FOLDER takes the wheels that `make wheels` builds in a checkout of this version"
    return f"the trainer cannot be installed; {fix}" + (f"\n{output}" if output else "")


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Hold the lock beside a folder, which may be removed meanwhile."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{folder}.lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise EnvironmentNotMade(
            f"{folder.parent} cannot be written: {error.strerror}; name another cache with {CACHE}"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
