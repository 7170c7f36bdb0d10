"""The manifest of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moejob_trainer.checkpoints.manifest import (
    CheckpointManifest,
    FileEntry,
    build_manifest,
    divide_files,
    list_state_files,
    sync_and_hash_files,
)
from trainer.checkpoints.stand_ins import FragileDisk, make_facts

SIZES = st.lists(st.integers(0, 10**12), max_size=40)


def entry(name: str, size: int = 1) -> FileEntry:
    return FileEntry(name=name, size_bytes=size, hash="0")


@pytest.mark.parametrize("size", [0, 1, 2**22 - 1, 2**22, 2**22 + 1, 3 * 2**22 + 5])
def test_an_entry_has_the_size_and_hash_of_the_file(tmp_path: Path, size: int) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    (tmp_path / "part").write_bytes(content[:size])
    assert sync_and_hash_files(tmp_path, ["part"]) == [
        FileEntry(name="part", size_bytes=size, hash=xxhash.xxh3_128_hexdigest(content[:size]))
    ]


def test_a_file_is_durable_before_it_gets_an_entry(tmp_path: Path) -> None:
    disk = FragileDisk()
    for name in "abc":
        disk.write(tmp_path / name, b"content")
    sync_and_hash_files(tmp_path, ["a", "b"], disk)
    assert disk.unsynced_files == {tmp_path / "c"}


def test_a_manifest_reads_back_as_it_was_written() -> None:
    written = build_manifest([entry("b", 2), entry("a", 3)], make_facts())
    assert CheckpointManifest.model_validate_json(written.to_json()) == written
    assert [file.name for file in written.files] == ["a", "b"]
    assert written.size_bytes == 5


def test_two_ranks_never_write_one_file() -> None:
    with pytest.raises(ValueError, match="two ranks"):
        build_manifest([entry("a"), entry("a", 2)], make_facts())


def test_a_checkpoint_without_files_is_none() -> None:
    with pytest.raises(ValidationError):
        build_manifest([], make_facts())


@pytest.mark.parametrize("name", ["/etc/passwd", "../other", "a/../../b", "a//b", "./a"])
def test_a_manifest_names_nothing_outside_its_folder(name: str) -> None:
    with pytest.raises(ValidationError, match="inside the checkpoint"):
        entry(name)


def test_written_names_are_those_of_the_state(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    names = [".metadata", "__0_0.distcp", "common/state.pt"]
    for name in [*names, "manifest.json", "complete.json", "rejected.json", ".writing-manifest.json"]:
        (tmp_path / name).write_bytes(b"")
    assert list_state_files(tmp_path) == names


@given(SIZES, st.integers(1, 9))
def test_every_file_is_dealt_to_one_rank_and_no_rank_gets_much_more_than_another(sizes: list[int], ranks: int) -> None:
    files = [entry(str(number), size) for number, size in enumerate(sizes)]
    shares = divide_files(files, ranks)
    assert len(shares) == ranks
    assert sorted((file for share in shares for file in share), key=lambda file: int(file.name)) == files
    loads = [sum(file.size_bytes for file in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
