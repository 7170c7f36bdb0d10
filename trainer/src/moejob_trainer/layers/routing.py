"""Routing: the experts of each token, their weights, and the spread of tokens over experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moejob_trainer.layers.kernels import find_kernels

# Added to sums of sigmoids, as in Transformers: all of them may be zero.
SMALLEST_SUM = 1e-20


class Scoring(StrEnum):
    """Function from logits to the scores that choose and weigh experts."""

    SOFTMAX = "softmax"
    """Over all experts: Mixtral, Qwen, DeepSeek-V2."""
    SELECTED_SOFTMAX = "selected-softmax"
    """Over the chosen experts: gpt-oss."""
    SIGMOID = "sigmoid"
    """Each expert for itself: DeepSeek-V3, GLM-4.5."""


@dataclass(frozen=True)
class Routing:
    """The numbers of one model's router."""

    experts: int
    per_token: int
    scoring: Scoring = Scoring.SOFTMAX
    renormalized: bool = False
    """Whether the weights of a token are divided by their sum."""
    scale: float = 1.0
    """The last factor of weights."""
    groups: int = 1
    kept_groups: int = 1
    """Tokens choose among the experts of this many of the `groups`."""
    dtype: torch.dtype = torch.float32
    """The type that scores are computed in."""

    def __post_init__(self) -> None:
        if self.experts % self.groups or not 1 <= self.kept_groups <= self.groups:
            raise ValueError(
                f"{self.experts} experts cannot be {self.groups} groups of which {self.kept_groups} are kept"
            )
        if not 1 <= self.per_token <= self.experts // self.groups * self.kept_groups:
            reachable = self.experts // self.groups * self.kept_groups
            raise ValueError(f"a token cannot choose {self.per_token} of {reachable} experts")


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The router's linear map, computed in `dtype` when given. x [t, h], weight [E, h], bias [E] -> [t, E]"""
    dtype = dtype or x.dtype
    logits: Tensor = _WideLinear.apply(x, weight, dtype)
    return logits if bias is None else logits + bias.to(dtype)


class _WideLinear(torch.autograd.Function):
    """x W in `dtype`. The backward pass makes wide copies of the tokens again: kept, they would outweigh the logits."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        context.save_for_backward(x, weight)
        fused = _product_kernels(x, weight, dtype)
        product: Tensor = fused.wide_product(x, weight) if fused else plain_wide_product(x, weight, dtype)
        return product

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = context.saved_tensors
        fused = _product_kernels(x, weight, gradient.dtype)
        if fused:
            gradient = fused.split_gradient(gradient)
        of_input = fused.input_gradient if fused else plain_input_gradient
        of_weight = fused.weight_gradient if fused else plain_weight_gradient
        x_gradient = of_input(gradient, weight) if context.needs_input_grad[0] else None
        weight_gradient = of_weight(gradient, x) if context.needs_input_grad[1] else None
        return x_gradient, weight_gradient, None


def plain_wide_product(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [t, h] by weight [E, h], both widened. [t, E]"""
    return functional.linear(x.to(dtype), weight.to(dtype))


def plain_input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """The wide gradient of the logits, back through the weight, rounded once. [t, E], [E, h] -> [t, h]"""
    return (gradient @ weight.to(gradient.dtype)).to(weight.dtype)


def plain_weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """The wide gradient of the logits by the tokens, rounded once. [t, E], [t, h] -> [E, h]"""
    return (gradient.t() @ x.to(gradient.dtype)).to(x.dtype)


def _product_kernels(x: Tensor, weight: Tensor, dtype: torch.dtype) -> ModuleType | None:
    """The kernels for this product: of factors that are kept in bfloat16, in float32."""
    is_narrow = x.dtype is weight.dtype is torch.bfloat16
    return find_kernels("routing", x) if is_narrow and dtype is torch.float32 else None


def route_tokens(
    logits: Tensor, routing: Routing, *, selection_bias: Tensor | None = None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts int64 [t, k] that each token goes to, and their weights [t, k] in the routing's precision.

    `selection_bias` [E] moves the choice of experts, but not their weights. `chosen` [t, k] replays an earlier choice.
    """
    if selection_bias is None and (fused := _routing_kernels(logits, routing)):
        renormalized = routing.renormalized or routing.scoring is Scoring.SELECTED_SOFTMAX
        experts_and_weights: tuple[Tensor, Tensor] = fused.route_tokens(
            logits, routing.per_token, routing.scale, renormalized, chosen
        )
        return experts_and_weights
    return plain_route_tokens(logits, routing, selection_bias=selection_bias, chosen=chosen)


def plain_route_tokens(
    logits: Tensor, routing: Routing, *, selection_bias: Tensor | None = None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`route_tokens` in the operations of torch."""
    logits = logits.to(routing.dtype)
    if routing.scoring is Scoring.SELECTED_SOFTMAX:
        chosen = _choose_experts(logits, routing, selection_bias) if chosen is None else chosen
        return chosen, logits.gather(1, chosen).softmax(-1) * routing.scale
    scores = logits.sigmoid() if routing.scoring is Scoring.SIGMOID else logits.softmax(-1)
    chosen = _choose_experts(scores, routing, selection_bias) if chosen is None else chosen
    weights = scores.gather(1, chosen)
    if routing.renormalized:
        weights = weights / _positive_sum(weights, routing)
    return chosen, weights if routing.scale == 1.0 else weights * routing.scale


def _routing_kernels(logits: Tensor, routing: Routing) -> ModuleType | None:
    """The kernels for softmax over all experts or the chosen ones, in float32."""
    is_softmax = routing.scoring is not Scoring.SIGMOID and routing.kept_groups == routing.groups
    is_wide = logits.dtype is routing.dtype is torch.float32
    return find_kernels("routing", logits) if is_softmax and is_wide else None


def balancing_scores(logits: Tensor, routing: Routing) -> Tensor:
    """Return each expert's share in each token for balancing losses: positive, and one in sum. [t, E]"""
    logits = logits.to(routing.dtype)
    if routing.scoring is not Scoring.SIGMOID:
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / _positive_sum(scores, routing)


def document_counts(
    experts: Tensor, segments: Tensor | None, documents: int, expert_count: int, counted: Tensor | None = None
) -> Tensor:
    """Count the choices [t, k] that fell on each expert, of the tokens that are `counted` (bool [t]), in each document.

    `segments` [t] says which one a token belongs to; without, all belong to the first. float32 [documents, E]
    """
    fused = find_kernels("routing", experts)
    count = fused.document_counts if fused else plain_document_counts
    counts: Tensor = count(experts, segments, documents, expert_count, counted)
    return counts


def plain_document_counts(
    experts: Tensor, segments: Tensor | None, documents: int, expert_count: int, counted: Tensor | None
) -> Tensor:
    """`document_counts` in the operations of torch."""
    segments = experts.new_zeros(len(experts)) if segments is None else segments
    counts = torch.zeros(documents, expert_count + 1, device=experts.device)
    ones = torch.ones_like(segments) if counted is None else counted
    places = segments.long()[:, None] * (expert_count + 1) + experts
    counts.view(-1).index_add_(0, places.flatten(), ones.float()[:, None].expand(experts.shape).flatten())
    # A choice of none, `expert_count`, is no choice.
    return counts[:, :expert_count]


def switch_loss(scores: Tensor, counts: Tensor, tokens: Tensor | float, per_token: int) -> Tensor:
    """Return these tokens' part of the Switch Transformer's balancing loss; one when all are balanced.

    scores [t, E] of the tokens here (zero for tokens that do not count); counts [E] and `tokens` of all tokens that are
    balanced together, here and elsewhere: the sum over the ranks is the loss in every layout.
    """
    experts = scores.shape[1]
    return (scores.sum(0) * counts).sum() * experts / (per_token * (tokens * tokens))


def sequence_loss(scores: Tensor, counts: Tensor, lengths: Tensor, segments: Tensor, per_token: int) -> Tensor:
    """The same inside each document, summed over the documents.

    scores [t, E] and segments [t] of the tokens here; counts [documents, E] and lengths [documents] of whole documents.
    """
    experts = scores.shape[1]
    weights = counts * experts / (per_token * lengths.to(counts.dtype).square().clamp(min=1)[:, None])
    return (scores * weights[segments]).sum()


def z_loss(logits: Tensor, tokens: Tensor | float, counted: Tensor | None = None) -> Tensor:
    """Return these tokens' part of the mean of logsumexp(logits)^2 over `tokens` tokens: it keeps logits small."""
    squares = logits.float().logsumexp(-1).square()
    return (squares if counted is None else squares * counted).sum() / tokens


def expert_capacity(tokens: Tensor, routing: Routing, factor: float) -> Tensor:
    """Return the capacity of each expert for that number of tokens. int []"""
    return torch.ceil(tokens.double() * routing.per_token * factor / routing.experts).long()


def drop_beyond_capacity(
    experts: Tensor, probabilities: Tensor, max_tokens: Tensor | int, expert_count: int
) -> tuple[Tensor, Tensor]:
    """Keep the `max_tokens` choices of each expert with the highest probabilities.

    A choice that is dropped becomes one of none: the expert `expert_count`, with probability 0.
    """
    by_probability = probabilities.detach().flatten().argsort(descending=True, stable=True)
    by_expert, order = experts.flatten()[by_probability].sort(stable=True)
    first = torch.searchsorted(by_expert, by_expert)
    is_kept = torch.empty_like(by_expert, dtype=torch.bool)
    is_kept[by_probability[order]] = torch.arange(by_expert.numel(), device=experts.device) - first < max_tokens
    is_kept = is_kept.view(experts.shape)
    return experts.masked_fill(~is_kept, expert_count), probabilities.masked_fill(~is_kept, 0)


def updated_selection_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The selection bias [E] moved by `rate` towards experts with fewer tokens than the mean (DeepSeek-V3)."""
    return bias + rate * (counts.mean() - counts).sign().to(bias.dtype)


def routing_entropy(logits: Tensor, routing: Routing, counted: Tensor | None = None) -> Tensor:
    """Return the sum over `counted` tokens of the entropies, in nats, of their scores over all experts. []"""
    fused = find_kernels("routing", logits) if logits.dtype is routing.dtype is torch.float32 else None
    if fused:
        smallest = SMALLEST_SUM if routing.scoring is Scoring.SIGMOID else None
        sums: Tensor = fused.entropy_sums(logits.detach(), counted, smallest=smallest)
        return sums.sum()
    return plain_entropies(logits.detach(), routing, counted).sum()


def plain_entropies(logits: Tensor, routing: Routing, counted: Tensor | None) -> Tensor:
    """The entropy of each token, 0 for tokens that do not count. [t]"""
    entropies = torch.special.entr(balancing_scores(logits, routing)).sum(-1)
    return entropies if counted is None else entropies * counted


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """The spread of tokens over the experts of each layer; tensors, so that reading it can wait."""

    imbalance: Tensor
    """Tokens of the busiest expert over the mean: one when balanced."""
    idle_experts: Tensor
    """How many experts got nothing."""
    entropy: Tensor
    """Of the shares, over its largest value: one when balanced, zero when one expert gets all."""


def expert_load(counts: Tensor) -> ExpertLoad:
    """The load behind the counts [..., E]."""
    experts = counts.shape[-1]
    shares = counts.float() / counts.sum(-1, keepdim=True).clamp(min=1)
    return ExpertLoad(
        imbalance=shares.amax(-1) * experts,
        idle_experts=(counts == 0).sum(-1),
        entropy=torch.special.entr(shares).sum(-1) / math.log(max(experts, 2)),
    )


def _choose_experts(scores: Tensor, routing: Routing, selection_bias: Tensor | None) -> Tensor:
    # A choice has no gradient.
    scores = scores.detach()
    if selection_bias is not None:
        scores = scores + selection_bias.to(scores.dtype)
    if routing.kept_groups < routing.groups:
        scores = _mask_other_groups(scores, routing)
    return scores.topk(routing.per_token, dim=-1).indices


def _mask_other_groups(scores: Tensor, routing: Routing) -> Tensor:
    grouped = scores.unflatten(1, (routing.groups, -1))
    # DeepSeek-V3 looks at the best two of a group, DeepSeek-V2 at the best.
    best_count = 2 if routing.scoring is Scoring.SIGMOID else 1
    kept_groups = grouped.topk(best_count, dim=-1).values.sum(-1).topk(routing.kept_groups, dim=-1).indices
    is_kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, kept_groups, value=True)
    kept_scores: Tensor = grouped.masked_fill(~is_kept[..., None], float("-inf")).flatten(1)
    return kept_scores


def _positive_sum(scores: Tensor, routing: Routing) -> Tensor:
    total = scores.sum(-1, keepdim=True)
    # Sigmoids can all be zero.
    return total + SMALLEST_SUM if routing.scoring is Scoring.SIGMOID else total
