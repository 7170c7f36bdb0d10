"""Checkpoints of strangers: their tensors are read as torch wrote them, and nothing of them runs or is followed."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from fuzzing import damage_sample, random_sources
from moejob_api.problems import InvalidSpec
from moejob_trainer.interchange import checkpoint_index
from moejob_trainer.interchange.checkpoint_index import indexed_tensors
from moejob_trainer.interchange.inert_pickle import RefusedPickle
from moejob_trainer.interchange.torch_dist import IndexedKey, TorchDistReader, find_iteration_folder
from trainer.interchange.conftest import EMBEDDING, WEIGHT
from trainer.interchange.hostile_pickles import poisons_paths

# As an import that fails: it removes the folder that it began to write, and then others write theirs.
FAILED_IMPORT = """
import shutil, sys
from pathlib import Path
from moejob_api.problems import InvalidSpec
from moejob_trainer.interchange.torch_dist import TorchDistReader
unfinished = Path(sys.argv[2])
try:
    TorchDistReader(Path(sys.argv[1]))
except InvalidSpec as error:
    print(error)
except Exception:
    pass
if sys.argv[3] == "remove":
    shutil.rmtree(unfinished, ignore_errors=True)
else:
    unfinished.write_text("of the checkpoint's choice")
"""


def test_tensors_are_read_as_they_were_written(checkpoint: Path) -> None:
    reader = TorchDistReader(checkpoint)
    assert reader.sizes == {WEIGHT: (3, 4, 3), EMBEDDING: (5, 3)}
    for layer in range(3):
        assert torch.equal(
            reader.read_tensor(IndexedKey(WEIGHT, (layer,))), torch.full((4, 3), layer + 0.5, dtype=torch.bfloat16)
        )
    assert torch.equal(reader.read_tensor(IndexedKey(EMBEDDING)), torch.arange(15.0).reshape(5, 3))


@pytest.mark.parametrize("action", ["remove", "write"])
def test_an_index_changes_no_class_of_the_process_that_reads_it(checkpoint: Path, tmp_path: Path, action: str) -> None:
    victim, unfinished = tmp_path / "home", tmp_path / "unfinished"
    if action == "remove":
        victim.mkdir()
        (victim / "thesis").write_text("years of work")
    else:
        victim.write_text("# the start file of a shell")
    content = poisons_paths(str(victim))
    (checkpoint / ".metadata").write_bytes(content)
    command = [sys.executable, "-c", FAILED_IMPORT, str(checkpoint), str(unfinished), action]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "sets attributes of what it did not make" in result.stdout
    assert "the checkpoint's choice" not in (victim.read_text() if action == "write" else "")
    assert victim.is_file() or (victim / "thesis").read_text() == "years of work"


def _index_of(**changes: object) -> metadata.Metadata:
    size, offset = torch.Size((2, 2)), torch.Size((0, 0))
    given = {"dtype": torch.float32, "size": size, "sizes": size, "key": "decoder.weight", **changes}
    part = metadata.ChunkStorageMetadata(offset, given["sizes"])  # type: ignore[arg-type]
    tensor = metadata.TensorStorageMetadata(
        metadata.TensorProperties(given["dtype"]),  # type: ignore[arg-type]
        given["size"],  # type: ignore[arg-type]
        given.get("parts", [part]),  # type: ignore[arg-type]
    )
    place = _StorageInfo(*given.get("place", ("__0_0.distcp", 0, 100)))  # type: ignore[misc]
    return metadata.Metadata({given["key"]: tensor}, None, {metadata.MetadataIndex("decoder.weight", offset): place})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        pytest.param(_index_of(place=("../../etc/passwd", 0, 1)), "outside of its folder", id="above"),
        pytest.param(_index_of(place=("/etc/passwd", 0, 1)), "outside of its folder", id="absolute"),
        pytest.param(_index_of(place=("..", 0, 1)), "outside of its folder", id="the folder above"),
        pytest.param(_index_of(place=("a\0b", 0, 1)), "outside of its folder", id="NUL"),
        pytest.param(_index_of(place=("a", -1, 1)), "no whole number from 0", id="negative offset"),
        pytest.param(_index_of(place=("a", 0, 2**80)), "no whole number from 0", id="huge length"),
        pytest.param(_index_of(place=("a", 0, 1, ["zstd"])), "compressed", id="compressed"),
        pytest.param(_index_of(size=torch.Size((1,) * 40)), "a size of 16 axes", id="axes"),
        pytest.param(_index_of(size=[2, 2]), "in the place of a size", id="no size"),
        pytest.param(_index_of(key=7), "a key is no text", id="key"),
        pytest.param(_index_of(key="k" * 5000), "a key is no text", id="long key"),
        pytest.param(_index_of(key="other"), "does not say where other", id="nowhere"),
        pytest.param(_index_of(parts="x"), "has no list of parts", id="no parts"),
        pytest.param(_index_of(parts=[None] * 1000), "more parts than its bytes", id="parts"),
        pytest.param(_index_of(dtype=torch.Size(())), "has no type", id="no type"),
        pytest.param({"a": 1}, "in the place of a Metadata", id="no metadata"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(index: object, reason: str) -> None:
    with pytest.raises(RefusedPickle, match=reason):
        indexed_tensors(pickle.dumps(index))


def test_a_damaged_index_is_refused_or_names_files_of_its_folder(checkpoint: Path) -> None:
    content = (checkpoint / ".metadata").read_bytes()
    whole = indexed_tensors(content)
    for draw in random_sources():
        try:
            tensors = indexed_tensors(damage_sample(draw, [content]))
        except RefusedPickle:
            continue
        assert len(tensors) <= len(whole)
        assert not any("/" in part.file for tensor in tensors.values() for part in tensor.parts)


def _replace_by_link(file: Path) -> None:
    real = file.rename(file.with_name("real"))
    file.symlink_to(real.name)


def _replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda file: os.truncate(file, 3000), "cut off", id="cut off"),
        pytest.param(_replace_by_pipe, "not a regular file", id="pipe"),
        pytest.param(lambda file: file.unlink(), "No such file", id="gone"),
        pytest.param(lambda file: file.write_bytes(b"\0" * 20_000), "no archive of a tensor", id="zeros"),
    ],
)
def test_a_file_of_tensors_that_cannot_be_read_is_refused(
    checkpoint: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(checkpoint / "__0_0.distcp")
    reader = TorchDistReader(checkpoint)
    with pytest.raises(InvalidSpec, match=reason):
        reader.read_tensor(IndexedKey(EMBEDDING))


def test_a_link_within_the_checkpoint_is_followed(checkpoint: Path) -> None:
    _replace_by_link(checkpoint / "__0_0.distcp")
    assert torch.equal(TorchDistReader(checkpoint).read_tensor(IndexedKey(EMBEDDING)), torch.arange(15.0).reshape(5, 3))


def test_an_index_that_promises_a_huge_tensor_takes_no_memory(checkpoint: Path) -> None:
    size = torch.Size((2**20, 2**20))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_index_of(size=size, sizes=size)))
    with pytest.raises(InvalidSpec, match="for a part that takes 4,398,046,511,104"):
        TorchDistReader(checkpoint).read_tensor(IndexedKey("decoder.weight"))


def test_an_index_that_takes_more_memory_than_its_size_allows_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / ".metadata").write_bytes(b"\x80\x04" + pickle.EMPTY_DICT * 9_000_000)
    with pytest.raises(InvalidSpec, match="takes more memory or time"):
        TorchDistReader(checkpoint)
    monkeypatch.setattr(checkpoint_index, "MOST_BYTES", 1000)
    with pytest.raises(InvalidSpec, match="9,000,002 bytes; an index has 1,000 at most"):
        TorchDistReader(checkpoint)


def test_a_reader_that_cannot_begin_is_not_said_to_be_the_fault_of_the_index(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the trainer lies on PYTHONPATH, which the reader does not obey."""
    monkeypatch.setattr(checkpoint_index, "__name__", "moejob_trainer.interchange.elsewhere")
    with pytest.raises(InvalidSpec, match=r"the process that reads it ended with .*No module named .*elsewhere"):
        TorchDistReader(checkpoint)


@pytest.mark.parametrize("newest", ["../../etc", "/etc", "²", "9" * 5000, "", "iter_1/.."])
def test_a_tracker_names_an_iteration_or_is_refused(tmp_path: Path, newest: str) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(newest)
    with pytest.raises(InvalidSpec, match="neither an iteration nor release"):
        find_iteration_folder(tmp_path)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b"\xff", b"{", b'{"sharded_backend": "zarr"}'])
def test_a_format_that_is_not_torch_dist_is_refused(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "metadata.json").write_bytes(content)
    with pytest.raises(InvalidSpec):
        TorchDistReader(checkpoint)
