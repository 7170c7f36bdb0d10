"""The measure by which evaluations are compared has to be one that the job's evaluations have."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.job import Spec
from moejob_api.job.evaluations import measures
from moejob_api.problems import Problem, Rule


def evaluation_problems(spec: Spec) -> Iterator[Problem]:
    """Refuse a measure that no evaluation has."""
    wanted, known = spec.training.best_by, measures(spec)
    if wanted is None or wanted in known:
        return
    fix = f"use {' or '.join(known)}" if known else "there is nothing to evaluate; add data.eval or remove it"
    yield Problem(Rule.CONFLICT, "spec.training.bestBy", f"no evaluation of this job has {wanted}; {fix}")
