"""Each of Megatron's tensors is cut into the parts that checkpoints and conversion know."""

from __future__ import annotations

import pytest

from model_configs import config
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family, ModelShape
from moejob_trainer.megatron_models.names import find_stored_parts
from moejob_trainer.model.stage import WeightPart


def shape(**changes: object) -> ModelShape:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    return shape_of(config(Family.QWEN3_MOE, **sizes | changes))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt.embedding.word_embeddings.weight", "embedding.weight"),
        ("gpt.decoder.layers.1.mlp.experts.down", "layers.3.moe.experts.down"),
        ("gpt.decoder.layers.0.mlp.router.expert_bias", "layers.2.moe.router.selection_bias"),
        ("gpt.output_layer.weight", "output.weight"),
        # A name that the model does not have: the stage refuses it.
        ("gpt.decoder.layers.0.mlp.linear_fc1.bias", "layers.2.mlp.linear_fc1.bias"),
    ],
)
def test_a_tensor_has_the_name_of_the_whole_model(name: str, expected: str) -> None:
    assert find_stored_parts(name, shape(), range(2, 4), 1) == [WeightPart(expected)]


def test_a_tied_output_is_the_embedding() -> None:
    tied = shape(tie_word_embeddings=True)
    assert find_stored_parts("gpt.output_layer.weight", tied, range(4), 1) == [WeightPart("embedding.weight")]


def test_queries_keys_and_values_lie_group_by_group() -> None:
    query, both = "layers.0.attention.query.weight", "layers.0.attention.key_value.weight"
    parts = find_stored_parts("gpt.decoder.layers.0.self_attention.linear_qkv.weight", shape(), range(4), 1)
    assert parts == [
        WeightPart(query, slice(0, 2)),
        WeightPart(both, slice(0, 1)),
        WeightPart(query, slice(2, 4)),
        WeightPart(both, slice(1, 2)),
    ]
    halved = find_stored_parts("gpt.decoder.layers.0.self_attention.linear_qkv.weight", shape(), range(4), 2)
    assert halved == parts[:2]
