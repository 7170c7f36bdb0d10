"""Small jobs and models for tests: a builder says only what matters to its case."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moejob_api.job import MoETrainingJob, Spec
from moejob_api.models.shape import DenseMLP, Experts, Family, GroupedAttention, LatentAttention, Layer, ModelShape

SFT: dict[str, Any] = {
    "method": "SFT",
    "model": {"source": "Qwen/Qwen3-30B-A3B"},
    "data": {"train": [{"source": "/data/train.jsonl", "format": "Chat"}]},
    "training": {"maxSteps": 100, "globalBatchSize": 64},
    "storage": {"size": "4Ti"},
}
GRPO: dict[str, Any] = SFT | {
    "method": "GRPO",
    "data": {"train": [{"source": "/data/prompts.jsonl", "format": "Prompts"}]},
    "training": {"maxSteps": 100},
    "grpo": {"rewards": [{"name": "math"}]},
}


def spec(**sections: Any) -> Spec:
    """An SFT spec that breaks no rule, with the given sections (camelCase) laid over it."""
    base = GRPO if sections.get("method") == "GRPO" else SFT
    return Spec.model_validate_json(json.dumps(merge_sections(base, sections)))


def job(name: str = "job", **sections: Any) -> MoETrainingJob:
    """A job around `spec`."""
    return MoETrainingJob(
        api_version="moejob.dev/v1alpha1",
        kind="MoETrainingJob",
        metadata={"name": name},  # type: ignore[arg-type]
        spec=spec(**sections),
    )


def merge_sections(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, section by section; None removes a key."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merge_sections(result[key], value)
        else:
            result[key] = value
    return {key: value for key, value in result.items() if value is not None}


def dense_model(layers: int = 80, heads: int = 64, key_value_heads: int = 8, intermediate: int = 28_672) -> ModelShape:
    """A Llama of 70 B parameters unless changed."""
    layer = Layer(GroupedAttention(heads, key_value_heads, head_dim=128), DenseMLP(intermediate))
    return ModelShape(Family.LLAMA, 128 * heads, 128_256, False, 131_072, (layer,) * layers)


def moe_model(layers: int = 48, experts: int = 128, **changes: Any) -> ModelShape:
    """A Qwen3-30B-A3B unless changed; `changes` go to its experts."""
    routed = Experts(**({"count": experts, "per_token": 8, "intermediate": 768} | changes))
    layer = Layer(GroupedAttention(32, 4, head_dim=128, head_norm=True), routed)
    return ModelShape(Family.QWEN3_MOE, 2048, 151_936, False, 40_960, (layer,) * layers)


def latent_model(layers: int = 61) -> ModelShape:
    """A DeepSeek-V3 without its extra prediction layer."""
    attention = LatentAttention(128, 1536, 512, nope_dim=128, rope_dim=64, value_dim=128)
    routed = Experts(256, 8, 2048, shared_intermediate=2048, selection_bias=True)
    dense = Layer(attention, DenseMLP(18_432))
    return ModelShape(
        Family.DEEPSEEK_V3, 7168, 129_280, False, 163_840, (dense,) * 3 + (Layer(attention, routed),) * (layers - 3)
    )
