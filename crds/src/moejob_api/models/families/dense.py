"""Families without experts: Llama, Qwen2 and Qwen3."""

from __future__ import annotations

from dataclasses import replace

from moejob_api.models.families.layers import (
    build_shape,
    dense_mlp,
    grouped_attention,
    layer_count,
    optional_window,
    refuse_uneven_heads,
    stack_layers,
    windowed_attentions,
)
from moejob_api.models.reader import ConfigReader
from moejob_api.models.shape import Family, GroupedAttention, ModelShape


def llama_shape(config: ConfigReader) -> ModelShape:
    """Llama 2 and 3."""
    refuse_uneven_heads(config)
    bias = config.read_flag("attention_bias")
    plain = grouped_attention(config, key_value_heads=config.read_size("num_attention_heads"))
    attention = replace(plain, qkv_bias=bias, output_bias=bias)
    mlp = replace(dense_mlp(config), bias=config.read_flag("mlp_bias"))
    count = layer_count(config)
    return build_shape(config, Family.LLAMA, stack_layers([attention] * count, [mlp] * count))


def qwen2_shape(config: ConfigReader) -> ModelShape:
    """Qwen2 and Qwen2.5."""
    return _qwen_shape(config, Family.QWEN2, replace(grouped_attention(config), qkv_bias=True))


def qwen3_shape(config: ConfigReader) -> ModelShape:
    """Qwen3 without experts."""
    bias = config.read_flag("attention_bias")
    # Transformers' default for this family, whatever hidden_size / num_attention_heads is.
    plain = grouped_attention(config, head_dim=128)
    return _qwen_shape(config, Family.QWEN3, replace(plain, qkv_bias=bias, output_bias=bias, head_norm=True))


def _qwen_shape(config: ConfigReader, family: Family, full: GroupedAttention) -> ModelShape:
    count = layer_count(config)
    first_sliding = config.read_size("max_window_layers", absent=28, smallest=0)
    slides = [index >= first_sliding for index in range(count)]
    attentions = windowed_attentions(config, full, optional_window(config), slides)
    return build_shape(config, family, stack_layers(attentions, [dense_mlp(config)] * count))
