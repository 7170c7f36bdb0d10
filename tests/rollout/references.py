"""Small models of Transformers, whose log-probabilities engines are held against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    # Far enough from zero that another weight gives another answer.
    "initializer_range": 0.08,
}
_DEEPSEEK: dict[str, Any] = {
    # The only sizes that vLLM's kernel for CPUs takes, and those of all published models.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _SIZES
    | {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    # The output layer is the embedding, as in most small models.
    "mixtral": _SIZES
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": True},
    "glm4_moe": _SIZES
    | {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v3": _SIZES
    | _DEEPSEEK
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "q_lora_rank": 64,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        # Transformers drops both, and the trainer writes them again.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "glm4_moe_lite": _SIZES
    | {key: value for key, value in _DEEPSEEK.items() if key != "first_k_dense_replace"}
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "q_lora_rank": 64,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 0,
        # Transformers takes one such layer and drops the key, and the trainer writes it again.
        "first_k_dense_replace": 1,
    },
    "olmoe": _SIZES | {"intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    "ernie4_5_moe": _SIZES
    | {"moe_intermediate_size": 64, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2},
    "minimax_m2": _SIZES
    | {
        "head_dim": 32,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2": _SIZES,
    "llama": _SIZES,
    "qwen3": _SIZES | {"head_dim": 32, "tie_word_embeddings": True},
    "qwen2_moe": _SIZES
    | {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        # A dense layer between two of experts.
        "decoder_sparse_step": 2,
    },
    "deepseek_v2": _SIZES
    | _DEEPSEEK
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "gpt_oss": _SIZES
    | {
        "head_dim": 32,
        "intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    # Sizes that vLLM fills up: the vocabulary to 512, and the columns of an expert's matrix, also half of them, to 32s.
    "qwen3_moe padded": _SIZES
    | {
        "vocab_size": 500,
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    },
}


def make_model(family: str, seed: int) -> PreTrainedModel:
    """Return a model of random weights."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.split(maxsplit=1)[0], **MODELS[family])
    found: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found.eval()
    return found


def lay_out(family: str, folder: Path) -> None:
    """Write the model folder that an engine starts from."""
    whole = make_model(family, 0)
    whole.config.architectures = [type(whole).__name__]
    whole.config.save_pretrained(folder)


def save_published(model: PreTrainedModel, folder: Path) -> Path:
    """Save weights under the names of the hub's files; returns the one file."""
    model.save_pretrained(folder)
    return folder / "model.safetensors"


def published_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of those files."""
    with TemporaryDirectory() as folder:
        found: dict[str, Tensor] = load_file(save_published(model, Path(folder)))
    return found


def without(path: Path, tensor: str) -> Path:
    """The same file, lacking one tensor."""
    left = {name: value for name, value in load_file(path).items() if name != tensor}
    save_file(left, path, {"format": "pt"})
    return path


def log_probabilities(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Of each token of the answer."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0].float() / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    picked: list[float] = rows.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
    return picked
