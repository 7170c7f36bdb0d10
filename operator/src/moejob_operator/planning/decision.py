"""The decision of one guard: the phase and its reason, the actions, and what the status has to keep.

Only its form; the guards that take it, for a suspended job as for a finished one, are in phase_guards.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.job.reasons import Reason
from moejob_api.job.status import LastFailure, Phase, Restarts
from moejob_operator.actions import Action, Event

__all__ = ["Decision", "Reason"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. Fields that are None leave the status as it is; `phase` None leaves all of it.

    `needs_live` asks for a decision on objects listed now, because its actions cannot be undone. A decision that
    changes the attempt or ends the job has no actions: a later reconcile reads the written status, and then deletes
    the old pods. A crash in between must not refund a restart.
    """

    phase: Phase | None
    reason: str = ""
    message: str = ""
    actions: tuple[Action, ...] = ()
    attempt: int | None = None
    restarts: Restarts | None = None
    failure: LastFailure | None = None
    # Whether every pod of the gang exists once the actions are done.
    pods_created: bool = False
    needs_live: bool = False
    requeue_after_seconds: float | None = None
    events: tuple[Event, ...] = ()
