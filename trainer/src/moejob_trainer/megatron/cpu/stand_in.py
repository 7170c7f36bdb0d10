"""A torch whose current CUDA device is the CPU, for Megatron's modules."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

# Megatron's modules that make tensors on the device, of those that the trainer runs.
MODULES = (
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
)


def use_cpu(modules: Sequence[str] = MODULES) -> None:
    """Put the stand-in into Megatron's modules; doing it again changes nothing."""
    for name in modules:
        module = import_module(name)
        if module.torch is torch:
            module.torch = _Torch()  # type: ignore[attr-defined]


class _Cuda(ModuleType):
    """torch.cuda where there is none."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")

    @staticmethod
    def current_device() -> torch.device:
        """Buffers are allocated here: param_and_grad_buffer, p2p_communication."""
        return torch.device("cpu")

    @staticmethod
    def current_stream() -> None:
        """param_and_grad_buffer lets it wait for CUDA graphs before each sum; a CPU records none."""

    @staticmethod
    def synchronize(*_: object) -> None:
        """p2p_communication waits for the device after each exchange; a CPU has nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(ModuleType):
    """torch, but for its cuda and for what is asked for by name on a CUDA device."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda()

    @staticmethod
    def zeros(*arguments: Any, **named: Any) -> torch.Tensor:
        """Token counts and a tensor to warm up with are given device="cuda": schedules, param_and_grad_buffer."""
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        return torch.zeros(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
