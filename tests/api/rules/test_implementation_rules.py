"""Megatron's own models: a field that they do not obey is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from builders import merge_sections, spec
from model_configs import config
from moejob_api.derived import balancing_method
from moejob_api.job.moe import BalancingMethod
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family
from moejob_api.models.trainable import MEGATRON_FAMILIES, UNTRAINED_BY_MEGATRON
from moejob_api.rules.implementation_rules import implementation_problems

MEGATRON: dict[str, Any] = {"model": {"implementation": "Megatron"}}


def refused(sections: dict[str, Any], family: Family | None = Family.QWEN3_MOE, **changes: Any) -> list[str]:
    """The fields that are refused."""
    shape = None if family is None else shape_of(config(family, **changes))
    return [problem.path.removeprefix("spec.") for problem in implementation_problems(spec(**sections), shape)]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        pytest.param({}, [], id="sft"),
        pytest.param({"model": {"transformer": {"moe_permute_fusion": "true"}}}, [], id="a key of Megatron's"),
        pytest.param({"training": {"recompute": {"granularity": "Full"}}}, [], id="whole layers recomputed"),
        pytest.param({"moe": {"freezeRouter": True}}, [], id="frozen router"),
        pytest.param({"method": "GRPO"}, [], id="grpo"),
        pytest.param(
            {"method": "GRPO", "grpo": {"routingReplay": True}}, ["grpo.routingReplay"], id="experts of engines"
        ),
        pytest.param({"training": {"lora": {}}}, ["training.lora"], id="lora"),
        pytest.param({"memory": {"sharding": "FSDP"}}, ["memory.sharding"], id="fsdp"),
        pytest.param({"memory": {"sharding": "ZeRO2"}}, ["memory.sharding"], id="zero2"),
        pytest.param({"memory": {"offloadActivations": True}}, ["memory.offloadActivations"], id="offload"),
        pytest.param({"training": {"precision": {"compute": "FP8"}}}, ["training.precision.compute"], id="fp8"),
        pytest.param(
            {"training": {"recompute": {"granularity": "Selective"}}},
            ["training.recompute.granularity"],
            id="selective recomputation",
        ),
        pytest.param({"moe": {"balancing": "AuxLoss"}}, ["moe.balancing"], id="loss of balance"),
        pytest.param({"moe": {"zLossCoefficient": 0.1}}, ["moe.zLossCoefficient"], id="z-loss"),
        pytest.param({"moe": {"capacityFactor": 1.0}}, ["moe.capacityFactor"], id="capacity"),
        pytest.param({"moe": {"dispatcher": "Flex"}}, ["moe.dispatcher"], id="dispatcher"),
        pytest.param({"parallelism": {"tensor": 4}}, ["parallelism.tensor"], id="shared key-value heads"),
    ],
)
def test_a_job_of_megatrons_models(sections: dict[str, Any], expected: list[str]) -> None:
    assert refused(merge_sections(MEGATRON, sections), num_attention_heads=8, num_key_value_heads=2) == expected
    assert refused(sections | {"model": {}}) == []


def test_keys_of_megatron_are_for_its_models() -> None:
    assert refused({"model": {"transformer": {"moe_permute_fusion": "true"}}}, None) == ["model.transformer"]


def test_further_tokens_are_not_predicted() -> None:
    assert refused(MEGATRON, Family.GLM4_MOE) == ["training.mtpLossCoefficient"]
    assert refused(MEGATRON, Family.GLM4_MOE, num_nextn_predict_layers=0) == []


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (Family.MIXTRAL, {"sliding_window": 7}),
        (Family.QWEN2, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    ],
)
def test_windows_are_computed(family: Family, changes: dict[str, Any]) -> None:
    assert refused(MEGATRON, family, **changes) == []


@pytest.mark.parametrize("family", Family)
def test_every_family_is_measured_or_refused_with_the_reason(family: Family) -> None:
    assert (family in MEGATRON_FAMILIES) != (family in UNTRAINED_BY_MEGATRON)


def test_a_family_that_is_not_computed_is_refused_with_what_is_missing() -> None:
    shape = shape_of(config(Family.DEEPSEEK_V3))
    (problem,) = implementation_problems(spec(**MEGATRON), shape)
    assert problem.message.startswith("Megatron's latent attention needs Transformer Engine; use Native")


def test_experts_are_not_balanced_by_default() -> None:
    assert balancing_method(spec(**MEGATRON)) is BalancingMethod.NONE
    assert balancing_method(spec()) is BalancingMethod.AUX_LOSS
