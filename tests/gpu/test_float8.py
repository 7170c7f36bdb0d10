"""FP8 on a GPU: rounding gives the bits of the plain twin, and products those of the rounded numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpu.twins import bounds_of
from moejob_trainer.layers.experts import grouped_linear
from moejob_trainer.layers.float8 import (
    Float8Weight,
    QuantizedRows,
    plain_quantize_columns,
    plain_quantize_rows,
    quantize_columns,
    quantize_rows,
)
from moejob_trainer.layers.kernels import find_kernels
from moejob_trainer.layers.summed_linear import summed_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="no GPU here that multiplies FP8 numbers",
    ),
]

SHAPES = [(1, 16), (5, 272), (129, 768), (300, 2048), (64, 14336), (3, 80, 400), (8, 257, 1040), (0, 64)]
# Of the largest element: a result is rounded to bfloat16 once.
WITHIN = 5e-3


def odd_numbers(shape: tuple[int, ...]) -> Tensor:
    """Rows of all sizes, one of them zeros and one with infinity."""
    x = torch.randn(shape, device="cuda") * 10.0 ** torch.randint(-12, 12, (*shape[:-1], 1), device="cuda")
    flat = x.view(-1, shape[-1])
    if len(flat) > 1:
        flat[0], flat[1, 3] = 0.0, torch.inf
    return x


def same_bits(one: QuantizedRows, other: tuple[Tensor, Tensor]) -> bool:
    values, scales = other
    # What is no number may have either sign.
    is_none = values.float().isnan()
    alike = (one.values.view(torch.uint8) == values.view(torch.uint8)) | (is_none & one.values.float().isnan())
    return bool(alike.all()) and torch.equal(one.scales, scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounding_gives_the_bits_of_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = odd_numbers(shape).to(dtype)
    rows, columns = quantize_rows(x), quantize_columns(x)
    assert same_bits(QuantizedRows(rows.values.cpu(), rows.scales.cpu()), plain_quantize_rows(x.cpu()))
    if len(x):
        assert same_bits(QuantizedRows(columns.values.cpu(), columns.scales.cpu()), plain_quantize_columns(x.cpu()))


def test_what_is_no_number_is_not_hidden() -> None:
    x = torch.ones(3, 64, device="cuda")
    x[1, 5] = torch.nan
    assert quantize_rows(x).dequantize(torch.float32)[1, 5].isnan()
    assert quantize_columns(x).dequantize(torch.float32)[5, 1].isnan()
    assert torch.equal(quantize_rows(x).dequantize(torch.float32)[::2], x[::2])


def test_products_are_those_of_quack_kernels() -> None:
    module = find_kernels("float8", torch.empty(1, device="cuda"))
    assert module is not None
    assert module.can_multiply(torch.empty(1, 16, device="cuda", dtype=torch.float8_e4m3fn), torch.bfloat16)


def off(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item()


def plain(rounded: QuantizedRows) -> Tensor:
    return rounded.values.double() * rounded.scales.double().unsqueeze(-1)


@pytest.mark.parametrize("keeps", [True, False], ids=["roundings are kept", "not kept"])
@pytest.mark.parametrize("rows", [1, 300, 4096])
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 5120), (4096, 2048), (272, 400), (16, 16), (14336, 4096)])
def test_linear_maps(rows: int, inputs: int, outputs: int, keeps: bool) -> None:
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5)
    upstream = torch.randn(rows, outputs, device="cuda", dtype=torch.bfloat16)
    y = summed_linear(x, weight, float8=Float8Weight(keeps=keeps))
    y.backward(upstream)
    assert x.grad is not None
    assert weight.grad is not None
    assert off(y, plain(quantize_rows(x.detach())) @ plain(quantize_rows(weight.detach())).t()) < WITHIN
    assert off(x.grad, plain(quantize_rows(upstream)) @ plain(quantize_columns(weight.detach())).t()) < WITHIN
    assert off(weight.grad, upstream.double().t() @ x.detach().double()) < WITHIN


@pytest.mark.parametrize(
    "counts", [[300, 0, 515, 1, 208], [0, 0, 0, 7, 0], [0, 0, 0, 0, 0], [5000, 0, 7001, 1, 3000]], ids=str
)
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 1536), (768, 2048), (272, 400), (4096, 4096)])
def test_maps_of_experts(counts: list[int], inputs: int, outputs: int) -> None:
    x = torch.randn(sum(counts), inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(5, outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5)
    upstream = torch.randn(sum(counts), outputs, device="cuda", dtype=torch.bfloat16)
    y = grouped_linear(x, weight, bounds_of(counts, "cuda"), float8=Float8Weight(keeps=False))
    y.backward(upstream)
    assert x.grad is not None
    assert weight.grad is not None
    parts = [plain(quantize_rows(part)) for part in x.detach().split(counts)]
    slopes = [plain(quantize_rows(part)) for part in upstream.split(counts)]
    if sum(counts):
        forward, back = plain(quantize_rows(weight.detach())), plain(quantize_columns(weight.detach()))
        assert off(y, torch.cat([part @ one.t() for part, one in zip(parts, forward, strict=True)])) < WITHIN
        assert off(x.grad, torch.cat([part @ one.t() for part, one in zip(slopes, back, strict=True)])) < WITHIN
    exact = [
        rows.double().t() @ part.double()
        for rows, part in zip(upstream.split(counts), x.detach().split(counts), strict=True)
    ]
    assert off(weight.grad, torch.stack(exact)) < WITHIN
