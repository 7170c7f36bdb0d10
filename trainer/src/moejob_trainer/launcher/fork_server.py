"""Preload of the fork server: it imports the modules that ranks need, so that a rank starts in milliseconds.

It is imported there only. Knows which modules by MOEJOB_PRELOAD, which the launcher sets before the server starts.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moejob_trainer.launcher.stacks import inherit_handler

# Modules to import before the first rank is forked, comma separated.
PRELOAD = "MOEJOB_PRELOAD"
# The file that names the process that has imported all.
WARM = "MOEJOB_WARM"
# Process id of the launcher.
LAUNCHER = "MOEJOB_LAUNCHER"

# Asks CUDA for the GPU as it is imported. Megatron's inference, which no rank uses, imports it where it is installed.
_USES_CUDA = "flashinfer"
_PR_SET_PDEATHSIG = 1
# The fork server, as a rank finds it in the memory that it inherits.
SERVER = os.getpid()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have ended before the call.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def import_all(names: list[str]) -> None:
    """Import all modules. A failure is left to the rank that needs the module, which reports it in its log."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  # whatever a module does as it loads, the ranks can still be started
            # What is not installed is nothing to talk about.
            if not _is_absent(name):
                traceback.print_exc()


def _is_absent(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


@contextmanager
def unused_cuda() -> Iterator[None]:
    """Let modules ask torch whether there is a GPU as they load: asked by CUDA, no forked process could use a GPU.

    NVML answers where there is a driver. Elsewhere torch would ask CUDA after all, unless no GPU is visible. A module
    that asks CUDA itself is absent.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    hides_gpus = "CUDA_VISIBLE_DEVICES" not in os.environ and not _has_driver()
    if hides_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    absent: dict[str, Any] = {_USES_CUDA: None}
    sys.modules.update(absent)
    try:
        yield
    finally:
        del sys.modules[_USES_CUDA]
        if hides_gpus:
            del os.environ["CUDA_VISIBLE_DEVICES"]


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


if WARM in os.environ:
    die_with_parent(int(os.environ[LAUNCHER]))
    inherit_handler()
    # Collecting garbage would take a sixth of the import time. Imported objects stay, so ranks skip them, too: that
    # saves half a second each time, and memory, since a visit to an object copies its page.
    gc.disable()
    with unused_cuda():
        import_all([name for name in os.environ.get(PRELOAD, "").split(",") if name])
    gc.freeze()
    gc.enable()
    Path(os.environ[WARM]).write_text(str(SERVER))
