"""Checkpoints that cannot be read now are kept, tried again, and passed over only by a second start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moejob_api.job.storage import Checkpoint
from moejob_trainer.checkpoints import CheckpointStore, SingleRank
from moejob_trainer.checkpoints.manifest import EvaluationFacts
from moejob_trainer.checkpoints.run import find_resume_checkpoint
from moejob_trainer.errors import TransientFailure
from trainer.checkpoints.stand_ins import (
    FragileDisk,
    InlineExecutor,
    StateWriter,
    flip_bit,
    make_policy,
    make_run_folder,
    make_save_request,
    open_store,
    save_steps,
)


def break_off(checkpoint: Path) -> Callable[[], object]:
    """Make a checkpoint unreadable, and return what makes it readable again. The error is the kernel's own."""
    manifest, aside = checkpoint / "manifest.json", checkpoint.with_name(f"aside-{checkpoint.name}")
    manifest.rename(aside)
    # There is nothing at address 0: an input/output error.
    manifest.symlink_to("/proc/self/mem")
    return lambda: aside.replace(manifest)


def found_step(folder: Path, attempt: int, keep: int = 2) -> int | None:
    found = open_store(make_run_folder(folder, attempt), make_policy(keep)).start()
    return None if found is None else found.folder.step


def steps_there(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def test_an_error_that_passes_costs_a_start_and_no_checkpoint(tmp_path: Path) -> None:
    *_, newest = save_steps(tmp_path, 10, 20)
    repair = break_off(newest)
    with pytest.raises(TransientFailure, match=r"step-20.0.0: manifest.json cannot be read: Input/output error"):
        found_step(tmp_path, 1)
    assert not (newest / "rejected.json").exists()
    repair()
    assert found_step(tmp_path, 2) == 20
    assert not (tmp_path / "checkpoints/unread.json").exists()


def test_an_error_that_lasts_costs_one_start_and_the_steps_since_the_one_before(tmp_path: Path) -> None:
    *_, newest = save_steps(tmp_path, 10, 20)
    break_off(newest)
    with pytest.raises(TransientFailure, match="resumes from step 10 if it cannot either"):
        found_step(tmp_path, 1)
    run = open_store(make_run_folder(tmp_path, attempt=2), make_policy(keep=1))
    found = run.start()
    assert found is not None
    assert found.folder.step == 10
    # The only good one is not deleted in favour of one that nothing is known of.
    assert steps_there(tmp_path) == ["step-10.0.0", "step-20.0.0"]
    run.save(make_save_request(15))
    assert steps_there(tmp_path) == ["step-15.2.0", "step-20.0.0"]
    assert not (newest / "rejected.json").exists()
    run.save(make_save_request(20))
    assert steps_there(tmp_path) == ["step-20.2.0"]


def test_a_checkpoint_that_was_passed_over_counts_as_soon_as_it_can_be_read(tmp_path: Path) -> None:
    *_, newest = save_steps(tmp_path, 10, 20)
    repair = break_off(newest)
    with pytest.raises(TransientFailure):
        found_step(tmp_path, 1)
    assert found_step(tmp_path, 2) == 10
    repair()
    assert found_step(tmp_path, 3) == 20


def test_a_run_of_which_nothing_can_be_read_is_tried_again_however_often(tmp_path: Path) -> None:
    repairs = [break_off(path) for path in save_steps(tmp_path, 10, 20)]
    for attempt in (1, 2, 3):
        with pytest.raises(TransientFailure, match="none is good beside them, so the next start tries again"):
            found_step(tmp_path, attempt)
    for repair in repairs:
        repair()
    assert found_step(tmp_path, 4) == 20


def test_damage_beside_what_cannot_be_read_is_no_reason_to_give_up(tmp_path: Path) -> None:
    older, newest = save_steps(tmp_path, 10, 20)
    repair = break_off(older)
    flip_bit(newest / "__0_0.distcp")
    with pytest.raises(TransientFailure, match=r"step-10.0.0"):
        found_step(tmp_path, 1)
    repair()
    assert found_step(tmp_path, 2) == 10
    assert (newest / "rejected.json").exists()


def test_an_older_checkpoint_that_cannot_be_read_while_others_are_deleted_stays(tmp_path: Path) -> None:
    older, _, _ = save_steps(tmp_path, 10, 20, 30)
    repair = break_off(older)
    assert found_step(tmp_path, 1, keep=1) == 30
    assert steps_there(tmp_path) == ["step-10.0.0", "step-30.0.0"]
    repair()
    assert found_step(tmp_path, 2, keep=1) == 30
    assert steps_there(tmp_path) == ["step-30.0.0"]


def test_another_run_that_cannot_be_read_is_tried_again(tmp_path: Path) -> None:
    *_, newest = save_steps(tmp_path / "other", 10, 20)
    repair = break_off(newest)
    with pytest.raises(TransientFailure, match="checkpoints cannot be read now: step-20"):
        find_resume_checkpoint("other", tmp_path / "other", SingleRank())
    repair()
    assert find_resume_checkpoint("other", tmp_path / "other", SingleRank()).folder.step == 20


def test_the_best_checkpoint_is_tried_once_more_before_a_lesser_one_is_exported(tmp_path: Path) -> None:
    def run(attempt: int) -> CheckpointStore:
        how = Checkpoint(keep=1, keep_best=2, asynchronous=False)
        made = CheckpointStore(
            make_run_folder(tmp_path, attempt),
            how,
            SingleRank(),
            StateWriter(FragileDisk()),
            FragileDisk(),
            background=InlineExecutor(),
            measure="evalLoss",
        )
        made.start()
        return made

    first = run(0)
    for step, value in ((10, 1.0), (20, 2.0)):
        first.save(replace(make_save_request(step), evaluation=EvaluationFacts(measure="evalLoss", value=value)))
    repair = break_off(tmp_path / "checkpoints/step-10.0.0")
    with pytest.raises(TransientFailure, match=r"step-10.0.0: manifest.json cannot be read"):
        first.find_best()
    lesser = run(1).find_best().checkpoint
    assert lesser is not None
    assert lesser.folder.step == 20
    repair()
    best = run(2).find_best().checkpoint
    assert best is not None
    assert best.folder.step == 10
