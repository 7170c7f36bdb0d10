"""Normalisation and the activations of experts, against Transformers and against numerical gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from moejob_trainer.layers.activation import clamped_swiglu, swiglu
from moejob_trainer.layers.norm import RMSNorm, rms_norm
from trainer.tolerance import assert_all_close

Activation = Callable[[Tensor, Tensor | None], Tensor]


@pytest.mark.parametrize("theirs", [Qwen3MoeRMSNorm, DeepseekV3RMSNorm, GptOssRMSNorm])
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 1.6e-2)], ids=["float32", "bf16"]
)
def test_a_norm_is_that_of_transformers(theirs: type[nn.Module], dtype: torch.dtype, within: float) -> None:
    weight, x, upstream = torch.randn(24).to(dtype), torch.randn(5, 3, 24).to(dtype), torch.randn(5, 3, 24).to(dtype)
    modules: list[Any] = [theirs(24, eps=1e-5).to(dtype), RMSNorm(24, eps=1e-5).to(dtype)]
    results = []
    for module in modules:
        leaf = x.clone().requires_grad_()
        module.load_state_dict({"weight": weight})
        output = module(leaf)
        results.append([output.detach(), *torch.autograd.grad(output, [leaf, module.weight], upstream)])
    assert results[1][0].dtype is dtype
    assert_all_close(results[1], results[0], within=within)


def test_the_numerical_gradients_of_a_norm_agree() -> None:
    x, weight = torch.randn(4, 6).double().requires_grad_(), torch.randn(6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-5), [x, weight])


def test_a_norm_takes_rows_of_zeros_no_rows_and_strided_rows() -> None:
    weight = torch.randn(6)
    assert torch.equal(rms_norm(torch.zeros(2, 6), weight, 1e-5), torch.zeros(2, 6))
    assert rms_norm(torch.zeros(0, 6), weight, 1e-5).shape == (0, 6)
    x = torch.randn(6, 4).t()
    assert_all_close([rms_norm(x, weight, 1e-5)], [rms_norm(x.contiguous(), weight, 1e-5)], within=1e-6)


@pytest.mark.parametrize("weighted", [True, False], ids=["with probabilities", "without"])
def test_swiglu_is_silu_of_the_gate_times_the_rest(weighted: bool) -> None:
    gate_up, probabilities = torch.randn(7, 2, 5), torch.rand(7)
    expected = functional.silu(gate_up[:, 0].double()) * gate_up[:, 1].double()
    expected = expected * probabilities.double()[:, None] if weighted else expected
    assert_all_close([swiglu(gate_up, probabilities if weighted else None)], [expected], within=2e-7)


def test_the_clamped_activation_is_that_of_gpt_oss() -> None:
    config = GptOssConfig(hidden_size=8, intermediate_size=5, num_local_experts=2)
    # Far enough out to meet every clamp.
    gate_up, upstream = torch.randn(40, 2, 5) * 8, torch.randn(40, 5)
    leaves = [gate_up.clone().requires_grad_() for _ in range(2)]
    # Theirs has gate and up in turns.
    theirs = GptOssExperts(config)._apply_gate(leaves[0].transpose(1, 2).flatten(1))  # noqa: SLF001
    ours = clamped_swiglu(leaves[1])
    gradients = [torch.autograd.grad(out, leaf, upstream)[0] for out, leaf in zip((theirs, ours), leaves, strict=True)]
    assert_all_close([ours.detach(), gradients[1]], [theirs.detach(), gradients[0]], within=1e-6)


@pytest.mark.parametrize("activation", [swiglu, clamped_swiglu])
def test_the_numerical_gradients_of_activations_agree(activation: Activation) -> None:
    gate_up, probabilities = torch.randn(4, 2, 3).double().requires_grad_(), torch.rand(4).double().requires_grad_()
    assert torch.autograd.gradcheck(activation, [gate_up, probabilities])


@pytest.mark.parametrize("activation", [swiglu, clamped_swiglu])
def test_bfloat16_is_rounded_once(activation: Activation) -> None:
    gate_up, probabilities = torch.randn(50, 2, 16).bfloat16(), torch.rand(50)
    assert torch.equal(activation(gate_up, probabilities), activation(gate_up.float(), probabilities).bfloat16())


@pytest.mark.parametrize("activation", [swiglu, clamped_swiglu])
def test_no_rows_have_no_activation_and_a_gradient(activation: Activation) -> None:
    gate_up, probabilities = torch.randn(0, 2, 3).requires_grad_(), torch.rand(0).requires_grad_()
    gradients = torch.autograd.grad(activation(gate_up, probabilities).sum(), [gate_up, probabilities])
    assert [gradient.shape for gradient in gradients] == [(0, 2, 3), (0,)]
