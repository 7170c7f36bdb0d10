"""Checkpoints that are published quantized, read as dequantized tensors: DeepSeek's FP8 blocks and gpt-oss's MXFP4.

A part is read with its own scales alone. Knows these two formats and nothing else of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moejob_trainer.conversion.checkpoint import SafetensorsFolder, StoredTensor, unusable
from moejob_trainer.model.parameters import Slices
from moejob_trainer.runtime.json_files import read_json

_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
# Numbers that share a scale, two to a byte, the low half first.
_PACKED = 32
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class TensorSource(Protocol):
    """Tensors by name, and parts of them."""

    @property
    def folder(self) -> Path:
        """The folder of the files."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by name."""

    def read(self, name: str, part: Slices) -> Tensor:
        """One part of a tensor."""


def readable(folder: Path) -> TensorSource:
    """The weights of a folder, dequantized where they have to be."""
    checkpoint = SafetensorsFolder.open(folder)
    names = checkpoint.tensors.keys()
    if any(name.endswith(_SCALE) for name in names):
        return BlockScaled(checkpoint, _block_size(folder))
    if any(name.endswith(_BLOCKS) for name in names):
        return PackedFours(checkpoint)
    return checkpoint


@dataclass(frozen=True)
class BlockScaled:
    """FP8 matrices with one scale for each block of them, in `NAME_scale_inv`."""

    checkpoint: SafetensorsFolder
    block: tuple[int, int]

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.checkpoint.folder

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by name."""
        stored = self.checkpoint.tensors
        scaled = {name for name in stored if self._is_scaled(name)}
        seen = {name: one for name, one in stored.items() if name.removesuffix(_SCALE) not in scaled}
        return seen | {name: replace(stored[name], dtype="F32") for name in scaled}

    def read(self, name: str, part: Slices) -> Tensor:
        """One part of a tensor; in float32 where it is dequantized."""
        found = self.checkpoint.read(name, part)
        if not self._is_scaled(name):
            return found
        # Both ends rounded outwards: a part may begin and end inside a block.
        blocks = tuple(
            slice(axis.start // size, -(-axis.stop // size)) for axis, size in zip(part, self.block, strict=True)
        )
        scales = self.checkpoint.read(name + _SCALE, blocks).float()
        for axis, (cut, size) in enumerate(zip(part, self.block, strict=True)):
            scales = scales.index_select(axis, torch.arange(cut.start, cut.stop) // size - cut.start // size)
        return found.float() * scales

    def _is_scaled(self, name: str) -> bool:
        stored, scales = self.checkpoint.tensors.get(name), self.checkpoint.tensors.get(name + _SCALE)
        if stored is None or scales is None:
            return False
        expected = tuple(-(-size // block) for size, block in zip(stored.shape, self.block, strict=False))
        return stored.dtype == "F8_E4M3" and len(stored.shape) == len(self.block) and scales.shape == expected


@dataclass(frozen=True)
class PackedFours:
    """Four-bit experts in `NAME_blocks` and `NAME_scales`, [expert, output, inputs by 32]; seen with inputs first."""

    checkpoint: SafetensorsFolder

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.checkpoint.folder

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by name."""
        seen = dict(self.checkpoint.tensors)
        for name in self.checkpoint.tensors:
            base = name.removesuffix(_BLOCKS)
            if self._is_packed(base):
                stored = seen.pop(base + _BLOCKS)
                del seen[base + _SCALES]
                experts, outputs, groups, _ = stored.shape
                seen[base] = StoredTensor(stored.file, (experts, groups * _PACKED, outputs), "BF16")
        return seen

    def read(self, name: str, part: Slices) -> Tensor:
        """One part of a tensor; in bfloat16 where it is unpacked."""
        if not self._is_packed(name):
            return self.checkpoint.read(name, part)
        experts, inputs, outputs = part
        groups = slice(inputs.start // _PACKED, -(-inputs.stop // _PACKED))
        blocks = self.checkpoint.read(name + _BLOCKS, (experts, outputs, groups, slice(0, _PACKED // 2)))
        scales = self.checkpoint.read(name + _SCALES, (experts, outputs, groups))
        first = inputs.start - groups.start * _PACKED
        # One expert after the other: unpacking takes many times the memory of the packed numbers.
        each = [_unpacked(*expert) for expert in zip(blocks, scales, strict=True)]
        return torch.stack(each)[..., first : first + inputs.stop - inputs.start].transpose(1, 2)

    def _is_packed(self, base: str) -> bool:
        blocks, scales = self.checkpoint.tensors.get(base + _BLOCKS), self.checkpoint.tensors.get(base + _SCALES)
        if blocks is None or scales is None or blocks.dtype != "U8" or scales.dtype != "U8":
            return False
        return len(blocks.shape) == 4 and blocks.shape == (*scales.shape, _PACKED // 2)


def _unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """[output, input] from two numbers a byte and a power of two for each group; bfloat16 holds them exactly."""
    values = torch.tensor(_FP4)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1)
    return torch.ldexp(pairs.flatten(-2), scales.int().unsqueeze(-1) - 127).flatten(-2).bfloat16()


def _block_size(folder: Path) -> tuple[int, int]:
    """Return the rows and columns that share a scale, from config.json: the shape of the scales does not tell."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise unusable(f"{folder} is quantized, and its config.json cannot be read ({error})") from error
    settings = config.get("quantization_config") if isinstance(config, dict) else None
    match settings:
        case {"weight_block_size": [int(rows), int(columns)]} if rows > 0 and columns > 0:
            return rows, columns
        case _:
            raise unusable(
                f"{folder} is quantized in blocks, and quantization_config in its config.json has no weight_block_size "
                "of two whole numbers; use the config.json that was published with it"
            )
