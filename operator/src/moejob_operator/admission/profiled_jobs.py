"""Reviews of jobs that name a profile: the job is merged first, and then reviewed as any other.

A job may come before its profile, as `kubectl apply` of a folder sends both. Such a job is taken with a warning and
waits; its own names are held to the limits at once, and the operator reviews the rest when it merges the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moejob_api import api_bodies
from moejob_api.diagnosis.reading import read_status
from moejob_api.documents import parse_job
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_api.profiles.merging import with_values
from moejob_api.profiles.reading import TrainingProfile, apply_profile
from moejob_api.rules.limits import JobLimits, limit_problems, namespace_problems
from moejob_operator.cluster import Retryable
from moejob_operator.observed import named_profile
from moejob_operator.validation import Validation, missing_profile_problem

ProfileFinder = Callable[[str, str], TrainingProfile | None]
Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MergedReview:
    """The objects of a review, each with the values of the profile; `missing` says why they have none."""

    old: object
    new: object
    missing: Problem | None = None


def merge_review(old: object, new: object, find_profile: ProfileFinder) -> MergedReview:
    """Return the objects of a review with the profile that the new one names."""
    if not isinstance(new, Mapping) or named_profile(new) is None:
        return MergedReview(old, new)
    # No client writes a status with a job: the old one is the operator's.
    recorded = read_status(old.get("status")).profile if isinstance(old, Mapping) else None
    if recorded is not None:
        return MergedReview(_with_values(old, recorded.values), _with_values(new, recorded.values))
    name, namespace = named_profile(new) or "", api_bodies.as_text(api_bodies.object_metadata(new).get("namespace"))
    try:
        profile = find_profile(namespace, name)
    except Retryable as failure:
        return MergedReview(old, new, Problem(Rule.PROFILE, "spec.profile", f"is not checked now: {failure}"))
    if profile is None:
        return MergedReview(old, new, missing_profile_problem(name, namespace))
    values = apply_profile(api_bodies.as_mapping(new.get("spec")), profile).values
    return MergedReview(_with_values(old, values), _with_values(new, values))


def review_unmerged_job(review: MergedReview, limits: JobLimits) -> Validation:
    """Validate a job without its profile: what it names itself, and nothing that a profile could change."""
    warnings = () if review.missing is None else (review.missing,)
    if isinstance(review.old, Mapping):
        old_problems = frozenset(_own_problems(review.old, limits))
        problems = tuple(problem for problem in _own_problems(review.new, limits) if problem not in old_problems)
    else:
        problems = _own_problems(review.new, limits)
    return Validation(problems, warnings)


def _own_problems(raw: object, limits: JobLimits) -> tuple[Problem, ...]:
    body = api_bodies.as_mapping(raw)
    namespace = api_bodies.as_text(api_bodies.object_metadata(body).get("namespace"))
    try:
        spec = parse_job(body).spec
    except InvalidSpec as refusal:
        return refusal.problems
    except RecursionError:
        return (Problem(Rule.FIELD, "", "is nested deeper than any job"),)
    # The queue may be the profile's.
    own_limits = limits.model_copy(update={"require_queue": False})
    return (*namespace_problems(namespace, limits), *limit_problems(spec, own_limits))


def _with_values(raw: object, values: Raw) -> object:
    if not isinstance(raw, Mapping):
        return raw
    return {**raw, "spec": with_values(api_bodies.as_mapping(raw.get("spec")), values)}
