"""Files that the system is asked to read before they are wanted.

The system alone reads only a little ahead of a reader or of a touched page. A disk or a network volume could serve many
requests at once, and would wait for the next one most of the time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Bytes that are read while their reader is busy. They lie in the system's cache, not in this process.
AHEAD_BYTES = 2**28
# Several files are hashed at once.
_BLOCKS_AHEAD_BYTES = 2**26
# Systems shorten a request to what their disk takes at once; this is the least.
_ASKED_BYTES = 2**17


@dataclass(frozen=True, slots=True)
class FilePart:
    """A range of a file."""

    path: Path
    offset: int
    length: int


def read_ahead(
    items: Iterable[T], parts: Callable[[T], Iterable[FilePart]], most_bytes: int = AHEAD_BYTES
) -> Iterator[T]:
    """Yield the items in order, while the system reads the parts of files that the next ones need.

    most_bytes: the bytes of parts that are requested ahead, beside the parts of one item.
    """
    waiting: deque[tuple[T, int]] = deque()
    requested_bytes = 0
    with ThreadPoolExecutor(1, "read-ahead") as executor:
        for item in items:
            item_bytes = 0
            for part in parts(item):
                executor.submit(ask, part)
                item_bytes += part.length
            waiting.append((item, item_bytes))
            requested_bytes += item_bytes
            while len(waiting) > 1 and requested_bytes > most_bytes:
                first, first_bytes = waiting.popleft()
                yield first
                requested_bytes -= first_bytes
        while waiting:
            yield waiting.popleft()[0]


def read_blocks(path: Path, block_bytes: int) -> Iterator[memoryview]:
    """Read a file from its beginning to its end. Each block is good until the next one is asked for."""
    buffer = memoryview(bytearray(block_bytes))
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        parts = [FilePart(path, offset, block_bytes) for offset in range(0, size, block_bytes)]
        for _ in read_ahead(parts, lambda part: [part], _BLOCKS_AHEAD_BYTES):
            if count := file.readinto(buffer):
                yield buffer[:count]
        # A read may give less than it was asked for, and the file may have grown.
        while count := file.readinto(buffer):
            yield buffer[:count]


def ask(part: FilePart) -> None:
    """Have the system begin to read a part."""
    # Advice that cannot be given is no failure; reading itself says what is wrong with a file.
    with suppress(OSError):
        descriptor = os.open(part.path, os.O_RDONLY)
        try:
            for offset in range(part.offset, part.offset + part.length, _ASKED_BYTES):
                os.posix_fadvise(descriptor, offset, _ASKED_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
