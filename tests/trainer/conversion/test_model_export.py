"""An export is the import, to the bit, in every layout; and nothing half-written ever has its name."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.models.shape import Family
from moejob_trainer.conversion.gathering import TensorGathering, hugging_face_tensors
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.loading import import_weights, open_published_checkpoint
from moejob_trainer.conversion.model_export import ExportReport, ExportTarget, export_weights
from moejob_trainer.conversion.safetensors_writer import (
    CorruptExport,
    TensorEntry,
    open_shard_writer,
    plan_shards,
    verify,
)
from moejob_trainer.conversion.tensor_table import TensorPiece
from moejob_trainer.model.parameters import Coordinates
from trainer.conversion.published import FAMILIES, blank, save_published, saved_with_mtp, table_of, values_of
from trainer.conversion.ranks import Cell, Outcome, outcome
from trainer.rows import make_rows
from trainer.worlds import Worlds

FOLDED = ExpertLayout.FOLDED
LAYOUTS = {
    "tensor 2": Parallelism(tensor=2),
    "tensor 4 beyond the key heads, data 2": Parallelism(tensor=4, data=2),
    "pipeline 3": Parallelism(pipeline=3),
    "expert 4": Parallelism(expert=4),
    "tensor 2, pipeline 2, expert 2": Parallelism(tensor=2, pipeline=2, expert=2),
    "folded expert 4": Parallelism(tensor=2, context=2, data=2, expert=4, expert_layout=FOLDED),
    "expert 2, expert tensor 2": Parallelism(tensor=2, data=4, expert=2, expert_tensor=2, expert_layout=FOLDED),
    "experts across tensor ranks": Parallelism(tensor=4, data=2, expert=8, expert_layout=FOLDED),
}


@pytest.fixture(scope="module")
def published_models(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, tuple[dict[str, Any], Path]]:
    """One checkpoint of each family; those that can have MTP modules have one."""
    return {family: one_of(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def one_of(family: Family, folder: Path) -> tuple[dict[str, Any], Path]:
    if family in {Family.DEEPSEEK_V3, Family.GLM4_MOE, Family.GLM4_MOE_LITE}:
        values = values_of(family, num_nextn_predict_layers=1)
        return values, saved_with_mtp(folder, values)
    values = values_of(family)
    return values, save_published(folder, values)


def contents(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's files."""
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened_file:
            for name in opened_file.keys():  # noqa: SIM118 (not a dict)
                assert name not in found
                found[name] = opened_file.get_tensor(name)
    return found


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def held(values: dict[str, Any], folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The whole model in our parameters."""
    table = table_of(values)
    state = blank(table, Coordinates(), dtype)
    import_weights(state, open_published_checkpoint(folder, table), Coordinates())
    return state


def exported(values: dict[str, Any], source: Path, folder: Path, **target: Any) -> ExportReport:
    """Imported and exported again by one process."""
    return export_weights(held(values, source), table_of(values), ModelGroups(), ExportTarget(folder, source, **target))


def _outcomes(worlds: Worlds, cell: Cell) -> list[Outcome]:
    return worlds.run(cell.ranks(), outcome, cell)


@pytest.mark.parametrize(
    ("family", "layout"),
    make_rows(
        product(FAMILIES, LAYOUTS),
        [*product((Family.QWEN3_MOE, Family.DEEPSEEK_V3), LAYOUTS), *product(FAMILIES, ("folded expert 4",))],
    ),
)
def test_ranks_that_each_hold_a_part_write_what_was_published(
    family: Family,
    layout: str,
    worlds: Worlds,
    published_models: dict[Family, tuple[dict[str, Any], Path]],
    tmp_path: Path,
) -> None:
    values, source = published_models[family]
    outcomes = _outcomes(worlds, Cell(values, LAYOUTS[layout], source, tmp_path / "export"))
    assert_same_bits(contents(tmp_path / "export"), contents(source))
    streamed = [name for outcome in outcomes for name in outcome.streamed]
    assert sorted(streamed) == sorted(contents(source))
    assert all(outcome.report == outcomes[0].report for outcome in outcomes)


def test_experts_are_written_by_their_own_ranks(
    worlds: Worlds, published_models: dict[Family, tuple[dict[str, Any], Path]], tmp_path: Path
) -> None:
    values, source = published_models[Family.QWEN3_MOE]
    outcomes = _outcomes(worlds, Cell(values, Parallelism(expert=4), source, tmp_path / "export"))
    owned = [{name.split(".")[5] for name in outcome.streamed if ".experts." in name} for outcome in outcomes]
    assert owned == [{"0", "1"}, {"2", "3"}, {"4", "5"}, {"6", "7"}]


def test_an_embedding_on_both_ends_of_the_pipeline_is_written_once(worlds: Worlds, tmp_path: Path) -> None:
    values = values_of(Family.QWEN2, tie_word_embeddings=True)
    source = save_published(tmp_path / "source", values)
    outcomes = _outcomes(worlds, Cell(values, Parallelism(tensor=2, pipeline=2), source, tmp_path / "export"))
    assert_same_bits(contents(tmp_path / "export"), contents(source))
    assert [outcome.streamed.count("model.embed_tokens.weight") for outcome in outcomes] == [1, 0, 0, 0]


def test_files_stay_below_their_size_and_the_index_finds_every_tensor(
    worlds: Worlds, published_models: dict[Family, tuple[dict[str, Any], Path]], tmp_path: Path
) -> None:
    values, source = published_models[Family.MIXTRAL]
    cell = Cell(values, Parallelism(expert=2, tensor=2), source, tmp_path / "export", most_shard_bytes=20_000)
    report = _outcomes(worlds, cell)[0].report
    assert len(report.files) > 8
    assert report.files[0] == f"model-00001-of-{len(report.files):05}.safetensors"
    assert all((report.folder / file).stat().st_size < 23_000 for file in report.files)
    index = json.loads((report.folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(contents(source))
    assert index["metadata"]["total_size"] == report.bytes == sum(t.nbytes for t in contents(source).values())
    assert_same_bits(held(values, report.folder), held(values, source))


def test_parts_that_were_put_together_wrongly_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that hold what was written, each with its checksum, of two experts that have changed places."""
    values, source = one_of(Family.QWEN3_MOE, tmp_path / "published")
    right = TensorGathering.tensors

    def swapped(gathering: TensorGathering) -> Iterator[tuple[TensorPiece, Tensor]]:
        whole = {piece.tensor: (piece, tensor) for piece, tensor in right(gathering)}
        first, second = (f"model.layers.1.mlp.experts.{index}.down_proj.weight" for index in (2, 3))
        of_first = whole[first][1]
        whole[first], whole[second] = (whole[first][0], whole[second][1]), (whole[second][0], of_first)
        yield from whole.values()

    monkeypatch.setattr(TensorGathering, "tensors", swapped)
    with pytest.raises(CorruptExport, match=r"importing layers\.1\..* would give other values than rank 0 holds"):
        exported(values, source, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_an_export_as_it_was(family: Family, tmp_path: Path) -> None:
    values = values_of(family)
    source = save_published(tmp_path / "source", values)
    exported(values, source, tmp_path / "export", most_shard_bytes=50_000)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("source", "export")]
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(*(model(tokens).logits for model in models))


@pytest.mark.parametrize("family", [Family.DEEPSEEK_V3, Family.GPT_OSS])
def test_weights_in_bfloat16_are_exported_as_such_and_buffers_in_float32(family: Family, tmp_path: Path) -> None:
    values = values_of(family)
    source = save_published(tmp_path / "source", values, dtype=torch.bfloat16)
    state = held(values, source, torch.bfloat16)
    export_weights(state, table_of(values), ModelGroups(), ExportTarget(tmp_path / "export", source))
    # Transformers loads those buffers in float32, whatever they were saved in.
    wide = {name: tensor.float() for name, tensor in contents(source).items() if "correction_bias" in name}
    assert_same_bits(contents(tmp_path / "export"), contents(source) | wide)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_export_is_cast_where_another_type_is_asked_for(tmp_path: Path) -> None:
    values = values_of(Family.DEEPSEEK_V3)
    source = save_published(tmp_path / "source", values)
    exported(values, source, tmp_path / "export", dtype=torch.bfloat16)
    for name, tensor in contents(source).items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert torch.equal(contents(tmp_path / "export")[name], tensor.to(dtype))
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_report_has_the_checksum_of_every_tensor(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    source = save_published(tmp_path / "source", values)
    report = exported(values, source, tmp_path / "export")
    expected = {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in contents(source).items()}
    assert dict(report.checksums) == expected
    assert report.files == ("model.safetensors",)


def test_config_and_tokenizer_go_along_and_older_weights_do_not(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    source = save_published(tmp_path / "source", values)
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"):
        (source / name).write_text(name)
    (source / "pytorch_model.bin").write_text("old")
    exported(values, source, tmp_path / "export")
    assert {path.name for path in source.iterdir()} - {path.name for path in (tmp_path / "export").iterdir()} == {
        "pytorch_model.bin"
    }
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "export" / name).read_bytes() == (source / name).read_bytes()


def test_a_model_trained_without_its_mtp_module_says_so(tmp_path: Path) -> None:
    values = values_of(Family.GLM4_MOE, num_nextn_predict_layers=1)
    source = saved_with_mtp(tmp_path / "source", values)
    without = values | {"num_nextn_predict_layers": 0}
    exported(without, source, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not any(name.startswith("model.layers.3.") for name in contents(tmp_path / "export"))


def test_a_config_of_another_model_is_not_exported_with(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    source = save_published(tmp_path / "source", values)
    other = save_published(tmp_path / "other", values | {"intermediate_size": 24})
    with pytest.raises(ValueError, match="describes another model"):
        export_weights(held(values, source), table_of(values), ModelGroups(), ExportTarget(tmp_path / "export", other))
    assert not (tmp_path / "export").exists()


def test_an_export_replaces_an_older_one_and_what_a_crash_left(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    source = save_published(tmp_path / "source", values)
    for name in ("export", ".export.unfinished", ".export.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00009.safetensors").write_text("old")
    exported(values, source, tmp_path / "export")
    assert_same_bits(contents(tmp_path / "export"), contents(source))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "export"}


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """A storage that is full, as far as this process can tell."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_storage_that_fills_up_leaves_the_older_export_and_the_next_one_succeeds(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    source, newer = save_published(tmp_path / "source", values), held(values, tmp_path / "source")
    exported(values, source, tmp_path / "export")
    newer["final_norm.weight"] += 1
    target = ExportTarget(tmp_path / "export", source)
    with files_of_at_most(20_000), pytest.raises(OSError, match="File too large"):
        export_weights(newer, table_of(values), ModelGroups(), target)
    assert_same_bits(contents(tmp_path / "export"), contents(source))
    export_weights(newer, table_of(values), ModelGroups(), target)
    expected = contents(source)
    expected["model.norm.weight"] += 1
    assert_same_bits(contents(tmp_path / "export"), expected)


def test_an_export_that_cannot_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA, vocab_size=2**30, hidden_size=2**20)
    table = table_of(values)
    state = {parameter.name: torch.empty(parameter.shape, device="meta") for parameter in table.parameters}
    with pytest.raises(OSError, match=r"the export needs 9,\d{3},\d{3},\d{3},\d{3},\d{3} bytes and .* are free"):
        export_weights(state, table, ModelGroups(), ExportTarget(tmp_path / "export", tmp_path))
    assert not (tmp_path / "export").exists()


def test_an_older_export_survives_one_that_fails(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    source = save_published(tmp_path / "source", values)
    state = held(values, source)
    exported(values, source, tmp_path / "export")
    state["final_norm.weight"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"final_norm\.weight is \(3,\)"):
        export_weights(state, table_of(values), ModelGroups(), ExportTarget(tmp_path / "export", source))
    assert_same_bits(contents(tmp_path / "export"), contents(source))


def test_a_model_that_nobody_holds_all_of_is_not_exported(tmp_path: Path) -> None:
    values = values_of(Family.LLAMA)
    source = save_published(tmp_path / "source", values)
    state = held(values, source)
    del state["layers.1.mlp_norm.weight"]
    with pytest.raises(ValueError, match=r"no rank holds all of layers\.1\.mlp_norm\.weight"):
        export_weights(state, table_of(values), ModelGroups(), ExportTarget(tmp_path / "export", source))


def test_tensors_are_streamed_one_at_a_time_with_their_copies(tmp_path: Path) -> None:
    values = values_of(Family.DEEPSEEK_V3, num_nextn_predict_layers=1)
    source = saved_with_mtp(tmp_path, values)
    streamed = dict(hugging_face_tensors(held(values, source), table_of(values), ModelGroups()))
    assert_same_bits(streamed, contents(source))


ENTRIES = [
    TensorEntry("a", (3,), torch.bfloat16),
    TensorEntry("b", (2, 2), torch.float32),
    TensorEntry("c", (), torch.float32),
]
TENSORS = {"a": torch.tensor([1.0, 2.0, 3.0]).bfloat16(), "b": torch.eye(2), "c": torch.tensor(5.0)}


def shard_of(path: Path) -> dict[str, str]:
    with open_shard_writer(path, ENTRIES) as opened_shard:
        return {name: opened_shard.write(name, TENSORS[name]) for name in ("c", "a", "b")}


def test_a_shard_is_what_the_library_reads(tmp_path: Path) -> None:
    checksums = shard_of(tmp_path / "shard")
    verify(tmp_path / "shard", ENTRIES, checksums)
    with safe_open(tmp_path / "shard", "pt") as opened_file:
        assert opened_file.metadata() == {"format": "pt"}
        assert all(torch.equal(opened_file.get_tensor(name), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("offset", [1, 5, 21, 26], ids=lambda offset: f"byte {offset} from the end")
def test_a_flipped_byte_is_found_when_a_shard_is_read_back(offset: int, tmp_path: Path) -> None:
    checksums = shard_of(tmp_path / "shard")
    content = bytearray((tmp_path / "shard").read_bytes())
    content[-offset] ^= 1
    (tmp_path / "shard").write_bytes(content)
    with pytest.raises(CorruptExport, match="was read back with other bytes"):
        verify(tmp_path / "shard", ENTRIES, checksums)


def test_a_shard_that_lost_its_end_is_found(tmp_path: Path) -> None:
    checksums = shard_of(tmp_path / "shard")
    (tmp_path / "shard").write_bytes((tmp_path / "shard").read_bytes()[:-1])
    with pytest.raises(CorruptExport, match="cannot be read back"):
        verify(tmp_path / "shard", ENTRIES, checksums)


@pytest.mark.parametrize(
    ("most_bytes", "expected"),
    [
        pytest.param(100, [["a", "b", "c"]], id="all in one"),
        pytest.param(22, [["a", "b"], ["c"]], id="full to the byte"),
        pytest.param(21, [["a"], ["b", "c"]], id="one byte less"),
        pytest.param(1, [["a"], ["b"], ["c"]], id="each too large"),
    ],
)
def test_tensors_are_put_into_files_in_order(most_bytes: int, expected: list[list[str]]) -> None:
    assert [[entry.name for entry in entries] for entries in plan_shards(ENTRIES, most_bytes)] == expected
