"""Data parallelism: ranks with the same weights and other documents, the part that each updates, sums of gradients.

Two implementations: Megatron's buffers, in which every replica holds all weights and gradients and updates a share
(ZeRO-1), and shares of everything (ZeRO-2 and ZeRO-3). No other module knows which of them runs.

A parameter of 6 elements on 2 replicas: with buffers both hold [6] and update [0, 3) or [3, 6) of it; with shares each
holds [3], and [6] exists only while a layer computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor, nn

from moejob_api.derived import has_overlapped_gradient_reduction, has_overlapped_parameter_gather
from moejob_api.job.base import Dtype
from moejob_api.job.job import Spec
from moejob_trainer.megatron.parameter_gather import ParameterGather, exchanged_buckets
from moejob_trainer.megatron.sharding import finish_expert_sums, reshard_stage
from moejob_trainer.megatron.shares import find_sharding, local_part
from moejob_trainer.model.stage import ModelStage


@dataclass(frozen=True, slots=True, eq=False)
class ParameterShard:
    """The part of one parameter that this rank updates."""

    name: str
    parameter: nn.Parameter
    # Where it begins in the flat parameter of this rank.
    start: int
    weight: Tensor
    gradient: Tensor


class DataParallel(Protocol):
    """The stages of this rank among their replicas."""

    @property
    def model_chunks(self) -> Sequence[nn.Module]:
        """The stages as Megatron's schedules call them."""

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""

    def sum_gradients(self) -> None:
        """Sum this rank's part of each gradient over all replicas."""

    def local_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part of a gradient."""

    def parameter_shards(self) -> Iterator[ParameterShard]:
        """Yield the parts that this rank updates."""

    def gather_weights(self) -> None:
        """Give every replica the updated shares of the others, at the latest when a layer computes with them."""

    def finish_gather(self) -> None:
        """Wait for all gathers: the caller reads weights outside of their layers."""

    def release_weights(self) -> None:
        """Free gathered weights: no pass follows at once."""


def make_data_parallel(stages: Sequence[ModelStage], spec: Spec) -> DataParallel:
    """Return the implementation that the job asks for. It may move weights, so make it before the optimizer."""
    if spec.memory.sharding.has_weight_shards:
        return ShardedDataParallel(stages)
    return BufferedDataParallel(_wrap_in_buffers(stages, spec))


class BufferedDataParallel:
    """Contiguous gradients of whole parameters; each replica sums a share of them."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self.model_chunks = chunks
        self._gathers = [ParameterGather(chunk) for chunk in chunks]

    def zero_gradients(self) -> None:
        """Empty the buffers."""
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    def sum_gradients(self) -> None:
        """Sum the buckets that the backward pass has not summed beside itself."""
        self.finish_gather()
        for chunk in self.model_chunks:
            for buckets in _summed_buckets(chunk):
                buckets.finish_grad_sync()

    def local_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole gradient; after the sum only the share of this rank is right."""
        gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        return gradient

    def parameter_shards(self) -> Iterator[ParameterShard]:
        """Yield pieces of parameters: in the buffers parameters lie one behind the other."""
        for chunk in self.model_chunks:
            names = {parameter: name for name, parameter in chunk.module.named_parameters()}
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                for parameter, begin, low, high in _local_ranges(buffer):
                    weight, gradient = buffer.param_data[low:high], buffer.grad_data[low:high]
                    yield ParameterShard(names[parameter], parameter, low - begin, weight, gradient)

    def gather_weights(self) -> None:
        """Start to gather the shares of weights, straight out of the buffers."""
        for gather in self._gathers:
            gather.start_gather()

    def finish_gather(self) -> None:
        """Wait until all layers have their weights."""
        for gather in self._gathers:
            gather.finish_gather()

    def release_weights(self) -> None:
        """Do nothing: whole weights stay."""


class ShardedDataParallel:
    """Shares alone: of weights, gathered while a layer computes, and of gradients, summed in the backward pass."""

    def __init__(self, stages: Sequence[ModelStage]) -> None:
        self.model_chunks = stages
        for parameter in self._trained_parameters().values():
            # Torch adds to a gradient that exists: gradients stay at one address, as weights and moments do.
            parameter.grad = torch.zeros_like(parameter)

    def zero_gradients(self) -> None:
        """Zero the sums of the last update."""
        for parameter in self._trained_parameters().values():
            self.local_gradient(parameter).zero_()

    def sum_gradients(self) -> None:
        """Wait for the last sums: the backward pass of each micro batch has started its own."""
        for stage in self.model_chunks:
            finish_expert_sums(stage)

    def local_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's share of a gradient."""
        if parameter.grad is None:
            raise RuntimeError("gradients of a divided parameter exist as long as it is trained")
        return local_part(parameter.grad)

    def parameter_shards(self) -> Iterator[ParameterShard]:
        """Yield this rank's share of each trained parameter, unless the share is empty."""
        for name, parameter in self._trained_parameters().items():
            sharded, weight = find_sharding(parameter), local_part(parameter)
            if sharded is not None and weight.numel():
                yield ParameterShard(name, parameter, sharded.start, weight, self.local_gradient(parameter))

    def gather_weights(self) -> None:
        """Do nothing: a layer gathers its shares when it needs them."""

    def finish_gather(self) -> None:
        """Do nothing: outside of the passes no gather runs."""

    def release_weights(self) -> None:
        """Free the buffers for further passes."""
        for stage in self.model_chunks:
            reshard_stage(stage)

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        named = (pair for stage in self.model_chunks for pair in stage.named_parameters())
        return {name: parameter for name, parameter in named if parameter.requires_grad}


def _wrap_in_buffers(stages: Sequence[ModelStage], spec: Spec) -> list[DistributedDataParallel]:
    """Wrap the stages in Megatron's buffers; their weights move into these."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=spec.training.precision.gradients is Dtype.FLOAT32,
        use_distributed_optimizer=True,
        overlap_grad_reduce=has_overlapped_gradient_reduction(spec),
        overlap_param_gather=has_overlapped_parameter_gather(spec),
    )
    chunks = [
        DistributedDataParallel(stage.config, config, stage, disable_bucketing=index > 0)
        for index, stage in enumerate(stages)
    ]
    no_sync = [chunk.no_sync for chunk in chunks]
    stages[0].config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return chunks


def _summed_buckets(chunk: DistributedDataParallel) -> list[Any]:
    """Return the bucket groups to sum. For a lone replica gloo would copy them to and fro, a tenth of a step."""
    is_overlapped = chunk.ddp_config.overlap_grad_reduce
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups] if is_overlapped else exchanged_buckets(chunk)


def _local_ranges(buffer: Any) -> Iterator[tuple[nn.Parameter, int, int, int]]:
    """Yield each parameter that this rank updates a part of: where the parameter begins, the part begins and ends.

    Two ranks, a bucket of 12 elements, parameters A [0, 8) and B [8, 12): rank 0 updates A [0, 6), rank 1 A [6, 8) and
    B [8, 12).
    """
    ranks, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
    for bucket in buffer.buckets:
        size = bucket.grad_data.numel() // ranks
        first = bucket.offset + rank * size
        for parameter in bucket.params_list:
            begin, end, _ = buffer.param_index_map[parameter]
            low, high = max(begin, first), min(end, first + size)
            if low < high:
                yield parameter, begin, low, high
