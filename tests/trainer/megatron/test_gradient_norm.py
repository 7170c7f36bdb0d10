"""The norm of a gradient, which clipping divides by, also of tensors as large as those of published models."""

from __future__ import annotations

import pytest
import torch

from moejob_trainer.megatron.optimizer import part_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [1, 16_384, 16_385, 20_000_000])
def test_the_norm_of_a_gradient_is_that_of_float64_however_large_it_is(elements: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(elements)
    gradient = (torch.randn(elements, generator=generator) * 1e-3).to(dtype)
    norms = torch.stack([*part_norms(gradient)])
    assert norms.double().norm().item() == pytest.approx(gradient.double().norm().item(), rel=5e-6)
    assert norms.dtype is torch.float32
