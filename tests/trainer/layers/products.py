"""Products of bfloat16 as layers make them, and as torch itself makes them, on the CPU that the environment describes.

    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python tests/trainer/layers/products.py FILE

Libraries read these variables when they are loaded, so that it takes a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from moejob_trainer.layers.experts import grouped_linear, grouped_mm
from moejob_trainer.layers.precision import needs_float32_products
from moejob_trainer.layers.summed_linear import summed_linear
from moejob_trainer.layers.vocabulary import token_log_probabilities

EXPERTS, ROWS, INPUTS, OUTPUTS = 3, 40, 64, 96
BOUNDS = torch.tensor([0, 9, 9, ROWS], dtype=torch.int32)


def compute_products() -> dict[str, Tensor]:
    """Return each product and gradient under "ours ..." and, where torch has its own, under "torch ..."."""
    torch.manual_seed(3)
    rows, upstream = torch.randn(ROWS, INPUTS).bfloat16(), torch.randn(ROWS, OUTPUTS).bfloat16()
    weights, bias = torch.randn(EXPERTS, OUTPUTS, INPUTS).bfloat16(), torch.randn(OUTPUTS).bfloat16()
    grouped = _with_gradients(lambda x, w: grouped_linear(x, w, BOUNDS), [rows, weights], upstream)
    dense = _with_gradients(summed_linear, [rows, weights[0], bias], upstream)
    scores = _with_gradients(_log_probabilities, [rows, weights[0]], torch.ones(ROWS))
    offsets = BOUNDS[1:]
    torchs_grouped = [
        grouped_mm(rows, weights.transpose(1, 2), offs=offsets),
        grouped_mm(upstream, weights, offs=offsets),
        grouped_mm(upstream.t(), rows, offs=offsets),
    ]
    torchs_dense = _with_gradients(functional.linear, [rows, weights[0], bias], upstream)
    wide = _with_gradients(_plain_log_probabilities, [rows.float(), weights[0].float()], torch.ones(ROWS))
    return {
        "is widened": torch.tensor([needs_float32_products(rows)]),
        **{f"ours grouped {n}": tensor for n, tensor in enumerate(grouped)},
        **{f"torch grouped {n}": tensor for n, tensor in enumerate(torchs_grouped)},
        **{f"ours dense {n}": tensor for n, tensor in enumerate(dense)},
        **{f"torch dense {n}": tensor for n, tensor in enumerate(torchs_dense)},
        **{f"ours scores {n}": tensor for n, tensor in enumerate(scores)},
        **{f"torch scores {n}": tensor for n, tensor in enumerate(wide)},
    }


def _with_gradients(function: Callable[..., Tensor], tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
    learned = [tensor.clone().requires_grad_() for tensor in tensors]
    output = function(*learned)
    return [output.detach(), *torch.autograd.grad(output, learned, upstream)]


def _log_probabilities(hidden: Tensor, weight: Tensor) -> Tensor:
    labels = torch.arange(ROWS)
    return token_log_probabilities(hidden, weight, labels, vocabulary=OUTPUTS, chunk_tokens=16)[0]


def _plain_log_probabilities(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.t()).log_softmax(-1)[torch.arange(ROWS), torch.arange(ROWS)]


if __name__ == "__main__":
    save_file({name: tensor.contiguous() for name, tensor in compute_products().items()}, sys.argv[1])
