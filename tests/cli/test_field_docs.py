"""`moejob explain`, and the hint that leads from a refusal to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from moejob_api.job.fields import job_fields
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_cli.app import app
from moejob_cli.field_docs import explain_field, explain_hint

WRONG = Path(__file__).parents[2] / "examples" / "wrong" / "deepseek-v3-sft-64gpu.yaml"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param("spec.training.optimizer.learningRate", "spec.training.optimizer.learningRate", id="path"),
        pytest.param("training.optimizer.learningRate", "spec.training.optimizer.learningRate", id="below spec"),
        pytest.param("lr", "spec.training.optimizer.learningRate", id="name of another trainer"),
        pytest.param("spec.data.train[0].format", "spec.data.train[0].format", id="place in a list"),
        pytest.param("status.phase", "status.phase", id="status"),
    ],
)
def test_a_field_is_found(name: str, path: str) -> None:
    assert explain_field(name).splitlines()[0] == path


def test_a_field_says_what_it_means_and_takes_and_what_is_in_it() -> None:
    text = explain_field("training.lora")
    lora = job_fields().fields["spec"].fields["training"].fields["lora"]
    assert lora.description in text
    assert "  takes    a mapping with fields such as rank" in text
    assert all(f".{name} " in text and inner.description in text for name, inner in lora.fields.items())
    assert "  default  1e-05" in explain_field("lr")
    assert "  others   lora_alpha" in explain_field("lora_alpha")


def test_a_general_name_is_explained_by_each_field_that_it_may_mean() -> None:
    text = explain_field("beta")
    assert "spec.grpo.kl.coefficient\n" in text
    assert "spec.training.optimizer.beta1\n" in text


def test_every_field_can_be_explained() -> None:
    paths = [path for path, field in job_fields().walk_fields() if path.startswith("spec.") and "[]" not in path]
    assert len(paths) > 200
    assert [path for path in paths if explain_field(path).splitlines()[0] != path] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("training.maxStep", 'unknown field "maxStep"; did you mean "maxSteps"?', id="misspelt"),
        pytest.param("data.train.sorce", 'unknown field "sorce"; did you mean "source"?', id="in an item of a list"),
        pytest.param("nonsense", 'unknown field "nonsense"', id="nothing like it"),
    ],
)
def test_a_field_that_is_not_there_is_answered_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        explain_field(name)
    assert said in str(refused.value)


def test_a_hint_names_the_part_of_a_path_that_is_a_field() -> None:
    problems = [Problem(Rule.UNREADABLE, "", "no file"), Problem(Rule.FIELD, "spec.training.lr", "unknown")]
    assert explain_hint(problems) == "`moejob explain spec.training` says what it takes"
    assert explain_hint(problems[:1]) is None


def test_each_command_that_refuses_a_job_leads_to_the_field(tmp_path: Path) -> None:
    misspelt = tmp_path / "job.yaml"
    misspelt.write_text(WRONG.read_text().replace("tensor:", "tp:").replace("expert:", "ep:"))
    for command in ("validate", "plan", "run"):
        answer = CliRunner().invoke(app, [command, str(WRONG)])
        assert answer.exit_code == 1
        assert "`moejob explain spec." in answer.stderr
    answer = CliRunner().invoke(app, ["validate", str(misspelt)])
    assert answer.exit_code == 2
    assert "`moejob explain spec.parallelism` says what it takes" in answer.stderr


def test_the_command_prints_it() -> None:
    answer = CliRunner().invoke(app, ["explain", "lr"])
    assert (answer.exit_code, answer.output) == (0, explain_field("lr") + "\n")
