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
from moejob_trainer.layers.kernels import kernels
from moejob_trainer.megatron.data_parallel import DataParallel, ParameterShard
from moejob_trainer.megatron.host_update import Chunk, HostUpdate, Numbers
from moejob_trainer.megatron.master_weights import Copied, Values, copied_to_host, master_of
from moejob_trainer.model.linear import is_expert, is_tensor_replica, is_tied_copy


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerShard(ParameterShard):
    """The part of one parameter that this rank updates, with its optimizer state."""

    # The float32 numbers that `weight` is rounded from.
    master: Values
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
class Moments:
    """Storage of the optimizer's state."""

    dtype: torch.dtype
    # Share of all elements whose state lives and is updated in host memory.
    offloaded: float
    # Whether copies to and from host memory run beside the update of other pieces.
    overlaps_copies: bool = False


class ShardedAdamW:
    """AdamW with decoupled decay on this rank's pieces."""

    def __init__(self, replicas: DataParallel, groups: Groups, numbers: AdamNumbers, moments: Moments) -> None:
        self.replicas, self.groups, self.numbers = replicas, groups, numbers
        self.pieces = _pieces(list(replicas.shards()), moments)
        self._on_host = HostUpdate(overlaps_copies=moments.overlaps_copies)
        self.steps = 0

    def gradient_norm(self) -> float:
        """Return the norm of the whole model's gradient; a parameter counts once, however many ranks hold it."""
        own = [piece.gradient for piece in self.pieces if counts_here(piece.parameter, self.groups)]
        square = torch.zeros((), dtype=torch.float64)
        if own:
            norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in own])
            square = norms.double().square().sum()
        device = own[0].device if own else self._device
        square = square.to(device)
        if self.groups.world.size > 1:
            dist.all_reduce(square, group=self.groups.world.handle)
        return math.sqrt(square.item())

    def update(self, learning_rate: float, gradient_scale: float) -> None:
        """Make one step with scaled gradients, then gather the new weights on every replica."""
        self.steps += 1
        others = []
        for piece in self.pieces:
            if _has_kernel(piece):
                self._update_at_once(piece, learning_rate, gradient_scale)
            elif not _is_on_host(piece):
                others.append(piece)
        for decayed in (True, False):
            for group in _grouped([piece for piece in others if piece.is_decayed is decayed]):
                self._update(group, learning_rate, gradient_scale)
        # Last: while the host computes, the GPU still runs the kernels launched above.
        chunks = [_chunk(piece) for piece in self.pieces if _is_on_host(piece)]
        self._on_host.update(chunks, gradient_scale, partial(self._step_on_host, learning_rate))
        self.replicas.gather()

    def gather_weights(self) -> None:
        """Gather the weights on every replica."""
        self.replicas.gather()

    @property
    def _device(self) -> torch.device:
        return next(self.replicas.chunks[0].parameters()).device

    def _update_at_once(self, piece: OptimizerShard, learning_rate: float, gradient_scale: float) -> None:
        """Update a piece in one pass over its memory, its weight included."""
        fused, given = _kernels(piece), self.numbers
        numbers = fused.AdamWStep(
            step=self.steps,
            learning_rate=learning_rate,
            gradient_scale=gradient_scale,
            beta1=given.beta1,
            beta2=given.beta2,
            epsilon=given.epsilon,
            weight_decay=given.weight_decay if piece.is_decayed else 0.0,
        )
        fused.update(*_tensors(piece), numbers)

    def _step_on_host(self, learning_rate: float, numbers: Numbers, is_decayed: bool) -> None:
        main, gradient, first, second = numbers
        self._step(([main], [gradient], [first], [second]), learning_rate, is_decayed=is_decayed)

    def _update(self, pieces: Sequence[OptimizerShard], learning_rate: float, gradient_scale: float) -> None:
        mains = [piece.master.read() for piece in pieces]
        gradients = [piece.gradient.float() * gradient_scale for piece in pieces]
        firsts = [piece.first_moment.float() for piece in pieces]
        seconds = [piece.second_moment.float() for piece in pieces]
        self._step((mains, gradients, firsts, seconds), learning_rate, is_decayed=pieces[0].is_decayed)
        for piece, main, first, second in zip(pieces, mains, firsts, seconds, strict=True):
            piece.master.write(main)
            if first is not piece.first_moment:
                piece.first_moment.copy_(first)
                piece.second_moment.copy_(second)

    def _step(self, numbers: _Lists, learning_rate: float, *, is_decayed: bool) -> None:
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


def _kernels(piece: OptimizerShard) -> Any:
    return kernels("adamw", piece.master.storage)


def _has_kernel(piece: OptimizerShard) -> bool:
    fused = _kernels(piece)
    return fused is not None and fused.takes(*_tensors(piece))


def _tensors(piece: OptimizerShard) -> tuple[Tensor, ...]:
    return piece.weight, piece.gradient, piece.master.storage, piece.first_moment, piece.second_moment


def moments(spec: Spec) -> Moments:
    """Return the storage that a job asks for."""
    dtype = getattr(torch, spec.training.precision.moments.value)
    return Moments(dtype, spec.memory.offload_optimizer, spec.training.communication.overlap_optimizer_copies)


def _pieces(shares: Sequence[ParameterShard], moments: Moments) -> list[OptimizerShard]:
    """Return a piece of each share; a part of all elements has its state in host memory from the start."""
    moved = moved_to_host([share.weight.numel() for share in shares], moments.offloaded)
    return [
        _piece(share, moments.dtype, is_on_host=index in moved and share.weight.is_cuda)
        for index, share in enumerate(shares)
    ]


def _piece(share: ParameterShard, dtype: torch.dtype, *, is_on_host: bool) -> OptimizerShard:
    master = master_of(share.weight)
    if is_on_host:
        master = Copied(share.weight, copied_to_host(master))
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
    return isinstance(piece.master, Copied)


def _chunk(piece: OptimizerShard) -> Chunk:
    return Chunk(
        piece.weight, piece.gradient, piece.master.storage, piece.first_moment, piece.second_moment, piece.is_decayed
    )


def counts_here(parameter: nn.Parameter, groups: Groups) -> bool:
    """Return whether this rank counts and saves a parameter: one does among all ranks with the same one."""
    if is_tied_copy(parameter):
        return False
    holders = groups.expert_tensor if is_expert(parameter) else groups.tensor
    return not is_tensor_replica(parameter) or holders.rank == 0


def is_decayed(name: str) -> bool:
    """Return whether weight decay applies: not to norms, biases and sinks."""
    owner, _, last = name.rpartition(".")
    return not (last == "bias" or last.endswith("_bias") or last == "sinks" or owner.endswith("norm"))


def moved_to_host(sizes: Sequence[int], share: float) -> frozenset[int]:
    """Return the indices of pieces with `share` of all elements at most, the largest that fit first.

    Sizes 50, 30, 20 and a share of 0.6: 50 fits into 60, of the remaining 10 nothing fits, so piece 0 moves. Where no
    piece fits, the smallest one moves: a share above 0 always has an effect.
    """
    if not share or not sizes:
        return frozenset()
    left, moved = share * sum(sizes), set()
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if sizes[index] <= left:
            moved.add(index)
            left -= sizes[index]
    return frozenset(moved or {min(range(len(sizes)), key=lambda index: sizes[index])})


def _grouped(pieces: Sequence[OptimizerShard]) -> Iterator[list[OptimizerShard]]:
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
