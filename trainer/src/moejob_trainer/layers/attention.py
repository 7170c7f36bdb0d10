"""Causal attention inside the documents of a packed row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moejob_trainer.layers.context_parallel import gather_row
from moejob_trainer.layers.documents import AttentionSpan, Documents
from moejob_trainer.layers.kernels import find_kernels
from moejob_trainer.layers.precision import at_least_float32

# A mask is made for this many queries at a time: for a whole document of n tokens it would take n * n bytes.
MASKED_QUERIES = 512


def compute_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    context_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return for each token the values of its document up to itself, weighted by softmax(scale * q k).

    q [t, n, d], k [t, g, d], v [t, g, dv], g a divisor of n; t the tokens that this rank holds -> [t, n, dv]
    `window`: the number of tokens that a token sees, itself included. `sinks` [n]: logits in each head's softmax that
    stand for no token.
    """
    if documents.context_size > 1:
        k, v = _gather_keys_and_values(k, v, documents, context_group)
    window = None if window is None or window >= max(documents.lengths) else window
    fused = find_kernels("attention", q)
    options: Mapping[str, Any] = {"scale": scale, "window": window, "sinks": sinks}
    output: Tensor | None = None if fused is None else fused.compute_attention(q, k, v, documents, **options)
    return plain_attention(q, k, v, documents, **options) if output is None else output


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`compute_attention` in the operations of torch, given keys and values of the whole row."""
    # Zeros behind the values keep torch's fast kernels, which want one size for all three.
    padded = functional.pad(v, (0, max(0, q.shape[-1] - v.shape[-1])))
    spans = documents.attention_spans
    parts = zip(q.split([span.total_queries for span in spans]), spans, strict=True)
    outputs = [
        _attend_span(queries, k, padded, span, scale=scale, window=window, sinks=sinks) for queries, span in parts
    ]
    return torch.cat(outputs)[..., : v.shape[-1]]


def _gather_keys_and_values(
    k: Tensor, v: Tensor, documents: Documents, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    if group is None or group.size() != documents.context_size:
        raise ValueError(
            f"documents are cut for {documents.context_size} context ranks, "
            f"but the context group has {1 if group is None else group.size()}"
        )
    # One collective for both.
    both = gather_row(torch.cat([k, v], dim=-1), group)
    keys, values = both.split([k.shape[-1], v.shape[-1]], dim=-1)
    return keys, values


def _attend_span(
    q: Tensor, k: Tensor, v: Tensor, span: AttentionSpan, *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    last_key = span.first_key + span.total_keys
    # split instead of one slice a document: the gradient of a slice is as long as the whole row.
    pieces = zip(
        q.split(span.query_counts),
        k[span.first_key : last_key].split(span.key_counts),
        v[span.first_key : last_key].split(span.key_counts),
        strict=True,
    )
    return torch.cat([_attend_piece(*piece, scale=scale, window=window, sinks=sinks) for piece in pieces])


def _attend_piece(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, sinks: Tensor | None) -> Tensor:
    """Queries [m, n, d] of one document and the keys [s, g, d] up to the last of them. [m, n, dv]"""
    queries, keys = q.shape[0], k.shape[0]
    window = None if window is None or window >= keys else window
    if window is None and sinks is None and queries == keys:
        return _scaled_dot_product(q, k, v, None, scale=scale)
    blocks = []
    for first, block in zip(range(0, queries, MASKED_QUERIES), q.split(MASKED_QUERIES), strict=True):
        # From the first key of the block's first query to the last key of its last query.
        position = keys - queries + first
        start = 0 if window is None else max(0, position - window + 1)
        end = position + block.shape[0]
        mask = _causal_mask(position - start, block.shape[0], window, q.device)
        blocks.append(_attend_masked(block, k[start:end], v[start:end], mask, scale=scale, sinks=sinks))
    return torch.cat(blocks)


def _causal_mask(first: int, queries: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask of keys 0, 1, ... for queries at `first`, first + 1, ... bool [queries, first + queries]"""
    distance = torch.arange(first, first + queries, device=device)[:, None] - torch.arange(
        first + queries, device=device
    )
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return _scaled_dot_product(q, k, v, mask, scale=scale)
    heads_per_group = q.shape[1] // k.shape[1]
    queries = at_least_float32(q).unflatten(1, (k.shape[1], heads_per_group))
    scores = torch.einsum("qghd,kgd->ghqk", queries, at_least_float32(k)) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    sink = at_least_float32(sinks).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("ghqk,kgd->qghd", weights, at_least_float32(v)).flatten(1, 2).to(v.dtype)


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    output = functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return output[0].transpose(0, 1)
