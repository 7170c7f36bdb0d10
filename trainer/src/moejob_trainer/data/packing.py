"""Sequence packing: documents of one optimizer update become micro batches, padded and split over data ranks.

Pure: the same documents and plan give the same micro batches on every rank, so nothing has to be communicated. Knows
neither where documents come from nor what the loss is; never imports Megatron.

Five documents of 5, 3, 2, 2 and 1 tokens, for two data ranks with micro batches of 8 tokens and slots of even length
(`multiple` 2), are padded to 6, 4, 2, 2 and 2 and packed into two micro batches, one for each rank:

    rank 0   tokens     a b c d e . | i j            documents 0 and 3; a dot is padding
             labels     b c d e . . | j .            the next token of the same document
             positions  0 1 2 3 4 5 | 0 1
             cu_lengths 0, 6, 8
    rank 1   tokens     f g h . | k l | m .          documents 1, 2 and 4
             cu_lengths 0, 4, 6, 8
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moejob_api.arithmetic import ceil_div, round_up
from moejob_api.derived import sequence_divisor
from moejob_api.job import Spec
from moejob_api.job.moe import DispatcherKind
from moejob_api.layout.sizes import Layout
from moejob_trainer.training import Document, MicroBatch
from moejob_trainer.training.micro_batch import FILLER, Array


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The requirements of a layout and a job on micro batches."""

    # Data-parallel ranks. All get the same number of micro batches, because all exchange experts' tokens.
    data: int
    # Most tokens of one micro batch.
    tokens: int
    # Off: all slots of a micro batch are padded to one length, so that they can be seen as [documents, length].
    packing: bool = True
    # Most documents of one micro batch. None: as many as fit.
    documents: int | None = None
    # The length of every slot is a multiple of this, because context and sequence parallelism cut slots.
    multiple: int = 1
    # A rank's number of micro batches is a multiple of this: the pipeline size if stages are interleaved.
    count_multiple: int = 1
    # All micro batches of a global batch get one length, for dispatchers that exchange buffers of one size.
    equal_lengths: bool = False
    pad_token: int = 0


def batch_plan(spec: Spec, layout: Layout, pad_token: int) -> BatchPlan:
    """The plan that a job and its layout ask for."""
    training, dynamic = spec.training, spec.training.dynamic_batch_tokens
    return BatchPlan(
        data=layout.data,
        tokens=dynamic or training.micro_batch_size * spec.data.max_length,
        packing=spec.data.packing,
        documents=None if spec.data.packing or dynamic else training.micro_batch_size,
        multiple=sequence_divisor(layout),
        count_multiple=layout.pipeline if layout.virtual_pipeline > 1 else 1,
        equal_lengths=spec.moe.dispatcher is DispatcherKind.ALL_GATHER,
        pad_token=pad_token,
    )


@dataclass(frozen=True, slots=True)
class DocumentSlot:
    """Room for one document: its place in the list that is batched, and the padded length."""

    document: int
    tokens: int


Slots = tuple[DocumentSlot, ...]


def build_global_batch(documents: Sequence[Document], plan: BatchPlan) -> list[list[MicroBatch]]:
    """The micro batches of every data rank."""
    return [
        build_micro_batches(documents, slots, plan) for slots in assign_slots([len(d.tokens) for d in documents], plan)
    ]


def build_rank_batch(documents: Sequence[Document], plan: BatchPlan, rank: int) -> list[MicroBatch]:
    """The micro batches of one data rank, without memory for those of the others."""
    return build_micro_batches(documents, assign_slots([len(d.tokens) for d in documents], plan)[rank], plan)


def build_micro_batches(documents: Sequence[Document], slots: Sequence[Slots], plan: BatchPlan) -> list[MicroBatch]:
    """The micro batches of one rank; asks `documents` for no more than this rank needs, and for the first."""
    # A micro batch of padding alone must carry the same extras as every other.
    pattern = documents[0]
    return [_build_micro_batch(documents, batch_slots, pattern, plan.pad_token) for batch_slots in slots]


def assign_slots(lengths: Sequence[int], plan: BatchPlan) -> list[list[Slots]]:
    """Return the documents of each micro batch of each rank: the outer list is over ranks.

    Every rank gets equally many; micro batches that run at the same time on different ranks are about equally long.
    """
    if not lengths:
        raise ValueError("a global batch without documents; a step on nothing would still move the weights")
    slots = [_slot_length(length, plan) for length in lengths]
    groups = _pack_documents(slots, plan) if plan.packing else _group_by_length(slots, plan)
    batches = [tuple(DocumentSlot(index, slots[index]) for index in sorted(group)) for group in groups]
    if not plan.packing:
        batches = [_level_slots(batch, plan.multiple) for batch in batches]
    nonempty_batches = [batch or (DocumentSlot(FILLER, plan.multiple),) for batch in batches]
    ordered_batches = sorted(
        nonempty_batches, key=lambda batch: (batch[0].document == FILLER, -_count_tokens(batch), batch[0].document)
    )
    return _deal_to_ranks(
        _equalize_batches(ordered_batches, plan) if plan.equal_lengths else ordered_batches, plan.data
    )


def _slot_length(length: int, plan: BatchPlan) -> int:
    slot = round_up(length, plan.multiple)
    if slot > plan.tokens:
        raise ValueError(f"a document of {length} tokens does not fit into micro batches of {plan.tokens}")
    return slot


def _count_tokens(batch: Slots) -> int:
    return sum(slot.tokens for slot in batch)


def _pack_documents(slots: Sequence[int], plan: BatchPlan) -> list[list[int]]:
    """Pack into groups within plan.tokens: few groups without a long search, as even as possible."""
    step = plan.data * plan.count_multiple
    count = round_up(max(1, ceil_div(sum(slots), plan.tokens)), step)
    order = sorted(range(len(slots)), key=lambda index: (-slots[index], index))
    # Ends at one document a group at the latest.
    while True:
        groups = _pack_evenly(order, slots, count, plan.tokens) or _pack_tightly(order, slots, count, plan.tokens)
        if groups is not None:
            return groups
        count += step


def _pack_evenly(order: Sequence[int], slots: Sequence[int], count: int, most_tokens: int) -> list[list[int]] | None:
    """Put the longest first, each into the emptiest group; None if a group overflows."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for index in order:
        load, number = loads[0]
        if load + slots[index] > most_tokens:
            return None
        heapq.heapreplace(loads, (load + slots[index], number))
        groups[number].append(index)
    return groups


def _pack_tightly(order: Sequence[int], slots: Sequence[int], count: int, most_tokens: int) -> list[list[int]] | None:
    """Put the longest first, each into the fullest group with room; None if a document has no room."""
    groups: list[list[int]] = [[] for _ in range(count)]
    rows = PackedRows(count, most_tokens)
    for index in order:
        number = rows.place_document(slots[index])
        if number is None:
            return None
        groups[number].append(index)
    return groups


class PackedRows:
    """Rows that fill up: best fit, the first of equals."""

    def __init__(self, count: int, tokens: int) -> None:
        self._free = np.full(count, tokens, dtype=np.int64)

    def place_document(self, length: int) -> int | None:
        """Place a document in the row that is left with least room; None if none has room."""
        remaining = np.where(self._free >= length, self._free, np.iinfo(np.int64).max)
        row = int(remaining.argmin())
        if self._free[row] < length:
            return None
        self._free[row] -= length
        return row


def _group_by_length(slots: Sequence[int], plan: BatchPlan) -> list[list[int]]:
    """Group documents of similar lengths: a group is padded to its longest document."""
    groups: list[list[int]] = []
    for index in sorted(range(len(slots)), key=lambda place: (-slots[place], place)):
        if groups and _has_room(groups[-1], slots, plan):
            groups[-1].append(index)
        else:
            groups.append([index])
    count = round_up(max(1, len(groups)), plan.data * plan.count_multiple)
    return _split_groups(groups, count)


def _has_room(group: Sequence[int], slots: Sequence[int], plan: BatchPlan) -> bool:
    count = len(group) + 1
    return count * slots[group[0]] <= plan.tokens and (plan.documents is None or count <= plan.documents)


def _split_groups(groups: list[list[int]], count: int) -> list[list[int]]:
    """Split groups until there are `count`: ranks share the work instead of computing padding."""
    while len(groups) < count:
        largest = max(range(len(groups)), key=lambda number: len(groups[number]), default=None)
        if largest is None or len(groups[largest]) < 2:
            return groups + [[] for _ in range(count - len(groups))]
        group, middle = groups[largest], (len(groups[largest]) + 1) // 2
        groups[largest : largest + 1] = [group[:middle], group[middle:]]
    return groups


def _level_slots(batch: Slots, least: int) -> Slots:
    longest = max((slot.tokens for slot in batch), default=least)
    return tuple(DocumentSlot(slot.document, longest) for slot in batch)


def _equalize_batches(batches: Sequence[Slots], plan: BatchPlan) -> list[Slots]:
    if plan.packing:
        most_tokens = max(map(_count_tokens, batches))
        return [
            (*batch, DocumentSlot(FILLER, most_tokens - _count_tokens(batch)))
            if _count_tokens(batch) < most_tokens
            else batch
            for batch in batches
        ]
    rows, length = max(map(len, batches)), max(batch[0].tokens for batch in batches)
    return [
        tuple(
            DocumentSlot(slot.document, length)
            for slot in (*batch, *[DocumentSlot(FILLER, length)] * (rows - len(batch)))
        )
        for batch in batches
    ]


def _deal_to_ranks(batches: Sequence[Slots], ranks: int) -> list[list[Slots]]:
    """Deal batches in alternating directions, so that the first rank does not get the longest every time."""
    batches_of_ranks: list[list[Slots]] = [[] for _ in range(ranks)]
    for number, start in enumerate(range(0, len(batches), ranks)):
        turn = batches[start : start + ranks]
        for rank_batches, batch in zip(batches_of_ranks, reversed(turn) if number % 2 else turn, strict=True):
            rank_batches.append(batch)
    return batches_of_ranks


def _build_micro_batch(documents: Sequence[Document], slots: Slots, pattern: Document, pad_token: int) -> MicroBatch:
    starts = np.cumsum([0, *(slot.tokens for slot in slots)])
    placed_documents = [
        (int(start), documents[s.document]) for start, s in zip(starts, slots, strict=False) if s.document != FILLER
    ]
    lengths, total = {start: len(document.tokens) for start, document in placed_documents}, int(starts[-1])
    tokens, labels = np.full(total, pad_token, np.int64), np.full(total, pad_token, np.int64)
    weights = np.zeros(total, np.float32)
    for start, document in placed_documents:
        end = start + len(document.tokens)
        tokens[start:end] = document.tokens
        labels[start : end - 1] = document.tokens[1:]
        weights[start : end - 1] = document.weights[1:]
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        weights=torch.from_numpy(weights),
        positions=torch.from_numpy(np.concatenate([_slot_positions(slot) for slot in slots])),
        cu_lengths=torch.from_numpy(starts.astype(np.int32)),
        documents=tuple(slot.document for slot in slots),
        extras=dict(_pack_extras(placed_documents, slots, pattern, total)),
        lengths=tuple(lengths.get(int(start), 0) for start in starts[:-1]),
    )


def _slot_positions(slot: DocumentSlot) -> Array:
    # Padding that evens out micro batches can be longer than any position the model knows.
    return np.zeros(slot.tokens, np.int64) if slot.document == FILLER else np.arange(slot.tokens, dtype=np.int64)


def _pack_extras(
    placed_documents: Sequence[tuple[int, Document]], slots: Slots, pattern: Document, total: int
) -> Iterator[tuple[str, Tensor]]:
    for _, document in placed_documents:
        if document.extras.keys() != pattern.extras.keys() or document.inputs.keys() != pattern.inputs.keys():
            raise ValueError(f"documents {pattern.id} and {document.id} of one batch carry different extras")
    if shared_names := pattern.extras.keys() & pattern.inputs.keys():
        raise ValueError(f"{', '.join(sorted(shared_names))} cannot be about tokens as input and as label at once")
    for name, value in pattern.extras.items():
        yield (
            name,
            _pack_per_label(name, placed_documents, value, total)
            if value.ndim
            else _pack_per_document(name, placed_documents, slots, value),
        )
    for name, value in pattern.inputs.items():
        yield name, _pack_per_input(name, placed_documents, value, total)


def _pack_per_label(name: str, placed_documents: Sequence[tuple[int, Document]], like: Array, total: int) -> Tensor:
    values = np.zeros((total, *like.shape[1:]), like.dtype)
    for start, document in placed_documents:
        values[start : start + len(document.tokens) - 1] = document.extras[name][1:]
    return torch.from_numpy(values)


def _pack_per_input(name: str, placed_documents: Sequence[tuple[int, Document]], like: Array, total: int) -> Tensor:
    values = np.zeros((total, *like.shape[1:]), like.dtype)
    for start, document in placed_documents:
        values[start : start + len(document.tokens)] = document.inputs[name]
    return torch.from_numpy(values)


def _pack_per_document(
    name: str, placed_documents: Sequence[tuple[int, Document]], slots: Slots, like: Array
) -> Tensor:
    values = iter([document.extras[name] for _, document in placed_documents])
    zero = np.zeros((), like.dtype)
    return torch.from_numpy(np.stack([zero if slot.document == FILLER else next(values) for slot in slots]))
