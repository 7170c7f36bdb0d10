"""Shares of parameters that replicas divide: the part of a rank, its shards, and the gathered whole.

A share is a range of a flat parameter, as in Megatron's buffers, so that checkpoints treat both alike. A parameter
[5, 4] on 2 replicas has shares of 12 elements, whole rows: rank 0 has [0, 12), rank 1 has [12, 20). Does not know which
code divides parameters, or when.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from moejob_trainer.checkpoints.shards import ShardSpec, shards_of_range
from moejob_trainer.distributed.collectives import all_gather_alike
from moejob_trainer.distributed.groups import Group


@dataclass(frozen=True, slots=True)
class ReplicaSharding:
    """The division of a parameter over replicas: its shape without them, and the type that it computes in.

    Every rank of the group has a share of `each` elements; the last ranks have fewer or none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    group: Group
    each: int

    @property
    def elements(self) -> int:
        """Elements of all shares."""
        return math.prod(self.shape)

    @property
    def start(self) -> int:
        """The first element of this rank's share in the flat parameter."""
        return min(self.group.rank * self.each, self.elements)

    @property
    def stop(self) -> int:
        """The end of this rank's share: one behind its last element."""
        return min(self.start + self.each, self.elements)


@dataclass(frozen=True, slots=True)
class WeightTypes:
    """The type that weights compute in, and the type that their gradients are summed in."""

    weights: torch.dtype
    gradients: torch.dtype


def share_elements(shape: tuple[int, ...], group: Group) -> int:
    """Return the elements of a share: as evenly divided as whole rows of the last axis allow."""
    width = shape[-1] if len(shape) > 1 else 1
    return math.ceil(math.prod(shape) // width / group.size) * width


def find_sharding(tensor: Tensor) -> ReplicaSharding | None:
    """Return the division of a tensor over replicas; None where each replica holds all of it."""
    return getattr(tensor, "sharded", None)


def local_part(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor. A view: writing into it sets the tensor."""
    detached = tensor.detach()
    return (detached.to_local() if isinstance(detached, DTensor) else detached).view(-1)


def local_shards(tensor: Tensor) -> Iterator[tuple[ShardSpec, Tensor]]:
    """Yield the local part of a tensor as shards of its shape without replicas, each with its view."""
    sharded, flat = find_sharding(tensor), local_part(tensor)
    shape, start = (tuple(tensor.shape), 0) if sharded is None else (sharded.shape, sharded.start)
    begin = 0
    for shard in shards_of_range(shape, start, start + flat.numel()):
        yield shard, flat[begin : begin + shard.element_count].view(shard.size)
        begin += shard.element_count


def gather_whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor as it computes. All replicas call this together where they divide it."""
    sharded = find_sharding(tensor)
    if sharded is None:
        return tensor.detach()
    # Rounded before it travels: half the bytes.
    share = local_part(tensor).to(sharded.dtype)
    share = functional.pad(share, (0, sharded.each - share.numel()))
    return all_gather_alike(share, sharded.group)[: sharded.elements].view(sharded.shape)
