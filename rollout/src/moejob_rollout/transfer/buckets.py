"""Buckets of weights as the trainer packs them: many tensors as one flat tensor of bytes."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from moejob_api.contract.weight_checksums import PAGE_BYTES, changed_pages
from moejob_rollout.transfer.checksums import tensor_checksums
from moejob_rollout.transfer.stacks import ExpertStack, StackBuilder, parse_stack_name


class BucketDescription(Protocol):
    """The tensors of one bucket, in the order in which they lie in it."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Checked(BucketDescription, Protocol):
    """The parts of a bucket, one of each rank that owns some of it, and the checksums of their pages."""

    part_bytes: list[int]
    checksums: list[list[int]]


def changed_tensors(bucket: Tensor, bucket_info: Checked) -> list[str]:
    """Return the tensors that lie in pages with other bytes than the trainer has sent."""
    if not bucket_info.checksums:
        return []
    # Where each page of a part begins and ends in the bucket.
    pages: list[tuple[int, int]] = []
    start = 0
    for part, checksums in zip(bucket.split(bucket_info.part_bytes), bucket_info.checksums, strict=True):
        end = start + part.numel()
        pages += (
            (start + page * PAGE_BYTES, min(end, start + (page + 1) * PAGE_BYTES))
            for page in changed_pages(tensor_checksums(part), checksums)
        )
        start = end
    ends = list(accumulate(_tensor_sizes(bucket_info)))
    places = zip([0, *ends], ends, bucket_info.names, strict=False)
    return [name for begin, end, name in places if any(begin < stop and first < end for first, stop in pages)]


def bucket_bytes(description: BucketDescription) -> int:
    """Return the bytes of a bucket."""
    return sum(_tensor_sizes(description))


def unpack_bucket(
    bucket: Tensor, description: BucketDescription, stacks: StackBuilder
) -> list[tuple[str | ExpertStack, Tensor]]:
    """Return the tensors of a bucket, each in memory of its own: layers keep them until they are complete.

    Parts of a stack stay in `stacks` until the stack is complete.
    """
    tensors: list[tuple[str | ExpertStack, Tensor]] = []
    for name, content, dtype, shape in zip(
        description.names,
        bucket.split(_tensor_sizes(description)),
        _tensor_dtypes(description),
        description.shapes,
        strict=True,
    ):
        stack = parse_stack_name(name)
        if stack is None:
            # A tensor may begin at an address that its type does not allow.
            tensors.append((name, content.clone().view(dtype).reshape(shape)))
        elif (complete_stack := stacks.add_part(stack, content, dtype, shape)) is not None:
            tensors.append(complete_stack)
    return tensors


def _tensor_sizes(description: BucketDescription) -> list[int]:
    return [
        dtype.itemsize * prod(shape)
        for dtype, shape in zip(_tensor_dtypes(description), description.shapes, strict=True)
    ]


def _tensor_dtypes(description: BucketDescription) -> list[torch.dtype]:
    return [getattr(torch, name) for name in description.dtype_names]
