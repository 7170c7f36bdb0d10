"""A folder becomes a checkpoint and stops being one, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from moejob_trainer.checkpoints.commit import commit_checkpoint, delete_checkpoint, reject_checkpoint
from moejob_trainer.checkpoints.manifest import (
    CheckpointManifest,
    FileEntry,
    build_manifest,
    list_state_files,
    sync_and_hash_files,
)
from moejob_trainer.checkpoints.verification import CheckpointSearch, VerificationDepth, find_latest_checkpoint
from moejob_trainer.errors import Superseded, TransientFailure
from trainer.checkpoints.stand_ins import FragileDisk, ProcessCrash, StateWriter, files_below, make_facts, save_steps

# More than any commit or deletion here takes: a crash that never came shows in the last case.
OPERATIONS = 40


def written(folder: Path, disk: FragileDisk, step: int = 20) -> CheckpointManifest:
    folder.mkdir(parents=True)
    StateWriter(disk).start_writing(folder)
    return build_manifest(sync_and_hash_files(folder, list_state_files(folder), disk), make_facts(step))


def found_step(run: Path) -> int | None:
    found = find_latest_checkpoint(run / "checkpoints").checkpoint
    return None if found is None else found.folder.step


@pytest.mark.parametrize("seed", [None, 1, 2, 3], ids=lambda seed: "process only" if seed is None else f"power {seed}")
def test_a_commit_cut_short_anywhere_leaves_all_or_nothing(tmp_path: Path, seed: int | None) -> None:
    outcomes = []
    for crash_at in range(1, OPERATIONS):
        run = tmp_path / str(crash_at)
        save_steps(run, 10)
        disk = FragileDisk(power=None if seed is None else random.Random(seed * 1000 + crash_at))
        whole = written(run / "checkpoints/step-20.0.0", disk)
        disk.crash_at = disk.operations + crash_at
        try:
            commit_checkpoint(run / "checkpoints/step-20.0.0", whole, lambda: True, disk)
        except ProcessCrash:
            outcomes.append(found_step(run))
            continue
        assert found_step(run) == 20
        break
    assert len(outcomes) == crash_at - 1 > 8
    assert set(outcomes) <= {10, 20}
    # Once the marker can be seen it is never unseen: what was decided on the way does not waver.
    assert outcomes[0] == 10


@pytest.mark.parametrize("seed", [None, 1, 2, 3], ids=lambda seed: "process only" if seed is None else f"power {seed}")
def test_a_deletion_cut_short_anywhere_never_leaves_half_a_checkpoint(tmp_path: Path, seed: int | None) -> None:
    for crash_at in range(1, OPERATIONS):
        run = tmp_path / str(crash_at)
        _, newest = save_steps(run, 10, 20)
        disk = FragileDisk(crash_at=crash_at, power=None if seed is None else random.Random(seed * 1000 + crash_at))
        try:
            delete_checkpoint(newest, disk)
        except ProcessCrash:
            search = find_latest_checkpoint(run / "checkpoints", VerificationDepth.SIZES)
            assert search.checkpoint is not None
            # A marker without its files would be taken for a damaged checkpoint and alarm the reader of the log.
            assert search.refusals == ()
            continue
        assert not newest.exists()
        assert crash_at > 8
        return
    pytest.fail(f"a deletion took more than {OPERATIONS} operations")


def test_a_committed_checkpoint_survives_a_loss_of_power(tmp_path: Path) -> None:
    for seed in range(20):
        disk = FragileDisk(power=random.Random(seed))
        folder = tmp_path / f"{seed}/checkpoints/step-20.0.0"
        folder.parent.mkdir(parents=True)
        disk.make_folder(folder)
        StateWriter(disk).start_writing(folder)
        whole = build_manifest(sync_and_hash_files(folder, list_state_files(folder), disk), make_facts(20))
        commit_checkpoint(folder, whole, lambda: True, disk)
        disk.crash_at = disk.operations
        with pytest.raises(ProcessCrash):
            disk.make_folder(tmp_path / "anything")
        assert found_step(tmp_path / str(seed)) == 20


def ours_for(looks: int) -> Callable[[], bool]:
    left = [True] * looks + [False]
    return lambda: left.pop(0)


@pytest.mark.parametrize("looks", [0, 1], ids=["before it begins", "just before the marker"])
def test_a_process_of_an_older_attempt_that_wakes_up_commits_nothing(tmp_path: Path, looks: int) -> None:
    save_steps(tmp_path, 10)
    folder = tmp_path / "checkpoints/step-20.0.0"
    whole = written(folder, FragileDisk())
    with pytest.raises(Superseded, match=r"this process \(attempt 0, restart 0\) no longer commits step-20.0.0"):
        commit_checkpoint(folder, whole, ours_for(looks), FragileDisk())
    assert not (folder / "complete.json").exists()
    assert found_step(tmp_path) == 10


def test_a_file_that_rank_0_sees_otherwise_than_its_writer_is_not_vouched_for(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/step-20.0.0"
    files = written(folder, FragileDisk()).files
    doubted = [FileEntry(name=one.name, size_bytes=one.size_bytes + 1, hash=one.hash) for one in files]
    with pytest.raises(TransientFailure, match="use storage that is consistent across nodes"):
        commit_checkpoint(folder, build_manifest(doubted, make_facts(20)), lambda: True)
    assert find_latest_checkpoint(tmp_path / "checkpoints") == CheckpointSearch(None)


def test_a_rejected_checkpoint_keeps_its_files_and_is_trusted_no_more(tmp_path: Path) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    before = set(files_below(newest))
    reject_checkpoint(newest)
    assert set(files_below(newest)) == before - {"complete.json"} | {"rejected.json"}
    assert found_step(tmp_path) == 10
    assert find_latest_checkpoint(tmp_path / "checkpoints").refusals[0].reason.startswith("was found damaged before")


def test_deleting_follows_no_link_out_of_the_folder(tmp_path: Path) -> None:
    (newest,) = save_steps(tmp_path, 10)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_bytes(b"kept")
    (newest / "link").symlink_to(tmp_path / "precious")
    delete_checkpoint(newest)
    assert not newest.exists()
    assert (tmp_path / "precious/file").read_bytes() == b"kept"
