"""Puts adapters beside the frozen matrices of a stage; knows which ranks see only a part of their gradients."""

from __future__ import annotations

from torch import nn

from moejob_api.job.training import Lora
from moejob_api.layout.ranks import ParallelGroup
from moejob_trainer.model.adapters import AdaptedMatrix, Adapter, AdapterFactor, DropoutMask, adapter_names, find_matrix
from moejob_trainer.model.linear import is_expert, is_partial, is_tensor_replica, mark_expert, mark_partial
from moejob_trainer.model.parameters import Parameter


def add_adapters(stage: nn.Module, declared: dict[str, Parameter], lora: Lora, seed: int) -> None:
    """Freeze everything that a stage holds and give its matrices adapters; their values are not set."""
    stage.requires_grad_(requires_grad=False)
    for name, weight in [*stage.named_parameters()]:
        matrix = find_matrix(name, lora)
        if matrix is None:
            continue
        owner = stage.get_submodule(name.rpartition(".")[0])
        names = (adapter.rpartition(".")[2] for adapter in adapter_names(name))
        a, b = (
            _register_factor(owner, own_name, parameter)
            for own_name, parameter in zip(names, _make_factors(weight, declared[name], matrix, lora.rank), strict=True)
        )
        place = "adapter" if name.endswith(".weight") else f"{name.rpartition('.')[2]}_adapter"
        setattr(owner, place, Adapter(a, b, matrix, lora.alpha / lora.rank, DropoutMask(name, seed, lora.dropout)))


def _register_factor(owner: nn.Module, name: str, parameter: nn.Parameter) -> AdapterFactor:
    owner.register_parameter(name, parameter)
    return AdapterFactor(owner, name, parameter.shape)


def _make_factors(
    weight: nn.Parameter, declared: Parameter, matrix: AdaptedMatrix, rank: int
) -> tuple[nn.Parameter, ...]:
    shape, first_input = weight.shape, weight.dim() - matrix.inputs
    a = nn.Parameter(weight.new_empty([*(shape[axis] for axis in matrix.stack), rank, *shape[first_input:]]))
    b = nn.Parameter(weight.new_empty([*shape[:first_input], rank]))
    if is_tensor_replica(weight):
        mark_partial(a, is_partial=is_partial(weight))
        mark_partial(b, is_partial=is_partial(weight))
    else:
        # The one that is whole everywhere meets only this rank's share of the other.
        divided_axis = next(axis for axis, group in declared.divided if group is not ParallelGroup.EXPERT)
        mark_partial(a if divided_axis < first_input else b)
    if is_expert(weight):
        mark_expert(a)
        mark_expert(b)
    return a, b
