"""Additions to vLLM in every one of its processes: transports of weights, and corrections, most of them for the CPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import partial, wraps
from multiprocessing import resource_tracker
from multiprocessing.context import ForkContext
from socket import socket
from typing import Any

import torch
from torch import Tensor
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
        _pack_log_probabilities()
        _registered.add("everywhere")
    if current_platform.is_cpu() and "cpu" not in _registered:
        _ask_for_amx()
        _pack_experts_at_every_update()
        _multiply_with_the_tied_embedding()
        _rotate_every_head()
        _leave_cores_to_others()
        _record_routed_experts()
        if multiprocessing.parent_process() is None:
            _fork_the_core()
        _registered.add("cpu")


def _expect_no_tokenizer() -> None:
    """Report a missing tokenizer by the error of a missing chat template.

    vLLM looks for a chat template at each start. It expects models without one and logs nothing; a missing tokenizer,
    which --tokens-only asks for, it logs with a traceback as if the start had failed.
    """
    from vllm.renderers.base import BaseRenderer  # noqa: PLC0415  # slow to import
    from vllm.renderers.chat_utils import ChatTemplateResolutionError  # noqa: PLC0415

    original = BaseRenderer.get_tokenizer

    @wraps(original)
    def get_tokenizer(self: Any) -> Any:
        if self.tokenizer is None:
            raise ChatTemplateResolutionError("this engine has no tokenizer and takes token ids only")
        return original(self)

    BaseRenderer.get_tokenizer = get_tokenizer


def _keep_replies_in_step() -> None:
    from moejob_rollout.worker_replies import keep_in_step  # noqa: PLC0415  # slow to import

    keep_in_step()


def _pack_log_probabilities() -> None:
    from moejob_rollout.packed_log_probabilities import pack_messages  # noqa: PLC0415  # slow to import

    pack_messages()


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
    def setup_kernel(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, *args, **kwargs)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel  # noqa: SLF001


def _multiply_with_the_tied_embedding() -> None:
    """Let an output layer that is tied to the embedding multiply with the embedding's packed weight.

    vLLM packs that weight for each of the two, and loads files into the embedding, which is packed again. The output
    layer is in no file of such a model: it would multiply with the weights that the engine started with for ever. On
    GPUs nothing is packed, and both read one parameter.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: PLC0415  # slow to import
        UnquantizedEmbeddingMethod,
    )

    original_tie, original_process = (
        UnquantizedEmbeddingMethod.tie_weights,
        UnquantizedEmbeddingMethod.process_weights_after_loading,
    )

    @wraps(original_tie)
    def tie_weights(self: Any, layer: Any, embed_tokens: Any) -> Any:
        tied_layer = original_tie(self, layer, embed_tokens)

        def multiply_with_embedding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            # Looked up at each product: the embedding has another one after each update.
            product: Tensor = embed_tokens.cpu_linear(x, weight, bias)
            return product

        # No attribute that is a module: the embedding would become a part of the output layer.
        tied_layer.multiply_with_embedding = multiply_with_embedding
        return tied_layer

    @wraps(original_process)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if hasattr(layer, "multiply_with_embedding"):
            layer.cpu_linear = layer.multiply_with_embedding
            return
        original_process(self, layer)

    UnquantizedEmbeddingMethod.tie_weights = tie_weights
    UnquantizedEmbeddingMethod.process_weights_after_loading = process_weights_after_loading


def _rotate_every_head() -> None:
    """Give vLLM's rotary kernel for the CPU the heads of a token as one row.

    Queries of latent attention come as [tokens, heads, size]. The kernel takes the distance of two heads for that of
    two tokens, and turns some heads several times and others not at all.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # noqa: PLC0415  # slow to import

    original = RotaryEmbedding.forward_cpu

    @wraps(original)
    def forward_cpu(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        tokens = positions.numel()
        rows = None if key is None else key.reshape(tokens, -1)
        turned_query, turned_key = original(self, positions, query.reshape(tokens, -1), rows)
        return turned_query.view(query.shape), None if key is None else turned_key.view(key.shape)

    RotaryEmbedding.forward_cpu = forward_cpu


def _record_routed_experts() -> None:
    from moejob_rollout.routed_experts import record_on_cpu  # noqa: PLC0415  # slow to import

    record_on_cpu()


def _fork_the_core() -> None:
    """Let a server on the CPU fork its engine core, which then need not import what the server has imported.

    vLLM spawns it there, and the second import is half of the time until an engine is ready. No server computes before
    it forks: a fork would wait for ever for threads that torch starts at its first operation on several cores.
    """
    from vllm.entrypoints.launchers import launcher  # noqa: PLC0415  # slow to import
    from vllm.v1.engine import utils  # noqa: PLC0415  # slow to import

    original = launcher.create_server_socket

    @wraps(original)
    def create_server_socket(*args: Any, **kwargs: Any) -> socket:
        listener: socket = original(*args, **kwargs)
        os.register_at_fork(after_in_child=partial(_part_from_server, listener))
        return listener

    launcher.create_server_socket = create_server_socket
    utils.get_mp_context = _fork_context


def _fork_context() -> ForkContext:
    # The tracker removes the shared memory that a core leaves behind. A tracker of the core would be killed with it.
    resource_tracker.ensure_running()
    return multiprocessing.get_context("fork")


def _part_from_server(listener: socket) -> None:
    """Drop what a forked core has inherited, and a spawned one has not."""
    # A server that stops asks for the command of another process at its port, and ends with 1 if that ends meanwhile.
    # Once a server is killed, its port would be open, and no process would answer.
    listener.close()
    # Each signal writes a byte there: the server's event loop would take the core's signals for its own.
    signal.set_wakeup_fd(-1)
    # The server's handlers, until the core has its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _leave_cores_to_others() -> None:
    """Let a worker that has nothing to do sleep at once.

    vLLM's polls for a second after each batch. On a machine that also trains, the trainer's first operation on all
    cores waits for that second: twice a step, for the probe after a synchronization and for the update.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415  # slow to import

    original = SpinCondition.__init__

    @wraps(original)
    def spin_briefly(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, _BUSY_SECONDS)

    SpinCondition.__init__ = spin_briefly
