"""Runs whose disk answers with input/output errors: tried again, and no checkpoint is lost for an error that passes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.runs import Runs, read_steps

# Reading files whose path has this part fails, as on a disk with a bad block.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
ssize_t read(int file, void *into, size_t size) {
    static ssize_t (*real)(int, void *, size_t);
    char name[64], path[4096];
    const char *part = getenv("FAILING_FILES");
    if (!real) real = dlsym(RTLD_NEXT, "read");
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = part ? readlink(name, path, sizeof path - 1) : -1;
    if (length > 0) {
        path[length] = 0;
        if (strstr(path, part)) { errno = EIO; return -1; }
    }
    return real(file, into, size);
}
"""


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "shim.c").write_text(SHIM)
    built = tmp_path / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, tmp_path / "shim.c", "-ldl"], check=True)
    return built


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    (tmp_path / "volume").mkdir()
    made = Runs(tmp_path / "volume")
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("lasts", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["passes", "lasts"])
def test_a_run_outlives_an_error_of_its_disk(
    runs: Runs, shim: Path, monkeypatch: pytest.MonkeyPatch, *, lasts: bool
) -> None:
    longer: dict[str, Any] = {"training": {"maxSteps": 5}}
    run = runs.run_to_end()
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    monkeypatch.setenv("FAILING_FILES", "/step-3.1.0/state-")
    # Libraries are loaded when a program starts, and not when one forks.
    runs.method = "spawn"
    failed = runs.start(attempt=2, **longer)
    assert failed.await_exit_codes() == [1], failed.read_log()
    assert "step-3.1.0: state-00000.safetensors cannot be read: Input/output error" in failed.read_log()
    assert [*run.folder.glob("checkpoints/*/rejected.json")] == []
    if not lasts:
        monkeypatch.delenv("FAILING_FILES")
    runs.run_to_end(attempt=3, **longer)
    again = [step.step for step in read_steps(run.folder) if step.attempt == 3]
    assert again == ([3, 4, 5] if lasts else [4, 5])
    monkeypatch.delenv("LD_PRELOAD")
    runs.method = "forkserver"
    expected = [step.loss for step in read_steps(runs.run_to_end("calm", **longer).folder)]
    assert [step.loss for step in read_steps(run.folder) if step.step > 3] == expected[3:]
    assert [*run.folder.glob("checkpoints/*/rejected.json")] == []
