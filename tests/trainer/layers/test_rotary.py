"""Rotary embeddings, against Transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig

from moejob_trainer.layers.rotary import LinearScaling, Llama3Scaling, Rotary, YarnScaling, rotate_heads
from trainer.tolerance import assert_all_close

# Far positions are where a wrong last digit of a frequency shows.
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 77, 4095, 40000, 131071])
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


def _angles(module: torch.nn.Module) -> tuple[Tensor, Tensor]:
    cos, sin = module(torch.zeros(1), POSITIONS[None])
    return cos[0], sin[0]


def llama(theta: float, **scaling: Any) -> tuple[Tensor, Tensor]:
    config = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters={"rope_theta": theta, **scaling})
    return _angles(modeling_llama.LlamaRotaryEmbedding(config))


def deepseek(**scaling: Any) -> tuple[Tensor, Tensor]:
    parameters = {"rope_theta": 10000.0, **scaling}
    config = DeepseekV3Config(qk_rope_head_dim=64, max_position_embeddings=163840, rope_parameters=parameters)
    return _angles(modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config))


def gpt_oss() -> tuple[Tensor, Tensor]:
    """As its config.json has it, untruncated ramp included."""
    parameters = {
        **YARN,
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    return _angles(modeling_gpt_oss.GptOssRotaryEmbedding(GptOssConfig(head_dim=64, rope_parameters=parameters)))


def glm() -> tuple[Tensor, Tensor]:
    parameters = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    config = Glm4MoeConfig(hidden_size=256, num_attention_heads=2, rope_parameters=parameters)
    return _angles(modeling_glm4_moe.Glm4MoeRotaryEmbedding(config))


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("rotary", "expected"),
    [
        pytest.param(Rotary(64, 10000.0), llama(10000.0, rope_type="default"), id="plain"),
        pytest.param(Rotary(64, 5e6), llama(5e6, rope_type="default"), id="another theta"),
        pytest.param(Rotary(64, 1e4, LinearScaling(4.0)), llama(1e4, rope_type="linear", factor=4.0), id="linear"),
        pytest.param(
            Rotary(64, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
            llama(5e5, rope_type="llama3", **LLAMA3),
            id="llama 3.1",
        ),
        pytest.param(Rotary(64, 1e4, YarnScaling(40.0, 4096)), deepseek(**YARN), id="yarn"),
        pytest.param(
            Rotary(64, 1e4, YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)),
            deepseek(**YARN, mscale=1.0, mscale_all_dim=1.0),
            id="yarn of DeepSeek-V3",
        ),
        pytest.param(
            Rotary(64, 1e4, YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=1.2)),
            deepseek(**YARN, mscale=0.707, mscale_all_dim=1.2),
            id="yarn with two scales",
        ),
        pytest.param(
            Rotary(64, 1e4, YarnScaling(40.0, 4096, attention_factor=0.8)),
            deepseek(**YARN, attention_factor=0.8),
            id="yarn with a given factor",
        ),
        pytest.param(Rotary(64, 150000.0, YarnScaling(32.0, 4096, truncate=False)), gpt_oss(), id="yarn of gpt-oss"),
        pytest.param(Rotary(64, 1e6), glm(), id="half of the head, GLM"),
    ],
)
def test_angles_are_those_of_transformers(rotary: Rotary, expected: tuple[Tensor, Tensor]) -> None:
    cos, sin = rotary.cosines_and_sines(POSITIONS)
    assert cos.dtype == sin.dtype == torch.float32
    # An angle of 131071 radians is known to 2^-8 only; that the product is the same one is what counts.
    assert_all_close([cos, sin], [x[:, :32] for x in expected], within=1e-6)


def test_halves_turn_as_in_transformers() -> None:
    x, upstream, (cos, sin) = _heads(dim=64)
    theirs, _ = modeling_llama.apply_rotary_pos_emb(x, x, *_doubled(cos, sin))
    _assert_same(rotate_heads(x, cos, sin), theirs, x, upstream)


def test_what_lies_beyond_the_turning_part_stays_as_in_glm() -> None:
    x, upstream, (cos, sin) = _heads(dim=96)
    theirs, _ = modeling_glm4_moe.apply_rotary_pos_emb(x, x, *_doubled(cos, sin))
    _assert_same(rotate_heads(x, cos, sin), theirs, x, upstream)


def test_interleaved_pairs_turn_as_in_deepseek_v3() -> None:
    x, upstream, (cos, sin) = _heads(dim=64)
    theirs, _ = modeling_deepseek_v3.apply_rotary_pos_emb_interleave(x, x, *_doubled(cos, sin))
    _assert_same(Rotary(64, 1e4, interleaved=True).rotate_heads(x, cos, sin), theirs, x, upstream)


def test_interleaved_pairs_score_as_in_deepseek_v2() -> None:
    q, _, (cos, sin) = _heads(dim=64)
    k = torch.randn_like(q)
    turns = torch.complex(cos, sin)[None]
    theirs = modeling_deepseek_v2.apply_rotary_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], turns)
    expected = theirs[0] @ theirs[1].transpose(-1, -2)
    ours = [rotate_heads(x, cos, sin, interleaved=True).transpose(0, 1)[None] for x in (q, k)]
    assert_all_close([ours[0] @ ours[1].transpose(-1, -2)], [expected], within=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_numerical_gradients_agree(interleaved: bool) -> None:
    cos, sin = (x.double() for x in Rotary(4, 100.0).cosines_and_sines(torch.arange(3)))
    x = torch.randn(3, 2, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate_heads(x, cos, sin, interleaved=interleaved), [x])


@given(st.integers(0, 500), st.integers(0, 500), st.booleans())
def test_scores_depend_on_distance_only(position: int, shift: int, interleaved: bool) -> None:
    rotary = Rotary(16, 1000.0, interleaved=interleaved)
    q, k = torch.randn(2, 1, 1, 16).double()

    def score(first: int, second: int) -> Tensor:
        turned = [
            rotary.rotate_heads(x, *(part.double() for part in rotary.cosines_and_sines(torch.tensor([at]))))
            for x, at in ((q, first), (k, second))
        ]
        return (turned[0] * turned[1]).sum()

    assert abs(score(position, position + 7) - score(position + shift, position + shift + 7)) < 2e-3


def test_bfloat16_is_rounded_once() -> None:
    x, _, (cos, sin) = _heads(dim=64)
    assert torch.equal(rotate_heads(x.bfloat16(), cos, sin), rotate_heads(x.bfloat16().float(), cos, sin).bfloat16())


def _heads(dim: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    x = torch.randn(len(POSITIONS), 3, dim).requires_grad_()
    return x, torch.randn_like(x), Rotary(64, 10000.0).cosines_and_sines(POSITIONS)


def _doubled(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


def _assert_same(ours: Tensor, theirs: Tensor, x: Tensor, upstream: Tensor) -> None:
    gradients = [torch.autograd.grad(output, x, upstream)[0] for output in (ours, theirs)]
    assert_all_close([ours, gradients[0]], [theirs, gradients[1]], within=1e-6)
