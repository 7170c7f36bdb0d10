"""Publications of the other families: a whole model is accepted, and each tensor that is left out is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engines import Engine
from rollout.references import make_model, save_published
from rollout.test_engine import CLOSE, distance, updated
from rollout.test_publications import WHOLE, reported

Start = Callable[..., Engine]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("llama", 1),
        ("qwen3", 1),
        ("qwen2_moe", 1),
        ("deepseek_v2", 1),
        ("glm4_moe_lite", 1),
        ("olmoe", 1),
        ("olmoe", 2),
        ("ernie4_5_moe", 1),
        ("gpt_oss", 1),
        ("gpt_oss", 2),
        ("qwen3_moe padded", 1),
        ("qwen3_moe padded", 2),
    ],
)
def test_a_whole_model_is_accepted_and_a_tensor_that_was_left_out_is_named(
    family: str, tensor: int, start: Start, tmp_path: Path
) -> None:
    engine = start(family, tensor=tensor).await_ready()
    path = save_published(make_model(family, 11), tmp_path / "whole")
    assert reported(engine, path) == WHOLE
    tensors = load_file(path)
    unseen = {}
    for name in tensors:
        left = {other: value for other, value in tensors.items() if other != name}
        save_file(left, tmp_path / "part.safetensors", {"format": "pt"})
        missing = reported(engine, tmp_path / "part.safetensors")["missing"]
        # vLLM has names of its own for all of gpt-oss.
        if missing != [name] and (family != "gpt_oss" or len(missing) != 1):
            unseen[name] = missing
    assert unseen == {}
    engine.kill()


@pytest.mark.thorough
@pytest.mark.parametrize("tensor", [1, 2])
def test_experts_and_sinks_of_gpt_oss_are_those_of_each_update(tensor: int, start: Start, tmp_path: Path) -> None:
    engine = start("gpt_oss", tensor=tensor).await_ready()
    for version, seed in (("1", 11), ("2", 12)):
        reference = make_model("gpt_oss", seed)
        updated(engine, version, save_published(reference, tmp_path / version))
        assert distance(engine, reference) < CLOSE
    engine.kill()
