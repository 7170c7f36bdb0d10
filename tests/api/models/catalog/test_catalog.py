"""The shipped models: their sizes as their authors published them, and the names they go by."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_api.models.parameters import active_parameters, layer_weights, mtp_parameters, total_parameters
from moejob_api.models.shape import Experts, ModelShape

# The second number is what the safetensors files hold beside the model's parameters, so that the sum of both is the
# total that the hub shows; None where the files are quantized and their total counts scales.
PARAMETERS: dict[str, tuple[int, int | None]] = {
    "Qwen/Qwen1.5-MoE-A2.7B": (14_315_784_192, 0),
    "Qwen/Qwen2-57B-A14B": (57_408_658_944, 0),
    "Qwen/Qwen2.5-0.5B": (494_032_768, 0),
    "Qwen/Qwen2.5-1.5B": (1_543_714_304, 0),
    "Qwen/Qwen2.5-7B": (7_615_616_512, 0),
    "Qwen/Qwen2.5-Math-7B": (7_615_616_512, 0),
    # The file holds the output projection a second time, though it is the embedding.
    "Qwen/Qwen3-0.6B": (596_049_920, 151_936 * 1024),
    "Qwen/Qwen3-235B-A22B": (235_093_634_560, 0),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, 0),
    "Qwen/Qwen3-32B": (32_762_123_264, 0),
    "Qwen/Qwen3-8B": (8_190_735_360, 0),
    # A module for further tokens, which the config does not mention; Qwen3-Coder-Next, without it, has exactly 0 more.
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, 1_650_471_424),
    "MiniMaxAI/MiniMax-M2": (228_689_748_992, None),
    "allenai/OLMoE-1B-7B-0924": (6_919_161_856, 0),
    # As Transformers counts it without the bias to choose experts by; MTP comes on top.
    "baidu/ERNIE-4.5-21B-A3B-PT": (21_825_436_160, None),
    "deepseek-ai/DeepSeek-V2": (235_741_434_880, 0),
    "deepseek-ai/DeepSeek-V2-Lite": (15_706_484_224, 0),
    # In 16 bits and without MTP it is 671,026,419,200: 58 layers have a bias to choose experts by, no parameter here.
    "deepseek-ai/DeepSeek-V3": (671_026_404_352, None),
    # Old files hold the frequencies of the rotary embedding in every layer.
    "meta-llama/Llama-2-13b-hf": (13_015_864_320, 40 * 64),
    "meta-llama/Llama-2-7b-hf": (6_738_415_616, 32 * 64),
    "meta-llama/Llama-3.1-405B": (405_853_388_800, 0),
    "meta-llama/Llama-3.1-70B": (70_553_706_496, 0),
    "meta-llama/Llama-3.1-8B": (8_030_261_248, 0),
    "mistralai/Mixtral-8x22B-v0.1": (140_620_634_112, 0),
    "mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, 0),
    # The bias to choose experts by in 26 layers, and 64 numbers more in all 27: rotary frequencies, most likely.
    "moonshotai/Moonlight-16B-A3B": (15_960_108_544, 26 * 64 + 27 * 64),
    # Ours, for laptops and tests.
    "moejob/tiny-moe": (1_512_832, 0),
    "openai/gpt-oss-120b": (116_829_156_672, 0),
    "openai/gpt-oss-20b": (20_914_757_184, 0),
    # The bias to choose experts by, in 90 layers; MTP with its own copies of embedding and output projection.
    "zai-org/GLM-4.5": (352_797_814_784, 90 * 160 + 3_988_069_632 + 2 * 151_552 * 5120),
    # As Transformers counts it; MTP and the bias to choose experts by come on top.
    "zai-org/GLM-4.7-Flash": (29_943_390_976, None),
    "zai-org/GLM-4.5-Air": (106_852_245_504, 46 * 128 + 2_375_059_456 + 2 * 151_552 * 4096),
}
PUBLISHED = {
    "Qwen/Qwen3-0.6B": 751_632_384,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 81_324_862_720,
    "meta-llama/Llama-2-13b-hf": 13_015_866_880,
    "meta-llama/Llama-2-7b-hf": 6_738_417_664,
    "moonshotai/Moonlight-16B-A3B": 15_960_111_936,
    "zai-org/GLM-4.5": 358_337_791_296,
    "zai-org/GLM-4.5-Air": 110_468_824_832,
}


def shape(name: str) -> ModelShape:
    config = catalog.find_config(name)
    assert config is not None
    return shape_of(config, name)


def test_every_shipped_model_has_its_size_pinned() -> None:
    assert list(catalog.shipped_names()) == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_model_has_its_published_parameters(name: str) -> None:
    count, beside = PARAMETERS[name]
    assert total_parameters(shape(name)) == count
    if name in PUBLISHED:
        assert beside is not None
        assert count + beside == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "further"),
    [
        pytest.param("deepseek-ai/DeepSeek-V3", 11_610_067_968, id="V3: 11.5 B unique, says its README"),
        pytest.param("zai-org/GLM-4.5", 3_988_069_632, id="GLM-4.5"),
        pytest.param("zai-org/GLM-4.5-Air", 2_375_059_456, id="GLM-4.5-Air"),
        pytest.param("moonshotai/Moonlight-16B-A3B", 0, id="Moonlight has none"),
    ],
)
def test_modules_for_further_tokens_have_their_published_parameters(name: str, further: int) -> None:
    assert mtp_parameters(shape(name)) == further


def test_what_qwen3_next_publishes_beyond_its_config_is_one_module_for_further_tokens() -> None:
    model = shape("Qwen/Qwen3-Next-80B-A3B-Instruct")
    attention_layer = model.layers[3]
    module = layer_weights(model, attention_layer).total + 2 * model.hidden**2 + 3 * model.hidden
    assert module == PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"] - total_parameters(model)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        pytest.param("mistralai/Mixtral-8x7B-v0.1", 12.9, id="Mixtral 8x7B"),
        pytest.param("mistralai/Mixtral-8x22B-v0.1", 39.2, id="Mixtral 8x22B"),
        pytest.param("Qwen/Qwen3-30B-A3B", 3.4, id="Qwen3 A3B"),
        pytest.param("Qwen/Qwen3-235B-A22B", 22.2, id="Qwen3 A22B"),
        pytest.param("deepseek-ai/DeepSeek-V3", 37.6, id="DeepSeek A37B"),
        pytest.param("openai/gpt-oss-20b", 4.2, id="gpt-oss: 3.6 B without the embedding"),
        pytest.param("moonshotai/Moonlight-16B-A3B", 2.9, id="Moonlight A3B"),
        pytest.param("zai-org/GLM-4.7-Flash", 3.9, id="GLM-4.7-Flash"),
        pytest.param("allenai/OLMoE-1B-7B-0924", 1.3, id="OLMoE 1B"),
        pytest.param("MiniMaxAI/MiniMax-M2", 11.0, id="MiniMax-M2 A10B"),
        pytest.param("baidu/ERNIE-4.5-21B-A3B-PT", 3.4, id="ERNIE A3B"),
    ],
)
def test_a_token_meets_as_many_parameters_as_the_name_says(name: str, billions: float) -> None:
    assert round(active_parameters(shape(name)) / 1e9, 1) == billions


@pytest.mark.parametrize("name", catalog.model_names())
def test_every_name_has_a_shape(name: str) -> None:
    assert shape(name).positions >= 2048


@pytest.mark.parametrize("name", sorted(set(catalog.model_names()) - set(catalog.shipped_names())))
def test_a_variant_is_like_a_shipped_model_and_differs_in_few_keys(name: str) -> None:
    variants = json.loads((files(catalog.__name__) / "variants.json").read_text("utf-8"))
    like = catalog.find_config(variants[name]["like"])
    own = catalog.find_config(name)
    assert like is not None
    assert own is not None
    assert variants[name]["like"] in catalog.shipped_names()
    assert own.keys() == like.keys()
    changed = {key for key in own if own[key] != like[key]}
    assert changed <= {"max_position_embeddings", "rope_theta", "rope_scaling", "vocab_size"}
    assert changed == variants[name].keys() - {"like"}


def test_the_larger_vocabulary_of_an_instructed_mixtral_is_counted() -> None:
    assert total_parameters(shape("mistralai/Mixtral-8x22B-Instruct-v0.1")) == 140_630_071_296


def test_glm_4_6_is_glm_4_5_with_more_positions() -> None:
    model = shape("zai-org/GLM-4.6")
    # Published without copies of embedding and output projection in the MTP module.
    assert total_parameters(model) + mtp_parameters(model) + 90 * 160 == 356_785_898_816
    assert model.positions == 202_752


def test_names_are_found_in_any_case() -> None:
    assert catalog.find_config("qwen/qwen3-30b-a3b") == catalog.find_config("Qwen/Qwen3-30B-A3B")


def test_a_name_with_another_organization_is_not_found() -> None:
    assert catalog.find_config("somebody/Qwen3-30B-A3B") is None


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        pytest.param("Qwen/Qwen3-30B-3AB", "Qwen/Qwen3-30B-A3B", id="letters swapped"),
        pytest.param("Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", id="no organization"),
        pytest.param("mixtral/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-v0.1", id="wrong organization"),
        pytest.param("deepseek/deepseek-v3", "deepseek-ai/DeepSeek-V3", id="short organization"),
    ],
)
def test_near_names_are_suggested(asked: str, first: str) -> None:
    assert catalog.similar_names(asked)[0] == first


def test_nothing_is_suggested_for_a_name_like_no_other() -> None:
    assert catalog.similar_names("zzzzzzzz/0000000000") == ()


def test_all_layers_with_experts_of_a_model_have_the_same() -> None:
    for name in catalog.shipped_names():
        assert len({layer.mlp for layer in shape(name).layers if isinstance(layer.mlp, Experts)}) <= 1
