"""Weights in buckets: many tensors as one flat tensor of bytes, put together from the parts that ranks own.

Every rank sees the names and shapes of all tensors in one order, so all ranks end a bucket after the same name without
any message. No rank ever holds more of the model than its own share and two buckets.

Two ranks, which own w1, w3 and w2 of one bucket: each packs its own tensors, and rank 0 gets the parts by rank.

    rank 0   [ w1 | w3 ]        rank 1   [ w2 ]        bucket   [ w1 | w3 | w2 ]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field, TypeAdapter
from torch import Tensor
from torch.distributed import ProcessGroup

from moejob_trainer.distributed import messages
from moejob_trainer.rollouts.transports.checksums import tensor_checksums

# 512 MiB of bfloat16: beside its copies a bucket takes 5 ms of engines. Elements, not bytes: a rank does not know the
# type of what another one owns.
BUCKET_ELEMENTS = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One tensor of a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class BucketPart:
    """The tensors of a bucket that one rank owns, in their order, and the checksums of its pages."""

    entries: tuple[BucketEntry, ...]
    checksums: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the part."""
        return sum(entry.size_bytes for entry in self.entries)


_PART = TypeAdapter(BucketPart)


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Tensors in the order in which they lie in `data`, part by part. [bytes]"""

    parts: tuple[BucketPart, ...]
    data: Tensor

    @property
    def entries(self) -> tuple[BucketEntry, ...]:
        """Return the tensors of all parts."""
        return tuple(entry for part in self.parts for entry in part.entries)

    @property
    def description(self) -> dict[str, Any]:
        """Return the names, types and shapes as engines want them."""
        return {
            "names": [entry.name for entry in self.entries],
            "dtype_names": [entry.dtype for entry in self.entries],
            "shapes": [list(entry.shape) for entry in self.entries],
            "part_bytes": [part.size_bytes for part in self.parts],
            "checksums": [list(part.checksums) for part in self.parts],
        }


@dataclass(frozen=True, slots=True)
class BucketRanks:
    """All ranks: `control` carries messages, `tensors` carries bytes on `device`. None for a rank that is alone."""

    control: ProcessGroup | None
    tensors: ProcessGroup | None
    device: torch.device

    @property
    def rank(self) -> int:
        """This rank in the control group; 0 for a rank alone."""
        return 0 if self.control is None else self.control.rank()


def pack_buckets(weights: Iterable[tuple[str, Tensor]], most_elements: int, device: torch.device) -> Iterator[Bucket]:
    """Yield this rank's part of each bucket, which may be empty; a tensor larger than a bucket is one of its own."""
    own_tensors: dict[str, Tensor] = {}
    elements = 0
    for name, tensor in weights:
        if elements and elements + tensor.numel() > most_elements:
            yield _pack_tensors(own_tensors, device)
            own_tensors, elements = {}, 0
        elements += tensor.numel()
        if not tensor.is_meta:
            # Copied: the owner may hold the next one in the same memory.
            own_tensors[name] = tensor.detach().to(device, copy=True).contiguous()
    yield _pack_tensors(own_tensors, device)


def gather_bucket(part: Bucket, ranks: BucketRanks) -> tuple[int, Bucket | None]:
    """Return the bytes of all parts together, and on rank 0 the whole bucket."""
    of_ranks = tuple(messages.all_gather_values(part.parts[0], _PART, ranks.control))
    sizes = [of_rank.size_bytes for of_rank in of_ranks]
    if ranks.tensors is None:
        return sum(sizes), part
    if ranks.rank:
        _wait_for_transfers(
            [dist.P2POp(dist.isend, part.data, group=ranks.tensors, group_peer=0)] if sizes[ranks.rank] else []
        )
        return sum(sizes), None
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=ranks.device)
    places = data.split(sizes)
    places[0].copy_(part.data)
    _wait_for_transfers(
        [
            dist.P2POp(dist.irecv, place, group=ranks.tensors, group_peer=rank)
            for rank, place in enumerate(places)
            if rank and sizes[rank]
        ]
    )
    return sum(sizes), Bucket(of_ranks, data)


def all_gather_bucket(part: Bucket, ranks: BucketRanks) -> Bucket:
    """Return the whole bucket on every rank."""
    if ranks.tensors is None:
        return part
    of_ranks = tuple(messages.all_gather_values(part.parts[0], _PART, ranks.control))
    sizes = [of_rank.size_bytes for of_rank in of_ranks]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=ranks.device)
    places = data.split(sizes)
    places[ranks.rank].copy_(part.data)
    for owner, place in enumerate(places):
        if sizes[owner]:
            dist.broadcast(place, group=ranks.tensors, group_src=owner)
    return Bucket(of_ranks, data)


def _pack_tensors(tensors: dict[str, Tensor], device: torch.device) -> Bucket:
    entries = tuple(
        BucketEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    )
    data = torch.empty(sum(entry.size_bytes for entry in entries), dtype=torch.uint8, device=device)
    ends = accumulate(entry.size_bytes for entry in entries)
    for tensor, end in zip(tensors.values(), ends, strict=True):
        data[end - tensor.nbytes : end] = tensor.reshape(-1).view(torch.uint8)
    # Of the owner's memory: the way to other ranks is a part of the way to engines.
    return Bucket((BucketPart(entries, tuple(tensor_checksums(data))),), data)


def _wait_for_transfers(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
