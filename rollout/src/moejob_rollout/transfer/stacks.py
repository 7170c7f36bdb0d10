"""Experts' tensors that come in stacks: vLLM's loader takes as long for each small tensor as for all of a layer's.

A stack has a name as `model.layers.3.mlp.experts.{8:16/64}.up_proj.weight`: the tensors of experts 8 to 15 of 64.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

_NAME = re.compile(r"(?P<layer>.+)\.\{(?P<start>\d+):(?P<stop>\d+)/(?P<experts>\d+)\}\.(?P<projection>\w+)\.weight")


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The name of a stack, taken apart."""

    layer: str
    projection: str
    start: int
    stop: int
    experts: int

    def split_tensors(self, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensor of each expert under its own name."""
        for expert, tensor in enumerate(stack, self.start):
            yield f"{self.layer}.{expert}.{self.projection}.weight", tensor


def parse_stack_name(name: str) -> ExpertStack | None:
    """Return the stack that a name belongs to; None for the name of a single tensor."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    start, stop, experts = (int(match[part]) for part in ("start", "stop", "experts"))
    return ExpertStack(match["layer"], match["projection"], start, stop, experts)


class StackBuilder:
    """Stacks of all experts of a layer, put together from their parts."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], tuple[Tensor, int]] = {}

    def add_part(
        self, stack: ExpertStack, part: Tensor, dtype: torch.dtype, shape: list[int]
    ) -> tuple[ExpertStack, Tensor] | None:
        """Keep a part, given as bytes; return the whole when it was the last one."""
        size = part.numel() // (stack.stop - stack.start)
        place = stack.layer, stack.projection
        content, missing_experts = self._parts.pop(place, (None, stack.experts))
        if content is None:
            content = torch.empty(stack.experts * size, dtype=torch.uint8, device=part.device)
        content[stack.start * size : stack.stop * size] = part
        missing_experts -= stack.stop - stack.start
        if missing_experts > 0:
            self._parts[place] = content, missing_experts
            return None
        whole_stack = ExpertStack(stack.layer, stack.projection, 0, stack.experts, stack.experts)
        return whole_stack, content.view(dtype).reshape([stack.experts, *shape[1:]])

    def clear(self) -> None:
        """Forget the parts of an update that broke off."""
        self._parts.clear()


def find_expert_layers(model: nn.Module) -> Mapping[str, RoutedExperts]:
    """Return the layers that take stacks, by their names in files."""
    layers = {module.layer_name: module for module in model.modules() if isinstance(module, RoutedExperts)}
    return {name: layer for name, layer in layers.items() if _can_take_stacks(layer)}


def load_stack(layer: Any, stack: ExpertStack, tensor: Tensor) -> None:
    """Load one projection of all experts of a layer."""
    shards = {layer.ckpt_gate_proj_name: "w1", layer.ckpt_down_proj_name: "w2", layer.ckpt_up_proj_name: "w3"}
    shard = shards[stack.projection]
    name = "w2_weight" if shard == "w2" else "w13_weight"
    parameter = getattr(layer, name)
    # A tensor of three axes is that of all experts, whichever expert is named.
    is_loaded = parameter.weight_loader(
        param=parameter,
        loaded_weight=tensor,
        weight_name=f"{stack.layer}.{name}",
        shard_id=shard,
        expert_id=0,
        return_success=True,
    )
    if not is_loaded:
        raise RuntimeError(f"vLLM has not taken {stack.projection} of the experts of {stack.layer}")


def _can_take_stacks(layer: Any) -> bool:
    """Return whether all experts lie on this worker as they are published, none twice and none elsewhere."""
    return (
        type(layer.quant_method) is UnquantizedFusedMoEMethod
        and layer.local_num_experts == layer.moe_config.num_logical_experts == layer.moe_config.num_experts
    )
