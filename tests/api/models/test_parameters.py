"""Counts by hand, term by term, for one small model of every family, and how the counts behave."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_configs import any_config, config
from moejob_api.models.families import shape_of
from moejob_api.models.parameters import (
    ParameterCounts,
    active_parameters,
    embedding_weights,
    final_norm_weights,
    layer_kinds,
    layer_weights,
    model_weights,
    mtp_parameters,
    mtp_weights,
    output_weights,
    total_parameters,
)
from moejob_api.models.shape import DenseMLP, Family, GroupedAttention, Layer, LinearAttention, ModelShape

# hidden 24, 5 layers, 6 heads of 10 (2 for keys and values), dense 14, vocabulary 40.
# 8 experts of 18, 3 for each token.
VOCABULARY = 40 * 24
NORMS = 2 * 24
# Gate, up and down.
DENSE = 3 * 24 * 14
QUERIES = 24 * 60
KEYS_AND_VALUES = 2 * 24 * 20
OUTPUT = 60 * 24
HEAD_NORMS = 2 * 10
ROUTER = 8 * 24
# Latent attention: queries through 22, keys and values through 16, heads of 8 + 4, values of 12.
QUERY_DOWN = 24 * 22 + 22
QUERY_UP = 22 * 6 * (8 + 4)
KEY_VALUE_DOWN = 24 * (16 + 4) + 16
KEY_VALUE_UP = 16 * 6 * (8 + 12)
LATENT_OUTPUT = 6 * 12 * 24
# Gated delta rule: 3 key heads of 6, 9 value heads of 4, convolution of 5.
LINEAR_INPUTS = 24 * (18 + 18 + 36 + 36 + 9 + 9)
CONVOLUTION = 5 * (18 + 18 + 36)
LINEAR_OUTPUT = 36 * 24


def around(*layers: tuple[int, ParameterCounts]) -> ParameterCounts:
    """A model with a number of layers of each kind, each with its two norms, between embedding and output."""
    total = ParameterCounts(tensor=2 * VOCABULARY, replicated=24)
    for count, weights in layers:
        total += (weights + ParameterCounts(replicated=NORMS)) * count
    return total


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        pytest.param(
            Family.LLAMA,
            {},
            around((5, ParameterCounts(tensor=QUERIES + OUTPUT + DENSE, key_value=KEYS_AND_VALUES))),
            id="llama",
        ),
        pytest.param(
            Family.LLAMA,
            {"attention_bias": True, "mlp_bias": True},
            around(
                (
                    5,
                    ParameterCounts(
                        tensor=QUERIES + 60 + OUTPUT + DENSE + 2 * 14,
                        key_value=KEYS_AND_VALUES + 2 * 20,
                        replicated=24 + 24,
                    ),
                )
            ),
            id="llama with biases",
        ),
        pytest.param(
            Family.QWEN2,
            {},
            around((5, ParameterCounts(tensor=QUERIES + 60 + OUTPUT + DENSE, key_value=KEYS_AND_VALUES + 2 * 20))),
            id="qwen2",
        ),
        pytest.param(
            Family.QWEN3,
            {},
            around(
                (5, ParameterCounts(tensor=QUERIES + OUTPUT + DENSE, key_value=KEYS_AND_VALUES, replicated=HEAD_NORMS))
            ),
            id="qwen3",
        ),
        pytest.param(
            Family.MIXTRAL,
            {},
            around((5, ParameterCounts(QUERIES + OUTPUT, KEYS_AND_VALUES, ROUTER, routed=8 * DENSE))),
            id="mixtral",
        ),
        pytest.param(
            Family.QWEN2_MOE,
            {},
            around(
                (
                    5,
                    ParameterCounts(
                        tensor=QUERIES + 60 + OUTPUT + 3 * 24 * 20,
                        key_value=KEYS_AND_VALUES + 2 * 20,
                        replicated=ROUTER + 24,
                        routed=8 * 3 * 24 * 18,
                    ),
                )
            ),
            id="qwen2_moe",
        ),
        pytest.param(
            Family.QWEN3_MOE,
            {"mlp_only_layers": [0]},
            around(
                (1, ParameterCounts(QUERIES + OUTPUT + DENSE, KEYS_AND_VALUES, HEAD_NORMS)),
                (4, ParameterCounts(QUERIES + OUTPUT, KEYS_AND_VALUES, HEAD_NORMS + ROUTER, routed=8 * 3 * 24 * 18)),
            ),
            id="qwen3_moe with a plain layer",
        ),
        pytest.param(
            Family.QWEN3_NEXT,
            {},
            around(
                (4, ParameterCounts(tensor=LINEAR_INPUTS + 2 * 9 + LINEAR_OUTPUT, replicated=CONVOLUTION + 4)),
                (1, ParameterCounts(2 * QUERIES + OUTPUT, KEYS_AND_VALUES, HEAD_NORMS)),
            )
            + ParameterCounts(tensor=3 * 24 * 20, replicated=ROUTER + 24, routed=8 * 3 * 24 * 18) * 5,
            id="qwen3_next",
        ),
        pytest.param(
            Family.DEEPSEEK_V2,
            {"q_lora_rank": None},
            around(
                (
                    2,
                    ParameterCounts(
                        tensor=24 * 6 * (8 + 4) + KEY_VALUE_UP + LATENT_OUTPUT + DENSE,
                        replicated=KEY_VALUE_DOWN,
                    ),
                ),
                (
                    3,
                    ParameterCounts(
                        tensor=24 * 6 * (8 + 4) + KEY_VALUE_UP + LATENT_OUTPUT + 3 * 24 * (2 * 18),
                        replicated=KEY_VALUE_DOWN + ROUTER,
                        routed=8 * 3 * 24 * 18,
                    ),
                ),
            ),
            id="deepseek_v2 with whole queries",
        ),
        pytest.param(
            Family.DEEPSEEK_V3,
            {},
            around(
                (2, ParameterCounts(tensor=DENSE)),
                (3, ParameterCounts(tensor=3 * 24 * (2 * 18), replicated=ROUTER, routed=8 * 3 * 24 * 18)),
            )
            + ParameterCounts(tensor=QUERY_UP + KEY_VALUE_UP + LATENT_OUTPUT, replicated=QUERY_DOWN + KEY_VALUE_DOWN)
            * 5,
            id="deepseek_v3",
        ),
        pytest.param(
            Family.GLM4_MOE,
            {"attention_bias": True, "use_qk_norm": True},
            around(
                (2, ParameterCounts(tensor=DENSE)),
                (3, ParameterCounts(tensor=3 * 24 * (2 * 18), replicated=ROUTER, routed=8 * 3 * 24 * 18)),
            )
            + ParameterCounts(QUERIES + 60 + OUTPUT, KEYS_AND_VALUES + 2 * 20, HEAD_NORMS) * 5,
            id="glm4_moe",
        ),
        pytest.param(
            Family.GPT_OSS,
            {},
            around(
                (
                    5,
                    ParameterCounts(
                        tensor=QUERIES + 60 + OUTPUT + 6,
                        key_value=KEYS_AND_VALUES + 2 * 20,
                        replicated=24 + ROUTER + 8,
                        routed=8 * (DENSE + 2 * 14 + 24),
                    ),
                )
            ),
            id="gpt_oss",
        ),
    ],
)
def test_a_small_model_has_the_parameters_counted_by_hand(
    family: Family, changes: dict[str, Any], expected: ParameterCounts
) -> None:
    assert model_weights(shape_of(config(family, **changes))) == expected


def test_mtp_adds_a_layer_a_projection_and_three_norms_but_no_embedding() -> None:
    shape = shape_of(config(Family.DEEPSEEK_V3, num_nextn_predict_layers=2))
    one = layer_weights(shape, shape.layers[-1]) + ParameterCounts(replicated=2 * 24 * 24 + 3 * 24)
    assert mtp_weights(shape) == one * 2
    assert mtp_parameters(shape) == 2 * one.total
    assert total_parameters(shape) == total_parameters(shape_of(config(Family.DEEPSEEK_V3, num_nextn_predict_layers=0)))


def test_tied_weights_count_once() -> None:
    untied, tied = (shape_of(config(Family.LLAMA, tie_word_embeddings=tie)) for tie in (False, True))
    assert total_parameters(untied) - total_parameters(tied) == VOCABULARY
    assert (output_weights(untied), output_weights(tied)) == (ParameterCounts(tensor=VOCABULARY), ParameterCounts())
    assert embedding_weights(tied) == ParameterCounts(tensor=VOCABULARY)
    assert final_norm_weights(tied) == ParameterCounts(replicated=24)


def test_a_token_meets_only_the_experts_it_is_sent_to() -> None:
    shape = shape_of(config(Family.MIXTRAL))
    assert active_parameters(shape) == total_parameters(shape) - 5 * (8 - 3) * DENSE


def test_a_model_without_experts_is_all_active() -> None:
    shape = shape_of(config(Family.LLAMA))
    assert active_parameters(shape) == total_parameters(shape)


def test_layers_are_grouped_by_kind_in_order_of_appearance() -> None:
    kinds = layer_kinds(shape_of(config(Family.QWEN3_NEXT)))
    assert [(type(layer.attention), count) for layer, count in kinds] == [(LinearAttention, 4), (GroupedAttention, 1)]


def test_equal_layers_are_one_kind_even_when_they_are_not_one_object() -> None:
    layers = tuple(Layer(GroupedAttention(6, 2, 10), DenseMLP(14)) for _ in range(5))
    assert layer_kinds(ModelShape(Family.LLAMA, 24, 40, False, 64, layers)) == ((layers[0], 5),)


@pytest.mark.parametrize("family", list(Family))
@given(data=st.data())
def test_the_model_is_the_sum_of_its_parts(family: Family, data: st.DataObject) -> None:
    shape = shape_of(data.draw(any_config(family)))
    parts = [layer_weights(shape, layer) for layer in shape.layers]
    ends = [embedding_weights(shape), output_weights(shape), final_norm_weights(shape)]
    assert sum([*parts, *ends], ParameterCounts()) == model_weights(shape)
    assert total_parameters(shape) == sum(part.total for part in [*parts, *ends])
