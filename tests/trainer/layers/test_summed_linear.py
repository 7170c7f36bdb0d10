"""Linear maps whose weight gradient is added to its sum inside the product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moejob_trainer.layers.gradient_sums import find_gradient_sum
from moejob_trainer.layers.summed_linear import summed_linear


def leaves(dtype: torch.dtype, *, of_sum: torch.dtype) -> tuple[Tensor, nn.Parameter, nn.Parameter]:
    """Rows, a weight with a sum that something is in already, and a bias."""
    weight = nn.Parameter(torch.randn(6, 8).to(dtype))
    weight.main_grad = torch.randn(6, 8).to(of_sum)  # type: ignore[attr-defined]
    return torch.randn(5, 8).to(dtype).requires_grad_(), weight, nn.Parameter(torch.randn(6).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_biased", [True, False], ids=["with bias", "without"])
def test_gradients_are_those_of_a_linear_map_and_its_weights_is_in_the_sum(dtype: torch.dtype, is_biased: bool) -> None:
    x, weight, bias = leaves(dtype, of_sum=dtype)
    before, upstream = weight.main_grad.clone(), torch.randn(5, 6).to(dtype)  # type: ignore[attr-defined]
    inputs = [x, weight, bias] if is_biased else [x, weight]
    expected = functional.linear(*inputs)
    of_x, of_weight, *of_bias = torch.autograd.grad(expected, inputs, upstream)

    product = summed_linear(x, weight, bias if is_biased else None, find_gradient_sum(weight))
    assert torch.equal(product, expected)
    product.backward(upstream)
    within = 1e-5 if dtype is torch.float32 else 2e-2
    found = [x.grad, weight.main_grad, *([bias.grad] if is_biased else [])]  # type: ignore[attr-defined]
    for one, other in zip(found, [of_x, before + of_weight, *of_bias], strict=True):
        torch.testing.assert_close(one, other, rtol=within, atol=within)
    # Megatron drops the gradient of a parameter that says so.
    assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_trained", [True, False], ids=["a sum of another type", "a weight that is frozen"])
def test_a_sum_that_no_product_can_add_to_is_left_to_autograd(is_trained: bool) -> None:
    x, weight, _ = leaves(torch.bfloat16, of_sum=torch.float32 if is_trained else torch.bfloat16)
    weight.requires_grad_(is_trained)
    before = weight.main_grad.clone()  # type: ignore[attr-defined]
    summed_linear(x, weight, total=find_gradient_sum(weight)).sum().backward()
    assert (weight.grad is not None) == is_trained
    assert not hasattr(weight, "grad_added_to_main_grad")
    assert torch.equal(weight.main_grad, before)  # type: ignore[attr-defined]
