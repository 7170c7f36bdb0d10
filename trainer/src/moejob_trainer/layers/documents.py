"""Document boundaries of a packed row, and the part of it that this rank holds; knows no tensor of the model.

A row is documents back to back. Context parallelism cuts the row, not each document, into 2*c equal chunks, and rank r
holds chunks r and 2*c-1-r in this order: under a causal mask every rank then has the same work. With c = 2 and a row of
16 tokens in documents of 6 and 10, chunks of 4:

    rank 0   tokens 0..3 and 12..15     queries of documents 0 | 1
    rank 1   tokens 4..7 and 8..11      queries of documents 0 0 1 1 | 1

Rank 1's first span has 2 queries with 6 keys of document 0, and 2 queries with 2 keys of document 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpan:
    """Neighbouring queries of one rank and the keys that they may see, both in pieces of one document each.

    The last query of a piece is at its last key: a causal mask is aligned at the bottom right.
    """

    first_key: int
    query_counts: tuple[int, ...]
    key_counts: tuple[int, ...]

    @property
    def total_queries(self) -> int:
        return sum(self.query_counts)

    @property
    def total_keys(self) -> int:
        return sum(self.key_counts)


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one row, seen from one rank of the context group."""

    cu_lengths: Tensor
    """int32 [documents + 1]: where each document starts in the whole row, on the device of the activations."""
    lengths: tuple[int, ...]
    """The same on the host: reading it never waits for a device."""
    context_rank: int = 0
    context_size: int = 1

    def __post_init__(self) -> None:
        if min(self.lengths, default=0) < 0:
            raise ValueError(f"document lengths {self.lengths} must not be negative")
        if self.row_tokens == 0:
            raise ValueError(
                f"a row of the document lengths {self.lengths} has no token; put a document of padding in it"
            )
        if self.cu_lengths.shape != (len(self.lengths) + 1,):
            raise ValueError(
                f"cu_lengths has shape {tuple(self.cu_lengths.shape)}, "
                f"but {len(self.lengths)} documents need {len(self.lengths) + 1} boundaries"
            )
        if not 0 <= self.context_rank < self.context_size:
            raise ValueError(f"context rank {self.context_rank} is not below the context size {self.context_size}")
        if self.context_size > 1 and self.row_tokens % (2 * self.context_size):
            raise ValueError(
                f"a row of {self.row_tokens} tokens cannot be cut into 2 x {self.context_size} equal chunks; "
                f"pad it to a multiple of {2 * self.context_size}"
            )

    @staticmethod
    def from_lengths(
        lengths: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        context_rank: int = 0,
        context_size: int = 1,
    ) -> Documents:
        """The documents with these lengths, in this order."""
        boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        cu_lengths = boundaries.to(device, non_blocking=True)
        return Documents(cu_lengths, tuple(lengths), context_rank, context_size)

    @property
    def row_tokens(self) -> int:
        """Tokens of the whole row."""
        return sum(self.lengths)

    @property
    def local_tokens(self) -> int:
        """Tokens that this rank holds."""
        return self.row_tokens // self.context_size

    def local_ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the parts that this rank holds, as (start, end) in the row."""
        if self.context_size == 1:
            return ((0, self.row_tokens),)
        chunk = self.row_tokens // (2 * self.context_size)
        chunks = (self.context_rank, 2 * self.context_size - 1 - self.context_rank)
        return tuple((chunk * index, chunk * (index + 1)) for index in chunks)

    def row_indices(self) -> Tensor:
        """Return the places of this rank's tokens in the row. int64 [tokens]"""
        return torch.cat(
            [torch.arange(start, end, device=self.cu_lengths.device) for start, end in self.local_ranges()]
        )

    def segment_ids(self) -> Tensor:
        """Return the document of each of this rank's tokens. int32 [tokens]"""
        return torch.searchsorted(self.cu_lengths[1:], self.row_indices().int(), right=True, out_int32=True)

    def position_ids(self) -> Tensor:
        """Return the place of each of this rank's tokens in its document. int64 [tokens]"""
        return self.row_indices() - self.cu_lengths[self.segment_ids()]

    @cached_property
    def attention_spans(self) -> tuple[AttentionSpan, ...]:
        """This rank's queries and their keys, one span for each run of neighbouring tokens."""
        return tuple(self._make_span(start, end) for start, end in self.local_ranges())

    @cached_property
    def span_bounds(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return where the documents of each span begin and end: among its queries, and among its keys.

        int32 [documents + 1] each. Documents before the first key or behind the last query are empty ones.
        """
        if self.context_size == 1:
            return ((self.cu_lengths, self.cu_lengths),)
        parts = zip(self.local_ranges(), self.attention_spans, strict=True)
        return tuple(
            (
                self.cu_lengths.clamp(start, end) - start,
                self.cu_lengths.clamp(span.first_key, end) - span.first_key,
            )
            for (start, end), span in parts
        )

    def _make_span(self, start: int, end: int) -> AttentionSpan:
        boundaries = pairwise(accumulate(self.lengths, initial=0))
        inside = [(first, min(last, end)) for first, last in boundaries if max(first, start) < min(last, end)]
        return AttentionSpan(
            first_key=inside[0][0],
            query_counts=tuple(last - max(first, start) for first, last in inside),
            key_counts=tuple(last - first for first, last in inside),
        )


def restore_row_order(gathered: Tensor, context_size: int) -> Tensor:
    """Return the row from the chunks of the context ranks, gathered rank after rank. [row_tokens, ...]"""
    if context_size == 1:
        return gathered
    # Ranks hold chunks (0, 3), (1, 2): first halves 0, 1 in order, then second halves 3, 2 reversed.
    halves = gathered.unflatten(0, (context_size, 2, gathered.shape[0] // (2 * context_size)))
    return torch.cat([halves[:, 0], halves[:, 1].flip(0)]).flatten(0, 1)
