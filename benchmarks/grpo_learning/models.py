"""A published model with further attention heads that add nothing, so that engines of several GPUs can divide it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def write_divisible(folder: Path, model: Path, key_value_heads: int = 4) -> Path:
    """Write a copy of a model with this many heads of keys and values, and as many queries to each as before.

    The new heads are copies of the first ones. The columns of the output projection that read them are zeros: logits
    stay what they were, and training may use the new heads. SmolLM2-135M has 9 heads to 3, which no engine of two or
    four GPUs can divide; the copy has 12 to 4.
    """
    if folder.is_dir():
        return folder
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    made = folder.with_name(f".{folder.name}")
    shutil.copytree(model, made, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    queries, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or config["hidden_size"] // queries
    rows = {"q_proj": queries // groups * head, "k_proj": head, "v_proj": head}
    tensors = load_file(model / "model.safetensors")
    widened = {name: _widen_tensor(name, tensor, rows, key_value_heads - groups) for name, tensor in tensors.items()}
    save_file(widened, made / "model.safetensors", metadata={"format": "pt"})
    sizes: dict[str, Any] = {"num_attention_heads": queries // groups * key_value_heads, "head_dim": head}
    text = json.dumps(config | sizes | {"num_key_value_heads": key_value_heads}, indent=2)
    (made / "config.json").write_text(text, encoding="utf-8")
    return made.rename(folder)


def _widen_tensor(name: str, tensor: Tensor, rows: Mapping[str, int], more_groups: int) -> Tensor:
    """Return a tensor with room for further groups of heads. `rows` are those of one group in each projection."""
    projection = name.removesuffix(".weight").rpartition(".")[2]
    if projection == "o_proj":
        return torch.cat([tensor, tensor.new_zeros(len(tensor), rows["q_proj"] * more_groups)], 1).contiguous()
    if projection in rows:
        return torch.cat([tensor, tensor[: rows[projection]].repeat(more_groups, 1)]).contiguous()
    return tensor
