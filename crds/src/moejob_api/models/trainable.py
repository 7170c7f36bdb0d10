"""The features that this version trains, as data: plan, webhook and trainer read the same tables.

What one job's settings exclude of one another is in rules/; here is what no job can have at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from moejob_api.models.shape import Family

# Families that Megatron's own models compute as Transformers does: measured in float32, in every way of dividing them.
MEGATRON_FAMILIES = frozenset(
    {
        Family.LLAMA,
        Family.QWEN2,
        Family.QWEN3,
        Family.MIXTRAL,
        Family.QWEN2_MOE,
        Family.QWEN3_MOE,
        Family.GLM4_MOE,
        Family.OLMOE,
        Family.ERNIE4_5_MOE,
        Family.MINIMAX_M2,
        Family.GPT_OSS,
    }
)
# What another family lacks there, with Megatron-Core 0.19.2 and Megatron-Bridge 0.6.2.
UNTRAINED_BY_MEGATRON: Mapping[Family, str] = {
    Family.DEEPSEEK_V2: "Megatron's latent attention needs Transformer Engine",
    Family.DEEPSEEK_V3: "Megatron's latent attention needs Transformer Engine",
    Family.GLM4_MOE_LITE: "Megatron's latent attention needs Transformer Engine",
    Family.QWEN3_NEXT: "Megatron's layers of the gated delta rule need Transformer Engine",
    Family.QWEN3_5_MOE: "Megatron's layers of the gated delta rule need Transformer Engine",
}
# Families whose weights go to Megatron's checkpoints and come back to the bit.
CONVERTED_FAMILIES = frozenset(
    {
        Family.LLAMA,
        Family.QWEN2,
        Family.QWEN3,
        Family.QWEN3_MOE,
        Family.DEEPSEEK_V2,
        Family.DEEPSEEK_V3,
        Family.GLM4_MOE,
        Family.GLM4_MOE_LITE,
        Family.MIXTRAL,
        Family.QWEN2_MOE,
        Family.GPT_OSS,
    }
)
# The reason for each of the others.
UNCONVERTED_FAMILIES: Mapping[Family, str] = {
    Family.QWEN3_NEXT: "Megatron's names for layers of the gated delta rule were not measured",
    Family.QWEN3_5_MOE: "Megatron's names for layers of the gated delta rule were not measured",
    Family.OLMOE: "Megatron-Bridge's names of OLMoE were not compared with Transformers",
    Family.MINIMAX_M2: "Megatron-Bridge's names of MiniMax-M2 were not compared with Transformers",
    Family.ERNIE4_5_MOE: "Megatron-Bridge configures ERNIE-4.5 with sigmoid scores, and its model has softmax",
}
# Attention heads that vLLM's kernel for CPUs is compiled for.
CPU_ENGINE_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Numbers that latent attention keeps of a token, as that kernel takes them: 512 and 64 that are turned.
CPU_ENGINE_LATENT = 576
# The width of the tiles that it multiplies experts in.
CPU_ENGINE_COLUMNS = 32
# Families that publish all experts as one tensor, for which PEFT has no adapters.
UNADAPTED_EXPERTS = frozenset({Family.GPT_OSS})
