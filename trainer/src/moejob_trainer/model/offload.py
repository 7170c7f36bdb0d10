"""Activation offload: what a module keeps for its backward pass waits in host memory between the passes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """A tensor in host memory, and where it is needed."""

    held: Tensor
    device: torch.device


class Offloading(saved_tensors_hooks):
    """While it is entered, `module` keeps its activations in host memory. Its weights stay, and so does what `staying`
    names: another holds it anyway.
    """

    def __init__(self, module: nn.Module, staying: Iterable[Tensor]) -> None:
        super().__init__(self._packed, _unpacked)
        self._module, self._staying = module, {_address(tensor) for tensor in staying}
        # Several operations keep the same tensor. It lives until the module is done: its place is not taken by another.
        self._known: dict[object, tuple[Tensor, _Moved]] = {}

    def __exit__(self, *arguments: object) -> None:
        self._known.clear()
        super().__exit__(*arguments)

    def _packed(self, tensor: Tensor) -> Tensor | _Moved:
        address = _address(tensor)
        if address in self._staying or self._is_weight(address):
            return tensor
        part = (address, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        if part not in self._known:
            self._known[part] = tensor, _moved(tensor)
        return self._known[part][1]

    def _is_weight(self, address: int) -> bool:
        # Asked each time: weights that replicas divide are whole, somewhere else, while the module computes.
        return any(_address(parameter) == address for parameter in self._module.parameters())


def _moved(tensor: Tensor) -> _Moved:
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    # In the order of the device's own work, which therefore need not be waited for.
    held.copy_(tensor, non_blocking=True)
    return _Moved(held, tensor.device)


def _unpacked(packed: Tensor | _Moved) -> Tensor:
    return packed.held.to(packed.device, non_blocking=True) if isinstance(packed, _Moved) else packed


def _address(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    address: int = storage._cdata  # noqa: SLF001 the only name that views of a tensor share
    return address
