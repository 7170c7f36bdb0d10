"""One launcher and its ranks, as real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from moejob_api.contract.pods import PodOutcome, PodProgress
from moejob_trainer.checkpoints import RunOwner, acquire_run_folder
from moejob_trainer.runtime.fencing import Fence
from trainer.launcher.launchers import TESTS, Gang, await_ends, await_result, is_alive

Make = Callable[..., Gang]


def test_ranks_that_end_well_end_the_launcher_with_0(gang: Make) -> None:
    job = gang(logs=True)
    launcher = job.start("finish")
    assert launcher.exit_code() == 0, launcher.log.read_text()
    assert launcher.read_last_word().outcome is PodOutcome.COMPLETED
    assert "[rank 1] hello from 1" in launcher.log.read_text()
    assert (job.run_folder / "logs" / "rank-0.log").read_text() == "hello from 0\n"


def test_a_dead_rank_takes_the_others_down_and_all_start_again_under_the_same_launcher(gang: Make) -> None:
    job = gang(ranks=3)
    launcher = job.start("finish_when_restarted")
    first = job.rank_pids()
    launcher_pid, victim = launcher.pid, first[1]
    os.kill(victim, signal.SIGKILL)
    await_ends(first)
    second = job.await_start_notes(restart=1)
    assert set(first).isdisjoint(note["pid"] for note in second.values())
    assert launcher.exit_code() == 0
    assert launcher.pid == launcher_pid
    assert "rank 1 was killed by signal 9" in launcher.log.read_text()


def test_restarts_in_place_are_counted(gang: Make) -> None:
    job = gang()
    launcher = job.start("work")
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    again = job.rank_pids(restart=1)
    seen = launcher.await_progress(lambda seen: seen.ready)
    assert seen.restarts == 1
    assert [beat.pid for beat in seen.ranks] == again


def test_bad_configuration_passes_at_once_with_the_line_that_says_why(gang: Make) -> None:
    job = gang()
    launcher = job.start("refuse")
    assert launcher.exit_code() == 78
    word = launcher.read_last_word()
    assert (word.outcome, word.rank, word.exit_code) == (PodOutcome.BAD_CONFIGURATION, 1, 78)
    assert word.message == "data.train[0]: no such file"
    await_ends(job.rank_pids())


def test_a_module_that_is_not_installed_is_named_and_ends_the_job_at_once(gang: Make) -> None:
    launcher = gang().start("begin")
    assert launcher.exit_code() == 78
    word = launcher.read_last_word()
    assert word.outcome is PodOutcome.BAD_CONFIGURATION
    assert "has no module a_requirement_that_is_not_installed, which trainer.launcher.incomplete" in word.message
    assert launcher.log.read_text().count("ranks started") == 1


def test_ranks_that_fail_for_the_third_time_without_a_checkpoint_end_the_launcher(gang: Make) -> None:
    launcher = gang().start("fail")
    assert launcher.exit_code() == 1
    word = launcher.read_last_word()
    assert (word.outcome, word.rank, word.exit_code) == (PodOutcome.RANK_FAILED, 1, 1)
    assert word.message.endswith("ValueError: loss is not finite")
    assert launcher.log.read_text().count("ranks started") == 3


def test_a_new_checkpoint_forgives_restarts_in_place(gang: Make) -> None:
    job = gang()
    launcher = job.start("fail_after_a_checkpoint")
    for restart in range(4):
        job.await_start_notes(restart)
        launcher.await_progress(partial(has_saved, restart), f"checkpoint {restart}")
        job.allow(f"go-{restart}")
    job.await_start_notes(restart=4)
    assert launcher.process.is_alive()


def test_a_request_to_stop_waits_for_the_save_and_passes_143(gang: Make) -> None:
    job = gang(grace=60)
    launcher = job.start("save_slowly")
    listening(job)
    launcher.signal(signal.SIGTERM)
    await_result((job.run_folder / "stop-all").exists, "the stop")
    assert all(is_alive(pid) for pid in job.rank_pids())
    job.allow("saved")
    assert launcher.exit_code() == 143
    assert (launcher.read_last_word().outcome, launcher.read_last_word().step) == (PodOutcome.PREEMPTED, 7)


def test_a_save_that_outlasts_the_grace_period_is_cut_off_and_said_to_be_lost(gang: Make) -> None:
    job = gang(grace=2)
    launcher = job.start("save_slowly")
    listening(job)
    launcher.signal(signal.SIGTERM)
    assert launcher.exit_code() == 1
    assert launcher.read_last_word().message == "ranks 0, 1 had not saved when the pod had 2 s"
    await_ends(job.rank_pids())


def test_a_second_request_to_stop_ends_at_once(gang: Make) -> None:
    job = gang(grace=600)
    launcher = job.start("save_slowly")
    listening(job)
    launcher.signal(signal.SIGTERM)
    await_result((job.run_folder / "stop-all").exists, "the first stop")
    launcher.signal(signal.SIGINT)
    assert launcher.exit_code() == 1
    assert "asked to stop again" in launcher.read_last_word().message
    await_ends(job.rank_pids())


def test_a_pod_whose_ranks_have_nothing_to_save_yet_stops_as_asked(gang: Make) -> None:
    job = gang()
    launcher = job.start("beat_when_told")
    await_result(lambda: "ranks started" in launcher.log.read_text(), "the start")
    launcher.signal(signal.SIGTERM)
    assert launcher.exit_code() == 143


def test_a_pod_that_waits_for_others_stops_as_asked(gang: Make) -> None:
    launcher = gang(nodes=2).start("work")
    await_result(lambda: "arrived" in launcher.log.read_text(), "the arrival")
    launcher.signal(signal.SIGTERM)
    assert launcher.exit_code() == 143
    assert launcher.read_last_word().outcome is PodOutcome.PREEMPTED


def test_a_silent_rank_is_restarted_and_named(gang: Make) -> None:
    job = gang(progress_deadline=15)
    launcher = job.start("fall_silent")
    job.await_start_notes(restart=1)
    assert "rank 1 silent for 15 s" in launcher.log.read_text()


def test_a_rank_that_hangs_before_the_first_step_is_named_and_not_the_one_that_waits_for_it(gang: Make) -> None:
    launcher = gang(progress_deadline=15, preload=("torch",)).start("hang_before_the_first_step")
    assert launcher.exit_code() == 0, launcher.log.read_text()
    assert "rank 1 silent for 15 s" in launcher.log.read_text()
    assert launcher.log.read_text().count("ranks started") == 2


@pytest.mark.thorough
def test_a_rank_that_loads_for_longer_than_the_deadline_is_left_alone(gang: Make) -> None:
    launcher = gang(progress_deadline=15, preload=("torch",)).start("load_for_longer_than_the_deadline")
    assert launcher.exit_code() == 0, launcher.log.read_text()
    assert launcher.log.read_text().count("ranks started") == 1


def test_ranks_that_fall_silent_again_and_again_end_the_launcher_as_hung(gang: Make) -> None:
    launcher = gang(progress_deadline=1).start("work")
    assert launcher.exit_code() == 1
    assert launcher.read_last_word().outcome is PodOutcome.HUNG
    assert launcher.read_last_word().message.endswith("silent for 1 s")


def test_a_rank_that_is_done_is_not_silent(gang: Make) -> None:
    job = gang(progress_deadline=10)
    launcher = job.start("work_on_alone")
    done = job.rank_pids()[1]
    await_ends([done])
    launcher.await_progress(lambda seen: len(seen.ranks) == 1, "the end of rank 1")
    # Well over the deadline, by the clock that silence is measured with.
    until = time.monotonic() + 12
    await_result(lambda: time.monotonic() > until)
    job.allow("go-0")
    assert launcher.exit_code() == 0
    assert launcher.log.read_text().count("ranks started") == 1


def test_a_fork_server_that_dies_is_replaced_with_its_ranks(gang: Make) -> None:
    job = gang()
    launcher = job.start("work")
    notes = job.await_start_notes()
    os.kill(notes[0]["parent"], signal.SIGKILL)
    again = job.await_start_notes(restart=1)
    await_ends([note["pid"] for note in notes.values()])
    assert again[0]["parent"] != notes[0]["parent"]
    heard = launcher.await_progress(lambda seen: seen.ready)
    assert heard.fault is not None
    assert (heard.restarts, heard.fault.message) == (1, f"rank {heard.fault.rank} was killed by signal 9")


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        pytest.param(signal.SIGKILL, "was killed by signal 9 meanwhile", id="killed"),
        pytest.param(signal.SIGTERM, "was killed by signal 15 meanwhile", id="terminated"),
        pytest.param(signal.SIGSTOP, "neither computed nor read anything for 2 s", id="stopped"),
    ],
)
def test_a_fork_server_that_is_lost_while_it_imports_is_started_again(
    gang: Make, number: signal.Signals, problem: str
) -> None:
    job = gang(preload=("trainer.launcher.lost_imports",), idle_import_seconds=2.0)
    ends_imports(job, number, times=2)
    launcher = job.start("finish")
    assert launcher.exit_code() == 0, launcher.log.read_text()
    assert launcher.log.read_text().count(problem) == 2


def test_a_fork_server_that_is_lost_each_time_ends_the_launcher_with_the_reason(gang: Make) -> None:
    job = gang(preload=("trainer.launcher.lost_imports",))
    ends_imports(job, signal.SIGKILL, times=3)
    launcher = job.start("finish")
    assert launcher.exit_code() == 1
    word = launcher.read_last_word()
    assert word.outcome is PodOutcome.RANK_FAILED
    assert "imports trainer.launcher.lost_imports was killed by signal 9 meanwhile, 3 times in a row" in word.message


def test_a_fork_server_whose_preload_cannot_begin_ends_the_launcher_at_once_with_the_traceback(
    gang: Make, tmp_path: Path
) -> None:
    # Python's fork server passes over an ImportError, and imports nothing: without the reason, 300 s of silence follow.
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "ctypes.py").write_text("raise ImportError('libffi.so.8: cannot open shared object file')\n")
    launcher = gang(python_path=(broken, TESTS)).start("finish")
    assert launcher.exit_code() == 1
    word = launcher.read_last_word()
    assert word.outcome is PodOutcome.RANK_FAILED
    assert "cannot import moejob_trainer.launcher.fork_server" in word.message
    assert f'File "{broken}/ctypes.py", line 1, in <module>' in word.message
    assert word.message.endswith("ImportError: libffi.so.8: cannot open shared object file")


def test_a_fork_server_that_imports_for_longer_than_the_bound_on_idling_is_left_alone(gang: Make) -> None:
    launcher = gang(preload=("trainer.launcher.long_imports",), idle_import_seconds=2.0).start("finish")
    assert launcher.exit_code() == 0, launcher.log.read_text()
    assert "started again" not in launcher.log.read_text()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_fork_server_that_stands_still_starts_no_rank_and_ends_its_launcher(gang: Make) -> None:
    job = gang(progress_deadline=15, idle_import_seconds=2.0)
    launcher = job.start("work")
    server = job.await_start_notes()[0]["parent"]
    os.kill(server, signal.SIGSTOP)
    assert launcher.exit_code() == 1
    assert "the fork server did not start a process" in launcher.read_last_word().message
    await_ends([server, *job.rank_pids()])


def test_a_rank_that_ends_with_what_is_said_of_a_lost_fork_server_has_ended_with_it(gang: Make) -> None:
    job = gang()
    launcher = job.start("end_with_255")
    job.await_start_notes(restart=1)
    assert "rank 0 ended with exit code 255" in launcher.log.read_text()


def test_a_pod_is_ready_once_every_rank_has_beaten(gang: Make) -> None:
    job = gang()
    launcher = job.start("beat_when_told")
    job.allow("beat-0")
    heard = launcher.await_progress(lambda seen: len(seen.ranks) == 2, "both ranks")
    assert not heard.ready
    assert launcher.get("/ready")[0] == 503
    job.allow("beat-1")
    await_result(launcher.is_ready, "readiness")


def test_progress_and_metrics_say_what_ranks_said(gang: Make) -> None:
    job = gang()
    launcher = job.start("say_progress")
    heard = launcher.await_progress(lambda seen: seen.ready and seen.run, "the run")
    assert (heard.attempt, heard.index, heard.restarts) == (1, 0, 0)
    assert [(beat.rank, beat.step) for beat in heard.ranks] == [(0, 12), (1, 12)]
    assert [beat.pid for beat in heard.ranks] == job.rank_pids()
    assert heard.run is not None
    assert (heard.run.step, heard.run.loss, heard.run.last_checkpoint_step) == (12, 2.5, 10)
    lines = launcher.get("/metrics")[1].splitlines()
    assert {"moejob_loss 2.5", "moejob_pod_ready 1", 'moejob_rank_step{rank="1"} 12'} <= set(lines)
    assert launcher.get("/nothing")[0] == 404
    launcher.signal(signal.SIGTERM)
    launcher.exit_code()
    assert launcher.read_last_word().run == heard.run


def test_a_killed_launcher_leaves_no_rank_behind(gang: Make) -> None:
    job = gang()
    launcher = job.start("work")
    pids = [*job.rank_pids(), *(note["parent"] for note in job.await_start_notes().values())]
    launcher.kill()
    await_ends(pids)


def test_what_a_dead_rank_leaves_behind_is_killed_and_buried(gang: Make) -> None:
    job = gang()
    launcher = job.start("leave_strays")
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    job.await_start_notes(restart=1)
    stray = int((job.run_folder / "stray").read_text())
    assert not Path(f"/proc/{stray}").exists()
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert all(is_alive(int(pid)) for pid in children)


def test_ranks_start_with_the_imports_done_and_in_a_session_of_their_own(gang: Make) -> None:
    job = gang(preload=("torch", "no_such_module", "trainer.launcher.broken_module"))
    launcher = job.start("look_around")
    assert launcher.exit_code() == 0, launcher.log.read_text()
    notes = job.await_start_notes().values()
    assert [note["modules"] for note in notes] == [["torch"], ["torch"]]
    assert all(note["session"] == note["pid"] for note in notes)
    # One server has started both, and it is not the launcher.
    assert len({note["parent"] for note in notes} - {launcher.pid}) == 1
    assert "RuntimeError: broken on purpose" in launcher.log.read_text()
    # They look for garbage, and not among what the server has imported.
    assert all(note["collects"] and note["spared"] > 10_000 for note in notes)


@pytest.mark.parametrize(("accelerator", "spins"), [("CPU", "1000"), ("GPU", None)])
def test_threads_of_ranks_on_cpus_soon_give_up_their_cores(gang: Make, accelerator: str, spins: str | None) -> None:
    job = gang(job={"resources": {"accelerator": accelerator}})
    assert job.start("look_around").exit_code() == 0
    assert [note["spins"] for note in job.await_start_notes().values()] == [spins, spins]


def test_ranks_of_a_fork_server_that_has_lost_cuda_import_for_themselves(gang: Make) -> None:
    job = gang(preload=("trainer.launcher.lost_cuda",))
    launcher = job.start("look_around")
    assert launcher.exit_code() == 0, launcher.log.read_text()
    notes = job.await_start_notes().values()
    assert [note["modules"] for note in notes] == [[], []]
    assert all(note["session"] == note["pid"] for note in notes)
    assert "CUDA was used before the fork" in launcher.log.read_text()


def test_ranks_hold_the_run_folder_under_a_new_number_at_every_start(gang: Make) -> None:
    job = gang(attempt=3)
    job.start("hold_the_folder")
    assert {(note["claim"], note["ours"]) for note in job.await_start_notes().values()} == {
        ("attempt 3, restart 0", True)
    }
    os.kill(job.rank_pids()[1], signal.SIGKILL)
    assert {(note["claim"], note["ours"]) for note in job.await_start_notes(restart=1).values()} == {
        ("attempt 3, restart 1", True)
    }


def test_a_claim_that_another_wrote_ends_no_run_and_keeps_none_from_starting(gang: Make) -> None:
    job, foreign = gang(attempt=3), "9999999999.9999999999"
    launcher = job.start("hold_the_folder")
    assert all(note["ours"] for note in job.await_start_notes().values())
    (job.run_folder / "claims" / foreign).touch()
    os.kill(job.rank_pids()[1], signal.SIGKILL)
    assert all(note["ours"] for note in job.await_start_notes(restart=1).values())
    said = f"claims that are not proven to be this job's are ignored folder='{job.run_folder}' claims=['{foreign}']"
    assert said in launcher.log.read_text()


def test_a_run_folder_of_a_newer_attempt_is_left_alone(gang: Make) -> None:
    job = gang(attempt=2)
    assert job.start("finish").exit_code() == 0
    late = job.start("finish", attempt=1)
    assert late.exit_code() == 1
    assert late.read_last_word().outcome is PodOutcome.LOST_PEERS
    assert "belongs to attempt 2, restart 0 now" in late.read_last_word().message


def test_ranks_are_not_started_again_once_an_attempt_with_another_secret_has_the_folder(gang: Make) -> None:
    job = gang(attempt=3)
    launcher = job.start("hold_the_folder")
    assert all(note["ours"] for note in job.await_start_notes().values())
    later = Fence(job.run_folder, b"made again")
    held = later.acquire(4, 0)
    os.kill(job.rank_pids()[1], signal.SIGKILL)
    assert launcher.exit_code() == 1
    assert launcher.read_last_word().outcome is PodOutcome.LOST_PEERS
    assert "not held by attempt 3, restart 0 any more" in launcher.read_last_word().message
    assert later.is_ours(held)


def test_a_run_folder_of_another_job_is_not_even_claimed(gang: Make) -> None:
    job = gang(attempt=2)
    acquire_run_folder(job.run_folder, RunOwner(job="another", uid="5678"))
    fence = Fence(job.run_folder, b"theirs")
    theirs = fence.acquire(1, 0)
    launcher = job.start("finish")
    assert launcher.exit_code() == 78
    assert "belongs to job another (uid 5678), not to job job" in launcher.read_last_word().message
    assert fence.is_ours(theirs)


def test_a_run_folder_that_is_a_file_is_bad_configuration(gang: Make) -> None:
    job = gang()
    job.run_folder.mkdir()
    (job.run_folder / "claims").touch()
    launcher = job.start("finish")
    assert launcher.exit_code() == 78
    assert str(job.run_folder) in launcher.read_last_word().message


def test_a_progress_port_that_is_taken_is_said_in_the_last_word(gang: Make) -> None:
    job = gang()
    job.start("work")
    job.await_start_notes()
    job.rendezvous += 1
    second = job.start("work")
    assert second.exit_code() != 0
    assert "Address already in use" in second.read_last_word().message


def listening(job: Gang) -> None:
    await_result(
        lambda: all((job.run_folder / f"listening-{rank}").exists() for rank in range(job.nodes * job.ranks)),
        "handlers of all ranks",
    )


def ends_imports(job: Gang, number: signal.Signals, times: int) -> None:
    """Have the fork server get this signal while it imports, so often."""
    job.run_folder.mkdir(exist_ok=True)
    for time_number in range(times):
        job.allow(f"import-{time_number}-{int(number)}")


def has_saved(step: int, seen: PodProgress) -> bool:
    return seen.run is not None and seen.run.last_checkpoint_step == step
