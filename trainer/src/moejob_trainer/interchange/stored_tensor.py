"""One tensor as torch.save wrote it into a file of a checkpoint: an archive of a small pickle and of the elements.

torch.load, also with weights_only, unpickles into torch's own classes. Here the interpreter of `inert_pickle` reads the
stranger's bytes instead, and accepts only a pickle that rebuilds one plain tensor.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from moejob_trainer.interchange.inert_pickle import (
    GlobalName,
    RecordedCall,
    RefusedPickle,
    StoredValue,
    Value,
    read_pickle,
)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_STORAGES = {
    GlobalName("torch", "DoubleStorage"): torch.float64,
    GlobalName("torch", "FloatStorage"): torch.float32,
    GlobalName("torch", "HalfStorage"): torch.float16,
    GlobalName("torch", "BFloat16Storage"): torch.bfloat16,
}
_REBUILD = GlobalName("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = GlobalName("torch._utils", "_rebuild_parameter")
NAMES = frozenset({*_STORAGES, _REBUILD, _PARAMETER, GlobalName("collections", "OrderedDict")})
_MOST_PICKLE_BYTES = 64 * 1024
# Names of entries, and pickles: what zipfile may read at once. Elements are not read by it.
_MOST_BYTES_AT_ONCE = 1024 * 1024
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_MOST_AXES, _LARGEST = 16, 2**62


class RefusedTensor(ValueError):
    """Bytes that are no tensor of torch.save's; the message says why."""


@dataclass(frozen=True, slots=True)
class _TensorLayout:
    """The elements of a tensor within a storage."""

    dtype: torch.dtype
    storage: str
    elements: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def last_element(self) -> int:
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))


def read_stored_tensor(file: BinaryIO, start: int, length: int) -> Tensor:
    """Return the tensor that torch.save wrote into a part of a file; RefusedTensor where there is none."""
    part = _FilePart(file, start, length)
    try:
        with zipfile.ZipFile(part) as archive:
            return _read_archived_tensor(part, archive)
    except RefusedTensor:
        raise
    except RefusedPickle as error:
        raise RefusedTensor(f"it holds no tensor: {error}") from error
    # What zipfile raises for archives that are damaged, encrypted or of a later version.
    except (zipfile.BadZipFile, StopIteration, LookupError, RuntimeError, EOFError, ValueError, struct.error) as error:
        raise RefusedTensor(f"it is no archive of a tensor, or is cut off: {error}") from error


def _read_archived_tensor(part: _FilePart, archive: zipfile.ZipFile) -> Tensor:
    entries = {entry.filename: entry for entry in archive.infolist()}
    name = next(name for name in entries if name.endswith("/data.pkl"))
    folder = name.removesuffix("data.pkl")
    layout = _parse_layout(_read_small_entry(archive, entries[name]))
    order = entries.get(f"{folder}byteorder")
    if order is not None and _read_small_entry(archive, order) != b"little":
        raise RefusedTensor("its bytes are in big-endian order")
    return _read_elements(part, entries[f"{folder}data/{layout.storage}"], layout)


def _read_small_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.file_size > _MOST_PICKLE_BYTES or entry.compress_type != zipfile.ZIP_STORED:
        raise RefusedTensor(f"{entry.filename!r} has {entry.file_size:,} bytes, or is compressed")
    return archive.read(entry)


def _parse_layout(content: bytes) -> _TensorLayout:
    value = read_pickle(content, NAMES, has_stored_values=True)
    if isinstance(value, RecordedCall) and value.made_of == _PARAMETER and value.arguments:
        value = value.arguments[0]
    match value:
        case RecordedCall(
            made_of=made_of, arguments=(StoredValue() as stored, offset, sizes, strides, *_), state=None
        ) if made_of == _REBUILD:
            return _build_layout(stored, offset, sizes, strides)
        case _:
            raise RefusedTensor("it holds something else than one tensor")


def _build_layout(stored_value: StoredValue, offset: Value, sizes: Value, strides: Value) -> _TensorLayout:
    match stored_value.identifier:
        case ("storage", GlobalName() as kind, str() as storage, str(), int() as elements) if kind in _STORAGES:
            layout = _TensorLayout(
                _STORAGES[kind],
                storage,
                elements,
                _require_whole_number(offset),
                _require_numbers(sizes),
                _require_numbers(strides),
            )
        case _:
            raise RefusedTensor("its elements are of a type that no model of ours has")
    if len(layout.sizes) != len(layout.strides) or (0 not in layout.sizes and layout.last_element >= elements):
        raise RefusedTensor("its elements lie outside of what is stored")
    return layout


def _require_whole_number(value: Value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise RefusedTensor("a size or an offset is no whole number from 0")
    return value


def _require_numbers(value: Value) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > _MOST_AXES:
        raise RefusedTensor(f"its sizes are no {_MOST_AXES} numbers at most")
    return tuple(map(_require_whole_number, value))


def _read_elements(part: _FilePart, entry: zipfile.ZipInfo, layout: _TensorLayout) -> Tensor:
    needed_bytes = layout.elements * layout.dtype.itemsize
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != needed_bytes:
        raise RefusedTensor(f"it stores {entry.file_size:,} bytes for elements of {needed_bytes:,}, or is compressed")
    part.seek(entry.header_offset)
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(part.read(_LOCAL_HEADER.size))
    part.seek(entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length)
    if part.remaining_bytes < needed_bytes:
        raise RefusedTensor(f"it is cut off: {part.remaining_bytes:,} bytes are left of {needed_bytes:,}")
    content = torch.empty(needed_bytes, dtype=torch.uint8)
    count = part.readinto(memoryview(content.numpy()))
    if count != needed_bytes:
        raise RefusedTensor("it is cut off")
    return content.view(layout.dtype).as_strided(layout.sizes, layout.strides, layout.offset)


class _FilePart(io.RawIOBase):
    """A part of a file as a file of its own, read in small pieces, or into memory that the caller has made."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self.file, self.start, self.length, self.position = file, start, length, 0

    @property
    def remaining_bytes(self) -> int:
        """The bytes from the current position to the end of the part, or of the file if that comes first."""
        end = self.file.seek(0, io.SEEK_END)
        return max(0, min(self.length, end - self.start) - self.position)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise EOFError("it begins before its part of the file")
        self.position = base + offset
        return self.position

    def read(self, size: int = -1) -> bytes:
        wanted_bytes = self.remaining_bytes if size < 0 else min(size, self.remaining_bytes)
        if wanted_bytes > _MOST_BYTES_AT_ONCE:
            raise RefusedTensor(f"its list of entries has {wanted_bytes:,} bytes")
        self.file.seek(self.start + self.position)
        content = self.file.read(wanted_bytes)
        self.position += len(content)
        return content

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        target = buffer[: self.remaining_bytes]
        self.file.seek(self.start + self.position)
        count = self.file.readinto(target)  # type: ignore[attr-defined]
        self.position += count
        return int(count)
