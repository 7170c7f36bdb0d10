"""The shards in the files of a checkpoint: their descriptions, and any part of a tensor read out of them.

Knows no ranks and no training engine, so that an export can read a checkpoint without training.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from io import FileIO
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from moejob_api.arithmetic import ceil_div
from moejob_trainer.checkpoints.shards import ShardSpec
from moejob_trainer.conversion.safetensors_writer import DTYPES
from moejob_trainer.distributed.messages import Dtype
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.model.parameters import Parameter
from moejob_trainer.runtime.read_ahead import FilePart

# A reader refuses files of any other format.
STATE_FORMAT = "boxes-2"
SHARDS = "boxes"
# Rows are read through memory that is used again: new memory costs as much as reading.
_BUFFER_BYTES = 2**22


class TensorRole(StrEnum):
    """The role of a stored tensor: weight, copy or moment."""

    WEIGHT = "weight"
    FIRST_MOMENT = "firstMoment"
    SECOND_MOMENT = "secondMoment"


class IncompatibleState(BadConfiguration):
    """A checkpoint does not hold what this run needs: it was saved for another model."""


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard in a file."""

    file: str
    kind: TensorRole
    name: str
    # The shape of the whole tensor.
    shape: tuple[int, ...]
    shard: ShardSpec
    dtype: Dtype
    # Where its numbers begin in the file.
    offset: int

    @property
    def row_count(self) -> int:
        """Its rows; a tensor without dimensions is one."""
        return self.shard.size[0] if self.shard.size else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        return self.shard.element_count // self.row_count * self.dtype.itemsize


def shards_in(folder: Path, file: str) -> Iterator[StoredShard]:
    """Yield the shards in the header of a file."""
    path = folder / file
    with safe_open(path, framework="pt") as tensors_file:
        shard_entries = json.loads(tensors_file.metadata()[SHARDS])
    # The library above has checked the header, but does not tell the offsets of tensors.
    with path.open("rb") as header:
        length = int.from_bytes(header.read(8), "little")
        entries = json.loads(header.read(length))
    for number, entry in enumerate(shard_entries):
        location = entries[str(number)]
        yield StoredShard(
            file=file,
            kind=TensorRole(entry["kind"]),
            name=entry["name"],
            shape=tuple(entry["shape"]),
            shard=ShardSpec(tuple(entry["start"]), tuple(entry["size"])),
            dtype=DTYPES[location["dtype"]],
            offset=8 + length + location["data_offsets"][0],
        )


def require_shape(parameter: Parameter, stored: Sequence[StoredShard], folder: Path) -> None:
    """Raise IncompatibleState for another shape: a part of a larger tensor would fit, and mean something else."""
    other_shapes = sorted({stored_shard.shape for stored_shard in stored} - {parameter.shape})
    if other_shapes:
        raise IncompatibleState(
            f"{folder} holds {parameter.name} as {list(other_shapes[0])} and this model has it as "
            f"{list(parameter.shape)}: "
            "it was saved for another model; name a checkpoint of this one, or another job"
        )


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The files of one checkpoint. Rows are read into a buffer, which costs less than mapping the files."""

    folder: Path
    # Threads that read one large part. Each copies what it has read to the device, while others read.
    readers: int = 1

    def fill_shard(self, target: Tensor, shard: ShardSpec, stored: Sequence[StoredShard], description: str) -> None:
        """Read a shard of a tensor out of the stored ones that overlap it; IncompatibleState where they lack a part."""
        missing = shard.element_count
        for source in stored:
            common = shard.overlap(source.shard)
            if common is None:
                continue
            target_range = common.shift_by([-start for start in shard.start])
            self._read_overlap(target[target_range.index_slices], source, common)
            missing -= common.element_count
        if missing:
            raise IncompatibleState(
                f"{self.folder} holds {shard.element_count - missing} of the {shard.element_count} numbers that "
                f"{description} needs: it was saved for another model or by another kind of training; name a "
                "checkpoint of this one, or "
                "another job"
            )

    def file_parts(self, shard: ShardSpec, stored: Sequence[StoredShard]) -> Iterator[FilePart]:
        """Yield the file parts that `fill_shard` reads for a shard: whole rows, of which it may need some columns."""
        for source in stored:
            if (common := shard.overlap(source.shard)) is not None:
                first, count = _overlapping_rows(source, common)
                yield FilePart(
                    self.folder / source.file, source.offset + first * source.row_bytes, count * source.row_bytes
                )

    def _read_overlap(self, target: Tensor, source: StoredShard, common: ShardSpec) -> None:
        """Copy the overlap of a stored shard and the requested one."""
        _, count = _overlapping_rows(source, common)
        share = ceil_div(count, self.readers)
        if self.readers == 1 or share * source.row_bytes < _BUFFER_BYTES:
            self._read_rows(target, source, common, range(count))
            return
        shares = [range(begin, min(begin + share, count)) for begin in range(0, count, share)]
        # One core each: else every thread that copies would start its own team of torch threads.
        with ThreadPoolExecutor(len(shares), "shards", torch.set_num_threads, (1,)) as pool:
            # list() collects the results, and so raises the error of a thread that failed.
            list(pool.map(partial(self._read_rows, target, source, common), shares))

    # Here, in the function that threads run: grad mode is a switch of each thread.
    @torch.no_grad()
    def _read_rows(self, target: Tensor, source: StoredShard, common: ShardSpec, row_range: range) -> None:
        columns = common.shift_by([-start for start in source.shard.start]).index_slices[1:]
        first, _ = _overlapping_rows(source, common)
        at_once = max(1, min(len(row_range), _BUFFER_BYTES // source.row_bytes))
        buffer = torch.empty(at_once * source.row_bytes, dtype=torch.uint8)
        with (self.folder / source.file).open("rb", buffering=0) as file:
            for begin in row_range[::at_once]:
                rows = min(at_once, row_range.stop - begin)
                block = buffer[: rows * source.row_bytes]
                _read_at(file, block, source.offset + (first + begin) * source.row_bytes)
                values = block.view(source.dtype)
                if target.dim():
                    target[begin : begin + rows].copy_(values.view(rows, *source.shard.size[1:])[:, *columns])
                else:
                    target.copy_(values[0])


def _overlapping_rows(source: StoredShard, common: ShardSpec) -> tuple[int, int]:
    """Return the first row of the overlap, counted in the stored shard, and its number of rows."""
    return (common.start[0] - source.shard.start[0], common.size[0]) if common.size else (0, 1)


def _read_at(file: FileIO, target: Tensor, offset: int) -> None:
    """Read all of it. A call reads 2 GiB at most, and less where a file ends."""
    content: memoryview = target.numpy().data
    while content:
        count = os.preadv(file.fileno(), [content], offset)
        if not count:
            raise OSError(errno.EIO, "the file ends in the middle of a tensor; copy it again", file.name)
        content, offset = content[count:], offset + count
