"""Parts of the learning benchmark: jobs that plan accepts, models that engines can divide, curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.grpo_learning.curves import draw_curves, read_lines, smooth, table_of
from benchmarks.grpo_learning.jobs import TEMPERATURE
from benchmarks.grpo_learning.models import write_divisible
from benchmarks.grpo_learning.tasks import write_task
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gpu.grpo_cases import CASES, case_job
from moejob_api.job import Spec
from moejob_api.models.families import shape_of
from moejob_api.planner.plan import plan_job
from real_models import DENSE, MIXTRAL, QWEN3_MOE

# Of SmolLM2-135M, whose heads no engine of two GPUs can divide.
SMOL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
NORMED = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1536}
CONFIGS = {
    DENSE: SMOL,
    MIXTRAL: SMOL | {"model_type": "mixtral"} | EXPERTS,
    QWEN3_MOE: SMOL | NORMED | {"head_dim": 64, "norm_topk_prob": True},
}

SPEEDS = ("generationTokensPerSecond", "trainingTokensPerSecond", "seconds")
PHASES = ("syncSeconds", "generateSeconds", "releaseSeconds", "outputsSeconds", "learnSeconds")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gpu_type", ["H100", "H200"])
def test_jobs_for_gpus_are_accepted(name: str, gpu_type: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = CONFIGS[case.model]
    if case.engine_tensor > 1:
        config = config | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    job = case_job(case, tmp_path / "model", tmp_path, gpu_type)
    spec = Spec.model_validate_json(json.dumps(job["spec"]))
    assert spec.grpo is not None
    assert spec.grpo.temperature == TEMPERATURE == 0.9
    assert plan_job(spec, shape_of(config), with_suggestions=False).problems == ()
    # A row names its GPUs, by which it is skipped.
    assert name.startswith(f"{case.gpus} GPU")


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "mixtral", **EXPERTS}], ids=str)
def test_a_model_that_engines_can_divide_computes_what_it_did(config: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64}
    torch.manual_seed(1)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SMOL | sizes | config | {"num_attention_heads": 6})
    )
    made.save_pretrained(tmp_path / "published")
    folder = write_divisible(tmp_path / "divisible", tmp_path / "published")
    reader: Any = AutoModelForCausalLM
    read, loading = reader.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert (read.config.num_attention_heads, read.config.num_key_value_heads) == (8, 4)
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(read(tokens).logits, made(tokens).logits)


def test_prompts_of_sums_have_their_answers(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    first = json.loads(task.prompts.read_text().splitlines()[0])
    left, right = (int(word.rstrip("?")) for word in first["prompt"][0]["content"].split()[2:5:2])
    assert first["answer"] == str(left + right)


def test_a_curve_is_smoothed_over_the_steps_before() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_a_row_shows_rewards_at_both_ends_and_the_worst_of_each_distance() -> None:
    series = {name: [5000.0, 1.0, 7000.0] for name in SPEEDS + PHASES}
    measured = {"reward": [0.0] * 5 + [1.0] * 5, "mismatchMean": [0.01, 0.03], "probeMean": [0.02, 0.01]}
    named = {"model": "smol", "task": "sums", "dtype": "bfloat16", "temperature": 0.9, "device": "H200", "seed": 1}
    counted = {"steps": 10, "stepsAsked": 60, "stack": "torch 1", "commit": "abc"}
    row = table_of([{**named, **counted, **measured, **series, "outputsSeconds": []}]).splitlines()[2]
    assert row.startswith(
        "| smol, sums, bfloat16, temperature 0.9, H200 | 1 | 10 of 60 | 0 | 1 | 0.03 | 0.02 | 5,000 |"
    )
    assert row.endswith("| 5,000 |  | 5,000 |")


def test_the_newest_line_of_each_seed_is_drawn(tmp_path: Path) -> None:
    line = {"model": "smol & co", "task": "sums", "dtype": "bfloat16", "temperature": 0.9, "device": "H200", "seed": 1}
    lines = [line | {"reward": [0.1, 0.2]}, line | {"reward": [0.5, 1.0]}, line | {"seed": 2, "reward": [0.5]}]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(f"{json.dumps(each)}\n" for each in [*lines, line | {"seed": 3, "reward": []}]))
    assert [(line["seed"], line["reward"]) for line in read_lines(results)] == [(1, [0.5, 1.0]), (2, [0.5])]
    assert draw_curves(results, tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text()
    assert "smol &amp; co, sums, bfloat16, temperature 0.9, H200" in drawn
    assert "seed 1: 0.75" in drawn
    assert "seed 2: 0.50" in drawn
    assert "seed 3" not in drawn
    assert not draw_curves(tmp_path / "none.jsonl", tmp_path / "other.svg")
