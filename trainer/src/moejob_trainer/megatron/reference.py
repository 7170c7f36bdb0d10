"""The reference model of GRPO: the weights before training, in host memory between its passes.

Only tensors that training changes are kept. Under LoRA these are the adapters, whose product is zero at first: the
reference is the base model. While the reference computes, a copy of the current weights stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moejob_trainer.megatron.shares import own_part
from moejob_trainer.model.stage import Stage


class ReferenceWeights:
    """A copy of this rank's weights, made by the constructor."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._held = [_host_copy(own_part(tensor)) for tensor in _changing(stages)]

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Let the model compute with the reference weights; afterwards its own are restored bit for bit."""
        current = [own_part(tensor) for tensor in _changing(self._stages)]
        kept = [part.clone() for part in current]
        try:
            _write(current, self._held)
            yield
        finally:
            _write(current, kept)


def _changing(stages: Sequence[Stage]) -> Iterator[Tensor]:
    """Yield the tensors that training changes: trained parameters, and the biases that choose experts."""
    for stage in stages:
        yield from (parameter for parameter in stage.parameters() if parameter.requires_grad)
        yield from (buffer for name, buffer in stage.named_buffers() if name.endswith("selection_bias"))


def _host_copy(part: Tensor) -> Tensor:
    # A copy from pinned memory runs at the speed of PCIe: the reference is loaded in every step.
    copied = part.to("cpu", copy=True)
    return copied.pin_memory() if part.is_cuda else copied


def _write(parts: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for part, value in zip(parts, values, strict=True):
            part.copy_(value, non_blocking=True)
