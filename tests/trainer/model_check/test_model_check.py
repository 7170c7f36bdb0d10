"""A model that computes something else than Transformers does not train and gets no name, and no other is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moejob_api.layout.sizes import derive_layout
from moejob_api.models.shape import Family
from moejob_api.problems import InvalidSpec
from moejob_trainer.conversion.adapters import AdapterTarget, build_adapter_table, export_adapters
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.conversion.model_export import ExportTarget, export_weights
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.megatron.weights import adapter_weights, whole_weights
from moejob_trainer.model_check.checks import ModelChecks
from moejob_trainer.model_check.tolerance import Tolerance, compare_states
from trainer.conversion.published import values_of
from trainer.conversion.test_quantized import eighths, fours
from trainer.parity.cells import (
    ALIKE,
    LAYOUTS,
    MODELS,
    Cell,
    assert_like,
    make_loss,
    micro_batches,
    reference_model,
    start_engine,
    train_cell,
    write_reference,
)
from trainer.parity.lora import ALPHA, LORA, RANK
from trainer.parity.references import Reference
from trainer.worlds import Worlds

RANKS_PER_NODE = 2
SAMPLED: dict[str, Any] = {"method": "GRPO", "grpo": {"temperature": 0.9, "rewards": [{"name": "exact-match"}]}}
SETTINGS: dict[str, dict[str, Any]] = {
    **ALIKE,
    "experts that refuse tokens": {"moe": {"balancing": "None", "capacityFactor": 0.5}},
    "a router in float64": {"moe": {"balancing": "None", "routerDtype": "float64"}},
    "answers at another temperature": SAMPLED,
}
# What goes wrong first, with the layers in four parts and in one.
MUTANTS = {
    "theta 10000": {"PP2.VPP2": 0, "DP2": 0},
    "two experts swapped": {"PP2.VPP2": 0, "TP2.PP2.EP2": 0},
    "a layer skipped": {"PP2.VPP2": 0, "PP2": 1, "TP2": 3},
}
FIRST_WRONG = [(mutant, name, layer) for mutant, layers in MUTANTS.items() for name, layer in layers.items()]


_SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_KIMI_YARN: dict[str, Any] = {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# What a published config may say beside the usual.
CONFIGS: list[tuple[Family, dict[str, Any]]] = [
    (Family.LLAMA, {"attention_bias": True}),
    (Family.LLAMA, {"mlp_bias": True}),
    (Family.LLAMA, {"head_dim": 12}),
    (Family.LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    (Family.LLAMA, {"rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 16}}),
    (Family.LLAMA, {"rope_scaling": _YARN}),
    (Family.QWEN2, _SLIDING),
    (Family.QWEN3, _SLIDING),
    (Family.QWEN3, {"attention_bias": True}),
    (Family.MIXTRAL, {"sliding_window": 6}),
    (Family.QWEN2_MOE, _SLIDING),
    (Family.QWEN2_MOE, {"norm_topk_prob": True}),
    (Family.QWEN2_MOE, {"qkv_bias": False}),
    (Family.QWEN3_MOE, _SLIDING),
    (Family.QWEN3_MOE, {"norm_topk_prob": False}),
    (Family.QWEN3_MOE, {"attention_bias": True}),
    (Family.QWEN3_MOE, {"mlp_only_layers": [1]}),
    (Family.QWEN3_MOE, {"tie_word_embeddings": True}),
    (Family.QWEN3_MOE, {"rms_norm_eps": 0.1}),
    (Family.QWEN3_NEXT, {"attention_bias": True, "norm_topk_prob": False}),
    (Family.QWEN3_NEXT, {"layer_types": ["full_attention", "linear_attention"] * 2}),
    (Family.QWEN3_NEXT, {"layer_types": ["linear_attention"] * 4}),
    (Family.QWEN3_NEXT, {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 1, "mlp_only_layers": [1]}),
    (Family.QWEN3_5_MOE, {"attention_bias": True, "partial_rotary_factor": 0.4}),
    (
        Family.QWEN3_5_MOE,
        {"rope_parameters": {"rope_theta": 5e5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
    ),
    (Family.DEEPSEEK_V2, {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    (Family.DEEPSEEK_V2, {"q_lora_rank": None}),
    (Family.DEEPSEEK_V2, {"rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    (Family.DEEPSEEK_V3, {"rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    (Family.DEEPSEEK_V3, {"norm_topk_prob": False}),
    (Family.DEEPSEEK_V3, {"rope_interleave": False}),
    (Family.DEEPSEEK_V3, {"attention_bias": True}),
    (Family.GLM4_MOE, {"use_qk_norm": False}),
    (Family.GLM4_MOE, {"attention_bias": True}),
    (Family.GLM4_MOE_LITE, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}),
    (Family.GLM4_MOE_LITE, {"rope_interleave": False, "norm_topk_prob": False}),
    (Family.GLM4_MOE_LITE, {"rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    (Family.OLMOE, {"norm_topk_prob": False}),
    (Family.ERNIE4_5_MOE, {"moe_layer_interval": 2, "moe_num_shared_experts": 0}),
    # Kimi-K2's keys, under which all elements of a head are interpolated alike.
    (Family.DEEPSEEK_V3, {"n_group": 1, "topk_group": 1, "rope_scaling": _KIMI_YARN}),
    (Family.MINIMAX_M2, {"rotary_dim": 4}),
    (Family.GPT_OSS, {"attention_bias": False}),
    (Family.GPT_OSS, {"layer_types": ["full_attention"] * 4}),
]


def _refusal(cell: Cell, folder: Path, act: Callable[[MegatronTrainingEngine, ModelChecks], object]) -> str:
    """Return the refusal of a check on a rank of the cell. Two neighbouring ranks are on each node."""
    use_cpu()
    engine = start_engine(cell, folder)
    node = engine.placement.model_groups.rank // RANKS_PER_NODE
    try:
        act(engine, ModelChecks(engine, derive_layout(cell.spec().parallelism, 8), node))
    except (InvalidSpec, BadConfiguration) as refused:
        return str(refused)
    finally:
        stop_groups()
    return ""


def imported(cell: Cell, folder: Path) -> str:
    """Return the refusal of an import's check; one rank's part."""
    return _refusal(cell, folder, lambda _, checks: checks.check_import(folder / "first"))


def exported(cell: Cell, folder: Path, target: Path, mistake: str) -> str:
    """Return the refusal of an export's check after a step; one rank's part."""

    def act(engine: MegatronTrainingEngine, checks: ModelChecks) -> None:
        engine.update(micro_batches(cell, engine, 0), make_loss(cell, engine))

        def check(unfinished: Path) -> None:
            if mistake:
                MISTAKES[mistake](engine)
            checks.check_export(unfinished)

        state, declared = whole_weights(engine.stages), build_tensor_table(engine.model.shape)
        export_weights(state, declared, engine.placement.model_groups, ExportTarget(target, folder / "first"), check)

    return _refusal(cell, folder, act)


def exported_adapters(cell: Cell, folder: Path, target: Path, scale: float) -> str:
    """The same of adapters."""

    def act(engine: MegatronTrainingEngine, checks: ModelChecks) -> None:
        lora = cell.spec().training.lora
        assert lora is not None
        declared, base = build_adapter_table(engine.model.shape, lora), folder / "first"
        export_adapters(
            adapter_weights(engine.stages),
            declared,
            engine.placement.model_groups,
            AdapterTarget(target, str(base), lora),
            partial(checks.check_exported_adapters, base=base, scale=scale),
        )

    return _refusal(cell, folder, act)


def _move_final_norm(engine: MegatronTrainingEngine) -> None:
    for stage in engine.stages:
        if stage.place.is_last:
            stage.final_norm.weight.data.mul_(1.01)


def _move_embedding(engine: MegatronTrainingEngine) -> None:
    for stage in engine.stages:
        if stage.place.is_first:
            stage.embedding.weight.data.mul_(1.01)


MISTAKES: Mapping[str, Callable[[MegatronTrainingEngine], None]] = {
    "the logits": _move_final_norm,
    "the embedding": _move_embedding,
}


def _assert_all_say(said: list[str], expected: str) -> None:
    assert len(set(said)) == 1
    assert expected in said[0]


@pytest.mark.parametrize("family", MODELS)
def test_every_family_computes_what_transformers_makes_of_the_same_files(
    worlds: Worlds, reference: Reference, family: Family
) -> None:
    assert worlds.run(1, imported, Cell(family, {}), reference(family)[0]) == [""]


@pytest.mark.parametrize(("family", "changes"), CONFIGS)
def test_whatever_a_config_says_is_obeyed(
    worlds: Worlds, tmp_path: Path, family: Family, changes: dict[str, Any]
) -> None:
    reference_model(family, **changes).save_pretrained(tmp_path / "first")
    assert worlds.run(1, imported, Cell(family, {}), tmp_path) == [""]


def test_what_is_published_in_fp8_blocks_is_compared_multiplied_out(worlds: Worlds, tmp_path: Path) -> None:
    eighths(tmp_path / "first", values_of(Family.DEEPSEEK_V3, num_key_value_heads=8), (7, 5))
    assert worlds.run(1, imported, Cell(Family.DEEPSEEK_V3, {}), tmp_path) == [""]


def test_experts_that_are_published_packed_are_compared_unpacked(worlds: Worlds, tmp_path: Path) -> None:
    fours(tmp_path / "first", values_of(Family.GPT_OSS, hidden_size=64, intermediate_size=64))
    assert worlds.run(1, imported, Cell(Family.GPT_OSS, {}), tmp_path) == [""]


def test_what_transformers_cannot_compute_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    reference_model(Family.DEEPSEEK_V3).save_pretrained(tmp_path / "first")
    file = tmp_path / "first" / "config.json"
    config = json.loads(file.read_text())
    # Without it Transformers takes the 128 of DeepSeek-V3.
    del config["num_key_value_heads"]
    file.write_text(json.dumps(config))
    (said,) = worlds.run(1, imported, Cell(Family.DEEPSEEK_V3, {}), tmp_path)
    assert "Transformers cannot compute layer 0 of" in said


@pytest.mark.parametrize(
    ("layers", "parallelism"),
    [
        pytest.param(1, {"pipeline": 2, "lossCountsAsLayer": True}, id="the last stage"),
        pytest.param(1, {"pipeline": 2, "embeddingCountsAsLayer": True}, id="the first stage"),
        pytest.param(3, {"pipeline": 2, "virtualPipeline": 2, "lossCountsAsLayer": True}, id="the last chunk"),
    ],
)
def test_a_stage_without_a_layer_computes_and_trains_its_end_of_the_model(
    worlds: Worlds, tmp_path: Path, layers: int, parallelism: dict[str, Any]
) -> None:
    expected = write_reference(Family.QWEN3_MOE, tmp_path, num_hidden_layers=layers)
    cell = Cell(Family.QWEN3_MOE, {"parallelism": parallelism})
    assert set(worlds.run(cell.ranks(), imported, cell, tmp_path)) == {""}
    assert_like(worlds.run(cell.ranks(), train_cell, cell, tmp_path), expected, within=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_computes_it(worlds: Worlds, reference: Reference, name: str) -> None:
    cell = Cell(Family.QWEN3_MOE, {"parallelism": LAYOUTS[name]})
    assert set(worlds.run(cell.ranks(), imported, cell, reference(cell.family)[0])) == {""}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_of_a_job_changes_it(worlds: Worlds, reference: Reference, name: str) -> None:
    cell = Cell(Family.QWEN3_MOE, SETTINGS[name] | {"parallelism": {"tensor": 2}})
    assert set(worlds.run(cell.ranks(), imported, cell, reference(cell.family)[0])) == {""}


def test_a_model_that_is_trained_in_fp8_is_compared_as_those_who_load_it_compute_it(
    worlds: Worlds, reference: Reference
) -> None:
    # On one rank, whose projections of queries are multiples of 16 both ways.
    cell = Cell(Family.QWEN3_MOE, {"training": {"precision": {"compute": "FP8"}}})
    assert worlds.run(1, imported, cell, reference(cell.family)[0]) == [""]


@pytest.mark.parametrize(("mutant", "name", "layer"), FIRST_WRONG)
def test_a_mistake_is_found_in_the_layer_where_it_was_made_and_told_by_all_ranks(
    worlds: Worlds, reference: Reference, mutant: str, name: str, layer: int
) -> None:
    cell = Cell(Family.QWEN3_MOE, {"parallelism": LAYOUTS[name]}, mutant)
    said = worlds.run(cell.ranks(), imported, cell, reference(cell.family)[0])
    _assert_all_say(said, f"computes something else than Transformers: layer {layer} (")
    assert "do not train it: use another model" in said[0]


@pytest.mark.parametrize("name", ["TP2", "PP2", "EP2", "ETP2 folded"])
def test_what_was_trained_is_what_the_exported_files_are_and_they_get_their_name(
    worlds: Worlds, reference: Reference, tmp_path: Path, name: str
) -> None:
    cell = Cell(Family.DEEPSEEK_V3, {"parallelism": LAYOUTS[name]})
    said = worlds.run(cell.ranks(), exported, cell, reference(cell.family)[0], tmp_path / "export", "")
    assert set(said) == {""}
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_model_under_a_name_of_its_authors_is_trained_as_the_family_it_is_and_keeps_the_name(
    worlds: Worlds, tmp_path: Path
) -> None:
    model = reference_model(Family.DEEPSEEK_V3, n_group=1, topk_group=1, rope_scaling=_KIMI_YARN)
    model.save_pretrained(tmp_path / "first")
    file = tmp_path / "first" / "config.json"
    of_authors = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | of_authors))
    (tmp_path / "first" / "tiktoken.model").write_bytes(b"IQ== 0\n")
    cell = Cell(Family.DEEPSEEK_V3, {"parallelism": LAYOUTS["TP2"]})
    assert set(worlds.run(cell.ranks(), imported, cell, tmp_path)) == {""}
    assert set(worlds.run(cell.ranks(), exported, cell, tmp_path, tmp_path / "export", "")) == {""}
    written = json.loads((tmp_path / "export/config.json").read_text())
    assert {key: written[key] for key in of_authors} == of_authors
    assert (tmp_path / "export/tiktoken.model").read_bytes() == b"IQ== 0\n"


@pytest.mark.parametrize("name", ["PP2", "TP2"])
def test_answers_at_another_temperature_leave_an_export_as_it_is(
    worlds: Worlds, reference: Reference, tmp_path: Path, name: str
) -> None:
    cell = Cell(Family.MIXTRAL, SAMPLED | {"parallelism": LAYOUTS[name]})
    said = worlds.run(cell.ranks(), exported, cell, reference(cell.family)[0], tmp_path / "export", "")
    assert set(said) == {""}


@pytest.mark.parametrize("family", [Family.QWEN3_MOE, Family.GPT_OSS])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_files_that_are_another_model_get_no_name(
    worlds: Worlds, reference: Reference, tmp_path: Path, mistake: str, family: Family
) -> None:
    cell = Cell(family, {"parallelism": LAYOUTS["PP2"]})
    said = worlds.run(cell.ranks(), exported, cell, reference(cell.family)[0], tmp_path / "export", mistake)
    _assert_all_say(said, f"computes something else than Transformers: {mistake} (")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("layout_name", ["TP2", "EP2"])
@pytest.mark.parametrize("family", [Family.QWEN3_MOE, Family.DEEPSEEK_V3])
def test_adapters_on_the_published_model_are_what_was_trained(
    worlds: Worlds, lora_reference: Reference, tmp_path: Path, family: Family, layout_name: str
) -> None:
    folder, _ = lora_reference(family)
    cell = Cell(family, {"training": {"lora": LORA}, "parallelism": LAYOUTS[layout_name]})
    right = worlds.run(cell.ranks(), exported_adapters, cell, folder, tmp_path / "right", ALPHA / RANK)
    wrong = worlds.run(cell.ranks(), exported_adapters, cell, folder, tmp_path / "wrong", RANK / ALPHA)
    assert set(right) == {""}
    _assert_all_say(wrong, "computes something else than Transformers: layer 0 (")
    assert (tmp_path / "right").exists()
    assert not (tmp_path / "wrong").exists()


def test_as_many_tokens_may_differ_as_rounding_sends_to_another_expert() -> None:
    before, added = torch.zeros(8, 4), torch.ones(8, 4)
    strayed = added.clone()
    strayed[:2] *= 2
    of = partial(compare_states, "layer 7", strayed, added, before)
    assert not of(Tolerance(relative=0.5, rounding=0.0, logits=0.0, outliers=0.25)).is_different
    found = of(Tolerance(relative=0.5, rounding=0.0, logits=0.0, outliers=0.24))
    assert found.is_different
    assert str(found) == "layer 7 (2 of 8 tokens differ, by up to 2 times the rounding)"


def test_what_is_no_number_differs() -> None:
    found = compare_states(
        "layer 7", torch.full((4, 2), torch.nan), torch.ones(4, 2), torch.zeros(4, 2), Tolerance(1, 1, 1, 0)
    )
    assert found.is_different
    assert found.outliers == 4


def unheard(cell: Cell, folder: Path) -> str:
    """Return the error where a layer is not reached."""

    def act(engine: MegatronTrainingEngine, checks: ModelChecks) -> None:
        for stage in engine.stages:
            layer: Any = stage.layers["1"]
            # At a module that is not called.
            layer.register_forward_hook = torch.nn.Identity().register_forward_hook
        checks.check_import(folder / "first")

    try:
        return _refusal(cell, folder, act)
    except RuntimeError as error:
        return str(error)


def test_a_layer_that_nobody_looked_at_is_not_found_right(worlds: Worlds, reference: Reference) -> None:
    cell = Cell(Family.QWEN3_MOE, {})
    (said,) = worlds.run(1, unheard, cell, reference(cell.family)[0])
    assert said == "layer 1: not compared with Transformers"
