"""Values that ranks send each other, as bytes in tensors. torch's own object collectives unpickle what a peer sent.

A size is checked before memory is taken for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter
from torch import Tensor
from torch.distributed import ProcessGroup

from moejob_trainer.distributed.encoding import Array, BadMessage, decode_message, encode_message

T = TypeVar("T")

# Far above any plan, index or report of a rank.
MOST_JSON_BYTES: Final = 2**30
# Above a step of GRPO or the adapters of a rank; a larger announcement is a mistake, refused before allocation.
MOST_ARRAY_BYTES: Final = 2**37


def _parse_dtype(name: object) -> torch.dtype:
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")  # noqa: TRY004  # pydantic catches no TypeError
    return dtype


# A field of a message that is a dtype: "bfloat16".
Dtype = Annotated[
    torch.dtype, PlainValidator(_parse_dtype), PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."))
]


@dataclass(frozen=True, slots=True)
class _ArrayHeader:
    """The name, type and shape of an array that follows."""

    name: str
    # In numpy's spelling: "<" is little endian; numbers of one byte have "|" for no order.
    dtype: Annotated[str, Field(pattern=r"^(<[iuf][248]|\|[iu]1)$")]
    shape: tuple[Annotated[int, Field(ge=0)], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


_HEADERS = TypeAdapter(tuple[_ArrayHeader, ...])

# Every rank of the group calls the same functions, in the same order. A group of None is this rank alone.


def all_gather_values(value: T, kind: TypeAdapter[T], group: ProcessGroup | None) -> list[T]:
    """Return the value of every rank, by rank."""
    if group is None:
        return [value]
    content = _to_tensor(encode_message(value, kind), group)
    sizes = _all_gather_sizes(content, group, MOST_JSON_BYTES)
    buffers = [content.new_empty(max(sizes)) for _ in sizes]
    dist.all_gather(buffers, _pad_content(content, max(sizes)), group=group)
    return [decode_message(_to_bytes(buffer, size), kind) for buffer, size in zip(buffers, sizes, strict=True)]


def gather_values(value: T, kind: TypeAdapter[T], group: ProcessGroup | None) -> list[T] | None:
    """Return the value of every rank by rank, on the group's first rank; None on the others."""
    if group is None:
        return [value]
    gathered = gather_bytes(encode_message(value, kind), group, MOST_JSON_BYTES)
    return None if gathered is None else [decode_message(content, kind) for content in gathered]


def broadcast_value(value: T | None, kind: TypeAdapter[T], group: ProcessGroup | None, source: int = 0) -> T:
    """Return the value of the group's rank `source`, on every rank."""
    is_source = group is None or group.rank() == source
    # The source decodes its own message too: a value of another type fails on every rank, and no rank waits for it.
    content = encode_message(value, kind) if is_source else None
    return decode_message(_broadcast_bytes(content, group, source), kind)


def gather_bytes(
    content: bytes, group: ProcessGroup | None, most_bytes: int = MOST_ARRAY_BYTES
) -> Sequence[bytes] | None:
    """Return the bytes of every rank by rank, on the group's first rank; None on the others."""
    if group is None:
        return [content]
    local_content = _to_tensor(content, group)
    sizes = _all_gather_sizes(local_content, group, most_bytes)
    buffers = [local_content.new_empty(max(sizes)) for _ in sizes] if group.rank() == 0 else None
    dist.gather(_pad_content(local_content, max(sizes)), buffers, group=group, group_dst=0)
    if buffers is None:
        return None
    return [_to_bytes(buffer, size) for buffer, size in zip(buffers, sizes, strict=True)]


def _broadcast_bytes(content: bytes | None, group: ProcessGroup | None, source: int) -> bytes:
    if group is None:
        return _require_content(content)
    local_content = _to_tensor(_require_content(content) if group.rank() == source else b"", group)
    size = torch.tensor([len(local_content)], device=local_content.device)
    dist.broadcast(size, group=group, group_src=source)
    count = _check_size(int(size), MOST_JSON_BYTES)
    received = local_content if group.rank() == source else local_content.new_empty(count)
    dist.broadcast(received, group=group, group_src=source)
    return _to_bytes(received, count)


def broadcast_arrays(arrays: Mapping[str, Array] | None, group: ProcessGroup | None) -> Mapping[str, Array]:
    """Return the arrays of the group's first rank on every rank.

    Each array is sent by itself, without a copy of all: a step of GRPO may take most of a host's memory.
    """
    is_source = group is None or group.rank() == 0
    local_arrays = (
        {name: np.ascontiguousarray(array) for name, array in _require_content(arrays).items()} if is_source else {}
    )
    if group is None:
        return local_arrays
    headers = broadcast_value(
        tuple(_ArrayHeader(name, array.dtype.str, array.shape) for name, array in local_arrays.items()), _HEADERS, group
    )
    _check_size(sum(header.size_bytes for header in headers), MOST_ARRAY_BYTES)
    return {header.name: _broadcast_array(local_arrays.get(header.name), header, group) for header in headers}


def wait_for_group(group: ProcessGroup | None) -> None:
    """Wait until every rank of the group has called this."""
    if group is not None:
        dist.barrier(group)


def _broadcast_array(array: Array | None, header: _ArrayHeader, group: ProcessGroup) -> Array:
    received = np.empty(header.shape, header.dtype) if array is None else array
    content = torch.from_numpy(received.reshape(-1).view(np.uint8))
    on_device = content.to(_group_device(group))
    dist.broadcast(on_device, group=group, group_src=0)
    if on_device is not content:
        content.copy_(on_device)
    return received


def _require_content(content: T | None) -> T:
    if content is None:
        raise ValueError("the rank that speaks for the others has nothing to send")
    return content


def _all_gather_sizes(content: Tensor, group: ProcessGroup, most_bytes: int) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64, device=content.device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(content)], device=content.device), group=group)
    return [_check_size(int(size), most_bytes) for size in sizes]


def _check_size(size: int, most_bytes: int) -> int:
    if not 0 <= size <= most_bytes:
        raise BadMessage(f"a rank announced a message of {size} bytes; it has at most {most_bytes}")
    return size


def _to_tensor(content: bytes, group: ProcessGroup) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy()).to(_group_device(group))


def _group_device(group: ProcessGroup) -> str:
    # NCCL sends GPU memory only.
    return "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"


def _pad_content(content: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(content, (0, size - len(content)))


def _to_bytes(content: Tensor, size: int) -> bytes:
    return content[:size].cpu().numpy().tobytes()
