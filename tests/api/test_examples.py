"""Every example is planned: those to copy are accepted, the wrong ones refused with the words that lie beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moejob_api.documents import read_file
from moejob_api.models.shape import ModelShape
from moejob_api.models.sources import model_shape
from moejob_api.planner.plan import Plan, plan_job

EXAMPLES = Path(__file__).parents[2] / "examples"
RIGHT = sorted(EXAMPLES.glob("*.yaml"))
WRONG = sorted(EXAMPLES.glob("wrong/*.yaml"))


@pytest.mark.parametrize("file", RIGHT, ids=lambda file: file.stem)
def test_an_example_to_copy_is_accepted(file: Path) -> None:
    assert planned(file).problems == ()


@pytest.mark.parametrize("file", WRONG, ids=lambda file: file.stem)
def test_a_wrong_example_is_refused_in_the_words_beside_it(file: Path) -> None:
    said = "".join(f"{problem}\n" for problem in planned(file).problems)
    assert said == file.with_suffix(".txt").read_text()


@pytest.mark.parametrize("file", [f for f in RIGHT if "gpu" in f.stem], ids=lambda file: file.stem)
def test_an_example_takes_the_gpus_its_name_says(file: Path) -> None:
    layout = planned(file).layout
    assert layout is not None
    assert file.stem.endswith(f"-{layout.gpus}gpu")


def test_there_are_examples_of_both_kinds() -> None:
    assert {"tiny-sft", "tiny-grpo"} <= {file.stem for file in RIGHT}
    assert len(WRONG) >= 9


def planned(file: Path) -> Plan:
    """The plan of an example; its model has to be one that comes with moejob, or what another example exports."""
    job = read_file(str(file))
    source = job.spec.model.source
    if exported := re.fullmatch(r"\./runs/(.+)/export", source):
        source = read_file(str(EXAMPLES / f"{exported[1]}.yaml")).spec.model.source
    shape = model_shape(source, environment={})
    assert isinstance(shape, ModelShape)
    return plan_job(job.spec, shape)
