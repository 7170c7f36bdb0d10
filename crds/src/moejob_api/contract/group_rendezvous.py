"""The rendezvous of a process group: all of its ranks arrive at a store before any of them connects.

Connecting a group waits for the last rank until a timeout, and no other thread can end that wait in NCCL. A store can:
one verdict there ends the wait of all ranks, either that all have arrived or the reason why one does not come.
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
        """Set a value if it is as expected ("" for a key without a value), and return the value afterwards."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait for keys; RuntimeError when they do not come."""

    def get(self, key: str, /) -> bytes:
        """Return a value."""


class RankMissing(RuntimeError):
    """A rank of a group does not come."""


def join_rendezvous(store: RendezvousStore, size: int, patience: timedelta) -> None:
    """Return when all ranks of a group have arrived; raise RankMissing once a rank is reported missing."""
    if store.add(_ARRIVED, 1) == size:
        # The first verdict counts: a cancelled group stays cancelled when its last rank arrives.
        store.compare_set(_VERDICT, "", _COMPLETE.decode())
    store.wait([_VERDICT], patience)
    verdict = store.get(_VERDICT)
    if verdict != _COMPLETE:
        raise RankMissing(verdict.decode(errors="replace"))


def cancel_rendezvous(store: RendezvousStore, reason: str) -> None:
    """Let no rank wait any more. Changes nothing when all have arrived."""
    store.compare_set(_VERDICT, "", reason)
