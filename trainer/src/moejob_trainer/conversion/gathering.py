"""Whole Hugging Face tensors out of the parts that ranks hold, one at a time, each on one rank.

Every published tensor has one owner: the lowest of the ranks that could assemble it. By this rule, replicas of data
parallelism and a tied embedding's second stage own nothing. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter
from torch import Tensor

from moejob_api.layout.ranks import ParallelGroup
from moejob_trainer.conversion.families import Table
from moejob_trainer.conversion.groups import ModelGroups, gather_block, members
from moejob_trainer.conversion.tensor_table import Piece, within
from moejob_trainer.distributed import messages
from moejob_trainer.model.parameters import Coordinates, Parameter, Slices, division, local_shape, local_slices

# The ranks that hold a piece: one in each group that divides the piece's parameter but not the piece.
Home = tuple[tuple[ParallelGroup, int], ...]


@dataclass(frozen=True, slots=True)
class Assembly:
    """Recipe for putting one piece together in a layout; `gathered` are the axes on which it lies on several ranks."""

    gathered: tuple[tuple[int, ParallelGroup], ...]
    home: Home

    def is_held(self, place: Coordinates) -> bool:
        """Return whether a rank holds a part of it."""
        return all(place.within(group)[0] == rank for group, rank in self.home)


@dataclass(frozen=True, slots=True)
class Holding:
    """The pieces that a rank could assemble, and the first rank of each of its groups."""

    leads: frozenset[tuple[str, Home]]
    first: Mapping[ParallelGroup, int]


_HOLDING = TypeAdapter(Holding)


@dataclass(frozen=True)
class TensorGathering:
    """An agreement of all ranks about the rank that assembles each piece."""

    table: Table
    groups: ModelGroups
    state: Mapping[str, Tensor]
    holdings: tuple[Holding, ...]

    def pieces(self) -> Iterator[tuple[Piece, Assembly]]:
        """Yield the pieces this rank helps to assemble, in an order that all ranks share: any other would deadlock."""
        owners = _owners(self.holdings)
        for parameter in self.held():
            yield from self._pieces_of(parameter, owners)

    def owned(self) -> tuple[Piece, ...]:
        """The pieces that this rank puts together."""
        return tuple(piece for piece, how in self.pieces() if self._leader(how) == self.groups.rank)

    def tensors(self) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece this rank owns, as Hugging Face has it. All ranks must run it to its end together."""
        return ((piece, tensor) for piece, tensor in self.every() if tensor is not None)

    def every(self) -> Iterator[tuple[Piece, Tensor | None]]:
        """Yield every piece of the model, in an order that all ranks share, with its tensor on the rank that owns it.

        All ranks must run it to its end together.
        """
        owners = _owners(self.holdings)
        for parameter in self.table.parameters:
            # A weight may be assembled when it is read, by all replicas: each reads it, whichever owns its pieces.
            weight = self.state[parameter.name].detach() if parameter.name in self.state else None
            if weight is not None:
                _require_shape(parameter, weight, self.groups.coordinates)
            for piece in self.table.by_parameter[parameter.name]:
                yield piece, None if weight is None else self._owned(piece, weight, owners)

    def held(self) -> Iterator[Parameter]:
        """The parameters of which this rank holds a part."""
        return (parameter for parameter in self.table.parameters if parameter.name in self.state)

    def _pieces_of(
        self, parameter: Parameter, owners: Mapping[tuple[str, Home], int]
    ) -> Iterator[tuple[Piece, Assembly]]:
        place = self.groups.coordinates
        for piece in self.table.by_parameter[parameter.name]:
            how = assembly(piece, parameter, place)
            if how.is_held(place) and self._leader(how) == owners[parameter.name, how.home]:
                yield piece, how

    def _leader(self, how: Assembly) -> int:
        rank = self.groups.rank
        for _, group in how.gathered:
            rank = self.holdings[rank].first[group]
        return rank

    def _owned(self, piece: Piece, weight: Tensor, owners: Mapping[tuple[str, Home], int]) -> Tensor | None:
        how = assembly(piece, self.table.by_name[piece.parameter], self.groups.coordinates)
        if not how.is_held(self.groups.coordinates) or self._leader(how) != owners[piece.parameter, how.home]:
            return None
        return self._whole(piece, how, weight)

    def _whole(self, piece: Piece, how: Assembly, weight: Tensor) -> Tensor | None:
        held = local_slices(self.table.by_name[piece.parameter], self.groups.coordinates)
        axes = {axis for axis, _ in how.gathered}
        reach = tuple(
            mine if axis in axes else theirs for axis, (mine, theirs) in enumerate(zip(held, piece.region, strict=True))
        )
        block: Tensor | None = weight[within(reach, held)]
        for axis, group in how.gathered:
            block = None if block is None else gather_block(block, axis, self.groups.over(group))
        return None if block is None else piece.theirs(block[_rest(piece, axes)])


def plan_gathering(state: Mapping[str, Tensor], table: Table, groups: ModelGroups) -> TensorGathering:
    """Exchange what every rank holds; ValueError on all ranks where no rank holds a parameter."""
    place = groups.coordinates
    holdings = messages.all_gather(_holding(state, table, groups), _HOLDING, groups.world)
    gathering = TensorGathering(table, groups, state, tuple(holdings))
    owners = _owners(gathering.holdings)
    homeless = {
        parameter.name
        for parameter in table.parameters
        for piece in table.by_parameter[parameter.name]
        if (parameter.name, assembly(piece, parameter, place).home) not in owners
    }
    if homeless:
        raise ValueError(f"no rank holds all of {', '.join(sorted(homeless))}")
    return gathering


def _require_shape(parameter: Parameter, tensor: Tensor, place: Coordinates) -> None:
    expected = local_shape(parameter, place)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{parameter.name} is {tuple(tensor.shape)}; {place} holds {expected}")


def hugging_face_tensors(
    state: Mapping[str, Tensor], table: Table, groups: ModelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the published model, whole and one at a time, named as in its files.

    `state` are a rank's tensors by our global names. Every rank gets all names and shapes in one order, but values only
    for tensors that it owns: the others are on the meta device. All ranks must run this to its end.
    """
    for piece, tensor in plan_gathering(state, table, groups).every():
        for name in names(piece, table):
            yield name, torch.empty(piece.shape, device="meta") if tensor is None else tensor


def names(piece: Piece, table: Table) -> tuple[str, ...]:
    """Return the names of a piece in files: its own, and those of its copies that are written."""
    copies = (copy.tensor for copy in table.copies if copy.of == piece.tensor and copy.is_written)
    return (piece.tensor, *copies)


def assembly(piece: Piece, parameter: Parameter, place: Coordinates) -> Assembly:
    """Return the assembly of a piece: the same on all ranks, because it depends on sizes alone."""
    several: list[tuple[int, ParallelGroup]] = []
    home: list[tuple[ParallelGroup, int]] = []
    for axis, group in division(parameter, place):
        part = parameter.shape[axis] // place.within(group)[1]
        first, last = piece.region[axis].start // part, (piece.region[axis].stop - 1) // part
        if first == last:
            home.append((group, first))
        else:
            several.append((axis, group))
    return Assembly(tuple(several), tuple(home))


def _holding(state: Mapping[str, Tensor], table: Table, groups: ModelGroups) -> Holding:
    place = groups.coordinates
    leads = {
        (name, how.home)
        for name in state
        for piece in table.by_parameter[name]
        if (how := assembly(piece, table.by_name[name], place)).is_held(place)
        and all(place.within(group)[0] == 0 for _, group in how.gathered)
    }
    divisions = (ParallelGroup.TENSOR, ParallelGroup.EXPERT, ParallelGroup.EXPERT_TENSOR)
    return Holding(frozenset(leads), {group: members(groups.over(group), groups.rank)[0] for group in divisions})


def _owners(holdings: tuple[Holding, ...]) -> dict[tuple[str, Home], int]:
    owners: dict[tuple[str, Home], int] = {}
    for rank, holding in enumerate(holdings):
        for lead in holding.leads:
            owners.setdefault(lead, rank)
    return owners


def _rest(piece: Piece, axes: set[int]) -> Slices:
    """Return the slices to cut a gathered block to: they leave out rows beyond the vocabulary."""
    return tuple(part if axis in axes else slice(None) for axis, part in enumerate(piece.region))
