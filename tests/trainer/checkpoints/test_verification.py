"""Verification: the checkpoint that is trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moejob_trainer.checkpoints.manifest import build_marker
from moejob_trainer.checkpoints.names import StepFolder
from moejob_trainer.checkpoints.verification import (
    CheckpointSearch,
    GoodCheckpoint,
    Refusal,
    VerificationDepth,
    find_latest_checkpoint,
)
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.runtime.fencing import FenceToken
from trainer.checkpoints.stand_ins import ThreadCoordinators, files_below, flip_bit, make_state_files, save_steps

FILES = [*make_state_files(StepFolder(20, FenceToken(0, 0))), "manifest.json", "complete.json"]


def found_step(search: CheckpointSearch) -> int | None:
    return None if search.checkpoint is None else search.checkpoint.folder.step


def test_there_is_none_before_the_first_save(tmp_path: Path) -> None:
    assert find_latest_checkpoint(tmp_path / "checkpoints") == CheckpointSearch(None)


def test_the_newest_is_found(tmp_path: Path) -> None:
    save_steps(tmp_path, 9, 10, 100)
    search = find_latest_checkpoint(tmp_path / "checkpoints")
    assert (found_step(search), search.refusals) == (100, ())


def test_of_one_step_saved_by_two_attempts_the_later_is_found(tmp_path: Path) -> None:
    _, old = save_steps(tmp_path, 10, 20)
    old.rename(tmp_path / "aside")
    (new,) = save_steps(tmp_path, 20, attempt=1)
    (tmp_path / "aside").rename(old)
    search = find_latest_checkpoint(tmp_path / "checkpoints")
    assert search.checkpoint is not None
    assert search.checkpoint.path == new


def test_what_never_got_a_marker_is_passed_over_in_silence(tmp_path: Path) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    (newest / "complete.json").unlink()
    assert find_latest_checkpoint(tmp_path / "checkpoints") == CheckpointSearch(
        find_latest_checkpoint(tmp_path / "checkpoints").checkpoint, ()
    )
    assert found_step(find_latest_checkpoint(tmp_path / "checkpoints")) == 10


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_any_file_is_found(tmp_path: Path, name: str, place: str) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    size = (newest / name).stat().st_size
    flip_bit(newest / name, {"first": 0, "middle": size // 2, "last": size - 1}[place])
    search = find_latest_checkpoint(tmp_path / "checkpoints")
    assert found_step(search) == 10
    assert [refusal.folder.step for refusal in search.refusals] == [20]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_is_found(tmp_path: Path, name: str) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    (newest / name).unlink()
    assert found_step(find_latest_checkpoint(tmp_path / "checkpoints", VerificationDepth.SIZES)) == 10


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_is_found_by_its_size(tmp_path: Path, name: str) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    (newest / name).write_bytes((newest / name).read_bytes()[:-2])
    search = find_latest_checkpoint(tmp_path / "checkpoints", VerificationDepth.SIZES)
    assert found_step(search) == 10
    assert name in str(search.refusals[0]) or "manifest" in name


def test_the_quick_check_does_not_read_the_state(tmp_path: Path) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    flip_bit(newest / "__0_0.distcp")
    assert found_step(find_latest_checkpoint(tmp_path / "checkpoints", VerificationDepth.SIZES)) == 20


def test_a_refusal_says_which_file_and_what_it_should_be(tmp_path: Path) -> None:
    (newest,) = save_steps(tmp_path, 20)
    flip_bit(newest / "common/state.pt")
    refusal = find_latest_checkpoint(tmp_path / "checkpoints").refusals[0]
    assert str(refusal).startswith("step-20.0.0: common/state.pt has hash ")
    assert " instead of " in refusal.reason


def test_a_folder_under_another_name_is_refused(tmp_path: Path) -> None:
    (newest,) = save_steps(tmp_path, 20)
    newest.rename(newest.with_name("step-30.0.0"))
    assert "its manifest is that of step-20.0.0" in find_latest_checkpoint(tmp_path / "checkpoints").refusals[0].reason


def test_a_checkpoint_of_another_format_is_neither_loaded_nor_passed_over(tmp_path: Path) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    content = json.dumps(json.loads((newest / "manifest.json").read_bytes()) | {"format": 2}).encode()
    (newest / "manifest.json").write_bytes(content)
    (newest / "complete.json").write_bytes(build_marker(content).to_json())
    with pytest.raises(BadConfiguration, match="written by another version of moejob"):
        find_latest_checkpoint(tmp_path / "checkpoints")


def test_a_volume_that_does_not_answer_says_nothing_about_its_files(tmp_path: Path) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    (newest / "__0_0.distcp").unlink()
    (newest / "__0_0.distcp").symlink_to("__0_0.distcp")
    with pytest.raises(TransientFailure, match=r"checking a checkpoint failed at .*__0_0.distcp"):
        find_latest_checkpoint(tmp_path / "checkpoints")


def test_looking_changes_nothing(tmp_path: Path) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    flip_bit(newest / "__0_0.distcp")
    before = files_below(tmp_path)
    find_latest_checkpoint(tmp_path / "checkpoints")
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_1.distcp", ".metadata", "common/state.pt"])
def test_many_ranks_read_a_share_each_and_get_the_same_answer(tmp_path: Path, name: str) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    flip_bit(newest / name)
    answers = ThreadCoordinators(3).run_on_ranks(
        lambda rank: find_latest_checkpoint(tmp_path / "checkpoints", VerificationDepth.HASHES, rank)
    )
    alone = find_latest_checkpoint(tmp_path / "checkpoints")
    assert isinstance(alone.checkpoint, GoodCheckpoint)
    assert isinstance(alone.refusals[0], Refusal)
    assert answers == [alone] * 3
