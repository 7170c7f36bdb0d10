"""The whole decision about a job: actions, the status that follows, and the events about it.

The phase and the actions come from the guards in planning/phase_guards.py; here they are asked in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from moejob_api.job.status import Phase, Status
from moejob_operator.actions import Action, Delete, Event
from moejob_operator.observed import Observation
from moejob_operator.planning.decision import Decision
from moejob_operator.planning.observed_state import ObservedState, OperatorSetting, observed_state
from moejob_operator.planning.phase_guards import GUARDS, seconds_to_deadline
from moejob_operator.planning.timestamps import shortest_wait
from moejob_operator.status.events import transition_events
from moejob_operator.status.job_status import next_status, settles_after_seconds
from moejob_operator.validation import Validation


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Actions come first, then the status, then the events; a crash in between is repaired by a later reconcile.

    `needs_live`: carry this out only if it was decided on objects listed now.
    """

    actions: tuple[Action, ...]
    status: Status
    events: tuple[Event, ...]
    requeue_after_seconds: float | None
    needs_live: bool


def plan_reconciliation(
    observation: Observation,
    validation: Validation,
    setting: OperatorSetting,
    now: datetime,
    refusal: str | None = None,
) -> Reconciliation:
    """Decide about a job. `refusal` is the answer of the API server to the actions of this decision."""
    s = observed_state(observation, validation, setting, now, refusal)
    # The last guard always decides, so `next` needs no default.
    decision = next(decision for decision in (guard(s) for guard in GUARDS) if decision is not None)
    if decision.phase is None:
        return Reconciliation((), s.status, (), None, needs_live=False)
    status = next_status(s, decision)
    return Reconciliation(
        actions=decision.actions,
        status=status,
        events=(*transition_events(s.status, status), *decision.events),
        requeue_after_seconds=shortest_wait(
            decision.requeue_after_seconds,
            _deadline_seconds(s, decision),
            settles_after_seconds(s, status),
            _sequel_seconds(s, decision),
        ),
        needs_live=decision.needs_live,
    )


def _sequel_seconds(s: ObservedState, decision: Decision) -> float | None:
    """Requeue at once after a deletion and after the end of the job: the next reconcile does what follows.

    No watch triggers that reconcile: watches report changes by others, and a pod of a lost node never ends.
    """
    if s.refusal is not None:
        return None
    is_over = decision.phase is not None and decision.phase.is_finished and decision.phase is not s.status.phase
    return 0.0 if is_over or any(isinstance(action, Delete) for action in decision.actions) else None


def _deadline_seconds(s: ObservedState, decision: Decision) -> float | None:
    is_active = decision.phase in (Phase.PENDING, Phase.RUNNING, Phase.RESTARTING) and s.validation.is_accepted
    return seconds_to_deadline(s) if is_active else None
