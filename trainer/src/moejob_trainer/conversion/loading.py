"""From Hugging Face's files into the parameters that a rank holds, reading exactly its part.

A checkpoint is compared with the model's table before any tensor is read. Knows neither modules nor process groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from moejob_api.models.reader import WHERE
from moejob_api.models.shape import Family
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_trainer.conversion.checkpoint import TensorSource, join_names, unusable_checkpoint
from moejob_trainer.conversion.families import TensorCopy, TensorTable
from moejob_trainer.conversion.tensor_table import TensorPiece, relative_slices, slice_lengths
from moejob_trainer.conversion.text_part import OTHER_PARTS, open_tensor_source
from moejob_trainer.model.parameters import Coordinates, Parameter, Slices, local_shape, local_slices

_HOST = torch.device("cpu")
_READABLE = {"F64", "F32", "F16", "BF16"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# MTP of ERNIE-4.5, which Transformers does not read.
_ERNIE_MTP = "model.mtp_"
# Published beside what is trained. Of Qwen3-Next's module no config.json knows, and Transformers leaves it out too.
_LEFT_OUT: Mapping[Family, tuple[str, ...]] = {Family.QWEN3_NEXT: ("mtp.",), Family.QWEN3_5_MOE: OTHER_PARTS}
_ITS_CONFIG = "use the config.json that was published with it"


@dataclass(frozen=True)
class PublishedCheckpoint:
    """A checkpoint that fits a model. `left_out` are tensors of parts that are not trained: MTP modules, vision."""

    checkpoint: TensorSource
    table: TensorTable
    left_out: tuple[str, ...]

    def read_parameter(self, parameter: Parameter, held_region: Slices) -> Tensor:
        """A part of one of our parameters, in the type it is stored in; rows beyond the vocabulary are zero."""
        parts = list(self._stored_parts(parameter, held_region))
        tensor = torch.zeros(slice_lengths(held_region), dtype=parts[0][1].dtype if parts else torch.float32)
        for target_slices, part in parts:
            tensor[target_slices] = part
        return tensor

    def fill_tensor(self, target: Tensor, parameter: Parameter, held_region: Slices) -> None:
        """Read a part into an existing tensor, with a part of one published tensor in memory at a time.

        The part moves to the tensor's device as it lies in the file, and is checked and transposed there.
        """
        with torch.no_grad():
            if slice_lengths(held_region) != _filled_sizes(self.table.by_parameter[parameter.name], held_region):
                target.zero_()
            for target_slices, part in self._stored_parts(parameter, held_region, target.device):
                target[target_slices].copy_(part)

    def has_equal_values(self, weight: Tensor, parameter: Parameter, held_region: Slices) -> bool:
        """Return whether the files hold the tensor's values for a part of a parameter, compared in the files' type."""
        parts = self._stored_parts(parameter, held_region)
        return all(torch.equal(part, weight[target_slices].to(part.dtype).cpu()) for target_slices, part in parts)

    def _stored_parts(
        self, parameter: Parameter, held_region: Slices, device: torch.device = _HOST
    ) -> Iterator[tuple[Slices, Tensor]]:
        sections = (piece.sections for piece in self.table.by_parameter[parameter.name])
        for piece in chain.from_iterable(sections):
            part = piece.overlap(held_region)
            if part is not None:
                around = piece.enclosing_part(part)
                yield (
                    relative_slices(part, held_region),
                    piece.view_as_ours(self._read_piece(piece, around, device), around)[relative_slices(part, around)],
                )

    def _read_piece(self, piece: TensorPiece, part: Slices, device: torch.device) -> Tensor:
        region = piece.source_slices(part)
        values = self.checkpoint.read(piece.tensor, region).to(device)
        if not _is_all_finite(values):
            file = self.checkpoint.tensors[piece.tensor].file
            raise unusable_checkpoint(
                f"{file}: {piece.tensor} holds numbers that are not finite; use another checkpoint"
            )
        for copy in self.table.copies:
            if copy.original == piece.tensor and copy.tensor in self.checkpoint.tensors:
                self._require_equal_copy(copy, region, values.cpu())
        return values

    def _require_equal_copy(self, copy: TensorCopy, region: Slices, expected: Tensor) -> None:
        if not torch.equal(self.checkpoint.read(copy.tensor, region), expected):
            raise unusable_checkpoint(
                f"{self.checkpoint.folder}: {copy.tensor} differs from {copy.original}, but this model has one weight "
                "for both; correct tie_word_embeddings in config.json, or set training.mtpLossCoefficient to 0"
            )


def _is_all_finite(values: Tensor) -> bool:
    # aminmax passes on a NaN, and is an infinity where there is one. On a host it takes a 25th of isfinite's time: that
    # was 10 ms for an expert's 1.5 million numbers, half of the time to load.
    return not values.numel() or all(math.isfinite(bound) for bound in torch.aminmax(values))


def open_published_checkpoint(folder: Path, table: TensorTable) -> PublishedCheckpoint:
    """Open the checkpoint of a folder; compare number, names, shapes and types of its tensors with a model."""
    checkpoint = open_tensor_source(folder)
    problems = tuple(
        Problem(Rule.MODEL_CONFIG, WHERE, f"{folder} {misfit}") for misfit in _describe_misfits(checkpoint, table)
    )
    if problems:
        raise InvalidSpec(problems)
    return PublishedCheckpoint(checkpoint, table, tuple(sorted(_left_out_tensors(checkpoint, table))))


def import_weights(
    state: Mapping[str, Tensor],
    source: PublishedCheckpoint,
    coordinates: Coordinates,
    count_elements: Callable[[int], None] = lambda _: None,
) -> None:
    """Fill a rank's tensors, given by our global names, in place and in their own type; count their elements."""
    for name, target in state.items():
        parameter = source.table.by_name.get(name)
        if parameter is None:
            raise ValueError(f"{name} is no parameter of this {source.table.shape.family} model")
        if tuple(target.shape) != local_shape(parameter, coordinates):
            raise ValueError(
                f"{name} is {tuple(target.shape)}; {coordinates} holds {local_shape(parameter, coordinates)}"
            )
        source.fill_tensor(target, parameter, local_slices(parameter, coordinates))
        count_elements(target.numel())


def _describe_misfits(checkpoint: TensorSource, table: TensorTable) -> Iterator[str]:
    stored_tensors, expected_shapes = checkpoint.tensors, _expected_shapes(table)
    quantized_names = [name for name, tensor in stored_tensors.items() if tensor.dtype not in _READABLE]
    if quantized_names:
        # Their scales and shapes would only be named as further mistakes.
        examples = (f"{name} ({stored_tensors[name].dtype})" for name in quantized_names)
        yield f"is quantized: {join_names(examples)}; use or write a copy of it in bfloat16"
        return
    missing = table.by_tensor.keys() - stored_tensors.keys()
    if missing:
        yield (
            f"lacks {len(missing)} of {len(table.pieces)} tensors: {join_names(missing)}; "
            f"{_advice_on_missing(missing, table)}"
        )
    unexpected = (
        stored_tensors.keys()
        - expected_shapes.keys()
        - _left_out_tensors(checkpoint, table)
        - _meaningless_tensors(checkpoint)
    )
    if unexpected:
        family = table.shape.family
        yield (
            f"holds {len(unexpected)} tensors that this {family} model does not have: {join_names(unexpected)}; "
            f"{_ITS_CONFIG}"
        )
    misshapen = [
        name
        for name in expected_shapes.keys() & stored_tensors.keys()
        if stored_tensors[name].shape != expected_shapes[name]
    ]
    if misshapen:
        examples = (
            f"{name} is {list(stored_tensors[name].shape)}, not {list(expected_shapes[name])}" for name in misshapen
        )
        yield (
            f"holds {len(misshapen)} tensors of another shape than config.json says: {join_names(examples)}; "
            f"{_ITS_CONFIG}"
        )


def _expected_shapes(table: TensorTable) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that a checkpoint may hold."""
    shapes = {piece.tensor: piece.shape for piece in table.pieces}
    return shapes | {copy.tensor: shapes[copy.original] for copy in table.copies}


def _advice_on_missing(missing: set[str], table: TensorTable) -> str:
    if all(_layer_index(name) >= len(table.shape.layers) for name in missing):
        return "it was saved without its MTP modules: set training.mtpLossCoefficient to 0 to train without them"
    return f"download it again, or {_ITS_CONFIG}"


def _left_out_tensors(checkpoint: TensorSource, table: TensorTable) -> set[str]:
    """Return the tensors of parts that this model does not have; other layers beyond the last are a mistake."""
    if prefixes := _LEFT_OUT.get(table.shape.family):
        return {name for name in checkpoint.tensors if name.startswith(prefixes)}
    if table.shape.mtp_layers:
        return set()
    modules = {
        _layer_index(name)
        for name in checkpoint.tensors
        if name.endswith(".eh_proj.weight") and _layer_index(name) >= len(table.shape.layers)
    }
    return {name for name in checkpoint.tensors if _layer_index(name) in modules}


def _meaningless_tensors(checkpoint: TensorSource) -> set[str]:
    """Return tensors without elements, rotary frequencies of old files, and modules that no model here has."""
    return {
        name
        for name, tensor in checkpoint.tensors.items()
        if 0 in tensor.shape or name.endswith(".rotary_emb.inv_freq") or name.startswith(_ERNIE_MTP)
    }


def _layer_index(name: str) -> int:
    """Return the index of a published tensor's layer; -1 where it belongs to no layer."""
    match = _LAYER.match(name)
    return int(match[1]) if match else -1


def _filled_sizes(pieces: tuple[TensorPiece, ...], held_region: Slices) -> tuple[int, ...]:
    """Return the length up to which the pieces fill a rank's part."""
    parts = [relative_slices(part, held_region) for piece in pieces if (part := piece.overlap(held_region)) is not None]
    return tuple(max((part[axis].stop for part in parts), default=0) for axis in range(len(held_region)))
