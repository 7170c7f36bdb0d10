"""A model that reads images too: its text is trained, and an export has every other tensor as it was published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from builders import merge_sections, spec
from moejob_api.contract.pod_environment import spec_text
from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.models.shape import Family
from moejob_api.problems import InvalidSpec
from moejob_trainer.checkpoint_export.run import read_stored_run
from moejob_trainer.checkpoint_export.run_export import ExportOptions, export_run
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.loading import import_weights, open_published_checkpoint
from moejob_trainer.conversion.model_export import ExportTarget, export_weights
from moejob_trainer.conversion.text_part import open_tensor_source, read_other_parts
from moejob_trainer.model.parameters import Coordinates
from trainer.checkpoint_export.test_checkpoint_export import commit_state
from trainer.conversion.published import blank, table_of, values_of
from trainer.conversion.ranks import Cell, outcome
from trainer.runs import TINY
from trainer.worlds import Worlds

TEXT = values_of(Family.QWEN3_5_MOE)
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
WHOLE: dict[str, Any] = {"model_type": "qwen3_5_moe", "text_config": TEXT, "vision_config": VISION}
EXPERTS = "model.language_model.layers.{}.mlp.experts."


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it is published: all experts of a layer in one tensor, and an MTP module that no class has."""
    folder = tmp_path_factory.mktemp("published")
    _random_model().save_pretrained(folder)
    file = folder / "model.safetensors"
    mtp = {"mtp.fc.weight": torch.randn(32, 64).bfloat16(), "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(8, 6)}
    save_file(_fused(load_file(file)) | mtp, file, {"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"patch_size": 4}\n')
    return folder


def _random_model() -> Qwen3_5MoeForConditionalGeneration:
    settings: dict[str, Any] = {key: value for key, value in WHOLE.items() if key != "model_type"}
    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**settings))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    fused = dict(tensors)
    for layer in range(TEXT["num_hidden_layers"]):
        owner, experts = EXPERTS.format(layer), range(TEXT["num_experts"])
        single = {
            name: [fused.pop(f"{owner}{expert}.{name}_proj.weight") for expert in experts]
            for name in ("gate", "up", "down")
        }
        pairs = zip(single["gate"], single["up"], strict=True)
        fused[f"{owner}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        fused[f"{owner}down_proj"] = torch.stack(single["down"])
    return fused


def contents(folder: Path) -> dict[str, Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


def assert_is_published(export: Path, published: Path) -> None:
    """Every tensor, to the bit; the experts' one by one, as Transformers writes them."""
    written, expected = contents(export), contents(published)
    others = {name for name in expected if not name.startswith("model.language_model.")}
    assert {"lm_head.weight", "mtp.fc.weight", "model.visual.blocks.1.attn.qkv.bias"} < others
    assert _fused(written).keys() == expected.keys()
    for name, tensor in _fused(written).items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    index = json.loads((export / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == written.keys()
    assert (export / "config.json").read_bytes() == (published / "config.json").read_bytes()
    assert (export / "preprocessor_config.json").read_bytes() == (published / "preprocessor_config.json").read_bytes()


def held(published: Path) -> dict[str, Tensor]:
    state = blank(table_of(WHOLE), Coordinates())
    import_weights(state, open_published_checkpoint(published, table_of(WHOLE)), Coordinates())
    return state


def test_the_text_of_files_with_all_experts_in_one_tensor_is_a_model_of_text_alone(published: Path) -> None:
    source, stored = open_tensor_source(published), contents(published)
    checkpoint = open_published_checkpoint(published, table_of(WHOLE))
    assert {name.split(".")[1] for name in checkpoint.left_out if name.startswith("model.")} == {"visual"}
    up = source.read("model.layers.1.mlp.experts.3.up_proj.weight", (slice(4, 9), slice(2, 30)))
    assert torch.equal(up, stored[EXPERTS.format(1) + "gate_up_proj"][3, 24:29, 2:30])
    assert torch.equal(
        source.read("model.layers.0.mlp.experts.7.down_proj.weight", (slice(0, 32), slice(0, 20))),
        stored[EXPERTS.format(0) + "down_proj"][7],
    )


def test_an_export_has_the_tensors_that_are_not_trained_and_transformers_reads_all_of_it(
    published: Path, tmp_path: Path
) -> None:
    parts = read_other_parts(published, lambda: published)
    target = ExportTarget(tmp_path / "export", published, torch.float32, most_shard_bytes=20_000, parts=parts)
    report = export_weights(held(published), table_of(WHOLE), ModelGroups(), target)
    assert_is_published(tmp_path / "export", published)
    assert report.checksums.keys() == contents(tmp_path / "export").keys()
    loaded: Any = Qwen3_5MoeForConditionalGeneration.from_pretrained(tmp_path / "export", output_loading_info=True)
    read, loading = loaded
    assert not loading["missing_keys"]
    assert set(loading["unexpected_keys"]) <= {"mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj"}
    expected = _random_model().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.state_dict().items())


def test_ranks_that_each_hold_a_part_write_the_other_parts_once(
    worlds: Worlds, published: Path, tmp_path: Path
) -> None:
    parallelism = Parallelism(tensor=2, data=2, expert=4, expert_layout=ExpertLayout.FOLDED)
    cell = Cell(WHOLE, parallelism, published, tmp_path / "export", most_shard_bytes=20_000)
    reports = [one.report for one in worlds.run(cell.ranks(), outcome, cell)]
    assert_is_published(tmp_path / "export", published)
    assert all(report == reports[0] for report in reports)


def test_a_stored_run_is_exported_with_the_parts_of_the_model_that_it_began_from(
    published: Path, tmp_path: Path
) -> None:
    table = table_of(WHOLE)
    (tmp_path / "template").mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(published / name, tmp_path / "template")
    model = {"model": {"source": str(published), "dtype": "float32"}}
    (tmp_path / "spec.json").write_text(spec_text(spec(**merge_sections(TINY, model))))
    state = held(published)
    commit_state(tmp_path, table, [state[parameter.name] for parameter in table.parameters])
    export_run(read_stored_run(tmp_path), ExportOptions(tmp_path / "export"))
    assert_is_published(tmp_path / "export", published)


def test_a_text_that_lacks_an_expert_is_refused(published: Path, tmp_path: Path) -> None:
    tensors = contents(published)
    name = EXPERTS.format(2) + "down_proj"
    tensors[name] = tensors[name][:7].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidSpec, match=r"lacks 1 of \d+ tensors: model\.layers\.2\.mlp\.experts\.7\.down_proj"):
        open_published_checkpoint(tmp_path, table_of(WHOLE))
