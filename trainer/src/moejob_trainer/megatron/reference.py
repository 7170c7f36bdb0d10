"""The reference model of GRPO: the weights before training, in host memory between its passes.

Only tensors that training changes are kept. Under LoRA these are the adapters, whose product is zero at first: the
reference is the base model. While the reference computes, a copy of the current weights stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moejob_trainer.megatron.shares import local_part
from moejob_trainer.model.stage import ModelStage


class ReferenceWeights:
    """A copy of this rank's weights, made by the constructor."""

    def __init__(self, stages: Sequence[ModelStage]) -> None:
        self._stages = stages
        self._reference_parts = [_copy_to_host(local_part(tensor)) for tensor in _changing_tensors(stages)]

    @contextmanager
    def use_reference(self) -> Iterator[None]:
        """Let the model compute with the reference weights; afterwards its own are restored bit for bit."""
        current = [local_part(tensor) for tensor in _changing_tensors(self._stages)]
        trained_parts = [part.clone() for part in current]
        try:
            _write_parts(current, self._reference_parts)
            yield
        finally:
            _write_parts(current, trained_parts)


def _changing_tensors(stages: Sequence[ModelStage]) -> Iterator[Tensor]:
    """Yield the tensors that training changes: trained parameters, and the biases that choose experts."""
    for stage in stages:
        yield from (parameter for parameter in stage.parameters() if parameter.requires_grad)
        yield from (buffer for name, buffer in stage.named_buffers() if name.endswith("selection_bias"))


def _copy_to_host(part: Tensor) -> Tensor:
    # A copy from pinned memory runs at the speed of PCIe: the reference is loaded in every step.
    copied = part.to("cpu", copy=True)
    return copied.pin_memory() if part.is_cuda else copied


def _write_parts(parts: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for part, value in zip(parts, values, strict=True):
            part.copy_(value, non_blocking=True)
