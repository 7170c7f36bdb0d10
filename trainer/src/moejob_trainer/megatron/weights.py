"""Weights of this rank's stages: their places in the whole model, and their values before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moejob_trainer.conversion.families import Table
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.loading import Source, import_weights
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.megatron.shares import local_shards, sharded_as, whole
from moejob_trainer.model.adapters import Adapter, fresh, is_adapter
from moejob_trainer.model.parameters import Coordinates, Parameter, local_shape, local_slices
from moejob_trainer.model.stage import Stage

_EMBEDDING, _OUTPUT = "embedding.weight", "output.weight"
_HOST = torch.device("cpu")


def model_groups(groups: Groups, control: ProcessGroup | None = None) -> ModelGroups:
    """Return the groups that divide parameters, for conversion; `control` carries its messages."""
    return ModelGroups(control, groups.tensor.handle, groups.expert.handle, groups.expert_tensor.handle)


def coordinates(groups: Groups) -> Coordinates:
    """Return the coordinates of this rank in the groups that divide parameters."""
    return model_groups(groups).coordinates


def named_weights(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Return all parameters and buffers of this rank, under their names in the whole model."""
    named = {}
    for stage in stages:
        tied = stage.model.shape.tied_embeddings
        # keep_vars returns the parameters themselves, which carry their division over replicas.
        for name, tensor in stage.state_dict(keep_vars=True).items():
            # The last stage of a tied model holds a copy of the first one's embedding.
            named[_EMBEDDING if tied and name == _OUTPUT else name] = tensor
    return named


def load_pretrained(stages: Sequence[Stage], source: Source, groups: Groups) -> None:
    """Read this rank's part of a published checkpoint; adapters stay as they are."""
    read_weights(base_weights(stages), source, groups)


def forget_weights(stages: Sequence[Stage]) -> None:
    """Set all weights to nan: if a checkpoint leaves one out, the first step fails."""
    with torch.no_grad():
        for tensor in named_weights(stages).values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


def read_weights(weights: Mapping[str, Tensor], source: Source, groups: Groups) -> None:
    """Read this rank's part of some tensors, whole ones and shares."""
    here = coordinates(groups)
    import_weights({name: tensor for name, tensor in weights.items() if sharded_as(tensor) is None}, source, here)
    for name, tensor in weights.items():
        sharded = sharded_as(tensor)
        if sharded is not None:
            parameter = _declared(name, sharded.shape, source.table, here)
            origin = [part.start for part in local_slices(parameter, here)]
            for shard, part in local_shards(tensor):
                source.fill(part, parameter, shard.moved(origin).slices)
                # A float32 share starts from the rounded weight, like the whole weight of other layouts.
                part.copy_(part.to(sharded.dtype))


def _declared(name: str, shape: tuple[int, ...], table: Table, here: Coordinates) -> Parameter:
    parameter = table.by_name.get(name)
    if parameter is None or local_shape(parameter, here) != shape:
        raise ValueError(f"{name} of {shape} is no parameter of this {table.shape.family} model at {here}")
    return parameter


def base_weights(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """The weights without their adapters."""
    return {name: tensor for name, tensor in named_weights(stages).items() if not is_adapter(name)}


def adapter_weights(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """The adapters alone."""
    return {name: tensor for name, tensor in named_weights(stages).items() if is_adapter(name)}


def whole_weights(stages: Sequence[Stage]) -> Mapping[str, Tensor]:
    """Return the weights as they compute. All replicas read them in the same order: each read is a gather."""
    return _Whole(base_weights(stages))


def whole_adapters(stages: Sequence[Stage]) -> Mapping[str, Tensor]:
    """Return the adapters alone, in the same way."""
    return _Whole(adapter_weights(stages))


def merged_weights(stages: Sequence[Stage]) -> Mapping[str, Tensor]:
    """Return the weights with their adapters added, in the same way."""
    base = whole_weights(stages)
    products = {name: adapter for stage in stages for name, adapter in _adapters(stage)}
    return _Merged(base, products) if products else base


class _Whole(Mapping[str, Tensor]):
    """Gathers a weight when it is read: memory has room for one whole weight at a time."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        self._held = held

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._held[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class _Merged(Mapping[str, Tensor]):
    """Adds an adapter when its weight is read: memory has room for one sum at a time."""

    def __init__(self, base: Mapping[str, Tensor], products: Mapping[str, Adapter]) -> None:
        self._base, self._adapters = base, products
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._adapters:
            return self._base[name]
        if self._last is None or self._last[0] != name:
            weight = self._base[name]
            product = self._adapters[name].product(whole)
            self._last = name, (weight.float() + product.float()).to(weight.dtype)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def _adapters(stage: Stage) -> Iterator[tuple[str, Adapter]]:
    for owner, module in stage.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Adapter):
                last = "weight" if name == "adapter" else name.removesuffix("_adapter")
                yield f"{owner}.{last}", value


def start_adapters(stages: Sequence[Stage], declared: Sequence[Parameter], groups: Groups, seed: int) -> None:
    """Fresh adapters, which add nothing yet; every layout starts with the same ones."""
    here, named = coordinates(groups), adapter_weights(stages)
    with torch.no_grad():
        for parameter in declared:
            if parameter.name in named:
                _begin(named[parameter.name], fresh(parameter, local_slices(parameter, here), seed))


def initialise(
    stages: Sequence[Stage],
    parameters: Sequence[Parameter],
    groups: Groups,
    seed: int,
    device: torch.device = _HOST,
) -> None:
    """Fresh weights for a model of which only the config is published; every layout starts with the same ones.

    Each tensor is made whole and cut. The host takes seconds for each hundred million numbers, so this is for small
    models: the one that comes with moejob, and those of tests. A GPU is faster and draws other numbers.
    """
    here = coordinates(groups)
    named = named_weights(stages)
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            if parameter.name in named:
                everything = _fresh(parameter, seed + number, device)
                _begin(named[parameter.name], everything[local_slices(parameter, here)])


def _begin(tensor: Tensor, everything: Tensor) -> None:
    """Set a rank's part of a tensor to values rounded to the type that computes.

    Else the first steps would depend on the layout: a float32 share would keep bits that a bfloat16 weight lacks.
    """
    sharded = sharded_as(tensor)
    rounded = everything if sharded is None else everything.to(sharded.dtype)
    for shard, part in local_shards(tensor):
        part.copy_(rounded[shard.slices])


def _fresh(parameter: Parameter, seed: int, device: torch.device) -> Tensor:
    owner, _, last = parameter.name.rpartition(".")
    if owner.endswith("norm"):
        return torch.ones(parameter.shape, device=device)
    if last == "bias" or last.endswith("_bias"):
        return torch.zeros(parameter.shape, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator, device=device) * 0.02
