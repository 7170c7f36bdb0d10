"""Necessary conditions on single group sizes, cheap enough to prune thousands of layouts before one is validated.

moejob_api.rules has the last word: a layout that passes here may still be refused there, never the other way round.
"""

from __future__ import annotations

from moejob_api.derived import global_batch_size
from moejob_api.job import Spec
from moejob_api.models.shape import (
    Attention,
    DenseMLP,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    LinearAttention,
    ModelShape,
)


def can_divide_sequences(spec: Spec, shape: ModelShape | None, tensor: int, context: int) -> bool:
    """True when every sequence divides over the context and the tensor group."""
    sequence = tensor if spec.parallelism.sequence is not False else 1
    divisor = (2 * context if context > 1 else 1) * sequence
    lengths = (spec.data.max_length, spec.training.dynamic_batch_tokens or 0)
    if any(length % divisor for length in lengths):
        return False
    # The states of linear attention pass through the whole sequence.
    return context == 1 or shape is None or not any(isinstance(a, LinearAttention) for a in shape.attention_kinds())


def can_divide_matrices(spec: Spec, shape: ModelShape, tensor: int) -> bool:
    """True when a tensor group of this size divides every matrix of the model."""
    if spec.training.lora is not None and spec.training.lora.rank % tensor:
        return False
    if tensor > 1 and shape.experts is not None and spec.parallelism.sequence is False:
        return False
    return all(_can_split_heads(attention, tensor) for attention in shape.attention_kinds()) and all(
        _can_split_columns(mlp, tensor) for mlp in shape.mlp_kinds()
    )


def can_divide_experts(spec: Spec, shape: ModelShape, expert: int, expert_tensor: int) -> bool:
    """True when an expert group divides the experts, and each group of ranks that shares an expert its matrices."""
    experts = shape.experts
    if experts is None:
        return expert == 1
    rank = spec.training.lora.rank if spec.training.lora else 0
    if experts.intermediate % expert_tensor or rank % expert_tensor or (experts.bias and expert_tensor > 1):
        return False
    return experts.count % expert == 0


def can_divide_batch(spec: Spec, data: int, micro: int) -> bool:
    """True when every data-parallel rank gets whole microbatches of `micro` sequences of the global batch."""
    sequences = global_batch_size(spec)
    if spec.training.dynamic_batch_tokens is not None:
        return sequences >= data
    return sequences % (data * micro) == 0


def _can_split_heads(attention: Attention, tensor: int) -> bool:
    match attention:
        case GroupedAttention():
            groups = attention.key_value_heads
            return attention.heads % tensor == 0 and (groups % tensor == 0 or tensor % groups == 0)
        case LatentAttention():
            return attention.heads % tensor == 0
        case LinearAttention():
            return attention.key_heads % tensor == 0 and attention.value_heads % tensor == 0


def _can_split_columns(mlp: FeedForward, tensor: int) -> bool:
    columns = mlp.intermediate if isinstance(mlp, DenseMLP) else mlp.shared_intermediate
    return columns % tensor == 0
