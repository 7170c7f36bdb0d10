"""Writes a model of random weights with the tokenizer of moejob's examples: one that has to be loaded, unlike theirs.

    python tests/trainer/random_model.py FOLDER

Thirteen million parameters: loading and importing them takes long enough to be seen, a step a few tenths of a second.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moejob_trainer.data import tiny

CONFIG = AutoConfig.for_model(
    "qwen3_moe",
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=320,
    intermediate_size=512,
    max_position_embeddings=2048,
    norm_topk_prob=True,
)


def write(folder: Path) -> None:
    """The same weights each time."""
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    model.save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
