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
from moejob_api.rules.limits import DEFAULT_LIMITS, JobLimits, namespace_problems
from moejob_operator.admission.profiled_jobs import ProfileFinder, merge_review, review_unmerged_job
from moejob_operator.validation import Validation, validate_spec

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
    def take_search_turn(self) -> Iterator[bool]:
        """Wait for the turn to look for layouts; False when it does not come in time."""
        has_turn = self.search.acquire(timeout=self.search_seconds)
        try:
            yield has_turn
        finally:
            if has_turn:
                self.search.release()


@dataclass
class CurrentReview:
    """The objects of a review and the status of its denial, which do not go through kopf.

    kopf would compare the old object with the new one in the event loop, which takes as long as a stranger likes, and
    it keeps only the message and the code of a denial.
    """

    old: Mapping[str, Any] | None = None
    new: Mapping[str, Any] | None = None
    turns: ReviewTurns = field(default_factory=ReviewTurns)
    status: dict[str, Any] = field(default_factory=dict)


# kopf hands the context of a request on to the thread of its handler.
current_review: ContextVar[CurrentReview] = ContextVar("current_review")


def answer_review(operation: str, warnings: list[str], limits: JobLimits, find_profile: ProfileFinder) -> None:
    """Warn of what is unwise in the review at hand; raise when the job is denied."""
    review = current_review.get()
    # Before the turn: a slow API server must not hold up reviews of jobs without profiles.
    merged = merge_review(review.old, review.new, find_profile)
    if merged.missing is None:
        validation = review_job(operation, merged.old, merged.new, limits, review.turns)
    else:
        validation = review_unmerged_job(merged, limits)
    warnings += shown_warnings(validation)
    if not validation.problems:
        return
    review.status = denial_status(validation)
    raise kopf.AdmissionError(review.status["message"], code=review.status["code"])


def review_job(
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
            validation = _validate_change(operation, old, new, limits)
        if not validation.problems:
            return validation
        with turns.take_search_turn() as has_turn:
            return replace(validation, suggestions=validate_raw_job(new, limits).suggestions if has_turn else ())
    except RecursionError:
        # The API server prunes unknown fields, so another client sent this.
        return Validation((Problem(Rule.FIELD, "", "is nested deeper than any job"),))


def _validate_change(operation: object, old: object, new: object, limits: JobLimits) -> Validation:
    if operation not in ("CREATE", "UPDATE"):
        return Validation()
    if not isinstance(old, Mapping):
        outside = tuple(namespace_problems(_namespace_of(new), limits))
        return Validation(outside) if outside else validate_raw_job(new, limits, with_suggestions=False)
    # A job that is labelled, finished or deleted keeps its spec, which earlier rules may have accepted.
    if isinstance(new, Mapping) and _has_same_spec(old, new):
        return Validation()
    validation = validate_raw_job(new, limits, with_suggestions=False)
    # Only new problems count: a user can suspend such a job without repairing the old ones.
    old_problems = set(validate_raw_job(old, limits, with_suggestions=False).problems) if validation.problems else set()
    return replace(
        validation, problems=tuple(problem for problem in validation.problems if problem not in old_problems)
    )


def validate_raw_job(raw: object, limits: JobLimits = DEFAULT_LIMITS, *, with_suggestions: bool = True) -> Validation:
    """Return the verdict on a job, in the words of the reconciler."""
    if not isinstance(raw, Mapping):
        return Validation((Problem(Rule.FIELD, "", "is no object"),))
    try:
        return validate_spec(parse_job(raw).spec, limits, with_suggestions=with_suggestions)
    except InvalidSpec as refusal:
        return Validation(refusal.problems)


def denial_status(validation: Validation) -> dict[str, Any]:
    """Return the Status that a denial carries."""
    causes = [
        {"reason": "FieldValueInvalid", "field": problem.path, "message": problem.message}
        for problem in validation.problems
    ]
    # Not 422: kubectl would print the causes alone, and not say that a webhook refused.
    return {"code": 403, "reason": "Forbidden", "message": validation.refusal_text, "details": {"causes": causes}}


def shown_warnings(validation: Validation) -> list[str]:
    """Return the warnings that the API server passes on."""
    return [text[:_WARNING_CHARACTERS] for text in _all_warnings(validation)][:_WARNINGS]


def _namespace_of(raw: object) -> str:
    metadata = raw.get("metadata") if isinstance(raw, Mapping) else None
    return str(metadata.get("namespace") or "") if isinstance(metadata, Mapping) else ""


def _has_same_spec(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "spec" in new and old.get("spec") == new["spec"]


def _all_warnings(validation: Validation) -> Iterator[str]:
    if validation.unseen is not None:
        yield f"spec.model.source: not checked against the model: {validation.unseen}"
    yield from map(str, validation.warnings)
