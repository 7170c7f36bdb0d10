"""Messages about a field: the fault, the value, and what to do, in the words of a person who writes YAML."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from api_server import job_body
from builders import GRPO, SFT, merge_sections
from field_cases import SPEC, Step, field_places, field_values, spec_with
from moejob_api.documents import parse_job
from moejob_api.documents.wording import MAX_PROBLEMS, PATTERNS
from moejob_api.job.fields import JobField, job_fields
from moejob_api.problems import InvalidSpec, Problem

PLACES = [pytest.param(place, field, id=".".join(map(str, place))) for place, field in field_places(SPEC)]
JARGON = re.compile(
    r"pydantic|Input should|Extra inputs|Field required|valid (integer|string|dict)|https?://|[_a-z]+=|None\\b"
)


def problems(body: Any) -> tuple[Problem, ...]:
    """Everything that is said about a body."""
    with pytest.raises(InvalidSpec) as refused:
        parse_job(body)
    return refused.value.problems


def read_messages(**sections: Any) -> list[str]:
    """Return what is said about an SFT job with sections laid over it."""
    return [str(problem) for problem in problems(job_body(merge_sections(SFT, sections)))]


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        pytest.param(
            {"parallelism": {"tensr": 8}},
            'spec.parallelism.tensr: unknown field "tensr"; did you mean "tensor"?',
            id="misspelt field",
        ),
        pytest.param(
            {"training": {"max_steps": 8}},
            'spec.training.max_steps: unknown field "max_steps"; did you mean "maxSteps"?',
            id="snake case",
        ),
        pytest.param(
            {"training": {"learningRate": 1e-5}},
            'spec.training.learningRate: unknown field "learningRate"; did you mean '
            "spec.training.optimizer.learningRate?",
            id="field of another section",
        ),
        pytest.param(
            {"storage": {"zzz": 1}},
            'spec.storage.zzz: unknown field "zzz"; the fields here are claimName, size, storageClass, accessModes, '
            "reclaim, mountPath",
            id="unknown field like no other",
        ),
        pytest.param(
            {"parallelism": {"tensor": "8"}},
            'spec.parallelism.tensor: must be a whole number from 1 to 65536, not the text "8"; remove the quotes',
            id="number in quotes",
        ),
        pytest.param(
            {"parallelism": {"tensor": "two"}},
            'spec.parallelism.tensor: must be a whole number from 1 to 65536, not the text "two"',
            id="number in words",
        ),
        pytest.param(
            {"parallelism": {"tensor": 0}},
            "spec.parallelism.tensor: must be a whole number from 1 to 65536, not 0",
            id="too small",
        ),
        pytest.param(
            {"parallelism": {"tensor": 10**30}},
            "spec.parallelism.tensor: must be a whole number from 1 to 65536, not 1e+30",
            id="far too large",
        ),
        pytest.param(
            {"parallelism": {"tensor": 1.5}},
            "spec.parallelism.tensor: must be a whole number from 1 to 65536, not 1.5",
            id="half",
        ),
        pytest.param(
            {"parallelism": {"sequence": "yes"}},
            'spec.parallelism.sequence: must be true or false, not the text "yes"; remove the quotes',
            id="switch in quotes",
        ),
        pytest.param(
            {"training": {"optimizer": {"learningRate": 0}}},
            "spec.training.optimizer.learningRate: must be a number above 0 and at most 10, not 0",
            id="open bound",
        ),
        pytest.param(
            {"training": {"optimizer": {"beta1": 1}}},
            "spec.training.optimizer.beta1: must be a number of at least 0 and below 1, not 1",
            id="half-open range",
        ),
        pytest.param(
            {"method": "sft"}, 'spec.method: must be one of SFT, GRPO, not "sft"; did you mean SFT?', id="choice"
        ),
        pytest.param({"method": True}, "spec.method: must be one of SFT, GRPO, not true", id="choice not text"),
        pytest.param(
            {"model": {"revision": 12}},
            "spec.model.revision: must be text of 1 to 253 characters, not 12; put it in quotes",
            id="text without quotes",
        ),
        pytest.param(
            {"model": {"revision": True}},
            "spec.model.revision: must be text of 1 to 253 characters, not true; put it in quotes: YAML reads yes, no, "
            "on, off, y and n as true or false",
            id="yes as text",
        ),
        pytest.param(
            {"model": {"revision": ""}},
            'spec.model.revision: must be text of 1 to 253 characters, not ""',
            id="empty text",
        ),
        pytest.param(
            {"model": {"revision": "x" * 300}},
            "spec.model.revision: must be text of 1 to 253 characters, not 300 characters",
            id="long text",
        ),
        pytest.param(
            {"storage": {"size": "4 TB"}},
            'spec.storage.size: must be a quantity such as 8, 500m or 16Gi, at most 32 characters, not "4 TB"',
            id="quantity",
        ),
        pytest.param(
            {"resources": {"cpu": 0.5}},
            "spec.resources.cpu: must be a quantity such as 8, 500m or 16Gi, at most 32 characters, not 0.5; put it in "
            "quotes",
            id="part of a core",
        ),
        pytest.param(
            {"storage": {"claimName": "My_Claim"}},
            'spec.storage.claimName: must be lower-case letters, digits, "-" and ".", with a letter or digit at both '
            'ends, at most 253 characters, not "My_Claim"',
            id="object name",
        ),
        pytest.param(
            {"data": {"train": {"source": "a", "format": "Chat"}}},
            'spec.data.train: must be a list of 1 to 64 items, not a mapping; begin every item with "- "',
            id="no list",
        ),
        pytest.param(
            {"data": {"train": []}},
            "spec.data.train: must be a list of 1 to 64 items, not a list of 0",
            id="empty list",
        ),
        pytest.param(
            {"data": {"train": [None]}},
            "spec.data.train[0]: must be a mapping with format, source, not empty",
            id="empty item",
        ),
        pytest.param(
            {"data": {"train": [{"source": "a"}]}},
            "spec.data.train[0].format: is missing; it must be one of Chat, PromptCompletion, Text, Prompts",
            id="missing in an item",
        ),
        pytest.param(
            {"data": {"train": [{"sorce": "a", "format": "Chat"}]}},
            'spec.data.train[0].sorce: unknown field "sorce"; did you mean "source"?',
            id="a misspelt field is not missing as well",
        ),
        pytest.param(
            {"lifecycle": "never"},
            'spec.lifecycle: must be a mapping with fields such as suspend, not the text "never"',
            id="text for a section",
        ),
        pytest.param(
            {"resources": {"nodeSelector": {"a.b/c": 1}}},
            'spec.resources.nodeSelector["a.b/c"]: must be text of at most 4096 characters, not 1; put it in quotes',
            id="label",
        ),
        pytest.param(
            {"resources": {"nodeSelector": ["a"]}},
            "spec.resources.nodeSelector: must be a mapping of at most 64 entries of names to text, not a list of 1",
            id="no mapping",
        ),
    ],
)
def test_a_mistake_is_one_sentence(sections: dict[str, Any], sentence: str) -> None:
    assert read_messages(**sections) == [sentence]


def test_every_mistake_is_told_at_once() -> None:
    assert [problem.path for problem in problems(job_body(GRPO | {"method": "X", "storage": {"size": []}}))] == [
        "spec.method",
        "spec.storage.size",
    ]


def test_a_missing_section_is_named() -> None:
    assert read_messages(storage=None) == [
        "spec.storage: is missing; it must be a mapping with fields such as claimName"
    ]


def test_a_flood_of_mistakes_is_cut() -> None:
    found = problems(job_body(SFT | {f"field{index}" * 20: 1 for index in range(1000)}))
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1].message == "there are more problems; fix these first"


def test_a_long_value_is_cut() -> None:
    assert len(read_messages(model={"dtype": "x" * 10_000})[0]) < 200


@pytest.mark.parametrize(("place", "field"), PLACES)
def test_no_refusal_speaks_pydantic_and_all_name_their_field(place: tuple[Step, ...], field: JobField) -> None:
    path = "spec" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    for value, is_fine in field_values(field):
        if not is_fine:
            for problem in problems(job_body(spec_with(place, value))):
                assert problem.path.startswith(path), json.dumps(value)
                assert not JARGON.search(problem.message), problem.message
                assert "\n" not in problem.message


def test_every_pattern_has_words() -> None:
    patterns = {field.pattern for _, field in job_fields().walk_fields() if field.pattern is not None}
    assert patterns == PATTERNS.keys()
