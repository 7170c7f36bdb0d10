"""Document boundaries of a row, and the part of each rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moejob_trainer.layers.documents import Documents, restore_row_order

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
CONTEXT = st.sampled_from([1, 2, 4])


def on_every_rank(lengths: list[int], size: int) -> list[Documents]:
    """With padding to what `size` ranks can cut."""
    padded = [*lengths, -sum(lengths) % (2 * size)]
    return [Documents.from_lengths(padded, context_rank=rank, context_size=size) for rank in range(size)]


def test_positions_start_again_in_every_document() -> None:
    documents = Documents.from_lengths([3, 1, 0, 2])
    assert documents.position_ids().tolist() == [0, 1, 2, 0, 0, 1]
    assert documents.segment_ids().tolist() == [0, 0, 0, 1, 3, 3]
    assert documents.segment_ids().dtype == torch.int32
    assert documents.cu_lengths.tolist() == [0, 3, 4, 4, 6]


def test_a_rank_holds_one_early_and_one_late_chunk() -> None:
    documents = Documents.from_lengths([3, 5], context_rank=1, context_size=2)
    assert documents.local_ranges() == ((2, 4), (4, 6))
    assert documents.row_indices().tolist() == [2, 3, 4, 5]
    assert documents.position_ids().tolist() == [2, 0, 1, 2]
    assert documents.segment_ids().tolist() == [0, 1, 1, 1]


@given(LENGTHS, CONTEXT)
def test_the_ranks_hold_every_token_once_and_the_order_brings_them_back(lengths: list[int], size: int) -> None:
    ranks = on_every_rank(lengths, size)
    held = torch.cat([documents.row_indices() for documents in ranks])
    whole = torch.arange(ranks[0].row_tokens)
    assert torch.equal(restore_row_order(held, size), whole)
    assert {documents.local_tokens for documents in ranks} == {ranks[0].row_tokens // size}


@given(LENGTHS, CONTEXT)
def test_what_a_rank_says_of_its_tokens_is_what_the_whole_row_says(lengths: list[int], size: int) -> None:
    ranks = on_every_rank(lengths, size)
    whole = Documents.from_lengths(ranks[0].lengths)
    for documents in ranks:
        assert torch.equal(documents.position_ids(), whole.position_ids()[documents.row_indices()])
        assert torch.equal(documents.segment_ids(), whole.segment_ids()[documents.row_indices()])


@given(LENGTHS, CONTEXT)
def test_a_span_holds_each_query_with_all_tokens_of_its_document_before_it(lengths: list[int], size: int) -> None:
    for documents in on_every_rank(lengths, size):
        seen: list[int] = []
        for span, (_, end) in zip(documents.attention_spans, documents.local_ranges(), strict=True):
            assert span.first_key + span.total_keys == end
            for queries, keys in zip(span.query_counts, span.key_counts, strict=True):
                seen += range(keys - queries, keys)
        assert seen == documents.position_ids().tolist()


@pytest.mark.parametrize(
    ("lengths", "rank", "size", "said"),
    [
        pytest.param([3, -1], 0, 1, "must not be negative", id="a negative length"),
        pytest.param([0, 0], 0, 1, "put a document of padding in it", id="no token"),
        pytest.param([3, 3], 2, 2, "context rank 2", id="a rank outside its group"),
        pytest.param([3, 3], 0, 2, "pad it to a multiple of 4", id="a row that the ranks cannot cut"),
    ],
)
def test_impossible_rows_are_refused(lengths: list[int], rank: int, size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Documents.from_lengths(lengths, context_rank=rank, context_size=size)


def test_boundaries_that_do_not_fit_the_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 documents need 3 boundaries"):
        Documents(torch.tensor([0, 3]), (1, 2))
