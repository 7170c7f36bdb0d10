"""Log-probabilities of the next token straight from the hidden state, without the row's logits.

Logits of a whole row would be larger than all other activations: 8192 tokens of 151936 words take 5 GB in float32. The
forward pass has them for a few tokens at a time. Where memory allows, it keeps their slopes, in the type of the hidden
states; else the backward pass computes logits again, for a few words of the vocabulary at a time, with the normaliser
of the forward pass: a fourth product beside three. Either way each word's gradient is one product over all tokens,
rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moejob_trainer.layers.kernels import find_kernels
from moejob_trainer.layers.precision import at_least_float32, needs_float32_products

# Whole tiles of a matrix product.
WORDS_MULTIPLE = 128


def token_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocabulary: int,
    chunk_tokens: int,
    keeps_slopes: bool = False,
    learns_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    sums_hidden_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """The log-probability of each label, and the entropy of each distribution; float32 [t] both.

    hidden [t, h] and labels int64 [t], the same on every rank of the tensor group; weight [V'/tp, h], this rank's part.
    Words from `vocabulary` on do not exist. A negative label has log-probability 0 and no gradient; a label
    from `vocabulary` on gives nan. The gradient of `hidden` is summed over the group unless the caller does it.
    `keeps_slopes`: the backward pass uses kept slopes instead of computing logits again. `learns_entropy`: entropy has
    a gradient too; slopes are never kept then.
    """
    is_learned = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    vocabulary_part = _VocabularyPart(
        existing=min(max(vocabulary - _group_rank(group) * weight.shape[0], 0), weight.shape[0]),
        first=_group_rank(group) * weight.shape[0],
        vocabulary=vocabulary,
        chunk_tokens=chunk_tokens,
        keeps_slopes=keeps_slopes and is_learned and not learns_entropy,
        learns_entropy=learns_entropy,
        temperature=temperature,
        group=group,
        sums_hidden_gradient=sums_hidden_gradient,
    )
    log_probabilities, entropy = _TokenLogProbabilities.apply(hidden, weight, labels, vocabulary_part)
    return log_probabilities, entropy


def likeliest_tokens(
    hidden: Tensor,
    weight: Tensor,
    *,
    vocabulary: int,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the word with the highest logit for each hidden state, the first of equal ones; int64 [t].

    hidden [t, h], the same on every rank of the tensor group; weight [V'/tp, h], this rank's part.
    """
    first = _group_rank(group) * weight.shape[0]
    existing = min(max(vocabulary - first, 0), weight.shape[0])
    highest = at_least_float32(hidden.new_full((len(hidden),), -math.inf))
    tokens = torch.full((len(hidden),), vocabulary, dtype=torch.int64, device=hidden.device)
    if existing:
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = _wide_product(hidden[chunk], weight[:existing].t())
            highest[chunk], tokens[chunk] = logits.max(-1)
        tokens += first
    if group is None or group.size() == 1:
        return tokens
    over_all = highest.clone()
    dist.all_reduce(over_all, dist.ReduceOp.MAX, group)
    tokens = tokens.where(highest == over_all, vocabulary)
    dist.all_reduce(tokens, dist.ReduceOp.MIN, group)
    return tokens


@dataclass(frozen=True)
class _VocabularyPart:
    """The part of the vocabulary that this rank holds, and how to go through it."""

    existing: int
    first: int
    vocabulary: int
    chunk_tokens: int
    keeps_slopes: bool
    learns_entropy: bool
    temperature: float
    group: dist.ProcessGroup | None
    sums_hidden_gradient: bool

    def tiled_rows(self, weight: Tensor) -> Tensor:
        """Return the rows up to the end of the last word's tile: a product of whole tiles is faster."""
        return weight[: _round_to_tiles(self.existing)]

    def allocate_slopes(self, hidden: Tensor, weight: Tensor) -> Tensor | None:
        """Return memory for a slope of each token and word, where they are kept. [t, words]"""
        return hidden.new_empty(len(hidden), len(self.tiled_rows(weight))) if self.keeps_slopes else None

    def chunk_words(self, tokens: int) -> int:
        """Return the words whose logits, for all tokens, take the memory of all words for `chunk_tokens` tokens."""
        return max(WORDS_MULTIPLE, _round_to_tiles(math.ceil(self.existing * self.chunk_tokens / max(tokens, 1))))


def _round_to_tiles(words: int) -> int:
    return math.ceil(words / WORDS_MULTIPLE) * WORDS_MULTIPLE


class _TokenLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, hidden: Tensor, weight: Tensor, labels: Tensor, words: _VocabularyPart
    ) -> tuple[Tensor, Tensor]:
        slopes = words.allocate_slopes(hidden, weight)
        chunks = zip(
            hidden.split(words.chunk_tokens),
            (labels - words.first).split(words.chunk_tokens),
            repeat(None) if slopes is None else slopes.split(words.chunk_tokens),
            strict=False,
        )
        chunk_terms = [
            _read_chunk(chunk, words.tiled_rows(weight), places, words, slope_memory)
            for chunk, places, slope_memory in chunks
        ]
        normaliser, entropy, label_logit = torch.cat(chunk_terms, dim=1)
        context.words = words
        context.save_for_backward(hidden, weight, labels, normaliser, entropy if words.learns_entropy else None, slopes)
        if not words.learns_entropy:
            context.mark_non_differentiable(entropy)
        log_probabilities = (label_logit - normaliser).masked_fill(labels < 0, 0)
        return log_probabilities.masked_fill(labels >= words.vocabulary, float("nan")), entropy

    @staticmethod
    def backward(context: Any, gradient: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, labels, normaliser, entropy, slopes = context.saved_tensors
        words: _VocabularyPart = context.words
        needed = _NeededGradients(*context.needs_input_grad[:2])
        gradient = gradient.masked_fill(labels < 0, 0) / words.temperature
        if slopes is None:
            uncertainty = None if entropy is None else EntropyTerms(entropy, of_entropy / words.temperature)
            forward_terms = _ForwardTerms(labels, normaliser, uncertainty)
            gradients = _recompute_gradients(hidden, weight, forward_terms, gradient, words, needed)
        else:
            gradients = _gradients_from_slopes(slopes, hidden, weight, gradient, words, needed)
        return _sum_hidden_gradient(gradients[0], hidden.dtype, words), gradients[1], None, None


class EntropyTerms(NamedTuple):
    """The entropy of each token, and the gradient that comes back for it. [t] both"""

    entropy: Tensor
    gradient: Tensor


class TokenTerms(NamedTuple):
    """Each token's label as a place among some words, its normaliser, and the gradient of its log-probability. [t]"""

    places: Tensor
    normaliser: Tensor
    gradient: Tensor
    uncertainty: EntropyTerms | None = None


class _ForwardTerms(NamedTuple):
    """The forward pass of each token."""

    labels: Tensor
    normaliser: Tensor
    uncertainty: EntropyTerms | None


class _NeededGradients(NamedTuple):
    """The gradients that are asked for."""

    hidden: bool
    weight: bool


def _gradients_from_slopes(
    slopes: Tensor, hidden: Tensor, weight: Tensor, gradient: Tensor, words: _VocabularyPart, needed: _NeededGradients
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden states and weights from what was kept: each token's slopes times its `gradient`."""
    hidden_gradient = weight_gradient = None
    word_rows = words.tiled_rows(weight)
    if needed.hidden:
        hidden_gradient = _wide_product(slopes, word_rows) * gradient[:, None]
    if needed.weight:
        weight_gradient = torch.zeros_like(weight)
        scaled_hidden = (hidden * gradient[:, None]).to(hidden.dtype)
        _write_product(slopes.t(), scaled_hidden, weight_gradient[: len(word_rows)])
    return hidden_gradient, weight_gradient


def _recompute_gradients(
    hidden: Tensor,
    weight: Tensor,
    forward_terms: _ForwardTerms,
    gradient: Tensor,
    words: _VocabularyPart,
    needed: _NeededGradients,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden states and weights, with the slopes of some words at a time."""
    hidden_gradient = torch.zeros_like(at_least_float32(hidden)) if needed.hidden else None
    weight_gradient = torch.zeros_like(weight) if needed.weight else None
    rows, step = words.tiled_rows(weight), words.chunk_words(hidden.shape[0])
    for first in range(0, words.existing, step):
        word_rows = rows[first : first + step]
        logits = _wide_product(hidden, word_rows.t())
        tokens = TokenTerms(
            forward_terms.labels - words.first - first, forward_terms.normaliser, gradient, forward_terms.uncertainty
        )
        existing = min(words.existing - first, len(word_rows))
        slope = _compute_slope(logits, tokens, existing, words.temperature, hidden.dtype)
        del logits
        if hidden_gradient is not None:
            hidden_gradient += _wide_product(slope, word_rows)
        if weight_gradient is not None:
            _write_product(slope.t(), hidden, weight_gradient[first : first + len(word_rows)])
        # Before the next logits exist.
        del slope
    return hidden_gradient, weight_gradient


def _read_chunk(
    hidden: Tensor, weight: Tensor, places: Tensor, words: _VocabularyPart, slope_memory: Tensor | None
) -> Tensor:
    """Normaliser, entropy and logit of the label of each token; slopes for a gradient of 1 in `slope_memory`. [3, t]"""
    if words.existing == 0:
        zeros = torch.zeros_like(at_least_float32(hidden[:, 0]))
        return torch.stack(_combine_over_group(zeros - math.inf, zeros, zeros, zeros, words.group))
    logits = _wide_product(hidden, weight.t())
    maximum, total, weighted, label_logit = _compute_statistics(logits, places, words)
    normaliser, entropy, label_logit = _combine_over_group(maximum, total, weighted, label_logit, words.group)
    if slope_memory is not None:
        tokens = TokenTerms(places, normaliser, torch.ones_like(normaliser))
        _compute_slope(logits, tokens, words.existing, words.temperature, hidden.dtype, slope_memory)
    return torch.stack([normaliser, entropy, label_logit])


def _compute_statistics(logits: Tensor, places: Tensor, words: _VocabularyPart) -> Tensor:
    """Return `plain_statistics`, by a kernel where one takes these logits. [4, t]"""
    fused = find_kernels("vocabulary", logits)
    if fused and fused.can_take_logits(logits):
        statistics: Tensor = fused.compute_statistics(logits, places, words.existing, words.temperature)
        return statistics
    return plain_statistics(logits, places, words.existing, words.temperature)


def plain_statistics(logits: Tensor, places: Tensor, existing: int, temperature: float) -> Tensor:
    """Return the largest logit m, the sums of exp(logit - m) and of logit exp(logit - m), and the logit of the label.

    Only the first `existing` words of logits [t, words] exist. A label whose place [t] is not among them gets 0. [4, t]
    """
    logits = logits[:, :existing] if temperature == 1 else logits[:, :existing] / temperature
    maximum = logits.amax(-1)
    is_here = (places >= 0) & (places < existing)
    label_logit = logits.gather(1, places.clamp(0, existing - 1)[:, None])[:, 0].masked_fill(~is_here, 0)
    exponentials = (logits - maximum[:, None]).exp_()
    total = exponentials.sum(-1)
    weighted = exponentials.mul_(logits).sum(-1)
    return torch.stack([maximum, total, weighted, label_logit])


def _combine_over_group(
    maximum: Tensor, total: Tensor, weighted: Tensor, label_logit: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Normaliser (logsumexp), entropy and the label's logit over the words of all ranks."""
    if group is not None and group.size() > 1:
        largest = maximum.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shrunk = (maximum - largest).exp()
        sums = torch.stack([total * shrunk, weighted * shrunk, label_logit])
        dist.all_reduce(sums, group=group)
        maximum, (total, weighted, label_logit) = largest, sums
    normaliser = maximum + total.log()
    return normaliser, normaliser - weighted / total, label_logit


def _compute_slope(
    logits: Tensor,
    tokens: TokenTerms,
    existing: int,
    temperature: float,
    dtype: torch.dtype,
    slope_memory: Tensor | None = None,
) -> Tensor:
    """Return `plain_slope` in the `dtype` of the product that follows, in `slope_memory` where given. [t, words]"""
    fused = find_kernels("vocabulary", logits)
    if fused and fused.can_take_logits(logits):
        slope: Tensor = fused.compute_slope(logits, tokens, existing, temperature, dtype, slope_memory)
        return slope
    slope = plain_slope(logits, tokens, existing, temperature, dtype)
    return slope if slope_memory is None else slope_memory.copy_(slope)


def plain_slope(logits: Tensor, tokens: TokenTerms, existing: int, temperature: float, dtype: torch.dtype) -> Tensor:
    """The gradient by each logit over the temperature, in `dtype`. [t, words]

    With p the probability of a word, g the gradient of the token and e the gradient of its entropy H, the slope is
    g [word is the label] - p (g + e (log p + H)). It is 0 for the words in logits [t, words] behind the first
    `existing`. Logits may be overwritten.
    """
    logits[:, existing:] = -math.inf
    tempered = logits if temperature == 1 else logits.div_(temperature)
    slope = tempered.sub_(tokens.normaliser[:, None])
    if tokens.uncertainty is None:
        slope = slope.exp_().mul_(-tokens.gradient[:, None])
    else:
        entropy, of_entropy = tokens.uncertainty
        surprise = (slope[:, :existing] + entropy[:, None]).mul_(of_entropy[:, None]).add_(tokens.gradient[:, None])
        slope = slope.exp_()
        slope[:, :existing] *= -surprise
    is_here = (tokens.places >= 0) & (tokens.places < existing)
    slope.scatter_add_(1, tokens.places.clamp(0, existing - 1)[:, None], (tokens.gradient * is_here)[:, None])
    return slope.to(dtype)


def _wide_product(x: Tensor, y: Tensor) -> Tensor:
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        # The float32 that the product is summed in, not rounded in between.
        return torch.mm(x, y, out_dtype=torch.float32)
    if needs_float32_products(x):
        return at_least_float32(x) @ at_least_float32(y)
    return at_least_float32(x @ y)


def _sum_hidden_gradient(gradient: Tensor | None, dtype: torch.dtype, words: _VocabularyPart) -> Tensor | None:
    if gradient is None:
        return None
    if words.sums_hidden_gradient and words.group is not None and words.group.size() > 1:
        dist.all_reduce(gradient, group=words.group)
    return gradient.to(dtype)


def _write_product(x: Tensor, y: Tensor, target: Tensor) -> None:
    if needs_float32_products(x):
        target.copy_(at_least_float32(x) @ at_least_float32(y))
    else:
        torch.mm(x, y, out=target)


def _group_rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()
