"""Reports of a real engine on publications: a tensor that was left out is named, and a right publication lacks none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engines import Engine
from moejob_api.contract.pods import HttpPath
from rollout.references import model, published, without

Start = Callable[..., Engine]
TIED = "model.embed_tokens.weight"
WHOLE: dict[str, list[str]] = {"missing": [], "repeated": []}
# A dense model with biases, tied and untied mixtures, one with shared experts, and latent attention.
FAMILIES = ["qwen2", "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"]


def reported(engine: Engine, *paths: Path) -> Any:
    """Return the report of an engine on these files; the engine then forgets the update."""
    engine.must("/pause", mode="keep")
    engine.must("/start_weight_update")
    engine.must("/update_weights", {"update_info": {"paths": [str(path) for path in paths]}})
    report = engine.must(HttpPath.PUBLICATION)
    engine.must("/finish_weight_update", {"weight_version": "unfinished"})
    return report


def test_a_tied_mixture_is_whole_and_each_tensor_that_was_left_out_is_named(start: Start, tmp_path: Path) -> None:
    engine, reference = start("mixtral").ready(), model("mixtral", 11)
    assert reported(engine, published(reference, tmp_path / "whole")) == WHOLE
    for tensor in (
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        "model.layers.0.block_sparse_moe.experts.0.w3.weight",
        "model.layers.1.block_sparse_moe.gate.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.norm.weight",
        TIED,
    ):
        path = without(published(reference, tmp_path / "part"), tensor)
        assert reported(engine, path) == {"missing": [tensor], "repeated": []}
    # What broke off is no part of the next one.
    assert reported(engine, published(reference, tmp_path / "again")) == WHOLE


@pytest.mark.thorough
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_missed_by_its_name_and_a_whole_model_is_accepted(
    family: str, tensor: int, start: Start, tmp_path: Path
) -> None:
    engine = start(family, tensor=tensor).ready()
    path = published(model(family, 11), tmp_path / "whole")
    tensors = load_file(path)
    assert reported(engine, path) == WHOLE
    unseen = {}
    for name in tensors:
        left = {other: value for other, value in tensors.items() if other != name}
        save_file(left, tmp_path / "part.safetensors", {"format": "pt"})
        report = reported(engine, tmp_path / "part.safetensors")
        if report != {"missing": [name], "repeated": []}:
            unseen[name] = report
    assert unseen == {}
    assert reported(engine, path) == WHOLE
    engine.kill()


@pytest.mark.thorough
def test_a_tensor_that_comes_twice_fills_the_place_of_none(start: Start, tmp_path: Path) -> None:
    engine, name = start("qwen2").ready(), "model.layers.1.self_attn.k_proj.weight"
    path = published(model("qwen2", 11), tmp_path / "whole")
    again = tmp_path / "again.safetensors"
    # As large as v_proj, without which the count is complete.
    save_file({name: load_file(path)[name]}, again, {"format": "pt"})
    part = without(path, "model.layers.1.self_attn.v_proj.weight")
    assert reported(engine, again, part)["repeated"] == [name]
    engine.kill()
