"""The measure that compares evaluations has to be a measure of the job's evaluations."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.job import Spec
from moejob_api.job.evaluations import evaluation_measures
from moejob_api.problems import Problem, Rule


def evaluation_problems(spec: Spec) -> Iterator[Problem]:
    """Refuse a measure that no evaluation has."""
    wanted, measure_names = spec.training.best_by, evaluation_measures(spec)
    if wanted is None or wanted in measure_names:
        return
    fix = (
        f"use {' or '.join(measure_names)}"
        if measure_names
        else "there is nothing to evaluate; add data.eval or remove it"
    )
    yield Problem(Rule.CONFLICT, "spec.training.bestBy", f"no evaluation of this job has {wanted}; {fix}")
