"""Conditions: what holds and why, each with the time at which it began to hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moejob_api.job.status import Condition, ConditionStatus, ConditionType, Phase, Progress, Status
from moejob_api.learning_signals import SignalKind, reported_signals, signals_text
from moejob_api.router_health import collapse_text, reported_layers
from moejob_operator.children.attempt import claim_name
from moejob_operator.planning.decision import Decision, Reason
from moejob_operator.planning.observed_state import ObservedState
from moejob_operator.planning.timestamps import format_time

_MESSAGE_CHARACTERS = 8192
# Written once they have been true, and from then on also when they no longer are.
_LASTING = (ConditionType.MODEL_UNCHECKED, ConditionType.SUSPENDED, ConditionType.RESTARTING)
_SIGNAL_REASONS = {SignalKind.FLAT: "EqualRewards", SignalKind.CUT: "AnswersCutOff"}


@dataclass(frozen=True, slots=True)
class _DraftCondition:
    """One condition, before it is known since when."""

    type: ConditionType
    is_true: bool
    reason: str
    message: str = ""


def written_condition(status: Status, kind: ConditionType) -> Condition | None:
    """The condition of a type as it was written."""
    return next((entry for entry in status.conditions if entry.type is kind), None)


def is_condition_true(status: Status, kind: ConditionType) -> bool:
    """Return whether a condition was written as true."""
    entry = written_condition(status, kind)
    return entry is not None and entry.status is ConditionStatus.TRUE


def build_conditions(s: ObservedState, decision: Decision, progress: Progress | None) -> tuple[Condition, ...]:
    """All conditions, in the order of their types."""
    drafts = {draft.type: draft for draft in _draft_conditions(s, decision, progress)}
    return tuple(_date_condition(s, drafts[kind]) for kind in ConditionType if kind in drafts)


def _draft_conditions(s: ObservedState, decision: Decision, progress: Progress | None) -> Iterator[_DraftCondition]:
    yield from (
        _DraftCondition(kind, is_true=False, reason="Over")
        for kind in _LASTING
        if written_condition(s.status, kind) is not None
    )
    yield _draft_accepted(s, decision)
    if s.validation.unseen is not None:
        message = f"{s.validation.unseen}; the trainer checks the job against it before it loads it"
        yield _DraftCondition(ConditionType.MODEL_UNCHECKED, True, "ModelUnseen", message)
    yield _draft_pods_created(s, decision)
    yield _DraftCondition(ConditionType.RUNNING, decision.phase is Phase.RUNNING, decision.reason, decision.message)
    if progress is not None and progress.last_checkpoint_step is not None:
        yield _DraftCondition(
            ConditionType.CHECKPOINTED, True, "Saved", f"step {progress.last_checkpoint_step} is saved"
        )
    yield from _drafts_of_training(s)
    yield from _drafts_of_phase(decision, _resume_advice(s, progress))


def _draft_accepted(s: ObservedState, decision: Decision) -> _DraftCondition:
    is_accepted = s.validation.is_accepted or (
        decision.reason != Reason.INVALID and is_condition_true(s.status, ConditionType.ACCEPTED)
    )
    if is_accepted:
        return _DraftCondition(ConditionType.ACCEPTED, True, "Accepted")
    rule = s.validation.problems[0].rule.value if s.validation.problems else Reason.INVALID.value
    return _DraftCondition(ConditionType.ACCEPTED, False, rule, s.validation.refusal_text)


def _draft_pods_created(s: ObservedState, decision: Decision) -> _DraftCondition:
    before = written_condition(s.status, ConditionType.PODS_CREATED)
    if decision.phase is Phase.FAILED and before is not None:
        is_true = before.status is ConditionStatus.TRUE
        return _DraftCondition(ConditionType.PODS_CREATED, is_true, before.reason, before.message)
    if decision.pods_created:
        return _DraftCondition(ConditionType.PODS_CREATED, True, "AllPodsExist")
    return _DraftCondition(ConditionType.PODS_CREATED, False, decision.reason, decision.message)


def _drafts_of_training(s: ObservedState) -> Iterator[_DraftCondition]:
    """Yield what the last report says of routers and rewards, from the first trouble on."""
    measures: Mapping[str, float] = {} if s.run_progress is None else s.run_progress.measures
    reported = {ConditionType.ROUTER_COLLAPSED: _draft_routers(measures)}
    reported[ConditionType.NOTHING_LEARNED] = _draft_signals(measures)
    for kind, draft in reported.items():
        before = written_condition(s.status, kind)
        if draft is not None and (draft.is_true or before is not None):
            yield draft
        elif before is not None:
            # Without a report nothing changes.
            yield _DraftCondition(kind, before.status is ConditionStatus.TRUE, before.reason, before.message)


def _draft_routers(measures: Mapping[str, float]) -> _DraftCondition | None:
    layers = reported_layers(measures)
    if layers is None:
        return None
    if layers:
        return _DraftCondition(ConditionType.ROUTER_COLLAPSED, True, "ExpertsUnused", collapse_text(layers))
    recovered = "tokens spread over the experts of every layer again"
    return _DraftCondition(ConditionType.ROUTER_COLLAPSED, False, "Recovered", recovered)


def _draft_signals(measures: Mapping[str, float]) -> _DraftCondition | None:
    signals = reported_signals(measures)
    if signals is None:
        return None
    if signals:
        reason = _SIGNAL_REASONS[signals[0]]
        return _DraftCondition(ConditionType.NOTHING_LEARNED, True, reason, signals_text(signals))
    recovered = "most groups have answers of different rewards, or the reward has risen, and most answers have an end"
    return _DraftCondition(ConditionType.NOTHING_LEARNED, False, "Recovered", recovered)


def _resume_advice(s: ObservedState, progress: Progress | None) -> str:
    """Return how another job can continue the run: a failed job never runs again, and its own volume goes with it."""
    saved_step, spec = None if progress is None else progress.last_checkpoint_step, s.observation.job.spec
    if saved_step is None or spec is None:
        return ""
    claim, name = claim_name(s.observation.job.name, spec), s.observation.job.name
    deletion_note = "" if spec.storage.claim_name is not None else f"; {claim} is deleted with this job"
    return (
        f"; step {saved_step} is saved, or a later one, and another job goes on from there with checkpoint: "
        f"{{resumeFrom: pvc://{claim}/{name}, resume: Run}}{deletion_note}"
    )


def _drafts_of_phase(decision: Decision, resume_advice: str) -> Iterator[_DraftCondition]:
    match decision.phase:
        case Phase.SUCCEEDED:
            yield _DraftCondition(ConditionType.SUCCEEDED, True, decision.reason, decision.message)
        case Phase.FAILED:
            yield _DraftCondition(ConditionType.FAILED, True, decision.reason, decision.message + resume_advice)
        case Phase.SUSPENDED:
            yield _DraftCondition(ConditionType.SUSPENDED, True, decision.reason, decision.message)
        case Phase.RESTARTING:
            yield _DraftCondition(ConditionType.RESTARTING, True, decision.reason, decision.message)
        case Phase.PENDING | Phase.RUNNING | None:
            return


def _date_condition(s: ObservedState, draft: _DraftCondition) -> Condition:
    status = ConditionStatus.TRUE if draft.is_true else ConditionStatus.FALSE
    before = written_condition(s.status, draft.type)
    is_old = before is not None and before.status is status
    return Condition(
        type=draft.type,
        status=status,
        reason=draft.reason,
        message=draft.message[:_MESSAGE_CHARACTERS],
        last_transition_time=before.last_transition_time if before is not None and is_old else format_time(s.now),
        observed_generation=s.observation.job.generation,
    )
