"""Attention over packed documents by flash-attn-4, and over documents padded to a batch by cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from moejob_trainer.layers.documents import Documents

# Attention whose causal mask is aligned at the bottom right of each sequence: `flash_attn.cute.flash_attn_varlen_func`.
Packed = Callable[..., tuple[Tensor, Any]]

# Hopper and Blackwell: older GPUs have no backward pass there.
FLASH_GENERATIONS = (9, 10, 11)
WIDEST_HEAD = {9: 256, 10: 128, 11: 128}
# How much padding is less work than a kernel for each document.
PADDED_ROWS = 1.5
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def flash_takes(q: Tensor, v: Tensor) -> bool:
    """Whether flash-attn-4 is installed and knows this GPU, this precision and these heads."""
    if q.dtype not in (torch.bfloat16, torch.float16) or find_spec("flash_attn") is None or _flash() is None:
        return False
    generation = torch.cuda.get_device_capability(q.device)[0]
    sizes = (q.shape[-1], v.shape[-1])
    return generation in FLASH_GENERATIONS and all(
        size % 8 == 0 and 8 <= size <= WIDEST_HEAD[generation] for size in sizes
    )


def flash_attended(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Twin of `attention.plain_attended`."""
    return packed_attended(_flash(), q, k, v, documents, scale=scale, window=window, sinks=sinks)


def packed_attended(
    packed: Packed,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """By a kernel for packed sequences: each run of neighbouring tokens is one call over all its documents."""
    outputs = []
    spans = documents.spans()
    parts = zip(q.split([span.queries for span in spans]), documents.held(), spans, strict=True)
    for queries, (start, end), span in parts:
        # Documents before the first key or behind the last query become empty ones.
        cu_keys = documents.cu_lengths.clamp(span.first_key, end) - span.first_key
        cu_queries = documents.cu_lengths.clamp(start, end) - start
        output, _ = packed(
            queries,
            k[span.first_key : end],
            v[span.first_key : end],
            cu_seqlens_q=cu_queries,
            cu_seqlens_k=cu_keys,
            max_seqlen_q=max(span.query_counts),
            max_seqlen_k=max(span.key_counts),
            softmax_scale=scale,
            causal=True,
            window_size=(None if window is None else window - 1, 0),
            learnable_sink=sinks,
        )
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def padding_pays(documents: Documents) -> bool:
    """Whether a batch of all documents, each as long as the longest, is little more than the row."""
    if documents.context_size > 1:
        return False
    return len(documents.lengths) * max(documents.lengths) <= PADDED_ROWS * documents.row_tokens


def padded_attended(q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scale: float) -> Tensor:
    """Twin of `attention.plain_attended` without window and sinks.

    Behind the end of a document nobody looks: a causal mask hides it from every token of the document.
    """
    lengths = list(documents.lengths)
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(BACKENDS, set_priority=True):
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return torch.cat([one[:length] for one, length in zip(output.transpose(1, 2), lengths, strict=True)])


@cache
def _flash() -> Any:
    try:
        return import_module("flash_attn.cute").flash_attn_varlen_func
    except ImportError:
        # An older flash_attn, or one without what it is built on.
        return None
