"""The order of documents: every one once an epoch, mixed by weight, resumed exactly, the same in every layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import spec
from moejob_api.job.model import DataFormat
from moejob_trainer.data.blending import BlendedDataset, Cursor, DocumentKey, blended_dataset
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.packing import BatchPlan
from moejob_trainer.data.stream import (
    BatchShare,
    BatchSize,
    RankBatch,
    TrainingBatch,
    TrainingData,
    batch_size,
    evaluation_batches,
    sample_count,
)
from moejob_trainer.errors import BadData
from moejob_trainer.training.micro_batch import FILLER
from trainer.training_data import make_recipe, make_source, prepare_corpora, write_jsonl

PACKED = BatchSize(rows=4, row_tokens=16, packing=True)


class Lengths:
    """Stands for a corpus where only lengths are asked for."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths


def mixed(*sizes: int, weights: Sequence[float] | None = None, seed: int = 1, shuffle: bool = True) -> BlendedDataset:
    return BlendedDataset(sizes, tuple(weights or [1.0] * len(sizes)), seed, shuffle, "print")


def sample(source: BlendedDataset, count: int) -> list[DocumentKey]:
    keys, cursor = [], source.start()
    for _ in range(count):
        key, cursor = source.sample_document(cursor)
        keys.append(key)
    return keys


def training(lengths: Sequence[int], size: BatchSize, epochs: float | None = None, seed: int = 1) -> TrainingData:
    source = mixed(len(lengths), seed=seed)
    return TrainingData([Lengths(lengths)], source, size, sample_count(source, epochs))  # type: ignore[list-item]


def selections(
    run: TrainingData, most: int = 10_000, start: Cursor | None = None
) -> list[tuple[list[DocumentKey], Cursor]]:
    found, cursor = list[tuple[list[DocumentKey], Cursor]](), start or run.blend.start()
    while len(found) < most:
        keys, cursor = run.select_documents(cursor)
        if not keys:
            break
        found.append((keys, cursor))
    return found


def written(folder: Path, count: int = 60) -> list[Corpus]:
    """Texts of 2 to 14 tokens that tell their number."""
    source = write_jsonl(folder / "texts.jsonl", *({"text": f"{n:02d}" * (1 + n % 4 * 2 // 2)} for n in range(count)))
    return prepare_corpora(folder / "out", make_recipe(make_source(source), max_length=16))


@given(st.integers(1, 200), st.integers(0, 1000), st.integers(1, 3))
def test_every_epoch_gives_every_document_once(size: int, seed: int, epochs: int) -> None:
    keys = sample(mixed(size, seed=seed), size * epochs)
    for epoch in range(epochs):
        assert sorted(key.document for key in keys[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_every_epoch_has_an_order_of_its_own_and_every_seed_too() -> None:
    keys = [key.document for key in sample(mixed(50), 100)]
    assert keys[:50] != keys[50:]
    assert keys[:50] != [key.document for key in sample(mixed(50, seed=2), 50)]


def test_without_shuffling_documents_come_in_order() -> None:
    assert [key.document for key in sample(mixed(3, shuffle=False), 7)] == [0, 1, 2, 0, 1, 2, 0]


def test_blocks_of_an_order_join_without_gap() -> None:
    keys = sample(mixed(10_000), 10_000)
    assert len(set(keys)) == 10_000


def test_sources_get_their_shares_by_hand() -> None:
    # Due after n draws: 0.75 n and 0.25 n; the one furthest behind is drawn.
    keys = sample(mixed(100, 100, weights=[3, 1]), 8)
    assert [key.source for key in keys] == [0, 0, 1, 0, 0, 0, 1, 0]


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 20)), min_size=1, max_size=5), st.integers(1, 200))
def test_no_source_is_ever_a_whole_round_of_draws_off_its_share(sources: list[tuple[int, float]], count: int) -> None:
    sizes, weights = zip(*sources, strict=True)
    keys = sample(mixed(*sizes, weights=weights), count)
    taken = Counter(key.source for key in keys)
    for source, weight in enumerate(weights):
        assert abs(taken[source] - count * weight / sum(weights)) < len(sizes)
        seen = [key.document for key in keys if key.source == source]
        whole = len(seen) // sizes[source] * sizes[source]
        assert sorted(seen[:whole]) == sorted(list(range(sizes[source])) * (whole // sizes[source]))


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=80),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([0.5, 1, 2, 2.25]),
)
def test_a_run_of_epochs_trains_on_each_draw_once(lengths: list[int], rows: int, packing: bool, epochs: float) -> None:
    run = training(lengths, BatchSize(rows, 16, packing), epochs)
    batches = selections(run)
    seen = Counter(key.document for keys, _ in batches for key in keys)
    expected = Counter(key.document for key in sample(run.blend, max(1, math.ceil(len(lengths) * epochs))))
    assert seen == expected
    assert len(batches) == run.count_steps()


@given(st.lists(st.integers(1, 16), min_size=1, max_size=80), st.integers(1, 6))
def test_packed_documents_fit_into_the_rows_of_the_batch(lengths: list[int], rows: int) -> None:
    for keys, _ in selections(training(lengths, BatchSize(rows, 16, packing=True)), most=10):
        chosen = [lengths[key.document] for key in keys]
        assert sum(chosen) <= rows * 16
        assert chosen


@given(st.lists(st.integers(1, 16), min_size=1, max_size=80), st.integers(1, 6), st.booleans(), st.integers(0, 8))
def test_resuming_from_any_cursor_goes_on_as_if_nothing_had_happened(
    lengths: list[int], rows: int, packing: bool, at: int
) -> None:
    run = training(lengths, BatchSize(rows, 16, packing))
    whole = selections(run, most=10)
    cursor = Cursor.from_json(whole[at][1].as_json())
    assert selections(run, most=9 - at, start=cursor) == whole[at + 1 :]


def test_rows_are_nearly_full_and_no_document_waits_for_long() -> None:
    lengths = [1 + (n * 7919) % 512 for n in range(5000)]
    run = training(lengths, BatchSize(64, 512, packing=True))
    batches = selections(run, most=12)
    fill = [sum(lengths[key.document] for key in keys) / (64 * 512) for keys, _ in batches]
    assert min(fill) > 0.9
    for (_, before), (keys, _) in pairwise(batches):
        assert set(before.waiting) <= set(keys)


def ids(batch: RankBatch, run_tokens: dict[tuple[int, ...], int]) -> Counter[int]:
    """Return the documents in the micro batches of one rank, by their tokens."""
    found = Counter[int]()
    for micro in batch.micro_batches:
        for number, start, length in zip(micro.documents, micro.cu_lengths.tolist(), micro.lengths, strict=False):
            if number != FILLER:
                found[run_tokens[tuple(micro.tokens[start : start + length].tolist())]] += 1
    return found


def names(corpus: Corpus) -> dict[tuple[int, ...], int]:
    return {tuple(corpus.read_document(number).tokens.tolist()): number for number in range(len(corpus))}


def seen_by_all(
    run: TrainingData, plan: BatchPlan, cursor: Cursor | None, steps: int
) -> list[tuple[Counter[int], Cursor]]:
    """Documents of each step over all ranks, and the cursor after it."""
    ranks = [list(islice(run.global_batches(BatchShare(plan, rank), cursor), steps)) for rank in range(plan.data)]
    known = names(run.corpora[0])
    return [
        (sum((ids(batch, known) for batch in step), Counter[int]()), step[0].cursor)
        for step in zip(*ranks, strict=True)
    ]


def plan_of(data: int, packing: bool = True, multiple: int = 1) -> BatchPlan:
    return BatchPlan(data=data, tokens=32, packing=packing, documents=None if packing else 2, multiple=multiple)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "one a row"])
def test_a_run_resumed_on_other_gpus_takes_the_same_steps(tmp_path: Path, packing: bool) -> None:
    found = written(tmp_path)
    source = blended_dataset(found, make_recipe().data)
    run = TrainingData(found, source, BatchSize(8, 16, packing))
    whole = seen_by_all(run, plan_of(1, packing), None, 9)
    first = seen_by_all(run, plan_of(4, packing, multiple=4), None, 4)
    rest = seen_by_all(run, plan_of(3, packing, multiple=2), Cursor.from_json(first[-1][1].as_json()), 5)
    assert first + rest == whole


def test_what_a_batch_says_of_itself_is_what_its_micro_batches_hold(tmp_path: Path) -> None:
    found = written(tmp_path)
    run = TrainingData(found, blended_dataset(found, make_recipe().data), PACKED, sample_count=60)
    plan = plan_of(2)
    ranks: list[list[TrainingBatch]] = [list(run.global_batches(BatchShare(plan, rank))) for rank in range(2)]
    for step in zip(*ranks, strict=True):
        assert len({(batch.loss_weight, batch.documents, batch.tokens, batch.epoch) for batch in step}) == 1
        micro_batches = [micro for batch in step for micro in batch.micro_batches]
        assert step[0].loss_weight == sum(float(micro.weights.sum()) for micro in micro_batches)
        assert step[0].tokens == sum(sum(micro.lengths) for micro in micro_batches)
        assert step[0].documents == sum(number != FILLER for micro in micro_batches for number in micro.documents)
    assert ranks[0][-1].epoch == 1.0
    assert sum(batch.documents for batch in ranks[0]) == 60


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "one a row"])
def test_evaluation_is_every_document_once_and_in_order(tmp_path: Path, packing: bool) -> None:
    found = written(tmp_path)
    plan = plan_of(2, packing)
    ranks = [list(evaluation_batches(found, BatchSize(8, 16, packing), BatchShare(plan, rank))) for rank in range(2)]
    known = names(found[0])
    seen = [sorted(sum((ids(batch, known) for batch in step), Counter[int]())) for step in zip(*ranks, strict=True)]
    assert [number for step in seen for number in step] == list(range(60))
    assert len(seen) > 1
    assert all(batch.loss_weight > 0 for batch in ranks[0])


def test_a_cursor_of_other_data_is_refused(tmp_path: Path) -> None:
    found = written(tmp_path)
    run = TrainingData(found, blended_dataset(found, make_recipe().data), PACKED)
    other = TrainingData(found, blended_dataset(found, make_recipe(seed=43).data), PACKED)
    cursor = next(iter(run.global_batches(BatchShare(plan_of(1), 0)))).cursor
    with pytest.raises(BadData, match=r"its seed or the tokenizer changed since the checkpoint"):
        next(iter(other.global_batches(BatchShare(plan_of(1), 0), cursor)))


def test_a_cursor_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(BadData, match="data cursor of the checkpoint cannot be read"):
        Cursor.from_json('{"taken": ["a"]}')


def test_a_cursor_survives_being_written() -> None:
    cursor = Cursor((3, 4), (DocumentKey(0, 7), DocumentKey(1, 2)), "print")
    assert Cursor.from_json(cursor.as_json()) == cursor
    assert replace(cursor, taken=(3, 5)) != cursor


def test_weights_and_seed_are_part_of_what_a_mixture_is(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "texts.jsonl", {"text": "a"}, {"text": "b"})
    chats = make_source("moejob/tiny-chats", DataFormat.CHAT)
    recipes = [
        make_recipe(make_source(file), chats),
        make_recipe(make_source(file, weight=2.0), chats),
        make_recipe(make_source(file), chats, seed=1),
    ]
    mixtures = [blended_dataset(prepare_corpora(tmp_path / "out", one), one.data) for one in recipes]
    assert mixtures[0].sizes == (2, 512)
    assert mixtures[1].sampling_shares == (2 / 3, 1 / 3)
    assert len({one.fingerprint for one in mixtures}) == 3


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [pytest.param((), (), id="no source"), pytest.param((0,), (1.0,), id="an empty source")],
)
def test_a_mixture_of_nothing_is_refused(sizes: tuple[int, ...], weights: tuple[float, ...]) -> None:
    with pytest.raises(BadData, match="cannot mix sources"):
        BlendedDataset(sizes, weights, 1, True, "print")


def test_a_run_without_end_does_not_know_its_steps() -> None:
    with pytest.raises(ValueError, match="does not end by itself"):
        training([1], PACKED).count_steps()


def test_the_size_of_a_batch_follows_from_the_job() -> None:
    assert batch_size(spec(data={"packing": False})) == BatchSize(rows=64, row_tokens=4096, packing=False)
