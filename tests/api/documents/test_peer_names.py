"""Names of other trainers, each answered with a field that is there."""

from __future__ import annotations

from collections import Counter

import pytest

from api_server import job_body
from builders import SFT, merge_sections
from moejob_api.documents import parse_job
from moejob_api.documents.peer_names import derived_reason, peer_fields, peer_names
from moejob_api.job.fields import job_fields
from moejob_api.problems import InvalidSpec, Problem

PATHS = [path for path, _ in job_fields().walk_fields()]


def problems_of_job(**sections: object) -> tuple[Problem, ...]:
    """Everything that is said about an SFT job with sections laid over it."""
    with pytest.raises(InvalidSpec) as refused:
        parse_job(job_body(merge_sections(SFT, sections)))
    return refused.value.problems


def test_every_answer_is_a_field_of_a_job() -> None:
    several = [path for name in ("n", "beta", "betas") for path in peer_fields(name)]
    assert several
    assert [path for path in (*peer_names(), *several) if path not in PATHS] == []


def test_a_name_has_one_meaning() -> None:
    names = [name.replace("_", "") for names in peer_names().values() for name in names]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert [name for name in names if derived_reason(name)] == []


def test_no_name_hides_a_field_of_the_same_name() -> None:
    own_names = {path.rpartition(".")[2]: path for path in PATHS if path.startswith("spec.")}
    names = [(path, name) for path, names in peer_names().items() for name in names]
    assert [name for path, name in names if name in own_names and not path.endswith(name)] == ["steps"]


@pytest.mark.parametrize(
    ("section", "name", "answer"),
    [
        pytest.param("training", "lr", "it is spec.training.optimizer.learningRate here", id="lr"),
        pytest.param("parallelism", "tp", "it is spec.parallelism.tensor here", id="tp"),
        pytest.param("parallelism", "pp", "it is spec.parallelism.pipeline here", id="pp"),
        pytest.param("parallelism", "ep", "it is spec.parallelism.expert here", id="ep"),
        pytest.param("parallelism", "EP-size", "it is spec.parallelism.expert here", id="in another spelling"),
        pytest.param("training", "r", "it is spec.training.lora.rank here", id="r"),
        pytest.param("training", "lora_alpha", "it is spec.training.lora.alpha here", id="lora_alpha"),
        pytest.param("training", "batch_size", "it is spec.training.globalBatchSize here", id="batch_size"),
        pytest.param("training", "max_steps", 'did you mean "maxSteps"?', id="a spelling of ours"),
        pytest.param(
            "training",
            "beta",
            "it is spec.grpo.kl.coefficient or spec.training.optimizer.beta1 here",
            id="two meanings",
        ),
        pytest.param(
            "training",
            "gradient_accumulation_steps",
            "remove it: accumulation comes from spec.training.globalBatchSize and microBatchSize",
            id="what follows from others",
        ),
        pytest.param("resources", "nnodes", "remove it: nodes come from the layout", id="nodes"),
    ],
)
def test_a_job_with_the_name_of_another_trainer_is_told_ours(section: str, name: str, answer: str) -> None:
    [message] = map(str, problems_of_job(**{section: {name: 8}}))
    assert f'unknown field "{name}"; {answer}' in message


def test_a_required_field_under_another_name_is_one_problem() -> None:
    body = job_body(merge_sections(SFT, {}) | {"model": {"model_name_or_path": "a/b"}})
    with pytest.raises(InvalidSpec) as refused:
        parse_job(body)
    assert [problem.path for problem in refused.value.problems] == ["spec.model.model_name_or_path"]
