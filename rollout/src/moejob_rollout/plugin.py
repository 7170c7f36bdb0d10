"""Additions to vLLM in every one of its processes: transports of weights, and corrections, most of them for the CPU."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

# By the name that --weight-transfer-config calls it: the module and its class.
_TRANSPORTS = {
    "moejob_disk": ("disk", "DiskTransfer"),
    "moejob_gloo": ("broadcast", "GlooTransfer"),
    "moejob_nccl": ("broadcast", "NcclTransfer"),
    "moejob_ipc": ("ipc", "IpcTransfer"),
}
_registered: set[str] = set()
# Of a process on the CPU that waits for work; 1 s in vLLM.
_BUSY_SECONDS = 0.002


def register() -> None:
    """Called by vLLM, more than once in some processes."""
    for name in _TRANSPORTS.keys() - _registered:
        module, transport = _TRANSPORTS[name]
        WeightTransferEngineFactory.register_engine(name, f"moejob_rollout.transfer.{module}", transport)
        _registered.add(name)
    if "everywhere" not in _registered:
        _expect_no_tokenizer()
        _keep_replies_in_step()
        _registered.add("everywhere")
    if current_platform.is_cpu() and "cpu" not in _registered:
        _ask_for_amx()
        _pack_experts_at_every_update()
        _leave_cores_to_others()
        _record_routed_experts()
        _registered.add("cpu")


def _expect_no_tokenizer() -> None:
    """Let a server that has no tokenizer say so as one says that it has no chat template.

    vLLM fills in a chat template at each start. A model without one is expected, and nothing is logged; a missing
    tokenizer, which --tokens-only asks for, is logged with a traceback as if the start had failed.
    """
    from vllm.renderers.base import BaseRenderer  # noqa: PLC0415  # slow to import
    from vllm.renderers.chat_utils import ChatTemplateResolutionError  # noqa: PLC0415

    original = BaseRenderer.get_tokenizer

    @wraps(original)
    def found(self: Any) -> Any:
        if self.tokenizer is None:
            raise ChatTemplateResolutionError("this engine has no tokenizer and takes token ids only")
        return original(self)

    BaseRenderer.get_tokenizer = found


def _keep_replies_in_step() -> None:
    from moejob_rollout.worker_replies import keep_in_step  # noqa: PLC0415  # slow to import

    keep_in_step()


def _ask_for_amx() -> None:
    """Ask Linux for the tiles of AMX, where the processor has some.

    vLLM's attention multiplies bfloat16 with them and never asks: a worker whose torch has not asked before is ended by
    SIGILL at its first text.
    """
    torch.cpu._init_amx()  # noqa: SLF001  # it has no public name


def _pack_experts_at_every_update() -> None:
    """Lay experts out for the CPU's kernel whenever weights have been loaded.

    vLLM 0.28 to 0.33 does so after the first load only: a later one leaves plain weights where packed ones are read,
    and answers are wrong without any error.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # noqa: PLC0415  # slow to import
        UnquantizedFusedMoEMethod,
    )

    original = UnquantizedFusedMoEMethod._setup_kernel  # noqa: SLF001  # it has no public name

    @wraps(original)
    def packed(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, *args, **kwargs)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = packed  # noqa: SLF001


def _record_routed_experts() -> None:
    from moejob_rollout.routed_experts import record_on_cpu  # noqa: PLC0415  # slow to import

    record_on_cpu()


def _leave_cores_to_others() -> None:
    """Let a worker that has nothing to do sleep at once.

    vLLM's polls for a second after each batch. On a machine that also trains, the trainer's first operation on all
    cores waits for that second: twice a step, for the probe after a synchronization and for the update.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415  # slow to import

    original = SpinCondition.__init__

    @wraps(original)
    def patient(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, _BUSY_SECONDS)

    SpinCondition.__init__ = patient
