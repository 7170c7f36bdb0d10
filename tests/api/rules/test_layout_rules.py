"""Refusals of layouts once the model is known: one row a rule, with the fix it names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import dense_model, latent_model, moe_model, spec
from moejob_api.models.shape import (
    DenseMLP,
    Experts,
    Family,
    GroupedAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    ModelShape,
)
from moejob_api.problems import Rule
from moejob_api.rules import layout_problems

QWEN = moe_model()
LLAMA = dense_model()
DEEPSEEK = latent_model()
NARROW = ModelShape(
    Family.DEEPSEEK_V2, 512, 512, False, 512, (Layer(LatentAttention(4, None, 256, 64, 64, 64), DenseMLP(256)),)
)
BIASED = moe_model(bias=True)
LINEAR = ModelShape(
    Family.QWEN3_NEXT,
    2048,
    151_936,
    False,
    262_144,
    (
        Layer(LinearAttention(16, 32, 128, 128, 4), Experts(512, 10, 512)),
        Layer(GroupedAttention(16, 2, 256), Experts(512, 10, 512)),
    ),
)


@pytest.mark.parametrize(
    ("model", "sections", "rule", "says"),
    [
        pytest.param(
            DEEPSEEK,
            {"parallelism": {"pipeline": 16}},
            Rule.LAYERS,
            "61 layers do not divide over 16 pipeline stages; set firstStageLayers 3 and lastStageLayers 2",
            id="layers over stages",
        ),
        pytest.param(
            moe_model(layers=94),
            {"parallelism": {"pipeline": 8, "lastStageLayers": 6}},
            Rule.LAYERS,
            "94 layers with lastStageLayers 6 do not divide over 8 pipeline stages; set embeddingCountsAsLayer and",
            id="the last stage of verl's Qwen3-235B guide",
        ),
        pytest.param(
            dense_model(layers=126),
            {"parallelism": {"tensor": 8, "pipeline": 16, "context": 2}},
            Rule.LAYERS,
            "set embeddingCountsAsLayer and lossCountsAsLayer to true",
            id="405B over 16 stages",
        ),
        pytest.param(
            dense_model(layers=128),
            {"parallelism": {"tensor": 8, "pipeline": 16, "virtualPipeline": 32}},
            Rule.LAYERS,
            "virtualPipeline 32 does not divide stages of 8 layers",
            id="chunks per stage",
        ),
        pytest.param(
            QWEN,
            {"parallelism": {"pipeline": 4, "firstStageLayers": 13}},
            Rule.LAYERS,
            "the layers divide evenly",
            id="a needless first stage",
        ),
        pytest.param(
            LLAMA,
            {"parallelism": {"tensor": 3}, "resources": {"gpusPerNode": 3}},
            Rule.HEADS,
            "tensor 3 does not divide the model's 64 attention heads; change tensor to 2 or 4",
            id="heads",
        ),
        pytest.param(
            dense_model(heads=48, key_value_heads=6),
            {"parallelism": {"tensor": 4}},
            Rule.KEY_VALUE_HEADS,
            "neither a divisor nor a multiple of the model's 6 key-value heads",
            id="key-value heads",
        ),
        pytest.param(
            dense_model(intermediate=28_670),
            {"parallelism": {"tensor": 4}},
            Rule.WIDTH,
            "28670 feed-forward columns",
            id="feed-forward width",
        ),
        pytest.param(
            moe_model(intermediate=770),
            {"parallelism": {"tensor": 4}},
            Rule.WIDTH,
            "770 columns of an expert",
            id="expert width",
        ),
        pytest.param(
            moe_model(shared_intermediate=770),
            {"parallelism": {"tensor": 4}},
            Rule.WIDTH,
            "columns of the shared expert",
            id="shared expert width",
        ),
        pytest.param(
            BIASED,
            {"parallelism": {"tensor": 2}},
            Rule.EXPERT_TENSOR,
            "set expertLayout: Folded with expertTensor: 1",
            id="biases of split experts",
        ),
        pytest.param(
            QWEN,
            {"parallelism": {"expert": 48}},
            Rule.EXPERTS,
            "expert 48 does not divide the model's 128 experts; change expert to 32 or 64",
            id="experts",
        ),
        pytest.param(
            LLAMA, {"parallelism": {"expert": 8}}, Rule.EXPERTS, "raise data instead", id="experts of a dense model"
        ),
        pytest.param(
            QWEN,
            {"parallelism": {"tensor": 2, "sequence": False}},
            Rule.SEQUENCE_PARALLEL,
            "remove sequence: false",
            id="tensor without sequence parallelism",
        ),
        pytest.param(
            LINEAR,
            {"parallelism": {"context": 2}},
            Rule.SEQUENCE_LENGTH,
            "change context to 1",
            id="context over linear attention",
        ),
        pytest.param(
            QWEN,
            {"moe": {"balancing": "ExpertBias"}},
            Rule.ROUTING,
            "needs a router with a bias that moves its choice",
            id="expert bias of softmax",
        ),
        pytest.param(
            QWEN,
            {"training": {"recompute": {"granularity": "Selective", "modules": ["LatentUpProjection"]}}},
            Rule.RECOMPUTE,
            "saves nothing",
            id="recompute of what is not there",
        ),
        pytest.param(
            QWEN,
            {"parallelism": {"pipeline": 8}, "training": {"recompute": {"granularity": "Full", "layers": 7}}},
            Rule.RECOMPUTE,
            "more than the 6 layers",
            id="recompute of more than a stage",
        ),
        pytest.param(
            LLAMA,
            {"training": {"lora": {"targets": ["ExpertDown"]}}},
            Rule.LORA,
            "use GateUp and Down",
            id="expert adapters of a dense model",
        ),
        pytest.param(
            QWEN,
            {"training": {"lora": {"targets": ["ExpertGateUp"]}}},
            Rule.LORA,
            "only beside those of ExpertDown; name both",
            id="half an expert",
        ),
        pytest.param(
            LLAMA,
            {"parallelism": {"tensor": 8}, "training": {"lora": {"rank": 12}}},
            Rule.LORA,
            "change rank to 16",
            id="rank over tensor",
        ),
        pytest.param(
            QWEN,
            {"training": {"lora": {}}, "moe": {"freezeRouter": False}},
            Rule.LORA,
            "remove freezeRouter: false",
            id="a trained router beside adapters",
        ),
        pytest.param(
            QWEN,
            {"parallelism": {"tensor": 4, "context": 2}, "data": {"maxLength": 4100}},
            Rule.SEQUENCE_LENGTH,
            "change it to 4112",
            id="sequence over context and tensor",
        ),
        pytest.param(
            QWEN,
            {"parallelism": {"data": 24}, "training": {"globalBatchSize": 64}},
            Rule.GLOBAL_BATCH,
            "change it to 48 or 72",
            id="global batch",
        ),
        pytest.param(
            QWEN,
            {"parallelism": {"data": 8}, "training": {"globalBatchSize": 4, "dynamicBatchTokens": 8192}},
            Rule.GLOBAL_BATCH,
            "change it to 8 or more",
            id="dynamic batch below the ranks",
        ),
        pytest.param(
            QWEN,
            {"parallelism": {"pipeline": 4, "virtualPipeline": 2, "data": 2}, "training": {"globalBatchSize": 12}},
            Rule.MICROBATCHES,
            "multiples of pipeline 4, globalBatchSize 12 gives 6; change it to 8 or 16",
            id="microbatches of an interleaved schedule",
        ),
        pytest.param(
            QWEN,
            {"method": "GRPO", "training": {"globalBatchSize": 60}},
            Rule.GLOBAL_BATCH,
            "256 answers",
            id="updates of a step",
        ),
        pytest.param(
            QWEN,
            {
                "method": "GRPO",
                "parallelism": {"data": 8},
                "resources": {"gpusPerNode": 4},
                "grpo": {"rewards": [{"name": "math"}], "rollout": {"tensor": 8}},
            },
            Rule.ROLLOUT,
            "do not fill pods of 4 GPUs",
            id="colocated engines across pods",
        ),
        pytest.param(
            QWEN,
            {
                "method": "GRPO",
                "grpo": {"rewards": [{"name": "math"}], "rollout": {"placement": "Separate", "tensor": 16}},
            },
            Rule.ROLLOUT,
            "does not fit on a node of 8",
            id="separate engine across nodes",
        ),
        pytest.param(
            QWEN,
            {
                "method": "GRPO",
                "resources": {"gpusPerNode": 3},
                "grpo": {"rewards": [{"name": "math"}], "rollout": {"placement": "Separate", "tensor": 3}},
            },
            Rule.ROLLOUT,
            "cannot divide the model's 32 attention heads",
            id="heads of an engine",
        ),
        pytest.param(
            replace(QWEN, hidden=2064),
            {"method": "GRPO", "resources": {"accelerator": "CPU"}},
            Rule.ROLLOUT,
            "take experts of a hidden size that 32 divides, and the model's is 2064; use GPUs, or another model",
            id="experts of an engine on CPUs",
        ),
        pytest.param(
            replace(QWEN, family=Family.MINIMAX_M2),
            {"method": "GRPO", "resources": {"accelerator": "CPU"}},
            Rule.ROLLOUT,
            "take sigmoid scores of grouped experts only, and minimax_m2 has no groups; use GPUs, or another model",
            id="sigmoid scores of an engine on CPUs",
        ),
        pytest.param(
            ModelShape(Family.LLAMA, 96, 512, True, 512, (Layer(GroupedAttention(4, 2, 24), DenseMLP(256)),)),
            {"method": "GRPO", "resources": {"accelerator": "CPU"}},
            Rule.ROLLOUT,
            "numbers, and the model's have 24; use GPUs",
            id="attention heads of an engine on CPUs",
        ),
        pytest.param(
            NARROW,
            {"method": "GRPO", "resources": {"accelerator": "CPU"}},
            Rule.ROLLOUT,
            "take latent attention that keeps 576 numbers of a token, and the model's keeps 256 + 64; use GPUs",
            id="latent attention of an engine on CPUs",
        ),
        pytest.param(
            LINEAR,
            {"method": "GRPO"},
            Rule.ROLLOUT,
            "no engine was seen to take new weights of qwen3_next's linear attention; use method SFT",
            id="linear attention of an engine",
        ),
        pytest.param(
            LLAMA,
            {"method": "GRPO", "grpo": {"rewards": [{"name": "math"}], "routingReplay": True}},
            Rule.ROUTING,
            "llama has none; remove it",
            id="a dense model whose routing is replayed",
        ),
    ],
)
def test_a_layout_that_does_not_suit_the_model_is_refused_with_its_fix(
    model: ModelShape, sections: dict[str, Any], rule: Rule, says: str
) -> None:
    problems = layout_problems(spec(**sections), model)
    assert rule in [problem.rule for problem in problems]
    assert says in " | ".join(problem.message for problem in problems if problem.rule is rule)


@pytest.mark.parametrize(
    ("model", "sections"),
    [
        pytest.param(QWEN, {"parallelism": {"expert": 8}}, id="product"),
        pytest.param(
            DEEPSEEK,
            {
                "parallelism": {"pipeline": 16, "expert": 32, "firstStageLayers": 3, "lastStageLayers": 2},
                "moe": {"balancing": "ExpertBias"},
            },
            id="DeepSeek-V3 on 512 GPUs",
        ),
        pytest.param(LLAMA, {"parallelism": {"tensor": 8, "pipeline": 2, "data": 2}}, id="dense"),
        pytest.param(
            BIASED, {"parallelism": {"tensor": 2, "data": 4, "expert": 8, "expertLayout": "Folded"}}, id="folded biases"
        ),
        pytest.param(
            dense_model(heads=64, key_value_heads=2), {"parallelism": {"tensor": 8}}, id="tensor multiple of kv heads"
        ),
        pytest.param(None, {"parallelism": {"tensor": 8, "expert": 7}}, id="an unseen model is not judged"),
    ],
)
def test_a_layout_that_suits_the_model_is_accepted(model: ModelShape | None, sections: dict[str, Any]) -> None:
    sections = {"training": {"globalBatchSize": 448 * 8}} | sections
    assert layout_problems(spec(**sections), model) == ()


def test_without_a_grid_nothing_is_said_about_batches() -> None:
    broken = spec(parallelism={"expertLayout": "Folded", "expert": 3, "data": 8}, training={"globalBatchSize": 5})
    assert {problem.rule for problem in layout_problems(broken, None)} == {Rule.EXPERT_GRID}


@pytest.mark.parametrize("model", [replace(QWEN, hidden=2064), NARROW], ids=["hidden size", "latent attention"])
def test_sizes_that_engines_on_cpus_do_not_take_are_those_of_cpus_alone(model: ModelShape) -> None:
    problems = layout_problems(spec(method="GRPO"), model)
    assert "engines on CPUs" not in " | ".join(problem.message for problem in problems)
