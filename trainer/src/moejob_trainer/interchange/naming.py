"""Megatron's tensors of a model, each with the Hugging Face tensors that it joins, as Megatron-Bridge pairs them.

A Megatron tensor may join several: queries, keys and values by groups of heads, or gate and up one after the other.
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
from moejob_trainer.conversion.checkpoint import listed, unusable
from moejob_trainer.conversion.families import Table
from moejob_trainer.interchange.megatron_bridge import BRIDGE, BridgedModel

_STANDALONE_NORM, _FUSED_NORM = ".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight"

Join = Callable[[Sequence[Tensor]], Tensor]
Split = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """One tensor of Megatron's: the names it may have, Transformer Engine's first, and the tensors it consists of."""

    names: tuple[str, ...]
    published: tuple[str, ...]
    join: Join
    split: Split


def megatron_tensors(model: BridgedModel, table: Table) -> list[MegatronTensor]:
    """Return every tensor of a model; InvalidSpec where Megatron-Bridge has no name for one of Hugging Face's."""
    mappings: dict[tuple[str, ...], list[Any]] = {}
    for mapping in _resolved(model, table.shape):
        published = _published(mapping)
        if all(name in table.by_tensor for name in published):
            mappings.setdefault(published, []).append(mapping)
    unnamed = table.by_tensor.keys() - {name for published in mappings for name in published}
    if unnamed:
        raise unusable(
            f"{BRIDGE} has no name for {len(unnamed)} tensors of this {table.shape.family} model: {listed(unnamed)}; "
            "it cannot be converted"
        )
    return [_tensor(model, table.shape, published, found) for published, found in mappings.items()]


def _resolved(model: BridgedModel, shape: ModelShape) -> Iterator[Any]:
    experts = max((layer.mlp.count for layer in shape.layers if isinstance(layer.mlp, Experts)), default=0)
    for mapping in model.registry.get_all_mappings():
        ranges = (range(len(shape.layers)), range(experts))[: mapping.megatron_param.count("*")]
        for numbers in product(*ranges):
            yield mapping.resolve(tuple(map(str, numbers)))


def _published(mapping: Any) -> tuple[str, ...]:
    names = mapping.hf_param
    return (names,) if isinstance(names, str) else tuple(names.values())


def _tensor(
    model: BridgedModel, shape: ModelShape, published: tuple[str, ...], mappings: Sequence[Any]
) -> MegatronTensor:
    names = sorted((mapping.megatron_param for mapping in mappings), key=lambda name: not _is_fused(name, shape))
    # Megatron's own layers save the norm before experts under the name that it has before a dense MLP.
    names += [name.replace(_STANDALONE_NORM, _FUSED_NORM) for name in names if name.endswith(_STANDALONE_NORM)]
    join, split = _conversion(model, mappings[0])
    return MegatronTensor(tuple(dict.fromkeys(names)), published, join, split)


def _is_fused(name: str, shape: ModelShape) -> bool:
    """Transformer Engine's projections hold the norm before them, except the norm before experts."""
    if not name.endswith(".layer_norm_weight"):
        return False
    return ".mlp." not in name or not isinstance(shape.layers[int(name.split(".")[2])].mlp, Experts)


def _conversion(model: BridgedModel, mapping: Any) -> tuple[Join, Split]:
    known = import_module("megatron.bridge.models.conversion.param_mapping")
    plain = (known.AutoMapping, known.ReplicatedMapping, known.ColumnParallelMapping, known.RowParallelMapping)
    if type(mapping) is known.QKVMapping:
        return partial(_joined_heads, known, model.provider), partial(_split_heads, known, model.provider)
    if type(mapping) is known.GatedMLPMapping:
        return lambda parts: torch.cat([*parts]), lambda tensor: tensor.chunk(2)
    if type(mapping) in plain and not getattr(mapping, "permute_dims", None):
        return _only, lambda tensor: (tensor,)
    raise unusable(f"{BRIDGE} converts {mapping.megatron_param} by a {type(mapping).__name__}, which moejob does not")


def _joined_heads(known: Any, provider: Any, parts: Sequence[Tensor]) -> Tensor:
    join = known.merge_qkv_biases if parts[0].ndim == 1 else known.merge_qkv_weights
    joined: Tensor = join(provider, *parts)
    return joined


def _split_heads(known: Any, provider: Any, tensor: Tensor) -> Sequence[Tensor]:
    split = known.split_qkv_biases if tensor.ndim == 1 else known.split_qkv_weights
    parts: Sequence[Tensor] = split(provider, tensor)
    return parts


def _only(parts: Sequence[Tensor]) -> Tensor:
    (part,) = parts
    return part
