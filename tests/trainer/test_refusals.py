"""Every refusal of the trainer is an assertion of the gate, or needs what `plan` and the webhook cannot see.

All places in the trainer's code that refuse are found in its sources. Each is either decided by the job and its
config.json, and then a job that would get there is refused by the plan, in the same words that the webhook says; or it
is listed with what decides it. A new place that is neither fails here.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import moejob_trainer
from builders import spec
from model_configs import config as small_config
from moejob_api.derived import trained_shape
from moejob_api.documents.reading import parse_job
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family
from moejob_api.models.trainable import UNADAPTED_EXPERTS
from moejob_api.planner.plan import plan_job
from moejob_api.problems import InvalidSpec
from moejob_trainer.conversion.adapters import build_adapter_table
from moejob_trainer.conversion.families import ROWS

SOURCES = Path(moejob_trainer.__file__).parent
REFUSALS = {
    "BadConfiguration",
    "BadData",
    "InvalidSpec",
    "NotImplementedError",
    "ValueError",
    "model_error",
    "unusable_checkpoint",
}


@dataclass(frozen=True)
class Job:
    """A job that the trainer would refuse there, and what the plan says of it."""

    says: str
    sections: Mapping[str, Any] = field(default_factory=dict)
    family: Family = Family.QWEN3_MOE
    config: Mapping[str, Any] = field(default_factory=dict)

    def refusals(self) -> list[str]:
        """Return what the gate says: of the config first, then of the job on it."""
        job = spec(**self.sections)
        try:
            shape = shape_of(small_config(self.family, **self.config), "config.json")
        except InvalidSpec as refused:
            return [problem.message for problem in refused.problems]
        return [problem.message for problem in plan_job(job, trained_shape(shape, job)).problems]


GRPO = {"method": "GRPO", "grpo": {"rewards": [{"name": "math"}]}}
PROMPTS = {"train": [{"source": "/a.jsonl", "format": "Prompts"}]}
# Decided by the job and its config.json. The place: file, and the function that refuses.
OF_THE_JOB: Mapping[str, tuple[Job, ...]] = {
    "conversion/adapters.py:_adapter_pieces": (
        Job(
            "keeps all experts in one tensor",
            {"training": {"lora": {"targets": ["ExpertGateUp", "ExpertDown"]}}},
            Family.GPT_OSS,
        ),
    ),
    "data/encoding.py:build_encoder": (Job("SFT needs answers", {"data": PROMPTS}),),
    "data/packing.py:_slot_length": (
        Job("cannot hold one sequence", {"training": {"dynamicBatchTokens": 64}, "data": {"maxLength": 128}}),
    ),
    "data/prompts.py:refuse_unusable_prompts": (
        Job("GRPO generates the answers", GRPO | {"data": {"train": [{"source": "/a", "format": "Chat"}]}}),
        Job(
            "leaves no token of data.maxLength 64",
            GRPO | {"data": PROMPTS | {"maxLength": 64}, "grpo": {"maxNewTokens": 64, "rewards": [{"name": "math"}]}},
        ),
        Job(
            "evalAnswers.maxNewTokens 64 leaves no token",
            {
                "data": {"eval": PROMPTS["train"], "maxLength": 64},
                "training": {"evalAnswers": {"maxNewTokens": 64}},
            },
        ),
    ),
    "data/shapes.py:_question_record": (
        Job("cannot become format Text", {"data": {"train": [{"source": "/a", "format": "Text", "shape": "Alpaca"}]}}),
    ),
    "data/tokenizers.py:_source_path": (
        Job("pvc://models/../other does not name a path", {"model": {"source": "pvc://models/../other"}}),
        Job("pvc:///a does not name a path", {"data": {"eval": [{"source": "pvc:///a", "format": "Chat"}]}}),
        Job("pvc://.. does not name a path", {"checkpoint": {"resumeFrom": "pvc://.."}}),
    ),
    "layers/delta_rule.py:convolve_documents": (
        Job("carries a state along it", {"parallelism": {"context": 2}}, Family.QWEN3_NEXT),
    ),
    "layers/routing.py:Routing.__post_init__": (
        Job("n_group", family=Family.DEEPSEEK_V3, config={"n_group": 3}),
        Job("num_experts_per_tok", config={"num_experts_per_tok": 99}),
    ),
    "megatron/training_engine.py:MegatronTrainingEngine._move_selection_bias": (
        Job("ExpertBias", {"moe": {"balancing": "ExpertBias"}}, Family.MIXTRAL),
    ),
    "megatron/stages.py:stage_places": (
        Job("layers do not divide over 2", {"parallelism": {"pipeline": 2}}, config={"num_hidden_layers": 3}),
    ),
    "model/architecture.py:_make_scaling": (
        Job("rope", config={"rope_parameters": {"rope_type": "unheard", "rope_theta": 1e4}}),
    ),
    "model/linear.py:TensorShare.local_size": (
        Job("6 attention heads", {"parallelism": {"tensor": 4}}, config={"num_attention_heads": 6}),
    ),
    "model/moe_layer.py:_divide_exactly": (
        Job("expert 3 does not divide", {"parallelism": {"expert": 3}, "resources": {"gpusPerNode": 3}}),
    ),
    "model/parameters.py:_is_cut": (
        Job("rank 3 does not divide over tensor 2", {"parallelism": {"tensor": 2}, "training": {"lora": {"rank": 3}}}),
    ),
    "rewards/built_in.py:built_in_score": (Job("no source", GRPO | {"data": PROMPTS, "grpo": {"rewards": [{}]}}),),
}
# Decided by something that no gate sees. What a place begins with, and what that is; the longest counts.
KNOWN_LATER: Mapping[str, str] = {
    "checkpoint_export/": "what `moejob export` was asked for, and the run that it finds",
    "checkpoints/": "the volume, and what earlier runs left there",
    "conversion/": "the files of the weights",
    "data/blending.py": "the data of the run that is resumed",
    "data/chat_template.py": "the tokenizer's template and the records",
    "data/conversations.py": "records",
    "data/encoding.py": "the tokenizer and the records",
    "data/hub.py": "the hub",
    "data/links.py": "links in a folder",
    "data/packing.py": "internal: documents that batches are made of",
    "data/preparation.py": "records",
    "data/prompt_loader.py": "the data of the run that is resumed",
    "data/prompts.py": "prompts, as long as the tokenizer makes them",
    "data/records.py": "records",
    "data/shapes.py": "records",
    "data/library.py": "files of data",
    "data/sources.py": "files of data",
    "data/stream.py": "internal: asked for without an end",
    "data/tokenizers.py": "the tokenizer's files, and claims that are mounted",
    "distributed/": "internal: messages of ranks",
    "training/micro_batch.py": "internal: documents that batches are made of",
    "interchange/": "what `moejob import` was asked for, and the files that it finds",
    "launcher/": "the environment of a pod",
    "layers/attention.py": "internal: groups of two kinds",
    "layers/documents.py": "internal: documents that batches are made of",
    "megatron/training_engine.py:MegatronTrainingEngine._agree_on_names": "internal: the loss",
    "megatron/training_engine.py:MegatronTrainingEngine._sum_totals": "weights of the records",
    "megatron/training_engine.py:MegatronTrainingEngine.compute_reference_outputs": "internal: the objective",
    "megatron/weights.py": "internal: the table of a family",
    "megatron_models/": "Megatron-Bridge and Megatron-Core as they are installed, which the gate never imports",
    "model/architecture.py:_make_routing": "internal: the table of a family",
    "model/architecture.py:_read_hf_config": "Transformers, which the gate never imports",
    "model/layer.py:moe_settings": "internal: the table of a family",
    "model/parameters.py:Coordinates.rank_and_size": "internal: groups of a layout",
    "model/pretrained.py": "the folder of the model",
    "model_check/": "the weights, computed with",
    "objectives/": "answers and rewards",
    "rewards/scorer.py": "modules, services and what they return",
    "rollouts/": "internal: which rank proves",
    "runtime/channel.py": "internal: frames of launchers",
    "runtime/devices.py": "GPUs of the machine",
    "runtime/json_files.py": "files of models",
    "evaluation/answers.py": "records of prompts",
    "setup/grpo.py": "internal: the method",
    "setup/model.py": "the gate itself, asked again beside the model's files",
    "setup/prompts.py:load_prompts": "internal: the method",
    "data/end_tokens.py": "the folder of the model",
    "rewards/first_completion.py": "what rewards return for a first answer",
    "runtime/megatron_process.py": "the files of a checkpoint of Megatron",
    "setup/rewards.py": "internal: rank 0 has the prompts",
    "setup/rollouts.py:_build_probe_terms": "internal: the method",
    "setup/rollouts.py:_probe_tokens.read": "prompts, as long as the tokenizer makes them",
    "setup/rollouts.py:_engine_rendezvous": "internal: the method",
    "setup/rollouts.py:_read_engine_urls": "the environment of a pod",
}


def places() -> set[str]:
    """Return every place of the trainer's code that refuses."""
    return {
        f"{path.relative_to(SOURCES).as_posix()}:{function}"
        for path in SOURCES.rglob("*.py")
        for function in _raising(ast.parse(path.read_text()), "")
    }


def _raising(node: ast.AST, owner: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = owner
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{owner}.{child.name}".lstrip(".")
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call) and _name(child.exc.func) in REFUSALS:
            yield owner
        yield from _raising(child, inner)


def _name(called: ast.expr) -> str:
    return called.id if isinstance(called, ast.Name) else ""


def test_every_refusal_is_the_gates_or_says_what_decides_it() -> None:
    unexplained = [place for place in places() if place not in OF_THE_JOB and not _later(place)]
    assert unexplained == [], "a job for OF_THE_JOB, or what decides it for KNOWN_LATER"


def test_no_explanation_is_left_of_a_refusal_that_is_gone() -> None:
    found = places()
    assert [place for place in OF_THE_JOB if place not in found] == []
    assert [known for known in KNOWN_LATER if not any(place.startswith(known) for place in found)] == []


def _later(place: str) -> bool:
    return any(place.startswith(known) for known in KNOWN_LATER)


@pytest.mark.parametrize(
    "job", [pytest.param(job, id=f"{place} {job.says}") for place, jobs in OF_THE_JOB.items() for job in jobs]
)
def test_what_the_trainer_would_refuse_the_plan_refuses_first(job: Job) -> None:
    assert [said for said in job.refusals() if job.says in said] != []


def test_a_job_that_resumes_from_itself_is_refused_where_its_name_is_known() -> None:
    given = spec().model_dump(mode="json", by_alias=True, exclude_none=True) | {"checkpoint": {"resumeFrom": "one"}}
    body = {"apiVersion": "moejob.dev/v1alpha1", "kind": "MoETrainingJob", "spec": given}
    with pytest.raises(InvalidSpec, match="one is this job itself"):
        parse_job(body | {"metadata": {"name": "one"}})
    assert parse_job(body | {"metadata": {"name": "two"}}).spec.checkpoint.resume_from == "one"


# --- the trainer's tables are the gate's ----------------------------------------------------------------------------


def test_every_family_that_the_gate_reads_has_a_table_of_weights() -> None:
    assert set(Family) == set(ROWS)


@pytest.mark.parametrize("family", sorted(ROWS))
def test_adapters_that_cannot_be_published_are_those_that_the_gate_refuses(family: Family) -> None:
    job = Job("", {"training": {"lora": {"rank": 4, "targets": ["ExpertGateUp", "ExpertDown"]}}}, family)
    shape = shape_of(small_config(family), "config.json")
    lora = spec(**job.sections).training.lora
    assert lora is not None
    made = _made(lambda: build_adapter_table(shape, lora))
    assert made is (family not in UNADAPTED_EXPERTS)
    if shape.experts is not None:
        assert any("targets" in said or "one tensor" in said for said in job.refusals()) is not made


def _made(make: Callable[[], object]) -> bool:
    try:
        make()
    except InvalidSpec:
        return False
    return True
