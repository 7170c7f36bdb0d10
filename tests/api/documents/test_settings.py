"""Fields that are set on a command line: typed as in a file, and refused in the words of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moejob_api.documents import read_job
from moejob_api.documents.settings import parse_setting, with_settings
from moejob_api.problems import InvalidSpec

TINY = (Path(__file__).parents[3] / "examples" / "tiny-sft.yaml").read_text()
TREE: dict[str, Any] = {"spec": {"data": {"train": [{"source": "a"}]}, "model": None}, "metadata": {"name": "job"}}


@pytest.mark.parametrize(
    ("text", "steps", "value"),
    [
        pytest.param("spec.training.maxSteps=20", ("spec", "training", "maxSteps"), 20, id="as refusals print it"),
        pytest.param("training.maxSteps=20", ("spec", "training", "maxSteps"), 20, id="without spec"),
        pytest.param("metadata.name=x", ("metadata", "name"), "x", id="not of spec"),
        pytest.param("data.train[0].source=x=y", ("spec", "data", "train", 0, "source"), "x=y", id="an item of a list"),
        pytest.param('a["b/c"]=1', ("spec", "a", "b/c"), 1, id="a name that needs quotes"),
        pytest.param("a=1e-5", ("spec", "a"), 1e-5, id="a number without a point"),
        pytest.param("a=true", ("spec", "a"), True, id="a switch"),
        pytest.param("a='20'", ("spec", "a"), "20", id="text in quotes"),
        pytest.param("a={b: [1, 2]}", ("spec", "a"), {"b": [1, 2]}, id="a mapping"),
        pytest.param("a=", ("spec", "a"), None, id="nothing"),
    ],
)
def test_a_setting_is_a_path_and_a_value_of_yaml(text: str, steps: tuple[str | int, ...], value: object) -> None:
    setting = parse_setting(text)
    assert (setting.steps, setting.value) == (steps, value)
    assert type(setting.value) is type(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("data.train[0].source=b", {"data": {"train": [{"source": "b"}]}, "model": None}, id="replaced"),
        pytest.param("data.train[1].source=b", {"data": {"train": [{"source": "a"}, {"source": "b"}]}, "model": None},
                     id="an item more"),
        pytest.param("model.source=b", {"data": TREE["spec"]["data"], "model": {"source": "b"}}, id="made on the way"),
        pytest.param("eval[0].source=b", TREE["spec"] | {"eval": [{"source": "b"}]}, id="a list made on the way"),
    ],
)  # fmt: skip
def test_a_field_is_set_and_nothing_beside_it(text: str, expected: object) -> None:
    before = json.dumps(TREE)
    assert with_settings(TREE, [parse_setting(text)]) == {"spec": expected, "metadata": TREE["metadata"]}
    assert json.dumps(TREE) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("training.maxStep=2", 'did you mean "maxSteps"?', id="a mistyped field"),
        pytest.param("trainin.maxSteps=2", 'did you mean "training"?', id="a mistyped section"),
        pytest.param("training.maxSteps=x", "spec.training.maxSteps: must be a whole number", id="another type"),
        pytest.param("training", "has no value", id="no value"),
        pytest.param("=2", "is no path", id="no path"),
        pytest.param("training..maxSteps=2", "is no path", id="a path with a hole"),
        pytest.param(".training.maxSteps=2", "is no path", id="a path that begins with a point"),
        pytest.param("data.train[9].source=x", "[1] adds one", id="an item far behind the last"),
        pytest.param("data.train.source=x", "name an item by its number, as spec.data.train[0].source", id="no number"),
        pytest.param("training[0]=x", "spec.training is a mapping, which has no [0]", id="a number in a mapping"),
        pytest.param("model.source.x=y", "which has no x", id="a field of text"),
        pytest.param("training.maxSteps=[", "YAML cannot read the value", id="a value that is no YAML"),
        pytest.param("training.maxSteps=1\n---\n2", "several documents", id="two values"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_the_fix(text: str, words: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        read_job(TINY, "job.yaml", [text])
    assert words in str(refused.value)


def test_settings_are_made_in_their_order() -> None:
    job = read_job(TINY, "job.yaml", ["training.maxSteps=3", "training.maxSteps=4", "metadata.name=other"])
    assert (job.spec.training.max_steps, job.metadata.name) == (4, "other")
