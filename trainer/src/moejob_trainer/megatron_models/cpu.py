"""Megatron's models without CUDA: see `moejob_trainer.megatron.cpu`. What they need beyond it stands here.

No job has dropout: the state of a random generator that layers save and set back decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moejob_trainer.megatron.cpu import use_cpu

_CORE = "megatron.core."
_LANGUAGE = "models.common.language_module.language_module"
_RANDOM, _MAPPINGS = "tensor_parallel.random", "tensor_parallel.mappings"
_MOE_UTILS, _DISPATCHER = "transformer.moe.moe_utils", "transformer.moe.token_dispatcher"
# Megatron's modules that make tensors on the device, of those that a model runs.
MODULES = (
    "models.common.embeddings.rotary_pos_embedding",
    _LANGUAGE,
    "tensor_parallel.layers",
    _MAPPINGS,
    _RANDOM,
    _MOE_UTILS,
    "transformer.moe.router",
    _DISPATCHER,
    "utils",
)


def use_cpu_models() -> None:
    """Put stand-ins into the modules of Megatron's models; doing it again changes nothing."""
    use_cpu([_CORE + name for name in MODULES])
    modules: dict[str, Any] = {name: import_module(_CORE + name) for name in MODULES}
    for module in modules.values():
        # The dispatcher copies counts to the host on a stream; the generator gets a seed and is saved around layers.
        vars(module.torch.cuda).update(
            Stream=_OnlyStream,
            current_stream=_OnlyStream,
            stream=nullcontext,
            get_rng_state=lambda *_: torch.get_rng_state(),
            manual_seed=torch.manual_seed,
        )
    modules[_RANDOM]._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # noqa: SLF001
    modules[_RANDOM]._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # noqa: SLF001
    modules[_MOE_UTILS].maybe_move_tensor_to_cpu = modules[_DISPATCHER].maybe_move_tensor_to_cpu = _read_on_host
    modules[_MAPPINGS].torch.distributed = _UnevenCollectives()
    # Megatron would copy the tied embedding to a GPU and sum what no weight is read into yet.
    modules[_LANGUAGE].LanguageModule._is_in_embd_group = lambda _: False  # noqa: SLF001


class _OnlyStream:
    """The one order of work of a CPU, and an event in it: whatever waits for it need not."""

    def record_event(self) -> _OnlyStream:
        """Return an event behind all work so far."""
        return self

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait_stream(self, _: _OnlyStream) -> None:
        """Wait for nothing."""


def _read_on_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
    """Return what is on the host already as a copy from a GPU would be: exchanges want numbers, not tensors."""
    return value.numpy() if as_numpy and isinstance(value, Tensor) else value


class _UnevenCollectives(ModuleType):
    """torch.distributed, with parts of different lengths, which gloo mixes up without an error."""

    def __init__(self) -> None:
        super().__init__("torch.distributed")

    @staticmethod
    def all_gather(outputs: Sequence[Tensor], part: Tensor, group: dist.ProcessGroup) -> None:
        """Gather parts of any lengths: experts of several tensor ranks gather the tokens of each."""
        longest = max(len(output) for output in outputs)
        padded = part.new_zeros((longest, *part.shape[1:]))
        padded[: len(part)] = part
        gathered = [torch.empty_like(padded) for _ in outputs]
        dist.all_gather(gathered, padded, group=group)
        for output, values in zip(outputs, gathered, strict=True):
            output.copy_(values[: len(output)])

    @staticmethod
    def reduce_scatter(output: Tensor, parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Sum parts of any lengths; each rank gets its own."""
        summed = torch.cat([*parts])
        dist.all_reduce(summed, group=group)
        output.copy_(summed.split([len(part) for part in parts])[group.rank()])

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)
