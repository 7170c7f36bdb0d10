"""Matrices that tensor ranks divide, and the collectives around a pair of them: before the first, behind the second.

Between `gather_input` (or `multiply_columns`) and `reduce_output` every rank holds all rows of its own heads or
features; outside, under sequence parallelism, it holds its own rows of all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moejob_trainer.distributed.collectives import all_gather, all_reduce, copy_to_group, reduce_scatter
from moejob_trainer.distributed.groups import Group
from moejob_trainer.layers.all_gather_linear import gathered_products
from moejob_trainer.layers.float8 import Float8Weight
from moejob_trainer.layers.gradient_sums import find_gradient_sum
from moejob_trainer.layers.summed_linear import summed_linear
from moejob_trainer.model.adapters import Adapter


@dataclass(frozen=True, slots=True)
class TensorShare:
    """This rank's part in tensor parallelism."""

    group: Group
    sequence_parallel: bool

    @property
    def needs_gather(self) -> bool:
        """True when ranks have to gather the rows that they divide outside."""
        return self.sequence_parallel and self.group.size > 1

    def gather_input(self, x: Tensor) -> Tensor:
        """Return the input of matrices divided by their outputs: all rows. [t, h] -> [rows, h]"""
        return all_gather(x, self.group) if self.sequence_parallel else copy_to_group(x, self.group)

    def multiply_columns(self, x: Tensor, *matrices: Linear) -> tuple[Tensor, ...]:
        """Multiply all rows by matrices divided by their outputs. Rows of other ranks are not kept. [t, *inputs]"""
        if not self.needs_gather:
            x = self.gather_input(x)
            return tuple(matrix(x) for matrix in matrices)
        products = gathered_products(
            x.flatten(1),
            self.group,
            [matrix.flat_parameters() for matrix in matrices],
            [find_gradient_sum(matrix.weight) for matrix in matrices],
            [matrix.float8 for matrix in matrices],
        )
        return tuple(matrix.finish_product(y, x, self) for matrix, y in zip(matrices, products, strict=True))

    def reduce_output(self, x: Tensor) -> Tensor:
        """Sum the partial outputs of matrices divided by their inputs. [rows, h] -> [t, h]"""
        return reduce_scatter(x, self.group) if self.sequence_parallel else all_reduce(x, self.group)

    def local_size(self, size: int, what: str) -> int:
        """This rank's share of a size."""
        share, remainder = divmod(size, self.group.size)
        if remainder:
            raise ValueError(f"{what} {size} cannot be divided over {self.group.size} tensor ranks")
        return share


class Linear(nn.Module):
    """y = x W + b. The weight keeps the axes of its outputs and inputs; only the product flattens it."""

    def __init__(self, outputs: tuple[int, ...], inputs: tuple[int, ...], *, bias: bool = False) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.empty(*outputs, *inputs))
        self.bias = nn.Parameter(torch.empty(*outputs)) if bias else None
        self.adapter: Adapter | None = None
        self.float8: Float8Weight | None = None
        self._in_features = math.prod(inputs)

    def forward(self, x: Tensor) -> Tensor:
        """[t, *inputs] -> [t, *outputs]"""
        return self.finish_product(
            summed_linear(x.flatten(1), *self.flat_parameters(), find_gradient_sum(self.weight), self.float8), x, None
        )

    @property
    def widths(self) -> tuple[int, int]:
        """Outputs and inputs of its product."""
        return math.prod(self.outputs), self._in_features

    def flat_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as one product wants them."""
        return self.weight.view(-1, self._in_features), None if self.bias is None else self.bias.flatten()

    def finish_product(self, product: Tensor, x: Tensor, gathered_by: TensorShare | None) -> Tensor:
        """A product of x, or of what ranks gathered of it, with its axes and with what an adapter adds."""
        y = product.view(len(product), *self.outputs)
        if self.adapter is None:
            return y
        if gathered_by is None:
            return y + self.adapter.apply(x)
        # Narrow rows travel instead of wide ones.
        return y + self.adapter.apply(x, gathered_by.gather_input, part=gathered_by.group.rank)


class OutputLinear(nn.Module):
    """A matrix divided by its inputs: its partial sums meet in `TensorShare.left`, where the bias is added once."""

    def __init__(self, hidden: int, inputs: tuple[int, ...], share: TensorShare, *, bias: bool = False) -> None:
        super().__init__()
        self.share, self.widths = share, (hidden, math.prod(inputs))
        self.weight = nn.Parameter(torch.empty(hidden, *inputs))
        self.bias = nn.Parameter(torch.empty(hidden)) if bias else None
        self.adapter: Adapter | None = None
        self.float8: Float8Weight | None = None
        if self.bias is not None:
            mark_partial(self.bias, is_partial=share.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, *inputs] -> [t, hidden]"""
        weight = self.weight.view(self.widths)
        y = summed_linear(x.reshape(len(x), self.widths[1]), weight, None, find_gradient_sum(self.weight), self.float8)
        if self.adapter is not None:
            y = y + self.adapter.apply(x)
        y = self.share.reduce_output(y)
        return y if self.bias is None else y + self.bias


def mark_partial(parameter: nn.Parameter, *, is_partial: bool = True) -> None:
    """A parameter that every tensor rank holds whole; `is_partial` when each rank sees only a part of its gradient."""
    parameter.is_tensor_replica = True  # type: ignore[attr-defined]
    parameter.is_partial = is_partial  # type: ignore[attr-defined]


def is_tensor_replica(parameter: nn.Parameter) -> bool:
    """Return whether every rank of the tensor group holds the same parameter."""
    return getattr(parameter, "is_tensor_replica", False)


def is_partial(parameter: nn.Parameter) -> bool:
    """Return whether its gradient has to be summed over the tensor group."""
    return getattr(parameter, "is_partial", False)


def mark_tied(parameter: nn.Parameter, *, is_copy: bool) -> None:
    """The embedding of a model whose output layer is its embedding; the last stage holds a copy of the first's."""
    # Megatron's buffers read this name: both ends must cut the same bucket into the same shares.
    parameter.shared_embedding = True  # type: ignore[attr-defined]
    parameter.is_tied_copy = is_copy  # type: ignore[attr-defined]


def is_tied_copy(parameter: nn.Parameter) -> bool:
    """Return whether another stage holds the original."""
    return getattr(parameter, "is_tied_copy", False)


def mark_expert(parameter: nn.Parameter) -> None:
    """Mark a parameter of experts: its replicas are the ranks of the expert data group, not those of dense weights."""
    # Megatron's buffers read this name.
    parameter.allreduce = False  # type: ignore[attr-defined]


def is_expert(parameter: nn.Parameter) -> bool:
    """Return whether it belongs to routed experts."""
    return not getattr(parameter, "allreduce", True)
