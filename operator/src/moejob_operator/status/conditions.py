"""Conditions: what holds and why, each with the time at which it began to hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moejob_api.job.status import Condition, ConditionStatus, ConditionType, Phase, Progress, Status
from moejob_operator.children.attempt import claim_of
from moejob_operator.planning.decision import Decision, Reason
from moejob_operator.planning.observed_state import ObservedState
from moejob_operator.planning.timestamps import written
from moejob_operator.validation import Validation

_MESSAGE_CHARACTERS = 8192
# Written once they have been true, and from then on also when they no longer are.
_LASTING = (ConditionType.MODEL_UNCHECKED, ConditionType.SUSPENDED, ConditionType.RESTARTING)


@dataclass(frozen=True, slots=True)
class _Claim:
    """One condition, before it is known since when."""

    type: ConditionType
    holds: bool
    reason: str
    message: str = ""


def condition(status: Status, kind: ConditionType) -> Condition | None:
    """The condition of a type as it was written."""
    return next((found for found in status.conditions if found.type is kind), None)


def holds(status: Status, kind: ConditionType) -> bool:
    """Return whether a condition was written as true."""
    found = condition(status, kind)
    return found is not None and found.status is ConditionStatus.TRUE


def conditions(s: ObservedState, decision: Decision, progress: Progress | None) -> tuple[Condition, ...]:
    """All conditions, in the order of their types."""
    claims = {claim.type: claim for claim in _claims(s, decision, progress)}
    return tuple(_dated(s, claims[kind]) for kind in ConditionType if kind in claims)


def _claims(s: ObservedState, decision: Decision, progress: Progress | None) -> Iterator[_Claim]:
    yield from (_Claim(kind, holds=False, reason="Over") for kind in _LASTING if condition(s.status, kind) is not None)
    yield _accepted(s, decision)
    if s.validation.unseen is not None:
        yield _Claim(ConditionType.MODEL_UNCHECKED, True, "ModelUnseen", _unchecked(s.validation))
    yield _pods_created(s, decision)
    yield _Claim(ConditionType.RUNNING, decision.phase is Phase.RUNNING, decision.reason, decision.message)
    if progress is not None and progress.last_checkpoint_step is not None:
        yield _Claim(ConditionType.CHECKPOINTED, True, "Saved", f"step {progress.last_checkpoint_step} is saved")
    yield from _of_phase(decision, _way_on(s, progress))


def _accepted(s: ObservedState, decision: Decision) -> _Claim:
    is_accepted = s.validation.is_accepted or (
        decision.reason != Reason.INVALID and holds(s.status, ConditionType.ACCEPTED)
    )
    if is_accepted:
        return _Claim(ConditionType.ACCEPTED, True, "Accepted")
    rule = s.validation.problems[0].rule.value if s.validation.problems else Reason.INVALID.value
    return _Claim(ConditionType.ACCEPTED, False, rule, _refusal(s.validation))


def _refusal(validation: Validation) -> str:
    text = "; ".join(str(problem) for problem in validation.problems)
    if not validation.suggestions:
        return text
    return f"{text}. What would be accepted: {'; '.join(validation.suggestions)}"


def _unchecked(validation: Validation) -> str:
    return f"{validation.unseen}; the trainer checks the job against it before it loads it"


def _pods_created(s: ObservedState, decision: Decision) -> _Claim:
    before = condition(s.status, ConditionType.PODS_CREATED)
    if decision.phase is Phase.FAILED and before is not None:
        is_true = before.status is ConditionStatus.TRUE
        return _Claim(ConditionType.PODS_CREATED, is_true, before.reason, before.message)
    if decision.pods_created:
        return _Claim(ConditionType.PODS_CREATED, True, "AllPodsExist")
    return _Claim(ConditionType.PODS_CREATED, False, decision.reason, decision.message)


def _way_on(s: ObservedState, progress: Progress | None) -> str:
    """Return how another job can continue the run: a failed job never runs again, and its own volume goes with it."""
    saved, spec = None if progress is None else progress.last_checkpoint_step, s.seen.job.spec
    if saved is None or spec is None:
        return ""
    claim, name = claim_of(s.seen.job.name, spec), s.seen.job.name
    gone = "" if spec.storage.claim_name is not None else f"; {claim} is deleted with this job"
    return (
        f"; step {saved} is saved, or a later one, and another job goes on from there with checkpoint: "
        f"{{resumeFrom: pvc://{claim}/{name}, resume: Run}}{gone}"
    )


def _of_phase(decision: Decision, way_on: str) -> Iterator[_Claim]:
    match decision.phase:
        case Phase.SUCCEEDED:
            yield _Claim(ConditionType.SUCCEEDED, True, decision.reason, decision.message)
        case Phase.FAILED:
            yield _Claim(ConditionType.FAILED, True, decision.reason, decision.message + way_on)
        case Phase.SUSPENDED:
            yield _Claim(ConditionType.SUSPENDED, True, decision.reason, decision.message)
        case Phase.RESTARTING:
            yield _Claim(ConditionType.RESTARTING, True, decision.reason, decision.message)
        case Phase.PENDING | Phase.RUNNING | None:
            return


def _dated(s: ObservedState, claim: _Claim) -> Condition:
    status = ConditionStatus.TRUE if claim.holds else ConditionStatus.FALSE
    before = condition(s.status, claim.type)
    is_old = before is not None and before.status is status
    return Condition(
        type=claim.type,
        status=status,
        reason=claim.reason,
        message=claim.message[:_MESSAGE_CHARACTERS],
        last_transition_time=before.last_transition_time if before is not None and is_old else written(s.now),
        observed_generation=s.seen.job.generation,
    )
