"""The checkpoints of a run, from its start to its end."""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from moejob_api.job.storage import Checkpoint
from moejob_api.quantities import GIB
from moejob_trainer.checkpoints import CheckpointStore, FenceToken, SavedCheckpoint, SingleRank, StepFolder
from moejob_trainer.checkpoints.cleaning import Retention, apply_retention
from moejob_trainer.checkpoints.manifest import EvaluationFacts, build_marker
from moejob_trainer.errors import BadConfiguration, Superseded, TransientFailure
from moejob_trainer.runtime.disk import Disk
from moejob_trainer.runtime.fencing import Fence
from trainer.checkpoints.stand_ins import (
    FragileDisk,
    InlineExecutor,
    StandInWriting,
    StateWriter,
    ThreadCoordinator,
    ThreadCoordinators,
    files_below,
    flip_bit,
    make_policy,
    make_run_folder,
    make_save_request,
    make_state_files,
    open_store,
    save_steps,
)

IN_BACKGROUND = make_policy(asynchronous=True)


def there(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_run_begins_from_its_model_and_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    first = open_store(make_run_folder(tmp_path))
    assert (first.start(), first.last_step) == (None, None)
    first.save(make_save_request(10))
    assert first.last_step == 10
    second = open_store(make_run_folder(tmp_path, attempt=1))
    found = second.start()
    assert found is not None
    assert (found.folder, second.last_step) == (StepFolder(10, FenceToken(0, 0)), 10)


def test_a_checkpoint_holds_what_was_written_and_says_what_it_is(tmp_path: Path) -> None:
    run = open_store(make_run_folder(tmp_path, attempt=3, restart=1))
    run.start()
    run.save(make_save_request(10))
    found = open_store(make_run_folder(tmp_path, attempt=4)).start()
    assert found is not None
    facts = found.manifest.facts
    assert (facts.step, facts.attempt, facts.restart, facts.job_uid) == (10, 3, 1, "uid-1")
    assert (facts.layout, facts.versions, facts.data) == ({"tensor": 2}, {"torch": "2.13.0"}, {"samples": 80})
    lies = {name: content for name, content in files_below(found.path).items() if not name.endswith(".json")}
    assert lies == make_state_files(StepFolder(10, FenceToken(3, 1)))
    assert {entry.name: entry.size_bytes for entry in found.manifest.files} == {k: len(v) for k, v in lies.items()}


def test_only_as_many_are_kept_as_were_asked_for(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30, 40, keep=2)
    assert there(tmp_path) == ["step-30.0.0", "step-40.0.0"]


def test_the_best_are_kept_beside_the_newest_until_there_are_better_ones(tmp_path: Path) -> None:
    how = Checkpoint(keep=1, keep_best=2, asynchronous=False)
    run = CheckpointStore(
        make_run_folder(tmp_path),
        how,
        SingleRank(),
        StateWriter(FragileDisk()),
        background=InlineExecutor(),
        measure="evalLoss",
    )
    run.start()
    kept = {}
    for step, value in ((10, 3.0), (20, 2.0), (30, 4.0), (40, None), (50, 1.0)):
        evaluation = None if value is None else EvaluationFacts(measure="evalLoss", value=value)
        run.save(replace(make_save_request(step), evaluation=evaluation))
        kept[step] = there(tmp_path)
    assert kept[40] == ["step-10.0.0", "step-20.0.0", "step-40.0.0"]
    assert kept[50] == ["step-20.0.0", "step-50.0.0"]
    found = run.find_best().checkpoint
    assert found is not None
    assert found.folder.step == 50


def test_a_damaged_best_checkpoint_gives_way_to_the_next(tmp_path: Path) -> None:
    how = Checkpoint(keep=1, keep_best=2, asynchronous=False)
    run = CheckpointStore(
        make_run_folder(tmp_path),
        how,
        SingleRank(),
        StateWriter(FragileDisk()),
        background=InlineExecutor(),
        measure="evalLoss",
    )
    run.start()
    for step, value in ((10, 1.0), (20, 2.0), (30, 3.0)):
        run.save(replace(make_save_request(step), evaluation=EvaluationFacts(measure="evalLoss", value=value)))
    flip_bit(tmp_path / "checkpoints/step-10.0.0/__0_0.distcp")
    search = run.find_best()
    assert search.checkpoint is not None
    assert (search.checkpoint.folder.step, [one.folder.step for one in search.refusals]) == (20, [10])


def test_what_an_earlier_attempt_left_unfinished_goes_at_the_start(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    for name in ("step-20.0.0", "step-20.1.0", "step-20.2.0"):
        (tmp_path / "checkpoints" / name).mkdir()
    open_store(make_run_folder(tmp_path, attempt=1)).start()
    assert there(tmp_path) == ["step-10.0.0", "step-20.1.0", "step-20.2.0"]


def test_a_damaged_checkpoint_is_set_aside_until_its_step_is_saved_again(tmp_path: Path) -> None:
    *_, newest = save_steps(tmp_path, 10, 20, 30)
    flip_bit(newest / "__0_0.distcp")
    run = open_store(make_run_folder(tmp_path, attempt=1), make_policy(keep=3))
    found = run.start()
    assert found is not None
    assert found.folder.step == 20
    assert (newest / "rejected.json").exists()
    run.save(make_save_request(25))
    assert there(tmp_path) == ["step-10.0.0", "step-20.0.0", "step-25.1.0", "step-30.0.0"]
    run.save(make_save_request(30))
    assert there(tmp_path) == ["step-20.0.0", "step-25.1.0", "step-30.1.0"]


def test_a_run_of_which_nothing_good_is_left_is_not_begun_anew_in_silence(tmp_path: Path) -> None:
    for path in save_steps(tmp_path, 10, 20):
        flip_bit(path / "__0_0.distcp")
    before = files_below(tmp_path)
    for attempt in (1, 2):
        with pytest.raises(
            BadConfiguration, match=r"has checkpoints and none is good: step-20.0.0.*step-10.0.0.*begin"
        ):
            open_store(make_run_folder(tmp_path, attempt)).start()
    assert files_below(tmp_path) == before


def test_two_jobs_never_share_a_folder(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    before = files_below(tmp_path)
    with pytest.raises(BadConfiguration, match="belongs to job sft"):
        open_store(make_run_folder(tmp_path, attempt=1, uid="uid-2")).start()
    assert files_below(tmp_path) == before


def test_what_a_failed_save_of_ours_left_is_no_part_of_the_next(tmp_path: Path) -> None:
    run = open_store(make_run_folder(tmp_path))
    run.start()
    (tmp_path / "checkpoints/step-10.0.0").mkdir()
    (tmp_path / "checkpoints/step-10.0.0/__7_0.distcp").write_bytes(b"of another layout")
    run.save(make_save_request(10))
    assert "__7_0.distcp" not in files_below(tmp_path / "checkpoints/step-10.0.0")


# --- in the background ---


def test_a_background_save_counts_once_it_is_written(tmp_path: Path) -> None:
    disk = FragileDisk()
    run = open_store(make_run_folder(tmp_path), IN_BACKGROUND, disk, StateWriter(disk, questions=2))
    run.start()
    assert run.save(make_save_request(10)) is None
    assert [run.poll(), run.poll(), run.last_step] == [None, None, None]
    outcome = run.poll()
    assert outcome is not None
    assert (outcome.folder.step, run.last_step, run.poll()) == (10, 10, None)


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    disk = FragileDisk()
    run = open_store(make_run_folder(tmp_path), IN_BACKGROUND, disk, StateWriter(disk, questions=2))
    run.start()
    run.save(make_save_request(10))
    run.save(make_save_request(20))
    assert run.last_step == 10
    assert there(tmp_path) == ["step-10.0.0", "step-20.0.0"]


def test_the_end_waits_for_the_save_under_way(tmp_path: Path) -> None:
    disk = FragileDisk()
    run = open_store(make_run_folder(tmp_path), IN_BACKGROUND, disk, StateWriter(disk, questions=2))
    run.start()
    run.save(make_save_request(10))
    outcome = run.wait()
    assert outcome is not None
    assert (outcome.folder.step, run.wait()) == (10, None)


def test_what_is_saved_is_not_saved_twice(tmp_path: Path) -> None:
    run = open_store(make_run_folder(tmp_path))
    run.start()
    run.save(make_save_request(10))
    before = files_below(tmp_path)
    assert run.save(make_save_request(10)) is None
    assert files_below(tmp_path) == before


@dataclass
class Clock:
    """A clock that the test moves."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Slow(StateWriter):
    """A writer that holds training for 2 s, lets an update wait for 3, and writes for 5 s more a question."""

    clock: Clock = field(default_factory=Clock)

    def start_writing(self, folder: Path) -> StandInWriting:
        self.clock.now += 2
        return replace(super().start_writing(folder), waited_seconds=3.0)


def test_a_save_says_how_long_it_took_and_how_long_training_stood_still(tmp_path: Path) -> None:
    clock, disk = Clock(), FragileDisk()
    writer = Slow(disk, questions=1, clock=clock)
    run = CheckpointStore(make_run_folder(tmp_path), IN_BACKGROUND, SingleRank(), writer, disk, clock, InlineExecutor())
    run.start()
    run.save(make_save_request(10))
    clock.now += 5
    assert run.poll() is None
    clock.now += 5
    size_bytes = sum(len(content) for content in make_state_files(StepFolder(10, FenceToken(0, 0))).values())
    expected = SavedCheckpoint(StepFolder(10, FenceToken(0, 0)), size_bytes, seconds=12.0, stalled_seconds=5.0)
    assert [run.poll(), run.last_saved] == [expected, expected]


def test_a_save_is_due_by_the_clock_of_rank_0_on_every_rank(tmp_path: Path) -> None:
    def act(rank: ThreadCoordinator) -> list[bool]:
        clock, disk = Clock(), FragileDisk()
        how = Checkpoint(every_minutes=1)
        run = CheckpointStore(make_run_folder(tmp_path), how, rank, StateWriter(disk), disk, clock, InlineExecutor())
        run.start()
        clock.now += 59 if rank.rank == 0 else 61
        early = run.needs_save(10)
        clock.now += 2
        return [early, run.needs_save(10)]

    assert ThreadCoordinators(2).run_on_ranks(act) == [[False, True]] * 2


def test_saves_every_so_many_steps_go_on_after_a_save(tmp_path: Path) -> None:
    run = open_store(make_run_folder(tmp_path), Checkpoint(every_steps=10, asynchronous=False))
    run.start()
    due = []
    for step in range(1, 31):
        if run.needs_save(step):
            due.append(step)
            run.save(make_save_request(step))
        assert not due or not run.needs_save(due[-1])
    assert due == [10, 20, 30]


# --- many ranks ---


def test_many_ranks_write_hash_and_resume_as_one(tmp_path: Path) -> None:
    def act(rank: ThreadCoordinator) -> tuple[object, ...]:
        disk = FragileDisk()
        run = CheckpointStore(make_run_folder(tmp_path), make_policy(), rank, StateWriter(disk, rank.rank), disk)
        began = run.start()
        outcome = run.save(make_save_request(10))
        # Each rank on its own volume object: what one of them did not sync is not synced.
        return began, outcome and outcome.folder, run.last_step, disk.unsynced_files

    assert ThreadCoordinators(3).run_on_ranks(act)[1:] == [(None, StepFolder(10, FenceToken(0, 0)), 10, set())] * 2
    found = open_store(make_run_folder(tmp_path, attempt=1)).start()
    assert found is not None
    written = [name for rank in range(3) for name in make_state_files(found.folder, rank)]
    assert [entry.name for entry in found.manifest.files] == sorted(written)


@dataclass
class Failing(StateWriter):
    """A writer whose rank 1 fails, when it is asked for the first time."""

    error: Exception = field(default_factory=Exception)

    def start_writing(self, folder: Path) -> StandInWriting:
        return Broken([], error=self.error) if self.rank == 1 else super().start_writing(folder)


@dataclass
class Broken(StandInWriting):
    """A part of a save that fails."""

    error: Exception = field(default_factory=Exception)

    def is_finished(self) -> bool:
        raise self.error


def test_a_rank_that_cannot_write_fails_the_save_on_every_rank_and_nothing_is_committed(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    full = OSError(errno.ENOSPC, "No space left on device", "__1_0.distcp")

    def act(rank: ThreadCoordinator) -> None:
        disk = FragileDisk()
        writer = Failing(disk, rank.rank, error=full)
        run = CheckpointStore(
            make_run_folder(tmp_path, attempt=1), make_policy(), rank, writer, disk, background=InlineExecutor()
        )
        run.start()
        run.save(make_save_request(20))

    outcomes = ThreadCoordinators(2).run_on_ranks(act)
    assert [type(outcome) for outcome in outcomes] == [BadConfiguration] * 2
    assert {str(outcome) for outcome in outcomes} == {str(outcomes[0])}
    assert str(outcomes[0]) == (
        "rank 1: saving failed at __1_0.distcp: No space left on device; the volume is full; "
        "free space on it, or make it larger; a lower checkpoint.keep leaves more"
    )
    found = open_store(make_run_folder(tmp_path, attempt=2)).start()
    assert found is not None
    assert found.folder.step == 10


# --- volumes that refuse ---


@dataclass
class Refusing(FragileDisk):
    """A volume that refuses to be written to."""

    number: int = 0

    def write(self, path: Path, content: bytes) -> None:
        if self.number:
            raise OSError(self.number, "refused", str(path))
        super().write(path, content)


@pytest.mark.parametrize(
    ("number", "kind", "fix"),
    [
        pytest.param(errno.ENOSPC, BadConfiguration, "make it larger", id="full"),
        pytest.param(errno.EDQUOT, BadConfiguration, "make it larger", id="over quota"),
        pytest.param(errno.EROFS, TransientFailure, "mount it for writing", id="read-only"),
        pytest.param(errno.EACCES, BadConfiguration, "writable for the user", id="forbidden"),
        pytest.param(errno.EIO, TransientFailure, "resumes from the last complete checkpoint", id="input/output error"),
        pytest.param(errno.ESTALE, TransientFailure, "resumes from the last complete checkpoint", id="server away"),
    ],
)
@pytest.mark.parametrize("part", ["the state", "the manifest"])
def test_a_volume_that_refuses_is_named_with_the_fix_and_nothing_is_lost(
    tmp_path: Path, number: int, kind: type[Exception], fix: str, part: str
) -> None:
    save_steps(tmp_path, 10)
    disk, fine = Refusing(), FragileDisk()
    run = open_store(
        make_run_folder(tmp_path, attempt=1), make_policy(), disk, StateWriter(disk if part == "the state" else fine)
    )
    run.start()
    disk.number = number
    with pytest.raises(kind, match=rf"(saving|committing a checkpoint) failed at .*step-20.1.0.*: refused; .*{fix}"):
        run.save(make_save_request(20))
    assert run.wait() is None
    assert run.last_step == 10
    assert there(tmp_path) == ["step-10.0.0", "step-20.1.0"]
    assert open_store(make_run_folder(tmp_path, attempt=2)).start() is not None


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "sft").write_text("a file")
    with pytest.raises(BadConfiguration, match=r"opening the run folder failed at .*sft.*move away what is"):
        open_store(make_run_folder(tmp_path / "sft")).start()


@pytest.mark.parametrize("link", ["sft", "sft/checkpoints"])
def test_nothing_is_written_through_a_link_where_a_folder_is_needed(tmp_path: Path, link: str) -> None:
    run, elsewhere = open_store(make_run_folder(tmp_path / "sft")), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(elsewhere)
    with pytest.raises(BadConfiguration, match=r"a file or a link is there; .*move away what is in its place"):
        run.start()
    assert list(elsewhere.iterdir()) == []


def test_a_link_in_the_place_of_a_checkpoint_is_removed_and_not_followed(tmp_path: Path) -> None:
    run, precious = open_store(make_run_folder(tmp_path / "sft")), tmp_path / "elsewhere/precious"
    run.start()
    precious.parent.mkdir()
    precious.write_text("precious")
    (tmp_path / "sft/checkpoints/step-10.0.0").symlink_to(precious.parent)
    run.save(make_save_request(10))
    assert list(precious.parent.iterdir()) == [precious]
    assert there(tmp_path / "sft") == ["step-10.0.0"]


def test_others_on_the_machine_see_no_checkpoints_and_reach_an_export(tmp_path: Path) -> None:
    Fence(tmp_path / "sft", b"key").acquire(0, 0)
    open_store(make_run_folder(tmp_path / "sft")).start()
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("sft", "sft/claims", "sft/checkpoints")}
    assert modes == {"sft": 0o755, "sft/claims": 0o700, "sft/checkpoints": 0o750}


@dataclass
class Device(StateWriter):
    """A writer that runs into the kernel's own full disk."""

    def start_writing(self, folder: Path) -> StandInWriting:
        (folder / "__0_0.distcp").symlink_to("/dev/full")
        return super().start_writing(folder)


def test_a_disk_that_is_really_full_is_named(tmp_path: Path) -> None:
    run = open_store(make_run_folder(tmp_path), make_policy(), Disk(), Device(Disk()))
    run.start()
    with pytest.raises(BadConfiguration, match="No space left on device; the volume is full"):
        run.save(make_save_request(10))


@dataclass
class Small(FragileDisk):
    """A volume with so much room."""

    free: int = 0

    def free_bytes(self, path: Path) -> int:
        assert path.exists()
        return self.free


def test_a_checkpoint_that_would_not_fit_is_not_begun(tmp_path: Path) -> None:
    run = open_store(make_run_folder(tmp_path), make_policy(), Small(free=3 * GIB))
    run.start()
    with pytest.raises(BadConfiguration, match=r"takes 5.0 GiB and .* has 3.0 GiB left; free 2.0 GiB on the volume"):
        run.save(make_save_request(10), expected_bytes=5 * GIB)
    assert there(tmp_path) == []


def test_a_run_that_could_not_save_once_is_refused_before_its_first_step(tmp_path: Path) -> None:
    run = open_store(make_run_folder(tmp_path), make_policy(), Small(free=3 * GIB))
    run.start()
    run.require_room(2 * GIB, GIB)
    with pytest.raises(BadConfiguration, match=r"takes 2.0 GiB and the export 2.0 GiB, and .* has 3.0 GiB left"):
        run.require_room(2 * GIB, 2 * GIB)
    assert there(tmp_path) == []


def test_a_measured_checkpoint_counts_more_than_the_estimate(tmp_path: Path) -> None:
    disk = Small(free=GIB)
    run = open_store(make_run_folder(tmp_path), make_policy(), disk)
    run.start()
    run.save(make_save_request(10), expected_bytes=GIB)
    assert run.save(make_save_request(20), expected_bytes=5 * GIB) is not None
    disk.free = 10
    with pytest.raises(BadConfiguration, match=r"has 0\.0 MiB left; free"):
        run.save(make_save_request(30))


@dataclass
class Clinging(FragileDisk):
    """A volume on which one folder cannot be removed."""

    name: str = ""

    def remove_folder(self, path: Path) -> None:
        if path.name == self.name and path.exists():
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        super().remove_folder(path)


def test_a_folder_that_cannot_be_removed_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_store(make_run_folder(tmp_path), make_policy(keep=1), Clinging(name="step-10.0.0"))
    run.start()
    for step in (10, 20, 30):
        run.save(make_save_request(step))
    assert there(tmp_path) == ["step-10.0.0", "step-30.0.0"]
    assert {record.getMessage() for record in caplog.records} == {"checkpoint not deleted"}


# --- older attempts ---


def test_an_older_attempt_that_wakes_up_commits_and_deletes_nothing(tmp_path: Path) -> None:
    owners = {"attempt": 0}
    disk = FragileDisk()
    old = open_store(
        make_run_folder(tmp_path, 0, is_ours=lambda: owners["attempt"] == 0), IN_BACKGROUND, disk, StateWriter(disk)
    )
    old.start()
    old.save(make_save_request(10))
    old.wait()
    old.save(make_save_request(20))
    owners["attempt"] = 1
    new = open_store(make_run_folder(tmp_path, 1, is_ours=lambda: owners["attempt"] == 1), make_policy(keep=1))
    new.start()
    new.save(make_save_request(15))
    before = files_below(tmp_path)
    with pytest.raises(Superseded, match="attempt 0, restart 0"):
        old.wait()
    with pytest.raises(Superseded):
        old.save(make_save_request(30))
    with pytest.raises(Superseded):
        open_store(old.run_folder).start()
    left = {name: content for name, content in files_below(tmp_path).items() if "step-20.0.0" not in name}
    assert left == before
    assert new.save(make_save_request(20)) is not None


def test_a_checkpoint_of_which_files_are_missing_takes_no_place_among_those_that_are_kept(tmp_path: Path) -> None:
    _, middle, _ = save_steps(tmp_path, 10, 20, 30)
    (middle / "__0_0.distcp").unlink()
    open_store(make_run_folder(tmp_path, attempt=1), make_policy(keep=2)).start()
    assert there(tmp_path) == ["step-10.0.0", "step-30.0.0"]


def test_a_checkpoint_of_another_version_is_neither_an_obstacle_nor_deleted_early(tmp_path: Path) -> None:
    _, older, _ = save_steps(tmp_path, 10, 20, 30)
    content = (older / "manifest.json").read_bytes().replace(b'"format": 1', b'"format": 2')
    (older / "manifest.json").write_bytes(content)
    (older / "complete.json").write_bytes(build_marker(content).to_json())
    run = open_store(make_run_folder(tmp_path, attempt=1), make_policy(keep=2))
    run.start()
    assert there(tmp_path) == ["step-20.0.0", "step-30.0.0"]
    run.save(make_save_request(40))
    assert there(tmp_path) == ["step-30.0.0", "step-40.1.0"]


@pytest.mark.parametrize(("looks", "left"), [(0, 3), (1, 2), (2, 1)])
def test_old_checkpoints_are_deleted_only_while_the_run_is_ours(tmp_path: Path, looks: int, left: int) -> None:
    save_steps(tmp_path, 10, 20, 30)
    answers = [True] * looks + [False]
    apply_retention(
        make_run_folder(tmp_path, is_ours=lambda: answers.pop(0)), Retention(make_policy(keep=1)), FragileDisk()
    )
    assert len(there(tmp_path)) == left


def test_the_volume_that_vanished_is_something_to_try_again(tmp_path: Path) -> None:
    run = open_store(make_run_folder(tmp_path / "sft"))
    run.start()
    shutil.rmtree(tmp_path / "sft")
    with pytest.raises(TransientFailure, match="making room for a checkpoint failed"):
        run.save(make_save_request(10))


@dataclass
class NotingDisk(FragileDisk):
    """Notes which files could still be lost when a marker got its name."""

    at_marker: list[set[Path]] = field(default_factory=list)

    def rename(self, source: Path, target: Path) -> None:
        if target.name == "complete.json":
            self.at_marker.append(set(self.unsynced_files))
        super().rename(source, target)


def test_the_lines_of_all_steps_are_durable_before_a_marker_says_that_they_are_done(tmp_path: Path) -> None:
    disk, log = NotingDisk(), tmp_path / "run/steps.jsonl"
    run = open_store(make_run_folder(tmp_path / "run"), disk=disk)
    run.start()
    disk.write(log, b'{"step": 10}\n')
    run.save(make_save_request(10))
    assert disk.at_marker == [set()]
