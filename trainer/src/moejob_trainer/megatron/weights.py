"""Weights of this rank's stages: their places in the whole model, and their values before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moejob_trainer.conversion.families import TensorTable
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.loading import PublishedCheckpoint, import_weights
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.megatron.shares import find_sharding, gather_whole_tensor, local_shards
from moejob_trainer.model.adapters import Adapter, initialise_factor, is_adapter
from moejob_trainer.model.parameters import (
    Coordinates,
    Parameter,
    Slices,
    is_zero_centred,
    local_shape,
    local_slices,
)
from moejob_trainer.model.stage import ModelStage, WeightPart
from moejob_trainer.runtime.heartbeats import ShareCounter, ShareReport, ignore_share

_HOST = torch.device("cpu")


def model_groups(groups: Groups, control: ProcessGroup | None = None) -> ModelGroups:
    """Return the groups that divide parameters, for conversion; `control` carries its messages."""
    return ModelGroups(control, groups.tensor.handle, groups.expert.handle, groups.expert_tensor.handle)


def rank_coordinates(groups: Groups) -> Coordinates:
    """Return the coordinates of this rank in the groups that divide parameters."""
    return model_groups(groups).coordinates


def named_weights(stages: Sequence[ModelStage]) -> dict[str, Tensor]:
    """Return all parameters and buffers of this rank, under their names in the whole model."""
    return {name: _join_parts(parts) for name, parts in _parts_by_name(stages).items()}


def part_slices(part: WeightPart, parameter: Parameter, place: Coordinates) -> Slices:
    """Return the region of a parameter of the whole model that a part of a rank's tensor holds."""
    first, *others = local_slices(parameter, place)
    if part.rows is not None:
        first = slice(first.start + part.rows.start, first.start + part.rows.stop)
    return (first, *others)


def _parts_by_name(stages: Sequence[ModelStage]) -> dict[str, list[tuple[WeightPart, Tensor]]]:
    """Return the parts of each tensor of the whole model, first rows first."""
    parts: dict[str, list[tuple[WeightPart, Tensor]]] = {}
    for stage in stages:
        for part, tensor in stage.weight_parts():
            # The last stage of a tied model holds a copy of the first one's embedding.
            if part.rows is None:
                parts[part.name] = [(part, tensor)]
            else:
                parts.setdefault(part.name, []).append((part, tensor))
    return parts


def _join_parts(parts: Sequence[tuple[WeightPart, Tensor]]) -> Tensor:
    return parts[0][1] if len(parts) == 1 else torch.cat([tensor for _, tensor in parts])


def load_pretrained(
    stages: Sequence[ModelStage], source: PublishedCheckpoint, groups: Groups, report_share: ShareReport = ignore_share
) -> None:
    """Read this rank's part of a published checkpoint; adapters stay as they are."""
    of_base = {name: parts for name, parts in _parts_by_name(stages).items() if not is_adapter(name)}
    pairs = [pair for parts in of_base.values() for pair in parts]
    counter = ShareCounter(sum(tensor.numel() for _, tensor in pairs), report_share)
    read_weights({part.name: tensor for part, tensor in pairs if part.rows is None}, source, groups, counter.add)
    place = rank_coordinates(groups)
    for part, tensor in (pair for pair in pairs if pair[0].rows is not None):
        parameter = source.table.by_name[part.name]
        source.fill_tensor(tensor, parameter, part_slices(part, parameter, place))
        counter.add(tensor.numel())


def forget_weights(stages: Sequence[ModelStage]) -> None:
    """Set all weights to nan: if a checkpoint leaves one out, the first step fails."""
    with torch.no_grad():
        for _, tensor in (pair for stage in stages for pair in stage.weight_parts()):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


def read_weights(
    weights: Mapping[str, Tensor],
    source: PublishedCheckpoint,
    groups: Groups,
    count_elements: Callable[[int], None] = lambda _: None,
) -> None:
    """Read this rank's part of some tensors, whole ones and shares; count their elements."""
    place = rank_coordinates(groups)
    unsharded = {name: tensor for name, tensor in weights.items() if find_sharding(tensor) is None}
    import_weights(unsharded, source, place, count_elements)
    for name, tensor in weights.items():
        sharded = find_sharding(tensor)
        if sharded is not None:
            parameter = _find_parameter(name, sharded.shape, source.table, place)
            origin = [part.start for part in local_slices(parameter, place)]
            for shard, part in local_shards(tensor):
                source.fill_tensor(part, parameter, shard.shift_by(origin).index_slices)
                # A float32 share starts from the rounded weight, like the whole weight of other layouts.
                part.copy_(part.to(sharded.dtype))
            count_elements(tensor.numel())


def _find_parameter(name: str, shape: tuple[int, ...], table: TensorTable, place: Coordinates) -> Parameter:
    parameter = table.by_name.get(name)
    if parameter is None or local_shape(parameter, place) != shape:
        raise ValueError(f"{name} of {shape} is no parameter of this {table.shape.family} model at {place}")
    return parameter


def adapter_weights(stages: Sequence[ModelStage]) -> dict[str, Tensor]:
    """The adapters alone."""
    return {name: tensor for name, tensor in named_weights(stages).items() if is_adapter(name)}


def whole_weights(stages: Sequence[ModelStage]) -> Mapping[str, Tensor]:
    """Return the weights as they compute. All replicas read them in the same order: each read is a gather."""
    return _WholeWeights({name: parts for name, parts in _parts_by_name(stages).items() if not is_adapter(name)})


def whole_adapters(stages: Sequence[ModelStage]) -> Mapping[str, Tensor]:
    """Return the adapters alone, in the same way."""
    return _WholeWeights({name: parts for name, parts in _parts_by_name(stages).items() if is_adapter(name)})


def merged_weights(stages: Sequence[ModelStage]) -> Mapping[str, Tensor]:
    """Return the weights with their adapters added, in the same way."""
    base = whole_weights(stages)
    products = {name: adapter for stage in stages for name, adapter in _stage_adapters(stage)}
    return _MergedWeights(base, products) if products else base


class _WholeWeights(Mapping[str, Tensor]):
    """Gathers a weight when it is read: memory has room for one whole weight at a time."""

    def __init__(self, local_parts: Mapping[str, Sequence[tuple[WeightPart, Tensor]]]) -> None:
        self._held = local_parts

    def __getitem__(self, name: str) -> Tensor:
        return gather_whole_tensor(_join_parts(self._held[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class _MergedWeights(Mapping[str, Tensor]):
    """Adds an adapter when its weight is read: memory has room for one sum at a time."""

    def __init__(self, base: Mapping[str, Tensor], products: Mapping[str, Adapter]) -> None:
        self._base, self._adapters = base, products
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._adapters:
            return self._base[name]
        if self._last is None or self._last[0] != name:
            weight = self._base[name]
            product = self._adapters[name].delta_weight(gather_whole_tensor)
            self._last = name, (weight.float() + product.float()).to(weight.dtype)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def _stage_adapters(stage: ModelStage) -> Iterator[tuple[str, Adapter]]:
    for owner, module in stage.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Adapter):
                last = "weight" if name == "adapter" else name.removesuffix("_adapter")
                yield f"{owner}.{last}", value


def initialise_adapters(stages: Sequence[ModelStage], declared: Sequence[Parameter], groups: Groups, seed: int) -> None:
    """Fresh adapters, which add nothing yet; every layout starts with the same ones."""
    place, named = rank_coordinates(groups), adapter_weights(stages)
    with torch.no_grad():
        for parameter in declared:
            if parameter.name in named:
                _set_local_part(
                    named[parameter.name], initialise_factor(parameter, local_slices(parameter, place), seed)
                )


def initialise_weights(
    stages: Sequence[ModelStage],
    parameters: Sequence[Parameter],
    groups: Groups,
    seed: int,
    device: torch.device = _HOST,
) -> None:
    """Fresh weights for a model with a published config only; every layout starts with the same weights.

    Each tensor is made whole and cut. The host takes seconds for each hundred million numbers, so this is for small
    models: the one that comes with moejob, and those of tests. A GPU is faster and draws other numbers.
    """
    place = rank_coordinates(groups)
    named = _parts_by_name(stages)
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            if parameter.name in named:
                values = _initial_values(parameter, seed + number, device)
                if stages[0].model.zero_centred_norms and is_zero_centred(parameter.name):
                    values.zero_()
                for part, tensor in named[parameter.name]:
                    _set_local_part(tensor, values[part_slices(part, parameter, place)])


def _set_local_part(tensor: Tensor, values: Tensor) -> None:
    """Set a rank's part of a tensor to values rounded to the type that computes.

    Else the first steps would depend on the layout: a float32 share would keep bits that a bfloat16 weight lacks.
    """
    sharded = find_sharding(tensor)
    rounded = values if sharded is None else values.to(sharded.dtype)
    for shard, part in local_shards(tensor):
        part.copy_(rounded[shard.index_slices])


def _initial_values(parameter: Parameter, seed: int, device: torch.device) -> Tensor:
    owner, _, last = parameter.name.rpartition(".")
    if owner.endswith("norm"):
        return torch.ones(parameter.shape, device=device)
    if last == "decay_bias":
        return torch.ones(parameter.shape, device=device)
    if last == "bias" or last.endswith("_bias"):
        return torch.zeros(parameter.shape, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    if last == "decay_log":
        return torch.empty(parameter.shape, device=device).uniform_(0.01, 16, generator=generator).log()
    return torch.randn(parameter.shape, generator=generator, device=device) * 0.02
