"""The safetensors files of one folder: tensors by name, and single parts of them.

Reads headers when opened, and afterwards only the parts that are requested. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moejob_api.models.reader import refused
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
            return cls(folder, _stored(single))
        if (folder / INDEX_FILE).is_file():
            return cls(folder, _indexed(folder))
        raise unusable(f"{folder} has {_other_weights(folder)}; expected {SINGLE_FILE} or {INDEX_FILE}")

    def read(self, name: str, part: Slices) -> Tensor:
        """Read one part of a tensor, and no more of the file, in the type it is stored in."""
        file = self.tensors[name].file
        try:
            return self.files.read(file, name, part)
        except SafetensorError as error:
            raise unusable(f"{file}: {name} cannot be read ({error}); {_AGAIN}") from error


def unusable(message: str) -> InvalidSpec:
    """Return the error of a checkpoint that cannot be used."""
    return refused(Rule.MODEL_CONFIG, message)


def listed(names: Iterable[str], most: int = 5) -> str:
    """Names for a message: the first few, and how many more there are."""
    found = sorted(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def _stored(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            return {name: StoredTensor(file, tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except SafetensorError as error:
        raise unusable(f"{file} is cut off or not a safetensors file ({error}); {_AGAIN}") from error


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    places = _weight_map(folder / INDEX_FILE)
    files = sorted(set(places.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise unusable(f"{folder} lacks {listed(absent)}, named by {INDEX_FILE}; {_AGAIN}")
    tensors = {name: stored for file in files for name, stored in _stored(folder / file).items()}
    astray = [name for name in places.keys() | tensors.keys() if places.get(name) != _file_name(tensors.get(name))]
    if astray:
        raise unusable(f"{folder}: {INDEX_FILE} and the files disagree on where {listed(astray)} is; {_AGAIN}")
    return tensors


def _file_name(stored: StoredTensor | None) -> str | None:
    return stored.file.name if stored else None


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = read_json(index)
    except ValueError as error:
        raise unusable(f"{index} is not JSON ({error}); {_AGAIN}") from error
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not all(_is_plain(file) for file in places.values()):
        raise unusable(f"{index} has no weight_map from tensors to files of its own folder; {_AGAIN}")
    return places


def _is_plain(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file


def _other_weights(folder: Path) -> str:
    if not folder.is_dir():
        return "no weights, for it is no folder"
    others = [path.name for path in folder.iterdir() if path.suffix in {".bin", ".pth", ".pt", ".gguf"}]
    return f"only {listed(others)}" if others else "no weights"
