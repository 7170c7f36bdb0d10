"""Models go to Megatron's checkpoints and come back to the bit; what Megatron itself saved imports as it was."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from bridge.reference import MegatronModel
from moejob_api.contract.pods import ExitCode
from moejob_api.models.shape import Family
from moejob_trainer.interchange.__main__ import main
from moejob_trainer.interchange.torch_dist import IndexedKey, StackSizes, find_iteration_folder, locate_tensor
from trainer.parity.cells import reference_model

ROOT = Path(__file__).parents[2]
CONVERTED = (
    Family.LLAMA,
    Family.QWEN2,
    Family.QWEN3,
    Family.QWEN3_MOE,
    Family.DEEPSEEK_V2,
    Family.DEEPSEEK_V3,
    Family.GLM4_MOE,
    Family.GLM4_MOE_LITE,
    Family.MIXTRAL,
    Family.QWEN2_MOE,
    Family.GPT_OSS,
)
# Stacked with experts, stacked without, and each layer by itself.
_LOCAL_NORM = "mlp.linear_fc1.layer_norm_weight"
SAVED_BY_MEGATRON = (Family.QWEN3_MOE, Family.QWEN2, Family.DEEPSEEK_V3)


@pytest.fixture(scope="module")
def publish_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """The folder of a family's model, as Transformers saves it."""
    folders: dict[Family, Path] = {}

    def written(family: Family) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family) / "published"
            reference_model(family).save_pretrained(folders[family])
        return folders[family]

    return written


@pytest.fixture
def groups() -> Iterator[None]:
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


@pytest.fixture
def exported(publish_model: Callable[[Family], Path], tmp_path: Path) -> Path:
    """A model of Qwen3-MoE as a checkpoint of Megatron's."""
    main(["export", str(publish_model(Family.QWEN3_MOE)), "--out", str(tmp_path / "megatron")])
    return tmp_path / "megatron"


@pytest.mark.parametrize("family", CONVERTED)
def test_a_model_comes_back_from_megatron_to_the_bit(
    publish_model: Callable[[Family], Path], family: Family, tmp_path: Path
) -> None:
    source, checkpoint, back = publish_model(family), tmp_path / "megatron", tmp_path / "back"
    assert main(["export", str(source), "--out", str(checkpoint)]) == ExitCode.DONE
    assert main(["import", str(checkpoint), "--config", str(source), "--out", str(back)]) == ExitCode.DONE
    assert_equal_models(back, source)


def test_an_index_names_no_class_that_another_python_lacks(exported: Path) -> None:
    assert b"pathlib" not in (find_iteration_folder(exported) / ".metadata").read_bytes()


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("family", SAVED_BY_MEGATRON)
def test_what_megatron_saved_of_a_published_model_imports_to_the_same_tensors(
    publish_model: Callable[[Family], Path], family: Family, tmp_path: Path
) -> None:
    source, checkpoint = publish_model(family), tmp_path / "megatron"
    checkpoint.mkdir()
    dist_checkpointing.save({"model": MegatronModel(source).model.sharded_state_dict()}, str(checkpoint))
    assert main(["import", str(checkpoint), "--config", str(source), "--out", str(tmp_path / "back")]) == ExitCode.DONE
    assert_equal_models(tmp_path / "back", source)


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("family", [Family.LLAMA, Family.QWEN2, Family.QWEN3])
def test_megatron_loads_what_is_exported(
    publish_model: Callable[[Family], Path], family: Family, tmp_path: Path
) -> None:
    source, checkpoint = publish_model(family), tmp_path / "megatron"
    main(["export", str(source), "--out", str(checkpoint)])
    expected, model = MegatronModel(source).model, MegatronModel(source).model
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint / "iter_0000000"))
    model.load_state_dict(loaded["model"])
    found = dict(model.named_parameters())
    assert [name for name, one in expected.named_parameters() if not torch.equal(one, found[name])] == []


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("family", [Family.QWEN3_MOE, Family.MIXTRAL, Family.QWEN2_MOE, Family.GPT_OSS])
def test_megatron_computes_the_logits_of_transformers_from_an_export(
    publish_model: Callable[[Family], Path], family: Family, tmp_path: Path
) -> None:
    source, checkpoint = publish_model(family), tmp_path / "megatron"
    main(["export", str(source), "--out", str(checkpoint)])
    megatron = MegatronModel(source, has_weights=False)
    for parameter in megatron.model.parameters():
        parameter.data.fill_(torch.nan)
    asked = _with_stored_names(megatron.model.sharded_state_dict(), stored_keys(checkpoint))
    loaded = dist_checkpointing.load({"model": asked}, str(checkpoint / "iter_0000000"))
    megatron.model.load_state_dict(loaded["model"])
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, actual = reference_model(family)(tokens).logits, megatron(tokens).logits
    assert (actual[..., : expected.shape[-1]] - expected).abs().max() < 1e-5 * expected.abs().max()
    saved, back = tmp_path / "saved", tmp_path / "back"
    saved.mkdir()
    dist_checkpointing.save({"model": megatron.model.sharded_state_dict()}, str(saved))
    assert main(["import", str(saved), "--config", str(source), "--out", str(back)]) == ExitCode.DONE
    assert_equal_models(back, source)


@pytest.mark.usefixtures("groups")
def test_an_export_holds_all_that_a_mixture_asks_for(publish_model: Callable[[Family], Path], exported: Path) -> None:
    asked = MegatronModel(publish_model(Family.QWEN3_MOE)).model.sharded_state_dict()
    keys = {one.unique_key if isinstance(one, ShardedObject) else one.key for one in asked.values()}
    held = stored_keys(exported)
    # Layers without Transformer Engine save this norm under another name than those with it.
    assert keys - held == {"decoder.layers.mlp.linear_fc1.layer_norm_weight"}


@pytest.mark.parametrize(
    ("name", "are_layers_stacked", "expected"),
    [
        ("output_layer.weight", True, IndexedKey("output_layer.weight")),
        ("decoder.layers.2.mlp.linear_fc1.weight", True, IndexedKey("decoder.layers.mlp.linear_fc1.weight", (2,))),
        ("decoder.layers.2.mlp.linear_fc1.weight", False, IndexedKey("decoder.layers.2.mlp.linear_fc1.weight")),
        (
            "decoder.layers.2.mlp.experts.linear_fc1.weight7",
            True,
            IndexedKey("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 7)),
        ),
        (
            "decoder.layers.2.mlp.experts.linear_fc1.weight7",
            False,
            IndexedKey("decoder.layers.2.mlp.experts.experts.linear_fc1.weight", (7,)),
        ),
    ],
)
def test_layers_and_experts_are_stacked_as_megatron_stacks_them(
    name: str, are_layers_stacked: bool, expected: IndexedKey
) -> None:
    assert locate_tensor(name, StackSizes(4, 8, are_layers_stacked=are_layers_stacked)) == expected


def test_a_rotary_type_that_the_bridge_does_not_know_is_refused_by_name(
    publish_model: Callable[[Family], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "linear"
    shutil.copytree(publish_model(Family.LLAMA), source)
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    (source / "config.json").write_text(json.dumps(config))
    for arguments in (["check", str(source)], ["export", str(source), "--out", str(tmp_path / "megatron")]):
        assert main(arguments) == ExitCode.BAD_CONFIGURATION
        assert "Megatron-Bridge 0.6.2 does not know rope_type linear" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"linear"}


def test_a_folder_that_exists_is_not_written_to(
    publish_model: Callable[[Family], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(publish_model(Family.LLAMA)), "--out", str(tmp_path)]) == ExitCode.BAD_CONFIGURATION
    assert f"{tmp_path} exists" in capsys.readouterr().err


def test_the_config_of_another_model_is_refused(
    publish_model: Callable[[Family], Path], exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported(exported, publish_model(Family.LLAMA), tmp_path) == ExitCode.BAD_CONFIGURATION
    assert "use the config.json of the model" in capsys.readouterr().err


def test_a_checkpoint_that_is_cut_off_leaves_nothing_behind(
    publish_model: Callable[[Family], Path], exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = exported / "iter_0000000/__0_0.distcp"
    os.truncate(data, data.stat().st_size // 2)
    assert imported(exported, publish_model(Family.QWEN3_MOE), tmp_path) == ExitCode.BAD_CONFIGURATION
    assert "cannot be read" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"megatron"}


class _Calls:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("false",)


def test_no_code_of_a_checkpoint_runs(
    publish_model: Callable[[Family], Path], exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (exported / "iter_0000000/.metadata").write_bytes(pickle.dumps(_Calls()))
    assert imported(exported, publish_model(Family.QWEN3_MOE), tmp_path) == ExitCode.BAD_CONFIGURATION
    assert "it names posix.system" in capsys.readouterr().err


def test_the_command_line_exports_a_run_and_imports_it_again(
    publish_model: Callable[[Family], Path], tmp_path: Path
) -> None:
    source, run = publish_model(Family.LLAMA), tmp_path / "run"
    run.mkdir()
    (run / "export").symlink_to(source)
    there, back = tmp_path / "megatron", tmp_path / "back"
    assert "each read back" in moejob("export", run, "--to", "megatron", "--out", there)
    assert "each read back" in moejob("import", there, "--from", "megatron", "--config", source, "--out", back)
    assert_equal_models(back, source)


def moejob(*arguments: str | Path) -> str:
    done = subprocess.run([ROOT / ".venv/operator/bin/moejob", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _with_stored_names(asked: dict[str, Any], held: set[str]) -> dict[str, Any]:
    """Name norms before experts as layers with Transformer Engine do, whose names an export has."""
    for tensor in asked.values():
        if tensor.key.endswith(_LOCAL_NORM) and tensor.key not in held:
            tensor.key = tensor.key.removesuffix(_LOCAL_NORM) + "pre_mlp_layernorm.weight"
    return asked


def stored_keys(checkpoint: Path) -> set[str]:
    return {*FileSystemReader(checkpoint / "iter_0000000").read_metadata().state_dict_metadata}


def imported(checkpoint: Path, config: Path, folder: Path) -> int:
    return main(["import", str(checkpoint), "--config", str(config), "--out", str(folder / "back")])


def assert_equal_models(found: Path, expected: Path) -> None:
    ours, theirs = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
