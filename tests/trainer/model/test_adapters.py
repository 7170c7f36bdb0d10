"""The adapters that are trained are those that are planned for; what cannot be published is refused before training."""

from __future__ import annotations

from math import prod

import pytest

from builders import spec
from model_configs import config
from moejob_api.job.training import Lora, LoraTarget
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family
from moejob_api.planner.memory.adapters import adapter_weights
from moejob_api.problems import InvalidSpec
from moejob_trainer.conversion.adapters import build_adapter_table
from moejob_trainer.megatron.state import saved_parameters
from moejob_trainer.model.adapters import adapter_parameters
from moejob_trainer.model.parameters import model_parameters

FAMILIES = [Family.LLAMA, Family.MIXTRAL, Family.QWEN2_MOE, Family.QWEN3_MOE, Family.DEEPSEEK_V2, Family.DEEPSEEK_V3]


@pytest.mark.parametrize("target", LoraTarget)
@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_numbers_are_trained_as_are_planned_for(family: Family, target: LoraTarget) -> None:
    shape, lora = shape_of(config(family)), Lora(rank=4, targets=(target,))
    planned = sum(adapter_weights(shape.hidden, layer, lora).total for layer in shape.layers)
    assert sum(prod(parameter.shape) for parameter in adapter_parameters(model_parameters(shape), lora)) == planned


@pytest.mark.parametrize("family", FAMILIES)
def test_every_published_matrix_has_an_adapter_of_its_own(family: Family) -> None:
    shape, lora = shape_of(config(family)), Lora(rank=4, targets=tuple(LoraTarget))
    table = build_adapter_table(shape, lora)
    assert len(table.by_tensor) == len(table.pieces)
    assert sum(piece.element_count for piece in table.pieces) == sum(prod(one.shape) for one in table.parameters)
    for piece in table.pieces:
        # A has the rank first, B has it last.
        assert piece.shape[0 if ".lora_A." in piece.tensor else 1] == lora.rank


def test_experts_that_are_published_in_one_tensor_cannot_be_adapted() -> None:
    shape = shape_of(config(Family.GPT_OSS))
    with pytest.raises(InvalidSpec, match="leave out ExpertDown"):
        build_adapter_table(shape, Lora(targets=(LoraTarget.EXPERT_DOWN,)))


@pytest.mark.parametrize(
    ("sections", "has_weights"),
    [
        pytest.param({}, False, id="not of the published model"),
        pytest.param({"checkpoint": {"resumeFrom": "other"}}, True, id="of another job"),
    ],
)
def test_checkpoints_of_adapters_hold_weights(sections: dict[str, object], has_weights: bool) -> None:
    declared = model_parameters(shape_of(config(Family.DEEPSEEK_V3)))
    names = {one.name for one in saved_parameters(declared, spec(training={"lora": {}}, **sections))}
    assert any(name.endswith("lora_a") for name in names)
    assert any(name.endswith("selection_bias") for name in names)
    assert ("embedding.weight" in names) is has_weights
