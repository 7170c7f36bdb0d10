"""AdamW over this rank's share of the weights: every replica updates a part, then all gather the whole.

A piece is the part of one parameter that fell to this rank. Pieces know the name of their parameter and where in it
they lie, so that a checkpoint saved in one layout is read in any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from moejob_api.job.base import Dtype
from moejob_api.job.training import Optimizer as AdamNumbers
from moejob_trainer.groups import Groups
from moejob_trainer.megatron.replicas import Replicas, Share
from moejob_trainer.model.linear import is_expert, is_tensor_replica, is_tied_copy

# Elements updated at once where temporaries are needed.
_CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The part of one parameter that this rank updates."""

    name: str
    parameter: nn.Parameter
    # Where it lies in the flat parameter of this rank.
    start: int
    weight: Tensor
    gradient: Tensor
    # The float32 copy; `weight` itself where that is float32.
    main: Tensor
    first_moment: Tensor
    second_moment: Tensor
    is_decayed: bool

    @property
    def stop(self) -> int:
        """Behind its last element in the flat parameter."""
        return self.start + self.weight.numel()


@dataclass(frozen=True, slots=True)
class Moments:
    """How the optimizer keeps its state."""

    dtype: torch.dtype
    # Share of all elements whose state lives and is updated in host memory.
    offloaded: float


class ShardedAdamW:
    """AdamW with decoupled decay on this rank's pieces."""

    def __init__(self, replicas: Replicas, groups: Groups, numbers: AdamNumbers, moments: Moments) -> None:
        self.replicas, self.groups, self.numbers = replicas, groups, numbers
        self.pieces = _offloaded([_piece(share, moments.dtype) for share in replicas.shares()], moments.offloaded)
        self.steps = 0

    def gradient_norm(self, scale: float = 1.0) -> float:
        """The norm of the gradient of the whole model; every parameter counts once, however many ranks hold it."""
        own = [piece.gradient for piece in self.pieces if counts_here(piece.parameter, self.groups)]
        square = torch.zeros((), dtype=torch.float64)
        if own:
            norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in own])
            square = norms.double().square().sum()
        device = own[0].device if own else self._device
        square = square.to(device)
        if self.groups.world.size > 1:
            dist.all_reduce(square, group=self.groups.world.handle)
        return math.sqrt(square.item()) * scale

    def update(self, learning_rate: float, gradient_scale: float) -> None:
        """One step with the gradients scaled, then every replica gathers the new weights."""
        self.steps += 1
        for decayed in (True, False):
            for group in _grouped([piece for piece in self.pieces if piece.is_decayed is decayed]):
                self._update(group, learning_rate, gradient_scale)
        self.gather_weights()

    def gather_weights(self) -> None:
        """Rounds this rank's float32 copies into its weights and gathers everybody's."""
        for piece in self.pieces:
            if piece.main is not piece.weight:
                piece.weight.copy_(piece.main)
        self.replicas.gather()

    def read_weights(self) -> None:
        """Takes the float32 copies from the weights: after these were set from outside."""
        for piece in self.pieces:
            if piece.main is not piece.weight:
                piece.main.copy_(piece.weight)

    @property
    def _device(self) -> torch.device:
        return next(self.replicas.chunks[0].parameters()).device

    def _update(self, pieces: Sequence[Piece], learning_rate: float, gradient_scale: float) -> None:
        mains = [piece.main for piece in pieces]
        gradients = [piece.gradient.to(piece.main.device, torch.float32) * gradient_scale for piece in pieces]
        firsts = [piece.first_moment.float() for piece in pieces]
        seconds = [piece.second_moment.float() for piece in pieces]
        adamw(
            mains,
            gradients,
            firsts,
            seconds,
            max_exp_avg_sqs=[],
            # The function counts the step before it uses it.
            state_steps=[torch.tensor(float(self.steps - 1), device=main.device) for main in mains],
            fused=True,
            amsgrad=False,
            beta1=self.numbers.beta1,
            beta2=self.numbers.beta2,
            lr=learning_rate,
            weight_decay=self.numbers.weight_decay if pieces[0].is_decayed else 0.0,
            eps=self.numbers.epsilon,
            maximize=False,
        )
        for piece, first, second in zip(pieces, firsts, seconds, strict=True):
            if first is not piece.first_moment:
                piece.first_moment.copy_(first)
                piece.second_moment.copy_(second)


def moments(precision: Dtype, offloaded: float) -> Moments:
    """How a job wants the state of its optimizer kept."""
    return Moments(getattr(torch, precision.value), offloaded)


def _piece(share: Share, dtype: torch.dtype) -> Piece:
    main = share.weight if share.weight.dtype is torch.float32 else share.weight.float()
    return Piece(
        name=share.name,
        parameter=share.parameter,
        start=share.start,
        weight=share.weight,
        gradient=share.gradient,
        main=main,
        first_moment=torch.zeros_like(main, dtype=dtype),
        second_moment=torch.zeros_like(main, dtype=dtype),
        is_decayed=is_decayed(share.name),
    )


def counts_here(parameter: nn.Parameter, groups: Groups) -> bool:
    """Whether a parameter is counted, and saved, by this rank of those that hold the same."""
    if is_tied_copy(parameter):
        return False
    holders = groups.expert_tensor if is_expert(parameter) else groups.tensor
    return not is_tensor_replica(parameter) or holders.rank == 0


def is_decayed(name: str) -> bool:
    """Whether weight decay applies: not to norms, biases and sinks."""
    owner, _, last = name.rpartition(".")
    return not (last == "bias" or last.endswith("_bias") or last == "sinks" or owner.endswith("norm"))


def _offloaded(pieces: list[Piece], share: float) -> list[Piece]:
    """The pieces, those that hold the first `share` of all elements with their state in host memory."""
    budget = share * sum(piece.weight.numel() for piece in pieces)
    kept = []
    for piece in pieces:
        budget -= piece.weight.numel()
        if budget < 0 or not piece.weight.is_cuda:
            kept.append(piece)
            continue
        host = {
            field: getattr(piece, field).to("cpu").pin_memory() for field in ("main", "first_moment", "second_moment")
        }
        kept.append(replace(piece, **host))
    return kept


def _grouped(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces on one device, of about so many elements that copies of them fit anywhere."""
    group: list[Piece] = []
    elements = 0
    for piece in sorted(pieces, key=lambda piece: piece.main.is_cuda):
        if group and (elements + piece.main.numel() > _CHUNK_ELEMENTS or piece.main.device != group[0].main.device):
            yield group
            group, elements = [], 0
        group.append(piece)
        elements += piece.main.numel()
    if group:
        yield group
