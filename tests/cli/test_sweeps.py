"""A setting with several values makes a job of each combination, with a name that says the values."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from cli.runs import JOB
from moejob_api.job import MAX_NAME
from moejob_api.problems import InvalidSpec
from moejob_cli.sweeps import MOST_JOBS, SweptJob, expand_sweep, is_sweep, read_sweep, split_values


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(JOB))
    return str(path)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5", ["1e-5"]),
        ("1e-5,3e-5", ["1e-5", "3e-5"]),
        ("", [""]),
        (",4", ["", "4"]),
        ("[1, 2]", ["[1, 2]"]),
        ("[1, 2],[3]", ["[1, 2]", "[3]"]),
        ("{rank: 8, alpha: 16},{rank: 16, targets: [a, b]}", ["{rank: 8, alpha: 16}", "{rank: 16, targets: [a, b]}"]),
        ('"a,b"', ['"a,b"']),
        ("'a,b', c", ["'a,b'", " c"]),
        ("it's,fine", ["it's", "fine"]),
    ],
)
def test_values_are_divided_where_yaml_needs_no_comma(text: str, values: list[str]) -> None:
    assert split_values(text) == values
    assert is_sweep([f"a.b={text}"]) is (len(values) > 1)


def test_every_combination_is_a_job_and_single_values_are_in_all() -> None:
    settings = ["training.optimizer.learningRate=1e-5,3e-5", "training.maxSteps=9", "training.seed=7,8"]
    assert expand_sweep(settings) == (
        SweptJob(("training.optimizer.learningRate=1e-5", "training.maxSteps=9", "training.seed=7"), "lr-1e-5-seed-7"),
        SweptJob(("training.optimizer.learningRate=1e-5", "training.maxSteps=9", "training.seed=8"), "lr-1e-5-seed-8"),
        SweptJob(("training.optimizer.learningRate=3e-5", "training.maxSteps=9", "training.seed=7"), "lr-3e-5-seed-7"),
        SweptJob(("training.optimizer.learningRate=3e-5", "training.maxSteps=9", "training.seed=8"), "lr-3e-5-seed-8"),
    )


def test_jobs_have_their_values_and_names(file: str) -> None:
    jobs = read_sweep(file, ["training.optimizer.learningRate=0.1,3e-5", "metadata.name=tiny"])
    assert [(job.metadata.name, job.spec.training.optimizer.learning_rate) for job in jobs] == [
        ("tiny-lr-0-1", 0.1),
        ("tiny-lr-3e-5", 3e-5),
    ]


def test_an_empty_value_removes_the_field_in_one_of_the_jobs(file: str) -> None:
    without_lora, with_lora = read_sweep(file, ["training.lora=,{rank: 4}"])
    assert (without_lora.metadata.name, without_lora.spec.training.lora) == ("small-lora-none", None)
    assert with_lora.metadata.name == "small-lora-rank-4"
    assert with_lora.spec.training.lora is not None


def test_a_job_from_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(JOB).encode())))
    assert [job.spec.training.max_steps for job in read_sweep("-", ["training.maxSteps=1,2"])] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["training.seed=1, 1"], "two jobs would be named small-seed-1"),
        (["metadata.name=a,b"], "the names of a sweep are made of its values"),
        ([f"training.seed={','.join(map(str, range(MOST_JOBS + 1)))}"], f"makes {MOST_JOBS + 1} jobs"),
        (["metadata.name=" + "n" * 31, "data.maxLength=64,128888"], "set metadata.name to 30 characters or less"),
        (["model.source=" + "m" * MAX_NAME + ",b"], "sweep fewer fields"),
    ],
)
def test_a_sweep_without_distinct_names_is_refused(file: str, settings: list[str], words: str) -> None:
    with pytest.raises(InvalidSpec, match="--set") as refused:
        read_sweep(file, settings)
    assert words in str(refused.value)
