"""The shards in the files of a checkpoint: what they say about themselves, and any part of a tensor out of them.

Knows no engine and no ranks, so that a checkpoint can be read where nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from moejob_trainer.checkpoints.shards import ShardSpec
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.model.parameters import Parameter
from moejob_trainer.runtime.read_ahead import FilePart

# What makes files of another kind unreadable here, and the other way round.
STATE_FORMAT = "boxes-2"
SHARDS = "boxes"


class TensorRole(StrEnum):
    """The role of a stored tensor: weight, copy or moment."""

    WEIGHT = "weight"
    FIRST_MOMENT = "firstMoment"
    SECOND_MOMENT = "secondMoment"


class OtherState(BadConfiguration):
    """A checkpoint does not hold what this run needs: it was saved for another model."""


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard in a file."""

    file: str
    key: str
    kind: TensorRole
    name: str
    # Of the whole tensor.
    shape: tuple[int, ...]
    shard: ShardSpec
    # Of its numbers in the file.
    offset: int
    length: int


def shards_in(folder: Path, file: str) -> Iterator[StoredShard]:
    """Yield the shards in the header of a file."""
    path = folder / file
    with safe_open(path, framework="pt") as opened:
        described = json.loads(opened.metadata()[SHARDS])
    # Checked by the library above, which does not say where tensors lie.
    with path.open("rb") as header:
        length = int.from_bytes(header.read(8), "little")
        entries = json.loads(header.read(length))
    for number, entry in enumerate(described):
        begin, end = entries[str(number)]["data_offsets"]
        yield StoredShard(
            file=file,
            key=str(number),
            kind=TensorRole(entry["kind"]),
            name=entry["name"],
            shape=tuple(entry["shape"]),
            shard=ShardSpec(tuple(entry["start"]), tuple(entry["size"])),
            offset=8 + length + begin,
            length=end - begin,
        )


def require_shape(parameter: Parameter, stored: Sequence[StoredShard], folder: Path) -> None:
    """Raise OtherState for another shape: a part of a larger tensor would fit, and mean something else."""
    others = sorted({one.shape for one in stored} - {parameter.shape})
    if others:
        raise OtherState(
            f"{folder} holds {parameter.name} as {list(others[0])} and this model has it as {list(parameter.shape)}: "
            "it was saved for another model; name a checkpoint of this one, or another job"
        )


@dataclass(slots=True)
class ShardFiles:
    """The files of one checkpoint. Open files stay mapped: `keeps_open` is for readers who have the memory."""

    folder: Path
    keeps_open: bool = True
    _opened: dict[str, safe_open] = field(default_factory=dict)

    def fill(self, target: Tensor, shard: ShardSpec, stored: Sequence[StoredShard], what: str) -> None:
        """Read a shard of a tensor out of the stored ones that overlap it; OtherState where they lack a part."""
        missing = shard.elements
        for one in stored:
            common = shard.overlap(one.shard)
            if common is None:
                continue
            theirs = common.moved([-start for start in one.shard.start])
            ours = common.moved([-start for start in shard.start])
            with torch.no_grad():
                target[ours.slices].copy_(self._read(one, theirs))
            missing -= common.elements
        if missing:
            raise OtherState(
                f"{self.folder} holds {shard.elements - missing} of the {shard.elements} numbers that {what} needs: "
                "it was saved for another model or by another kind of training; name a checkpoint of this one, or "
                "another job"
            )

    def parts(self, shard: ShardSpec, stored: Sequence[StoredShard]) -> Iterator[FilePart]:
        """Yield the parts of files that `fill` reads for a shard: rows, from the first to the last that it needs."""
        for one in stored:
            common = shard.overlap(one.shard)
            if common is None:
                continue
            theirs = common.moved([-start for start in one.shard.start])
            # A tensor without dimensions is one row.
            rows, first, count = (one.shard.size[0], theirs.start[0], theirs.size[0]) if theirs.size else (1, 0, 1)
            of_row = one.length // rows
            yield FilePart(self.folder / one.file, one.offset + first * of_row, count * of_row)

    def _read(self, one: StoredShard, part: ShardSpec) -> Tensor:
        opened = self._opened.get(one.file) or safe_open(self.folder / one.file, framework="pt")
        if self.keeps_open:
            self._opened[one.file] = opened
        read: Tensor = opened.get_slice(one.key)[part.slices] if part.size else opened.get_tensor(one.key)
        return read
