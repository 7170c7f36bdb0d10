"""A model of Transformers whose products are of FP8 numbers, as docs/trainer.md says: each rounded by a table of all.

Knows nothing of the trainer: neither its way of rounding nor its layers.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moejob_api.models.shape import Family
from trainer.parity import cells

LARGEST = 448.0
# In every layout each rank holds a multiple of 16 in both directions of a matrix.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


def write_float8_reference(family: Family, folder: Path) -> cells.StepMeasurements:
    """The same as `cells.write_reference` of a model that multiplies in FP8."""
    plain = cells.reference_model

    def rounding(family: Family, **changes: Any) -> PreTrainedModel:
        return multiplying_in_float8(plain(family, **changes))

    known = {key: size for key, size in SIZES.items() if "lora" not in key or "deepseek" in family}
    with patch.object(cells, "reference_model", rounding):
        return cells.write_reference(family, folder, **known)


def multiplying_in_float8(model: PreTrainedModel) -> PreTrainedModel:
    """The model, its linear layers and experts rounding what they multiply; not its output layer and routers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head" and min(module.weight.shape) >= 16:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]
        elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            module.forward = partial(_experts, module)
    return model


def _linear(module: Any, x: Tensor) -> Tensor:
    y: Tensor = _product(x.flatten(0, -2), module.weight).unflatten(0, x.shape[:-1])
    bias: Tensor | None = module.bias
    return y if bias is None else y + bias


def _experts(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A token's weight goes into the activation, in front of the second product."""
    total = torch.zeros_like(x)
    for expert in range(len(module.gate_up_proj)):
        token, place = torch.where(chosen == expert)
        if len(token):
            gate, up = _product(x[token], module.gate_up_proj[expert]).chunk(2, -1)
            inner = nn.functional.silu(gate) * up * weights[token, place].unsqueeze(-1)
            total = total.index_add(0, token, _product(inner, module.down_proj[expert]))
    return total


def _product(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return y


class _Product(torch.autograd.Function):
    """x W^T, and gradient W, of rounded rows; gradient^T x of what was not rounded."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return round_rows(x) @ round_rows(weight).t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = context.saved_tensors
        return round_rows(gradient) @ round_rows(weight.t()).t(), gradient.t() @ x


def round_rows(rows: Tensor) -> Tensor:
    """Each row to the nearest numbers of e4m3, times the largest power of two that keeps it below the largest."""
    largest = rows.double().abs().amax(-1, keepdim=True)
    factor = torch.where(largest > 0, 2.0 ** torch.floor(torch.log2(LARGEST / largest.clamp(min=1e-300))), 1.0)
    return (_round_to_nearest(rows.double() * factor) / factor).to(rows.dtype)


def _round_to_nearest(x: Tensor) -> Tensor:
    """The nearest number of the table; between two, the one whose last bit is zero."""
    numbers = torch.tensor(_list_numbers(), dtype=torch.float64)
    above = torch.searchsorted(numbers, x.abs()).clamp(1, len(numbers) - 1)
    to_above, to_below = numbers[above] - x.abs(), x.abs() - numbers[above - 1]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return numbers[torch.where(takes_above, above, above - 1)] * x.sign()


def _list_numbers() -> list[float]:
    """All that are not negative, in the order of their bits: eight to a power of two, from 2^-9 on."""
    below = [math.ldexp(mantissa, -9) for mantissa in range(8)]
    normal = [math.ldexp(8 + mantissa, exponent - 10) for exponent, mantissa in product(range(1, 16), range(8))]
    # The last pattern of bits is not a number.
    return [*below, *normal[:-1]]
