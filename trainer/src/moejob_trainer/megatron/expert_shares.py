"""Experts divided over replicas: which layers are whole, and when their matrices are gathered.

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
from moejob_trainer.layers.gradient_sums import LocalGradient
from moejob_trainer.megatron.divided_matrix import DividedMatrix, register_replica_sum
from moejob_trainer.megatron.replica_sums import GradientMemory, PeerGradientMemory, ReplicaSums
from moejob_trainer.megatron.share_memory import ShareMemory, make_share_memory
from moejob_trainer.megatron.shares import ReplicaSharding, WeightTypes, share_elements
from moejob_trainer.model.moe_layer import LocalExperts
from moejob_trainer.model.recompute import is_recomputing

# The matrices of one layer on the meta device, by name, and the module that they come from.
ExpertMatrices = tuple[LocalExperts, Mapping[str, nn.Parameter]]
# What grouped products multiply with. Biases and adapters are small, and used in other ways.
MATRICES = ("gate_up", "down")
# Layers that may be whole at a time: the current layer and the next.
MOST_WHOLE = 2
# Whole gradients of a matrix at a time: one that a product writes, and one that replicas sum.
MOST_GRADIENTS = 2


@dataclass(frozen=True, slots=True, eq=False)
class DividedExperts:
    """The matrices of one layer, and the module that shows their shares while they are not whole."""

    module: LocalExperts
    matrices: Mapping[str, DividedMatrix]

    def start_gather(self, stream: SideStream) -> list[Finish]:
        """Start to gather the matrices."""
        for name, matrix in self.matrices.items():
            setattr(self.module, name, matrix.whole)
        return [matrix.start_gather(stream) for matrix in self.matrices.values()]

    def free_whole(self) -> None:
        """Free the whole matrices, and show the shares again."""
        for name, matrix in self.matrices.items():
            setattr(self.module, name, matrix.share)
            matrix.free_whole()


class ExpertShares:
    """The experts of a stage, in the order in which they compute."""

    def __init__(
        self,
        layers: Sequence[DividedExperts],
        sums: ReplicaSums,
        stream: SideStream,
        barrier: Callable[[], None] | None = None,
    ) -> None:
        """The last argument waits on the device for all replicas, where they read one another's shares."""
        self._layers, self._sums, self._stream, self._barrier = layers, sums, stream, barrier
        # Updates change shares between the passes; peers read them during the passes.
        self._are_read = False
        self._max_whole = MOST_WHOLE
        # Gathered layers, each with its unfinished gathers, in the order of their last use.
        self._whole: dict[int, list[Finish]] = {}

    def register_hooks(self, stage: nn.Module) -> None:
        """Register the hooks that gather each layer before it computes."""
        stage.register_forward_pre_hook(lambda *_: self._start_gather(0))
        for index, layer in enumerate(self._layers):
            layer.module.register_forward_pre_hook(partial(self._before_forward, index))
            layer.module.register_forward_hook(partial(self._after_forward, index))

    def keep_whole(self) -> None:
        """Let layers stay whole until all of them are freed."""
        self._max_whole = len(self._layers)

    def finish_sums(self) -> None:
        """Wait for the gradients that are being summed."""
        self._sums.finish_sums()

    def free_layers(self) -> None:
        """Free every layer that is whole."""
        for index in [*self._whole]:
            self._free_layer(index)
        if self._barrier is not None and self._are_read:
            # No update before all replicas have read these shares.
            self._stream.run(self._barrier)()
        self._are_read = False

    def _before_forward(self, index: int, *_: object) -> None:
        self._ensure_whole(index)
        # Recomputation runs inside the backward pass, whose hooks gather the layer before.
        if not is_recomputing():
            self._start_gather(index + 1)

    def _after_forward(self, index: int, _: nn.Module, __: Any, output: Tensor) -> None:
        if not output.requires_grad:
            return
        output.register_hook(partial(self._before_backward, index))
        if index == len(self._layers) - 1 and not is_recomputing():
            # Memory of the gradients is freed here: the loss needs the most memory of a step.
            self._sums.finish_sums()

    def _before_backward(self, index: int, _: Tensor) -> None:
        self._ensure_whole(index)
        self._start_gather(index - 1)

    def _ensure_whole(self, index: int) -> None:
        """Wait until this layer is whole, before anything computes with it."""
        self._start_gather(index)
        for finish in self._whole.pop(index):
            finish()
        self._whole[index] = []

    def _start_gather(self, index: int) -> None:
        """Start to gather a layer; the least recently used one is freed for it."""
        if index in self._whole or not 0 <= index < len(self._layers):
            return
        self._make_room(self._max_whole - 1)
        if self._barrier is not None and not self._are_read:
            # No replica reads before all of them have updated.
            self._stream.run(self._barrier)
        self._are_read = True
        self._whole[index] = self._layers[index].start_gather(self._stream)

    def _make_room(self, max_whole: int) -> None:
        while len(self._whole) > max_whole:
            self._free_layer(next(iter(self._whole)))

    def _free_layer(self, index: int) -> None:
        # A gather that still fills this memory has to end before the memory is used again.
        for finish in self._whole.pop(index):
            finish()
        self._layers[index].free_whole()


def take_matrices(stage: nn.Module) -> list[ExpertMatrices]:
    """Take the matrices out of all experts of a stage, so that fully_shard does not divide them."""
    expert_matrices: list[ExpertMatrices] = []
    for experts in [module for module in stage.modules() if isinstance(module, LocalExperts)]:
        matrices = {name: getattr(experts, name) for name in MATRICES}
        for name in MATRICES:
            # None keeps the name at its place in the order of parameters.
            setattr(experts, name, None)
        expert_matrices.append((experts, matrices))
    return expert_matrices


def divide_experts(
    expert_matrices: Sequence[ExpertMatrices], types: WeightTypes, group: Group, device: torch.device, *, reads: bool
) -> ExpertShares | None:
    """Put this rank's shares in the place of matrices on the meta device; their values are not set.

    None where nothing has to be gathered: without replicas, and with shares in the type of weights. reads: replicas
    copy from one another's memory, where that is in reach.
    """
    all_matrices = [matrix for _, matrices in expert_matrices for matrix in matrices.values()]
    if not all_matrices or (group.size == 1 and all(matrix.dtype == types.weights for matrix in all_matrices)):
        _place_whole_matrices(expert_matrices, device)
        return None
    memory = _make_share_memory(all_matrices, types, group, device, reads=reads)
    gradients = _make_gradient_memory(all_matrices, types, group, device, reads=reads)
    sums = ReplicaSums(group, SideStream(device), gradients)
    layers = []
    for module, named in expert_matrices:
        matrices = {name: _divide_matrix(matrix, types, group, memory) for name, matrix in named.items()}
        for matrix in matrices.values():
            if matrix.share.requires_grad:
                register_replica_sum(matrix, sums)
        layers.append(DividedExperts(module, matrices))
        layers[-1].free_whole()
    return ExpertShares(layers, sums, SideStream(device), memory.barrier)


def _place_whole_matrices(expert_matrices: Sequence[ExpertMatrices], device: torch.device) -> None:
    """Put back matrices that no other rank holds: products compute with the trained parameter itself."""
    for module, matrices in expert_matrices:
        for name, matrix in matrices.items():
            parameter = nn.Parameter(torch.zeros_like(matrix, device=device), requires_grad=matrix.requires_grad)
            parameter.gradient_sum = LocalGradient(parameter) if matrix.requires_grad else None  # type: ignore[attr-defined]
            setattr(module, name, parameter)


def _make_share_memory(
    matrices: Sequence[nn.Parameter], types: WeightTypes, group: Group, device: torch.device, *, reads: bool
) -> ShareMemory:
    # Shares with more bits than weights are rounded before they travel.
    if not reads or any(matrix.dtype != types.weights for matrix in matrices):
        return ShareMemory(None, device)
    return make_share_memory([_share_size(matrix, group) for matrix in matrices], types.weights, group, device)


def _make_gradient_memory(
    matrices: Sequence[nn.Parameter], types: WeightTypes, group: Group, device: torch.device, *, reads: bool
) -> GradientMemory:
    sizes = sorted({group.size * _share_size(matrix, group) for matrix in matrices if matrix.requires_grad})
    if not reads or not sizes:
        return GradientMemory(types.gradients, device, MOST_GRADIENTS)
    memory = make_share_memory([*sizes] * MOST_GRADIENTS, types.gradients, group, device)
    return PeerGradientMemory(memory, types.gradients, device, MOST_GRADIENTS)


def _divide_matrix(matrix: nn.Parameter, types: WeightTypes, group: Group, memory: ShareMemory) -> DividedMatrix:
    sharded = ReplicaSharding(tuple(matrix.shape), types.weights, group, _share_size(matrix, group))
    padded, peers = memory.take_share(sharded.each, matrix.dtype)
    return DividedMatrix(padded, sharded, is_trained=matrix.requires_grad, peers=peers)


def _share_size(matrix: nn.Parameter, group: Group) -> int:
    return share_elements(tuple(matrix.shape), group)
