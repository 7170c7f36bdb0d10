"""Micro batches through the stages of the pipeline, in the order of Megatron's schedules: 1F1B, or interleaved.

Gradients of an update's micro batches accumulate in the buffers of `data_parallel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from moejob_api.models.shape import ModelShape
from moejob_trainer.distributed.collectives import all_gather_alike, local_rows
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.layers.documents import Documents, restore_row_order
from moejob_trainer.megatron.stage_exchange import HiddenShape, StageExchange, schedule_groups
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.packed_batch import LocalTokens, make_packed_batch
from moejob_trainer.model.stage import MTPInput, StageInput, StageOutput
from moejob_trainer.training import MicroBatch
from moejob_trainer.training.micro_batch import ROUTING


def forward_backward(
    chunks: Sequence[nn.Module],
    batches: Sequence[StageInput],
    finish: Callable[[int, StageOutput], Tensor],
    *,
    forward_only: bool,
    shapes: Sequence[HiddenShape],
) -> None:
    """Run every micro batch through every stage; the last stage calls `finish` with its number and outputs.

    shapes: of the hidden states of each micro batch, [tokens, 1, hidden].
    """
    iterators: list[Iterator[tuple[int, StageInput]]] = [iter(enumerate(batches)) for _ in chunks]
    is_single = len(chunks) == 1
    exchange_options: dict[str, Any] = {}
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        exchange = StageExchange(get_model_config(chunks[0]), shapes)
        exchange_options = {"p2p_communicator": exchange, "pg_collection": schedule_groups()}
    get_forward_backward_func()(
        forward_step_func=_make_forward_step(finish),
        data_iterator=iterators[0] if is_single else iterators,
        model=chunks[0] if is_single else [*chunks],
        num_microbatches=len(batches),
        # The exchange knows the shape of each micro batch: the schedule does not use these two.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        **exchange_options,
    )


def _make_forward_step(finish: Callable[[int, StageOutput], Tensor]) -> Callable[..., Any]:
    def forward_step(iterator: Iterator[tuple[int, StageInput]], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        number, batch = next(iterator)
        result = chunk(batch)
        if isinstance(result, Tensor):
            return result, lambda _: None

        def compute_loss(_: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total = finish(number, result)
            # Megatron's own count of tokens is an integer and is not used.
            return total, torch.zeros((), dtype=torch.int, device=total.device), {}

        return result.log_probabilities, compute_loss

    return forward_step


def make_stage_input(
    batch: MicroBatch, model: Architecture, groups: Groups, layers: Sequence[int], *, sequence_parallel: bool
) -> StageInput:
    """Return this rank's part of a micro batch on its device, for the layers that it holds.

    A row of 16 tokens on 2 context ranks is cut into 4 chunks of 4: rank 0 has chunks 0 and 3, rank 1 has 1 and 2.
    Under sequence parallelism 2 tensor ranks then have 4 of these 8 tokens each.
    """
    boundaries = batch.cu_lengths.tolist()
    lengths = tuple(stop - start for start, stop in pairwise(boundaries))
    documents = Documents(batch.cu_lengths.to(batch.tokens.device), lengths, groups.context.rank, groups.context.size)
    token_indices = documents.row_indices()
    is_real = batch.real_token_mask().to(batch.tokens.device)

    def cut_rows(values: Tensor) -> Tensor:
        return local_rows(values, groups.tensor) if sequence_parallel else values

    def select_local(values: Tensor) -> Tensor:
        return cut_rows(values[token_indices])

    replayed: Mapping[int, Tensor] = {}
    if (routing := batch.extras.get(ROUTING)) is not None:
        routing = cut_rows(torch.cat([routing[start:end] for start, end in documents.local_ranges()]))
        replayed = _layer_choices(routing, model.shape, layers, batch.tokens.device)
    local = LocalTokens(select_local(is_real), cut_rows(documents.segment_ids()), replayed)
    packed = make_packed_batch(documents, model.rotary, groups.context.handle, local)
    # Shifted in the whole row: the token behind the last one of a chunk lies on another rank.
    mtp = [
        MTPInput(
            batch.shift_ahead(batch.tokens, by)[token_indices],
            batch.shift_ahead(batch.labels, by)[token_indices],
            select_local(batch.shift_ahead(is_real, by)),
        )
        for by, _ in enumerate(model.shape.mtp_layers, 1)
    ]
    return StageInput(batch.tokens[token_indices], batch.labels[token_indices], packed, tuple(mtp))


def _layer_choices(
    routing: Tensor, shape: ModelShape, layers: Sequence[int], device: torch.device
) -> Mapping[int, Tensor]:
    """Return the replayed choices of the layers that have experts. [t, routed layers, k] -> each [t, k]

    They stay on the host until their layer computes: choices of all micro batches would fill gigabytes of a GPU.
    """
    routed = shape.routed_layers
    layer_numbers = [index for index in layers if index in routed]
    choices = routing[:, [routed.index(index) for index in layer_numbers]].transpose(0, 1).contiguous()
    # A copy from pinned memory does not stop the GPU.
    choices = choices.pin_memory() if device.type == "cuda" else choices
    return dict(zip(layer_numbers, choices.unbind(0), strict=True))


def gather_row_values(values: Tensor, groups: Groups) -> Tensor:
    """Gather values of the context ranks' tokens, in the order of the row. [t] -> [T]"""
    return restore_row_order(all_gather_alike(values, groups.context), groups.context.size)
