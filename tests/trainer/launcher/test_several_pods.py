"""Several launchers on simulated nodes: they meet by index, fall and rise together, and name whose fault it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from moejob_api.contract.pods import PodOutcome, PodProgress
from moejob_trainer.runtime.fencing import Fence, FenceToken, claim_key
from ports import free_port
from trainer.launcher.launchers import LONGEST_SECONDS, Gang, Launcher, await_ends, await_result

Make = Callable[..., Gang]


def test_ranks_are_numbered_pod_by_pod_in_the_order_of_the_indices_with_eleven_pods(gang: Make) -> None:
    job = gang(nodes=11, ranks=1)
    # In an order of their own: a place follows from the index, not from who comes first.
    for index in (10, 2, 9, 1, 0, 8, 3, 7, 4, 6, 5):
        job.start("finish", index)
    assert [launcher.exit_code(90) for launcher in job.launchers] == [0] * 11
    notes = job.await_start_notes()
    assert [(notes[rank]["RANK"], notes[rank]["GROUP_RANK"]) for rank in range(11)] == [
        (str(index), str(index)) for index in range(11)
    ]


def test_ranks_that_know_torchruns_variables_alone_meet_under_their_numbers(gang: Make) -> None:
    job = gang(nodes=3, ranks=1)
    for index in (2, 0, 1):
        job.start("gather_ranks", index)
    assert [launcher.exit_code(90) for launcher in job.launchers] == [0] * 3
    notes = job.await_start_notes().values()
    # Each row is a rank and the index of its pod, as every rank has heard it from all others.
    assert all(note["everyone"] == [[0, 0], [1, 1], [2, 2]] for note in notes)
    # The address of the pod of rank 0, not that of a launcher of each pod.
    assert {note["MASTER_ADDR"] for note in notes} == {"127.0.0.1"}


def test_ranks_that_know_torchruns_variables_alone_meet_again_after_a_failure(gang: Make) -> None:
    job = gang(nodes=2, ranks=1)
    job.start_all("gather_ranks_twice")
    assert [launcher.exit_code(90) for launcher in job.launchers] == [0] * 2
    assert all(note["everyone"] == [[0, 0], [1, 1]] for note in job.await_start_notes(restart=1).values())


def test_a_dead_rank_takes_the_ranks_of_all_pods_down_and_only_its_pod_counts_the_restart(gang: Make) -> None:
    job = gang(nodes=2)
    first, second = job.start_all("work")
    pids = job.rank_pids()
    os.kill(pids[3], signal.SIGKILL)
    await_ends(pids)
    notes = job.await_start_notes(restart=1)
    assert [int(note["GROUP_RANK"]) for note in notes.values()] == [0, 0, 1, 1]
    assert [ready(launcher).restarts for launcher in (first, second)] == [0, 1]
    assert "rank 3 was killed by signal 9" in first.log.read_text()


def test_ranks_that_die_in_two_pods_at_once_are_one_restart(gang: Make) -> None:
    job = gang(nodes=2, ranks=1)
    launchers = job.start_all("work")
    for pid in job.rank_pids():
        os.kill(pid, signal.SIGKILL)
    assert len(job.await_start_notes(restart=1)) == 2
    assert sum(ready(launcher).restarts for launcher in launchers) == 1


def test_all_pods_end_when_the_ranks_of_all_have_ended(gang: Make) -> None:
    job = gang(nodes=2)
    launchers = job.start_all("finish_in_the_order_of_ranks")
    job.await_start_notes()
    for rank in range(4):
        assert all(launcher.process.is_alive() for launcher in launchers)
        job.allow(f"go-{rank}")
    assert [launcher.exit_code() for launcher in launchers] == [0, 0]


def test_a_rank_that_fails_after_another_pod_is_done_makes_both_start_again(gang: Make) -> None:
    job = gang(nodes=2, ranks=1)
    first, second = job.start_all("fail_at_the_end_elsewhere")
    first.await_progress(lambda seen: seen.ready and not seen.ranks, "the end of the ranks")
    job.allow("go-0")
    assert [launcher.exit_code() for launcher in (first, second)] == [0, 0]
    assert len(job.await_start_notes(restart=1)) == 2


def test_bad_configuration_on_one_pod_ends_all_with_the_same_word(gang: Make) -> None:
    job = gang(nodes=2)
    launchers = job.start_all("refuse_on_another_node")
    job.await_start_notes()
    job.allow("go-0")
    assert [launcher.exit_code() for launcher in launchers] == [78, 78]
    assert launchers[0].read_last_word() == launchers[1].read_last_word()
    assert launchers[0].read_last_word().rank == 3


def test_a_stop_of_pod_0_stops_all_after_saving_and_the_others_wait_for_its_replacement(gang: Make) -> None:
    job = gang(nodes=2, ranks=1)
    first, second = job.start_all("save_slowly_once")
    await_result(lambda: all((job.run_folder / f"listening-{rank}").exists() for rank in (0, 1)), "handlers")
    first.signal(signal.SIGTERM)
    await_result((job.run_folder / "stop-all").exists, "the stop")
    job.allow("saved")
    assert first.exit_code() == 143
    job.start("save_slowly_once")
    assert len(job.await_start_notes(restart=2)) == 2
    assert ready(second).restarts == 0


def test_a_stop_of_another_pod_stops_the_ranks_of_all_after_saving_and_the_others_wait_for_its_replacement(
    gang: Make,
) -> None:
    job = gang(nodes=3, ranks=1)
    first, second, third = job.start_all("save_slowly_once")
    await_result(lambda: all((job.run_folder / f"listening-{rank}").exists() for rank in range(3)), "handlers")
    second.signal(signal.SIGTERM)
    await_result((job.run_folder / "stop-all").exists, "the stop")
    job.allow("saved")
    assert second.exit_code() == 143
    job.start("save_slowly_once", index=1)
    assert len(job.await_start_notes(restart=1)) == 3
    assert [ready(launcher).restarts for launcher in (first, third)] == [0, 0]


def test_all_pods_that_are_asked_to_stop_go(gang: Make) -> None:
    job = gang(nodes=2, ranks=1)
    first, second = job.start_all("save_slowly")
    await_result(lambda: all((job.run_folder / f"listening-{rank}").exists() for rank in (0, 1)), "handlers")
    second.signal(signal.SIGTERM)
    job.allow("saved")
    assert second.exit_code() == 143
    await_result(lambda: "for a pod was asked to" in first.log.read_text(), "the first to wait")
    first.signal(signal.SIGTERM)
    assert (first.exit_code(), first.read_last_word().outcome) == (143, PodOutcome.PREEMPTED)


def test_a_killed_launcher_is_replaced_and_the_others_start_again_with_the_new_one(gang: Make) -> None:
    job = gang(nodes=2)
    first, second = job.start_all("work")
    pids = job.rank_pids()
    second.kill()
    replacement = job.start("work", index=1)
    await_ends(pids)
    assert [int(note["GROUP_RANK"]) for note in job.await_start_notes(restart=1).values()] == [0, 0, 1, 1]
    assert [beat.rank for beat in ready(replacement).ranks] == [2, 3]
    # The lost pod is the operator's to charge.
    assert ready(first).restarts == 0
    assert first.process.is_alive()


def test_a_pod_that_falls_silent_takes_the_ranks_of_the_others_down_and_its_absence_is_waited_for_in_vain(
    gang: Make,
) -> None:
    job = gang(nodes=2, lost_seconds=2.0, progress_deadline=10)
    first, second = job.start_all("beat_for_ever")
    pids = job.rank_pids()
    second.signal(signal.SIGSTOP)
    await_ends(pids[:2])
    assert first.exit_code() == 1
    assert first.read_last_word().outcome is PodOutcome.LOST_PEERS
    assert first.read_last_word().message == "pod 1 did not come back within 10 s"
    assert "pod 1 has not been heard for 2 s" in first.log.read_text()


def test_a_killed_launcher_is_missed_at_once_though_the_ranks_of_the_others_would_wait_for_it(gang: Make) -> None:
    job = gang(nodes=3, ranks=1, lost_seconds=LONGEST_SECONDS)
    first, _, third = job.start_all("beat_for_ever")
    pids = job.rank_pids()
    third.kill()
    await_ends(pids)
    assert "pod 2 has left the rendezvous" in first.log.read_text()


def test_a_process_whose_pod_has_been_replaced_goes_away_when_it_wakes_up(gang: Make) -> None:
    job = gang(nodes=2, ranks=1)
    first, second = job.start_all("work")
    job.await_start_notes()
    second.signal(signal.SIGSTOP)
    job.start("work", index=1, port=free_port())
    job.await_start_notes(restart=1)
    second.signal(signal.SIGCONT)
    assert second.exit_code() == 1
    assert second.read_last_word().outcome is PodOutcome.LOST_PEERS
    assert "has taken the place of pod 1" in second.read_last_word().message
    assert ready(first).ranks[0].pid == job.rank_pids(restart=1)[0]


def test_a_killed_launcher_of_pod_0_is_replaced_and_the_others_start_again_with_the_new_one(gang: Make) -> None:
    job = gang(nodes=3, ranks=1)
    first, second, third = job.start_all("work")
    pids = job.rank_pids()
    first.kill()
    await_ends(pids)
    replacement = job.start("work")
    # The replacement takes the folder with 1, and its first round with 2.
    assert [int(note["GROUP_RANK"]) for note in job.await_start_notes(restart=2).values()] == [0, 1, 2]
    assert [ready(launcher).restarts for launcher in (replacement, second, third)] == [0, 0, 0]
    os.kill(ready(third).ranks[0].pid, signal.SIGKILL)
    assert len(job.await_start_notes(restart=3)) == 3


def test_pod_0_and_another_that_are_killed_at_once_are_replaced_and_the_third_starts_again(gang: Make) -> None:
    job = gang(nodes=3, ranks=1)
    first, second, third = job.start_all("work")
    pids = job.rank_pids()
    first.kill()
    second.kill()
    # In the order in which the last one has to wait for the other.
    job.start("work", 1)
    job.start("work", 0)
    assert len(job.await_start_notes(restart=2)) == 3
    await_ends(pids)
    assert third.process.is_alive()


def test_a_pod_0_that_is_killed_again_before_and_after_it_has_met_the_others_is_replaced_again(gang: Make) -> None:
    job = gang(nodes=2, ranks=1)
    first, second = job.start_all("work")
    job.await_start_notes()
    second.signal(signal.SIGSTOP)
    first.kill()
    early = job.start("work")
    await_result(lambda: "arrived" in early.log.read_text(), "the store of the second pod 0")
    early.kill()
    third = job.start("work")
    second.signal(signal.SIGCONT)
    # The second took the folder with 1 and the third with 2.
    job.await_start_notes(restart=3)
    third.kill()
    job.start("work")
    job.await_start_notes(restart=5)
    assert ready(second).restarts == 0


def test_a_hung_launcher_of_pod_0_is_replaced_once_it_is_killed(gang: Make) -> None:
    job = gang(nodes=2, ranks=1)
    first, second = job.start_all("work")
    pids = job.rank_pids()
    first.signal(signal.SIGSTOP)
    # Its ranks live and its store takes connections, but does not answer.
    await_result(lambda: "this pod joins the next one" in second.log.read_text(), "the wait")
    await_ends(pids[1:])
    first.kill()
    job.start("work")
    assert len(job.await_start_notes(restart=2)) == 2
    await_ends(pids)


def test_a_pod_0_that_was_replaced_starts_no_ranks_when_it_wakes_up(gang: Make) -> None:
    job = gang(nodes=2, ranks=1)
    first, _ = job.start_all("hold_the_folder")
    job.await_start_notes()
    fence, old = Fence(job.run_folder, claim_key(job.secret, "1234")), FenceToken(job.attempt, 0)
    assert fence.is_ours(old)
    # Another machine's pod 0, which no pod has met yet: the old one is reached by all.
    fence.acquire(job.attempt, 1)
    assert not fence.is_ours(old)
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    assert first.exit_code() == 1
    assert "restart 0 any more" in first.read_last_word().message


def test_without_another_pod_0_the_others_end(gang: Make) -> None:
    job = gang(nodes=2, progress_deadline=10)
    first, second = job.start_all("beat_for_ever")
    pids = job.rank_pids()
    first.kill()
    assert second.exit_code() == 1
    assert second.read_last_word().outcome is PodOutcome.LOST_PEERS
    assert second.read_last_word().message == "pod 0 did not come back within 10 s"
    await_ends(pids)


def test_pods_that_wait_for_another_pod_0_go_when_they_are_asked_to(gang: Make) -> None:
    job = gang(nodes=2)
    first, second = job.start_all("work")
    job.await_start_notes()
    first.kill()
    await_result(lambda: "this pod joins the next one" in second.log.read_text(), "the wait")
    second.signal(signal.SIGTERM)
    assert second.exit_code() == 143


def test_a_pod_of_another_attempt_is_turned_away(gang: Make) -> None:
    job = gang(nodes=2, attempt=5)
    job.start("work")
    late = job.start("work", index=1, attempt=4)
    assert late.exit_code() == 1
    assert late.read_last_word().outcome is PodOutcome.LOST_PEERS
    assert "belongs to another attempt" in late.read_last_word().message
    job.start("work", index=1)
    assert {note["MOEJOB_ATTEMPT"] for note in job.await_start_notes().values()} == {"5"}


def test_the_pod_at_fault_leaves_after_its_restarts_and_the_others_wait_for_its_replacement(gang: Make) -> None:
    job = gang(nodes=2)
    first, second = job.start_all("fail_on_another_node")
    assert second.exit_code() == 1
    assert (second.read_last_word().outcome, second.read_last_word().rank) == (PodOutcome.RANK_FAILED, 2)
    assert first.process.is_alive()
    job.start("work", index=1)
    assert len(job.await_start_notes(restart=3)) == 4
    assert ready(first).restarts == 0


def ready(launcher: Launcher) -> PodProgress:
    return launcher.await_progress(lambda seen: seen.ready)
