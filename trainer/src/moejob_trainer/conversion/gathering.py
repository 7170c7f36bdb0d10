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
from moejob_trainer.conversion.families import TensorTable
from moejob_trainer.conversion.groups import ModelGroups, gather_block, group_ranks
from moejob_trainer.conversion.tensor_table import TensorPiece, relative_slices
from moejob_trainer.distributed import messages
from moejob_trainer.model.parameters import Coordinates, Parameter, Slices, divided_axes, local_shape, local_slices

# The ranks that hold a piece: one in each group that divides the piece's parameter but not the piece.
Home = tuple[tuple[ParallelGroup, int], ...]


@dataclass(frozen=True, slots=True)
class AssemblyRecipe:
    """Recipe for putting one piece together in a layout; `gathered` are the axes on which it lies on several ranks."""

    gathered: tuple[tuple[int, ParallelGroup], ...]
    home: Home

    def is_held(self, coordinates: Coordinates) -> bool:
        """Return whether a rank holds a part of it."""
        return all(coordinates.rank_and_size(group)[0] == rank for group, rank in self.home)


@dataclass(frozen=True, slots=True)
class HeldPieces:
    """The pieces that a rank could assemble, and the first rank of each of its groups."""

    leads: frozenset[tuple[str, Home]]
    first: Mapping[ParallelGroup, int]


_HOLDING = TypeAdapter(HeldPieces)


@dataclass(frozen=True)
class TensorGathering:
    """An agreement of all ranks about the rank that assembles each piece."""

    table: TensorTable
    groups: ModelGroups
    state: Mapping[str, Tensor]
    holdings: tuple[HeldPieces, ...]

    def local_pieces(self) -> Iterator[tuple[TensorPiece, AssemblyRecipe]]:
        """Yield the pieces this rank helps to assemble, in an order that all ranks share: any other would deadlock."""
        owners = _owner_ranks(self.holdings)
        for parameter in self.held_parameters():
            yield from self._pieces_of_parameter(parameter, owners)

    def owned_pieces(self) -> tuple[TensorPiece, ...]:
        """The pieces that this rank puts together."""
        return tuple(piece for piece, recipe in self.local_pieces() if self._leading_rank(recipe) == self.groups.rank)

    def tensors(self) -> Iterator[tuple[TensorPiece, Tensor]]:
        """Each piece this rank owns, as Hugging Face has it. All ranks must run it to its end together."""
        return ((piece, tensor) for piece, tensor in self.all_pieces() if tensor is not None)

    def all_pieces(self) -> Iterator[tuple[TensorPiece, Tensor | None]]:
        """Yield every piece of the model, in an order that all ranks share, with its tensor on the rank that owns it.

        All ranks must run it to its end together.
        """
        owners = _owner_ranks(self.holdings)
        for parameter in self.table.parameters:
            # A weight may be assembled when it is read, by all replicas: each reads it, whichever owns its pieces.
            weight = self.state[parameter.name].detach() if parameter.name in self.state else None
            if weight is not None:
                _require_shape(parameter, weight, self.groups.coordinates)
            for piece in self.table.by_parameter[parameter.name]:
                yield piece, None if weight is None else self._assemble_if_owned(piece, weight, owners)

    def held_parameters(self) -> Iterator[Parameter]:
        """The parameters that this rank holds, whole or in part."""
        return (parameter for parameter in self.table.parameters if parameter.name in self.state)

    def _pieces_of_parameter(
        self, parameter: Parameter, owners: Mapping[tuple[str, Home], int]
    ) -> Iterator[tuple[TensorPiece, AssemblyRecipe]]:
        coordinates = self.groups.coordinates
        for piece in self.table.by_parameter[parameter.name]:
            recipe = assembly_recipe(piece, parameter, coordinates)
            if recipe.is_held(coordinates) and self._leading_rank(recipe) == owners[parameter.name, recipe.home]:
                yield piece, recipe

    def _leading_rank(self, recipe: AssemblyRecipe) -> int:
        rank = self.groups.rank
        for _, group in recipe.gathered:
            rank = self.holdings[rank].first[group]
        return rank

    def _assemble_if_owned(
        self, piece: TensorPiece, weight: Tensor, owners: Mapping[tuple[str, Home], int]
    ) -> Tensor | None:
        recipe = assembly_recipe(piece, self.table.by_name[piece.parameter], self.groups.coordinates)
        if (
            not recipe.is_held(self.groups.coordinates)
            or self._leading_rank(recipe) != owners[piece.parameter, recipe.home]
        ):
            return None
        return self._assemble_piece(piece, recipe, weight)

    def _assemble_piece(self, piece: TensorPiece, recipe: AssemblyRecipe, weight: Tensor) -> Tensor | None:
        held_slices = local_slices(self.table.by_name[piece.parameter], self.groups.coordinates)
        axes = {axis for axis, _ in recipe.gathered}
        reach = tuple(
            held_axis if axis in axes else piece_axis
            for axis, (held_axis, piece_axis) in enumerate(zip(held_slices, piece.region, strict=True))
        )
        block: Tensor | None = weight[relative_slices(reach, held_slices)]
        for axis, group in recipe.gathered:
            block = None if block is None else gather_block(block, axis, self.groups.process_group(group))
        return None if block is None else piece.view_as_theirs(block[_remaining_slices(piece, axes)])


def plan_gathering(state: Mapping[str, Tensor], table: TensorTable, groups: ModelGroups) -> TensorGathering:
    """Exchange what every rank holds; ValueError on all ranks where no rank holds a parameter."""
    coordinates = groups.coordinates
    holdings = messages.all_gather_values(_list_held_pieces(state, table, groups), _HOLDING, groups.world)
    gathering = TensorGathering(table, groups, state, tuple(holdings))
    owners = _owner_ranks(gathering.holdings)
    ownerless = {
        parameter.name
        for parameter in table.parameters
        for piece in table.by_parameter[parameter.name]
        if (parameter.name, assembly_recipe(piece, parameter, coordinates).home) not in owners
    }
    if ownerless:
        raise ValueError(f"no rank holds all of {', '.join(sorted(ownerless))}")
    return gathering


def _require_shape(parameter: Parameter, tensor: Tensor, coordinates: Coordinates) -> None:
    expected = local_shape(parameter, coordinates)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{parameter.name} is {tuple(tensor.shape)}; {coordinates} holds {expected}")


def hugging_face_tensors(
    state: Mapping[str, Tensor], table: TensorTable, groups: ModelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the published model, whole and one at a time, named as in its files.

    `state` are a rank's tensors by our global names. Every rank gets all names and shapes in one order, but values only
    for tensors that it owns: the others are on the meta device. All ranks must run this to its end.
    """
    for piece, tensor in plan_gathering(state, table, groups).all_pieces():
        for name in published_names(piece, table):
            yield name, torch.empty(piece.shape, device="meta") if tensor is None else tensor


def published_names(piece: TensorPiece, table: TensorTable) -> tuple[str, ...]:
    """Return the names of a piece in files: its own name, and the names of its written copies."""
    copies = (copy.tensor for copy in table.copies if copy.original == piece.tensor and copy.is_written)
    return (piece.tensor, *copies)


def assembly_recipe(piece: TensorPiece, parameter: Parameter, coordinates: Coordinates) -> AssemblyRecipe:
    """Return the assembly of a piece: the same on all ranks, because it depends on sizes alone."""
    several: list[tuple[int, ParallelGroup]] = []
    home: list[tuple[ParallelGroup, int]] = []
    for axis, group in divided_axes(parameter, coordinates):
        part = parameter.shape[axis] // coordinates.rank_and_size(group)[1]
        first, last = piece.region[axis].start // part, (piece.region[axis].stop - 1) // part
        if first == last:
            home.append((group, first))
        else:
            several.append((axis, group))
    return AssemblyRecipe(tuple(several), tuple(home))


def _list_held_pieces(state: Mapping[str, Tensor], table: TensorTable, groups: ModelGroups) -> HeldPieces:
    coordinates = groups.coordinates
    leads = {
        (name, recipe.home)
        for name in state
        for piece in table.by_parameter[name]
        if (recipe := assembly_recipe(piece, table.by_name[name], coordinates)).is_held(coordinates)
        and all(coordinates.rank_and_size(group)[0] == 0 for _, group in recipe.gathered)
    }
    divisions = (ParallelGroup.TENSOR, ParallelGroup.EXPERT, ParallelGroup.EXPERT_TENSOR)
    return HeldPieces(
        frozenset(leads), {group: group_ranks(groups.process_group(group), groups.rank)[0] for group in divisions}
    )


def _owner_ranks(holdings: tuple[HeldPieces, ...]) -> dict[tuple[str, Home], int]:
    owners: dict[tuple[str, Home], int] = {}
    for rank, holding in enumerate(holdings):
        for lead in holding.leads:
            owners.setdefault(lead, rank)
    return owners


def _remaining_slices(piece: TensorPiece, axes: set[int]) -> Slices:
    """Return the slices to cut a gathered block to: they leave out rows beyond the vocabulary."""
    return tuple(part if axis in axes else slice(None) for axis, part in enumerate(piece.region))
