"""A finding: one obstacle that evidence shows, and when it began. Many may hold at once; diagnose.py chooses."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from moejob_api.diagnosis.blockers import ADVICE, Blocker, Urgency


@dataclass(frozen=True, slots=True)
class Finding:
    """One obstacle. `subject` is the object that the advice names; a past finding is the cause of a restart."""

    blocker: Blocker
    message: str
    since: datetime | None = None
    subject: str = ""
    is_past: bool = False

    @property
    def rank(self) -> tuple[Urgency, bool]:
        """Return the place among other findings: what no wait ends, then what holds now before what has happened."""
        return ADVICE[self.blocker].urgency, self.is_past
