"""The Python that environments are made of: found by itself, and one that truly starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Answers like a Python of a version, and starts nothing else.
PYTHON = "#!/bin/sh\necho {version}\n"
# What pyenv puts on the PATH for a version that is not chosen.
SHIM = "#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n"


def find_python(folder: Path, *versions: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Look for a Python in a folder that stands for a whole machine."""
    machine = {
        "PATH": f"{folder}/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "PYENV_ROOT": str(folder / "pyenv"),
        "UV_PYTHON_INSTALL_DIR": str(folder / "pythons"),
        "UV_PYTHON_DOWNLOADS": "never",
        "MOEJOB_CACHE": os.environ.get("MOEJOB_CACHE", str(Path.home() / ".cache/moejob")),
    }
    command: list[str | Path] = [ROOT / "scripts/find_python", *versions]
    return subprocess.run(
        command, env=machine | environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def put(program: Path, text: str) -> str:
    """Write a program."""
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(text)
    program.chmod(0o755)
    return str(program)


def python(folder: Path, place: str, version: str) -> str:
    """Put a Python there."""
    return put(folder / place, PYTHON.format(version=version))


def test_the_preferred_version_wins(tmp_path: Path) -> None:
    python(tmp_path, "bin/python3.12", "3.12")
    newer = python(tmp_path, "bin/python3.13", "3.13")
    assert find_python(tmp_path, "3.13", "3.12").stdout == f"{newer}\n"


def test_a_shim_that_starts_nothing_is_passed_over(tmp_path: Path) -> None:
    put(tmp_path / "bin/python3.13", SHIM)
    older = python(tmp_path, "bin/python3.12", "3.12")
    assert find_python(tmp_path, "3.13", "3.12").stdout == f"{older}\n"


def test_versions_of_pyenv_are_found_behind_their_shims(tmp_path: Path) -> None:
    put(tmp_path / "bin/python3.13", SHIM)
    python(tmp_path, "bin/python3", "3.11")
    installed = python(tmp_path, "pyenv/versions/3.13.0/bin/python3.13", "3.13")
    assert find_python(tmp_path, "3.13", "3.12").stdout == f"{installed}\n"


def test_a_named_python_wins_where_it_has_a_right_version(tmp_path: Path) -> None:
    python(tmp_path, "bin/python3.13", "3.13")
    older, oldest = python(tmp_path, "mine/python", "3.12"), python(tmp_path, "mine/old", "3.11")
    assert find_python(tmp_path, "3.13", "3.12", PYTHON=older).stdout == f"{older}\n"
    assert find_python(tmp_path, "3.13", "3.12", PYTHON=oldest).stdout == f"{tmp_path}/bin/python3.13\n"


def test_environments_of_one_checkout_share_the_python_of_the_trainer(tmp_path: Path) -> None:
    python(tmp_path, "bin/python3.13", "3.13")
    older = python(tmp_path, "other/python3.12", "3.12")
    built = tmp_path / ".venv/trainer/bin/python"
    built.parent.mkdir(parents=True)
    built.symlink_to(older)
    assert find_python(tmp_path, "3.13", "3.12").stdout == f"{older}\n"


def test_where_there_is_none_a_sentence_says_how_to_get_one(tmp_path: Path) -> None:
    python(tmp_path, "bin/python3", "3.11")
    # Versions that no machine has on its own path.
    searched = find_python(tmp_path, "3.6", "3.5")
    assert (searched.returncode, searched.stdout) == (1, "")
    assert "there is no Python 3.6 or 3.5 here" in searched.stderr
    assert "pyenv install 3.6" in searched.stderr
    assert "name one: PYTHON=/path/to/python3.6" in searched.stderr
