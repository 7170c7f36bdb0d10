"""Master weights: the float32 numbers that the optimizer updates, of weights in a lower precision.

A weight in bfloat16 is the upper half of a float32 number, rounded. The remainder beside it takes two bytes where a
float32 copy takes four, and no bit is lost:

    master      0x3F80C123
    weight      0x3F81      (master + 0x8000) >> 16
    remainder  -0x3EDD      master - (weight << 16), which fits into 16 bits with its sign

A master half-way between two weights is rounded up, while torch rounds to even: rounded down, its remainder would be
+0x8000, and 16 bits with a sign end at +0x7FFF.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moejob_api.planner.memory.constants import UPDATE_ELEMENTS

_HALF, _NOT_A_NUMBER = 0x8000, 0x7FC00000
# Temporary tensors of this many elements are small enough for their memory to be used again. For larger ones the system
# hands out new pages each time, and splitting takes 3.5 times as long.
_AT_ONCE = 2**20


class StoredNumbers(Protocol):
    """Flat float32 numbers or moments of the optimizer, however they are stored."""

    @property
    def storage(self) -> Tensor:
        """The stored tensor: the numbers, or their remainder beside the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers."""

    def read(self) -> Tensor:
        """Return the numbers: the stored tensor, or a new one."""

    def writable_buffer(self) -> Tensor:
        """Return a tensor to fill and `write`: the stored tensor, or a new one without values."""

    def write(self, values: Tensor) -> None:
        """Set the numbers, and the weights rounded from them."""

    def slice_range(self, start: int, stop: int) -> StoredNumbers:
        """Return a range of the numbers; writing to it sets them."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainNumbers:
    """Numbers in one tensor: moments, and weights that are float32 themselves."""

    tensor: Tensor

    @property
    def storage(self) -> Tensor:
        return self.tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> Tensor:
        return self.tensor

    def writable_buffer(self) -> Tensor:
        return self.tensor

    def write(self, values: Tensor) -> None:
        if values is not self.tensor:
            self.tensor.copy_(values)

    def slice_range(self, start: int, stop: int) -> PlainNumbers:
        return PlainNumbers(self.tensor[start:stop])


@dataclass(frozen=True, slots=True, eq=False)
class CopiedNumbers:
    """A float32 copy of weights in a lower precision, in another memory than theirs: the host's."""

    weight: Tensor
    main: Tensor

    @property
    def storage(self) -> Tensor:
        return self.main

    @property
    def dtype(self) -> torch.dtype:
        return self.main.dtype

    def read(self) -> Tensor:
        return self.main

    def writable_buffer(self) -> Tensor:
        return self.main

    def write(self, values: Tensor) -> None:
        if values is not self.main:
            self.main.copy_(values)
        self.weight.copy_(self.main)

    def slice_range(self, start: int, stop: int) -> CopiedNumbers:
        return CopiedNumbers(self.weight[start:stop], self.main[start:stop])


@dataclass(frozen=True, slots=True, eq=False)
class SplitNumbers:
    """Weights in bfloat16, and their remainders."""

    weight: Tensor
    remainder: Tensor

    @property
    def storage(self) -> Tensor:
        return self.remainder

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def read(self) -> Tensor:
        numbers = self.writable_buffer()
        for part, weight, remainder in self._split_chunks(numbers):
            part.copy_(join_float32(weight, remainder))
        return numbers

    def writable_buffer(self) -> Tensor:
        return torch.empty_like(self.weight, dtype=torch.float32)

    def write(self, values: Tensor) -> None:
        for part, weight, remainder in self._split_chunks(values):
            upper, lacking = split_float32(part)
            weight.copy_(upper)
            remainder.copy_(lacking)

    def slice_range(self, start: int, stop: int) -> SplitNumbers:
        return SplitNumbers(self.weight[start:stop], self.remainder[start:stop])

    def _split_chunks(self, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        tensors = (numbers, self.weight, self.remainder)
        return zip(*(tensor.split(_AT_ONCE) for tensor in tensors), strict=True)


def make_master(weight: Tensor) -> StoredNumbers:
    """Return the master of these weights, with their present values."""
    if weight.dtype is torch.float32:
        return PlainNumbers(weight)
    if weight.dtype is not torch.bfloat16:
        raise TypeError(f"a float32 number is not split into {weight.dtype} and 16 bits; keep weights in bfloat16")
    return SplitNumbers(weight, torch.zeros_like(weight, dtype=torch.int16))


def copy_to_host(values: StoredNumbers) -> Tensor:
    """Copy the numbers to host memory in parts, so that few of them exist in float32 on the GPU."""
    count = values.storage.numel()
    if not isinstance(values, SplitNumbers) or count <= UPDATE_ELEMENTS:
        return values.read().detach().to("cpu", copy=True)
    copy = torch.empty(count, dtype=torch.float32)
    for start in range(0, count, UPDATE_ELEMENTS):
        stop = min(start + UPDATE_ELEMENTS, count)
        copy[start:stop].copy_(values.slice_range(start, stop).read())
    return copy


def split_float32(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 numbers into the nearest bfloat16 and the int16 remainder."""
    # The largest payloads of `not a number` would overflow into another number.
    bits = torch.where(master.isnan(), _NOT_A_NUMBER, master.view(torch.int32))
    upper = (bits + _HALF) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_float32(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 numbers of bfloat16 weights and their remainders."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)
