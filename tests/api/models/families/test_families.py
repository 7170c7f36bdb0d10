"""The shapes read from config.json files, and the messages about those that cannot be read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_configs import MISSING, ODD, SMALL, any_config, config
from moejob_api.models import catalog
from moejob_api.models.families import READ_AS, keys, shape_of
from moejob_api.models.families.refused import REFUSED_MODELS
from moejob_api.models.parameters import active_parameters, model_weights, mtp_weights, total_parameters
from moejob_api.models.shape import (
    DenseMLP,
    Experts,
    Family,
    GroupedAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    ModelShape,
)
from moejob_api.problems import InvalidSpec, Problem, Rule

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 10**30, -(10**30), 10**4000, 2**31])
    | st.floats()
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=10,
)
KEYS = sorted({key for changes in (*SMALL.values(), *(odd[2] for odd in ODD)) for key in changes} | {"model_type"})


def problem(values: object) -> Problem:
    """The one problem of a config that is refused."""
    with pytest.raises(InvalidSpec) as caught:
        shape_of(values)
    (only,) = caught.value.problems
    assert only.path == "spec.model.source"
    return only


def test_a_grouped_model_is_read_whole() -> None:
    layer = Layer(GroupedAttention(6, 2, 10, head_norm=True), Experts(8, 3, 18))
    assert shape_of(config(Family.QWEN3_MOE)) == ModelShape(Family.QWEN3_MOE, 24, 40, False, 64, (layer,) * 5)


def test_a_latent_model_is_read_whole() -> None:
    attention = LatentAttention(6, 22, 16, 8, 4, 12)
    dense = Layer(attention, DenseMLP(14))
    sparse = Layer(attention, Experts(8, 3, 18, shared_intermediate=36, selection_bias=True))
    expected = ModelShape(Family.DEEPSEEK_V3, 24, 40, False, 64, (dense,) * 2 + (sparse,) * 3, (sparse,))
    assert shape_of(config(Family.DEEPSEEK_V3)) == expected


def test_a_hybrid_model_is_read_whole() -> None:
    experts = Experts(8, 3, 18, shared_intermediate=20, shared_gate=True)
    linear = Layer(LinearAttention(3, 9, 6, 4, 5), experts)
    full = Layer(GroupedAttention(6, 2, 10, head_norm=True, output_gate=True), experts)
    expected = ModelShape(Family.QWEN3_NEXT, 24, 40, False, 64, (linear, linear, linear, full, linear))
    assert shape_of(config(Family.QWEN3_NEXT)) == expected


def test_the_text_of_a_model_that_reads_images_too_is_read_whole() -> None:
    experts = Experts(8, 3, 18, shared_intermediate=20, shared_gate=True)
    linear = Layer(LinearAttention(3, 9, 6, 4, 5, separate_gates=True), experts)
    full = Layer(GroupedAttention(6, 2, 10, head_norm=True, output_gate=True), experts)
    expected = ModelShape(Family.QWEN3_5_MOE, 24, 40, False, 64, (linear, linear, linear, full, linear))
    whole = _with_vision(config(Family.QWEN3_5_MOE))
    assert shape_of(whole) == shape_of(whole["text_config"]) == expected
    assert shape_of(whole | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}) == expected


def _with_vision(text: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 27}, "image_token_id": 39}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"text_config": None}, "text_config is null; expected an object with the text's", id="no text"),
        pytest.param(
            {"tie_word_embeddings": True},
            "tie_word_embeddings is true, and false in text_config; make both say the same",
            id="tied outside alone",
        ),
        pytest.param(
            {"architectures": ["Qwen3_5MoeModel"]},
            "architectures is ['Qwen3_5MoeModel']; expected a class ...ForConditionalGeneration",
            id="no head",
        ),
        pytest.param(
            {"quantization_config": {"quant_method": "awq"}}, "quantization_config says quant_method 'awq'", id="AWQ"
        ),
        pytest.param(
            {"text_config": config(Family.QWEN3_5_MOE, num_experts_per_tok=9)},
            "num_experts_per_tok 9 is more than the 8 experts",
            id="a text that is no model",
        ),
    ],
)
def test_a_model_of_several_parts_is_refused_where_its_text_is(changes: dict[str, Any], message: str) -> None:
    assert message in problem(_with_vision(config(Family.QWEN3_5_MOE)) | changes).message


@pytest.mark.parametrize(
    ("family", "changes", "sparse"),
    [
        pytest.param(Family.MIXTRAL, {}, [0, 1, 2, 3, 4], id="mixtral has experts everywhere"),
        pytest.param(Family.QWEN3_MOE, {"decoder_sparse_step": 2}, [1, 3], id="every second layer"),
        pytest.param(Family.QWEN3_MOE, {"mlp_only_layers": [0, 4]}, [1, 2, 3], id="all but those listed"),
        pytest.param(Family.QWEN2_MOE, {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1], id="both"),
        pytest.param(Family.DEEPSEEK_V2, {"first_k_dense_replace": MISSING}, [0, 1, 2, 3, 4], id="V2 from the start"),
        pytest.param(Family.DEEPSEEK_V3, {"first_k_dense_replace": MISSING}, [3, 4], id="V3 after three"),
        pytest.param(Family.GLM4_MOE, {"first_k_dense_replace": MISSING}, [1, 2, 3, 4], id="GLM after one"),
        pytest.param(Family.GLM4_MOE_LITE, {}, [1, 2, 3, 4], id="GLM-4.7-Flash after one"),
    ],
)
def test_experts_are_in_the_layers_that_the_config_says(
    family: Family, changes: dict[str, Any], sparse: list[int]
) -> None:
    layers = shape_of(config(family, **changes)).layers
    assert [index for index, layer in enumerate(layers) if isinstance(layer.mlp, Experts)] == sparse


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        pytest.param({"num_nextn_predict_layers": 2}, 2, id="two"),
        pytest.param({"num_nextn_predict_layers": 0}, 0, id="none"),
        pytest.param({"num_nextn_predict_layers": MISSING}, 1, id="one by default"),
        pytest.param({"num_nextn_predict_layers": MISSING, "num_mtp_layers": 3}, 3, id="by its newer name"),
    ],
)
@pytest.mark.parametrize("family", [Family.DEEPSEEK_V3, Family.GLM4_MOE])
def test_layers_that_predict_further_tokens_are_like_the_last_layer(
    family: Family, changes: dict[str, Any], count: int
) -> None:
    shape = shape_of(config(family, **changes))
    assert shape.mtp_layers == (shape.layers[-1],) * count


def test_the_dense_size_is_not_needed_where_every_layer_has_experts() -> None:
    assert shape_of(config(Family.QWEN3_MOE, intermediate_size=MISSING)) == shape_of(config(Family.QWEN3_MOE))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        pytest.param(
            Family.LLAMA,
            {"hidden_size": MISSING},
            "config.json has no hidden_size; expected a whole number from 1 to 2147483647",
            id="a missing size",
        ),
        pytest.param(
            Family.LLAMA,
            {"hidden_size": None},
            "config.json: hidden_size is null; expected a whole number from 1 to 2147483647",
            id="null",
        ),
        pytest.param(
            Family.LLAMA, {"hidden_size": -4}, "hidden_size is -4; expected a whole number from 1", id="negative"
        ),
        pytest.param(Family.LLAMA, {"vocab_size": 0}, "vocab_size is 0; expected", id="zero"),
        pytest.param(Family.LLAMA, {"vocab_size": True}, "vocab_size is true; expected", id="a switch for a size"),
        pytest.param(Family.LLAMA, {"vocab_size": "40"}, "vocab_size is '40'; expected", id="text for a size"),
        pytest.param(Family.LLAMA, {"vocab_size": 40.0}, "vocab_size is 40.0; expected", id="a fraction for a size"),
        pytest.param(Family.LLAMA, {"hidden_size": 10**30}, f"hidden_size is {10**30}; expected", id="absurd"),
        pytest.param(
            Family.LLAMA,
            {"hidden_size": 10**5000},
            "hidden_size is a number of too many digits; expected",
            id="unprintable",
        ),
        pytest.param(
            Family.LLAMA,
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000; expected a whole number from 1 to 10000",
            id="too many layers",
        ),
        pytest.param(
            Family.DEEPSEEK_V3,
            {"num_nextn_predict_layers": 10**9},
            "num_nextn_predict_layers is 1000000000; expected a whole number from 0 to 10000",
            id="too many further layers",
        ),
        pytest.param(
            Family.LLAMA, {"attention_bias": "yes"}, "attention_bias is 'yes'; expected true or false", id="a switch"
        ),
        pytest.param(
            Family.LLAMA, {"hidden_size": 25}, "hidden_size 25 is not a multiple of num_attention_heads 6", id="heads"
        ),
        pytest.param(
            Family.QWEN2,
            {"num_key_value_heads": 4},
            "num_attention_heads 6 is not a multiple of num_key_value_heads 4",
            id="heads in uneven groups",
        ),
        pytest.param(
            Family.MIXTRAL, {"num_key_value_heads": MISSING}, "config.json has no num_key_value_heads", id="no groups"
        ),
        pytest.param(
            Family.QWEN2,
            {"head_dim": MISSING, "hidden_size": 4},
            "hidden_size 4 leaves nothing for each of num_attention_heads 6",
            id="more heads than hidden",
        ),
        pytest.param(
            Family.MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts", id="experts"
        ),
        pytest.param(
            Family.QWEN3_NEXT,
            {"linear_num_value_heads": 8},
            "linear_num_value_heads 8 is not a multiple of linear_num_key_heads 3",
            id="linear heads",
        ),
        pytest.param(
            Family.QWEN3_MOE,
            {"mlp_only_layers": [1, "2"]},
            "mlp_only_layers is [1, '2']; expected a list of layer indices",
            id="a list of layers",
        ),
        pytest.param(
            Family.QWEN3_MOE,
            {"decoder_sparse_step": 2, "intermediate_size": MISSING},
            "config.json has no intermediate_size",
            id="dense layers of no size",
        ),
        pytest.param(
            Family.GPT_OSS,
            {"layer_types": ["full_attention"] * 4},
            "expected a list of 5 entries (num_hidden_layers), each full_attention or sliding_attention",
            id="too few layer types",
        ),
        pytest.param(
            Family.QWEN3_NEXT,
            {"layer_types": ["sliding_attention"] * 5},
            "expected a list of 5 entries (num_hidden_layers), each linear_attention or full_attention",
            id="an unknown layer type",
        ),
        pytest.param(
            Family.DEEPSEEK_V3,
            {"moe_layer_freq": 2},
            "moe_layer_freq is 2; expected 1: Transformers builds experts in every layer whatever it says",
            id="a frequency that is not followed",
        ),
        pytest.param(
            Family.DEEPSEEK_V3,
            {"scoring_func": "softmax"},
            "scoring_func is 'softmax'; expected 'sigmoid'",
            id="scores",
        ),
        pytest.param(Family.DEEPSEEK_V2, {"mlp_bias": True}, "mlp_bias is true; expected false", id="a bias"),
    ],
)
def test_a_config_that_is_no_model_is_refused_with_key_value_and_expectation(
    family: Family, changes: dict[str, Any], message: str
) -> None:
    refusal = problem(config(family, **changes))
    assert refusal.rule is Rule.MODEL_CONFIG
    assert refusal.message.startswith("config.json")
    assert message in refusal.message


def _meaning(family: Family, changes: dict[str, Any], message: str, name: str) -> Any:
    return pytest.param(family, changes, message, id=name)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        _meaning(
            Family.LLAMA, {"attention_dropout": 0.1}, "attention_dropout is 0.1; expected 0: the trainer", "dropout"
        ),
        _meaning(Family.MIXTRAL, {"router_jitter_noise": 0.01}, "router_jitter_noise is 0.01; expected 0: ", "noise"),
        _meaning(Family.QWEN3, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu' or 'swish': ", "gelu"),
        _meaning(
            Family.QWEN3, {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; expected a number above 0", "epsilon"
        ),
        _meaning(Family.QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob is 1; expected true or false", "a switch"),
        _meaning(Family.DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob is true; expected false: Tr", "no norm"),
        _meaning(
            Family.DEEPSEEK_V2, {"topk_method": "random"}, "topk_method is 'random'; expected 'greedy' or", "choice"
        ),
        _meaning(Family.GPT_OSS, {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; expected 7.0: the trainer cl", "clamp"),
        _meaning(Family.GPT_OSS, {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5; expected 1.702: the trainer", "alpha"),
        _meaning(
            Family.DEEPSEEK_V3, {"num_key_value_heads": 2}, "num_key_value_heads 2 is not num_attention_heads 6", "own"
        ),
        _meaning(Family.DEEPSEEK_V3, {"n_group": 3}, "n_group 3 does not divide the 8 experts", "uneven groups"),
        _meaning(Family.DEEPSEEK_V3, {"n_group": 8}, "n_group 8 leaves one of 8 experts to a group", "small groups"),
        _meaning(Family.DEEPSEEK_V3, {"topk_group": 3}, "topk_group 3 is more than n_group 2", "too many groups"),
        _meaning(
            Family.GLM4_MOE,
            {"n_group": 4, "topk_group": 1},
            "num_experts_per_tok 3 is more than the 2 ex",
            "few experts",
        ),
        _meaning(
            Family.DEEPSEEK_V2,
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            "n_group 3 does not divide the 8 experts",
            "uneven groups of V2",
        ),
        _meaning(Family.LLAMA, {"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; expected an object", "no object"),
        _meaning(
            Family.LLAMA,
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic'; the trainer computes default, linear, llama3, yarn",
            "angles by length",
        ),
        _meaning(
            Family.LLAMA,
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope_type is 'longrope'; the trainer",
            "long angles",
        ),
        _meaning(
            Family.LLAMA,
            {"rope_scaling": {"rope_type": "linear"}},
            "factor of rope_type linear is null; exp",
            "no factor",
        ),
        _meaning(
            Family.QWEN2,
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": "no"}},
            "truncate of rope_type yarn is 'no'; expected true or false",
            "a word for a switch",
        ),
        _meaning(
            Family.LLAMA,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor and high_freq_factor of rope_type llama3 are equal",
            "no band",
        ),
        _meaning(
            Family.QWEN3,
            {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}},
            "rope_parameters has other angles for each kind of layer",
            "angles by layer",
        ),
        _meaning(Family.LLAMA, {"rope_theta": 0}, "rope_theta is 0; expected a number above 0", "theta"),
        _meaning(Family.LLAMA, {"partial_rotary_factor": 0.5}, "Transformers turns whole heads in llama", "part heads"),
        _meaning(
            Family.GLM4_MOE, {"partial_rotary_factor": 2}, "partial_rotary_factor is 2; expected a", "twice the head"
        ),
        _meaning(Family.LLAMA, {"head_dim": 9}, "9 of the 9 elements of a head turn with their position", "odd heads"),
        _meaning(
            Family.GLM4_MOE_LITE, {"first_k_dense_replace": 2}, "first_k_dense_replace is 2; expected 1", "not by list"
        ),
        _meaning(
            Family.GLM4_MOE_LITE,
            {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]},
            "a dense layer behind a sparse one",
            "plain layers in between",
        ),
        _meaning(Family.OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0; expected null", "clipped"),
        _meaning(Family.OLMOE, {"attention_bias": True}, "attention_bias is true; expected false", "no such bias"),
        _meaning(Family.ERNIE4_5_MOE, {"use_bias": True}, "use_bias is true; expected false", "biases everywhere"),
        _meaning(Family.ERNIE4_5_MOE, {"moe_norm_min": 0.5}, "moe_norm_min is 0.5; expected 1e-12", "largest divisor"),
        _meaning(
            Family.MINIMAX_M2,
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5, and rotary_dim, which engines read, says 0.6",
            "two parts of a head",
        ),
        _meaning(Family.OLMOE, {"sliding_window": 8}, "sliding_window is 8; expected null", "a window of OLMoE"),
        _meaning(Family.GLM4_MOE_LITE, {"head_dim": 10}, "head_dim is 10; expected 4", "another name"),
        _meaning(Family.DEEPSEEK_V3, {"qk_rope_head_dim": 5}, "5 of the 5 elements of a head turn", "odd latent heads"),
        _meaning(
            Family.LLAMA,
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config says quant_method 'gptq'; the trainer reads fp8 only, and exports none: use the model",
            "quantized",
        ),
        _meaning(
            Family.QWEN3,
            {"quantization_config": {"quant_method": "mxfp4"}},
            "reads fp8 only",
            "packed for another family",
        ),
        _meaning(
            Family.LLAMA,
            {"compression_config": {"format": "int"}},
            "compression_config says quant_method null",
            "compressed",
        ),
        _meaning(
            Family.LLAMA,
            {"architectures": ["LlamaForSequenceClassification"]},
            "only models that predict the next token are trained",
            "a classifier",
        ),
        _meaning(Family.LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder is true; expected false: ", "encoder"),
    ],
)
def test_a_key_that_means_what_is_not_computed_is_refused_with_its_value_and_the_fix(
    family: Family, changes: dict[str, Any], message: str
) -> None:
    assert message in problem(config(family, **changes)).message


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param(Family.LLAMA, {"attention_dropout": 0.0, "hidden_act": "swish"}, id="no dropout"),
        pytest.param(Family.MIXTRAL, {"router_jitter_noise": 0}, id="no noise"),
        pytest.param(Family.GPT_OSS, {"quantization_config": {"quant_method": "mxfp4"}}, id="packed as published"),
        pytest.param(Family.DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, id="blocks as published"),
        pytest.param(Family.GLM4_MOE, {"partial_rotary_factor": 0.25}, id="a part of each head"),
        pytest.param(
            Family.DEEPSEEK_V3,
            {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0, "mscale_all_dim": None, "beta_fast": 32}},
            id="nothing for absent",
        ),
        pytest.param(Family.LLAMA, {"a_key_of_theirs": 1}, id="a key that Transformers does not read"),
    ],
)
def test_a_key_that_says_what_is_computed_anyway_is_accepted(family: Family, changes: dict[str, Any]) -> None:
    assert shape_of(config(family, **changes)).family is family


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_a_model_that_is_not_trained_is_refused_by_name_with_the_page_that_says_how_to_add_it(name: str) -> None:
    refusal = problem({"model_type": name, "vision_config": {}, "text_config": {}})
    assert refusal.rule is Rule.MODEL_FAMILY
    assert REFUSED_MODELS[name] in refusal.message
    assert f"(model_type {name}) " in refusal.message
    assert refusal.message.endswith("or add it as docs/add-a-model.md says")


def test_no_model_that_is_trained_is_refused_by_name() -> None:
    assert not REFUSED_MODELS.keys() & {*Family, *READ_AS}


@pytest.mark.parametrize(("name", "family"), READ_AS.items())
def test_a_name_of_its_authors_is_read_as_the_family_whose_layers_it_has(name: str, family: Family) -> None:
    published = config(family)
    assert shape_of(published | {"model_type": name}) == shape_of(published)


def test_every_key_of_the_shipped_configs_has_an_entry_that_says_what_is_done_about_it() -> None:
    for name in catalog.model_names():
        values = catalog.find_config(name)
        assert values is not None
        unknown = values.keys() - keys.KEYS[Family(str(values["model_type"]))].keys()
        assert not unknown, f"{name}: {unknown}"


def test_the_message_begins_with_where_the_config_came_from() -> None:
    with pytest.raises(InvalidSpec, match=r"^spec\.model\.source: /models/a/config\.json: vocab_size is 0;"):
        shape_of(config(Family.LLAMA, vocab_size=0), "/models/a/config.json")


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    refusal = problem({"model_type": "made_up_text"})
    assert refusal.rule is Rule.MODEL_FAMILY
    assert "model_type 'made_up_text' is not supported; use a model whose model_type is one of llama, qwen2," in (
        refusal.message
    )
    assert all(family in refusal.message for family in Family)


def test_a_model_that_sees_pictures_is_refused() -> None:
    refusal = problem({"model_type": "glm4v_moe", "text_config": config(Family.GLM4_MOE)})
    assert refusal.rule is Rule.MODEL_FAMILY
    assert "model_type 'glm4v_moe' reads more than text, and only text is trained" in refusal.message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param([1], "config.json holds [1]; expected a JSON object", id="a list"),
        pytest.param(None, "config.json holds null; expected a JSON object", id="null"),
        pytest.param({}, "config.json: model_type is null; expected one of llama", id="nothing"),
        pytest.param({"model_type": 3}, "config.json: model_type is 3; expected one of llama", id="a number"),
    ],
)
def test_what_is_not_a_config_is_refused(values: object, message: str) -> None:
    refusal = problem(values)
    assert refusal.rule is Rule.MODEL_CONFIG
    assert refusal.message.startswith(message)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("a" * 10_000, id="a long text"),
        pytest.param(list(range(10_000)), id="a long list"),
        pytest.param({"a": ["b" * 10_000]}, id="an object"),
        pytest.param(10**4000, id="a long number"),
    ],
)
def test_a_message_stays_short_whatever_the_value(value: object) -> None:
    assert len(problem(config(Family.LLAMA, vocab_size=value)).message) < 300


@pytest.mark.parametrize("family", list(Family))
@given(data=st.data())
def test_any_config_of_a_family_has_a_shape_and_whole_counts(family: Family, data: st.DataObject) -> None:
    shape = shape_of(data.draw(any_config(family)))
    weights = model_weights(shape) + mtp_weights(shape)
    assert 0 < active_parameters(shape) <= total_parameters(shape) <= weights.total
    assert weights.routed == 0 or shape.experts is not None


@pytest.mark.parametrize("family", list(Family))
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON | st.just(MISSING), min_size=1, max_size=3))
def test_a_broken_config_is_counted_or_refused_but_never_crashes(family: Family, changes: dict[str, Any]) -> None:
    try:
        shape = shape_of(config(family, **changes))
    except InvalidSpec:
        return
    assert total_parameters(shape) > 0
    assert active_parameters(shape) > 0


@given(values=JSON)
def test_any_json_at_all_is_refused_or_counted(values: object) -> None:
    with pytest.raises(InvalidSpec):
        shape_of(values)
