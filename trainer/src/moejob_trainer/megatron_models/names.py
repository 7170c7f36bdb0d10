"""Places of Megatron's tensors in the whole model, in the names under which checkpoints and conversion have it.

Both keep a rank's numbers in the same order: `linear_fc1` [2 f, h] is our `gate_up` [2, f, h]. One tensor of Megatron
holds two of ours: `linear_qkv` has, for each group of heads, the group's queries, then its key and its value. With 4
heads in 2 groups its parts are

    query rows 0..1 | key_value row 0 | query rows 2..3 | key_value row 1

in which a row of queries is one head, and a row of `key_value` is the key and the value of one group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from moejob_api.models.shape import GroupedAttention, ModelShape
from moejob_trainer.model.stage import WeightPart

_ENDS: Mapping[str, str] = {
    "embedding.word_embeddings.weight": "embedding.weight",
    "decoder.final_layernorm.weight": "final_norm.weight",
    "output_layer.weight": "output.weight",
}
_OF_LAYER: Mapping[str, str] = {
    "input_layernorm.weight": "attention_norm.weight",
    "self_attention.q_layernorm.weight": "attention.query_norm.weight",
    "self_attention.k_layernorm.weight": "attention.key_norm.weight",
    "self_attention.core_attention.sinks": "attention.sinks",
    "self_attention.linear_proj.weight": "attention.output.weight",
    "self_attention.linear_proj.bias": "attention.output.bias",
    "pre_mlp_layernorm.weight": "mlp_norm.weight",
    "mlp.linear_fc1.weight": "mlp.gate_up.weight",
    "mlp.linear_fc2.weight": "mlp.down.weight",
    "mlp.router.weight": "moe.router.weight",
    "mlp.router.bias": "moe.router.bias",
    "mlp.router.expert_bias": "moe.router.selection_bias",
    "mlp.experts.gate_up": "moe.experts.gate_up",
    "mlp.experts.gate_up_bias": "moe.experts.gate_up_bias",
    "mlp.experts.down": "moe.experts.down",
    "mlp.experts.down_bias": "moe.experts.down_bias",
    "mlp.shared_experts.linear_fc1.weight": "moe.shared.gate_up.weight",
    "mlp.shared_experts.linear_fc2.weight": "moe.shared.down.weight",
    "mlp.shared_experts.gate_weight": "moe.shared_gate.weight",
}
_JOINED = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def find_stored_parts(name: str, shape: ModelShape, layers: range, tensor_size: int) -> Sequence[WeightPart]:
    """Return the parts of one of a chunk's tensors; a name that our model does not have stays as it is."""
    name = name.removeprefix("gpt.")
    match = _LAYER.fullmatch(name)
    if match is None:
        is_tied = shape.tied_embeddings and name == "output_layer.weight"
        return [WeightPart("embedding.weight" if is_tied else _ENDS.get(name, name))]
    index, inner = layers[int(match[1])], match[2]
    prefix = f"layers.{index}."
    joined = _JOINED.fullmatch(inner)
    attention = shape.layers[index].attention
    if joined is None or not isinstance(attention, GroupedAttention):
        return [WeightPart(prefix + _OF_LAYER.get(inner, inner))]
    heads = attention.heads // attention.key_value_heads
    return [
        part
        for group in range(attention.key_value_heads // tensor_size)
        for part in (
            WeightPart(f"{prefix}attention.query.{joined[1]}", slice(group * heads, (group + 1) * heads)),
            WeightPart(f"{prefix}attention.key_value.{joined[1]}", slice(group, group + 1)),
        )
    ]
