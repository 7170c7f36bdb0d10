"""The rendezvous of a process group: all of its ranks say that they are there before any of them connects.

What connects a group waits for the last rank for as long as its timeout, and NCCL does so where no other thread can end
it. Here a rank waits at a store, where one word ends the wait of all: that everyone is there, or why someone is not.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

_ARRIVED, _VERDICT = "arrived", "verdict"
_COMPLETE = b"complete"


class RendezvousStore(Protocol):
    """The part of torch's stores that is used. One thread at a time is let in, also while it waits."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, which is 0 before."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value where it is as expected, "" where there is none; the value that is there then."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait for keys; RuntimeError when they do not come."""

    def get(self, key: str, /) -> bytes:
        """Return a value."""


class RankMissing(RuntimeError):
    """A group of which one rank does not come."""


def arrive(store: RendezvousStore, size: int, patience: timedelta) -> None:
    """Return when all ranks of a group have arrived; RankMissing as soon as it is known that one does not."""
    if store.add(_ARRIVED, 1) == size:
        store.compare_set(_VERDICT, "", _COMPLETE.decode())
    store.wait([_VERDICT], patience)
    verdict = store.get(_VERDICT)
    if verdict != _COMPLETE:
        raise RankMissing(verdict.decode(errors="replace"))


def give_up(store: RendezvousStore, reason: str) -> None:
    """Let no rank wait any more. Changes nothing when all have arrived."""
    store.compare_set(_VERDICT, "", reason)
