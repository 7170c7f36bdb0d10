"""The index of a torch_dist checkpoint, `.metadata`: the file, offset and length of every part of a tensor.

The index is a pickle of torch.distributed.checkpoint's Metadata, written by a stranger. This module is the process
that reads it. The process has an empty environment, bounded memory and no file to write to, makes no object of a class
that the pickle names, and prints JSON. It imports the standard library alone.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from dataclasses import asdict, dataclass

from moejob_trainer.interchange.inert_pickle import (
    GlobalName,
    PickledDict,
    RecordedCall,
    RefusedPickle,
    Value,
    read_pickle,
)

_MIB = 1024**2
MOST_BYTES = 512 * _MIB
SECONDS = 1800
REFUSED, OUT_OF_MEMORY = 2, 3
# Real indexes take some 20 bytes of memory for each of theirs, and 150 bytes for each part of a tensor.
_MEMORY_FOR_EACH_BYTE, _MEMORY_AT_LEAST = 64, 512 * _MIB
# An entry of a list of parts is longer than this, so fewer bytes cannot stand for more parts.
_BYTES_OF_A_PART = 16
_MOST_AXES, _LONGEST_NAME, _LARGEST = 16, 4096, 2**62

_CHECKPOINT = "torch.distributed.checkpoint"
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_TENSOR, _PART, _PLACE, _INDEX, _SIZE = (
    GlobalName(f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"),
    GlobalName(f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"),
    GlobalName(f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    GlobalName(f"{_CHECKPOINT}.metadata", "MetadataIndex"),
    GlobalName("torch", "Size"),
)
_PROPERTIES = GlobalName(f"{_CHECKPOINT}.metadata", "TensorProperties")
_METADATA = (
    GlobalName(f"{_CHECKPOINT}.metadata", "Metadata"),
    GlobalName("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
)
# The names in an index. None is ever looked up: a pickle with any other name is no index.
NAMES = frozenset(
    {
        *(_TENSOR, _PART, _PLACE, _INDEX, _SIZE, _PROPERTIES, *_METADATA),
        *(
            GlobalName(f"{_CHECKPOINT}.metadata", name)
            for name in ("BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")
        ),
        *(
            GlobalName(f"{_CHECKPOINT}.planner", name)
            for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),
        GlobalName(f"{_CHECKPOINT}.filesystem", "_StoragePrefix"),
        GlobalName("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
        GlobalName("collections", "OrderedDict"),
        # The second is the name in what Python 3.13 writes.
        *(GlobalName(module, "PosixPath") for module in ("pathlib", "pathlib._local")),
        GlobalName("torch.serialization", "_get_layout"),
        *(GlobalName("torch", name) for name in (*_DTYPES, "strided", "sparse_coo")),
    }
)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor, and the bytes of a file in which torch.save wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """A tensor's type, by its name in torch, its size, and its parts."""

    dtype: str
    size: tuple[int, ...]
    parts: tuple[StoredPart, ...]


def indexed_tensors(content: bytes) -> dict[str, IndexedTensor]:
    """Return the tensors of an index by their keys; RefusedPickle where it is none."""
    return _IndexReader(read_pickle(content, NAMES), len(content)).read_tensors()


class _IndexReader:
    """The tensors of one index, with a bound on the parts that its bytes can stand for."""

    def __init__(self, index: Value, size: int) -> None:
        fields = _instance_fields(index, *_METADATA)
        self.described_tensors = _require_pairs(fields.get("state_dict_metadata"))
        self.locations = dict(self._read_place(key, value) for key, value in _require_pairs(fields.get("storage_data")))
        self.parts_left = size // _BYTES_OF_A_PART

    def read_tensors(self) -> dict[str, IndexedTensor]:
        tensors: dict[str, IndexedTensor] = {}
        for key, value in self.described_tensors:
            name = _require_text(key, "a key")
            if name in tensors:
                raise RefusedPickle(f"it names {name[:200]} twice")
            if isinstance(value, RecordedCall) and value.made_of == _TENSOR:
                tensors[name] = self._read_tensor(name, value)
        return tensors

    def _read_tensor(self, name: str, value: RecordedCall) -> IndexedTensor:
        fields = _instance_fields(value, _TENSOR)
        parts = fields.get("chunks")
        if not isinstance(parts, list):
            raise RefusedPickle(f"{name[:200]} has no list of parts")
        self.parts_left -= len(parts)
        if self.parts_left < 0:
            raise RefusedPickle("it has more parts than its bytes can stand for")
        size = _read_size(fields.get("size"))
        return IndexedTensor(
            _read_dtype(fields.get("properties")), size, tuple(self._read_part(name, part) for part in parts)
        )

    def _read_part(self, name: str, value: Value) -> StoredPart:
        fields = _instance_fields(value, _PART)
        offsets, sizes = _read_size(fields.get("offsets")), _read_size(fields.get("sizes"))
        location = self.locations.get((name, offsets)) or self.locations.get((name, ()))
        if location is None or len(offsets) != len(sizes):
            raise RefusedPickle(f"it does not say where {name[:200]} at {list(offsets)} is")
        return StoredPart(offsets, sizes, *location)

    @staticmethod
    def _read_place(key: Value, value: Value) -> tuple[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
        index, location = _instance_fields(key, _INDEX), _instance_fields(value, _PLACE)
        if location.get("transform_descriptors"):
            raise RefusedPickle("its files are compressed or encrypted; save the checkpoint without that")
        offset = index.get("offset")
        return (
            (_require_text(index.get("fqn"), "a key"), () if offset is None else _read_size(offset)),
            (
                _require_file_name(location.get("relative_path")),
                _require_whole_number(location.get("offset")),
                _require_whole_number(location.get("length")),
            ),
        )


def _instance_fields(value: Value, *made_of: GlobalName) -> dict[str, Value]:
    """Return the fields of an instance of one of these classes."""
    if not isinstance(value, RecordedCall) or value.made_of not in made_of or value.arguments:
        raise RefusedPickle(f"it has something else in the place of a {made_of[0].name}")
    return {_require_text(key, "a field"): field for key, field in _require_pairs(value.state)}


def _require_pairs(value: Value) -> list[tuple[Value, Value]]:
    if not isinstance(value, PickledDict):
        raise RefusedPickle("it has something else in the place of a dictionary")
    return value.items


def _require_text(value: Value, role: str) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise RefusedPickle(f"{role} is no text of {_LONGEST_NAME} characters at most")
    return value


def _require_file_name(value: Value) -> str:
    name = _require_text(value, "the name of a file")
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise RefusedPickle(f"it names {name[:200]!r}, which is outside of its folder; do not use this checkpoint")
    return name


def _require_whole_number(value: Value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise RefusedPickle("a size or an offset is no whole number from 0")
    return value


def _read_size(value: Value) -> tuple[int, ...]:
    """Return the numbers of a `torch.Size`, which is recorded as a call with a tuple of them."""
    match value:
        case RecordedCall(made_of=made_of, arguments=(tuple() as numbers,), state=None) if made_of == _SIZE:
            if len(numbers) <= _MOST_AXES:
                return tuple(map(_require_whole_number, numbers))
        case _:
            pass
    raise RefusedPickle(f"it has something else in the place of a size of {_MOST_AXES} axes at most")


def _read_dtype(properties: Value) -> str:
    match properties:
        case RecordedCall(made_of=made_of, state=(GlobalName(module="torch", name=name), *_)) if made_of == _PROPERTIES:
            if name in _DTYPES:
                return name
        case _:
            pass
    raise RefusedPickle("a tensor has no type")


def main(arguments: list[str]) -> int:
    """Print the tensors of the index on the standard input, of `size` bytes, as JSON, or why it is none."""
    size = int(arguments[0])
    _limit_process(size)
    # Nothing of millions of objects is freed before the end: looking for cycles among them takes half of the time.
    gc.disable()
    try:
        tensors = indexed_tensors(sys.stdin.buffer.read(size))
        sys.stdout.write(json.dumps({key: asdict(tensor) for key, tensor in tensors.items()}))
    except RefusedPickle as error:
        print(error, file=sys.stderr)  # noqa: T201
        return REFUSED
    except MemoryError:
        return OUT_OF_MEMORY
    return 0


def _limit_process(size: int) -> None:
    limits = {
        resource.RLIMIT_AS: _MEMORY_AT_LEAST + _MEMORY_FOR_EACH_BYTE * size,
        resource.RLIMIT_CPU: SECONDS,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for limited, limit_value in limits.items():
        resource.setrlimit(limited, (limit_value, limit_value))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
