"""Checkpoints that are published quantized, read as dequantized tensors: DeepSeek's FP8 blocks and gpt-oss's MXFP4.

A part is read with its own scales alone. Knows these two formats and nothing else of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from moejob_api.arithmetic import ceil_div
from moejob_trainer.conversion.checkpoint import SafetensorsFolder, StoredTensor, TensorSource, unusable_checkpoint
from moejob_trainer.model.parameters import Slices
from moejob_trainer.runtime.json_files import read_json

_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
# Numbers that share a scale, two to a byte, the low half first.
_PACKED = 32
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def open_dequantized(folder: Path) -> TensorSource:
    """The weights of a folder, dequantized where they have to be."""
    checkpoint = SafetensorsFolder.open(folder)
    names = checkpoint.tensors.keys()
    if any(name.endswith(_SCALE) for name in names):
        return FP8BlockTensors(checkpoint, _read_block_size(folder))
    if any(name.endswith(_BLOCKS) for name in names):
        return MXFP4Tensors(checkpoint)
    return checkpoint


@dataclass(frozen=True)
class FP8BlockTensors:
    """FP8 matrices with one scale for each block of them, in `NAME_scale_inv`."""

    checkpoint: SafetensorsFolder
    block: tuple[int, int]

    @property
    def folder(self) -> Path:
        """The folder of the quantized files."""
        return self.checkpoint.folder

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by name: scaled tensors in float32, and no scales."""
        stored_tensors = self.checkpoint.tensors
        scaled_names = {name for name in stored_tensors if self._is_scaled(name)}
        dequantized = {
            name: tensor for name, tensor in stored_tensors.items() if name.removesuffix(_SCALE) not in scaled_names
        }
        return dequantized | {name: replace(stored_tensors[name], dtype="F32") for name in scaled_names}

    def read(self, name: str, part: Slices) -> Tensor:
        """One part of a tensor; in float32 where it is dequantized."""
        values = self.checkpoint.read(name, part)
        if not self._is_scaled(name):
            return values
        # Both ends rounded outwards: a part may begin and end inside a block.
        blocks = tuple(
            slice(axis.start // size, ceil_div(axis.stop, size)) for axis, size in zip(part, self.block, strict=True)
        )
        scales = self.checkpoint.read(name + _SCALE, blocks).float()
        for axis, (axis_slice, size) in enumerate(zip(part, self.block, strict=True)):
            scales = scales.index_select(
                axis, torch.arange(axis_slice.start, axis_slice.stop) // size - axis_slice.start // size
            )
        return values.float() * scales

    def _is_scaled(self, name: str) -> bool:
        tensor, scales = self.checkpoint.tensors.get(name), self.checkpoint.tensors.get(name + _SCALE)
        if tensor is None or scales is None:
            return False
        expected = tuple(ceil_div(size, block) for size, block in zip(tensor.shape, self.block, strict=False))
        return tensor.dtype == "F8_E4M3" and len(tensor.shape) == len(self.block) and scales.shape == expected


@dataclass(frozen=True)
class MXFP4Tensors:
    """Four-bit experts in `NAME_blocks` and `NAME_scales`, [expert, output, inputs by 32]; seen with inputs first."""

    checkpoint: SafetensorsFolder

    @property
    def folder(self) -> Path:
        """The folder of the packed files."""
        return self.checkpoint.folder

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by name: a packed one in bfloat16, instead of its blocks and scales."""
        dequantized = dict(self.checkpoint.tensors)
        for name in self.checkpoint.tensors:
            base = name.removesuffix(_BLOCKS)
            if self._is_packed(base):
                packed = dequantized.pop(base + _BLOCKS)
                del dequantized[base + _SCALES]
                experts, outputs, groups, _ = packed.shape
                dequantized[base] = StoredTensor(packed.file, (experts, groups * _PACKED, outputs), "BF16")
        return dequantized

    def read(self, name: str, part: Slices) -> Tensor:
        """One part of a tensor; in bfloat16 where it is unpacked."""
        if not self._is_packed(name):
            return self.checkpoint.read(name, part)
        experts, inputs, outputs = part
        groups = slice(inputs.start // _PACKED, ceil_div(inputs.stop, _PACKED))
        blocks = self.checkpoint.read(name + _BLOCKS, (experts, outputs, groups, slice(0, _PACKED // 2)))
        scales = self.checkpoint.read(name + _SCALES, (experts, outputs, groups))
        first = inputs.start - groups.start * _PACKED
        # One expert after the other: unpacking takes many times the memory of the packed numbers.
        unpacked = [_unpack_mxfp4(*expert) for expert in zip(blocks, scales, strict=True)]
        return torch.stack(unpacked)[..., first : first + inputs.stop - inputs.start].transpose(1, 2)

    def _is_packed(self, base: str) -> bool:
        blocks, scales = self.checkpoint.tensors.get(base + _BLOCKS), self.checkpoint.tensors.get(base + _SCALES)
        if blocks is None or scales is None or blocks.dtype != "U8" or scales.dtype != "U8":
            return False
        return len(blocks.shape) == 4 and blocks.shape == (*scales.shape, _PACKED // 2)


def _unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[output, input] from two numbers a byte and a power of two for each group; bfloat16 holds them exactly."""
    values = torch.tensor(_FP4)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1)
    return torch.ldexp(pairs.flatten(-2), scales.int().unsqueeze(-1) - 127).flatten(-2).bfloat16()


def _read_block_size(folder: Path) -> tuple[int, int]:
    """Return the rows and columns that share a scale, from config.json: the shape of the scales does not tell."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise unusable_checkpoint(f"{folder} is quantized, and its config.json cannot be read ({error})") from error
    settings = config.get("quantization_config") if isinstance(config, dict) else None
    match settings:
        case {"weight_block_size": [int(rows), int(columns)]} if rows > 0 and columns > 0:
            return rows, columns
        case _:
            raise unusable_checkpoint(
                f"{folder} is quantized in blocks, and quantization_config in its config.json has no weight_block_size "
                "of two whole numbers; use the config.json that was published with it"
            )
