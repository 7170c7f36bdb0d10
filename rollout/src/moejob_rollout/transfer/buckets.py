"""Buckets of weights as the trainer packs them: many tensors as one flat tensor of bytes."""

from __future__ import annotations

from math import prod
from typing import Protocol

import torch
from torch import Tensor

from moejob_rollout.transfer.stacks import Stack, WholeStacks, stack_of


class Described(Protocol):
    """The tensors of one bucket, in the order in which they lie in it."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


def size_bytes(of: Described) -> int:
    """Return the bytes of a bucket."""
    return sum(_sizes(of))


def unpacked(bucket: Tensor, of: Described, stacks: WholeStacks) -> list[tuple[str | Stack, Tensor]]:
    """Return the tensors of a bucket, each in memory of its own: layers keep them until they are complete.

    Parts of a stack stay in `stacks` until the stack is complete.
    """
    found: list[tuple[str | Stack, Tensor]] = []
    for name, part, dtype, shape in zip(of.names, bucket.split(_sizes(of)), _dtypes(of), of.shapes, strict=True):
        stack = stack_of(name)
        if stack is None:
            # A tensor may begin at an address that its type does not allow.
            found.append((name, part.clone().view(dtype).reshape(shape)))
        elif (whole := stacks.whole(stack, part, dtype, shape)) is not None:
            found.append(whole)
    return found


def _sizes(of: Described) -> list[int]:
    return [dtype.itemsize * prod(shape) for dtype, shape in zip(_dtypes(of), of.shapes, strict=True)]


def _dtypes(of: Described) -> list[torch.dtype]:
    return [getattr(torch, name) for name in of.dtype_names]
