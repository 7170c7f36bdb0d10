"""Adapters by hand: Transformers in float64 with W + scale * B A in the place of every adapted W, and autograd."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from moejob_api.models.shape import Family
from trainer.parity.cells import StepMeasurements, descend_gradients, make_documents, reference_model

RANK, ALPHA = 4, 6.0
LORA: dict[str, Any] = {
    "rank": RANK,
    "alpha": ALPHA,
    "targets": ["QueryKeyValue", "AttentionOutput", "GateUp", "Down", "ExpertGateUp", "ExpertDown"],
}
# Two heads of keys and values: four ranks cannot divide them.
CHANGES: dict[Family, dict[str, Any]] = {
    Family.QWEN3_MOE: {"num_key_value_heads": 2},
    Family.DEEPSEEK_V3: {},
    Family.QWEN3_NEXT: {},
    Family.QWEN3_5_MOE: {},
}
_MODULES = (
    ("self_attn.", "_proj.weight"),
    ("self_attn.", "kv_a_proj_with_mqa.weight"),
    ("linear_attn.", "in_proj_qkvz.weight"),
    ("linear_attn.", "in_proj_ba.weight"),
    ("linear_attn.", "in_proj_qkv.weight"),
    ("linear_attn.", "in_proj_z.weight"),
    ("linear_attn.", "in_proj_b.weight"),
    ("linear_attn.", "in_proj_a.weight"),
    ("linear_attn.", "out_proj.weight"),
    ("mlp.", "gate_proj.weight"),
    ("mlp.", "up_proj.weight"),
    ("mlp.", "down_proj.weight"),
)
Adapters = dict[str, Tensor]


def write_lora_reference(family: Family, folder: Path) -> StepMeasurements:
    """Trains the adapters alone. Leaves behind the model, and the adapters: first, their gradients, and last."""
    model = reference_model(family, **CHANGES[family])
    model.save_pretrained(folder / "first")
    model.double().requires_grad_(requires_grad=False)
    adapters = _random_adapters(model)
    _save(adapters, folder, "adapters")
    losses: list[float] = []

    def backward(step: int) -> None:
        loss = _loss(model, merge_by_hand(model, adapters), step)
        loss.backward()
        losses.append(loss.item())

    def save_gradients() -> None:
        gradients = {name: tensor.grad for name, tensor in adapters.items() if tensor.grad is not None}
        _save(gradients, folder, "gradients")

    norms = descend_gradients([{"params": [*adapters.values()], "weight_decay": 0.1}], backward, save_gradients)
    _save(adapters, folder, "last")
    return StepMeasurements(tuple(losses), norms)


def merge_by_hand(model: PreTrainedModel, adapters: Mapping[str, Tensor]) -> Adapters:
    """The weights that the adapters change, under the names that they have in memory, where experts are one tensor."""
    merged = {}
    for name, weight in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            pairs = [(f"{e}.gate_proj", f"{e}.up_proj") for e in range(len(weight))]
            owner = name.removesuffix("gate_up_proj")
            changes = [torch.cat([_product(adapters, owner + one) for one in pair]) for pair in pairs]
            merged[name] = weight + torch.stack(changes)
        elif name.endswith("experts.down_proj"):
            owner = name.removesuffix("down_proj")
            changes = [_product(adapters, f"{owner}{e}.down_proj") for e in range(len(weight))]
            merged[name] = weight + torch.stack(changes)
        elif _is_adapted(name):
            merged[name] = weight + _product(adapters, name.removesuffix(".weight"))
    return merged


def merge_into(model: PreTrainedModel, adapters: Mapping[str, Tensor]) -> None:
    """Give a model the weights that adapters make of its own."""
    with torch.no_grad():
        for name, weight in merge_by_hand(model, adapters).items():
            model.get_parameter(name).copy_(weight)


def _product(adapters: Mapping[str, Tensor], module: str) -> Tensor:
    a, b = (adapters[f"base_model.model.{module}.{name}.weight"] for name in ("lora_A", "lora_B"))
    return ALPHA / RANK * b @ a


def _is_adapted(name: str) -> bool:
    return any(owner in name and name.endswith(last) for owner, last in _MODULES)


def _random_adapters(model: PreTrainedModel) -> Adapters:
    generator = torch.Generator().manual_seed(11)
    made: Adapters = {}
    for module, (outputs, inputs) in _adapted_matrices(model):
        for name, size in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
            # What both can hold, so that both begin with the same.
            values = (torch.randn(size, generator=generator) * 0.2).double().requires_grad_()
            made[f"base_model.model.{module}.{name}.weight"] = values
    return made


def _adapted_matrices(model: PreTrainedModel) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every published matrix that gets an adapter, with its outputs and inputs."""
    for name, weight in model.named_parameters():
        owner, _, last = name.rpartition(".")
        if owner.endswith("experts"):
            matrices = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            count, outputs, inputs = weight.shape
            for expert, matrix in product(range(count), matrices):
                yield f"{owner}.{expert}.{matrix}", (outputs // len(matrices), inputs)
        elif _is_adapted(name):
            yield owner, (weight.shape[0], weight.shape[1])


def _loss(model: PreTrainedModel, weights: Mapping[str, Tensor], step: int) -> Tensor:
    batch = make_documents(step)
    weight = sum(float(document.weights[1:].sum()) for document in batch)
    loss = torch.zeros((), dtype=torch.float64)
    for document in batch:
        tokens = torch.from_numpy(document.tokens)
        logits = functional_call(model, dict(weights), (tokens[None],), {"use_cache": False}).logits[0]
        losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        loss = loss + (losses * torch.from_numpy(document.weights[1:])).sum() / weight
    return loss


def _save(adapters: Mapping[str, Tensor], folder: Path, name: str) -> None:
    (folder / name).mkdir()
    config = json.loads((folder / "first" / "config.json").read_text())
    (folder / name / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.detach().clone() for key, tensor in adapters.items()}, folder / name / "model.safetensors")
