"""The spec of a job is read once for each generation."""

from __future__ import annotations

from typing import Any

from builders import SFT
from moejob_api.documents import parse_job
from moejob_operator.cluster import JobKey
from moejob_operator.expiring_cache import ExpiringCache
from moejob_operator.observed.jobs import ParsedSpec, SpecCache, read_job


def body(generation: int, **metadata: Any) -> dict[str, Any]:
    about = {"name": "job", "namespace": "default", "uid": "1", "generation": generation, **metadata}
    return {"apiVersion": "moejob.dev/v1alpha1", "kind": "MoETrainingJob", "metadata": about, "spec": SFT}


def test_a_generation_is_read_once() -> None:
    specs = SpecCache()
    assert read_job(body(1), specs).spec is read_job(body(1, resourceVersion="2"), specs).spec is not None


def test_a_changed_spec_is_read_anew() -> None:
    specs = SpecCache()
    read_job(body(1), specs)
    changed = body(2) | {"spec": SFT | {"lifecycle": {"suspend": True}}}
    found = read_job(changed, specs).spec
    assert found is not None
    assert found.lifecycle.suspend


def test_jobs_of_one_name_are_told_apart_by_their_uid() -> None:
    specs = SpecCache()
    assert read_job(body(1), specs).problems == ()
    assert read_job(body(1, uid="2") | {"spec": {}}, specs).problems != ()


def test_a_job_that_is_gone_is_forgotten() -> None:
    known: ExpiringCache[ParsedSpec] = ExpiringCache()
    specs = SpecCache(known)
    read_job(body(1), specs)
    read_job(body(2), specs)
    assert len(known) == 1
    specs.forget(JobKey("default", "job"))
    assert len(known) == 0


def test_no_more_is_remembered_than_fits() -> None:
    specs = SpecCache(ExpiringCache(most=1))
    first = read_job(body(1), specs).spec
    read_job(body(1, name="other"), specs)
    assert read_job(body(1), specs).spec is not first


def test_jobs_hold_alike_sections_once_and_others_apart() -> None:
    specs = SpecCache()
    first = read_job(body(1), specs).spec
    other = read_job(body(1, name="other", uid="2") | {"spec": SFT | {"training": {"maxSteps": 7}}}, specs).spec
    assert first is not None
    assert other is not None
    assert other.data is first.data
    assert other.training.max_steps == 7
    assert first.training == parse_job(body(1)).spec.training


def test_what_is_held_once_is_what_was_read() -> None:
    specs = SpecCache()
    read_job(body(1), specs)
    found, alone = read_job(body(1, name="other", uid="2"), specs).spec, parse_job(body(1)).spec
    assert found == alone
    assert found.model_dump_json(exclude_unset=True) == alone.model_dump_json(exclude_unset=True)
