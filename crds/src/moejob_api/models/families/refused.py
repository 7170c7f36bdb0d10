"""Models that people ask for and that are not trained, each with what it needs that is not there.

The keys are values of model_type. A test compares them with the config classes of Transformers, so that a sentence
which says that Transformers lacks a model goes when the next version has it.
"""

from __future__ import annotations

from collections.abc import Mapping

# Transformers has no code for these, and every run is compared with its code.
ABSENT_MODELS: Mapping[str, str] = {
    "bailing_moe": "Ling and Ring (model_type bailing_moe) are not in Transformers, which every run is compared with",
    "bailing_moe_v2": "Ling 2 (model_type bailing_moe_v2) is not in Transformers, which every run is compared with",
    "deepseek": "DeepSeek-MoE v1 (model_type deepseek) is not in Transformers, which every run is compared with",
}
# Transformers computes in these what no layer here does.
UNLIKE_MODELS: Mapping[str, str] = {
    "afmoe": "Trinity (model_type afmoe) gates what attention gives, and has norms behind attention and experts",
    "cohere2_moe": "Cohere 2 with experts (model_type cohere2_moe) has norms that subtract the mean, and scaled logits",
    "deepseek_v32": "DeepSeek-V3.2 (model_type deepseek_v32) attends to tokens that an indexer chooses",
    "deepseek_v4": "DeepSeek-V4 (model_type deepseek_v4) attends to tokens that an indexer chooses",
    "dots1": "dots.llm1 (model_type dots1) was not measured: DeepSeek-V3's experts behind Qwen3's attention",
    "ernie4_5": "ERNIE-4.5 without experts (model_type ernie4_5) was not measured",
    "exaone_moe": "K-EXAONE (model_type exaone_moe) turns queries and keys in layers with a window alone",
    "flex_olmo": "FlexOlmo (model_type flex_olmo) has norms behind attention and experts instead of before them",
    "gemma2": "Gemma 2 (model_type gemma2) has norms behind attention and MLP",
    "gemma3_text": "Gemma 3 (model_type gemma3_text) has norms behind attention and MLP",
    "glm4": "GLM-4 without experts (model_type glm4) has norms behind attention and MLP",
    "glm_moe_dsa": "GLM-5 (model_type glm_moe_dsa) attends to tokens that an indexer chooses",
    "granitemoe": "Granite (model_type granitemoe) multiplies embeddings, residuals and logits by numbers",
    "granitemoehybrid": "Granite 4 (model_type granitemoehybrid) has layers of Mamba",
    "hunyuan_v1_moe": "Hunyuan (model_type hunyuan_v1_moe) norms queries and keys after they turn",
    "jamba": "Jamba (model_type jamba) has layers of Mamba",
    "kimi_linear": "Kimi-Linear (model_type kimi_linear) has layers of a gated delta rule",
    "lfm2_moe": "LFM2 (model_type lfm2_moe) has layers of convolutions",
    "llama4": "Llama 4 (model_type llama4) reads more than text, and only text is trained",
    "llama4_text": "Llama 4 (model_type llama4_text) needs attention in chunks and layers without positions",
    "longcat_flash": "LongCat-Flash (model_type longcat_flash) has two attentions in a layer, and empty experts",
    "mimo_v2_flash": "MiMo-V2-Flash (model_type mimo_v2_flash) has other heads in layers with a window",
    "minimax": "MiniMax-Text-01 (model_type minimax) has layers of lightning attention",
    "ministral3": "Ministral 3 (model_type ministral3) scales queries by their position",
    "mistral": "Mistral without experts (model_type mistral) was not measured",
    "mistral4": "Mistral 4 (model_type mistral4) scales queries by their position",
    "nemotron_h": "Nemotron (model_type nemotron_h) has layers of Mamba",
    "olmo2": "OLMo 2 (model_type olmo2) has norms behind attention and MLP instead of before them",
    "olmo3": "OLMo 3 (model_type olmo3) has norms behind attention and MLP instead of before them",
    "phi3": "Phi-3 (model_type phi3) was not measured: it publishes queries, keys and values as one tensor",
    "phimoe": "Phi-3.5-MoE (model_type phimoe) has norms that subtract the mean, and routes by a sparse mixer",
    "qwen3_5": "Qwen3.5 without experts (model_type qwen3_5) has layers of a gated delta rule, and reads images",
    "seed_oss": "Seed-OSS (model_type seed_oss) was not measured",
    "solar_open": "Solar Open (model_type solar_open) was not measured",
}
REFUSED_MODELS: Mapping[str, str] = {**ABSENT_MODELS, **UNLIKE_MODELS}
