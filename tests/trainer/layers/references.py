"""References of layers, their definitions in the plainest words, and the programs of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moejob_trainer.layers.attention import compute_attention
from moejob_trainer.layers.documents import Documents
from moejob_trainer.layers.vocabulary import token_log_probabilities


@dataclass(frozen=True)
class Attention:
    """Arguments of `compute_attention` for a whole row, and the gradient that comes back to its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    lengths: tuple[int, ...]
    window: int | None = None
    sinks: Tensor | None = None
    scale: float = 0.3

    def leaves(self) -> list[Tensor]:
        tensors = [self.q, self.k, self.v, *([] if self.sinks is None else [self.sinks])]
        return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def attention_case(lengths: tuple[int, ...], *, heads: int = 4, groups: int = 2, **options: Any) -> Attention:
    tokens, dim, value_dim = sum(lengths), options.pop("dim", 8), options.pop("value_dim", 8)
    dtype = options.pop("dtype", torch.float64)
    sinks = torch.randn(heads, dtype=dtype) if options.pop("sinks", False) else None
    return Attention(
        q=torch.randn(tokens, heads, dim, dtype=dtype),
        k=torch.randn(tokens, groups, dim, dtype=dtype),
        v=torch.randn(tokens, groups, value_dim, dtype=dtype),
        upstream=torch.randn(tokens, heads, value_dim, dtype=dtype),
        lengths=lengths,
        sinks=sinks,
        **options,
    )


def attention_by_definition(case: Attention) -> list[Tensor]:
    """The output and the gradients of q, k, v and sinks: one softmax for each token and head, in float64."""
    q, k, v, *sinks = leaves = [leaf.detach().double().requires_grad_() for leaf in case.leaves()]
    heads_per_group = q.shape[1] // k.shape[1]
    rows = []
    first = 0
    for length in case.lengths:
        for token in range(first, first + length):
            start = first if case.window is None else max(first, token - case.window + 1)
            for head in range(q.shape[1]):
                group = head // heads_per_group
                scores = (k[start : token + 1, group] * q[token, head]).sum(-1) * case.scale
                extra = [sinks[0][head : head + 1]] if sinks else []
                weights = torch.cat([scores, *extra]).softmax(0)[: token + 1 - start]
                rows.append((weights[:, None] * v[start : token + 1, group]).sum(0))
        first += length
    output = torch.stack(rows).view(case.upstream.shape)
    gradients = torch.autograd.grad(output, leaves, case.upstream.double())
    return [output.detach(), *gradients]


def attention_here(case: Attention, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The same from `compute_attention`, of the tokens that this rank holds."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    documents = Documents.from_lengths(case.lengths, context_rank=rank, context_size=size)
    held = documents.row_indices()
    q, k, v, *sinks = [leaf.detach()[held].requires_grad_() for leaf in case.leaves()[:3]] + case.leaves()[3:]
    output = compute_attention(
        q,
        k,
        v,
        documents,
        scale=case.scale,
        window=case.window,
        sinks=sinks[0] if sinks else None,
        context_group=group,
    )
    gradients = torch.autograd.grad(output, [q, k, v, *sinks], case.upstream[held])
    return [output.detach(), *gradients]


def attention_on_rank(case: Attention) -> list[Tensor]:
    return attention_here(case, dist.group.WORLD)


@dataclass(frozen=True)
class Words:
    """Arguments of `token_log_probabilities` for the whole vocabulary, and the gradients that come back."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    upstream: Tensor
    of_entropy: Tensor
    vocabulary: int
    temperature: float = 1.0
    chunk_tokens: int = 4
    keeps_slopes: bool = False
    learns_entropy: bool = False


def words_case(tokens: int = 11, vocabulary: int = 300, *, dtype: torch.dtype = torch.float64, **options: Any) -> Words:
    rows = -(-vocabulary // 128) * 128
    weight = torch.randn(rows, 16, dtype=dtype)
    # What no word owns must never show.
    weight[vocabulary:] = 100.0
    of_outputs = torch.randn(2, tokens, dtype=torch.promote_types(dtype, torch.float32))
    return Words(
        hidden=torch.randn(tokens, 16, dtype=dtype),
        weight=weight,
        labels=torch.randint(vocabulary, (tokens,)),
        upstream=of_outputs[0],
        of_entropy=of_outputs[1],
        vocabulary=vocabulary,
        **options,
    )


def words_by_definition(case: Words) -> list[Tensor]:
    """Log-probabilities, entropy, and the gradients of hidden and weight, from the whole softmax in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.weight))
    logits = (hidden @ weight[: case.vocabulary].t()) / case.temperature
    distribution = logits.log_softmax(-1)
    picked = distribution.gather(1, case.labels.clamp(min=0)[:, None])[:, 0] * (case.labels >= 0)
    entropy = -(distribution.exp() * distribution).sum(-1)
    outputs, upstream = ([picked, entropy], [case.upstream, case.of_entropy])
    learned = 2 if case.learns_entropy else 1
    of_outputs = [gradient.double() for gradient in upstream[:learned]]
    gradients = torch.autograd.grad(outputs[:learned], [hidden, weight], of_outputs)
    return [picked.detach(), entropy.detach(), *gradients]


def words_here(case: Words, group: dist.ProcessGroup | None = None, *, sums: bool = True) -> list[Tensor]:
    """The same from `token_log_probabilities`, with this rank's words."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    hidden = case.hidden.detach().clone().requires_grad_()
    weight = case.weight.chunk(size)[rank].detach().clone().requires_grad_()
    picked, entropy = token_log_probabilities(
        hidden,
        weight,
        case.labels,
        vocabulary=case.vocabulary,
        chunk_tokens=case.chunk_tokens,
        keeps_slopes=case.keeps_slopes,
        learns_entropy=case.learns_entropy,
        group=group,
        temperature=case.temperature,
        sums_hidden_gradient=sums,
    )
    learned = 2 if case.learns_entropy else 1
    upstream = [case.upstream, case.of_entropy][:learned]
    gradients = torch.autograd.grad([picked, entropy][:learned], [hidden, weight], upstream)
    return [picked.detach(), entropy.detach(), *gradients]


def words_on_rank(case: Words, sums: bool) -> list[Tensor]:
    return words_here(case, dist.group.WORLD, sums=sums)
