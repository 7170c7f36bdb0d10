"""Permutation of tokens to their experts, and the combination of results, on one rank.

Three tokens, each choosing two of three experts:

    experts  [[2, 0], [0, 1], [2, 1]]    token 0 goes to experts 2 and 0, and so on
    choices  [ 0  1    2  3    4  5 ]    numbered token by token
    order    [1, 2, 3, 5, 0, 4]          choices sorted by expert: 0 0 1 1 2 2
    tokens   [0, 1, 1, 2, 0, 2]          order // 2: the token in each row
    inverse  [[4, 0], [1, 2], [5, 3]]    the row of each choice: what token 0 sums is in rows 4 and 0
    bounds   [0, 2, 4, 6]                where the rows of each expert begin, and where the last ones end
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moejob_trainer.layers.kernels import find_kernels
from moejob_trainer.layers.precision import at_least_float32


@dataclass(frozen=True, eq=False)
class Permutation:
    """The rows sorted by expert, and the choice of a token that each belongs to.

    A token has k choices; a choice of the expert `expert_count` is a choice of none, and has no row.
    """

    order: Tensor
    """int64 [rows]: the choice (token * k + its place among the k) that each row belongs to."""
    inverse: Tensor
    """int64 [t, k]: the row of each choice; `row_count` for a choice of none."""
    bounds: Tensor
    """int32 [expert_count + 1]: the first row of each expert, and the end of the last expert's rows."""

    @staticmethod
    def from_choices(experts: Tensor, expert_count: int, rows: int | None = None) -> Permutation:
        """Sort by expert; tokens of one expert keep their order.

        experts int [t, k]. `rows` is the number of choices of an expert: all of them unless given, since counting
        them here would wait for the device.
        """
        fused = find_kernels("permutation", experts)
        order_choices = fused.order_choices if fused and fused.can_order(experts, expert_count) else plain_order_choices
        order, inverse, bounds = order_choices(experts, expert_count)
        return Permutation(order if rows is None else order[:rows], inverse, bounds)

    @property
    def row_count(self) -> int:
        return self.order.shape[0]

    @property
    def row_tokens(self) -> Tensor:
        """int64 [rows]: the token of each row."""
        return self.order // max(self.inverse.shape[1], 1)


def plain_order_choices(experts: Tensor, expert_count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order, inverse and bounds of a permutation, in the operations of torch; choices of none come last in the order.

    experts int [t, k] -> int64 [t * k], int64 [t, k], int32 [expert_count + 1]
    """
    # A radix sort passes over two bytes instead of eight.
    keys = experts.flatten().to(torch.int16 if expert_count < torch.iinfo(torch.int16).max else torch.int64)
    by_expert, order = keys.sort(stable=True)
    firsts = torch.arange(expert_count + 1, device=order.device, dtype=by_expert.dtype)
    bounds = torch.searchsorted(by_expert, firsts, out_int32=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return order, places.clamp(max=bounds[-1]).view(experts.shape), bounds


def permute_tokens(x: Tensor, permutation: Permutation) -> Tensor:
    """The tokens x [t, h], once for each of their choices, sorted by expert. [rows, h]"""
    rows: Tensor = _PermuteTokens.apply(x, permutation)
    return rows


def permute_into(rows: Tensor, x: Tensor, permutation: Permutation) -> None:
    """Write `permute_tokens` into rows [rows, h], without a gradient."""
    torch.index_select(x, 0, permutation.row_tokens, out=rows)


def sum_rows_into(sums: Tensor, y: Tensor, permutation: Permutation) -> None:
    """Write `combine_rows` into sums [t, h], without a gradient."""
    fused = find_kernels("permutation", y)
    if fused:
        fused.sum_rows(y, permutation.inverse, sums)
        return
    sums.copy_(plain_sum_token_rows(y, permutation.inverse))


def permute_probabilities(probabilities: Tensor, permutation: Permutation) -> Tensor:
    """The probabilities [t, k] of the choices, sorted by expert. [rows]"""
    rows: Tensor = _PickProbabilities.apply(probabilities, permutation)
    return rows


def combine_rows(y: Tensor, permutation: Permutation, probabilities: Tensor | None = None) -> Tensor:
    """For each token the sum of its rows of y [rows, h], each times its probability [t, k] when given. [t, h]"""
    if probabilities is not None:
        y = (at_least_float32(y) * at_least_float32(permute_probabilities(probabilities, permutation))[:, None]).to(
            y.dtype
        )
    sums: Tensor = _CombineRows.apply(y, permutation)
    return sums


class _PermuteTokens(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, permutation: Permutation) -> Tensor:
        context.permutation = permutation
        return x.index_select(0, permutation.row_tokens)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum_token_rows(gradient, context.permutation.inverse), None


class _PickProbabilities(torch.autograd.Function):
    """Rows are picked once each, so gradients are picked too; torch's own backward would add them with atomics."""

    @staticmethod
    def forward(context: Any, values: Tensor, permutation: Permutation) -> Tensor:
        context.inverse = permutation.inverse
        return values.flatten().index_select(0, permutation.order)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        inverse = context.inverse.flatten()
        if len(gradient) < len(inverse):
            # A choice of none points behind the last row.
            gradient = torch.cat([gradient, gradient.new_zeros(1)])
        return gradient.index_select(0, inverse).view_as(context.inverse), None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, y: Tensor, permutation: Permutation) -> Tensor:
        context.permutation = permutation
        return _sum_token_rows(y, permutation.inverse)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, context.permutation.row_tokens), None


def _sum_token_rows(rows: Tensor, inverse: Tensor) -> Tensor:
    """For each token the sum of its rows, in float32 and rounded once. rows [r, h], inverse [t, k] -> [t, h]"""
    fused = find_kernels("permutation", rows)
    if fused:
        sums: Tensor = fused.sum_rows(rows, inverse)
        return sums
    return plain_sum_token_rows(rows, inverse)


def plain_sum_token_rows(rows: Tensor, inverse: Tensor) -> Tensor:
    """`_sum_token_rows` in the operations of torch; k copies of all tokens never exist."""
    # A choice of none points behind the last row.
    is_complete = rows.shape[0] == inverse.numel()
    reachable = rows if is_complete else torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return functional.embedding_bag(inverse, at_least_float32(reachable), mode="sum").to(rows.dtype)
