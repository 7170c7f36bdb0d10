"""The first moments of a rank: bound to its parent, in a session of its own, with its environment and its output."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from moejob_api.contract.pods import ExitCode
from moejob_trainer.launcher.fork_server import SERVER, WARM, die_with_parent
from moejob_trainer.launcher.log import LauncherLog
from moejob_trainer.launcher.stacks import hold_back_signal, open_stacks

log = LauncherLog()


@dataclass(frozen=True, slots=True)
class RankCommand:
    """One rank to start. The target is `module:function`, a function that returns an exit code."""

    number: int
    target: str
    environment: Mapping[str, str]


def enter_rank(rank: RankCommand, output: Connection, errors: Connection) -> None:
    """Become that rank. Runs in a fresh child of the fork server."""
    die_with_parent(SERVER)
    # Ctrl-C in a terminal is for the launcher alone, and a whole session can be killed at once.
    os.setsid()
    _redirect_output(output, errors)
    faulthandler.enable()
    os.environ.update(rank.environment)
    if _cuda_is_lost():
        _exec_fresh_interpreter(rank)
    sys.exit(run(rank.target))


def run(target: str) -> int:
    """Run the function of a rank, and return its exit code. What is not installed is missing at the next try, too."""
    open_stacks(int(os.environ["RANK"]))
    module, _, function = target.partition(":")
    try:
        main: Callable[[], int] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as missing:
        sys.stderr.write(
            f"{sys.executable} has no module {missing.name}, which {module} imports; install the trainer with all that "
            "it requires, or use its image\n"
        )
        return ExitCode.BAD_CONFIGURATION
    return main()


def _cuda_is_lost() -> bool:
    """Return whether a module used the CUDA driver while the fork server imported it: no child may use CUDA then."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()  # noqa: SLF001 there is no public way to ask


def _exec_fresh_interpreter(rank: RankCommand) -> None:
    """The same process as a fresh interpreter, which does its own imports."""
    log.warning("CUDA was used before the fork; the rank does its own imports, which takes longer", rank=rank.number)
    os.environ.pop(WARM, None)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    hold_back_signal()
    program = f"import sys; from {__name__} import run; sys.exit(run({rank.target!r}))"
    os.execv(sys.executable, [sys.executable, "-X", "faulthandler", "-c", program])  # noqa: S606


def _redirect_output(output: Connection, errors: Connection) -> None:
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    output.close()
    errors.close()
    # Whole lines at once: what a rank printed before it was killed is in the log.
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
