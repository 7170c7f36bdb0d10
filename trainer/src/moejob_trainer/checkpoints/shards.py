"""Shards: parts of a tensor that are cut out along its axes. A checkpoint consists of them.

A rank's share of the optimizer is a range of a flat parameter; as shards of the whole parameter it can be read in any
other layout. Pure arithmetic; megatron/state.py says which shards a rank holds, and so which it reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A part of a tensor: where it begins, and how far it reaches along each axis."""

    start: Axes
    size: Axes

    @property
    def element_count(self) -> int:
        """The number of elements in the part."""
        return math.prod(self.size)

    @property
    def index_slices(self) -> tuple[slice, ...]:
        """The part, to index the tensor with."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def shift_by(self, offsets: Sequence[int]) -> ShardSpec:
        """The same part, seen from elsewhere."""
        return ShardSpec(tuple(start + step for start, step in zip(self.start, offsets, strict=True)), self.size)

    def overlap(self, other: ShardSpec) -> ShardSpec | None:
        """Return the part that both hold."""
        starts = tuple(map(max, self.start, other.start))
        stops = tuple(
            min(mine + size, theirs + length)
            for mine, size, theirs, length in zip(self.start, self.size, other.start, other.size, strict=True)
        )
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return None
        return ShardSpec(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def shards_of_range(shape: Axes, start: int, stop: int) -> Iterator[ShardSpec]:
    """Yield a range of a flat tensor as shards, in the order of the range: at most two for each axis but the first."""
    if start >= stop:
        return
    if not shape:
        yield ShardSpec((), ())
        return
    # Elements 1 to 10 of a [4, 3] tensor: the end of row 0, rows 1 and 2 whole, the beginning of row 3.
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and not (start % row == 0 and stop % row == 0):
        yield from _shards_of_row(first, shape, start - first * row, stop - first * row)
        return
    whole_from = first if start % row == 0 else first + 1
    whole_to = stop // row
    if start % row:
        yield from _shards_of_row(first, shape, start % row, row)
    if whole_from < whole_to:
        yield ShardSpec((whole_from, *[0] * (len(shape) - 1)), (whole_to - whole_from, *shape[1:]))
    if stop % row:
        yield from _shards_of_row(whole_to, shape, 0, stop % row)


def _shards_of_row(index: int, shape: Axes, start: int, stop: int) -> Iterator[ShardSpec]:
    """A range inside one row of the first axis."""
    for shard in shards_of_range(shape[1:], start, stop):
        yield ShardSpec((index, *shard.start), (1, *shard.size))
