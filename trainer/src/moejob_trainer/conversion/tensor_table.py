"""The table between tensors of Hugging Face files and regions of our parameters, used in both directions.

A row names the axes of both sides in letters, as in `g 0 d h` <- `(g d) h`. A digit is a fixed index into one of our
axes; a bracket is one of their axes that joins several of ours; `e` is the expert, which the tensor's name has as {e};
`v` is the vocabulary, which is padded on our side only. Pure arithmetic and views: reads and writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from moejob_trainer.model.parameters import Parameter, Slices


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One line of a family's table."""

    parameter: str
    ours: str
    tensor: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Stacking:
    """Stacks of experts: each rank's experts, in runs that stay below a number of elements.

    The name of a stack spans its experts: `experts.{8:16/64}.up_proj.weight` stacks experts 8 to 15 of 64.
    """

    # Ranks that share the experts of a layer.
    ranks: int
    most_elements: int

    def runs(self, experts: int, elements: int) -> Iterator[slice]:
        """Yield the experts of each stack, for tensors of a number of elements."""
        each = experts // self.ranks if experts % self.ranks == 0 else experts
        length = max(1, min(each, self.most_elements // elements))
        for first in range(0, experts, each):
            for start in range(first, first + each, length):
                yield slice(start, min(start + length, first + each))


@dataclass(frozen=True, slots=True)
class Piece:
    """One published tensor, or a stack of them, and the region of our parameter that it fills.

    region: its bounds on every axis of our parameter; a fixed index is a slice of length one.
    axes: for each axis of their tensor, the axes of ours that it joins, the slowest first.
    """

    tensor: str
    parameter: str
    region: Slices
    axes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Their shape."""
        extents = self.extents
        return tuple(prod(extents[axis] for axis in group) for group in self.axes)

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of the region, in our axes."""
        return sizes(self.region)

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return prod(self.extents)

    def overlap(self, held: Slices) -> Slices | None:
        """Return the part of the region that a rank holds, in coordinates of our whole parameter."""
        common = tuple(
            slice(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
            for mine, theirs in zip(held, self.region, strict=True)
        )
        return common if all(part.start < part.stop for part in common) else None

    def around(self, part: Slices) -> Slices:
        """Return the smallest part around this one that is a single range on every axis of their tensor."""
        found = list(part)
        for group in self.axes:
            is_cut = False
            for axis in group:
                if is_cut:
                    found[axis] = self.region[axis]
                is_cut = is_cut or part[axis].stop - part[axis].start > 1
        return tuple(found)

    def source(self, part: Slices) -> Slices:
        """Return the slices of their tensor for a part of the region."""
        return tuple(self._theirs(group, part) for group in self.axes)

    def ours(self, theirs: Tensor, part: Slices) -> Tensor:
        """View a part that was read from their tensor with our axes."""
        extents = sizes(part)
        order = [axis for group in self.axes for axis in group]
        split = theirs.reshape([extents[axis] for axis in order])
        return split.permute([order.index(axis) for axis in range(len(order))])

    def theirs(self, ours: Tensor) -> Tensor:
        """View the whole region as their tensor."""
        order = [axis for group in self.axes for axis in group]
        return ours.permute(order).reshape(self.shape)

    def _theirs(self, group: tuple[int, ...], part: Slices) -> slice:
        """Return the range on one of their axes; of the axes it joins, all behind a cut axis must be whole."""
        if self.around(part) != part:
            raise ValueError(f"{self.tensor}: the part {part} is not one range of it")
        start = 0
        for axis in group:
            start = start * self.extents[axis] + part[axis].start - self.region[axis].start
        return slice(start, start + prod(part[axis].stop - part[axis].start for axis in group))


def sizes(part: Slices) -> tuple[int, ...]:
    """Return the length of each slice."""
    return tuple(one.stop - one.start for one in part)


def within(part: Slices, held: Slices) -> Slices:
    """Return a part of a parameter in coordinates of the region that a rank holds."""
    return tuple(slice(one.start - base.start, one.stop - base.start) for one, base in zip(part, held, strict=True))


def pieces(
    row: TensorRule, parameter: Parameter, tensor: str, vocabulary: int, stacking: Stacking | None = None
) -> Iterator[Piece]:
    """Yield the pieces of one parameter by a row; `tensor` is the row's tensor with everything but {e} filled in."""
    letters = row.ours.split()
    names = re.findall(r"\(([^)]*)\)|(\S+)", row.theirs)
    theirs = tuple(_group(letters, (bracket or plain).split()) for bracket, plain in names)
    axes = _complete(theirs, len(letters))
    region = tuple(_bounds(letter, size, vocabulary) for letter, size in zip(letters, parameter.shape, strict=True))
    if "{e}" not in tensor:
        yield Piece(tensor, parameter.name, region, axes)
        return
    expert = letters.index("e")
    experts = parameter.shape[expert]

    def of(run: slice) -> Slices:
        return (*region[:expert], run, *region[expert + 1 :])

    if stacking is None:
        for index in range(experts):
            yield Piece(tensor.replace("{e}", str(index)), parameter.name, of(slice(index, index + 1)), axes)
        return
    stacked = _complete(((expert,), *theirs), len(letters))
    for run in stacking.runs(experts, prod(sizes(of(slice(0, 1))))):
        name = tensor.replace("{e}", f"{{{run.start}:{run.stop}/{experts}}}")
        yield Piece(name, parameter.name, of(run), stacked)


def _group(letters: list[str], names: list[str]) -> tuple[int, ...]:
    return tuple(letters.index(name) for name in names)


def _bounds(letter: str, size: int, vocabulary: int) -> slice:
    if letter.isdigit():
        return slice(int(letter), int(letter) + 1)
    return slice(0, vocabulary if letter == "v" else size)


def _complete(axes: tuple[tuple[int, ...], ...], count: int) -> tuple[tuple[int, ...], ...]:
    """Put fixed axes, which their shape lacks, before the first axis: at length one they change nothing."""
    named = {axis for group in axes for axis in group}
    fixed = tuple(axis for axis in range(count) if axis not in named)
    return (fixed + axes[0], *axes[1:])
