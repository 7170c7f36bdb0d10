"""Experts of which every replica keeps a share: which layers are whole, and when their matrices are gathered.

    computed   | experts 3   |  ...  | experts 4   |  ...        or backward, from 4 to 3
    on its way | layer 4 ------->    | layer 5 ------->
    freed      | layer 2             | layer 3

The autograd graph keeps the memory of a matrix, not its values: the memory is freed after the forward pass, and has to
be filled again before the backward pass of its layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moejob_trainer.distributed.groups import Group
from moejob_trainer.distributed.side_stream import Finish, SideStream
from moejob_trainer.layers.gradient_sums import OwnGradient
from moejob_trainer.megatron.divided_matrix import DividedMatrix, sum_into
from moejob_trainer.megatron.replica_sums import GradientMemory, ReadGradientMemory, ReplicaSums
from moejob_trainer.megatron.share_memory import ShareMemory, memory_in_reach
from moejob_trainer.megatron.shares import Sharded, WeightTypes, share_elements
from moejob_trainer.model.moe_layer import LocalExperts
from moejob_trainer.model.recompute import computes_again

# The matrices of one layer on the meta device, by name, and the module that they come from.
Taken = tuple[LocalExperts, Mapping[str, nn.Parameter]]
# What grouped products multiply with. Biases and adapters are small, and used in other ways.
MATRICES = ("gate_up", "down")
# Layers that may be whole at a time: the one that is computed, and the next.
MOST_WHOLE = 2
# Whole gradients of a matrix at a time: one that a product writes, and one that replicas sum.
MOST_GRADIENTS = 2


@dataclass(frozen=True, slots=True, eq=False)
class DividedExperts:
    """The matrices of one layer, and the module that shows their shares while they are not whole."""

    module: LocalExperts
    matrices: Mapping[str, DividedMatrix]

    def gather(self, stream: SideStream) -> list[Finish]:
        """Start to gather the matrices."""
        for name, matrix in self.matrices.items():
            setattr(self.module, name, matrix.whole)
        return [matrix.gather(stream) for matrix in self.matrices.values()]

    def free(self) -> None:
        """Keep the shares alone."""
        for name, matrix in self.matrices.items():
            setattr(self.module, name, matrix.share)
            matrix.free()


class ExpertShares:
    """The experts of a stage, in the order in which they compute."""

    def __init__(
        self,
        layers: Sequence[DividedExperts],
        sums: ReplicaSums,
        stream: SideStream,
        meet: Callable[[], None] | None = None,
    ) -> None:
        """The last argument waits on the device for all replicas, where they read one another's shares."""
        self._layers, self._sums, self._stream, self._meet = layers, sums, stream, meet
        # Updates change shares between the passes; peers read them during the passes.
        self._are_read = False
        self._most = MOST_WHOLE
        # Gathered layers, each with its unfinished gathers, in the order of their last use.
        self._whole: dict[int, list[Finish]] = {}

    def watch(self, stage: nn.Module) -> None:
        """Register the hooks that gather each layer before it computes."""
        stage.register_forward_pre_hook(lambda *_: self._begin(0))
        for index, layer in enumerate(self._layers):
            layer.module.register_forward_pre_hook(partial(self._before_forward, index))
            layer.module.register_forward_hook(partial(self._behind_forward, index))

    def keep(self) -> None:
        """Let layers stay whole until all of them are freed."""
        self._most = len(self._layers)

    def finish_sums(self) -> None:
        """Wait for the gradients that are being summed."""
        self._sums.finish()

    def free(self) -> None:
        """Keep the shares alone."""
        for index in [*self._whole]:
            self._free(index)
        if self._meet is not None and self._are_read:
            # No update before all replicas have read these shares.
            self._stream.run(self._meet)()
        self._are_read = False

    def _before_forward(self, index: int, *_: object) -> None:
        self._need(index)
        # Recomputation runs inside the backward pass, whose hooks gather the layer before.
        if not computes_again():
            self._begin(index + 1)

    def _behind_forward(self, index: int, _: nn.Module, __: Any, output: Tensor) -> None:
        if not output.requires_grad:
            return
        output.register_hook(partial(self._before_backward, index))
        if index == len(self._layers) - 1 and not computes_again():
            # Memory of the gradients is freed here: the loss needs the most memory of a step.
            self._sums.finish()

    def _before_backward(self, index: int, _: Tensor) -> None:
        self._need(index)
        self._begin(index - 1)

    def _need(self, index: int) -> None:
        """Wait until this layer is whole, before anything computes with it."""
        self._begin(index)
        for finish in self._whole.pop(index):
            finish()
        self._whole[index] = []

    def _begin(self, index: int) -> None:
        """Start to gather a layer; the least recently used one is freed for it."""
        if index in self._whole or not 0 <= index < len(self._layers):
            return
        self._make_room(self._most - 1)
        if self._meet is not None and not self._are_read:
            # No replica reads before all of them have updated.
            self._stream.run(self._meet)
        self._are_read = True
        self._whole[index] = self._layers[index].gather(self._stream)

    def _make_room(self, most: int) -> None:
        while len(self._whole) > most:
            self._free(next(iter(self._whole)))

    def _free(self, index: int) -> None:
        # A gather that still fills this memory has to end before the memory is used again.
        for finish in self._whole.pop(index):
            finish()
        self._layers[index].free()


def take_matrices(stage: nn.Module) -> list[Taken]:
    """Take the matrices out of all experts of a stage, so that fully_shard does not divide them."""
    taken: list[Taken] = []
    for experts in [module for module in stage.modules() if isinstance(module, LocalExperts)]:
        matrices = {name: getattr(experts, name) for name in MATRICES}
        for name in MATRICES:
            # None keeps the name at its place in the order of parameters.
            setattr(experts, name, None)
        taken.append((experts, matrices))
    return taken


def divide_experts(
    taken: Sequence[Taken], types: WeightTypes, group: Group, device: torch.device, *, reads: bool
) -> ExpertShares | None:
    """Put this rank's shares in the place of matrices on the meta device; their values are not set.

    None where nothing has to be gathered: without replicas, and with shares in the type of weights. reads: replicas
    copy from one another's memory, where that is in reach.
    """
    given = [matrix for _, matrices in taken for matrix in matrices.values()]
    if not given or (group.size == 1 and all(matrix.dtype == types.weights for matrix in given)):
        _place_whole(taken, device)
        return None
    memory = _share_memory(given, types, group, device, reads=reads)
    gradients = _gradient_memory(given, types, group, device, reads=reads)
    sums = ReplicaSums(group, SideStream(device), gradients)
    layers = []
    for module, named in taken:
        matrices = {name: _divided(matrix, types, group, memory) for name, matrix in named.items()}
        for matrix in matrices.values():
            if matrix.share.requires_grad:
                sum_into(matrix, sums)
        layers.append(DividedExperts(module, matrices))
        layers[-1].free()
    return ExpertShares(layers, sums, SideStream(device), memory.barrier)


def _place_whole(taken: Sequence[Taken], device: torch.device) -> None:
    """Put back matrices that no other rank holds: products compute with the trained parameter itself."""
    for module, matrices in taken:
        for name, given in matrices.items():
            own = nn.Parameter(torch.zeros_like(given, device=device), requires_grad=given.requires_grad)
            own.gradient_sum = OwnGradient(own) if given.requires_grad else None  # type: ignore[attr-defined]
            setattr(module, name, own)


def _share_memory(
    given: Sequence[nn.Parameter], types: WeightTypes, group: Group, device: torch.device, *, reads: bool
) -> ShareMemory:
    # Shares with more bits than weights are rounded before they travel.
    if not reads or any(matrix.dtype != types.weights for matrix in given):
        return ShareMemory(None, device)
    return memory_in_reach([_each(matrix, group) for matrix in given], types.weights, group, device)


def _gradient_memory(
    given: Sequence[nn.Parameter], types: WeightTypes, group: Group, device: torch.device, *, reads: bool
) -> GradientMemory:
    sizes = sorted({group.size * _each(matrix, group) for matrix in given if matrix.requires_grad})
    if not reads or not sizes:
        return GradientMemory(types.gradients, device, MOST_GRADIENTS)
    memory = memory_in_reach([*sizes] * MOST_GRADIENTS, types.gradients, group, device)
    return ReadGradientMemory(memory, types.gradients, device, MOST_GRADIENTS)


def _divided(given: nn.Parameter, types: WeightTypes, group: Group, memory: ShareMemory) -> DividedMatrix:
    sharded = Sharded(tuple(given.shape), types.weights, group, _each(given, group))
    padded, peers = memory.take(sharded.each, given.dtype)
    return DividedMatrix(padded, sharded, is_trained=given.requires_grad, peers=peers)


def _each(matrix: nn.Parameter, group: Group) -> int:
    return share_elements(tuple(matrix.shape), group)
