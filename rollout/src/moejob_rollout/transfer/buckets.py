"""Buckets of weights as the trainer packs them: many tensors as one flat tensor of bytes."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from moejob_api.contract.weight_checksums import PAGE_BYTES, changed_pages, page_checksums
from moejob_rollout.transfer.stacks import Stack, WholeStacks, stack_of


class Described(Protocol):
    """The tensors of one bucket, in the order in which they lie in it."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Checked(Described, Protocol):
    """The parts of a bucket, one of each rank that owns some of it, and the checksums of their pages."""

    part_bytes: list[int]
    checksums: list[list[int]]


def changed_tensors(bucket: Tensor, of: Checked) -> list[str]:
    """Return the tensors that lie in pages with other bytes than the trainer has sent."""
    if not of.checksums:
        return []
    # Where each page of a part begins and ends in the bucket.
    pages: list[tuple[int, int]] = []
    start = 0
    for part, checksums in zip(bucket.split(of.part_bytes), of.checksums, strict=True):
        end = start + part.numel()
        pages += (
            (start + page * PAGE_BYTES, min(end, start + (page + 1) * PAGE_BYTES))
            for page in changed_pages(page_checksums(part, torch.int64), checksums)
        )
        start = end
    ends = list(accumulate(_sizes(of)))
    places = zip([0, *ends], ends, of.names, strict=False)
    return [name for begin, end, name in places if any(begin < stop and first < end for first, stop in pages)]


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
