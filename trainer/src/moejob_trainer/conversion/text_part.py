"""The text of a model of several parts: its tensors as a model of text alone has them, and the tensors of the others.

Files of such a model call the text's tensors model.language_model.NAME, and may have all experts of a layer in one
tensor. The other parts, vision and MTP modules, are not trained; an export has their tensors as they were published.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from moejob_api.models.families import TEXT_PARTS
from moejob_trainer.conversion.checkpoint import StoredTensor, TensorSource
from moejob_trainer.conversion.quantized import open_dequantized
from moejob_trainer.conversion.safetensors_writer import DTYPES, TensorEntry, WrittenFile, open_shard_writer
from moejob_trainer.model.parameters import Slices
from moejob_trainer.runtime.json_files import read_json

OTHER_PARTS = ("model.visual.", "mtp.")
_TEXT, _PLAIN = "model.language_model.", "model."
_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up|down)_proj")


def open_tensor_source(folder: Path) -> TensorSource:
    """The weights of a folder, dequantized where they have to be, the text's by the names of a model of text alone."""
    source = open_dequantized(folder)
    return TextTensors(source) if any(name.startswith(_TEXT) for name in source.tensors) else source


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """The place of a tensor in the files: one of its own, or rows of an expert in the tensor of all."""

    name: str
    tensor: StoredTensor
    expert: int | None = None
    first_row: int = 0


@dataclass(frozen=True)
class TextTensors:
    """Tensors of a model of several parts; each expert of the text has its own."""

    source: TensorSource

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.source.folder

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by name."""
        return {name: place.tensor for name, place in self._places_by_name.items()}

    def read(self, name: str, part: Slices) -> Tensor:
        """One part of a tensor."""
        place = self._places_by_name[name]
        if place.expert is None:
            return self.source.read(place.name, part)
        rows, columns = part
        rows = slice(place.first_row + rows.start, place.first_row + rows.stop)
        return self.source.read(place.name, (slice(place.expert, place.expert + 1), rows, columns))[0]

    @cached_property
    def _places_by_name(self) -> Mapping[str, StoredPlace]:
        return {name: place for stored in self.source.tensors.items() for name, place in _stored_places(*stored)}


def _stored_places(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredPlace]]:
    """Yield the tensors that are in one of the files, by the names of a model of text alone."""
    plain = _PLAIN + name.removeprefix(_TEXT) if name.startswith(_TEXT) else name
    fused = _FUSED_EXPERTS.fullmatch(plain)
    if fused is None or len(tensor.shape) != len(("expert", "row", "column")) or plain == name:
        yield plain, StoredPlace(name, tensor)
        return
    experts, rows, columns = tensor.shape
    owner, matrices = fused[1], ("gate", "up") if fused[2] == "gate_up" else ("down",)
    single = StoredTensor(tensor.file, (rows // len(matrices), columns), tensor.dtype)
    for expert in range(experts):
        for half, matrix in enumerate(matrices):
            place = StoredPlace(name, single, expert, half * single.shape[0])
            yield f"{owner}{expert}.{matrix}_proj.weight", place


@dataclass(frozen=True)
class PublishedParts:
    """The parts of a model beside its text, for an export. Without a source the text is the whole model."""

    source: TensorSource | None = None

    def published_name(self, name: str) -> str:
        """Return the name in files of one of the text's tensors."""
        if self.source is None or not name.startswith(_PLAIN):
            return name
        return _TEXT + name.removeprefix(_PLAIN)

    @cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors of the other parts, in the type in which they are published."""
        stored_tensors = {} if self.source is None else self.source.tensors
        return tuple(
            TensorEntry(name, tensor.shape, DTYPES[tensor.dtype])
            for name, tensor in sorted(stored_tensors.items())
            if name.startswith(OTHER_PARTS)
        )

    def write_shard(self, path: Path, entries: list[TensorEntry], count: Callable[[int], None]) -> WrittenFile:
        """Write some of them into a file, with one in memory at a time."""
        if self.source is None:
            raise ValueError("a model of text alone has no other parts")
        checksums = {}
        with open_shard_writer(path, entries) as shard:
            for entry in entries:
                checksums[entry.name] = shard.write(
                    entry.name, self.source.read(entry.name, tuple(slice(0, size) for size in entry.shape))
                )
                count(1)
            shard.sync()
        return WrittenFile(path.name, tuple(entries), checksums)


TEXT_ALONE = PublishedParts()


def read_other_parts(template: Path, find_weights: Callable[[], Path]) -> PublishedParts:
    """Find the parts beside the text of the model that a template describes, and its published weights have."""
    config = read_json(template / "config.json")
    if not isinstance(config, dict) or str(config.get("model_type")) not in TEXT_PARTS:
        return TEXT_ALONE
    return PublishedParts(open_dequantized(find_weights()))
