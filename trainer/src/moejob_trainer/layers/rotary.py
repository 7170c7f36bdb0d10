"""Rotary position embedding and the ways of stretching it to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

import torch
from torch import Tensor

from moejob_trainer.layers.kernels import find_kernels
from moejob_trainer.layers.precision import at_least_float32


@dataclass(frozen=True)
class LinearScaling:
    """Every position divided by a factor."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies are divided by the factor, high ones stay, those between are blended."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN. `attention_factor` is what cosines and sines are multiplied by; absent, the other numbers say it."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class Rotary:
    """The angles by which the first `dim` elements of a head are turned, in pairs.

    A pair is (i, i + dim/2), or (2i, 2i + 1) when `interleaved`, which is how DeepSeek stores its weights.
    """

    dim: int
    theta: float
    scaling: Scaling | None = None
    interleaved: bool = False

    def pair_frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """Radians by which each pair turns from one position to the next. float32 [dim/2]"""
        return _compute_frequencies(self, torch.device(device))

    @property
    def attention_factor(self) -> float:
        """The factor on cosines and sines."""
        return _yarn_attention_factor(self.scaling) if isinstance(self.scaling, YarnScaling) else 1.0

    def cosines_and_sines(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at `positions` [t]. float32 [t, dim/2] each"""
        radians = positions[:, None].float() * self.pair_frequencies(positions.device)
        return radians.cos() * self.attention_factor, radians.sin() * self.attention_factor

    def rotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`rotate_heads` with this model's pairs."""
        return rotate_heads(x, cos, sin, interleaved=self.interleaved)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """The heads `x` [t, n, d] turned by the angles whose cosines and sines [t, dim/2] are given.

    Elements beyond `dim` stay. Interleaved pairs come out as halves: queries and keys agree on it, and nothing else
    sees the order.
    """
    fused = find_kernels("rotary", x)
    if fused:
        rotated_heads: Tensor = fused.rotate_heads(x, cos, sin, interleaved)
        return rotated_heads
    return plain_rotate_heads(x, cos, sin, interleaved=interleaved)


def plain_rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """`rotate_heads` in the operations of torch."""
    dim = 2 * cos.shape[-1]
    turning, staying = at_least_float32(x[..., :dim]), x[..., dim:]
    first, second = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, staying], -1) if dim < x.shape[-1] else turned


# On the host, once: the last digit of a power differs between devices, and a far position multiplies it.
@lru_cache(maxsize=64)
def _compute_frequencies(rotary: Rotary, device: torch.device) -> Tensor:
    powers = rotary.theta ** (torch.arange(0, rotary.dim, 2).float() / rotary.dim)
    return _scale_frequencies(powers, rotary).to(device)


# In the order of Transformers' operations, for the same reason.
def _scale_frequencies(powers: Tensor, rotary: Rotary) -> Tensor:
    match rotary.scaling:
        case None:
            return 1.0 / powers
        case LinearScaling(factor):
            return 1.0 / powers / factor
        case Llama3Scaling() as scaling:
            return _scale_llama3(1.0 / powers, scaling)
        case YarnScaling() as scaling:
            return _scale_yarn(powers, scaling, rotary)
        case _:
            assert_never(rotary.scaling)


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_context / (2 * math.pi / frequencies)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


def _scale_yarn(powers: Tensor, scaling: YarnScaling, rotary: Rotary) -> Tensor:
    low, high = (
        rotary.dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    # A ramp of no width would divide by zero.
    width = high - low if high != low else 0.001
    kept_share = 1 - ((torch.arange(rotary.dim // 2).float() - low) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept_share) + 1.0 / powers * kept_share


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor on attention for longer contexts; DeepSeek also multiplies its scale by the square of it."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
