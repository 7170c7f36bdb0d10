"""The folder that engines start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from model_configs import SMALL
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family
from moejob_trainer.rollouts.engine_model import lay_out_model

KEYS = ("topk_method", "scoring_func", "use_routing_bias")


def engine_config(family: Family, folder: Path) -> dict[str, Any]:
    """The config.json that engines read, of a model that Transformers has saved."""
    # Transformers' default is that of a published model.
    sizes = {"num_key_value_heads": SMALL[family]["num_attention_heads"]} | SMALL[family]
    AutoConfig.for_model(family, **sizes).save_pretrained(folder / "published")
    config = json.loads((folder / "published/config.json").read_text())
    assert not any(config.get(key) for key in KEYS)
    lay_out_model(folder / "published", folder / "engine-model", shape_of(config), torch.float32)
    written: dict[str, Any] = json.loads((folder / "engine-model/config.json").read_text())
    return written


def test_engines_are_told_the_routing_of_deepseek_v3_which_transformers_leaves_out(tmp_path: Path) -> None:
    config = engine_config(Family.DEEPSEEK_V3, tmp_path)
    assert [config.get(key) for key in KEYS] == ["noaux_tc", "sigmoid", None]


def test_engines_are_told_the_routing_of_minimax_m2_which_transformers_leaves_out(tmp_path: Path) -> None:
    config = engine_config(Family.MINIMAX_M2, tmp_path)
    assert [config.get(key) for key in KEYS] == [None, "sigmoid", True]
    assert config["rotary_dim"] == SMALL[Family.MINIMAX_M2]["rotary_dim"]


@pytest.mark.parametrize("family", [Family.MIXTRAL, Family.QWEN3_MOE])
def test_engines_are_told_nothing_else_of_other_families(family: Family, tmp_path: Path) -> None:
    assert not any(key in engine_config(family, tmp_path) for key in KEYS)
