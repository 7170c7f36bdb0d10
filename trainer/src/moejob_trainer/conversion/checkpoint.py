"""The safetensors files of one folder: tensors by name, and single parts of them.

Reads headers when opened, and afterwards only the parts that are requested. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moejob_api.models.reader import model_error
from moejob_api.problems import InvalidSpec, Rule
from moejob_trainer.conversion.open_files import OpenFiles
from moejob_trainer.model.parameters import Slices
from moejob_trainer.runtime.json_files import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_AGAIN = "download or copy it again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """File, shape and safetensors type (BF16) of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """Tensors by name, and parts of them."""

    @property
    def folder(self) -> Path:
        """The folder of the files."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by name."""

    def read(self, name: str, part: Slices) -> Tensor:
        """One part of a tensor."""


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """The tensors of a folder."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    files: OpenFiles = field(default_factory=OpenFiles, compare=False)

    @classmethod
    def open(cls, folder: Path) -> SafetensorsFolder:
        """Read every file's header; InvalidSpec where a file is missing or broken."""
        single = folder / SINGLE_FILE
        if single.is_file():
            return cls(folder, _read_header(single))
        if (folder / INDEX_FILE).is_file():
            return cls(folder, _read_indexed_files(folder))
        raise unusable_checkpoint(
            f"{folder} has {_describe_other_weights(folder)}; expected {SINGLE_FILE} or {INDEX_FILE}"
        )

    def read(self, name: str, part: Slices) -> Tensor:
        """Read one part of a tensor, and no more of the file, in the type it is stored in."""
        file = self.tensors[name].file
        try:
            return self.files.read_slice(file, name, part)
        except SafetensorError as error:
            raise unusable_checkpoint(f"{file}: {name} cannot be read ({error}); {_AGAIN}") from error


def unusable_checkpoint(message: str) -> InvalidSpec:
    """Return the error of a checkpoint that cannot be used."""
    return model_error(Rule.MODEL_CONFIG, message)


def join_names(names: Iterable[str], most: int = 5) -> str:
    """Names for a message: the first few, and how many more there are."""
    ordered = sorted(names)
    remainder = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + remainder


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, "pt") as tensor_file:
            slices = {name: tensor_file.get_slice(name) for name in tensor_file.keys()}  # noqa: SIM118 (not a dict)
            return {
                name: StoredTensor(file, tuple(tensor_slice.get_shape()), tensor_slice.get_dtype())
                for name, tensor_slice in slices.items()
            }
    except SafetensorError as error:
        raise unusable_checkpoint(f"{file} is cut off or not a safetensors file ({error}); {_AGAIN}") from error


def _read_indexed_files(folder: Path) -> dict[str, StoredTensor]:
    files_by_tensor = _read_weight_map(folder / INDEX_FILE)
    files = sorted(set(files_by_tensor.values()))
    missing_files = [file for file in files if not (folder / file).is_file()]
    if missing_files:
        raise unusable_checkpoint(f"{folder} lacks {join_names(missing_files)}, named by {INDEX_FILE}; {_AGAIN}")
    tensors = {name: tensor for file in files for name, tensor in _read_header(folder / file).items()}
    # Such a folder mixes two versions, or a download was cut off: a tensor could come from the wrong file.
    misplaced = [
        name
        for name in files_by_tensor.keys() | tensors.keys()
        if files_by_tensor.get(name) != _file_name(tensors.get(name))
    ]
    if misplaced:
        raise unusable_checkpoint(
            f"{folder}: {INDEX_FILE} and the files disagree on where {join_names(misplaced)} is; {_AGAIN}"
        )
    return tensors


def _file_name(tensor: StoredTensor | None) -> str | None:
    return tensor.file.name if tensor else None


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        content = read_json(index)
    except ValueError as error:
        raise unusable_checkpoint(f"{index} is not JSON ({error}); {_AGAIN}") from error
    files_by_tensor = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files_by_tensor, dict) or not all(_is_plain_name(file) for file in files_by_tensor.values()):
        raise unusable_checkpoint(f"{index} has no weight_map from tensors to files of its own folder; {_AGAIN}")
    return files_by_tensor


def _is_plain_name(file: object) -> bool:
    # An index is a stranger's file: "../" would lead out of the folder.
    return isinstance(file, str) and Path(file).name == file


def _describe_other_weights(folder: Path) -> str:
    if not folder.is_dir():
        return "no weights, for it is no folder"
    other_files = [path.name for path in folder.iterdir() if path.suffix in {".bin", ".pth", ".pt", ".gguf"}]
    return f"only {join_names(other_files)}" if other_files else "no weights"
