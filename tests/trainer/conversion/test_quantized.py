"""Quantized checkpoints against Transformers' own way of reading them, whole and in parts that cut through blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moejob_api.models.shape import Family
from moejob_api.problems import InvalidSpec
from moejob_trainer.conversion.loading import import_weights, open_published_checkpoint
from moejob_trainer.conversion.text_part import open_tensor_source
from moejob_trainer.model.parameters import Coordinates
from trainer.conversion.published import blank, cut, save_published, table_of, values_of

# Rows by columns that share a scale; the second does not divide all sizes, as 128 does not in DeepSeek-V3.
BLOCKS = [(4, 8), (7, 5)]


def eighths(folder: Path, values: dict[str, Any], block: tuple[int, int]) -> dict[str, Tensor]:
    """A checkpoint whose projections are FP8 in blocks; returns what they mean, multiplied out."""
    tensors = load_file(save_published(folder, values) / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if "proj" in name and name.endswith(".weight")]:
        small = tensors[name].to(torch.float8_e4m3fn)
        rows, columns = small.shape
        scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
        tensors |= {name: small, f"{name}_scale_inv": scales}
        meant[name] = small.float() * torch.kron(scales, torch.ones(block))[:rows, :columns]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def fours(folder: Path, values: dict[str, Any]) -> dict[str, Tensor]:
    """A checkpoint whose experts are packed as gpt-oss publishes them; returns what Transformers makes of them."""
    tensors = load_file(save_published(folder, values) / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 140, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return meant


def imported(folder: Path, values: dict[str, Any], place: Coordinates) -> dict[str, Tensor]:
    found = table_of(values)
    state = blank(found, place)
    import_weights(state, open_published_checkpoint(folder, found), place)
    return state


def assert_parts_mean_the_same(folder: Path, meant: dict[str, Tensor], values: dict[str, Any], size: int) -> None:
    """Every rank of tensor x expert tensor against its part of a checkpoint that never was quantized."""
    plain = folder / "plain"
    plain.mkdir()
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    found, whole = table_of(values), imported(plain, values, Coordinates())
    for rank in range(size):
        place = Coordinates(rank, size, rank, size, rank, size)
        expected, state = cut(found, whole, place), imported(folder, values, place)
        assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_fp8_blocks_are_multiplied_by_the_scales_of_their_own(
    block: tuple[int, int], size: int, tmp_path: Path
) -> None:
    values = values_of(Family.DEEPSEEK_V3)
    assert_parts_mean_the_same(tmp_path, eighths(tmp_path, values, block), values, size)


def test_fp8_blocks_mean_what_transformers_makes_of_them(tmp_path: Path) -> None:
    eighths(tmp_path, values_of(Family.DEEPSEEK_V3), (4, 4))
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    ours = open_tensor_source(tmp_path).read(name, (slice(0, 32), slice(0, 16)))
    theirs = Fp8Dequantize(None)._dequantize_one(tensors[name], tensors[f"{name}_scale_inv"])  # noqa: SLF001
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_parts_of_packed_experts_are_what_transformers_makes_of_them(size: int, tmp_path: Path) -> None:
    values = values_of(Family.GPT_OSS, intermediate_size=64, num_key_value_heads=8)
    assert_parts_mean_the_same(tmp_path, fours(tmp_path, values), values, size)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(None, id="no settings"),
        pytest.param({"weight_block_size": [128]}, id="one number"),
        pytest.param({"weight_block_size": [0, 128]}, id="zero"),
    ],
)
def test_blocks_of_unknown_size_are_refused(settings: dict[str, Any] | None, tmp_path: Path) -> None:
    values = values_of(Family.DEEPSEEK_V3)
    eighths(tmp_path, values, (4, 4))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(InvalidSpec, match="has no weight_block_size of two whole numbers"):
        open_tensor_source(tmp_path)


def test_scales_of_another_block_size_are_refused(tmp_path: Path) -> None:
    values = values_of(Family.DEEPSEEK_V3)
    eighths(tmp_path, values, (4, 4))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [128, 128]}}))
    with pytest.raises(InvalidSpec, match=r"is quantized: .*\(F8_E4M3\)"):
        imported(tmp_path, values, Coordinates())


def test_packed_experts_without_their_scales_are_refused(tmp_path: Path) -> None:
    values = values_of(Family.GPT_OSS, intermediate_size=64)
    fours(tmp_path, values)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidSpec, match=r"is quantized: .*down_proj_blocks \(U8\)"):
        imported(tmp_path, values, Coordinates())
