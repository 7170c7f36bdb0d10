"""The reference model of GRPO: the weights as they were before training, in host memory while they are not asked.

Only what is trained is kept. Under LoRA these are the adapters, which add nothing at first: the reference is the model
without them. While the reference answers, the weights of the moment are kept beside it, on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moejob_trainer.megatron.shares import own_part
from moejob_trainer.model.stage import Stage


class ReferenceWeights:
    """This rank's part of the weights as they are when this is made."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._held = [_host_copy(own_part(tensor)) for tensor in _changing(stages)]

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Let the model be the reference; afterwards it is what it was, to the bit."""
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
    copied = part.to("cpu", copy=True)
    return copied.pin_memory() if part.is_cuda else copied


def _write(parts: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for part, value in zip(parts, values, strict=True):
            part.copy_(value, non_blocking=True)
