"""Weights and gradients that leave the GPU while engines on it generate answers (memory.offloadParameters, -Gradients).

Tensors stay the same objects with the same views: only their storage shrinks to 0 bytes and grows again, so that
Megatron's buffers, the optimizer's shards and torch's DTensors stay valid. Knows nothing of engines or phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage

from moejob_trainer.megatron.data_parallel import DataParallel
from moejob_trainer.megatron.shares import local_part
from moejob_trainer.model.stage import ModelStage


class GenerationOffload:
    """The offloaded tensors of one rank: weights with their values, gradients without."""

    def __init__(self, weights: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
        self._weights, self._gradients = _distinct_storages(weights), _distinct_storages(gradients)
        self._sizes = [storage.nbytes() for storage in self._gradients]
        # Pinned once: allocating pinned memory costs more than the copy.
        self._copies = [_allocate_host_copy(storage) for storage in self._weights]
        self._is_away = False

    def move_to_host(self) -> None:
        """Copy weights to the host, and free the memory of weights and gradients."""
        if self._is_away:
            return
        for storage, copy in zip(self._weights, self._copies, strict=True):
            copy.copy_(_byte_view(storage))
            storage.resize_(0)
        for storage in self._gradients:
            storage.resize_(0)
        self._is_away = True

    def move_to_device(self) -> None:
        """Allocate the memory again, and fill the weights. Gradients are undefined until an update zeroes them."""
        if not self._is_away:
            return
        for storage, copy in zip(self._weights, self._copies, strict=True):
            storage.resize_(copy.numel())
            _byte_view(storage).copy_(copy)
        for storage, size in zip(self._gradients, self._sizes, strict=True):
            storage.resize_(size)
        self._is_away = False


def make_generation_offload(
    stages: Sequence[ModelStage], data_parallel: DataParallel, *, parameters: bool, gradients: bool
) -> GenerationOffload:
    """The offload that a job asks for, of the weights and gradients of this rank."""
    all_parameters = [parameter for stage in stages for parameter in stage.parameters()]
    return GenerationOffload(
        (local_part(parameter) for parameter in all_parameters if parameters),
        (
            data_parallel.local_gradient(parameter)
            for parameter in all_parameters
            if gradients and parameter.requires_grad
        ),
    )


def _distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the distinct storages of all tensors: many tensors are views of one buffer."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [*{storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values()]


def _allocate_host_copy(storage: UntypedStorage) -> Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")


def _byte_view(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
