"""The owner of a run folder, and the folder that resumeFrom names."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from moejob_trainer.checkpoints import RunOwner, SingleRank, acquire_run_folder
from moejob_trainer.checkpoints.run import find_resume_checkpoint, resume_folder
from moejob_trainer.errors import BadConfiguration
from trainer.checkpoints.stand_ins import (
    FragileDisk,
    ThreadCoordinators,
    flip_bit,
    make_policy,
    make_run_folder,
    make_save_request,
    open_store,
    save_steps,
)

OURS = RunOwner(job="sft", uid="uid-1")
OTHER = RunOwner(job="sft", uid="uid-2")


def test_a_new_folder_becomes_the_first_jobs(tmp_path: Path) -> None:
    acquire_run_folder(tmp_path / "sft", OURS)
    acquire_run_folder(tmp_path / "sft", OURS)
    assert [path.name for path in (tmp_path / "sft").iterdir()] == ["run.json"]


def test_another_job_is_refused_with_the_fix(tmp_path: Path) -> None:
    acquire_run_folder(tmp_path / "sft", OURS)
    with pytest.raises(
        BadConfiguration, match=r"belongs to job sft \(uid uid-1\), not to job sft \(uid uid-2\).*resumeF"
    ):
        acquire_run_folder(tmp_path / "sft", OTHER)


class Hasty(FragileDisk):
    """Another job takes the folder between our look and our claim."""

    def link(self, source: Path, target: Path) -> None:
        acquire_run_folder(target.parent, OTHER)
        super().link(source, target)


def test_of_two_jobs_that_start_together_one_gets_the_folder(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="belongs to job sft"):
        acquire_run_folder(tmp_path / "sft", OURS, Hasty())
    acquire_run_folder(tmp_path / "sft", OTHER)


class WithoutLinks(FragileDisk):
    """A file system that has no hard links."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported", str(source), None, str(target))


def test_a_volume_without_hard_links_is_taken_as_well(tmp_path: Path) -> None:
    acquire_run_folder(tmp_path / "sft", OURS, WithoutLinks())
    with pytest.raises(BadConfiguration):
        acquire_run_folder(tmp_path / "sft", OTHER)


def test_a_folder_that_does_not_say_whose_it_is_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(BadConfiguration, match="does not say whose run this is"):
        acquire_run_folder(tmp_path, OURS)


@pytest.mark.parametrize(
    ("resume_from", "named"),
    [
        ("sft", "/moejob/sft"),
        ("sft/checkpoints/step-5.0.0", "/moejob/sft/checkpoints/step-5.0.0"),
        ("pvc://training/math/sft", "/claims/training/math/sft"),
        ("/runs/sft", "/runs/sft"),
    ],
)
def test_resume_from_names_a_folder(resume_from: str, named: str) -> None:
    assert resume_folder(resume_from, Path("/moejob/grpo")) == Path(named)


@pytest.mark.parametrize("resume_from", ["grpo", "/moejob/grpo", "grpo/checkpoints"])
def test_a_job_does_not_resume_from_itself(resume_from: str) -> None:
    with pytest.raises(BadConfiguration, match="is this job itself"):
        resume_folder(resume_from, Path("/moejob/grpo"))


@pytest.mark.parametrize(
    ("named", "step"), [(".", 20), ("checkpoints", 20), ("checkpoints/step-10.0.0", 10)], ids=["run", "all", "one"]
)
def test_a_run_its_checkpoints_or_one_of_them_can_be_resumed_from(tmp_path: Path, named: str, step: int) -> None:
    save_steps(tmp_path, 10, 20)
    assert find_resume_checkpoint("sft", tmp_path / named, SingleRank()).folder.step == step


def test_a_damaged_one_is_fallen_back_from_and_left_as_it_is(tmp_path: Path) -> None:
    _, newest = save_steps(tmp_path / "sft", 10, 20)
    flip_bit(newest / "__0_0.distcp")
    run = open_store(make_run_folder(tmp_path / "grpo", uid="uid-2"), make_policy(resume_from="sft"))
    found = run.start()
    assert found is not None
    assert found.folder.step == 10
    assert (newest / "complete.json").exists()


def test_a_checkpoint_of_megatron_is_not_resumed_but_named_as_the_model(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(BadConfiguration, match=r"name it as spec\.model\.source"):
        find_resume_checkpoint("pvc://claim/megatron", tmp_path, SingleRank())


@pytest.mark.parametrize(
    ("resume_from", "reason"),
    [
        pytest.param("stf", "nothing was ever completed there", id="no such folder"),
        pytest.param("sft/checkpoints/step-30.0.0", r"step-30.0.0: \w+.json cannot be read", id="no such step"),
        pytest.param("sft", "step-20.0.0: __0_0.distcp has hash", id="all damaged"),
        pytest.param("sft/checkpoints/step-20.0.0", "step-20.0.0: __0_0.distcp has hash", id="this one damaged"),
    ],
)
def test_nothing_good_to_resume_from_is_said_in_words(tmp_path: Path, resume_from: str, reason: str) -> None:
    (newest,) = save_steps(tmp_path / "sft", 20)
    flip_bit(newest / "__0_0.distcp")
    with pytest.raises(BadConfiguration, match=f"checkpoint.resumeFrom {resume_from} names .*{reason}"):
        find_resume_checkpoint(resume_from, resume_folder(resume_from, tmp_path / "grpo"), SingleRank())


def test_every_rank_resumes_from_the_same(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    found = ThreadCoordinators(2).run_on_ranks(lambda rank: find_resume_checkpoint("sft", tmp_path, rank))
    assert found == [find_resume_checkpoint("sft", tmp_path, SingleRank())] * 2


def test_own_checkpoints_win_over_resume_from(tmp_path: Path) -> None:
    save_steps(tmp_path / "sft", 900)
    how = make_policy(resume_from="sft")
    first = open_store(make_run_folder(tmp_path / "grpo", uid="uid-2"), how)
    began = first.start()
    first.save(make_save_request(1))
    shutil.rmtree(tmp_path / "sft")
    again = open_store(make_run_folder(tmp_path / "grpo", attempt=1, uid="uid-2"), how).start()
    assert [one.folder.step for one in (began, again) if one is not None] == [900, 1]
