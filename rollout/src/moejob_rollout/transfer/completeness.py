"""Completeness of an update: the tensors that it has not loaded, as vLLM counts them while it loads layer by layer.

vLLM lays out an incomplete layer all the same, with undefined memory or the weights of before, and says nothing. It
counts elements, so the check depends on no type and on no value. A count can only be trusted where no tensor comes
twice, which is why names are counted, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, get_numel_loaded
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

# The only tensor of files that vLLM loads without counting.
_UNCOUNTED = "e_score_correction_bias"
# Some models have no mapping of their own for linear layers that all models pack alike.
_PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
# The name of the loader that vLLM puts around each parameter's own while an update is loaded.
_WRAPPER = "online_process_loader"
_QKV_SHARDS = ("q", "k", "v")
# A part of a parameter: the expert, and which of its matrices, or of the members of a packed linear layer. None fills
# all of a parameter.
Shard = tuple[int, int | str | None]


@dataclass
class LoadedNames:
    """The names of an update: `aliases` has the groups of names that one parameter has, in the order of the model."""

    aliases: Collection[Sequence[str]] = ()
    repeated: list[str] = field(default_factory=list)
    _sent: set[str] = field(default_factory=set)
    # None for a model whose loader does not say what it has loaded.
    _loaded: set[str] | None = field(default_factory=set)

    def add_sent(self, names: Iterable[str]) -> None:
        """Add tensors as the trainer names them."""
        for name in names:
            if name in self._sent:
                self.repeated.append(name)
            self._sent.add(name)

    def add_loaded(self, names: Iterable[str] | None) -> None:
        """Add parameters as the loader of the model names them."""
        self._loaded = None if names is None or self._loaded is None else self._loaded | set(names)

    def is_loaded(self, parameter: str) -> bool:
        """Return whether the loader has named a parameter, or names none at all."""
        return self._loaded is None or not self._loaded.isdisjoint(self.names_of(parameter))

    def names_of(self, parameter: str) -> Sequence[str]:
        """Return all names of a parameter."""
        return next((names for names in self.aliases if parameter in names), [parameter])


def find_aliases(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several: it is tied, or its layer has several places."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


@torch.no_grad()
def find_missing_tensors(model: nn.Module, names: LoadedNames) -> list[str]:
    """Return the tensors that a model lacks between the start and the end of an update, as files name them."""
    missing: dict[str, list[str]] = {}
    # A layer that has several places is there once.
    looked_at: set[str] = set()
    packed = {**_PACKED, **getattr(model, "packed_modules_mapping", {})}
    for layer_name, layer in model.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            tensors = _missing_tensors(_LayerParameter(layer_name, layer, name, parameter), names, packed)
            looked_at.add(f"{layer_name}.{name}")
            if tensors:
                missing[f"{layer_name}.{name}"] = tensors
    return [
        tensor
        for name, tensors in missing.items()
        if _lacks_all([other for other in names.names_of(name) if other in looked_at], name, missing)
        for tensor in tensors
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _LayerParameter:
    """One parameter of a layer, by the name that it has there."""

    layer_name: str
    layer: nn.Module
    name: str
    tensor: Tensor

    @property
    def full_name(self) -> str:
        return f"{self.layer_name}.{self.name}"

    @property
    def file_elements(self) -> int:
        """The elements that files have for it: padding of the vocabulary is in none."""
        if not isinstance(self.layer, VocabParallelEmbedding):
            return int(get_tensor_load_numel(self.tensor))
        indices = self.layer.shard_indices
        rows = int(indices.org_vocab_end_index) - int(indices.org_vocab_start_index)
        return rows * (self.tensor.numel() // self.tensor.shape[0])

    def loader_calls(self) -> list[BoundArguments]:
        """Return the calls of its loader."""
        return [arguments for name, arguments in get_layerwise_info(self.layer).loaded_weights if name == self.name]

    def loaded_elements(self) -> int:
        """Count as vLLM does for the whole layer: on the meta device, where a copy costs nothing."""
        loads = self.loader_calls()
        if not loads:
            return 0
        loader: Any = self.tensor.weight_loader  # type: ignore[attr-defined]  # vLLM gives each parameter one
        # vLLM's own wrapper alone: a loader of a model may wrap another one, whose work is a part of its own.
        while loader.__name__ == _WRAPPER:
            loader = loader.__wrapped__
        return sum(get_numel_loaded(loader, arguments)[0] for arguments in loads)


def _missing_tensors(parameter: _LayerParameter, names: LoadedNames, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the tensors that a parameter lacks; its own name where files name it so, or where it lacks all."""
    if parameter.name == _UNCOUNTED:
        return [] if names.is_loaded(parameter.full_name) else [parameter.full_name]
    # A layer that has all of its elements has been laid out at once. Scales of attention are in no file of ours.
    is_laid_out = not get_layerwise_info(parameter.layer).can_load()
    if is_laid_out or parameter.name in SKIP_LOAD_TENSORS or is_deferred_attention_layer(parameter.layer):
        return []
    if parameter.loaded_elements() >= parameter.file_elements:
        return []
    loaded = {
        shard
        for arguments in parameter.loader_calls()
        for shard in _loaded_shards(parameter.layer, arguments.arguments)
    }
    lacking = [name for shard, name in _tensors_by_shard(parameter, packed) if shard not in loaded]
    return lacking if lacking and loaded else [parameter.full_name]


def _tensors_by_shard(parameter: _LayerParameter, packed: Mapping[str, Sequence[str]]) -> Iterator[tuple[Shard, str]]:
    """Yield the parts of a parameter that files have as tensors, each with its name there."""
    layer = parameter.layer
    if isinstance(layer, RoutedExperts) and parameter.name in {"w13_weight", "w2_weight"}:
        up = {"w1": layer.ckpt_gate_proj_name, "w3": layer.ckpt_up_proj_name}
        shards = {"w2": layer.ckpt_down_proj_name} if parameter.name == "w2_weight" else up
        for expert in range(layer.moe_config.num_logical_experts):
            for shard, projection in shards.items():
                yield (expert, shard), f"{layer.layer_name}.{expert}.{projection}.weight"
        return
    parent, _, module = parameter.layer_name.rpartition(".")
    for number, member in enumerate(packed.get(module, ())):
        yield (0, number), f"{parent}.{member}.{parameter.name}"


def _loaded_shards(layer: nn.Module, arguments: Mapping[str, Any]) -> Iterator[Shard]:
    """Yield the parts of a parameter that one call of its loader fills."""
    if "expert_id" in arguments and isinstance(layer, RoutedExperts):
        # A tensor of three axes is that of all experts, whichever expert is named.
        is_stack = arguments["loaded_weight"].dim() == 3
        experts = range(layer.moe_config.num_logical_experts) if is_stack else [arguments["expert_id"]]
        yield from ((expert, arguments["shard_id"]) for expert in experts)
        return
    shard = arguments.get("loaded_shard_id")
    for each in shard if isinstance(shard, tuple) else [shard]:
        yield 0, _QKV_SHARDS.index(each) if each in _QKV_SHARDS else each


def _lacks_all(tied: Sequence[str], name: str, missing: Collection[str]) -> bool:
    """Return whether a tied parameter was loaded by no name; its first name is the one to report. Pure."""
    return name == tied[0] and all(other in missing for other in tied)
