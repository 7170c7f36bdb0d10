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

import torch
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
class ExpertStacking:
    """Stacks of experts: each rank's experts, in runs that stay below a number of elements.

    The name of a stack spans its experts: `experts.{8:16/64}.up_proj.weight` stacks experts 8 to 15 of 64.
    """

    # Ranks that share the experts of a layer.
    ranks: int
    most_elements: int

    def expert_runs(self, experts: int, elements: int) -> Iterator[slice]:
        """Yield the experts of each stack, for tensors of a number of elements."""
        experts_per_rank = experts // self.ranks if experts % self.ranks == 0 else experts
        length = max(1, min(experts_per_rank, self.most_elements // elements))
        for first in range(0, experts, experts_per_rank):
            for start in range(first, first + experts_per_rank, length):
                yield slice(start, min(start + length, first + experts_per_rank))


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One published tensor, or a stack of them, and the region of our parameter that it fills.

    region: its bounds on every axis of our parameter; a fixed index is a slice of length one.
    axes: for each axis of their tensor, the axes of ours that it joins, the slowest first.
    section_lengths: lengths of the parts of the last axis in the first bracket, where their tensor has part after part:
    the queries of all heads, then the keys of all, then the values. Empty where each head has its own side by side.
    first_row: the row of their tensor at which the region begins.
    """

    tensor: str
    parameter: str
    region: Slices
    axes: tuple[tuple[int, ...], ...]
    section_lengths: tuple[int, ...] = ()
    first_row: int = 0

    @property
    def sections(self) -> Iterator[TensorPiece]:
        """The piece itself, or its sections in the order of their tensor."""
        if not self.section_lengths:
            yield self
            return
        axis, row = self.axes[0][-1], self.first_row
        start = self.region[axis].start
        for length in self.section_lengths:
            region = (*self.region[:axis], slice(start, start + length), *self.region[axis + 1 :])
            section = TensorPiece(self.tensor, self.parameter, region, self.axes, first_row=row)
            yield section
            start += length
            row += section.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Their shape."""
        extents = self.extents
        return tuple(prod(extents[axis] for axis in group) for group in self.axes)

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of the region, in our axes."""
        return slice_lengths(self.region)

    @property
    def element_count(self) -> int:
        """The number of elements in the region."""
        return prod(self.extents)

    def overlap(self, held_region: Slices) -> Slices | None:
        """Return the part of the region that a rank holds, in coordinates of our whole parameter."""
        common = tuple(
            slice(max(held_axis.start, region_axis.start), min(held_axis.stop, region_axis.stop))
            for held_axis, region_axis in zip(held_region, self.region, strict=True)
        )
        return common if all(part.start < part.stop for part in common) else None

    def enclosing_part(self, part: Slices) -> Slices:
        """Return the smallest part around this one that is a single range on every axis of their tensor."""
        enclosing = list(part)
        for group in self.axes:
            is_cut = False
            for axis in group:
                if is_cut:
                    enclosing[axis] = self.region[axis]
                is_cut = is_cut or part[axis].stop - part[axis].start > 1
        return tuple(enclosing)

    def source_slices(self, part: Slices) -> Slices:
        """Return the slices of their tensor for a part of the region."""
        rows, *others = (self._source_slice(group, part) for group in self.axes)
        return (slice(self.first_row + rows.start, self.first_row + rows.stop), *others)

    def view_as_ours(self, theirs: Tensor, part: Slices) -> Tensor:
        """View a part that was read from their tensor with our axes."""
        extents = slice_lengths(part)
        order = [axis for group in self.axes for axis in group]
        split = theirs.reshape([extents[axis] for axis in order])
        return split.permute([order.index(axis) for axis in range(len(order))])

    def view_as_theirs(self, ours: Tensor) -> Tensor:
        """View the whole region as their tensor."""
        if self.section_lengths:
            parts = ours.split(self.section_lengths, self.axes[0][-1])
            return torch.cat([section.view_as_theirs(part) for section, part in zip(self.sections, parts, strict=True)])
        order = [axis for group in self.axes for axis in group]
        return ours.permute(order).reshape(self.shape)

    def _source_slice(self, group: tuple[int, ...], part: Slices) -> slice:
        """Return the range on one of their axes; of the axes it joins, all behind a cut axis must be whole."""
        if self.enclosing_part(part) != part:
            raise ValueError(f"{self.tensor}: the part {part} is not one range of it")
        start = 0
        for axis in group:
            start = start * self.extents[axis] + part[axis].start - self.region[axis].start
        return slice(start, start + prod(part[axis].stop - part[axis].start for axis in group))


def slice_lengths(part: Slices) -> tuple[int, ...]:
    """Return the length of each slice."""
    return tuple(axis.stop - axis.start for axis in part)


def relative_slices(part: Slices, held_region: Slices) -> Slices:
    """Return a part of a parameter in coordinates of the region that a rank holds."""
    return tuple(
        slice(axis.start - base.start, axis.stop - base.start) for axis, base in zip(part, held_region, strict=True)
    )


def pieces_of_rule(
    row: TensorRule, parameter: Parameter, tensor: str, vocabulary: int, stacking: ExpertStacking | None = None
) -> Iterator[TensorPiece]:
    """Yield the pieces of one parameter by a row; `tensor` is the row's tensor with everything but {e} filled in."""
    letters = row.ours.split()
    names = re.findall(r"\(([^)]*)\)|(\S+)", row.theirs)
    theirs = tuple(_axis_indices(letters, (bracket or plain).split()) for bracket, plain in names)
    axes = _prepend_fixed_axes(theirs, len(letters))
    region = tuple(
        _axis_bounds(letter, size, vocabulary) for letter, size in zip(letters, parameter.shape, strict=True)
    )
    if "{e}" not in tensor:
        yield TensorPiece(tensor, parameter.name, region, axes, parameter.sections)
        return
    expert = letters.index("e")
    experts = parameter.shape[expert]

    def region_of(run: slice) -> Slices:
        return (*region[:expert], run, *region[expert + 1 :])

    if stacking is None:
        for index in range(experts):
            yield TensorPiece(
                tensor.replace("{e}", str(index)), parameter.name, region_of(slice(index, index + 1)), axes
            )
        return
    stacked_axes = _prepend_fixed_axes(((expert,), *theirs), len(letters))
    for run in stacking.expert_runs(experts, prod(slice_lengths(region_of(slice(0, 1))))):
        name = tensor.replace("{e}", f"{{{run.start}:{run.stop}/{experts}}}")
        yield TensorPiece(name, parameter.name, region_of(run), stacked_axes)


def _axis_indices(letters: list[str], names: list[str]) -> tuple[int, ...]:
    return tuple(letters.index(name) for name in names)


def _axis_bounds(letter: str, size: int, vocabulary: int) -> slice:
    if letter.isdigit():
        return slice(int(letter), int(letter) + 1)
    return slice(0, vocabulary if letter == "v" else size)


def _prepend_fixed_axes(axes: tuple[tuple[int, ...], ...], count: int) -> tuple[tuple[int, ...], ...]:
    """Put fixed axes, which their shape lacks, before the first axis: at length one they change nothing."""
    named_axes = {axis for group in axes for axis in group}
    fixed_axes = tuple(axis for axis in range(count) if axis not in named_axes)
    return (fixed_axes + axes[0], *axes[1:])
