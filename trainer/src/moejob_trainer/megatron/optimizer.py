"""AdamW over this rank's share of the weights: every replica updates a part, then all gather the whole.

A piece is the part of one parameter that this rank updates. Pieces know the name of their parameter and their range of
it, so that a checkpoint saved in one layout can be read in any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from moejob_api.job.job import Spec
from moejob_api.job.training import Optimizer as AdamNumbers
from moejob_api.planner.memory.constants import UPDATE_ELEMENTS
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.layers.kernels import find_kernels
from moejob_trainer.megatron.data_parallel import DataParallel, ParameterShard
from moejob_trainer.megatron.host_update import HostUpdate, Numbers, UpdateChunk
from moejob_trainer.megatron.master_weights import CopiedNumbers, StoredNumbers, copy_to_host, make_master
from moejob_trainer.model.linear import is_expert, is_tensor_replica, is_tied_copy

# Squares that one float32 takes up with an error of 1e-7, and of 2e-6 where they come of bfloat16.
_NORMED_ELEMENTS = 2**14


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerShard(ParameterShard):
    """The part of one parameter that this rank updates, with its optimizer state."""

    # The float32 numbers that `weight` is rounded from.
    master: StoredNumbers
    first_moment: Tensor
    second_moment: Tensor
    is_decayed: bool

    @property
    def stop(self) -> int:
        """Behind its last element in the flat parameter."""
        return self.start + self.weight.numel()


# Lists of main weights, gradients and both moments, as torch's adamw takes them.
_Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


@dataclass(frozen=True, slots=True)
class MomentStorage:
    """Storage of the optimizer's state."""

    dtype: torch.dtype
    # Share of all elements whose state lives and is updated in host memory.
    offloaded: float
    # Whether copies to and from host memory run beside the update of other pieces.
    overlaps_copies: bool = False


def part_norms(gradient: Tensor) -> Iterator[Tensor]:
    """Yield the norms of parts of a gradient, in float32.

    On CPUs one float32 takes up all squares of a lane of vector registers, and small ones are rounded away: the norm of
    28 million random numbers is 0.16 % too small. A GPU adds them up as a tree.
    """
    parts = gradient.flatten().split(_NORMED_ELEMENTS) if gradient.device.type == "cpu" else (gradient,)
    return (torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts)


class ShardedAdamW:
    """AdamW with decoupled decay on this rank's pieces."""

    def __init__(
        self, data_parallel: DataParallel, groups: Groups, numbers: AdamNumbers, moments: MomentStorage
    ) -> None:
        self.data_parallel, self.groups, self.numbers = data_parallel, groups, numbers
        self.pieces = _make_shards(list(data_parallel.parameter_shards()), moments)
        self._on_host = HostUpdate(overlaps_copies=moments.overlaps_copies)
        self.steps = 0

    def gradient_norm(self) -> float:
        """Return the norm of the whole model's gradient; a parameter counts once, however many ranks hold it."""
        counted_gradients = [piece.gradient for piece in self.pieces if is_counted_here(piece.parameter, self.groups)]
        square = torch.zeros((), dtype=torch.float64)
        if counted_gradients:
            norms = [norm for gradient in counted_gradients for norm in part_norms(gradient)]
            square = torch.stack(norms).double().square().sum()
        device = counted_gradients[0].device if counted_gradients else self._weights_device
        square = square.to(device)
        if self.groups.world.size > 1:
            dist.all_reduce(square, group=self.groups.world.handle)
        return math.sqrt(square.item())

    def update(self, learning_rate: float, gradient_scale: float) -> None:
        """Make one step with scaled gradients, then gather the new weights on every replica."""
        self.steps += 1
        unfused = []
        for piece in self.pieces:
            if _has_kernel(piece):
                self._update_fused(piece, learning_rate, gradient_scale)
            elif not _is_on_host(piece):
                unfused.append(piece)
        for decayed in (True, False):
            for group in _group_by_size([piece for piece in unfused if piece.is_decayed is decayed]):
                self._update_group(group, learning_rate, gradient_scale)
        # Last: while the host computes, the GPU still runs the kernels launched above.
        chunks = [_make_chunk(piece) for piece in self.pieces if _is_on_host(piece)]
        self._on_host.update(chunks, gradient_scale, partial(self._step_on_host, learning_rate))
        self.data_parallel.gather_weights()

    def gather_weights(self) -> None:
        """Gather the weights on every replica."""
        self.data_parallel.gather_weights()

    @property
    def _weights_device(self) -> torch.device:
        return next(self.data_parallel.model_chunks[0].parameters()).device

    def _update_fused(self, piece: OptimizerShard, learning_rate: float, gradient_scale: float) -> None:
        """Update a piece in one pass over its memory, its weight included."""
        fused, settings = _adamw_kernels(piece), self.numbers
        numbers = fused.AdamWStep(
            step=self.steps,
            learning_rate=learning_rate,
            gradient_scale=gradient_scale,
            beta1=settings.beta1,
            beta2=settings.beta2,
            epsilon=settings.epsilon,
            weight_decay=settings.weight_decay if piece.is_decayed else 0.0,
        )
        fused.update_weights(*_kernel_tensors(piece), numbers)

    def _step_on_host(self, learning_rate: float, numbers: Numbers, is_decayed: bool) -> None:
        main, gradient, first, second = numbers
        self._apply_adamw(([main], [gradient], [first], [second]), learning_rate, is_decayed=is_decayed)

    def _update_group(self, pieces: Sequence[OptimizerShard], learning_rate: float, gradient_scale: float) -> None:
        mains = [piece.master.read() for piece in pieces]
        gradients = [piece.gradient.float() * gradient_scale for piece in pieces]
        firsts = [piece.first_moment.float() for piece in pieces]
        seconds = [piece.second_moment.float() for piece in pieces]
        self._apply_adamw((mains, gradients, firsts, seconds), learning_rate, is_decayed=pieces[0].is_decayed)
        for piece, main, first, second in zip(pieces, mains, firsts, seconds, strict=True):
            piece.master.write(main)
            if first is not piece.first_moment:
                piece.first_moment.copy_(first)
                piece.second_moment.copy_(second)

    def _apply_adamw(self, numbers: _Lists, learning_rate: float, *, is_decayed: bool) -> None:
        mains, gradients, firsts, seconds = numbers
        adamw(
            mains,
            gradients,
            firsts,
            seconds,
            max_exp_avg_sqs=[],
            # adamw adds 1 to the step before it uses it.
            state_steps=[torch.tensor(float(self.steps - 1), device=main.device) for main in mains],
            fused=True,
            amsgrad=False,
            beta1=self.numbers.beta1,
            beta2=self.numbers.beta2,
            lr=learning_rate,
            weight_decay=self.numbers.weight_decay if is_decayed else 0.0,
            eps=self.numbers.epsilon,
            maximize=False,
        )


def _adamw_kernels(piece: OptimizerShard) -> Any:
    return find_kernels("adamw", piece.master.storage)


def _has_kernel(piece: OptimizerShard) -> bool:
    fused = _adamw_kernels(piece)
    return fused is not None and fused.can_update(*_kernel_tensors(piece))


def _kernel_tensors(piece: OptimizerShard) -> tuple[Tensor, ...]:
    return piece.weight, piece.gradient, piece.master.storage, piece.first_moment, piece.second_moment


def make_moment_storage(spec: Spec) -> MomentStorage:
    """Return the storage that a job asks for."""
    dtype = getattr(torch, spec.training.precision.moments.value)
    return MomentStorage(dtype, spec.memory.offload_optimizer, spec.training.communication.overlap_optimizer_copies)


def _make_shards(shares: Sequence[ParameterShard], moments: MomentStorage) -> list[OptimizerShard]:
    """Return a piece of each share; a part of all elements has its state in host memory from the start."""
    host_indices = choose_host_shards([share.weight.numel() for share in shares], moments.offloaded)
    return [
        _make_shard(share, moments.dtype, is_on_host=index in host_indices and share.weight.is_cuda)
        for index, share in enumerate(shares)
    ]


def _make_shard(share: ParameterShard, dtype: torch.dtype, *, is_on_host: bool) -> OptimizerShard:
    master = make_master(share.weight)
    if is_on_host:
        master = CopiedNumbers(share.weight, copy_to_host(master))
    first, second = (torch.zeros_like(share.weight, dtype=dtype, device=master.storage.device) for _ in range(2))
    return OptimizerShard(
        name=share.name,
        parameter=share.parameter,
        start=share.start,
        weight=share.weight,
        gradient=share.gradient,
        master=master,
        first_moment=first,
        second_moment=second,
        is_decayed=is_decayed(share.name),
    )


def _is_on_host(piece: OptimizerShard) -> bool:
    return isinstance(piece.master, CopiedNumbers)


def _make_chunk(piece: OptimizerShard) -> UpdateChunk:
    return UpdateChunk(
        piece.weight, piece.gradient, piece.master.storage, piece.first_moment, piece.second_moment, piece.is_decayed
    )


def is_counted_here(parameter: nn.Parameter, groups: Groups) -> bool:
    """Return whether this rank counts and saves a parameter: one does among all ranks with the same one."""
    if is_tied_copy(parameter):
        return False
    holders = groups.expert_tensor if is_expert(parameter) else groups.tensor
    return not is_tensor_replica(parameter) or holders.rank == 0


def is_decayed(name: str) -> bool:
    """Return whether weight decay applies: not to norms, biases, sinks and decays."""
    owner, _, last = name.rpartition(".")
    return not (last == "bias" or last.endswith("_bias") or last in {"sinks", "decay_log"} or owner.endswith("norm"))


def choose_host_shards(sizes: Sequence[int], share: float) -> frozenset[int]:
    """Return the indices of pieces with `share` of all elements at most, the largest that fit first.

    Sizes 50, 30, 20 and a share of 0.6: 50 fits into 60, of the remaining 10 nothing fits, so piece 0 moves. Where no
    piece fits, the smallest one moves: a share above 0 always has an effect.
    """
    if not share or not sizes:
        return frozenset()
    remaining, chosen = share * sum(sizes), set()
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if sizes[index] <= remaining:
            chosen.add(index)
            remaining -= sizes[index]
    return frozenset(chosen or {min(range(len(sizes)), key=lambda index: sizes[index])})


def _group_by_size(pieces: Sequence[OptimizerShard]) -> Iterator[list[OptimizerShard]]:
    """Yield groups of pieces, each with few enough elements for float32 copies of all of them."""
    group: list[OptimizerShard] = []
    elements = 0
    for piece in pieces:
        if group and elements + piece.weight.numel() > UPDATE_ELEMENTS:
            yield group
            group, elements = [], 0
        group.append(piece)
        elements += piece.weight.numel()
    if group:
        yield group
