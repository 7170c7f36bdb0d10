"""Weights of this rank's stages: where they lie in the whole model, and how they are set before training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moejob_trainer.conversion.imports import Source, import_weights
from moejob_trainer.groups import Groups
from moejob_trainer.model.parameters import Coordinates, Parameter, local_slices
from moejob_trainer.model.stage import Stage

_EMBEDDING, _OUTPUT = "embedding.weight", "output.weight"


def coordinates(groups: Groups) -> Coordinates:
    """Where this rank stands in the groups that divide parameters."""
    return Coordinates(
        tensor_rank=groups.tensor.rank,
        tensor_size=groups.tensor.size,
        expert_rank=groups.expert.rank,
        expert_size=groups.expert.size,
        expert_tensor_rank=groups.expert_tensor.rank,
        expert_tensor_size=groups.expert_tensor.size,
    )


def named_weights(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Everything of this rank that a model is made of, under its name in the whole model."""
    named = {}
    for stage in stages:
        tied = stage.model.shape.tied_embeddings
        for name, tensor in stage.state_dict().items():
            # The last stage of a tied model holds a copy of the first one's embedding.
            named[_EMBEDDING if tied and name == _OUTPUT else name] = tensor
    return named


def load_published(stages: Sequence[Stage], source: Source, groups: Groups) -> None:
    """Reads this rank's part of a published checkpoint."""
    import_weights(named_weights(stages), source, coordinates(groups))


def initialise(stages: Sequence[Stage], parameters: Sequence[Parameter], groups: Groups, seed: int) -> None:
    """Fresh weights for a model of which only the config is published; every layout starts with the same ones.

    Each tensor is made whole and cut, so this is for small models: the one that comes with moejob, and those of tests.
    """
    here = coordinates(groups)
    named = named_weights(stages)
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            if parameter.name in named:
                whole = _fresh(parameter, seed + number)
                named[parameter.name].copy_(whole[local_slices(parameter, here)])


def _fresh(parameter: Parameter, seed: int) -> Tensor:
    owner, _, last = parameter.name.rpartition(".")
    if owner.endswith("norm"):
        return torch.ones(parameter.shape)
    if last == "bias" or last.endswith("_bias"):
        return torch.zeros(parameter.shape)
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.02
