"""Compiles every module below a folder, so that the same sources give the same bytes: python compile.py FOLDER

A root that is read-only cannot keep what Python compiles, and compiling torch at each start takes a minute. Compiled
files name a hash of their source, not its date, which images change. What Python writes depends on what its process
has seen before, so each file is compiled by a fork that has seen no other. What is compiled already is left as it is:
a layer on top of another repeats nothing.
"""

from __future__ import annotations

import contextlib
import os
import py_compile
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path


def main(folder: str) -> None:
    """Compile all, on all cores."""
    files = sorted(str(file) for file in Path(folder).rglob("*.py") if not Path(cache_from_source(file)).exists())
    # What compiling imports has to be there before the first fork.
    with tempfile.TemporaryDirectory() as scratch:
        _compile(__file__, f"{scratch}/warm.pyc")
    cores = len(os.sched_getaffinity(0))
    shares = [_forked(partial(_compile_each, files[core::cores])) for core in range(cores)]
    if sum(_ended(share) for share in shares):
        sys.exit(f"not every file below {folder} could be compiled")


def _compile_each(files: list[str]) -> int:
    return sum(_ended(_forked(partial(_compile, file))) for file in files)


def _compile(file: str, compiled: str | None = None) -> int:
    by_content = py_compile.PycInvalidationMode.UNCHECKED_HASH
    # Packages bring templates and old dialects that nothing imports.
    with contextlib.suppress(py_compile.PyCompileError):
        py_compile.compile(file, compiled, doraise=True, invalidation_mode=by_content)
    return 0


def _forked(work: Callable[[], int]) -> int:
    child = os.fork()
    if child:
        return child
    failures = 1
    try:
        failures = work()
    finally:
        # Whatever happened: nothing of the parent's continues in here.
        os._exit(min(failures, 1))


def _ended(child: int) -> int:
    """0 where it went well, 1 otherwise."""
    return int(os.waitpid(child, 0)[1] != 0)


if __name__ == "__main__":
    main(sys.argv[1])
