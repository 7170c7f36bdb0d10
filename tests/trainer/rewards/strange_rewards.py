"""A reward whose completions say what it does to its own process."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

BEHAVIOURS: dict[str, Callable[[], Any]] = {}


def _behaviour(act: Callable[[], Any]) -> Callable[[], Any]:
    BEHAVIOURS[act.__name__.strip("_")] = act
    return act


def _write_to_parent(content: bytes) -> None:
    """Write to whatever the parent reads."""
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_socket():
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                connection.sendall(content)


@_behaviour
def _raise() -> None:
    raise ValueError("no")


@_behaviour
def _raise_unprintable() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise Unprintable


@_behaviour
def _exit() -> None:
    sys.exit(0)


@_behaviour
def _die() -> None:
    os._exit(0)


@_behaviour
def _die_inside_a_line() -> None:
    _write_to_parent(b'{"request": 1, "sco')
    os._exit(0)


@_behaviour
def _write_a_line() -> None:
    _write_to_parent(b'{"scores": "all"}\n')


@_behaviour
def _write_megabytes() -> None:
    _write_to_parent(b"x" * 40 * 2**20)


@_behaviour
def _hang() -> None:
    threading.Event().wait()


@_behaviour
def _hang_for_good() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    threading.Event().wait()


@_behaviour
def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@_behaviour
def _close_everything() -> None:
    os.closerange(0, 1000)


@_behaviour
def _fork_and_die() -> None:
    # The child keeps the socket open, in a session that is not killed with its parent's.
    if os.fork() == 0:
        os.setsid()
        signal.alarm(60)
        threading.Event().wait()
    os._exit(0)


@_behaviour
def _nan() -> float:
    return math.nan


@_behaviour
def _huge() -> int:
    return 10**5000


@_behaviour
def _text() -> str:
    return "1.0"


@_behaviour
def _none() -> None:
    return None


@_behaviour
def _object() -> object:
    class Unshown:
        def __repr__(self) -> str:
            raise RuntimeError

    return Unshown()


# What these do is no failure.
def _good() -> float:
    return 1.0


def _print_megabytes() -> float:
    # Of nothing that a terminal shows.
    sys.stdout.write("\0" * 2**20)
    return 1.0


def _close_output() -> float:
    with suppress(OSError):
        os.close(1)
    return 1.0


def _fork_and_return() -> float:
    os.fork()
    return 1.0


GOOD: dict[str, Callable[[], float]] = {
    "good": _good,
    "print_megabytes": _print_megabytes,
    "close_output": _close_output,
    "fork_and_return": _fork_and_return,
}


def by_name(completions: Sequence[str], **_: object) -> list[Any]:
    """Do what each says."""
    return [(BEHAVIOURS | GOOD)[completion]() for completion in completions]


def too_many(completions: Sequence[str], **_: object) -> list[float]:
    """One more."""
    return [1.0] * (len(completions) + 1)


def no_list(**_: object) -> float:
    """A number for all."""
    return 1.0
