"""A job that begins with another's adapters has just those, and is refused where they would mean something else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from builders import spec
from model_configs import config as small_config
from moejob_api.models.shape import Family
from moejob_trainer.checkpoints.adapter_compatibility import AdapterFacts, adapter_facts, refuse_other_adapters
from moejob_trainer.data import tiny
from moejob_trainer.errors import BadConfiguration
from trainer.runs import Runs

LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "targets": ["QueryKeyValue", "ExpertGateUp", "ExpertDown"]}
RATE = {"learningRate": 2e-3}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path / "volume")
    yield started
    started.close()


def read_export(runs: Runs, job: str) -> dict[str, Tensor]:
    return load_file(runs.volume / job / "export" / "adapter_model.safetensors")


def read_saved_state(runs: Runs, job: str) -> set[str]:
    """Return the state in the newest checkpoint of a job."""
    newest = max((runs.volume / job / "checkpoints").iterdir())
    names = set()
    for path in newest.glob("state-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= {box["name"] for box in json.loads(file.metadata()["boxes"])}
    return names


def test_the_adapters_of_another_job_go_on_in_another_layout_and_again_from_there(runs: Runs) -> None:
    training = {"lora": LORA, "maxSteps": 2, "optimizer": RATE}
    saving: dict[str, Any] = {"exportHuggingFace": True, "async": False}
    runs.run_to_end("first", training=training, checkpoint=saving)
    learned = read_export(runs, "first")
    # An expert without tokens has learned nothing.
    assert all(tensor.abs().max() > 0 for name, tensor in learned.items() if "q_proj" in name)
    # At such a rate, what is exported is what it began with.
    still = training | {"maxSteps": 1, "optimizer": {"learningRate": 1e-30}}
    two: dict[str, Any] = {"parallelism": {"data": 2}, "training": still}
    for job, other in (("second", "first"), ("third", "second")):
        runs.run_to_end(job, **two, checkpoint=saving | {"resumeFrom": other})
        found = read_export(runs, job)
        assert found.keys() == learned.keys()
        assert all((found[name] - tensor).abs().max() < 1e-20 for name, tensor in learned.items())
        # Beside adapters that stand beside published weights, there is nothing to save but adapters.
        assert {name for name in read_saved_state(runs, job) if not name.endswith(("lora_a", "lora_b"))} == set()
    # The same job again takes its own checkpoint, whatever it began with.
    runs.run_to_end("second", attempt=2, **two, checkpoint=saving | {"resumeFrom": "first"})


def test_adapters_on_weights_that_another_job_trained_are_saved_with_them(runs: Runs) -> None:
    training = {"maxSteps": 2, "optimizer": RATE}
    runs.run_to_end("whole", training=training)
    runs.run_to_end("adapters", training=training | {"lora": LORA}, checkpoint={"resumeFrom": "whole"})
    assert "embedding.weight" in read_saved_state(runs, "adapters")
    # Also where adapters of adapters begin there, and the same job continues.
    more = training | {"lora": LORA}
    runs.run_to_end("more", training=more, checkpoint={"resumeFrom": "adapters"})
    assert "embedding.weight" in read_saved_state(runs, "more")


def test_adapters_on_weights_that_another_job_trained_are_not_held_against_the_published_ones(runs: Runs) -> None:
    folder = runs.volume / "published"
    settings = small_config(Family.QWEN3_MOE, vocab_size=512, initializer_range=0.1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    sections: dict[str, Any] = {"model": {"source": str(folder), "dtype": "float32"}}
    training, saving = {"maxSteps": 2, "optimizer": RATE}, {"exportHuggingFace": True, "async": False}
    runs.run_to_end("whole", **sections, training=training, checkpoint=saving)
    adapting = training | {"lora": LORA}
    runs.run_to_end("adapters", **sections, training=adapting, checkpoint=saving | {"resumeFrom": "whole"})
    assert read_export(runs, "adapters")


def of(lora: dict[str, Any] | None = None, *, has_weights: bool = True, **sections: Any) -> AdapterFacts:
    training = {} if lora is None else {"training": {"lora": lora}}
    return adapter_facts(spec(**training, **sections), has_weights=has_weights)


ADAPTERS = of(LORA)


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        pytest.param(ADAPTERS, of(), "for want of training.lora", id="none here"),
        pytest.param(ADAPTERS, of(LORA | {"rank": 8}), "rank 4 and training.lora.rank of this job is 8", id="rank"),
        pytest.param(ADAPTERS, of(LORA | {"alpha": 4.0}), "alpha 8 and .*is 4; change it to 8", id="alpha"),
        pytest.param(
            ADAPTERS,
            of(LORA | {"targets": ["QueryKeyValue"]}),
            "targets ExpertDown, ExpertGateUp, QueryKeyValue and .* is QueryKeyValue",
            id="targets",
        ),
        pytest.param(
            ADAPTERS,
            of(LORA, model={"source": "another/model"}),
            "this job trains beside those of another/model",
            id="another model",
        ),
        pytest.param(
            of(LORA, has_weights=False),
            adapter_facts(spec(training={"lora": LORA, "seed": 7}), has_weights=False),
            "made from seed 42, and .* made from seed 7",
            id="another seed",
        ),
    ],
)
def test_adapters_that_would_mean_something_else_are_refused(
    theirs: AdapterFacts, ours: AdapterFacts, said: str
) -> None:
    with pytest.raises(BadConfiguration, match=said):
        refuse_other_adapters(theirs, ours, Path("/runs/first/checkpoints/step-2"))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param(ADAPTERS, of(LORA | {"dropout": 0.1}), id="another dropout"),
        pytest.param(of(), ADAPTERS, id="new adapters on trained weights"),
        pytest.param(of(), of(), id="no adapters"),
        pytest.param(
            of(LORA, checkpoint={"resumeFrom": "full"}),
            of(LORA, model={"source": "another/model"}),
            id="the weights come along",
        ),
    ],
)
def test_what_another_job_left_is_taken_where_it_means_the_same(theirs: AdapterFacts, ours: AdapterFacts) -> None:
    refuse_other_adapters(theirs, ours, Path("/runs/first/checkpoints/step-2"))
