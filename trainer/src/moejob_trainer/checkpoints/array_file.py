"""Arrays in one safetensors file, written without a second copy of all of them.

The library's own writer takes every array as bytes first, which doubles gigabytes of memory beside a training step.
Knows NumPy and no torch; weights have a writer of their own in moejob_trainer.conversion.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from moejob_trainer.distributed.encoding import Array
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.runtime.disk import Disk

# By their names in a header.
_DTYPES: Mapping[str, type] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8


def write_arrays(path: Path, arrays: Mapping[str, Array], disk: Disk | None = None) -> None:
    """Write arrays; a later sync makes them durable."""
    (disk or Disk()).write_blocks(path, _file_blocks(_order_arrays(arrays)))


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of a file that was written here."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise BadConfiguration(
            f"{path} is not a safetensors file ({error}), though it is as it was written; resume with the image that "
            "wrote it"
        ) from error


def size_bytes(arrays: Mapping[str, Array]) -> int:
    """Return the bytes of a file of these arrays."""
    return len(_build_header(_order_arrays(arrays))) + sum(array.nbytes for array in arrays.values()) if arrays else 0


def _order_arrays(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """Put wide types first, so that every array begins at a multiple of its element's size."""
    return dict(sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def _file_blocks(arrays: Mapping[str, Array]) -> Iterator[memoryview]:
    yield memoryview(_build_header(arrays))
    for array in arrays.values():
        # A copy of this array alone, and only where it is a part of another one.
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _build_header(arrays: Mapping[str, Array]) -> bytes:
    header: dict[str, object] = {}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
