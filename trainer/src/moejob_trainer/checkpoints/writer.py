"""The interface between the checkpoint store and the writer of a rank's state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class PendingWrite(Protocol):
    """One rank's part of a save that is under way."""

    @property
    def waited_seconds(self) -> float:
        """The seconds that training has waited for it between the calls."""

    def is_finished(self) -> bool:
        """Return whether this rank has written everything; raises what failed. Every rank asks equally often."""

    def names(self) -> Sequence[str]:
        """The files this rank wrote, relative to the folder. Rank 0 adds the files that no rank names."""


class StateWriter(Protocol):
    """Writes the state of the run, each rank its part, without any rank waiting for a file longer than it must."""

    def start_writing(self, folder: Path) -> PendingWrite:
        """Start writing into the folder, which exists and is empty. Every rank calls this."""
