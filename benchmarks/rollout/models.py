"""Owns the models that are measured: Qwen3-MoE of random weights, with the tokenizer of the examples for laptops."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moejob_trainer.data import tiny


def write_model(
    folder: Path, dtype: torch.dtype, device: str = "cpu", vocab_size: int = 512, **sizes: int
) -> PreTrainedModel:
    """Make a model of these sizes and write it; the same weights each time."""
    tokenizer = tiny.build_tokenizer()
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=vocab_size,
        num_key_value_heads=4,
        head_dim=64,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    torch.manual_seed(1)
    with torch.device(device):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return made
