"""A stage of the trainer holds what planning counts: parameter for parameter, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from builders import merge_sections, spec
from model_configs import config
from moejob_api.job import Spec
from moejob_api.layout.sizes import Layout
from moejob_api.layout.sizes import derive_layout as layout_of
from moejob_api.models.shape import Family
from moejob_api.planner.memory.case import HeldParameters, LocalParameters, prepare_case, stage_parameters
from moejob_trainer.distributed.groups import Group, Groups
from moejob_trainer.megatron.stages import stage_places
from moejob_trainer.model.architecture import Architecture, read_architecture, trained_architecture
from moejob_trainer.model.linear import is_expert
from moejob_trainer.model.stage import Stage

# Nothing that planning would round up: a vocabulary of whole tiles, heads and widths that four ranks divide.
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "DeepSeek-V3": (Family.DEEPSEEK_V3, {"num_nextn_predict_layers": 0}),
    "DeepSeek-V3 with MTP": (Family.DEEPSEEK_V3, {"num_nextn_predict_layers": 2}),
    "DeepSeek-V3 with MTP, tied": (Family.DEEPSEEK_V3, {"num_nextn_predict_layers": 1, "tie_word_embeddings": True}),
    "GLM-4.5 with MTP": (Family.GLM4_MOE, {"num_nextn_predict_layers": 1, "use_qk_norm": True}),
    "Qwen3-MoE": (Family.QWEN3_MOE, {}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP4": {"tensor": 4},
    "PP2": {"pipeline": 2},
    "PP2.VPP2": {"pipeline": 2, "virtualPipeline": 2},
    "TP2.PP4.EP2": {"tensor": 2, "pipeline": 4, "expert": 2},
}
TRAINED: dict[str, dict[str, Any]] = {
    "everything": {},
    "no routers": {"moe": {"freezeRouter": True}},
    "without further tokens": {"training": {"mtpLossCoefficient": 0.0}},
    "adapters": {"training": {"lora": {"rank": 4}}},
}


def _groups(sizes: Layout, stage: int) -> Groups:
    """The groups of a stage's first rank, which nothing is sent through."""
    return Groups(
        tensor=Group(0, sizes.tensor),
        pipeline=Group(stage, sizes.pipeline),
        expert=Group(0, sizes.expert),
        expert_tensor=Group(0, sizes.expert_tensor),
    )


def _held(model: Architecture, job: Spec, groups: Groups) -> HeldParameters:
    with torch.device("meta"):
        stages = [Stage(model, job, groups, place) for place in stage_places(model, job, groups)]
    if job.moe.freeze_router:
        for name, parameter in (named for stage in stages for named in stage.named_parameters()):
            parameter.requires_grad = ".router." not in name
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    return HeldParameters(_counted(parameters), _counted([one for one in parameters if one.requires_grad]))


def _counted(parameters: list[torch.nn.Parameter]) -> LocalParameters:
    routed = sum(parameter.numel() for parameter in parameters if is_expert(parameter))
    return LocalParameters(sum(parameter.numel() for parameter in parameters) - routed, routed)


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_stage_holds_and_trains_what_planning_counts(name: str, layout: str, trained: str) -> None:
    family, changes = MODELS[name]
    model = read_architecture(config(family, **SIZES | changes))
    job = spec(**merge_sections(TRAINED[trained], {"parallelism": LAYOUTS[layout]}))
    sizes = layout_of(job.parallelism, 8)
    case = prepare_case(job, model.shape, sizes)
    for stage in case.stages:
        found = _held(trained_architecture(model, job), job, _groups(sizes, stage.index))
        assert found == stage_parameters(case, stage), f"stage {stage.index}"
