"""Every field of a job, with values inside and outside its bounds: the API server and we must give the same answer."""

from __future__ import annotations

import copy
import json

import pytest

from api_server import Answer, ApiServer, Body, job_body
from field_cases import SPEC, Step, field_places, field_values, spec_with
from moejob_api.crd.policy import SEPARATOR, refusal_message
from moejob_api.documents import parse_job
from moejob_api.job import MoETrainingJob
from moejob_api.job.fields import JobField
from moejob_api.problems import InvalidSpec
from moejob_api.rules.object_rules import OBJECT_RULES

PLACES = [pytest.param(place, field, id=".".join(map(str, place))) for place, field in field_places(SPEC)]


@pytest.mark.parametrize(("place", "field"), PLACES)
def test_a_value_is_taken_or_refused_alike(api_server: ApiServer, place: tuple[Step, ...], field: JobField) -> None:
    for value, is_fine in field_values(field):
        body = job_body(spec_with(place, value))
        [answer] = api_server.create_objects(copy.deepcopy(body))
        ours = _read(body)
        said = f"{json.dumps(value)[:200]}: {ours} / {answer.errors} {answer.unknown}"
        assert (isinstance(ours, MoETrainingJob), _accepts(answer)) == (is_fine, is_fine), said
        if isinstance(ours, MoETrainingJob):
            assert answer.stored["spec"] == ours.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        else:
            assert _same_place(ours, answer), said


@pytest.mark.parametrize(("place", "field"), [p for p in PLACES if isinstance(p.values[0][-1], str)])  # type: ignore[index]
def test_null_means_what_it_means_to_the_api_server(
    api_server: ApiServer, place: tuple[Step, ...], field: JobField
) -> None:
    body = job_body(spec_with(place, None))
    [answer] = api_server.create_objects(copy.deepcopy(body))
    ours = _read(body)
    assert isinstance(ours, MoETrainingJob) == _accepts(answer), (ours, answer.errors)
    if isinstance(ours, MoETrainingJob):
        assert answer.stored["spec"] == ours.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    else:
        assert field.description


def _read(body: Body) -> MoETrainingJob | InvalidSpec:
    try:
        return parse_job(body)
    except InvalidSpec as refused:
        return refused


def _same_place(ours: InvalidSpec, theirs: Answer) -> bool:
    """Return whether both point at the same field; at a map where only we can point at one of its names."""
    named = {*theirs.unknown, *(error.split(": ")[0] for error in _field_errors(theirs))}
    return any(
        problem.path == name or problem.path.startswith(f"{name}.") for problem in ours.problems for name in named
    )


def _accepts(answer: Answer) -> bool:
    return not _field_errors(answer) and not answer.unknown


def _field_errors(answer: Answer) -> list[str]:
    """Return what is wrong with single fields; what the rules say about the whole is tested elsewhere."""
    return [error for error in answer.errors if not _is_of_rules(error)]


def _is_of_rules(error: str) -> bool:
    """Return whether it is the policy's and names broken rules; an expression that failed names none."""
    if not error.startswith("policy: "):
        return False
    left = error.removeprefix("policy: ")
    for rule in OBJECT_RULES:
        left = left.replace(refusal_message(rule), "")
    return not left.replace(SEPARATOR, "")
