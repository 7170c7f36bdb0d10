"""Megatron's GPTModel on a CPU: what its local layers assume about CUDA or Transformer Engine, each with its reason.

Nothing of torch is changed: Transformers' loading breaks silently when its factories are replaced.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch

from moejob_trainer.megatron.cpu import use_cpu

# Put tensors on the current CUDA device, even where they initialize on the CPU.
_MODULES = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.moe.experts",
    "megatron.core.transformer.moe.router",
    "megatron.core.utils",
)


def prepare() -> None:
    """Replace each of them; doing it again changes nothing."""
    use_cpu(_MODULES)
    _random_states()
    _names_of_transformer_engine()
    _copies_to_the_host()
    _windows()


def _random_states() -> None:
    """Dropout forks the random state of a CUDA device, of which there is none. Nothing here drops anything."""
    tracker = import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda _self, *_: nullcontext()


def _names_of_transformer_engine() -> None:
    """Without it these names are None or absent, but they are compared with, or called for, all the same."""
    for place in ("attention", "multi_latent_attention"):
        module = import_module(f"megatron.core.transformer.{place}")
        for name in ("TELinear", "TEColumnParallelLinear"):
            if not isinstance(getattr(module, name, None), type):
                setattr(module, name, type(name, (), {}))
    mixture = import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(mixture, "te_general_gemm"):
        setattr(mixture, "te_general_gemm", None)  # noqa: B010 a name that its types do not have


def _copies_to_the_host() -> None:
    """Counts of tokens are copied on a CUDA stream of their own."""
    for name in ("moe_utils", "token_dispatcher"):
        module = import_module(f"megatron.core.transformer.moe.{name}")
        setattr(module, "maybe_move_tensor_to_cpu", _on_host)  # noqa: B010 nor this one


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
    if not torch.is_tensor(tensor):
        return tensor
    return tensor.detach().numpy() if as_numpy else tensor.detach()


def _windows() -> None:
    """Masks of sliding windows are made on a CUDA device."""
    module = import_module("megatron.core.fusions.fused_softmax")
    setattr(module, "get_sliding_window_causal_mask", _window_mask)  # noqa: B010 its types know no other function


def _window_mask(queries: int, keys: int, window: tuple[int, int]) -> torch.Tensor:
    """[queries, keys], True where a query does not see a key."""
    seen = torch.ones(queries, keys, dtype=torch.bool)
    return ~seen.triu(keys - queries - window[0]).tril(keys - queries + window[1])
