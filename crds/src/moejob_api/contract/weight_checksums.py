"""Checksums of weights on their way, which trainer and engine compute alike, on any device and of any type.

A checksum is a sum of 64-bit words modulo 2^64, each word multiplied by an odd number of its place: integers add up to
the same in every order, another value of one word always gives another sum, and so do words that changed places, but
for words that differ in their highest bits alone. Two plain sums take the place of products, for which a device would
need memory as large as the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WORD_BYTES = 8
# A page has a checksum of its own, so that a report can name tensors: 1 MiB, as a table of words.
_ROWS, _COLUMNS = 128, 1024
PAGE_BYTES = _ROWS * _COLUMNS * WORD_BYTES
_CHUNK_BYTES = 64 * PAGE_BYTES


def page_checksums(data: Any, word: Any) -> list[int]:
    """Return the checksum of each page of a flat tensor of bytes. `word` is torch.int64: this package has no torch."""
    chunks = [data[start : start + _CHUNK_BYTES] for start in range(0, data.numel(), _CHUNK_BYTES)]
    return [checksum for chunk in chunks for checksum in _checksums(chunk, word).tolist()]


def changed_pages(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """Return the numbers of pages whose checksums differ; pure."""
    pages = max(len(ours), len(theirs))
    return [page for page in range(pages) if ours[page : page + 1] != theirs[page : page + 1]]


def _checksums(chunk: Any, word: Any) -> Any:
    pages = -(-chunk.numel() // PAGE_BYTES)
    if chunk.numel() % PAGE_BYTES or chunk.data_ptr() % WORD_BYTES:
        # Zeros add nothing. A word has to begin at an address that its type allows.
        padded = chunk.new_zeros(pages * PAGE_BYTES)
        padded[: chunk.numel()] = chunk
        chunk = padded
    table = chunk.view(word).view(pages, _ROWS, _COLUMNS)
    columns, rows = table.sum(1), table.sum(2)
    # The word in row r and column c counts (2c + 1) + 2048(r + 1) times: odd, and of no other place.
    of_columns = 2 * columns.new_ones(_COLUMNS).cumsum(0) - 1
    of_rows = 2 * _COLUMNS * rows.new_ones(_ROWS).cumsum(0)
    return (columns * of_columns).sum(1) + (rows * of_rows).sum(1)
