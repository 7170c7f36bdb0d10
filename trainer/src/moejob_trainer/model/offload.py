"""Activation offload: tensors that a layer keeps for its backward pass lie in host memory between the passes.

    stream of the training   layer 1 | layer 2   | layer 3   | loss    | layer 3   | layer 2   | layer 1
    stream of the copies             | 1 to host | 2 to host | 3, 3 to the GPU, 2  | 1

So activations of at most two layers are on the GPU: the layer that computes, and the one that is being copied.
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
    def of(self, module: nn.Module) -> Iterator[None]:
        """While it is entered, the module keeps its activations in host memory. Its weights stay."""
        self.last = OffloadedLayer(self.last, self._backward)
        packing = _Packing(module, self._staying, self.last)
        # What is made again is made from what is in host memory.
        token = keeping.set(lambda tensor: partial(_unpacked, packing.packed(tensor)))
        try:
            with saved_tensors_hooks(packing.packed, _unpacked):
                yield
        finally:
            keeping.reset(token)
            self.last.end()

    def __exit__(self, *arguments: object) -> None:
        if self.last is not None:
            self.last.leave()


class _Packing:
    def __init__(self, module: nn.Module, staying: frozenset[int], layer: OffloadedLayer) -> None:
        self._module, self._staying, self._layer = module, staying, layer
        # Several operations keep the same tensor. The layer holds it until then: its place is not taken by another.
        self._known: dict[object, _Packed] = {}

    def packed(self, tensor: Tensor) -> Tensor | _Packed:
        """Return how an operation remembers a tensor that it needs again."""
        address = storage_address(tensor)
        if address in self._staying or is_discarded(address) or self._is_weight(address):
            return tensor
        part = (address, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        if part not in self._known:
            self._known[part] = _Packed(self._layer, self._layer.keep(tensor))
        return self._known[part]

    def _is_weight(self, address: int) -> bool:
        # Asked each time: weights that replicas divide are whole, somewhere else, while the module computes.
        return any(storage_address(parameter) == address for parameter in self._module.parameters())


def _unpacked(packed: Tensor | _Packed) -> Tensor:
    if not isinstance(packed, _Packed):
        return packed
    packed.layer.backward.enter(packed.layer)
    return packed.kept.needed()


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """A tensor as an operation remembers it. Operations alone keep a layer alive, which ends with the last of them."""

    layer: OffloadedLayer
    kept: _Kept


@dataclass(slots=True, eq=False)
class _BackwardPass:
    """The layer that the backward pass has come to."""

    at: weakref.ref[OffloadedLayer] | None = None

    def enter(self, layer: OffloadedLayer) -> None:
        """Let go of the layer behind this one, and begin to fetch the one before it."""
        left = None if self.at is None else self.at()
        if left is layer:
            return
        self.at = weakref.ref(layer)
        if left is not None:
            left.let_go()
        layer.fetch()
        if layer.before is not None:
            layer.before.fetch()


@dataclass(slots=True, eq=False, weakref_slot=True)
class OffloadedLayer:
    """The tensors that one layer keeps, and as long as their copies are on the way, those on the GPU."""

    before: OffloadedLayer | None
    backward: _BackwardPass
    kept: list[_Kept] = field(default_factory=list)
    _leaving: list[Tensor] = field(default_factory=list)
    _sent: torch.cuda.Event | None = None

    def keep(self, tensor: Tensor) -> _Kept:
        """Begin to copy a tensor to the host."""
        self._leaving.append(tensor)
        self.kept.append(_Kept(_held(tensor), tensor.device))
        return self.kept[-1]

    def end(self) -> None:
        """All is kept: memory of the layer before is free again when its copies have left."""
        if self.before is not None:
            self.before.leave()
        if self._leaving and self._leaving[0].is_cuda:
            self._sent = _copies(self._leaving[0].device).record_event()

    def leave(self) -> None:
        """Let what is computed from now on have the memory that the copies have left."""
        if self._sent is not None:
            torch.cuda.current_stream(self._leaving[0].device).wait_event(self._sent)
            self._sent = None
        self._leaving.clear()

    def fetch(self) -> None:
        """Begin to copy all of it to the GPU, in the order in which the backward pass needs it."""
        for kept in reversed(self.kept):
            kept.fetch()

    @property
    def is_fetched(self) -> bool:
        """Return whether any of it is on the device again."""
        return any(kept.fetched is not None for kept in self.kept)

    def let_go(self) -> None:
        """Its backward pass is over."""
        for kept in self.kept:
            kept.let_go()

    def __del__(self) -> None:
        self.let_go()


@dataclass(slots=True, eq=False)
class _Kept:
    """A tensor in host memory, and on the device for as long as the backward pass is near."""

    held: Tensor
    device: torch.device
    fetched: Tensor | None = None
    _arrived: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Begin to copy it to the device, unless that has begun."""
        if self.fetched is not None:
            return
        if self.device.type != "cuda":
            self.fetched = self.held
            return
        # In memory that the training takes and gives back, so that no other stream has to be asked about it.
        self.fetched = torch.empty_like(self.held, device=self.device)
        copies = _following(self.device)
        with torch.cuda.stream(copies):
            self.fetched.copy_(self.held, non_blocking=True)
        self._arrived = copies.record_event()

    def let_go(self) -> None:
        """Give its memory back, behind the copy, for which nothing has waited that did not need it."""
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
        self.fetched = self._arrived = None

    def needed(self) -> Tensor:
        """Return it on the device, in the order of the training's own work."""
        self.fetch()
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
        if self.fetched is None:
            raise RuntimeError("what was fetched is there")
        return self.fetched


def _held(tensor: Tensor) -> Tensor:
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    if not tensor.is_cuda:
        return held.copy_(tensor)
    with torch.cuda.stream(_following(tensor.device)):
        return held.copy_(tensor, non_blocking=True)


def _following(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of copies, behind everything that the training has asked for by now."""
    copies = _copies(device)
    copies.wait_stream(torch.cuda.current_stream(device))
    return copies


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
