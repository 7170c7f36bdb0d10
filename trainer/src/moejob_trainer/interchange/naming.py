"""Megatron's tensors of a model, each with the Hugging Face tensors that it joins, as Megatron-Bridge pairs them.

A Megatron tensor may join several: queries, keys and values by groups of heads, or gate and up one after the other.
gpt-oss publishes the experts of a layer as one tensor, with inputs first, and gate and up in turns. Here such a tensor
is the stack of Megatron's: `mlp.experts.linear_fc1.weight` [experts, 2 f, h] of `gate_up_proj` [experts, h, 2 f].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from moejob_api.models.shape import Experts, ModelShape
from moejob_trainer.conversion.checkpoint import join_names, unusable_checkpoint
from moejob_trainer.conversion.families import TensorTable
from moejob_trainer.interchange.megatron_bridge import BRIDGE, BridgedModel

_STANDALONE_NORM, _FUSED_NORM = ".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight"

_STACKED_MATRICES = 3
_GROUPED_GATED, _GROUPED_DOWN = "GPTOSSMLPGateUpProjMapping", "GPTOSSMLPDownProjMapping"

Join = Callable[[Sequence[Tensor]], Tensor]
Split = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """One tensor of Megatron's: the names it may have, Transformer Engine's first, and the tensors it consists of."""

    names: tuple[str, ...]
    published_names: tuple[str, ...]
    join: Join
    split: Split


def megatron_tensors(model: BridgedModel, table: TensorTable) -> list[MegatronTensor]:
    """Return every tensor of a model; InvalidSpec where Megatron-Bridge has no name for one of Hugging Face's."""
    mappings: dict[tuple[str, ...], list[Any]] = {}
    for mapping in _resolve_mappings(model, table.shape):
        published_names = _names_in_mapping(mapping)
        if all(name in table.by_tensor for name in published_names):
            mappings.setdefault(published_names, []).append(mapping)
    unnamed_tensors = table.by_tensor.keys() - {name for published in mappings for name in published}
    if unnamed_tensors:
        raise unusable_checkpoint(
            f"{BRIDGE} has no name for {len(unnamed_tensors)} tensors of this {table.shape.family} model: "
            f"{join_names(unnamed_tensors)}; "
            "it cannot be converted"
        )
    return [
        _build_tensor(model, table.shape, published, tensor_mappings) for published, tensor_mappings in mappings.items()
    ]


def _resolve_mappings(model: BridgedModel, shape: ModelShape) -> Iterator[Any]:
    experts = max((layer.mlp.count for layer in shape.layers if isinstance(layer.mlp, Experts)), default=0)
    for mapping in model.registry.get_all_mappings():
        if type(mapping).__name__ in (_GROUPED_GATED, _GROUPED_DOWN):
            yield from _grouped_mappings(mapping, len(shape.layers))
            continue
        ranges = (range(len(shape.layers)), range(experts))[: mapping.megatron_param.count("*")]
        for numbers in product(*ranges):
            yield mapping.resolve(tuple(map(str, numbers)))


@dataclass(frozen=True, slots=True)
class _GroupedMapping:
    """The experts of one layer in one tensor, on both sides."""

    megatron_param: str
    hf_param: str
    is_gated: bool


def _grouped_mappings(mapping: Any, layers: int) -> Iterator[_GroupedMapping]:
    name = mapping.megatron_param.removesuffix("*")
    # The same experts once more, as the modules that quantization has.
    if ".local_experts." in name:
        return
    for layer in range(layers):
        yield _GroupedMapping(
            name.replace("*", str(layer), 1),
            mapping.hf_param.replace("*", str(layer), 1),
            is_gated=type(mapping).__name__ == _GROUPED_GATED,
        )


def _names_in_mapping(mapping: Any) -> tuple[str, ...]:
    names = mapping.hf_param
    return (names,) if isinstance(names, str) else tuple(names.values())


def _build_tensor(
    model: BridgedModel, shape: ModelShape, published_names: tuple[str, ...], mappings: Sequence[Any]
) -> MegatronTensor:
    names = sorted((mapping.megatron_param for mapping in mappings), key=lambda name: not _is_fused(name, shape))
    # Megatron's own layers save the norm before experts under the name that it has before a dense MLP.
    names += [name.replace(_STANDALONE_NORM, _FUSED_NORM) for name in names if name.endswith(_STANDALONE_NORM)]
    join, split = _join_and_split(model, mappings[0])
    return MegatronTensor(tuple(dict.fromkeys(names)), published_names, join, split)


def _is_fused(name: str, shape: ModelShape) -> bool:
    """Transformer Engine's projections hold the norm before them, except the norm before experts."""
    if not name.endswith(".layer_norm_weight"):
        return False
    return ".mlp." not in name or not isinstance(shape.layers[int(name.split(".")[2])].mlp, Experts)


def _join_and_split(model: BridgedModel, mapping: Any) -> tuple[Join, Split]:
    if isinstance(mapping, _GroupedMapping):
        return partial(_join_experts, mapping), partial(_split_experts, mapping)
    param_mapping = import_module("megatron.bridge.models.conversion.param_mapping")
    plain = (
        param_mapping.AutoMapping,
        param_mapping.ReplicatedMapping,
        param_mapping.ColumnParallelMapping,
        param_mapping.RowParallelMapping,
    )
    if type(mapping) is param_mapping.QKVMapping:
        return partial(_join_heads, param_mapping, model.provider), partial(_split_heads, param_mapping, model.provider)
    if type(mapping) is param_mapping.GatedMLPMapping:
        return lambda parts: torch.cat([*parts]), lambda tensor: tensor.chunk(2)
    if type(mapping) in plain and not getattr(mapping, "permute_dims", None):
        return _single_part, lambda tensor: (tensor,)
    raise unusable_checkpoint(
        f"{BRIDGE} converts {mapping.megatron_param} by a {type(mapping).__name__}, which moejob does not"
    )


def _join_heads(param_mapping: Any, provider: Any, parts: Sequence[Tensor]) -> Tensor:
    join = param_mapping.merge_qkv_biases if parts[0].ndim == 1 else param_mapping.merge_qkv_weights
    joined_tensor: Tensor = join(provider, *parts)
    return joined_tensor


def _split_heads(param_mapping: Any, provider: Any, tensor: Tensor) -> Sequence[Tensor]:
    split = param_mapping.split_qkv_biases if tensor.ndim == 1 else param_mapping.split_qkv_weights
    parts: Sequence[Tensor] = split(provider, tensor)
    return parts


def _join_experts(mapping: _GroupedMapping, parts: Sequence[Tensor]) -> Tensor:
    """Return [experts, outputs, inputs] or [experts, outputs], gate before up."""
    stack = _single_part(parts)
    stack = stack.transpose(1, 2) if stack.ndim == _STACKED_MATRICES else stack
    return torch.cat([stack[:, 0::2], stack[:, 1::2]], dim=1) if mapping.is_gated else stack


def _split_experts(mapping: _GroupedMapping, tensor: Tensor) -> Sequence[Tensor]:
    stack = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2) if mapping.is_gated else tensor
    return (stack.transpose(1, 2) if stack.ndim == _STACKED_MATRICES else stack,)


def _single_part(parts: Sequence[Tensor]) -> Tensor:
    (part,) = parts
    return part
