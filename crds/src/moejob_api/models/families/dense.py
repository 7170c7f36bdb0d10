"""Families without experts: Llama, Qwen2 and Qwen3."""

from __future__ import annotations

from dataclasses import replace

from moejob_api.models.families.layers import (
    dense_mlp,
    grouped_attention,
    heads_divide_hidden,
    layer_count,
    model,
    optional_window,
    stacked,
    windowed,
)
from moejob_api.models.reader import ConfigReader
from moejob_api.models.shape import Family, GroupedAttention, ModelShape


def llama(config: ConfigReader) -> ModelShape:
    """Llama 2 and 3."""
    heads_divide_hidden(config)
    bias = config.flag("attention_bias")
    plain = grouped_attention(config, key_value_heads=config.size("num_attention_heads"))
    attention = replace(plain, qkv_bias=bias, output_bias=bias)
    mlp = replace(dense_mlp(config), bias=config.flag("mlp_bias"))
    count = layer_count(config)
    return model(config, Family.LLAMA, stacked([attention] * count, [mlp] * count))


def qwen2(config: ConfigReader) -> ModelShape:
    """Qwen2 and Qwen2.5."""
    return _qwen(config, Family.QWEN2, replace(grouped_attention(config), qkv_bias=True))


def qwen3(config: ConfigReader) -> ModelShape:
    """Qwen3 without experts."""
    bias = config.flag("attention_bias")
    # Transformers' default for this family, whatever hidden_size / num_attention_heads is.
    plain = grouped_attention(config, head_dim=128)
    return _qwen(config, Family.QWEN3, replace(plain, qkv_bias=bias, output_bias=bias, head_norm=True))


def _qwen(config: ConfigReader, family: Family, full: GroupedAttention) -> ModelShape:
    count = layer_count(config)
    first_sliding = config.size("max_window_layers", absent=28, smallest=0)
    slides = [index >= first_sliding for index in range(count)]
    attentions = windowed(config, full, optional_window(config), slides)
    return model(config, family, stacked(attentions, [dense_mlp(config)] * count))
