"""From Hugging Face's files into the parameters that a rank holds, reading exactly its part.

A checkpoint is compared with the model's table before any tensor is read. Knows neither modules nor process groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moejob_api.models.reader import WHERE
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_trainer.conversion.checkpoint import listed, unusable
from moejob_trainer.conversion.families import Copy, Table
from moejob_trainer.conversion.quantized import TensorSource, readable
from moejob_trainer.conversion.tensor_table import Piece, sizes, within
from moejob_trainer.model.parameters import Coordinates, Parameter, Slices, local_shape, local_slices

_READABLE = {"F64", "F32", "F16", "BF16"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ITS_CONFIG = "use the config.json that was published with it"


@dataclass(frozen=True)
class Source:
    """A checkpoint that fits a model. `left_out` are tensors of MTP modules that this model does not have."""

    checkpoint: TensorSource
    table: Table
    left_out: tuple[str, ...]

    def read(self, parameter: Parameter, held: Slices) -> Tensor:
        """A part of one of our parameters, in the type it is stored in; rows beyond the vocabulary are zero."""
        parts = list(self._parts(parameter, held))
        whole = torch.zeros(sizes(held), dtype=parts[0][1].dtype if parts else torch.float32)
        for place, part in parts:
            whole[place] = part
        return whole

    def fill(self, target: Tensor, parameter: Parameter, held: Slices) -> None:
        """Read a part into an existing tensor, with a part of one published tensor in memory at a time."""
        with torch.no_grad():
            if sizes(held) != _filled(self.table.by_parameter[parameter.name], held):
                target.zero_()
            for place, part in self._parts(parameter, held):
                target[place].copy_(part)

    def holds(self, weight: Tensor, parameter: Parameter, held: Slices) -> bool:
        """Return whether the files hold the tensor's values for a part of a parameter, compared in the files' type."""
        parts = self._parts(parameter, held)
        return all(torch.equal(part, weight[place].to(part.dtype).cpu()) for place, part in parts)

    def _parts(self, parameter: Parameter, held: Slices) -> Iterator[tuple[Slices, Tensor]]:
        for piece in self.table.by_parameter[parameter.name]:
            part = piece.overlap(held)
            if part is not None:
                around = piece.around(part)
                yield within(part, held), piece.ours(self._read(piece, around), around)[within(part, around)]

    def _read(self, piece: Piece, part: Slices) -> Tensor:
        where = piece.source(part)
        read = self.checkpoint.read(piece.tensor, where)
        if not bool(torch.isfinite(read).all()):
            file = self.checkpoint.tensors[piece.tensor].file
            raise unusable(f"{file}: {piece.tensor} holds numbers that are not finite; use another checkpoint")
        for copy in self.table.copies:
            if copy.of == piece.tensor and copy.tensor in self.checkpoint.tensors:
                self._compare(copy, where, read)
        return read

    def _compare(self, copy: Copy, where: Slices, expected: Tensor) -> None:
        if not torch.equal(self.checkpoint.read(copy.tensor, where), expected):
            raise unusable(
                f"{self.checkpoint.folder}: {copy.tensor} differs from {copy.of}, but this model has one weight for "
                "both; correct tie_word_embeddings in config.json, or set training.mtpLossCoefficient to 0"
            )


def opened(folder: Path, table: Table) -> Source:
    """Open the checkpoint of a folder; compare number, names, shapes and types of its tensors with a model."""
    checkpoint = readable(folder)
    problems = tuple(Problem(Rule.MODEL_CONFIG, WHERE, f"{folder} {found}") for found in _misfits(checkpoint, table))
    if problems:
        raise InvalidSpec(problems)
    return Source(checkpoint, table, tuple(sorted(_left_out(checkpoint, table))))


def import_weights(state: Mapping[str, Tensor], source: Source, place: Coordinates) -> None:
    """Fill a rank's tensors, given by our global names, in place and in their own type."""
    for name, target in state.items():
        parameter = source.table.by_name.get(name)
        if parameter is None:
            raise ValueError(f"{name} is no parameter of this {source.table.shape.family} model")
        if tuple(target.shape) != local_shape(parameter, place):
            raise ValueError(f"{name} is {tuple(target.shape)}; {place} holds {local_shape(parameter, place)}")
        source.fill(target, parameter, local_slices(parameter, place))


def _misfits(checkpoint: TensorSource, table: Table) -> Iterator[str]:
    held, expected = checkpoint.tensors, _shapes(table)
    quantized = [name for name, stored in held.items() if stored.dtype not in _READABLE]
    if quantized:
        # Their scales and shapes would only be named as further mistakes.
        shown = (f"{name} ({held[name].dtype})" for name in quantized)
        yield f"is quantized: {listed(shown)}; use or write a copy of it in bfloat16"
        return
    missing = table.by_tensor.keys() - held.keys()
    if missing:
        yield f"lacks {len(missing)} of {len(table.pieces)} tensors: {listed(missing)}; {_advice(missing, table)}"
    extra = held.keys() - expected.keys() - _left_out(checkpoint, table) - _meaningless(checkpoint)
    if extra:
        family = table.shape.family
        yield f"holds {len(extra)} tensors that this {family} model does not have: {listed(extra)}; {_ITS_CONFIG}"
    wrong = [name for name in expected.keys() & held.keys() if held[name].shape != expected[name]]
    if wrong:
        shown = (f"{name} is {list(held[name].shape)}, not {list(expected[name])}" for name in wrong)
        yield f"holds {len(wrong)} tensors of another shape than config.json says: {listed(shown)}; {_ITS_CONFIG}"


def _shapes(table: Table) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that a checkpoint may hold."""
    shapes = {piece.tensor: piece.shape for piece in table.pieces}
    return shapes | {copy.tensor: shapes[copy.of] for copy in table.copies}


def _advice(missing: set[str], table: Table) -> str:
    if all(_layer(name) >= len(table.shape.layers) for name in missing):
        return "it was saved without its MTP modules: set training.mtpLossCoefficient to 0 to train without them"
    return f"download it again, or {_ITS_CONFIG}"


def _left_out(checkpoint: TensorSource, table: Table) -> set[str]:
    """Return the tensors of MTP modules that this model does not have; other layers beyond the last are a mistake."""
    if table.shape.mtp_layers:
        return set()
    modules = {
        _layer(name)
        for name in checkpoint.tensors
        if name.endswith(".eh_proj.weight") and _layer(name) >= len(table.shape.layers)
    }
    return {name for name in checkpoint.tensors if _layer(name) in modules}


def _meaningless(checkpoint: TensorSource) -> set[str]:
    """Return tensors without elements, and rotary frequencies, which old files hold and the layer computes."""
    return {
        name
        for name, stored in checkpoint.tensors.items()
        if 0 in stored.shape or name.endswith(".rotary_emb.inv_freq")
    }


def _layer(name: str) -> int:
    """Return the index of a published tensor's layer; -1 where it belongs to no layer."""
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def _filled(pieces: tuple[Piece, ...], held: Slices) -> tuple[int, ...]:
    """Return the length up to which the pieces fill a rank's part."""
    parts = [within(part, held) for piece in pieces if (part := piece.overlap(held)) is not None]
    return tuple(max((part[axis].stop for part in parts), default=0) for axis in range(len(held)))
