"""How the documents of one optimizer update become micro batches: packing, padding, and the split over data ranks.

Pure: the same documents and plan give the same micro batches on every rank, so nothing has to be communicated. Knows
neither where documents come from nor what the loss is; never imports Megatron.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moejob_api.arithmetic import round_up
from moejob_api.job import Spec
from moejob_api.job.moe import Dispatcher
from moejob_api.layout.sizes import Layout
from moejob_api.rules.batch_rules import sequence_divisor

# Stands in MicroBatch.documents for a slot that holds nothing but padding.
FILLER = -1

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Tokens that see each other and nothing else, with the weight of each in the loss."""

    tokens: Array  # [length]
    # [length], of the loss of predicting each token. Nothing predicts the first, so its weight never counts.
    weights: Array
    id: int
    source: int = 0
    # About the prediction of each token ([length, ...], moved with the labels) or about the document (a scalar).
    extras: Mapping[str, Array] = field(default_factory=dict)
    # About each token as input ([length, ...], not moved): routing to replay.
    inputs: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.tokens)
        if length == 0 or self.tokens.ndim != 1 or self.weights.shape != self.tokens.shape:
            raise ValueError(
                f"document {self.id} has tokens of shape {self.tokens.shape} and weights of {self.weights.shape}; "
                "expected two equal lengths above 0"
            )
        if not np.isfinite(self.weights).all() or (self.weights < 0).any():
            raise ValueError(f"document {self.id} has a weight that is negative or not finite")
        per_token = [*self.inputs.items(), *((name, value) for name, value in self.extras.items() if value.ndim)]
        for name, value in per_token:
            if value.shape[:1] != (length,):
                raise ValueError(f"{name} of document {self.id} has shape {value.shape} for {length} tokens")

    @property
    def loss_weight(self) -> float:
        """What the document adds to the loss weight of its batch."""
        return float(self.weights[1:].sum(dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Documents one after another in slots; what one rank sends through the model at once.

    labels[i] is the token after tokens[i] in the same document, weights[i] the weight of predicting it. The last
    position of a document and all padding weigh nothing.
    """

    tokens: Tensor  # int64 [T]
    labels: Tensor  # int64 [T]
    weights: Tensor  # float32 [T]
    positions: Tensor  # int64 [T]
    cu_lengths: Tensor  # int32 [D + 1], where slots begin, and T
    documents: tuple[int, ...]  # [D], places in the list that was batched, or FILLER
    extras: Mapping[str, Tensor]  # each [T, ...] or, about documents, [D]
    lengths: tuple[int, ...]  # [D], tokens of each slot that are not padding

    def is_real(self) -> Tensor:
        """bool [T]: which tokens are no padding."""
        mask = torch.zeros(len(self.tokens), dtype=torch.bool)
        for start, length in zip(self.cu_lengths.tolist(), self.lengths, strict=False):
            mask[start : start + length] = True
        return mask

    def ahead(self, values: Tensor, by: int) -> Tensor:
        """Of each token, the value so many tokens on in its document, zero where that is beyond its end. [T] -> [T]"""
        ends = self.cu_lengths[1:].repeat_interleave(self.cu_lengths.diff())
        is_inside = torch.arange(by, by + len(values)) < ends
        return values.roll(-by) * is_inside.to(values.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a layout and a job ask of micro batches."""

    # Data-parallel ranks; every one gets equally many micro batches, for all meet in the exchange of experts' tokens.
    data: int
    # Most tokens of one micro batch.
    tokens: int
    # Off: all slots of a micro batch are padded to one length, so that they can be seen as [documents, length].
    packing: bool = True
    # Most documents of one micro batch. None: as many as fit.
    documents: int | None = None
    # What the length of every slot is a multiple of: context and sequence parallelism cut it.
    multiple: int = 1
    # What the number of micro batches of a rank is a multiple of: the pipeline size when stages are interleaved.
    count_multiple: int = 1
    # All micro batches of a global batch get one length, for what exchanges buffers of one size.
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
        equal_lengths=spec.moe.dispatcher is Dispatcher.ALL_GATHER,
        pad_token=pad_token,
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one document: its place in the list that is batched, and the padded length."""

    document: int
    tokens: int


Slots = tuple[Slot, ...]


def loss_weight(documents: Iterable[Document]) -> float:
    """What the summed loss of a global batch is divided by; known before the forward pass, whatever the layout."""
    return math.fsum(document.loss_weight for document in documents)


def global_batch(documents: Sequence[Document], plan: BatchPlan) -> list[list[MicroBatch]]:
    """The micro batches of every data rank."""
    return [rank_batch(documents, slots, plan) for slots in slots_of_ranks([len(d.tokens) for d in documents], plan)]


def rank_batch(documents: Sequence[Document], slots: Sequence[Slots], plan: BatchPlan) -> list[MicroBatch]:
    """The micro batches of one rank; asks `documents` for no more than this rank needs, and for the first."""
    # A micro batch of padding alone must carry the same extras as every other.
    pattern = documents[0]
    return [_micro_batch(documents, of_one, pattern, plan.pad_token) for of_one in slots]


def slots_of_ranks(lengths: Sequence[int], plan: BatchPlan) -> list[list[Slots]]:
    """Which documents lie in which micro batch of which rank: the outer list is over ranks.

    Every rank gets equally many; micro batches that run at the same time on different ranks are about equally long.
    """
    if not lengths:
        raise ValueError("a global batch without documents; a step on nothing would still move the weights")
    slots = [_slot_length(length, plan) for length in lengths]
    groups = _packed(slots, plan) if plan.packing else _padded(slots, plan)
    batches = [tuple(Slot(place, slots[place]) for place in sorted(group)) for group in groups]
    if not plan.packing:
        batches = [_levelled(batch, plan.multiple) for batch in batches]
    filled = [batch or (Slot(FILLER, plan.multiple),) for batch in batches]
    ordered = sorted(filled, key=lambda batch: (batch[0].document == FILLER, -_tokens(batch), batch[0].document))
    return _dealt(_equal(ordered, plan) if plan.equal_lengths else ordered, plan.data)


def _slot_length(length: int, plan: BatchPlan) -> int:
    slot = round_up(length, plan.multiple)
    if slot > plan.tokens:
        raise ValueError(f"a document of {length} tokens does not fit into micro batches of {plan.tokens}")
    return slot


def _tokens(batch: Slots) -> int:
    return sum(slot.tokens for slot in batch)


def _packed(slots: Sequence[int], plan: BatchPlan) -> list[list[int]]:
    """Groups within plan.tokens, as few as can be had quickly, and as even as possible."""
    step = plan.data * plan.count_multiple
    count = round_up(max(1, -(-sum(slots) // plan.tokens)), step)
    order = sorted(range(len(slots)), key=lambda place: (-slots[place], place))
    # Ends at one document a group at the latest.
    while True:
        groups = _evenly(order, slots, count, plan.tokens) or _tightly(order, slots, count, plan.tokens)
        if groups is not None:
            return groups
        count += step


def _evenly(order: Sequence[int], slots: Sequence[int], count: int, most: int) -> list[list[int]] | None:
    """The longest first, each to the group that has least; None if one runs over."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for place in order:
        load, number = loads[0]
        if load + slots[place] > most:
            return None
        heapq.heapreplace(loads, (load + slots[place], number))
        groups[number].append(place)
    return groups


def _tightly(order: Sequence[int], slots: Sequence[int], count: int, most: int) -> list[list[int]] | None:
    """The longest first, each to the fullest group that still has room; None if one finds none."""
    groups: list[list[int]] = [[] for _ in range(count)]
    rows = Rows(count, most)
    for place in order:
        number = rows.place(slots[place])
        if number is None:
            return None
        groups[number].append(place)
    return groups


class Rows:
    """Rows that fill up: best fit, the first of equals."""

    def __init__(self, count: int, tokens: int) -> None:
        self._free = np.full(count, tokens, dtype=np.int64)

    def place(self, length: int) -> int | None:
        """The row that takes so many tokens and is left with least room; None if there is none."""
        left = np.where(self._free >= length, self._free, np.iinfo(np.int64).max)
        row = int(left.argmin())
        if self._free[row] < length:
            return None
        self._free[row] -= length
        return row


def _padded(slots: Sequence[int], plan: BatchPlan) -> list[list[int]]:
    """Groups of like lengths, for all of a group are padded to its longest."""
    groups: list[list[int]] = []
    for place in sorted(range(len(slots)), key=lambda place: (-slots[place], place)):
        if groups and _takes_one_more(groups[-1], slots, plan):
            groups[-1].append(place)
        else:
            groups.append([place])
    count = round_up(max(1, len(groups)), plan.data * plan.count_multiple)
    return _split_into(groups, count)


def _takes_one_more(group: Sequence[int], slots: Sequence[int], plan: BatchPlan) -> bool:
    count = len(group) + 1
    return count * slots[group[0]] <= plan.tokens and (plan.documents is None or count <= plan.documents)


def _split_into(groups: list[list[int]], count: int) -> list[list[int]]:
    """As many groups as asked for: work is better shared than left to some, with padding for the others."""
    while len(groups) < count:
        largest = max(range(len(groups)), key=lambda number: len(groups[number]), default=None)
        if largest is None or len(groups[largest]) < 2:
            return groups + [[] for _ in range(count - len(groups))]
        group, middle = groups[largest], (len(groups[largest]) + 1) // 2
        groups[largest : largest + 1] = [group[:middle], group[middle:]]
    return groups


def _levelled(batch: Slots, least: int) -> Slots:
    longest = max((slot.tokens for slot in batch), default=least)
    return tuple(Slot(slot.document, longest) for slot in batch)


def _equal(batches: Sequence[Slots], plan: BatchPlan) -> list[Slots]:
    if plan.packing:
        most = max(map(_tokens, batches))
        return [(*batch, Slot(FILLER, most - _tokens(batch))) if _tokens(batch) < most else batch for batch in batches]
    rows, length = max(map(len, batches)), max(batch[0].tokens for batch in batches)
    return [
        tuple(Slot(slot.document, length) for slot in (*batch, *[Slot(FILLER, length)] * (rows - len(batch))))
        for batch in batches
    ]


def _dealt(batches: Sequence[Slots], ranks: int) -> list[list[Slots]]:
    """To and fro over the ranks, so that the first does not get the longest every time."""
    hands: list[list[Slots]] = [[] for _ in range(ranks)]
    for number, start in enumerate(range(0, len(batches), ranks)):
        turn = batches[start : start + ranks]
        for hand, batch in zip(hands, reversed(turn) if number % 2 else turn, strict=True):
            hand.append(batch)
    return hands


def _micro_batch(documents: Sequence[Document], slots: Slots, pattern: Document, pad_token: int) -> MicroBatch:
    starts = np.cumsum([0, *(slot.tokens for slot in slots)])
    held = [
        (int(start), documents[s.document]) for start, s in zip(starts, slots, strict=False) if s.document != FILLER
    ]
    lengths, total = {start: len(document.tokens) for start, document in held}, int(starts[-1])
    tokens, labels = np.full(total, pad_token, np.int64), np.full(total, pad_token, np.int64)
    weights = np.zeros(total, np.float32)
    for start, document in held:
        end = start + len(document.tokens)
        tokens[start:end] = document.tokens
        labels[start : end - 1] = document.tokens[1:]
        weights[start : end - 1] = document.weights[1:]
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        weights=torch.from_numpy(weights),
        positions=torch.from_numpy(np.concatenate([_positions(slot) for slot in slots])),
        cu_lengths=torch.from_numpy(starts.astype(np.int32)),
        documents=tuple(slot.document for slot in slots),
        extras=dict(_extras(held, slots, pattern, total)),
        lengths=tuple(lengths.get(int(start), 0) for start in starts[:-1]),
    )


def _positions(slot: Slot) -> Array:
    # Padding that evens out micro batches can be longer than any position the model knows.
    return np.zeros(slot.tokens, np.int64) if slot.document == FILLER else np.arange(slot.tokens, dtype=np.int64)


def _extras(
    held: Sequence[tuple[int, Document]], slots: Slots, pattern: Document, total: int
) -> Iterator[tuple[str, Tensor]]:
    for _, document in held:
        if document.extras.keys() != pattern.extras.keys() or document.inputs.keys() != pattern.inputs.keys():
            raise ValueError(f"documents {pattern.id} and {document.id} of one batch carry different extras")
    if both := pattern.extras.keys() & pattern.inputs.keys():
        raise ValueError(f"{', '.join(sorted(both))} cannot be about tokens as input and as label at once")
    for name, value in pattern.extras.items():
        yield name, _per_label(name, held, value, total) if value.ndim else _per_document(name, held, slots, value)
    for name, value in pattern.inputs.items():
        yield name, _per_input(name, held, value, total)


def _per_label(name: str, held: Sequence[tuple[int, Document]], like: Array, total: int) -> Tensor:
    values = np.zeros((total, *like.shape[1:]), like.dtype)
    for start, document in held:
        values[start : start + len(document.tokens) - 1] = document.extras[name][1:]
    return torch.from_numpy(values)


def _per_input(name: str, held: Sequence[tuple[int, Document]], like: Array, total: int) -> Tensor:
    values = np.zeros((total, *like.shape[1:]), like.dtype)
    for start, document in held:
        values[start : start + len(document.tokens)] = document.inputs[name]
    return torch.from_numpy(values)


def _per_document(name: str, held: Sequence[tuple[int, Document]], slots: Slots, like: Array) -> Tensor:
    values = iter([document.extras[name] for _, document in held])
    zero = np.zeros((), like.dtype)
    return torch.from_numpy(np.stack([zero if slot.document == FILLER else next(values) for slot in slots]))
