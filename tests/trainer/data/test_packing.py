"""Global batches cut into micro batches: by hand, and what holds for any documents and any layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import spec
from moejob_api.layout.sizes import derive_layout
from moejob_trainer.data.packing import BatchPlan, assign_slots, batch_plan, build_global_batch
from moejob_trainer.training import Document, MicroBatch
from moejob_trainer.training.micro_batch import FILLER
from trainer.training_data import make_document, make_documents, total_loss_weight

plans = st.builds(
    BatchPlan,
    data=st.integers(1, 5),
    tokens=st.integers(3, 8).map(lambda n: n * 24),
    packing=st.booleans(),
    documents=st.none() | st.integers(1, 4),
    multiple=st.sampled_from([1, 2, 3, 4, 8]),
    count_multiple=st.integers(1, 3),
    equal_lengths=st.booleans(),
    pad_token=st.just(7),
)
lengths_of_documents = st.lists(st.integers(1, 72), min_size=1, max_size=40)


def all_micro_batches(ranks: list[list[MicroBatch]]) -> list[MicroBatch]:
    return [micro for rank in ranks for micro in rank]


def slots(micro: MicroBatch) -> list[tuple[int, int, int]]:
    """Document, first position and end of every slot."""
    edges = micro.cu_lengths.tolist()
    return list(zip(micro.documents, edges, edges[1:], strict=False))


def test_two_documents_packed_by_hand() -> None:
    a = make_document(3, id=0, weights=[9, 0, 0.5])
    b = make_document(2, id=1, weights=[9, 2])
    [[micro]] = build_global_batch([a, b], BatchPlan(data=1, tokens=8, multiple=2, pad_token=7))
    assert micro.tokens.tolist() == [1000, 1001, 1002, 7, 2000, 2001]
    assert micro.labels.tolist() == [1001, 1002, 7, 7, 2001, 7]
    assert micro.weights.tolist() == [0, 0.5, 0, 0, 2, 0]
    assert micro.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert micro.cu_lengths.tolist() == [0, 4, 6]
    assert (micro.documents, micro.lengths) == ((0, 1), (3, 2))
    assert micro.real_token_mask().tolist() == [True, True, True, False, True, True]
    assert [t.dtype for t in (micro.tokens, micro.labels, micro.weights, micro.positions, micro.cu_lengths)] == [
        torch.int64,
        torch.int64,
        torch.float32,
        torch.int64,
        torch.int32,
    ]


def test_two_documents_padded_by_hand() -> None:
    plan = BatchPlan(data=1, tokens=8, packing=False, documents=2, pad_token=7)
    [[micro]] = build_global_batch(make_documents(2, 4), plan)
    assert micro.tokens.tolist() == [1000, 1001, 7, 7, 2000, 2001, 2002, 2003]
    assert micro.cu_lengths.tolist() == [0, 4, 8]


def test_the_first_token_of_a_document_weighs_nothing_since_nothing_predicts_it() -> None:
    assert total_loss_weight([make_document(3, weights=[100, 1, 0.25]), make_document(1, weights=[100])]) == 1.25


def test_ranks_without_a_document_get_padding_that_weighs_nothing() -> None:
    plan = BatchPlan(data=3, tokens=8, multiple=4, pad_token=7)
    ranks = build_global_batch([make_document(5)], plan)
    assert [[micro.documents for micro in rank] for rank in ranks] == [[(0,)], [(FILLER,)], [(FILLER,)]]
    filler = ranks[1][0]
    assert (filler.tokens.tolist(), filler.weights.tolist(), filler.lengths) == ([7] * 4, [0.0] * 4, (0,))


def test_rows_that_fit_exactly_are_not_spread_over_more_micro_batches() -> None:
    # Longest first to the emptiest would put 3 + 2 + 2 into one of two.
    assert len(assign_slots([3, 3, 2, 2, 2], BatchPlan(data=1, tokens=6))[0]) == 2


def test_no_rank_gets_the_longest_micro_batch_every_time() -> None:
    ranks = assign_slots([8, 7, 6, 5], BatchPlan(data=2, tokens=8))
    assert [[sum(slot.tokens for slot in micro) for micro in rank] for rank in ranks] == [[8, 5], [7, 6]]


@given(lengths_of_documents, plans)
def test_every_document_lies_in_one_slot_whole(lengths: list[int], plan: BatchPlan) -> None:
    given_documents = make_documents(*lengths)
    seen = Counter[int]()
    for micro in all_micro_batches(build_global_batch(given_documents, plan)):
        for (number, start, end), length in zip(slots(micro), micro.lengths, strict=True):
            seen[number] += number != FILLER
            tokens = given_documents[number].tokens.tolist() if number != FILLER else []
            assert micro.tokens[start:end].tolist() == tokens + [7] * (end - start - length)
            assert length == len(tokens)
    assert +seen == Counter(range(len(lengths)))


@given(lengths_of_documents, plans)
def test_labels_never_come_from_another_document(lengths: list[int], plan: BatchPlan) -> None:
    for micro in all_micro_batches(build_global_batch(make_documents(*lengths), plan)):
        for (_, start, end), length in zip(slots(micro), micro.lengths, strict=True):
            within = slice(start, start + max(0, length - 1))
            assert micro.labels[within].tolist() == (micro.tokens[within] + 1).tolist()
            assert micro.weights[within].tolist() == [1.0] * max(0, length - 1)
            assert not micro.weights[start + max(0, length - 1) : end].any()


@given(lengths_of_documents, plans)
def test_every_rank_gets_equally_many_micro_batches_within_what_the_plan_allows(
    lengths: list[int], plan: BatchPlan
) -> None:
    ranks = build_global_batch(make_documents(*lengths), plan)
    assert len(ranks) == plan.data
    counts = {len(rank) for rank in ranks}
    assert len(counts) == 1
    assert counts.pop() % plan.count_multiple == 0
    for micro in all_micro_batches(ranks):
        assert len(micro.tokens) == len(micro.labels) == len(micro.positions) == micro.cu_lengths[-1]
        assert all((end - start) % plan.multiple == 0 and end > start for _, start, end in slots(micro))
        if plan.packing:
            assert len(micro.tokens) <= plan.tokens
        else:
            assert len({end - start for _, start, end in slots(micro)}) == 1
            assert plan.documents is None or len(micro.documents) <= plan.documents
        if not plan.equal_lengths:
            assert len(micro.tokens) <= plan.tokens
    if plan.equal_lengths:
        assert len({len(micro.tokens) for micro in all_micro_batches(ranks)}) == 1


@given(lengths_of_documents, plans, st.randoms(use_true_random=False))
def test_the_loss_weight_is_that_of_the_documents_in_every_layout(
    lengths: list[int], plan: BatchPlan, random: Random
) -> None:
    # Eighths are exact in float32, whatever the order of the sum.
    weighted = [
        make_document(length, number, [random.randrange(9) / 8 for _ in range(length)])
        for number, length in enumerate(lengths)
    ]
    total = sum(float(micro.weights.double().sum()) for micro in all_micro_batches(build_global_batch(weighted, plan)))
    assert total == total_loss_weight(weighted) == sum(float(d.weights[1:].sum()) for d in weighted)


@given(lengths_of_documents, plans)
def test_positions_count_from_zero_in_every_document(lengths: list[int], plan: BatchPlan) -> None:
    for micro in all_micro_batches(build_global_batch(make_documents(*lengths), plan)):
        for number, start, end in slots(micro):
            expected = list(range(end - start)) if number != FILLER else [0] * (end - start)
            assert micro.positions[start:end].tolist() == expected


def test_what_is_ahead_stops_at_the_end_of_its_document() -> None:
    [[micro]] = build_global_batch(
        [make_document(4, id=0, weights=[9, 1, 2, 3]), make_document(2, id=1, weights=[9, 4])],
        BatchPlan(data=1, tokens=8, multiple=2, pad_token=7),
    )
    assert micro.shift_ahead(micro.tokens, 1).tolist() == [1001, 1002, 1003, 0, 2001, 0]
    assert micro.shift_ahead(micro.labels, 2).tolist() == [1003, 7, 0, 0, 0, 0]
    assert micro.shift_ahead(micro.weights, 1).tolist() == [2, 3, 0, 0, 0, 0]
    assert micro.shift_ahead(micro.real_token_mask(), 3).tolist() == [True, False, False, False, False, False]


def test_extras_about_predictions_move_with_the_labels_and_others_do_not() -> None:
    a = replace(
        make_document(3, id=0, old=[0.5, 1.5, 2.5], advantage=2.0), inputs={"routing": np.arange(6).reshape(3, 2) + 1}
    )
    [[micro], [filler]] = build_global_batch([a], BatchPlan(data=2, tokens=4, multiple=4))
    assert micro.extras["old"].tolist() == [1.5, 2.5, 0, 0]
    assert micro.extras["advantage"].tolist() == [2.0]
    assert micro.extras["routing"].tolist() == [[1, 2], [3, 4], [5, 6], [0, 0]]
    assert {name: tuple(value.shape) for name, value in filler.extras.items()} == {
        "old": (4,),
        "advantage": (1,),
        "routing": (4, 2),
    }


@pytest.mark.parametrize(
    ("tokens", "weights", "said"),
    [
        pytest.param([], [], "above 0", id="no tokens"),
        pytest.param([1, 2], [1], "equal lengths", id="fewer weights than tokens"),
        pytest.param([1, 2], [0, -1], "negative", id="a negative weight"),
        pytest.param([1, 2], [0, float("nan")], "finite", id="a weight that is no number"),
    ],
)
def test_a_document_that_makes_no_sense_is_refused(tokens: list[int], weights: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Document(np.array(tokens, dtype=np.int64), np.array(weights, dtype=np.float32), id=3)


def test_extras_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"old of document 0 has shape \(2,\) for 3 tokens"):
        make_document(3, old=[1.0, 2.0])


def test_documents_of_one_batch_carry_the_same_extras() -> None:
    with pytest.raises(ValueError, match="documents 0 and 1 of one batch carry different extras"):
        build_global_batch(
            [make_document(2, id=0, old=[1.0, 2.0]), make_document(2, id=1)], BatchPlan(data=1, tokens=8)
        )


def test_a_document_too_long_for_any_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens does not fit into micro batches of 8"):
        assign_slots([9], BatchPlan(data=1, tokens=8))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        pytest.param({"training": {"microBatchSize": 2}}, {"tokens": 8192, "documents": None}, id="packed rows"),
        pytest.param(
            {"training": {"microBatchSize": 2}, "data": {"packing": False}},
            {"tokens": 8192, "documents": 2, "packing": False},
            id="one document a row",
        ),
        pytest.param(
            {"training": {"dynamicBatchTokens": 16384}, "data": {"packing": False}},
            {"tokens": 16384, "documents": None, "packing": False},
            id="dynamic batches",
        ),
        pytest.param(
            {"parallelism": {"tensor": 2, "context": 2, "data": 4}}, {"data": 4, "multiple": 8}, id="cut in eight"
        ),
        pytest.param(
            {"parallelism": {"pipeline": 4, "virtualPipeline": 2}}, {"count_multiple": 4}, id="interleaved stages"
        ),
        pytest.param({"moe": {"dispatcher": "AllGather"}}, {"equal_lengths": True}, id="gathered tokens"),
    ],
)
def test_the_plan_follows_from_the_job_and_its_layout(sections: dict[str, Any], expected: dict[str, Any]) -> None:
    wanted = spec(**sections)
    plan = batch_plan(wanted, derive_layout(wanted.parallelism, 8), pad_token=7)
    assert {name: getattr(plan, name) for name in expected} == expected
    assert plan.pad_token == 7


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="without documents"):
        build_global_batch([], BatchPlan(data=1, tokens=8))
