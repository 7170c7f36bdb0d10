"""The trainer's environment of who has no checkout: the real scripts, beside a stand-in of uv."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from image_builds.recipes import ROOT
from moejob_cli.running.machine import CannotRun, is_trainer_missing, trainer_python
from moejob_cli.running.trainer_environment import (
    PINS,
    EnvironmentNotMade,
    cached_environment,
    install_commands,
    make_environment,
)

WORKS = 'if [ "$1" = venv ]; then mkdir -p "$4/bin"; ln -s /bin/true "$4/bin/python"; fi'
FAILS = "echo the index does not answer >&2; exit 3"
# The Python of these tests, which may be 3.11: no Python is looked for, or fetched.
ANY_PYTHON = '#!/bin/sh\ncase "$*" in *version_info*) echo 3.13;; esac\n'


@dataclass(frozen=True)
class Cache:
    """An empty cache but for a stand-in of uv, which writes down what it is asked for."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        variables = {"MOEJOB_CACHE": str(self.folder), "PYTHON": str(self.folder / "python3.13")}
        return dict(os.environ) | variables

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def stand_in(self, script: str) -> None:
        [version] = re.findall(r"^uv==(\S+)", (ROOT / "requirements" / "uv.txt").read_text(), re.MULTILINE)
        program = self.folder / f"uv-{version}" / "bin" / "uv"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "$@" >> {self.folder}/calls\n{script}\n')
        program.chmod(0o755)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    made = Cache(tmp_path / "cache")
    made.stand_in(WORKS)
    (made.folder / "python3.13").write_text(ANY_PYTHON)
    (made.folder / "python3.13").chmod(0o755)
    return made


def test_the_trainer_gets_its_closure_by_hashes_and_then_the_wheels_of_this_version(cache: Cache) -> None:
    environment = cached_environment(cache.environ)
    make_environment(environment, None, cache.environ)
    version = (ROOT / "VERSION").read_text().strip()
    venv = environment.folder / "venv"
    assert cache.calls == [
        f"venv --python {cache.folder}/python3.13 {venv}",
        f"pip sync --python {venv} --require-hashes --build-constraints {PINS} {PINS}",
        f"pip install --python {venv} --no-deps moejob-api=={version} moejob-trainer=={version}",
    ]
    assert PINS.read_bytes() == (ROOT / "requirements" / "trainer.txt").read_bytes()


def test_wheels_of_a_folder_take_the_place_of_the_index(cache: Cache, tmp_path: Path) -> None:
    own_packages = install_commands(cached_environment(cache.environ), "python", tmp_path / "dist")[-1]
    assert own_packages[5:8] == ("--no-index", "--find-links", str(tmp_path / "dist"))


def test_what_has_been_made_is_the_trainer_of_every_command_and_made_once(cache: Cache, tmp_path: Path) -> None:
    environment = cached_environment(cache.environ)
    assert is_trainer_missing(cache.environ, tmp_path)
    with pytest.raises(CannotRun, match="`moejob demo` installs it"):
        trainer_python(cache.environ, tmp_path)
    for _ in range(2):
        make_environment(environment, None, cache.environ)
    assert len(cache.calls) == 3
    assert trainer_python(cache.environ, tmp_path) == environment.python
    assert not is_trainer_missing(cache.environ, tmp_path)


def test_a_failed_installation_says_why_and_is_made_again(cache: Cache, tmp_path: Path) -> None:
    environment = cached_environment(cache.environ)
    cache.stand_in(f'case "$2" in sync) {FAILS};; esac\n{WORKS}')
    with pytest.raises(EnvironmentNotMade, match=r"(?s)when the network answers.*\nthe index does not answer"):
        make_environment(environment, None, cache.environ)
    assert environment.python.is_symlink()
    assert is_trainer_missing(cache.environ, tmp_path)
    cache.stand_in(WORKS)
    make_environment(environment, None, cache.environ)
    assert not is_trainer_missing(cache.environ, tmp_path)


def test_a_version_that_no_index_has_leads_to_the_wheels_of_a_checkout(cache: Cache) -> None:
    cache.stand_in(f'case "$2" in install) {FAILS};; esac\n{WORKS}')
    with pytest.raises(EnvironmentNotMade, match="--wheels FOLDER takes the wheels"):
        make_environment(cached_environment(cache.environ), None, cache.environ)


def test_a_cache_that_cannot_be_written_is_named(cache: Cache) -> None:
    (cache.folder / "trainers").write_text("no folder")
    with pytest.raises(EnvironmentNotMade, match="name another cache with MOEJOB_CACHE"):
        make_environment(cached_environment(cache.environ), None, cache.environ)


def test_two_processes_make_one_environment(cache: Cache) -> None:
    cache.stand_in(f"sleep 0.3\n{WORKS}")
    script = (
        "import os\n"
        "from moejob_cli.running.trainer_environment import cached_environment, make_environment\n"
        "make_environment(cached_environment(os.environ), None, os.environ)\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", script], env=cache.environ) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(cache.calls) == 3
