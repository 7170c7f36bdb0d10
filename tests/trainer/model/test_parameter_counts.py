"""Our arithmetic against the models that Transformers builds: every parameter, family by family and model by model."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from model_configs import ODD, any_config, config
from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_api.models.parameters import ParameterCounts, model_weights, total_parameters
from moejob_api.models.shape import Family, GroupedAttention, ModelShape

REPLICATED = re.compile(
    r"norm|conv1d|\.(gate|router|q_a_proj|kv_a_proj_with_mqa|shared_expert_gate)\.(weight|bias)$|\.(o_proj|down_proj)\.bias$"
)


def built(values: dict[str, Any]) -> PreTrainedModel:
    """The model of a config.json, without memory behind its parameters."""
    others = {key: value for key, value in values.items() if key != "model_type"}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(values["model_type"], **others))
    return model


def divided(model: PreTrainedModel) -> ParameterCounts:
    """Parameters by how Megatron divides them, known by their names."""
    found = Counter[str]()
    is_joint = model.config.model_type in {"olmoe", "minimax_m2"}
    for name, parameter in model.named_parameters():
        # The bias that moves the choice of ERNIE's experts is a parameter there, without a gradient.
        if parameter.requires_grad:
            found[_joint_group(name) if is_joint else _group(name)] += parameter.numel()
    return ParameterCounts(**found)


def _joint_group(name: str) -> str:
    """The group of a family whose ranks divide the norms of queries and keys with the heads."""
    groups = {"q_norm": "tensor", "k_norm": "key_value"}
    return next((group for norm, group in groups.items() if f".{norm}." in name), _group(name))


def _group(name: str) -> str:
    if ".mlp.experts." in name:
        return "routed"
    if re.search(r"\.(k_proj|v_proj)\.", name):
        return "key_value"
    return "replicated" if REPLICATED.search(name) else "tensor"


def windows(model: PreTrainedModel) -> list[int | None]:
    """The sliding window of each layer that has heads."""
    attentions = (layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn"))
    return [getattr(attention, "sliding_window", None) or None for attention in attentions]


def our_windows(shape: ModelShape) -> list[int | None]:
    attentions = (layer.attention for layer in shape.layers)
    return [attention.window for attention in attentions if isinstance(attention, GroupedAttention)]


@pytest.mark.parametrize(("family", "changes"), [pytest.param(*odd[1:], id=odd[0]) for odd in ODD])
def test_every_parameter_of_an_odd_model_is_counted_where_megatron_divides_it(
    family: Family, changes: dict[str, Any]
) -> None:
    values = config(family, **changes)
    assert model_weights(shape_of(values)) == divided(built(values))


@pytest.mark.parametrize(
    ("family", "changes"),
    [pytest.param(*odd[1:], id=odd[0]) for odd in ODD if not odd[0].startswith(("deepseek", "glm4_moe_lite"))],
)
def test_the_layers_with_a_window_are_those_of_transformers(family: Family, changes: dict[str, Any]) -> None:
    model = built(values := config(family, **changes))
    # Mixtral's layers read the window from the config when they run.
    seen = [model.config.sliding_window] * 5 if family is Family.MIXTRAL else windows(model)
    assert our_windows(shape_of(values)) == seen


@pytest.mark.parametrize("family", list(Family))
@settings(max_examples=60)
@given(data=st.data())
def test_any_model_of_a_family_is_counted_exactly(family: Family, data: st.DataObject) -> None:
    values = data.draw(any_config(family))
    assert model_weights(shape_of(values)) == divided(built(values))


@pytest.mark.parametrize("name", catalog.shipped_names())
def test_a_shipped_config_builds_the_model_that_is_counted(name: str) -> None:
    values = dict(catalog.find_config(name) or {})
    model = built(values)
    assert model_weights(shape_of(values)) == divided(model)
    assert total_parameters(shape_of(values)) == sum(p.numel() for p in model.parameters() if p.requires_grad)
