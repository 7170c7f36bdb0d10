"""The whole decision about a job: what to do, what its status says then, and what to tell about it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from moejob_api.job.status import Phase, Status
from moejob_operator.actions import Action, Delete, Notice
from moejob_operator.judging import Judgement
from moejob_operator.observed import Observed
from moejob_operator.planning.guards import GUARDS, seconds_to_deadline
from moejob_operator.planning.situation import Setting, Situation, situation
from moejob_operator.planning.step import Step
from moejob_operator.planning.times import soonest
from moejob_operator.status.notices import notices
from moejob_operator.status.whole import settles_after_seconds, status_of


@dataclass(frozen=True, slots=True)
class Decision:
    """Actions come first, then the status, then the notices; a crash between any two of them is made good later.

    `needs_live` says that this may only be done when it was decided on objects listed now.
    """

    actions: tuple[Action, ...]
    status: Status
    notices: tuple[Notice, ...]
    look_again_after_seconds: float | None
    needs_live: bool


def decide(seen: Observed, judged: Judgement, setting: Setting, now: datetime, refusal: str | None = None) -> Decision:
    """What to do about a job. `refusal` is what the API server said to the actions of this decision."""
    s = situation(seen, judged, setting, now, refusal)
    step = next(step for step in (guard(s) for guard in GUARDS) if step is not None)
    if step.phase is None:
        return Decision((), s.status, (), None, needs_live=False)
    status = status_of(s, step)
    return Decision(
        actions=step.actions,
        status=status,
        notices=(*notices(s.status, status), *step.notices),
        look_again_after_seconds=soonest(
            step.look_again_after_seconds, _deadline(s, step), settles_after_seconds(s, status), _sequel(s, step)
        ),
        needs_live=step.needs_live,
    )


def _sequel(s: Situation, step: Step) -> float | None:
    """At once after a deletion, and when the job has ended: what follows is for another look.

    No watch asks for that look. It tells of what others do, and a pod of a lost node ends for nobody.
    """
    if s.refusal is not None:
        return None
    is_over = step.phase is not None and step.phase.is_finished and step.phase is not s.status.phase
    return 0.0 if is_over or any(isinstance(action, Delete) for action in step.actions) else None


def _deadline(s: Situation, step: Step) -> float | None:
    is_active = step.phase in (Phase.PENDING, Phase.RUNNING, Phase.RESTARTING) and s.judged.is_accepted
    return seconds_to_deadline(s) if is_active else None
