"""Published weights in our parameters: each where Transformers uses it, and on every rank exactly its part."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_configs import any_config
from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family
from moejob_api.problems import InvalidSpec
from moejob_trainer.conversion.checkpoint import SafetensorsFolder
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.conversion.gathering import hugging_face_tensors
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.loading import import_weights, open_published_checkpoint
from moejob_trainer.conversion.tensor_table import ExpertStacking
from moejob_trainer.model.parameters import Coordinates, Slices, local_slices
from trainer.conversion.published import (
    FAMILIES,
    blank,
    cut,
    random_model,
    save_published,
    saved_with_mtp,
    table_of,
    values_of,
)

MTP = [Family.DEEPSEEK_V3, Family.GLM4_MOE, Family.GLM4_MOE_LITE]
SWITCHES: dict[Family, dict[str, Any]] = {
    Family.LLAMA: {"attention_bias": True, "mlp_bias": True},
    Family.QWEN3: {"attention_bias": True},
    Family.QWEN3_MOE: {"attention_bias": True, "decoder_sparse_step": 2},
    Family.QWEN3_NEXT: {"attention_bias": True},
    Family.QWEN3_5_MOE: {"attention_bias": True},
    Family.DEEPSEEK_V2: {"q_lora_rank": None},
    Family.DEEPSEEK_V3: {"attention_bias": True},
    Family.GLM4_MOE: {"attention_bias": True, "use_qk_norm": True},
    Family.GLM4_MOE_LITE: {"attention_bias": True},
}


def imported(folder: Path, values: dict[str, Any], place: Coordinates | None = None) -> dict[str, Tensor]:
    """Return a rank's tensors after the import."""
    place = place or Coordinates()
    found = table_of(values)
    state = blank(found, place)
    import_weights(state, open_published_checkpoint(folder, found), place)
    return state


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_where_transformers_uses_it(family: Family, tmp_path: Path) -> None:
    values = values_of(family, **SWITCHES.get(family, {}))
    model = random_model(values)
    ours = imported(save_published(tmp_path, values), values)
    seen = set[str]()
    for index, layer in enumerate(model.model.layers):
        for name, expected in layer_weights(layer, values).items():
            assert torch.equal(ours[f"layers.{index}.{name}"], expected), name
            seen.add(f"layers.{index}.{name}")
    assert torch.equal(ours["embedding.weight"][:40], model.model.embed_tokens.weight)
    assert torch.equal(ours["output.weight"][:40], model.lm_head.weight)
    assert torch.equal(ours["final_norm.weight"], model.model.norm.weight)
    assert ours.keys() - seen == {"embedding.weight", "output.weight", "final_norm.weight"}


def layer_weights(layer: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of one layer of Transformers in our shapes, by its modules and not by names in files."""
    found = {
        "attention_norm.weight": layer.input_layernorm.weight,
        "mlp_norm.weight": layer.post_attention_layernorm.weight,
    }
    attend = latent if "kv_lora_rank" in values else grouped
    if hasattr(layer, "linear_attn"):
        attention = delta_rule(layer.linear_attn, values)
    else:
        attention = attend(layer.self_attn, values)
    found |= {f"attention.{name}": weight for name, weight in attention.items()}
    mlp = layer.mlp
    if not hasattr(mlp, "experts"):
        return found | {f"mlp.{name}": weight for name, weight in gated(mlp).items()}
    return found | {f"moe.{name}": weight for name, weight in routed(mlp, values).items()}


def grouped(attention: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    heads, groups, dim = values["num_attention_heads"], values["num_key_value_heads"], attention.head_dim
    queries, keys, hidden = attention.q_proj, attention.k_proj, values["hidden_size"]
    values_ = attention.v_proj
    found = {
        # With a gate, each head has twice the rows.
        "query.weight": queries.weight.unflatten(0, (heads, -1)),
        "key_value.weight": torch.stack(
            [keys.weight.unflatten(0, (groups, dim)), values_.weight.unflatten(0, (groups, dim))], dim=1
        ),
        "output.weight": attention.o_proj.weight.reshape(hidden, heads, dim),
    }
    if queries.bias is not None:
        found["query.bias"] = queries.bias.unflatten(0, (heads, -1))
        found["key_value.bias"] = torch.stack(
            [keys.bias.unflatten(0, (groups, dim)), values_.bias.unflatten(0, (groups, dim))], dim=1
        )
    if attention.o_proj.bias is not None:
        found["output.bias"] = attention.o_proj.bias
    if hasattr(attention, "q_norm"):
        norms = {"query_norm.weight": attention.q_norm.weight, "key_norm.weight": attention.k_norm.weight}
        is_joint = values["model_type"] in {"olmoe", "minimax_m2"}
        found |= {name: norm.unflatten(0, (-1, dim)) if is_joint else norm for name, norm in norms.items()}
    return found | ({"sinks": attention.sinks} if hasattr(attention, "sinks") else {})


def delta_rule(attention: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    keys, heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    return _inputs_of_delta_rule(attention, keys, heads) | {
        "convolution": attention.conv1d.weight,
        "decay_log": attention.A_log,
        "decay_bias": attention.dt_bias,
        "state_norm.weight": attention.norm.weight,
        "state_output.weight": attention.out_proj.weight.unflatten(1, (heads, -1)),
    }


def _inputs_of_delta_rule(attention: Any, keys: int, heads: int) -> dict[str, Tensor]:
    if hasattr(attention, "in_proj_qkvz"):
        return {
            "state_input.weight": attention.in_proj_qkvz.weight.unflatten(0, (keys, -1)),
            "state_rates.weight": attention.in_proj_ba.weight.unflatten(0, (keys, -1)),
        }
    parts = attention.in_proj_qkv.weight.split([attention.key_dim, attention.key_dim, attention.value_dim])
    return {
        "state_input.weight": torch.cat([part.unflatten(0, (keys, -1)) for part in parts], 1),
        "state_gate.weight": attention.in_proj_z.weight.unflatten(0, (heads, -1)),
        "state_strength.weight": attention.in_proj_b.weight,
        "state_decay.weight": attention.in_proj_a.weight,
    }


def latent(attention: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    heads = (values["num_attention_heads"], -1)
    found = {
        "key_value_down.weight": attention.kv_a_proj_with_mqa.weight,
        "key_value_down_norm.weight": attention.kv_a_layernorm.weight,
        "key_value_up.weight": attention.kv_b_proj.weight.unflatten(0, heads),
        "output.weight": attention.o_proj.weight.unflatten(1, heads),
    }
    if attention.o_proj.bias is not None:
        found |= {"output.bias": attention.o_proj.bias, "key_value_down.bias": attention.kv_a_proj_with_mqa.bias}
    if attention.q_lora_rank is None:
        return found | {"query.weight": attention.q_proj.weight.unflatten(0, heads)}
    if attention.q_a_proj.bias is not None:
        found["query_down.bias"] = attention.q_a_proj.bias
    return found | {
        "query_down.weight": attention.q_a_proj.weight,
        "query_down_norm.weight": attention.q_a_layernorm.weight,
        "query_up.weight": attention.q_b_proj.weight.unflatten(0, heads),
    }


def gated(mlp: Any) -> dict[str, Tensor]:
    found = {
        "gate_up.weight": torch.stack([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "down.weight": mlp.down_proj.weight,
    }
    if mlp.gate_proj.bias is None:
        return found
    biases = {"gate_up.bias": torch.stack([mlp.gate_proj.bias, mlp.up_proj.bias]), "down.bias": mlp.down_proj.bias}
    return found | biases


def routed(mlp: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    if values["model_type"] == "gpt_oss":
        return gpt_oss(mlp)
    found = {
        "router.weight": mlp.gate.weight,
        "experts.gate_up": mlp.experts.gate_up_proj.unflatten(1, (2, -1)),
        "experts.down": mlp.experts.down_proj,
    }
    if hasattr(mlp.gate, "e_score_correction_bias"):
        found["router.selection_bias"] = mlp.gate.e_score_correction_bias
    if hasattr(mlp, "e_score_correction_bias"):
        found["router.selection_bias"] = mlp.e_score_correction_bias
    if hasattr(mlp.gate, "moe_statics"):
        found["router.selection_bias"] = mlp.gate.moe_statics.e_score_correction_bias[0]
    if hasattr(mlp, "shared_experts"):
        found |= {f"shared.{name}": weight for name, weight in gated(mlp.shared_experts).items()}
    if hasattr(mlp, "shared_expert"):
        found |= {f"shared.{name}": weight for name, weight in gated(mlp.shared_expert).items()}
        found["shared_gate.weight"] = mlp.shared_expert_gate.weight
    return found


def gpt_oss(mlp: Any) -> dict[str, Tensor]:
    """As its experts compute: x @ weight, with gate and up in every other column."""
    both, biases = mlp.experts.gate_up_proj, mlp.experts.gate_up_proj_bias
    return {
        "router.weight": mlp.router.weight,
        "router.bias": mlp.router.bias,
        "experts.gate_up": torch.stack([both[..., ::2].mT, both[..., 1::2].mT], dim=1),
        "experts.gate_up_bias": torch.stack([biases[..., ::2], biases[..., 1::2]], dim=1),
        "experts.down": mlp.experts.down_proj.mT,
        "experts.down_bias": mlp.experts.down_proj_bias,
    }


PLACES = [
    pytest.param((2, 1, 1), id="tensor 2"),
    pytest.param((4, 1, 1), id="tensor 4, more than key and value heads"),
    pytest.param((1, 4, 1), id="expert 4"),
    pytest.param((1, 1, 2), id="expert tensor 2"),
    pytest.param((2, 2, 2), id="tensor 2, expert 2, expert tensor 2"),
]


@pytest.mark.parametrize("sizes", PLACES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_its_slice_of_the_whole(family: Family, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    values = values_of(family)
    folder = save_published(tmp_path, values)
    whole, found = imported(folder, values), table_of(values)
    for ranks in product(*map(range, sizes)):
        place = Coordinates(ranks[0], sizes[0], ranks[1], sizes[1], ranks[2], sizes[2])
        state = imported(folder, values, place)
        expected = cut(found, whole, place)
        assert all(torch.equal(state[name], expected[name]) for name in expected)


@dataclass(frozen=True)
class Counted(SafetensorsFolder):
    """A checkpoint that counts what is read."""

    counts: list[int] = field(default_factory=list)

    def read(self, name: str, part: Slices) -> Tensor:
        read = SafetensorsFolder.read(self, name, part)
        self.counts.append(read.numel())
        return read


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_as_many_numbers_as_it_holds_and_never_more_than_a_tensor(family: Family, tmp_path: Path) -> None:
    values = values_of(family, vocab_size=128)
    found, place = table_of(values), Coordinates(1, 2, 1, 2, 1, 2)
    source = open_published_checkpoint(save_published(tmp_path, values), found)
    counted = Counted(tmp_path, source.checkpoint.tensors)
    state = blank(found, place)
    import_weights(state, replace(source, checkpoint=counted), place)
    assert sum(counted.counts) == sum(tensor.numel() for tensor in state.values())
    assert max(counted.counts) <= max(piece.element_count for piece in found.pieces) // 2


@pytest.mark.parametrize("family", MTP)
def test_modules_for_further_tokens_are_read_from_behind_the_last_layer(family: Family, tmp_path: Path) -> None:
    values = values_of(family, num_nextn_predict_layers=1)
    ours = imported(saved_with_mtp(tmp_path, values), values)
    theirs = load_file(tmp_path / "model.safetensors")
    names = {
        "embedding_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "projection.weight": "eh_proj.weight",
        "final_norm.weight": "shared_head.norm.weight",
        "layer.moe.router.weight": "mlp.gate.weight",
        "layer.attention_norm.weight": "input_layernorm.weight",
    }
    for mine, published in names.items():
        assert torch.equal(ours[f"mtp.0.{mine}"], theirs[f"model.layers.3.{published}"])


def test_a_model_without_those_modules_leaves_them_out_and_says_so(tmp_path: Path) -> None:
    values = values_of(Family.DEEPSEEK_V3, num_nextn_predict_layers=1)
    folder = saved_with_mtp(tmp_path, values)
    source = open_published_checkpoint(folder, table_of(values | {"num_nextn_predict_layers": 0}))
    assert all(name.startswith("model.layers.3.") for name in source.left_out)
    assert "model.layers.3.eh_proj.weight" in source.left_out


def test_a_module_that_no_config_names_is_left_out_and_said_so(tmp_path: Path) -> None:
    for family, left_out in ((Family.QWEN3_NEXT, ("mtp.fc.weight", "mtp.norm.weight")), (Family.QWEN3_MOE, None)):
        values = values_of(family)
        file = save_published(tmp_path / family, values) / "model.safetensors"
        beside = {"mtp.norm.weight": torch.ones(32), "mtp.fc.weight": torch.ones(32, 64)}
        save_file(load_file(file) | beside, file, {"format": "pt"})
        if left_out is None:
            with pytest.raises(InvalidSpec, match=r"does not have: mtp\.fc\.weight, mtp\.norm\.weight"):
                open_published_checkpoint(file.parent, table_of(values))
            continue
        assert open_published_checkpoint(file.parent, table_of(values)).left_out == left_out


def test_an_output_projection_that_is_the_embedding_is_read_once(tmp_path: Path) -> None:
    values = values_of(Family.QWEN2, tie_word_embeddings=True)
    state = imported(save_published(tmp_path, values), values)
    assert "output.weight" not in state
    assert torch.equal(state["embedding.weight"][:40], random_model(values).model.embed_tokens.weight)


@pytest.mark.parametrize("rank", [0, 3])
def test_rows_beyond_the_vocabulary_are_zero(rank: int, tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    state = imported(save_published(tmp_path, values), values, Coordinates(rank, 4))
    assert state["embedding.weight"].shape == (32, 32)
    assert bool((state["embedding.weight"] == 0).all()) == (rank == 3)


def test_rows_that_are_half_inside_the_vocabulary_are_zero_from_there_on(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    state = imported(save_published(tmp_path, values), values, Coordinates(1, 4))
    assert bool((state["output.weight"][:8] != 0).all())
    assert bool((state["output.weight"][8:] == 0).all())


def test_weights_are_held_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    values = values_of(Family.DEEPSEEK_V3)
    found = table_of(values)
    state = blank(found, Coordinates(), torch.bfloat16)
    import_weights(state, open_published_checkpoint(save_published(tmp_path, values), found), Coordinates())
    exact = imported(tmp_path, values)
    for parameter in found.parameters:
        expected = torch.float32 if parameter.is_buffer else torch.bfloat16
        assert torch.equal(state[parameter.name], exact[parameter.name].to(expected))


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    values = values_of(Family.QWEN3_MOE)
    sharded = imported(save_published(tmp_path / "sharded", values, max_shard_size="40KB"), values)
    whole = imported(save_published(tmp_path / "whole", values), values)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


@pytest.mark.parametrize("place", [Coordinates(), Coordinates(1, 4, 2, 4, 0, 2)])
def test_a_part_read_alone_is_the_part_that_is_filled_in(place: Coordinates, tmp_path: Path) -> None:
    values = values_of(Family.GPT_OSS)
    source, state = (
        open_published_checkpoint(save_published(tmp_path, values), table_of(values)),
        imported(tmp_path, values, place),
    )
    for parameter in source.table.parameters:
        assert torch.equal(source.read_parameter(parameter, local_slices(parameter, place)), state[parameter.name])


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25)
@given(data=st.data())
def test_the_pieces_of_any_model_tile_its_parameters(family: Family, data: st.DataObject) -> None:
    found = build_tensor_table(shape_of(data.draw(any_config(family))))
    assert len(found.by_tensor) == len(found.pieces)
    for parameter in found.parameters:
        fillings = torch.zeros(parameter.shape, dtype=torch.int)
        for piece in found.by_parameter[parameter.name]:
            fillings[piece.region] += 1
        rows = found.shape.vocabulary if parameter.name in {"embedding.weight", "output.weight"} else None
        assert bool((fillings[:rows] == 1).all())
        assert rows is None or not fillings[rows:].any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stacking", [ExpertStacking(1, 10**9), ExpertStacking(2, 1_000), ExpertStacking(3, 1)])
def test_stacks_are_the_tensors_of_their_experts_one_after_another(family: Family, stacking: ExpertStacking) -> None:
    shape = shape_of(values_of(family))
    alone, stacked = build_tensor_table(shape), build_tensor_table(shape, stacking)
    state = {parameter.name: torch.randn(parameter.shape) for parameter in alone.parameters}
    expected = dict(hugging_face_tensors(state, alone, ModelGroups()))
    found = dict(hugging_face_tensors(state, stacked, ModelGroups()))
    singles = {name: one for name, tensor in found.items() for name, one in _singles(name, tensor)}
    assert singles.keys() == expected.keys()
    assert all(torch.equal(singles[name], tensor) for name, tensor in expected.items())


def test_a_stack_ends_with_its_ranks_experts_and_below_its_size() -> None:
    assert [*ExpertStacking(2, 350).expert_runs(8, 100)] == [slice(0, 3), slice(3, 4), slice(4, 7), slice(7, 8)]
    assert [*ExpertStacking(4, 10).expert_runs(4, 100)] == [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)]
    # Ranks that do not divide the experts hold all of them.
    assert [*ExpertStacking(3, 1_000).expert_runs(4, 100)] == [slice(0, 4)]


def _singles(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a stack, as its name says them."""
    found = re.search(r"\{(\d+):(\d+)/\d+\}", name)
    if found is None:
        yield name, tensor
        return
    for expert, one in zip(range(int(found[1]), int(found[2])), tensor, strict=True):
        yield name.replace(found[0], str(expert)), one


@pytest.mark.parametrize("name", [name for name in catalog.shipped_names() if "Next" not in name])
def test_every_shipped_model_that_can_be_planned_can_be_converted(name: str) -> None:
    found = build_tensor_table(shape_of(dict(catalog.find_config(name) or {})))
    assert len(found.by_tensor) == len(found.pieces) >= len(found.parameters)


def dropped(name: str) -> Callable[[Path], None]:
    return lambda folder: changed(folder, lambda tensors: tensors.pop(name))


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def stored(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return lambda folder: changed(folder, lambda tensors: tensors.update({name: tensor}))


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def written(name: str, content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_text(content)

    return write


def poisoned(folder: Path) -> None:
    changed(folder, lambda tensors: tensors["model.norm.weight"].fill_(torch.inf))


NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(dropped(NORM), r"lacks 1 of 96 tensors: model\.norm\.weight; download it again", id="missing"),
        pytest.param(
            stored("model.extra.weight", torch.ones(2)),
            r"holds 1 tensors that this mixtral model does not have: model\.extra\.weight; use the config.json",
            id="extra",
        ),
        pytest.param(
            stored("model.layers.3.input_layernorm.weight", torch.ones(32)),
            r"does not have: model\.layers\.3\.input_layernorm\.weight",
            id="one layer more",
        ),
        pytest.param(
            stored(NORM, torch.ones(33)), r"of another shape .*: model\.norm\.weight is \[33\], not \[32\]", id="shape"
        ),
        pytest.param(
            stored(NORM, torch.ones(32).to(torch.float8_e4m3fn)),
            r"is quantized: model\.norm\.weight \(F8_E4M3\); use or write a copy of it in bfloat16",
            id="quantized",
        ),
        pytest.param(cut_off, r"model\.safetensors is cut off or not a safetensors file", id="cut off"),
        pytest.param(
            written("model.safetensors", "<html>"), r"is cut off or not a safetensors file", id="not safetensors"
        ),
        pytest.param(written("pytorch_model.bin", ""), r"only pytorch_model\.bin; expected model", id="pickled"),
        pytest.param(written("notes.txt", ""), r"has no weights; expected model\.safetensors", id="nothing"),
        pytest.param(written(INDEX, "{"), r"index\.json is not JSON", id="broken index"),
        pytest.param(
            written(INDEX, "[" * 100_000), r"is not JSON \(it is nested too deeply", id="index without a floor"
        ),
        pytest.param(written(INDEX, "[]"), r"has no weight_map", id="index of something else"),
        pytest.param(
            written(INDEX, json.dumps({"weight_map": {NORM: "../model.safetensors"}})),
            r"files of its own folder",
            id="index that leaves the folder",
        ),
        pytest.param(
            written(INDEX, json.dumps({"weight_map": {NORM: "model-1.safetensors"}})),
            r"lacks model-1\.safetensors, named by model\.safetensors\.index\.json",
            id="missing shard",
        ),
        pytest.param(poisoned, r"model\.norm\.weight holds numbers that are not finite", id="not finite"),
    ],
)
def test_a_broken_checkpoint_is_refused_in_words(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    values = values_of(Family.MIXTRAL)
    save_published(tmp_path, values)
    damage(tmp_path)
    with pytest.raises(InvalidSpec, match=message):
        imported(tmp_path, values)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    save_published(tmp_path, values, max_shard_size="20KB")
    index = json.loads((tmp_path / INDEX).read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    swapped = {first: last, last: first}
    index["weight_map"] = {name: swapped.get(file, file) for name, file in index["weight_map"].items()}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InvalidSpec, match="disagree on where"):
        imported(tmp_path, values)


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    values = values_of(Family.MIXTRAL)
    save_published(tmp_path, values)
    dropped(NORM)(tmp_path)
    stored("model.extra.weight", torch.ones(2))(tmp_path)
    stored("lm_head.weight", torch.ones(3, 2))(tmp_path)
    with pytest.raises(InvalidSpec) as caught:
        imported(tmp_path, values)
    assert len(caught.value.problems) == 3


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="nowhere has no weights, for it is no folder"):
        imported(tmp_path / "nowhere", values_of(Family.LLAMA))


def test_an_output_projection_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    save_published(tmp_path, values)
    with pytest.raises(InvalidSpec, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        imported(tmp_path, values | {"tie_word_embeddings": True})


def test_missing_modules_for_further_tokens_are_told_from_missing_layers(tmp_path: Path) -> None:
    values = values_of(Family.DEEPSEEK_V3)
    save_published(tmp_path, values)
    with pytest.raises(InvalidSpec, match=r"without its MTP modules: set training.mtpLossCoefficient to 0"):
        imported(tmp_path, values | {"num_nextn_predict_layers": 1})


def test_old_files_may_repeat_what_the_rotary_layer_computes(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    save_published(tmp_path, values)
    stored("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(5))(tmp_path)
    assert imported(tmp_path, values).keys() == {parameter.name for parameter in table_of(values).parameters}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        pytest.param({"layers.9.mlp_norm.weight": torch.ones(32)}, "no parameter of this llama model", id="name"),
        pytest.param({"final_norm.weight": torch.ones(16)}, r"final_norm\.weight is \(16,\)", id="shape"),
    ],
)
def test_a_module_that_holds_something_else_is_a_bug(state: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    with pytest.raises(ValueError, match=message):
        import_weights(
            state, open_published_checkpoint(save_published(tmp_path, values), table_of(values)), Coordinates()
        )
