"""A checkpoint becomes the model that the run itself would have exported, to the bit, in the memory of a few shards."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from builders import merge_sections, spec
from model_configs import config as small_config
from moejob_api.contract.pod_environment import spec_text
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family
from moejob_trainer.checkpoint_export.__main__ import describe_failure, main
from moejob_trainer.checkpoint_export.run import Best, StoredRun, read_stored_run
from moejob_trainer.checkpoint_export.run_export import BoundedMemory, ExportOptions, export_run
from moejob_trainer.checkpoint_export.tensors import CheckpointTensors
from moejob_trainer.checkpoints.commit import commit_checkpoint
from moejob_trainer.checkpoints.manifest import CheckpointFacts, build_manifest, sync_and_hash_files
from moejob_trainer.checkpoints.verification import GoodCheckpoint, find_latest_checkpoint
from moejob_trainer.conversion.families import TensorTable, build_tensor_table
from moejob_trainer.conversion.safetensors_writer import CorruptExport, TensorEntry, verify
from moejob_trainer.conversion.tensor_table import TensorPiece
from moejob_trainer.data import tiny
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.megatron.stored_shards import SHARDS, STATE_FORMAT
from trainer.random_model import write
from trainer.runs import TINY, Runs

# The command line has an environment of its own, which must never meet torch.
COMMAND = Path(__file__).parents[3] / ".venv/operator/bin/moejob"
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "targets": ["QueryKeyValue", "AttentionOutput", "ExpertDown"]}
_LORA_A = re.compile(r"base_model\.model\.(.+)\.lora_A\.weight")


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> set[str]:
    assert found.keys() == expected.keys()
    return {name for name, one in expected.items() if not torch.equal(found[name], one)}


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that went on after its first export, which is beside it, and one that trained adapters of a model."""
    place = tmp_path_factory.mktemp("export")
    runs = Runs(place / "volume")
    saving: dict[str, Any] = {"checkpoint": {"async": False, "exportHuggingFace": True}}
    runs.run_to_end("whole", training={"maxSteps": 1}, parallelism={"expert": 2}, **saving)
    shutil.copytree(runs.volume / "whole/export", runs.volume / "first-export")
    runs.run_to_end("whole", attempt=2, training={"maxSteps": 2}, **saving)
    write(runs.volume / "published")
    adapted = {"training": {"maxSteps": 1, "lora": LORA}, "model": {"source": str(runs.volume / "published")}}
    runs.run_to_end("adapted", **adapted, **saving)
    yield runs.volume
    runs.close()


def test_the_newest_checkpoint_is_the_model_that_the_run_exported(volume: Path, tmp_path: Path) -> None:
    said = export_run(read_stored_run(volume / "whole"), ExportOptions(tmp_path / "out"))
    assert "step 2" in said
    assert differing(tensors(tmp_path / "out"), tensors(volume / "whole/export")) == set()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (volume / "whole/export" / name).read_bytes()


@pytest.mark.slow
def test_the_command_exports_an_earlier_step_too(volume: Path, tmp_path: Path) -> None:
    wanted = ["--out", str(tmp_path / "out"), "--step", "1", "--dtype", "bfloat16"]
    command = [str(COMMAND), "export", str(volume / "whole"), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "step 1" in done.stdout
    expected = {name: one.bfloat16() for name, one in tensors(volume / "first-export").items()}
    assert differing(tensors(tmp_path / "out"), expected) == set()
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_adapters_are_exported_as_the_run_does(volume: Path, tmp_path: Path) -> None:
    said = export_run(read_stored_run(volume / "adapted"), ExportOptions(tmp_path / "out"))
    assert "--merge-adapters writes the whole model" in said
    assert differing(tensors(tmp_path / "out"), tensors(volume / "adapted/export")) == set()
    config = "adapter_config.json"
    assert (tmp_path / "out" / config).read_bytes() == (volume / "adapted/export" / config).read_bytes()


def test_merged_adapters_are_added_to_the_published_weights(volume: Path, tmp_path: Path) -> None:
    export_run(read_stored_run(volume / "adapted"), ExportOptions(tmp_path / "out", merge_adapters=True))
    expected, adapters = tensors(volume / "published"), tensors(volume / "adapted/export")
    scale = LORA["alpha"] / LORA["rank"]
    matrices = [of_a[1] for name in adapters if (of_a := _LORA_A.fullmatch(name))]
    assert any("experts" in name for name in matrices)
    for name in matrices:
        a, b = (adapters[f"base_model.model.{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
        expected[f"{name}.weight"] += scale * b @ a
    found = tensors(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=1e-6)
    # An expert without tokens has learned nothing.
    published, of_queries = tensors(volume / "published"), [name for name in matrices if name.endswith("q_proj")]
    assert not any(torch.equal(found[f"{name}.weight"], published[f"{name}.weight"]) for name in of_queries)


@pytest.mark.parametrize(
    ("run", "step", "wanted", "said"),
    [
        pytest.param("published", None, {}, "name the folder of a run", id="no run"),
        pytest.param("whole", 7, {}, "no complete checkpoint of step 7; there are: 1, 2", id="no such step"),
        pytest.param("whole", "best", {}, "checkpoint.keepBest keeps such", id="no best"),
        pytest.param("whole", None, {"merge_adapters": True}, "holds no adapters", id="nothing to merge"),
        pytest.param("adapted", None, {"dtype": torch.bfloat16}, "add --merge-adapters", id="the type of adapters"),
    ],
)
def test_what_cannot_be_exported_is_said_with_its_fix(
    run: str, step: int | Best | None, wanted: dict[str, Any], said: str, volume: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadConfiguration, match=said):
        export_run(read_stored_run(volume / run, step), ExportOptions(tmp_path / "out", **wanted))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_lacks_a_part_leaves_nothing_behind(volume: Path, tmp_path: Path) -> None:
    run = read_stored_run(volume / "whole", 1)
    # As if the rank that held half of the experts had written nothing.
    half = shutil.copytree(run.checkpoint.path, tmp_path / "half" / run.checkpoint.path.name)
    (half / "state-00001.safetensors").unlink()
    with pytest.raises(BadConfiguration, match=r"holds \d+ of the \d+ numbers"):
        export_run(replace(run, checkpoint=replace(run.checkpoint, path=half)), ExportOptions(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["half"]


@pytest.mark.parametrize(
    ("out", "said"),
    [
        pytest.param("/proc/moejob", "/proc/moejob cannot be written: No such file", id="where nothing can be made"),
        pytest.param("file/out", "out cannot be written: Not a directory", id="below a file"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named(
    out: str,
    said: str,
    volume: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The program keeps its process from logging, and this one runs other tests.
    monkeypatch.setattr(logging, "disable", lambda _: None)
    (tmp_path / "file").touch()
    assert main([str(volume / "whole"), "--out", str(tmp_path / out)]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        pytest.param(
            FileNotFoundError(2, "No such file", "/runs/a/checkpoints/x"), "may have removed", id="it is gone"
        ),
        pytest.param(FileNotFoundError("No such file: x"), "may have removed", id="gone, as safetensors says it"),
        pytest.param(OSError(5, "I/O error", "/runs/a/spec.json"), "I/O error: '/runs/a/spec.json'", id="unreadable"),
        pytest.param(OSError(28, "No space left", "/runs/.b/x"), "/runs/b cannot be written: No space", id="full"),
    ],
)
def test_a_failure_of_the_machine_says_which_folder_it_is_about(failure: OSError, said: str) -> None:
    assert said in describe_failure(failure, Path("/runs/a"), Path("/runs/b"))


def test_a_folder_that_is_there_is_never_written_to(volume: Path, tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="exists; name another folder"):
        export_run(read_stored_run(volume / "whole"), ExportOptions(tmp_path))


# --- memory -----------------------------------------------------------------------------------------------------------

SHARD_BYTES = 16 * 2**20
# M_MMAP_THRESHOLD of malloc.h.
_MMAP_THRESHOLD = -3


def test_a_model_of_many_shards_is_exported_in_the_memory_of_few(tmp_path: Path) -> None:
    run = large_run(tmp_path)
    with small_tensors_given_back():
        # Of the process as a whole, mapped files among them; from now on.
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory_bytes("VmRSS")
        said = export_run(run, ExportOptions(tmp_path / "out", most_shard_bytes=SHARD_BYTES))
        grown = _memory_bytes("VmHWM") - before
    shards = list((tmp_path / "out").glob("model-*.safetensors"))
    assert sum(path.stat().st_size for path in shards) > 10 * SHARD_BYTES, said
    assert len(shards) > 10
    assert grown < 3 * SHARD_BYTES


@contextmanager
def small_tensors_given_back() -> Iterator[None]:
    """Memory of tensors that are freed goes back at once, as it does of those above 32 MiB."""
    allocator = ctypes.CDLL(None)
    assert allocator.mallopt(_MMAP_THRESHOLD, 2**16) == 1
    try:
        yield
    finally:
        allocator.mallopt(_MMAP_THRESHOLD, 2**25)


def large_run(folder: Path) -> StoredRun:
    """A checkpoint of a model of 200 MB, of which every tensor has its own number for all elements."""
    config = small_config(Family.QWEN3_MOE) | {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 16}
    template = folder / "template"
    tiny.build_tokenizer().save_pretrained(template)
    (template / "config.json").write_text(json.dumps(config))
    declared = build_tensor_table(shape_of(config))
    commit_state(folder, declared, [torch.full(one.shape, float(n)) for n, one in enumerate(declared.parameters)])
    (folder / "spec.json").write_text(spec_text(spec(**merge_sections(TINY, {"model": {"source": str(template)}}))))
    return read_stored_run(folder)


def commit_state(folder: Path, declared: TensorTable, values: Sequence[Tensor]) -> None:
    """A good checkpoint of a run folder that holds these values of all parameters."""
    path = folder / "checkpoints" / "step-1.1.0"
    path.mkdir(parents=True)
    _write_state(path, declared, values)
    (path / "run-state.json").write_text(json.dumps({"adapted": {"lora": None, "beside": "x", "holdsWeights": True}}))
    facts = CheckpointFacts(
        step=1, attempt=1, restart=0, job_uid="u", state_format=STATE_FORMAT, layout={}, versions={}, data={}
    )
    commit_checkpoint(
        path, build_manifest(sync_and_hash_files(path, [one.name for one in path.iterdir()]), facts), lambda: True
    )
    assert isinstance(find_latest_checkpoint(path.parent).checkpoint, GoodCheckpoint)


def _write_state(path: Path, declared: TensorTable, values: Sequence[Tensor]) -> None:
    shards = [
        {"kind": "weight", "name": one.name, "shape": one.shape, "start": [0] * len(one.shape), "size": one.shape}
        for one in declared.parameters
    ]
    numbered = {str(number): value for number, value in enumerate(values)}
    save_file(numbered, path / "state-00000.safetensors", {SHARDS: json.dumps(shards)})


def _memory_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_threads_hold_no_more_memory_together_than_the_bound_and_one_alone_what_it_needs() -> None:
    memory, lock, held, most = BoundedMemory(10), threading.Lock(), list[int](), list[tuple[int, int]]()

    def work(needed: int) -> None:
        with memory.reserve_bytes(needed):
            with lock:
                held.append(needed)
                most.append((sum(held), len(held)))
            time.sleep(0.001)
            with lock:
                held.remove(needed)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, [3, 4, 5, 25, 1, 9, 10] * 10))
    assert held == []
    assert all(together <= 10 or count == 1 for together, count in most)
    assert {25, 10} <= {together for together, _ in most}


def test_an_export_of_which_one_tensor_cannot_be_read_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read = large_run(tmp_path), CheckpointTensors.tensor

    def tensor(of: CheckpointTensors, piece: TensorPiece, dtype: torch.dtype) -> Tensor:
        if piece.tensor == "model.norm.weight":
            raise OSError("the disk is gone")
        return read(of, piece, dtype)

    monkeypatch.setattr(CheckpointTensors, "tensor", tensor)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(OSError, match="the disk is gone"):
        export_run(run, ExportOptions(tmp_path / "out", most_shard_bytes=SHARD_BYTES))
    assert {path.name for path in tmp_path.iterdir()} == before


def test_an_export_of_which_a_file_is_read_back_damaged_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = large_run(tmp_path)

    def damaged(path: Path, of_file: Sequence[TensorEntry], checksums: Mapping[str, str]) -> None:
        if "-00002-of-" in path.name:
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
        verify(path, of_file, checksums)

    monkeypatch.setattr("moejob_trainer.checkpoint_export.run_export.verify", damaged)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(CorruptExport, match="was read back with other bytes"):
        export_run(run, ExportOptions(tmp_path / "out", most_shard_bytes=SHARD_BYTES))
    assert {path.name for path in tmp_path.iterdir()} == before
