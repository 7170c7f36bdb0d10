"""Rounding to FP8 by rows, and the products of what is rounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpu.twins import bounds_of
from moejob_trainer.layers.experts import grouped_linear
from moejob_trainer.layers.float8 import Float8Weight, quantize_columns, quantize_rows
from moejob_trainer.layers.summed_linear import summed_linear
from trainer.parity.float8 import round_rows as reference
from trainer.tolerance import assert_all_close

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def numbers(*shape: int) -> Tensor:
    """Rows of very different sizes."""
    return torch.randn(*shape) * 10.0 ** torch.randint(-9, 9, (*shape[:-1], 1))


@DTYPES
def test_each_row_is_rounded_to_the_nearest_of_its_numbers(dtype: torch.dtype) -> None:
    x = numbers(200, 48).to(dtype)
    found = quantize_rows(x)
    assert torch.equal(found.dequantize(dtype), reference(x))
    assert found.scales.log2().frac().abs().max() == 0.0, "a scale that is no power of two rounds once more"
    largest = found.values.float().abs().amax(-1)
    assert ((largest > 224 - 16) & (largest <= 448)).all(), "a bit of a row is not used"


def test_numbers_between_two_go_to_the_even_one() -> None:
    # Largest 256: no scale. Between 16 and 32 the numbers are two apart.
    x = torch.tensor([[256.0, 17.0, 19.0, 21.0, -17.0, 2.0**-10, 3 * 2.0**-10]])
    assert quantize_rows(x).dequantize(torch.float32).tolist() == [[256.0, 16.0, 20.0, 20.0, -16.0, 0.0, 2 * 2.0**-9]]


def test_a_row_of_zeros_stays_zero_and_what_is_no_number_is_not_hidden() -> None:
    x = torch.zeros(4, 16)
    x[1, 3], x[2, 5], x[3] = torch.inf, torch.nan, 1.0
    plain = quantize_rows(x).dequantize(torch.float32)
    assert torch.equal(plain[0], torch.zeros(16))
    assert plain[1, 3].isnan()
    assert plain[2, 5].isnan()
    assert torch.equal(plain[3], torch.ones(16))


@DTYPES
@pytest.mark.parametrize("shape", [(48, 32), (3, 48, 32)], ids=str)
def test_columns_are_the_rows_of_the_turned_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = numbers(*shape).to(dtype)
    assert torch.equal(quantize_columns(x).dequantize(dtype), reference(x.transpose(-2, -1)))


@pytest.mark.parametrize("is_biased", [True, False], ids=["with bias", "without"])
def test_a_linear_map_multiplies_what_is_rounded_and_learns_from_what_is_not(is_biased: bool) -> None:
    x, weight = torch.randn(6, 48).requires_grad_(), nn.Parameter(torch.randn(32, 48))
    bias, upstream = nn.Parameter(torch.randn(32)), torch.randn(6, 32)
    y = summed_linear(x, weight, bias if is_biased else None, float8=Float8Weight(keeps=True))
    y.backward(upstream)
    assert x.grad is not None
    assert weight.grad is not None
    expected = reference(x.detach()) @ reference(weight.detach()).t() + (bias.detach() if is_biased else 0.0)
    of_x = reference(upstream) @ reference(weight.detach().t()).t()
    assert_all_close([y.detach(), x.grad, weight.grad], [expected, of_x, upstream.t() @ x.detach()], within=1e-6)
    if is_biased:
        assert_all_close([bias.grad], [upstream.sum(0)], within=1e-6)  # type: ignore[list-item]


@pytest.mark.parametrize("counts", [[3, 4, 2], [0, 9, 0], [0, 0, 0]], ids=str)
def test_maps_of_experts_multiply_what_is_rounded_and_learn_from_what_is_not(counts: list[int]) -> None:
    x, weight = torch.randn(sum(counts), 48).requires_grad_(), nn.Parameter(torch.randn(3, 32, 48))
    upstream = torch.randn(sum(counts), 32)
    y = grouped_linear(x, weight, bounds_of(counts), float8=Float8Weight(keeps=True))
    y.backward(upstream)
    assert x.grad is not None
    assert weight.grad is not None
    triples = [*zip(x.detach().split(counts), upstream.split(counts), weight.detach(), strict=True)]
    expected = torch.cat([reference(part) @ reference(one).t() for part, _, one in triples])
    of_x = torch.cat([reference(rows) @ reference(one.t()).t() for _, rows, one in triples])
    of_weight = torch.stack([rows.t() @ part for part, rows, _ in triples])
    assert_all_close([y.detach(), x.grad, weight.grad], [expected, of_x, of_weight], within=1e-6)


def test_a_frozen_weight_keeps_no_rows_for_its_gradient() -> None:
    x, weight = torch.randn(6, 48).requires_grad_(), torch.randn(32, 48)
    y = summed_linear(x, weight, float8=Float8Weight(keeps=False))
    assert y.grad_fn.saved_tensors[0] is None  # type: ignore[union-attr]
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
def test_roundings_are_those_of_the_weight_once_they_are_forgotten(keeps: bool) -> None:
    float8, weight = Float8Weight(keeps=keeps), torch.randn(32, 48)
    first = float8.quantize_by_inputs(weight), float8.quantize_by_outputs(weight)
    assert (float8.quantize_by_inputs(weight) is first[0]) == keeps
    assert (float8.quantize_by_outputs(weight) is first[1]) == keeps
    weight += 1.0
    float8.discard_roundings()
    assert torch.equal(float8.quantize_by_inputs(weight).dequantize(torch.float32), reference(weight))
    assert torch.equal(float8.quantize_by_outputs(weight).dequantize(torch.float32), reference(weight.t()))
