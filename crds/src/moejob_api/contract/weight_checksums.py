"""Checksums of weights on their way, which trainer and engine compute alike, on any device and of any type.

A checksum is a sum of 64-bit words modulo 2^64, each word multiplied by an odd number of its place. Integers add up to
the same sum in every order. A changed word always changes the sum; two swapped words change it unless they differ in
their highest bits alone. The code adds plain sums instead of products, for which a device would need memory as large as
the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moejob_api.arithmetic import ceil_div

WORD_BYTES = 8
# A page has a checksum of its own, so that a report can name tensors: 1 MiB, as a table of words.
_ROWS, _COLUMNS = 128, 1024
PAGE_BYTES = _ROWS * _COLUMNS * WORD_BYTES
_CHUNK_BYTES = 64 * PAGE_BYTES


def page_checksums(data: Any, library: Any) -> list[int]:
    """Return the checksum of each page of flat bytes: a tensor and torch, or an array and NumPy.

    Memory of the host is read as an array. One thread of NumPy reads 8 GB/s; threads of torch wait for each other at
    every sum, and on cores that are busy for 20 s over the 750 MB of a small mixture.
    """
    chunks = [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
    return [checksum for chunk in chunks for checksum in _checksums(chunk, library).tolist()]


def changed_pages(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """Return the numbers of pages whose checksums differ; pure."""
    pages = max(len(ours), len(theirs))
    return [page for page in range(pages) if ours[page : page + 1] != theirs[page : page + 1]]


def _checksums(chunk: Any, library: Any) -> Any:
    pages = ceil_div(len(chunk), PAGE_BYTES)
    # A tensor's word has to begin at an address that its type allows, an array's does not.
    is_odd = hasattr(chunk, "data_ptr") and chunk.data_ptr() % WORD_BYTES
    if len(chunk) % PAGE_BYTES or is_odd:
        # Zeros add nothing.
        padded = library.zeros(pages * PAGE_BYTES, dtype=library.uint8, device=chunk.device)
        padded[: len(chunk)] = chunk
        chunk = padded
    table = chunk.view(library.int64).reshape(pages, _ROWS, _COLUMNS)
    columns, rows = table.sum(1), table.sum(2)
    # The word in row r and column c counts (2c + 1) + 2048(r + 1) times: an odd number, different for every place.
    of_columns = 2 * library.arange(_COLUMNS, dtype=library.int64, device=chunk.device) + 1
    of_rows = 2 * _COLUMNS * library.arange(1, _ROWS + 1, dtype=library.int64, device=chunk.device)
    return (columns * of_columns).sum(1) + (rows * of_rows).sum(1)
