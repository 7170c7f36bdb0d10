"""Statistics of logits in one pass over them, and their gradient in another. Both compute in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from moejob_trainer.layers.vocabulary import TokenTerms

BLOCK = 4096


def can_take_logits(logits: Tensor) -> bool:
    """Return whether float32 loses none of their digits."""
    return logits.dtype is torch.float32


def compute_statistics(logits: Tensor, places: Tensor, existing: int, temperature: float) -> Tensor:
    """Twin of `vocabulary.plain_statistics`; logits stay as they are."""
    tokens, words = logits.shape
    sums = logits.new_empty(4, tokens)
    if tokens:
        tensors = (logits.contiguous(), places.contiguous(), sums)
        _statistics_kernel[(tokens,)](*tensors, tokens, words, existing, 1 / temperature, BLOCK, num_warps=8)
    return sums


def compute_slope(
    logits: Tensor,
    terms: TokenTerms,
    existing: int,
    temperature: float,
    dtype: torch.dtype,
    slope_memory: Tensor | None = None,
) -> Tensor:
    """Twin of `vocabulary.plain_slope`; in `slope_memory`, or else in place where logits have that `dtype`."""
    tokens, words = logits.shape
    logits = logits.contiguous()
    output = slope_memory
    if output is None:
        output = logits if logits.dtype is dtype else torch.empty_like(logits, dtype=dtype)
    if logits.numel():
        # Without a gradient of entropy its two rows are not read.
        uncertainty = (terms.normaliser, terms.gradient) if terms.uncertainty is None else terms.uncertainty
        rows = (row.contiguous() for row in (terms.places, terms.normaliser, terms.gradient, *uncertainty))
        grid = (tokens, triton.cdiv(words, BLOCK))
        learns_entropy = terms.uncertainty is not None
        _slope_kernel[grid](logits, *rows, output, words, existing, 1 / temperature, learns_entropy, BLOCK, num_warps=8)
    return output


# Loads are bounded by `words`, which is a multiple of whole vectors more often than `existing` is.


@triton.jit(do_not_specialize=["tokens", "existing"])
def _statistics_kernel(logits, places, sums, tokens, words, existing, factor, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * words
    largest = -float("inf")
    total = tl.zeros((block,), tl.float32)
    weighted = tl.zeros((block,), tl.float32)
    # The next blocks are on their way while one is reduced.
    for first in tl.range(0, existing, block, num_stages=3):
        word = first + tl.arange(0, block)
        exists = word < existing
        logit = tl.load(row + word, mask=word < words, other=0.0) * factor
        larger = tl.maximum(largest, tl.max(tl.where(exists, logit, -float("inf")), 0))
        shrunk = tl.exp(largest - larger)
        exponential = tl.where(exists, tl.exp(logit - larger), 0.0)
        total = total * shrunk + exponential
        weighted = weighted * shrunk + tl.where(exists, exponential * logit, 0.0)
        largest = larger
    place = tl.load(places + token)
    label_logit = tl.load(row + place, mask=(place >= 0) & (place < existing), other=0.0) * factor
    tl.store(sums + token, largest)
    tl.store(sums + tokens + token, tl.sum(total, 0))
    tl.store(sums + 2 * tokens + token, tl.sum(weighted, 0))
    tl.store(sums + 3 * tokens + token, label_logit)


@triton.jit(do_not_specialize=["existing"])
def _slope_kernel(
    logits,
    places,
    normaliser,
    gradient,
    entropy,
    entropy_gradient,
    output,
    words,
    existing,
    factor,
    learns_entropy: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * block + tl.arange(0, block)
    place = tl.load(places + token)
    upstream = tl.load(gradient + token)
    logit = tl.load(logits + token * words + word, mask=word < words, other=0.0) * factor
    log_probability = logit - tl.load(normaliser + token)
    probability = tl.where(word < existing, tl.exp(log_probability), 0.0)
    # A place among words that do not exist is no place.
    chosen = tl.where((word == place) & (word < existing), 1.0, 0.0)
    value = (chosen - probability) * upstream
    if learns_entropy:
        surprise = tl.where(word < existing, log_probability + tl.load(entropy + token), 0.0)
        value -= probability * surprise * tl.load(entropy_gradient + token)
    tl.store(output + token * words + word, value.to(output.dtype.element_ty), mask=word < words)
