"""Micro batches through the stages of the pipeline, in the order of Megatron's schedules."""

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
from moejob_trainer.layers.documents import Documents, in_row_order
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
    is_one = len(chunks) == 1
    between: dict[str, Any] = {}
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        exchange = StageExchange(get_model_config(chunks[0]), shapes)
        between = {"p2p_communicator": exchange, "pg_collection": schedule_groups()}
    get_forward_backward_func()(
        forward_step_func=_step(finish),
        data_iterator=iterators[0] if is_one else iterators,
        model=chunks[0] if is_one else [*chunks],
        num_microbatches=len(batches),
        # The exchange knows the shape of each micro batch: the schedule does not use these two.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        **between,
    )


def _step(finish: Callable[[int, StageOutput], Tensor]) -> Callable[..., Any]:
    def forward_step(iterator: Iterator[tuple[int, StageInput]], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        number, batch = next(iterator)
        result = chunk(batch)
        if isinstance(result, Tensor):
            return result, lambda _: None

        def loss(_: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total = finish(number, result)
            # Megatron's own count of tokens is an integer and is not used.
            return total, torch.zeros((), dtype=torch.int, device=total.device), {}

        return result.log_probabilities, loss

    return forward_step


def stage_input(
    batch: MicroBatch, model: Architecture, groups: Groups, layers: Sequence[int], *, sequence_parallel: bool
) -> StageInput:
    """Return this rank's part of a micro batch on its device, for the layers that it holds.

    A row of 16 tokens on 2 context ranks is cut into 4 chunks of 4: rank 0 has chunks 0 and 3, rank 1 has 1 and 2.
    Under sequence parallelism 2 tensor ranks then have 4 of these 8 tokens each.
    """
    boundaries = batch.cu_lengths.tolist()
    lengths = tuple(stop - start for start, stop in pairwise(boundaries))
    documents = Documents(batch.cu_lengths.to(batch.tokens.device), lengths, groups.context.rank, groups.context.size)
    held = documents.indices()
    is_real = batch.is_real().to(batch.tokens.device)

    def cut(values: Tensor) -> Tensor:
        return local_rows(values, groups.tensor) if sequence_parallel else values

    def own(values: Tensor) -> Tensor:
        return cut(values[held])

    replayed: Mapping[int, Tensor] = {}
    if (routing := batch.extras.get(ROUTING)) is not None:
        routing = cut(torch.cat([routing[start:end] for start, end in documents.held()]))
        replayed = _of_layers(routing, model.shape, layers, batch.tokens.device)
    local = LocalTokens(own(is_real), cut(documents.segments()), replayed)
    packed = make_packed_batch(documents, model.rotary, groups.context.handle, local)
    # Shifted in the whole row: the token behind the last one of a chunk lies on another rank.
    mtp = [
        MTPInput(
            batch.ahead(batch.tokens, by)[held], batch.ahead(batch.labels, by)[held], own(batch.ahead(is_real, by))
        )
        for by, _ in enumerate(model.shape.mtp_layers, 1)
    ]
    return StageInput(batch.tokens[held], batch.labels[held], packed, tuple(mtp))


def _of_layers(routing: Tensor, shape: ModelShape, layers: Sequence[int], device: torch.device) -> Mapping[int, Tensor]:
    """Return the replayed choices of the layers that have experts. [t, routed layers, k] -> each [t, k]

    They stay on the host until their layer computes: choices of all micro batches would fill gigabytes of a GPU.
    """
    routed = shape.routed_layers
    held = [index for index in layers if index in routed]
    choices = routing[:, [routed.index(index) for index in held]].transpose(0, 1).contiguous()
    # A copy from pinned memory does not stop the GPU.
    choices = choices.pin_memory() if device.type == "cuda" else choices
    return dict(zip(held, choices.unbind(0), strict=True))


def whole(values: Tensor, groups: Groups) -> Tensor:
    """Gather values of the context ranks' tokens, in the order of the row. [t] -> [T]"""
    return in_row_order(all_gather_alike(values, groups.context), groups.context.size)
