"""Buckets of weights as the trainer packs them: many tensors as one flat tensor of bytes."""

from __future__ import annotations

from math import prod
from typing import Protocol

import torch
from torch import Tensor


class Described(Protocol):
    """The tensors of one bucket, in the order in which they lie in it."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


def size_bytes(of: Described) -> int:
    """Return the bytes of a bucket."""
    return sum(_sizes(of))


def unpacked(bucket: Tensor, of: Described) -> list[tuple[str, Tensor]]:
    """Return the tensors of a bucket, each in memory of its own: layers keep them until they are complete."""
    parts = bucket.split(_sizes(of))
    # A tensor may begin at an address that its type does not allow.
    return [
        (name, part.clone().view(dtype).reshape(shape))
        for name, part, dtype, shape in zip(of.names, parts, _dtypes(of), of.shapes, strict=True)
    ]


def _sizes(of: Described) -> list[int]:
    return [dtype.itemsize * prod(shape) for dtype, shape in zip(_dtypes(of), of.shapes, strict=True)]


def _dtypes(of: Described) -> list[torch.dtype]:
    return [getattr(torch, name) for name in of.dtype_names]
