"""Reviews of jobs that name a profile."""

from __future__ import annotations

from typing import Any

import pytest

from builders import SFT, merge_sections
from moejob_api.profiles.fields import ProfileKind
from moejob_api.profiles.reading import TrainingProfile
from moejob_api.rules.limits import DEFAULT_LIMITS, JobLimits
from moejob_operator.admission.profiled_jobs import MergedReview, ProfileFinder, merge_review, review_unmerged_job
from moejob_operator.admission.review import review_job
from moejob_operator.cluster import Retryable

RECORDED = {
    "kind": "MoETrainingProfile",
    "name": "shared",
    "uid": "u",
    "generation": 1,
    "values": {"resources": {"gpusPerNode": 4}},
}


def body(status: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    spec = merge_sections(SFT | {"profile": "shared"}, sections)
    metadata = {"name": "job", "namespace": "team"}
    job = {"apiVersion": "moejob.dev/v1alpha1", "kind": "MoETrainingJob", "metadata": metadata, "spec": spec}
    return job if status is None else job | {"status": status}


def profile_with(**spec: Any) -> ProfileFinder:
    return lambda namespace, name: TrainingProfile(ProfileKind.NAMESPACED, name, spec) if namespace == "team" else None


def find_nothing(_namespace: str, _name: str) -> TrainingProfile | None:
    return None


def find_too_late(_namespace: str, name: str) -> TrainingProfile | None:
    raise Retryable(f"profile {name} was not read within 2 seconds")


def fail_to_find(_namespace: str, _name: str) -> TrainingProfile | None:
    raise AssertionError("nothing has to be found")


def problems(review: MergedReview, operation: str = "CREATE", limits: JobLimits = DEFAULT_LIMITS) -> list[str]:
    return [str(problem) for problem in review_job(operation, review.old, review.new, limits).problems]


def test_a_job_is_reviewed_with_the_values_of_its_profile() -> None:
    # 12 GPUs fill nodes of 4, and none of 8.
    job = body(parallelism={"data": 3, "tensor": 4})
    job["spec"]["training"] |= {"globalBatchSize": 48}
    assert "gpusPerNode 8 does not divide" in " ".join(
        problems(merge_review(None, job | {"spec": job["spec"] | {"profile": None}}, fail_to_find))
    )
    assert problems(merge_review(None, job, profile_with(resources={"gpusPerNode": 4}))) == []


def test_a_job_without_a_profile_asks_for_none() -> None:
    job = body(profile=None)
    assert merge_review(None, job, fail_to_find) == MergedReview(None, job)


def test_an_update_keeps_to_what_the_job_has_from_its_profile() -> None:
    before = body({"phase": "Running", "profile": RECORDED})
    after = body(lifecycle={"suspend": True})
    merged = merge_review(before, after, fail_to_find)
    assert [found["spec"]["resources"]["gpusPerNode"] for found in (merged.old, merged.new)] == [4, 4]  # type: ignore[index]
    assert problems(merged, "UPDATE") == []


def test_a_new_job_brings_no_values_in_a_status_of_its_own() -> None:
    forged = body({"profile": RECORDED | {"values": {"resources": {"image": "evil:1"}}}})
    merged = merge_review(None, forged, profile_with(resources={"image": "shared:1"}))
    assert merged.new["spec"]["resources"]["image"] == "shared:1"  # type: ignore[index]


@pytest.mark.parametrize(
    ("find", "message"),
    [
        pytest.param(
            find_nothing, "team has no MoETrainingProfile shared, and the cluster has no Cluster", id="missing"
        ),
        pytest.param(find_too_late, "is not checked now: profile shared was not read within 2 seconds", id="late"),
    ],
)
def test_a_job_that_comes_before_its_profile_is_taken_with_a_warning(find: ProfileFinder, message: str) -> None:
    # What the profile may heal is no reason to refuse the job.
    review = merge_review(None, body(parallelism={"data": 3, "tensor": 4}), find)
    validation = review_unmerged_job(review, JobLimits(require_queue=True))
    assert validation.problems == ()
    [warning] = validation.warnings
    assert message in str(warning)


def test_its_own_names_are_held_to_the_limits_at_once() -> None:
    review = merge_review(None, body(resources={"serviceAccount": "admin"}), find_nothing)
    limits = JobLimits(service_accounts=("trainer",))
    assert "limits.serviceAccounts" in review_unmerged_job(review, limits).refusal_text
    kept = merge_review(
        review.new, body(resources={"serviceAccount": "admin"}, lifecycle={"suspend": True}), find_nothing
    )
    assert review_unmerged_job(kept, limits).problems == ()


@pytest.mark.parametrize("raw", [None, 7, [], {}, {"spec": 3}, {"spec": {"profile": 3}}, {"spec": {"profile": "a"}}])
def test_whatever_is_reviewed_raises_nothing(raw: object) -> None:
    review = merge_review(raw, raw, find_nothing)
    assert (review.missing is None) is (not isinstance(raw, dict) or raw.get("spec") != {"profile": "a"})
    review_unmerged_job(review, DEFAULT_LIMITS)
