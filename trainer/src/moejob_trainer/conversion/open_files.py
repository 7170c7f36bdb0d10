"""Safetensors files that stay open between the parts that are read of them.

Opening a file parses the header of all its tensors: thousands in a model of experts. But an open file is mapped, and
the parts that were read count as memory of this process. So after a number of bytes all files are closed and reopened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from safetensors import safe_open
from torch import Tensor


@dataclass(slots=True)
class OpenFiles:
    """Files that several threads may read. most_bytes: bytes to read from all files before they are closed."""

    most_bytes: int = 2**28
    _tensor_files: dict[Path, safe_open] = field(default_factory=dict)
    _read_bytes: int = 0
    _lock: Lock = field(default_factory=Lock)

    def read_slice(self, file: Path, name: str, part: Sequence[slice]) -> Tensor:
        """Return a part of a tensor, as it is stored; SafetensorError where the file is no such file."""
        with self._lock:
            if self._read_bytes > self.most_bytes:
                self._tensor_files.clear()
                self._read_bytes = 0
            tensor_file = self._tensor_files.get(file)
            if tensor_file is None:
                tensor_file = self._tensor_files[file] = safe_open(file, "pt")
        # A tensor without dimensions has no parts.
        values: Tensor = tensor_file.get_slice(name)[tuple(part)] if part else tensor_file.get_tensor(name)  # type: ignore[no-untyped-call]
        with self._lock:
            self._read_bytes += values.nbytes
        return values
