"""Grouped linear maps and the way to experts and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpu.twins import bounds_of
from moejob_trainer.layers.experts import add_biases, grouped_linear
from moejob_trainer.layers.gradient_sums import find_gradient_sum
from moejob_trainer.layers.permutation import Permutation, combine_rows, permute_probabilities, permute_tokens
from trainer.tolerance import assert_all_close

COUNTS = [
    pytest.param([3, 4, 2], id="every expert has rows"),
    pytest.param([0, 9, 0], id="one expert has all"),
    pytest.param([0, 0, 0], id="no rows"),
    pytest.param([1, 0, 300], id="many rows and one"),
]


def one_by_one(x: Tensor, weight: Tensor, counts: Sequence[int], bias: Tensor | None) -> Tensor:
    parts = x.split(list(counts))
    biases = [0.0] * len(parts) if bias is None else list(bias)
    return torch.cat([part @ one.t() + b for part, one, b in zip(parts, weight, biases, strict=True)])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("biased", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("sizes", [(24, 16), (5, 3)], ids=["what the kernel takes", "odd widths"])
@pytest.mark.parametrize(
    ("dtype", "within"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)],
    ids=["float64", "float32", "bfloat16"],
)
def test_each_row_meets_the_weight_of_its_expert(
    counts: list[int], biased: bool, sizes: tuple[int, int], dtype: torch.dtype, within: float
) -> None:
    x, weight = torch.randn(sum(counts), sizes[0]).to(dtype), torch.randn(3, sizes[1], sizes[0]).to(dtype)
    bias = torch.randn(3, sizes[1]).to(dtype) if biased else None
    upstream = torch.randn(sum(counts), sizes[1]).to(dtype)
    tensors = [x, weight] if bias is None else [x, weight, bias]
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    output = grouped_linear(ours[0], ours[1], bounds_of(counts))
    if biased:
        output = add_biases(output, ours[2], bounds_of(counts))
    theirs = [tensor.double().requires_grad_() for tensor in tensors]
    expected = one_by_one(theirs[0], theirs[1], counts, theirs[2] if biased else None)
    assert output.dtype is dtype
    assert_all_close(
        [output.detach(), *torch.autograd.grad(output, ours, upstream)],
        [expected.detach(), *torch.autograd.grad(expected, theirs, upstream.double())],
        within=within,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_summed_output_and_strided_rows_are_fine(dtype: torch.dtype) -> None:
    x = torch.randn(8, 10, dtype=dtype).t()[:9].requires_grad_()
    weight = torch.randn(2, 8, 4, dtype=dtype).transpose(1, 2).requires_grad_()
    output = grouped_linear(x, weight, bounds_of([4, 5]))
    expected = one_by_one(x, weight, [4, 5], None)
    ones = torch.ones_like(expected)
    assert_all_close(
        torch.autograd.grad(output.sum(), [x, weight]), torch.autograd.grad(expected, [x, weight], ones), within=1e-6
    )


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = torch.randn(4, 8).requires_grad_(), torch.randn(2, 8, 8)
    grouped_linear(x, weight, bounds_of([1, 3])).sum().backward()
    assert weight.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("counts", COUNTS)
def test_gradients_of_several_backward_passes_are_added_to_the_sum_that_there_is(
    counts: list[int], dtype: torch.dtype
) -> None:
    weight = nn.Parameter(torch.randn(3, 2, 8, 24).to(dtype))
    before = torch.randn_like(weight, dtype=torch.float32)
    weight.main_grad = before.clone()  # type: ignore[attr-defined]
    expected = before
    for _ in range(2):
        x, upstream = torch.randn(sum(counts), 24).to(dtype), torch.randn(sum(counts), 16).to(dtype)
        flat = weight.view(3, 16, 24)
        grouped_linear(x, flat, bounds_of(counts), total=find_gradient_sum(weight)).backward(upstream)
        alone = grouped_linear(x, flat, bounds_of(counts))
        expected = expected + torch.autograd.grad(alone, weight, upstream)[0]
    assert torch.equal(weight.main_grad, expected)  # type: ignore[attr-defined]
    # Megatron adds no gradient of a parameter that says so.
    assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]


@dataclass
class Written:
    """A sum of which nothing is there yet."""

    into: Tensor
    is_new = True
    is_written = False

    def target_for(self, weight: Tensor) -> Tensor:
        return self.into.view(weight.shape)

    def mark_added(self, _: Tensor) -> None:
        self.is_written = True


@pytest.mark.parametrize("counts", COUNTS)
def test_the_first_gradient_is_written_over_what_lies_there(counts: list[int]) -> None:
    weight, into = torch.randn(3, 16, 24).requires_grad_(), Written(torch.full((3 * 16 * 24,), torch.nan))
    x, upstream = torch.randn(sum(counts), 24), torch.randn(sum(counts), 16)
    grouped_linear(x, weight, bounds_of(counts), total=into).backward(upstream)
    alone = grouped_linear(x, weight, bounds_of(counts))
    assert torch.equal(into.into.view(3, 16, 24), torch.autograd.grad(alone, weight, upstream)[0])
    assert into.is_written
    assert weight.grad is None


def test_a_weight_without_a_sum_leaves_its_gradient_to_autograd() -> None:
    assert find_gradient_sum(nn.Parameter(torch.zeros(2))) is None


def test_the_gradient_of_a_bias_is_summed_in_float32() -> None:
    rows = 4096
    bias = torch.zeros(1, 8).bfloat16().requires_grad_()
    add_biases(torch.zeros(rows, 8).bfloat16(), bias, bounds_of([rows])).sum().backward()
    # In bfloat16 adding ones ends at 256.
    assert bias.grad is not None
    assert bias.grad.tolist() == [[rows] * 8]


def test_numerical_gradients_agree() -> None:
    x, weight, bias = torch.randn(5, 3).double(), torch.randn(3, 2, 3).double(), torch.randn(3, 2).double()
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    bounds = bounds_of([2, 0, 3])
    assert torch.autograd.gradcheck(
        lambda x, weight, bias: add_biases(grouped_linear(x, weight, bounds), bias, bounds), leaves
    )


def test_rows_are_sorted_by_expert_and_tokens_keep_their_order() -> None:
    permutation = Permutation.from_choices(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
    assert permutation.bounds.tolist() == [0, 2, 4, 6, 6]
    assert permutation.row_tokens.tolist() == [0, 1, 1, 2, 0, 2]
    assert permutation.order.tolist() == [1, 2, 3, 5, 0, 4]
    assert permutation.inverse.tolist() == [[4, 0], [1, 2], [5, 3]]


def test_a_choice_of_none_has_no_row() -> None:
    permutation = Permutation.from_choices(torch.tensor([[2, 0], [2, 2], [1, 0]]), 2, rows=3)
    assert permutation.bounds.tolist() == [0, 2, 3]
    assert permutation.row_tokens.tolist() == [0, 2, 2]
    x = torch.randn(3, 4).requires_grad_()
    output = combine_rows(permute_tokens(x, permutation), permutation)
    assert torch.equal(output, x * torch.tensor([[1.0], [0.0], [2.0]]))
    assert torch.autograd.grad(output.sum(), x)[0].tolist() == [[1.0] * 4, [0.0] * 4, [2.0] * 4]


def choices(tokens: int, per_token: int, experts: int) -> Tensor:
    return (
        torch.stack([torch.randperm(experts)[:per_token] for _ in range(tokens)])
        if tokens
        else torch.zeros(0, per_token).long()
    )


@pytest.mark.parametrize("weighted", [False, True], ids=["plain sum", "with probabilities"])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_gradients_of_the_way_there_and_back_agree_with_numerical_ones(tokens: int, weighted: bool) -> None:
    permutation = Permutation.from_choices(choices(tokens, 2, 5), 5)
    x, y = torch.randn(tokens, 3).double().requires_grad_(), torch.randn(2 * tokens, 3).double().requires_grad_()
    probabilities = torch.rand(tokens, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: permute_tokens(x, permutation), [x])
    assert torch.autograd.gradcheck(lambda p: permute_probabilities(p, permutation), [probabilities])
    if weighted:
        assert torch.autograd.gradcheck(lambda y, p: combine_rows(y, permutation, p), [y, probabilities])
    else:
        assert torch.autograd.gradcheck(lambda y: combine_rows(y, permutation), [y])


@given(st.integers(1, 30), st.integers(1, 4), st.integers(4, 9))
def test_back_and_forth_is_once_for_each_choice(tokens: int, per_token: int, experts: int) -> None:
    x, permutation = torch.randn(tokens, 3), Permutation.from_choices(choices(tokens, per_token, experts), experts)
    assert torch.allclose(combine_rows(permute_tokens(x, permutation), permutation), per_token * x, rtol=1e-6)
    sorted_experts = torch.repeat_interleave(torch.arange(experts), permutation.bounds.diff())
    assert len(sorted_experts) == permutation.row_count == tokens * per_token


@given(st.integers(1, 20), st.integers(1, 3), st.permutations(range(5)))
def test_experts_can_be_renamed(tokens: int, per_token: int, names: list[int]) -> None:
    x, chosen, probabilities = torch.randn(tokens, 8), choices(tokens, per_token, 5), torch.rand(tokens, per_token)
    weight = torch.randn(5, 8, 8)
    renamed_weight = torch.empty_like(weight)
    renamed_weight[torch.tensor(names)] = weight
    assert torch.allclose(
        through_experts(x, chosen, probabilities, weight),
        through_experts(x, torch.tensor(names)[chosen], probabilities, renamed_weight),
        atol=1e-5,
    )


def through_experts(x: Tensor, chosen: Tensor, probabilities: Tensor, weight: Tensor) -> Tensor:
    permutation = Permutation.from_choices(chosen, len(weight))
    return combine_rows(
        grouped_linear(permute_tokens(x, permutation), weight, permutation.bounds), permutation, probabilities
    )


def test_sums_are_in_float32_and_rounded_once() -> None:
    permutation = Permutation.from_choices(torch.tensor([[0, 1, 2]]), 3)
    y = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    # 256 + 1 is 256 in bfloat16.
    assert combine_rows(y, permutation).item() == 258


def test_strided_and_expanded_gradients_are_fine() -> None:
    permutation = Permutation.from_choices(choices(6, 2, 5), 5)
    y = torch.randn(4, 12).t().requires_grad_()
    assert torch.equal(torch.autograd.grad(combine_rows(y, permutation).sum(), y)[0], torch.ones(12, 4))
