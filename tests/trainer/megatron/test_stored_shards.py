"""Parts of files that are asked for ahead: the bytes that reads of a shard need."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moejob_trainer.checkpoints.shards import ShardSpec
from moejob_trainer.megatron import stored_shards as module
from moejob_trainer.megatron.stored_shards import SHARDS, ShardFiles, shards_in

WHOLE = torch.arange(8 * 6, dtype=torch.float32).view(8, 6)
# The upper rows, and the right half of the lower ones, in another type; each rank of a run writes such.
STORED = {"0": WHOLE[:4].clone(), "1": torch.tensor(7.0), "2": WHOLE[4:, 3:].double()}
DESCRIBED = [
    {"kind": "weight", "name": "matrix", "shape": [8, 6], "start": [0, 0], "size": [4, 6]},
    {"kind": "weight", "name": "number", "shape": [], "start": [], "size": []},
    {"kind": "weight", "name": "matrix", "shape": [8, 6], "start": [4, 3], "size": [4, 3]},
]


@pytest.mark.parametrize(
    ("start", "size", "parts"),
    [
        ((1, 0), (2, 6), [WHOLE[1:3].numpy().tobytes()]),
        # Of rows that are needed in part all is asked for, and nothing of other rows.
        ((3, 4), (2, 2), [WHOLE[3:4].numpy().tobytes(), WHOLE[4:5, 3:].double().numpy().tobytes()]),
        ((4, 3), (4, 3), [WHOLE[4:, 3:].double().numpy().tobytes()]),
    ],
)
def test_parts_of_a_matrix_are_the_rows_that_are_read(
    tmp_path: Path, start: tuple[int, int], size: tuple[int, int], parts: list[bytes]
) -> None:
    save_file(STORED, tmp_path / "state", {SHARDS: json.dumps(DESCRIBED)})
    stored = [one for one in shards_in(tmp_path, "state") if one.name == "matrix"]
    files, shard = ShardFiles(tmp_path), ShardSpec(start, size)
    content = (tmp_path / "state").read_bytes()
    found = [content[part.offset : part.offset + part.length] for part in files.file_parts(shard, stored)]
    assert found == parts
    target = torch.zeros(size)
    files.fill_shard(target, shard, stored, "matrix")
    assert torch.equal(target, WHOLE[shard.index_slices])


@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("buffer_bytes", [1, 50, 2**22], ids=["a row at a time", "two", "all"])
def test_rows_come_to_their_places_however_many_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int, readers: int
) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", buffer_bytes)
    save_file(STORED, tmp_path / "state", {SHARDS: json.dumps(DESCRIBED)})
    stored = [one for one in shards_in(tmp_path, "state") if one.name == "matrix"]
    # As weights are filled: those that learn want no gradient of it.
    shard, target = ShardSpec((1, 3), (6, 3)), torch.zeros(6, 3, requires_grad=True)
    ShardFiles(tmp_path, readers).fill_shard(target, shard, stored, "matrix")
    assert torch.equal(target, WHOLE[shard.index_slices])


@pytest.mark.parametrize("readers", [1, 2])
def test_a_file_that_ends_in_the_middle_of_a_tensor_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", 1)
    save_file(STORED, tmp_path / "state", {SHARDS: json.dumps(DESCRIBED)})
    stored = [one for one in shards_in(tmp_path, "state") if one.name == "matrix"]
    os.truncate(tmp_path / "state", stored[0].offset + 30)
    with pytest.raises(OSError, match="ends in the middle of a tensor"):
        ShardFiles(tmp_path, readers).fill_shard(torch.zeros(2, 6), ShardSpec((0, 0), (2, 6)), stored, "matrix")


def test_a_number_is_one_part(tmp_path: Path) -> None:
    save_file(STORED, tmp_path / "state", {SHARDS: json.dumps(DESCRIBED)})
    stored = [one for one in shards_in(tmp_path, "state") if one.name == "number"]
    (part,) = ShardFiles(tmp_path).file_parts(ShardSpec((), ()), stored)
    assert (tmp_path / "state").read_bytes()[part.offset :][: part.length] == torch.tensor(7.0).numpy().tobytes()
