"""`model.transformer`, and Bridge's reading of config.json: what would train another model is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from builders import spec
from model_configs import config
from moejob_api.layout.sizes import derive_layout
from moejob_api.models.shape import Family
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.megatron_models.settings import make_provider, read_overrides
from moejob_trainer.model.architecture import read_architecture

GLM: dict[str, Any] = {"num_nextn_predict_layers": 0, "n_group": 4, "topk_group": 2}


def provider(
    family: Family = Family.QWEN3_MOE, transformer: dict[str, str] | None = None, expert: int = 1, **changes: Any
) -> Any:
    """The settings of a small model."""
    published = config(family, **changes)
    job = spec(
        model={"implementation": "Megatron", "transformer": transformer or {}},
        training={"globalBatchSize": 8},
        parallelism={"data": expert, "expert": expert},
    )
    layout = derive_layout(job.parallelism, job.resources.gpus_per_node)
    return make_provider(published, read_architecture(published), job, layout, torch.device("cpu"))


def test_a_key_gets_the_type_that_megatron_gives_it() -> None:
    texts = {"moe_permute_fusion": "true", "moe_router_topk_limited_devices": "null", "layernorm_epsilon": "1e-5"}
    assert read_overrides(texts, frozenset()) == {
        "moe_permute_fusion": True,
        "moe_router_topk_limited_devices": None,
        "layernorm_epsilon": 1e-5,
    }


def test_a_key_reaches_megatrons_layers() -> None:
    assert provider(transformer={"moe_router_force_load_balancing": "true"}).moe_router_force_load_balancing is True


@pytest.mark.parametrize(
    ("transformer", "expected"),
    [
        pytest.param({"moe_permute_fusoin": "true"}, "use moe_permute_fusion", id="no such key"),
        pytest.param({"moe_permute_fusion": "often"}, "'often' is no", id="another type"),
        pytest.param({"bf16": "true"}, "other fields of the job", id="the job's own"),
        pytest.param({"attention_dropout": "0.1"}, "modules of ours", id="what no module reads"),
        pytest.param({"layernorm_epsilon": "0.5"}, "layernorm_epsilon 0.5, where config.json says", id="other numbers"),
        pytest.param({"moe_router_topk": "1"}, "moe_router_topk 1, where config.json says", id="fewer experts"),
        pytest.param({"num_layers": "9"}, "num_layers", id="more layers"),
    ],
)
def test_a_key_that_would_not_do_what_it_says_is_refused(transformer: dict[str, str], expected: str) -> None:
    with pytest.raises(BadConfiguration, match=expected):
        provider(transformer=transformer)


def test_groups_of_experts_that_megatron_ranks_otherwise_are_refused() -> None:
    assert provider(Family.GLM4_MOE, **GLM, num_experts_per_tok=4).moe_router_num_groups == 4
    with pytest.raises(BadConfiguration, match="its best 1, where the model's own code takes 2"):
        provider(Family.GLM4_MOE, **GLM, num_experts_per_tok=3)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        (Family.QWEN3, {}, 1),
        (Family.QWEN3_MOE, {}, 2),
        (Family.GLM4_MOE, GLM | {"num_experts_per_tok": 4}, 2),
        (Family.MINIMAX_M2, {}, 2),
    ],
    ids=["dense", "softmax scores", "sigmoid scores of groups", "sigmoid scores"],
)
def test_megatron_divides_the_experts_that_a_model_has(family: Family, changes: dict[str, Any], expected: int) -> None:
    assert provider(family, expert=2, **changes).expert_model_parallel_size == expected


def test_all_shared_experts_are_counted() -> None:
    settings = provider(Family.GLM4_MOE, **GLM, num_experts_per_tok=4, n_shared_experts=3)
    assert settings.moe_shared_expert_intermediate_size == 3 * settings.moe_ffn_hidden_size
