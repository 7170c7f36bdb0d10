"""Compiles every module below a folder, so that the same sources give the same bytes: python compile.py FOLDER

A root that is read-only cannot keep what Python compiles, and compiling torch at each start takes a minute. Compiled
files name a hash of their source, not its date, which images change. What Python writes also depends on what the process
has seen before, so each file is compiled by a fork that has seen no other.
"""

from __future__ import annotations

import os
import py_compile
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path


def main(folder: str) -> None:
    """Compile all, on all cores."""
    files = sorted(str(file) for file in Path(folder).rglob("*.py"))
    # What compiling imports has to be there before the first fork.
    with tempfile.TemporaryDirectory() as scratch:
        _compile(__file__, f"{scratch}/warm.pyc")
    cores = len(os.sched_getaffinity(0))
    shares = [_forked(partial(_compile_each, files[core::cores])) for core in range(cores)]
    if any([_failed(share) for share in shares]):
        sys.exit(f"not every file below {folder} could be compiled")


def _compile_each(files: list[str]) -> None:
    if any([_failed(_forked(partial(_compile, file))) for file in files]):
        os._exit(1)


def _compile(file: str, compiled: str | None = None) -> None:
    try:
        py_compile.compile(file, compiled, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    except py_compile.PyCompileError:
        # Packages bring templates and old dialects that nothing imports.
        pass


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def _failed(child: int) -> bool:
    return os.waitpid(child, 0)[1] != 0


if __name__ == "__main__":
    main(sys.argv[1])
