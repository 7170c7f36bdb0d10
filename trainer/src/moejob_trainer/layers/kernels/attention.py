"""Attention over packed documents by flash-attn-4 or torch, and over documents of a batch by torch's kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.utils.rnn import pad_sequence

from moejob_trainer.layers.documents import Documents

# Attention whose causal mask is aligned at the bottom right of each sequence: `flash_attn.cute.flash_attn_varlen_func`.
Packed = Callable[..., tuple[Tensor, Any]]

# Hopper and Blackwell: older GPUs have no backward pass there.
FLASH_GENERATIONS = (9, 10, 11)
WIDEST_HEAD = {9: 256, 10: 128, 11: 128}
# How much padding is less work than a kernel for each document.
PADDED_ROWS = 1.5
# The first that can is taken. cuDNN is the fastest, and plans for 0.1 s whenever it has not seen a shape (H200).
FOR_FEW_SHAPES = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
FOR_MANY_SHAPES = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
# Documents that were cut at a length have one like this; those that end by themselves hardly ever.
CUT_LENGTH = 128
# Of torch's own kernel for packed documents, and the oldest GPU generation that has it.
WIDEST_PACKED_HEAD, PACKED_GENERATION = 256, 8


def compute_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor | None:
    """Twin of `attention.plain_attention` by the fastest kernel that takes it; None where none does."""
    if can_use_flash(q, v):
        return flash_attention(q, k, v, documents, scale=scale, window=window, sinks=sinks)
    if sinks is not None:
        return None
    if window is None and is_regular_batch(documents):
        return batch_attention(q, k, v, documents, scale=scale)
    if can_use_varlen(q, v):
        return varlen_attention(q, k, v, documents, scale=scale, window=window)
    if window is None and is_padding_cheap(documents):
        return padded_attention(q, k, v, documents, scale=scale)
    return None


def can_use_flash(q: Tensor, v: Tensor) -> bool:
    """Return whether flash-attn-4 is installed and supports this GPU, this precision and these heads."""
    if find_spec("flash_attn") is None or _load_flash() is None:
        return False
    return is_flash_supported(q.dtype, (q.shape[-1], v.shape[-1]), torch.cuda.get_device_capability(q.device)[0])


def is_flash_supported(dtype: torch.dtype, heads: tuple[int, int], generation: int) -> bool:
    """Return whether flash-attn-4 computes this on a GPU of this generation, and as reproducibly as torch has to."""
    # Its backward pass adds up the gradients of queries with atomics.
    if dtype not in (torch.bfloat16, torch.float16) or torch.are_deterministic_algorithms_enabled():
        return False
    return generation in FLASH_GENERATIONS and all(
        size % 8 == 0 and 8 <= size <= WIDEST_HEAD[generation] for size in heads
    )


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Twin of `attention.plain_attention`."""
    return packed_attention(_load_flash(), q, k, v, documents, scale=scale, window=window, sinks=sinks)


def can_use_varlen(q: Tensor, v: Tensor) -> bool:
    """Return whether torch's own kernel for packed documents supports this torch, GPU, precision and these heads."""
    sizes = {q.shape[-1], v.shape[-1]}
    return (
        _has_grouped_heads()
        and not torch.are_deterministic_algorithms_enabled()
        and q.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(q.device)[0] >= PACKED_GENERATION
        and len(sizes) == 1
        and all(size % 8 == 0 and size <= WIDEST_PACKED_HEAD for size in sizes)
    )


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scale: float, window: int | None
) -> Tensor:
    """Twin of `attention.plain_attention` without sinks."""
    return packed_attention(_call_varlen, q, k, v, documents, scale=scale, window=window, sinks=None)


def _call_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_size: tuple[int | None, int],
    **_: object,
) -> tuple[Tensor, None]:
    """torch's kernel, called as flash-attn-4's is."""
    before, after = window_size
    # Without `return_aux` it is one tensor.
    output: Any = varlen.varlen_attn(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        scale=softmax_scale,
        window_size=(-1 if before is None else before, after),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return output, None


@cache
def _has_grouped_heads() -> bool:
    """Return whether this torch has it: 2.13 does, and 2.11 takes as many heads of keys as of queries alone."""
    return "enable_gqa" in signature(varlen.varlen_attn).parameters


def packed_attention(
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
    spans = documents.attention_spans
    parts = zip(
        q.split([span.total_queries for span in spans]),
        documents.local_ranges(),
        spans,
        documents.span_bounds,
        strict=True,
    )
    for queries, (_, end), span, (cu_queries, cu_keys) in parts:
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


def is_regular_batch(documents: Documents) -> bool:
    """Return whether documents are a batch as they lie there, of a shape that comes again and again."""
    lengths = documents.lengths
    return documents.context_size == 1 and len(set(lengths)) == 1 and lengths[0] % CUT_LENGTH == 0


def is_padding_cheap(documents: Documents) -> bool:
    """Return whether a batch of all documents, each as long as the longest, is little more than the row."""
    if documents.context_size > 1:
        return False
    return len(documents.lengths) * max(documents.lengths) <= PADDED_ROWS * documents.row_tokens


def batch_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scale: float) -> Tensor:
    """Twin of `attention.plain_attention` for documents of one length, without window and sinks; copies nothing."""
    q, k, v = (x.unflatten(0, (len(documents.lengths), -1)).transpose(1, 2) for x in (q, k, v))
    return _attend_batch(q, k, v, FOR_FEW_SHAPES, scale).transpose(1, 2).flatten(0, 1)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scale: float) -> Tensor:
    """Twin of `attention.plain_attention` without window and sinks.

    Behind the end of a document no query looks: a causal mask hides it from every token of the document. Packed
    documents, and answers above all, have other lengths in each micro batch, and so has the batch of them.
    """
    lengths = list(documents.lengths)
    q, k, v = (pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v))
    output = _attend_batch(q, k, v, FOR_MANY_SHAPES, scale)
    return torch.cat(
        [padded_output[:length] for padded_output, length in zip(output.transpose(1, 2), lengths, strict=True)]
    )


def _attend_batch(q: Tensor, k: Tensor, v: Tensor, backends: Sequence[SDPBackend], scale: float) -> Tensor:
    # torch itself leaves out cuDNN where algorithms have to be deterministic, and has the others sum in one order.
    with sdpa_kernel(list(backends), set_priority=True):
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


@cache
def _load_flash() -> Any:
    try:
        return import_module("flash_attn.cute").flash_attn_varlen_func
    except ImportError as error:
        # An older flash_attn, or one beside other versions of what it is built on.
        warnings.warn(
            f"flash_attn is installed but flash-attn-4 is not usable, so attention is torch's: {error}", stacklevel=2
        )
        return None
