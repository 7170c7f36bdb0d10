"""Activation offload: tensors that a layer keeps for its backward pass lie in host memory between the passes.

    stream of the training   layer 1 | layer 2   | layer 3   | loss    | layer 3   | layer 2   | layer 1
    stream of the copies             | 1 to host | 2 to host | 3, 3 to the GPU, 2  | 1

So activations of at most two layers are on the GPU: the layer that computes, and the layer in copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from moejob_trainer.model.recompute import is_discarded, keeping, storage_address


class OffloadedPass(AbstractContextManager["OffloadedPass"]):
    """One pass through the layers of a stage. What `staying` names stays: another holds it anyway."""

    def __init__(self, staying: Iterable[Tensor]) -> None:
        self._staying = frozenset(storage_address(tensor) for tensor in staying)
        self.last: OffloadedLayer | None = None
        self._backward = _BackwardPass()

    @contextmanager
    def offload_module(self, module: nn.Module) -> Iterator[None]:
        """While it is entered, the module keeps its activations in host memory. Its weights stay."""
        self.last = OffloadedLayer(self.last, self._backward)
        packing = _TensorPacking(module, self._staying, self.last)
        # What is made again is made from what is in host memory.
        token = keeping.set(lambda tensor: partial(_unpack_tensor, packing.pack_tensor(tensor)))
        try:
            with saved_tensors_hooks(packing.pack_tensor, _unpack_tensor):
                yield
        finally:
            keeping.reset(token)
            self.last.finish_forward()

    def __exit__(self, *arguments: object) -> None:
        if self.last is not None:
            self.last.release_memory()


class _TensorPacking:
    def __init__(self, module: nn.Module, staying: frozenset[int], layer: OffloadedLayer) -> None:
        self._module, self._staying, self._layer = module, staying, layer
        # Several operations keep the same tensor. The layer holds it until then: its place is not taken by another.
        self._packed_tensors: dict[object, _PackedTensor] = {}

    def pack_tensor(self, tensor: Tensor) -> Tensor | _PackedTensor:
        """Return how an operation remembers a tensor that it needs again."""
        address = storage_address(tensor)
        if address in self._staying or is_discarded(address) or self._is_weight(address):
            return tensor
        part = (address, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        if part not in self._packed_tensors:
            self._packed_tensors[part] = _PackedTensor(self._layer, self._layer.keep_tensor(tensor))
        return self._packed_tensors[part]

    def _is_weight(self, address: int) -> bool:
        # Asked each time: weights that replicas divide are whole, somewhere else, while the module computes.
        return any(storage_address(parameter) == address for parameter in self._module.parameters())


def _unpack_tensor(packed: Tensor | _PackedTensor) -> Tensor:
    if not isinstance(packed, _PackedTensor):
        return packed
    packed.layer.backward.enter_layer(packed.layer)
    return packed.kept.wait()


@dataclass(frozen=True, slots=True, eq=False)
class _PackedTensor:
    """A tensor as an operation remembers it. Operations alone keep a layer alive, which ends with the last of them."""

    layer: OffloadedLayer
    kept: _KeptTensor


@dataclass(slots=True, eq=False)
class _BackwardPass:
    """The layer that the backward pass has come to."""

    at: weakref.ref[OffloadedLayer] | None = None

    def enter_layer(self, layer: OffloadedLayer) -> None:
        """Let go of the layer behind this one, and begin to fetch the one before it."""
        previous_layer = None if self.at is None else self.at()
        if previous_layer is layer:
            return
        self.at = weakref.ref(layer)
        if previous_layer is not None:
            previous_layer.release_fetched()
        layer.start_fetch()
        if layer.before is not None:
            layer.before.start_fetch()


@dataclass(slots=True, eq=False, weakref_slot=True)
class OffloadedLayer:
    """The tensors that one layer keeps, and as long as their copies are on the way, those on the GPU."""

    before: OffloadedLayer | None
    backward: _BackwardPass
    kept: list[_KeptTensor] = field(default_factory=list)
    _leaving: list[Tensor] = field(default_factory=list)
    _sent: torch.cuda.Event | None = None

    def keep_tensor(self, tensor: Tensor) -> _KeptTensor:
        """Begin to copy a tensor to the host."""
        self._leaving.append(tensor)
        self.kept.append(_KeptTensor(_copy_to_host(tensor), tensor.device))
        return self.kept[-1]

    def finish_forward(self) -> None:
        """All is kept: memory of the layer before is free again when its copies have left."""
        if self.before is not None:
            self.before.release_memory()
        if self._leaving and self._leaving[0].is_cuda:
            self._sent = _copy_stream(self._leaving[0].device).record_event()

    def release_memory(self) -> None:
        """Let what is computed from now on have the memory that the copies have left."""
        if self._sent is not None:
            torch.cuda.current_stream(self._leaving[0].device).wait_event(self._sent)
            self._sent = None
        self._leaving.clear()

    def start_fetch(self) -> None:
        """Begin to copy all of it to the GPU, in the order in which the backward pass needs it."""
        for tensor in reversed(self.kept):
            tensor.start_fetch()

    @property
    def is_fetched(self) -> bool:
        """Return whether any of it is on the device again."""
        return any(tensor.fetched is not None for tensor in self.kept)

    def release_fetched(self) -> None:
        """Its backward pass is over."""
        for tensor in self.kept:
            tensor.release_fetched()

    def __del__(self) -> None:
        self.release_fetched()


@dataclass(slots=True, eq=False)
class _KeptTensor:
    """A tensor in host memory, and on the device for as long as the backward pass is near."""

    held: Tensor
    device: torch.device
    fetched: Tensor | None = None
    _arrived: torch.cuda.Event | None = None

    def start_fetch(self) -> None:
        """Begin to copy it to the device, unless that has begun."""
        if self.fetched is not None:
            return
        if self.device.type != "cuda":
            self.fetched = self.held
            return
        # In memory that the training takes and gives back, so that no other stream has to be asked about it.
        self.fetched = torch.empty_like(self.held, device=self.device)
        copies = _following_copy_stream(self.device)
        with torch.cuda.stream(copies):
            self.fetched.copy_(self.held, non_blocking=True)
        self._arrived = copies.record_event()

    def release_fetched(self) -> None:
        """Give its memory back, behind the copy, for which nothing has waited that did not need it."""
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
        self.fetched = self._arrived = None

    def wait(self) -> Tensor:
        """Return it on the device, in the order of the training's own work."""
        self.start_fetch()
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
        if self.fetched is None:
            raise RuntimeError("what was fetched is there")
        return self.fetched


def _copy_to_host(tensor: Tensor) -> Tensor:
    host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    if not tensor.is_cuda:
        return host_copy.copy_(tensor)
    with torch.cuda.stream(_following_copy_stream(tensor.device)):
        return host_copy.copy_(tensor, non_blocking=True)


def _following_copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of copies, behind everything that the training has asked for by now."""
    copies = _copy_stream(device)
    copies.wait_stream(torch.cuda.current_stream(device))
    return copies


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
