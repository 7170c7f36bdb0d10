"""Master weights: the float32 numbers that the optimizer moves, of weights that are kept in less.

A weight in bfloat16 is the upper half of a float32 number, rounded. Beside it lies what it lacks, in two bytes where a
float32 copy takes four, and no bit is lost:

    master      0x3F80C123
    weight      0x3F81      (master + 0x8000) >> 16
    remainder  -0x3EDD      master - (weight << 16), which fits into 16 bits with its sign

A master half-way between two weights goes to the larger one, where torch rounds to the even one: the other remainder,
0x8000, would not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moejob_api.planner.memory.constants import UPDATE_ELEMENTS

_HALF, _NOT_A_NUMBER = 0x8000, 0x7FC00000
# What is made on the way is small enough for its memory to be used again. Else the system hands out new pages each
# time, and splitting takes 3.5 times as long.
_AT_ONCE = 2**20


class Values(Protocol):
    """Flat float32 numbers or moments of the optimizer, in whatever they are kept in."""

    @property
    def storage(self) -> Tensor:
        """The tensor that is kept: the numbers, or the part of them that the weights lack."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers."""

    def read(self) -> Tensor:
        """Return the numbers: the tensor that keeps them, or a new one."""

    def buffer(self) -> Tensor:
        """Return a tensor to fill and `write`: the one that keeps the numbers, or a new one without any."""

    def write(self, values: Tensor) -> None:
        """Set the numbers, and the weights rounded from them."""

    def part(self, start: int, stop: int) -> Values:
        """Return some of them; writing to it sets these."""


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
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

    def buffer(self) -> Tensor:
        return self.tensor

    def write(self, values: Tensor) -> None:
        if values is not self.tensor:
            self.tensor.copy_(values)

    def part(self, start: int, stop: int) -> Whole:
        return Whole(self.tensor[start:stop])


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """A float32 copy of lower weights: where these are out of reach, in another memory."""

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

    def buffer(self) -> Tensor:
        return self.main

    def write(self, values: Tensor) -> None:
        if values is not self.main:
            self.main.copy_(values)
        self.weight.copy_(self.main)

    def part(self, start: int, stop: int) -> Copied:
        return Copied(self.weight[start:stop], self.main[start:stop])


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Weights in bfloat16, and what they lack of float32."""

    weight: Tensor
    remainder: Tensor

    @property
    def storage(self) -> Tensor:
        return self.remainder

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def read(self) -> Tensor:
        numbers = self.buffer()
        for part, weight, remainder in self._parts(numbers):
            part.copy_(joined(weight, remainder))
        return numbers

    def buffer(self) -> Tensor:
        return torch.empty_like(self.weight, dtype=torch.float32)

    def write(self, values: Tensor) -> None:
        for part, weight, remainder in self._parts(values):
            upper, lacking = split(part)
            weight.copy_(upper)
            remainder.copy_(lacking)

    def part(self, start: int, stop: int) -> Split:
        return Split(self.weight[start:stop], self.remainder[start:stop])

    def _parts(self, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        whole = (numbers, self.weight, self.remainder)
        return zip(*(tensor.split(_AT_ONCE) for tensor in whole), strict=True)


def master_of(weight: Tensor) -> Values:
    """The master of these weights, as they are now."""
    if weight.dtype is torch.float32:
        return Whole(weight)
    if weight.dtype is not torch.bfloat16:
        raise TypeError(f"a float32 number is not split into {weight.dtype} and 16 bits; keep weights in bfloat16")
    return Split(weight, torch.zeros_like(weight, dtype=torch.int16))


def copied_to_host(values: Values) -> Tensor:
    """Return a copy in host memory, beside which few of the numbers exist in float32 on the GPU."""
    count = values.storage.numel()
    if not isinstance(values, Split) or count <= UPDATE_ELEMENTS:
        return values.read().detach().to("cpu", copy=True)
    copy = torch.empty(count, dtype=torch.float32)
    for start in range(0, count, UPDATE_ELEMENTS):
        stop = min(start + UPDATE_ELEMENTS, count)
        copy[start:stop].copy_(values.part(start, stop).read())
    return copy


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 numbers as the nearest bfloat16, and as int16 what these lack."""
    # The largest payloads of `not a number` would overflow into another number.
    bits = torch.where(master.isnan(), _NOT_A_NUMBER, master.view(torch.int32))
    upper = (bits + _HALF) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 numbers that were split."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)
