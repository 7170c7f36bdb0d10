"""A cluster to try things on by hand: in an empty folder, until ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar

Started = TypeVar("Started")


def stay(
    folder: Path,
    starting: Callable[[Path], AbstractContextManager[Started]],
    kubeconfig: Callable[[Started], Path],
) -> None:
    """Start it in its folder, say how to reach it, and end it in order when asked to."""
    folder.mkdir(parents=True, exist_ok=True)
    end_when_asked()
    with suppress(KeyboardInterrupt), starting(folder.resolve()) as started:
        say(f"export KUBECONFIG={kubeconfig(started)}")
        signal.pause()


def end_when_asked() -> None:
    """Take SIGTERM for ctrl-C. Not what SIGINT does now: a shell that starts us in the background has it ignored."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def say(line: str) -> None:
    """Print a line now."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
