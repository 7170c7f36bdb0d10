"""The validating webhook's verdict: the full check of a job, reported to kopf and to the API server.

The reconciler validates every job again: a webhook can be down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import kopf

from moejob_api.documents import parse_job
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_api.rules.limits import DEFAULT_LIMITS, JobLimits
from moejob_operator.validation import Validation, validation_of

# kopf calls the handler of this name for a review that comes to this path.
HANDLER = "validate"
PATH = f"/{HANDLER}"
# The name of the webhook, which every denial carries.
HOOK = "validate.moejob.dev"
# The API server cuts longer warnings; all warnings together may have 4096 characters.
_WARNING_CHARACTERS = 256
_WARNINGS = 15


@dataclass(frozen=True)
class ReviewTurns:
    """Turns of reviews: one at a time validates a job, and one at a time searches for layouts that fit.

    The search takes most of the time that a stranger can make a review take, and only refused jobs need it. With a turn
    of its own, and a bound on the wait for it, no number of refused jobs holds up a job that can work.
    """

    search_seconds: float = 2.0
    validation: Lock = field(default_factory=Lock)
    search: Lock = field(default_factory=Lock)

    @contextmanager
    def for_search(self) -> Iterator[bool]:
        """Wait for the turn to look for layouts; False when it does not come in time."""
        is_mine = self.search.acquire(timeout=self.search_seconds)
        try:
            yield is_mine
        finally:
            if is_mine:
                self.search.release()


@dataclass
class ReviewAtHand:
    """The objects of a review and the status of its denial, which do not go through kopf.

    kopf would compare the old object with the new one in the event loop, which takes as long as a stranger likes, and
    it keeps only the message and the code of a denial.
    """

    old: Mapping[str, Any] | None = None
    new: Mapping[str, Any] | None = None
    turns: ReviewTurns = field(default_factory=ReviewTurns)
    status: dict[str, Any] = field(default_factory=dict)


# kopf hands the context of a request on to the thread of its handler.
at_hand: ContextVar[ReviewAtHand] = ContextVar("at_hand")


def validate(operation: str, warnings: list[str], limits: JobLimits) -> None:
    """Warn of what is unwise in the review at hand; raise when the job is denied."""
    asked = at_hand.get()
    found = reviewed(operation, asked.old, asked.new, limits, asked.turns)
    warnings += warnings_of(found)
    if not found.problems:
        return
    asked.status = status_of(found)
    raise kopf.AdmissionError(asked.status["message"], code=asked.status["code"])


def reviewed(
    operation: object,
    old: object,
    new: object,
    limits: JobLimits = DEFAULT_LIMITS,
    turns: ReviewTurns | None = None,
) -> Validation:
    """Validate a review request; without suggestions where other reviews hold the search for too long."""
    turns = turns or ReviewTurns()
    try:
        with turns.validation:
            found = _validated(operation, old, new, limits)
        if not found.problems:
            return found
        with turns.for_search() as is_mine:
            return replace(found, suggestions=verdict(new, limits).suggestions if is_mine else ())
    except RecursionError:
        # The API server prunes unknown fields, so another client sent this.
        return Validation((Problem(Rule.FIELD, "", "is nested deeper than any job"),))


def _validated(operation: object, old: object, new: object, limits: JobLimits) -> Validation:
    if operation not in ("CREATE", "UPDATE"):
        return Validation()
    if not isinstance(old, Mapping):
        return verdict(new, limits, with_suggestions=False)
    # A job that is labelled, finished or deleted keeps its spec, which earlier rules may have accepted.
    if isinstance(new, Mapping) and _has_same_spec(old, new):
        return Validation()
    found = verdict(new, limits, with_suggestions=False)
    # Only new problems count: a user can suspend such a job without repairing the old ones.
    known = set(verdict(old, limits, with_suggestions=False).problems) if found.problems else set()
    return replace(found, problems=tuple(problem for problem in found.problems if problem not in known))


def verdict(raw: object, limits: JobLimits = DEFAULT_LIMITS, *, with_suggestions: bool = True) -> Validation:
    """Return the verdict on a job, in the words of the reconciler."""
    if not isinstance(raw, Mapping):
        return Validation((Problem(Rule.FIELD, "", "is no object"),))
    try:
        return validation_of(parse_job(raw).spec, limits, with_suggestions=with_suggestions)
    except InvalidSpec as refused:
        return Validation(refused.problems)


def status_of(found: Validation) -> dict[str, Any]:
    """Return the Status that a denial carries."""
    causes = [
        {"reason": "FieldValueInvalid", "field": problem.path, "message": problem.message} for problem in found.problems
    ]
    # Not 422: kubectl would print the causes alone, and not say that a webhook refused.
    return {"code": 403, "reason": "Forbidden", "message": _message(found), "details": {"causes": causes}}


def warnings_of(found: Validation) -> list[str]:
    """Return the warnings that the API server passes on."""
    return [text[:_WARNING_CHARACTERS] for text in _warnings(found)][:_WARNINGS]


def _has_same_spec(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "spec" in new and old.get("spec") == new["spec"]


def _message(found: Validation) -> str:
    text = "; ".join(map(str, found.problems))
    return f"{text}. What would be accepted: {'; '.join(found.suggestions)}" if found.suggestions else text


def _warnings(found: Validation) -> Iterator[str]:
    if found.unseen is not None:
        yield f"spec.model.source: not checked against the model: {found.unseen}"
    yield from map(str, found.warnings)
