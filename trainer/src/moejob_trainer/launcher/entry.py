"""The first moments of a rank: bound to its parent, in a session of its own, with its environment and its output."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from moejob_trainer.launcher.nursery import SERVER, die_with_parent


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank to start. The target is `module:function`, a function that returns an exit code."""

    number: int
    target: str
    environment: Mapping[str, str]


def enter(rank: Rank, output: Connection, errors: Connection) -> None:
    """Become that rank. Runs in a fresh child of the fork server."""
    die_with_parent(SERVER)
    # Ctrl-C in a terminal is for the launcher alone, and a whole session can be killed at once.
    os.setsid()
    _speak_into(output, errors)
    faulthandler.enable()
    os.environ.update(rank.environment)
    sys.exit(_main(rank.target)())


def _main(target: str) -> Callable[[], int]:
    module, _, function = target.partition(":")
    main: Callable[[], int] = getattr(importlib.import_module(module), function)
    return main


def _speak_into(output: Connection, errors: Connection) -> None:
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    output.close()
    errors.close()
    # Whole lines at once: a rank that is killed has said what it printed.
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
