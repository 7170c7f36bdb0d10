"""One safetensors file, written tensor by tensor: the library's own writer wants all of a file in memory at once.

The library reads back every file that is written here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moejob_trainer.distributed.messages import Dtype
from moejob_trainer.runtime.disk import sync_and_forget

# Threads that read, write and hash: one makes 1 to 2 GB/s, and few disks gain from more of them.
_MOST_THREADS = 8
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Of the types that are written here, by their names in a header.
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor that a file will hold."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def size_bytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file of an export, and the checksum of every tensor in it."""

    file: str
    entries: tuple[TensorEntry, ...]
    checksums: Mapping[str, str]


class CorruptExport(OSError):
    """The tensors read back differ from those written or held: storage or assembly is at fault."""


@dataclass(frozen=True, slots=True)
class ShardWriter:
    """An open file and where each tensor goes. Several threads may write to it."""

    descriptor: int
    offsets: Mapping[str, int]

    def write(self, name: str, tensor: Tensor) -> str:
        """Write one tensor; return the checksum of its bytes."""
        return hashlib.sha256(self.put_tensor(name, tensor)).hexdigest()

    def put_tensor(self, name: str, tensor: Tensor) -> memoryview:
        """Write one tensor; return its bytes."""
        content = _tensor_bytes(tensor)
        _write_at(self.descriptor, content, self.offsets[name])
        return content

    def sync(self) -> None:
        """Wait until storage has all written bytes."""
        os.fsync(self.descriptor)


def plan_shards(entries: Sequence[TensorEntry], most_bytes: int) -> list[list[TensorEntry]]:
    """The entries in order, in files of at most `most_bytes`; a tensor above that has a file of its own."""
    shards: list[list[TensorEntry]] = []
    free = 0
    for entry in entries:
        if not shards or entry.size_bytes > free:
            shards.append([])
            free = most_bytes
        shards[-1].append(entry)
        free -= entry.size_bytes
    return shards


@contextmanager
def open_shard_writer(
    path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str] = MappingProxyType({})
) -> Iterator[ShardWriter]:
    """A file ready for its tensors in any order."""
    # Wide types first, so that every tensor begins at a multiple of its element's size.
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header, offsets, end = _build_header(ordered, metadata)
    with path.open("xb", buffering=0) as file:
        _write_at(file.fileno(), memoryview(header), 0)
        file.truncate(end)
        yield ShardWriter(file.fileno(), offsets)


def verify(path: Path, entries: Sequence[TensorEntry], checksums: Mapping[str, str]) -> None:
    """Read a file back once storage has it; CorruptExport where it differs from the tensors written."""
    sync_and_forget(path)
    try:
        with safe_open(path, "pt") as tensor_file, hashing_threads() as threads:
            if sorted(tensor_file.keys()) != sorted(entry.name for entry in entries):
                raise CorruptExport(f"{path} does not hold the tensors that were written to it")
            for future in [
                threads.submit(_verify_tensor, path, tensor_file, tensor_entry, checksums[tensor_entry.name])
                for tensor_entry in entries
            ]:
                future.result()
    except SafetensorError as error:
        raise CorruptExport(f"{path} cannot be read back ({error})") from error


def hashing_threads() -> ThreadPoolExecutor:
    """Return threads that read, write and hash tensors, each on one core."""
    cores = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(min(cores, _MOST_THREADS), "tensors", torch.set_num_threads, (1,))


def _verify_tensor(path: Path, tensor_file: safe_open, entry: TensorEntry, checksum: str) -> None:
    tensor: Tensor = tensor_file.get_tensor(entry.name)  # type: ignore[no-untyped-call]
    if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
        raise CorruptExport(f"{path}: {entry.name} is {tensor.dtype} {list(tensor.shape)}, not as it was written")
    if hashlib.sha256(_tensor_bytes(tensor)).hexdigest() != checksum:
        raise CorruptExport(f"{path}: {entry.name} was read back with other bytes than were written")


def _build_header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """The header, where each tensor begins in the file, and the file's length."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    begins: dict[str, int] = {}
    end = 0
    for entry in entries:
        begins[entry.name] = end
        end += entry.size_bytes
        place = [begins[entry.name], end]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": place}
    text = json.dumps(header).encode()
    # The data begins at a multiple of eight.
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    offsets = {name: first + begin for name, begin in begins.items()}
    return len(text).to_bytes(8, "little") + text, offsets, first + end


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of the content: one call writes 2 GiB at most, and less where the volume is almost full."""
    written_bytes = 0
    while written_bytes < len(content):
        written_bytes += os.pwrite(descriptor, content[written_bytes:], offset + written_bytes)


def _tensor_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
