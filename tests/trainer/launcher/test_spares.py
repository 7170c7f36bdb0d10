"""Spares: launchers without a place, which stand in for pods that are lost. Real launchers, and the store alone."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from moejob_api.contract.pods import PodOutcome, PodProgress, RunPhase
from moejob_trainer.launcher import rendezvous
from moejob_trainer.runtime.fencing import Fence, FenceToken, claim_key
from ports import free_port
from trainer.launcher.launchers import LONGEST_SECONDS, Gang, Launcher, await_ends, await_result

Make = Callable[..., Gang]


def start_whole_gang(job: Gang, program: str = "work") -> list[Launcher]:
    """Start all pods and the spares beyond them, and wait until ranks run and spares wait."""
    launchers = [job.start(program, index) for index in range(job.nodes + job.spares)]
    job.await_start_notes()
    for spare in launchers[job.nodes :]:
        await_spare(spare)
    return launchers


def await_spare(launcher: Launcher) -> PodProgress:
    return launcher.await_progress(lambda seen: seen.phase == RunPhase.SPARE, "the wait as a spare")


def ready(launcher: Launcher) -> PodProgress:
    return launcher.await_progress(lambda seen: seen.ready)


def places(job: Gang, restart: int) -> list[int]:
    return [int(note["GROUP_RANK"]) for note in job.await_start_notes(restart).values()]


def test_a_spare_takes_the_place_of_a_killed_pod_whose_replacement_is_the_next_spare(gang: Make) -> None:
    job = gang(nodes=3, spares=1, ranks=1, lost_seconds=LONGEST_SECONDS)
    first, second, third, spare = start_whole_gang(job)
    assert (await_spare(spare).ranks, spare.is_ready()) == ((), False)
    third.kill()
    assert places(job, restart=1) == [0, 1, 2]
    assert (ready(spare).index, [beat.rank for beat in ready(spare).ranks]) == (3, [2])
    # The lost pod is the operator's to charge.
    assert [ready(launcher).restarts for launcher in (first, second, spare)] == [0, 0, 0]
    replacement = job.start("work", index=2)
    await_spare(replacement)
    second.kill()
    assert places(job, restart=2) == [0, 1, 2]
    assert [beat.rank for beat in ready(replacement).ranks] == [1]


def test_a_frozen_pod_whose_place_a_spare_has_taken_is_a_spare_when_it_wakes_up(gang: Make) -> None:
    job = gang(nodes=2, spares=1, ranks=1, lost_seconds=2.0)
    _, second, spare = start_whole_gang(job)
    pids = job.rank_pids()
    second.signal(signal.SIGSTOP)
    assert places(job, restart=1) == [0, 1]
    second.signal(signal.SIGCONT)
    await_spare(second)
    await_ends(pids)
    spare.kill()
    assert places(job, restart=2) == [0, 1]
    assert [beat.rank for beat in ready(second).ranks] == [1]


def test_the_next_process_of_a_pod_that_had_taken_a_place_has_that_place(gang: Make) -> None:
    job = gang(nodes=2, spares=1, ranks=1, lost_seconds=LONGEST_SECONDS)
    _, second, spare = start_whole_gang(job)
    second.kill()
    job.await_start_notes(restart=1)
    # On a node that is cut off: its connection is not closed.
    spare.signal(signal.SIGSTOP)
    replacement = job.start("work", index=2, port=free_port())
    assert places(job, restart=2) == [0, 1]
    assert [beat.rank for beat in ready(replacement).ranks] == [1]
    spare.signal(signal.SIGCONT)
    assert spare.exit_code() == 1
    # On a slow machine it sleeps for longer than a store may take to answer, and has lost that.
    assert spare.read_last_word().outcome is PodOutcome.LOST_PEERS


def test_a_spare_hosts_the_store_and_has_rank_0_once_pod_0_is_lost_and_the_next_pod_0_is_a_spare(gang: Make) -> None:
    job = gang(nodes=3, spares=1, ranks=1)
    first, second, _, spare = start_whole_gang(job)
    pids = job.rank_pids()
    first.kill()
    notes = job.await_start_notes(restart=1)
    assert [(note["GROUP_RANK"], note["MASTER_ADDR"]) for note in notes.values()] == [
        (str(place), spare.host) for place in range(3)
    ]
    await_ends(pids)
    assert [beat.rank for beat in ready(spare).ranks] == [0]
    replacement = job.start("work")
    assert await_spare(replacement).run is None
    second.kill()
    assert places(job, restart=2) == [0, 1, 2]
    assert [beat.rank for beat in ready(replacement).ranks] == [1]


def test_a_spare_that_notices_late_hosts_the_store_before_the_next_pod_0(
    gang: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Launchers are forked from this process.
    monkeypatch.setattr(rendezvous, "_TURN_SECONDS", LONGEST_SECONDS)
    job = gang(nodes=2, spares=1, ranks=1, lost_seconds=LONGEST_SECONDS)
    first, _, spare = start_whole_gang(job)
    spare.signal(signal.SIGSTOP)
    first.kill()
    replacement = job.start("work")
    replacement.await_progress(lambda seen: seen.phase == RunPhase.IMPORTING)
    spare.signal(signal.SIGCONT)
    assert places(job, restart=1) == [0, 1]
    assert [beat.rank for beat in ready(spare).ranks] == [0]
    await_spare(replacement)


def test_the_next_pod_0_hosts_the_store_where_no_spare_does(gang: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_TURN_SECONDS", 0.5)
    job = gang(nodes=2, spares=1, ranks=1)
    first, _, spare = start_whole_gang(job)
    spare.kill()
    first.kill()
    replacement = job.start("work")
    # It took the run folder from the lost pod before, which counts as a restart.
    assert places(job, restart=2) == [0, 1]
    assert [beat.rank for beat in ready(replacement).ranks] == [0]


def test_a_store_moves_as_often_as_its_host_is_lost(gang: Make) -> None:
    job = gang(nodes=2, spares=1, ranks=1)
    first, second, spare = start_whole_gang(job)
    first.kill()
    assert places(job, restart=1) == [0, 1]
    replacement = job.start("work")
    await_spare(replacement)
    # The next spare is no pod that other pods look for as a host: pod 0 is, and leaves its place for that.
    second.kill()
    assert places(job, restart=2) == [0, 1]
    await_spare(job.start("work", index=1))
    spare.kill()
    assert places(job, restart=3) == [0, 1]
    assert [beat.rank for beat in ready(replacement).ranks] == [0]


def test_spares_stand_in_for_pod_0_and_for_a_pod_that_was_lost_with_it(gang: Make) -> None:
    job = gang(nodes=3, spares=2, ranks=1)
    first, second, _, *spares = start_whole_gang(job)
    pids = job.rank_pids()
    first.kill()
    second.kill()
    assert places(job, restart=1) == [0, 1, 2]
    assert [[beat.rank for beat in ready(spare).ranks] for spare in spares] == [[0], [1]]
    await_ends(pids)


@pytest.mark.thorough
def test_a_pod_0_that_slept_while_a_spare_took_its_place_writes_nothing_and_is_a_spare(gang: Make) -> None:
    job = gang(nodes=2, spares=1, ranks=1, lost_seconds=2.0)
    first, _, spare = start_whole_gang(job)
    pids = job.rank_pids()
    fence, old = Fence(job.run_folder, claim_key(job.secret, "1234")), FenceToken(job.attempt, 0)
    first.signal(signal.SIGSTOP)
    assert places(job, restart=1) == [0, 1]
    assert not fence.is_ours(old)
    first.signal(signal.SIGCONT)
    await_spare(first)
    await_ends(pids)
    spare.kill()
    assert places(job, restart=2) == [0, 1]
    assert [beat.rank for beat in ready(first).ranks] == [0]


def test_a_spare_takes_no_place_before_all_pods_have_met_once(gang: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # Launchers are forked from this process. Later a spare takes an empty place at once.
    monkeypatch.setattr(rendezvous, "_EMPTY_PLACE_SECONDS", 0.0)
    job = gang(nodes=2, spares=1, ranks=1)
    first, spare = job.start("work", 0), job.start("work", 2)
    await_spare(spare)
    await_result(lambda: "arrived" in first.log.read_text(), "the first pod")
    second = job.start("work", 1)
    assert [beat.rank for beat in ready(second).ranks] == [1]


def test_a_spare_goes_when_it_is_asked_to_and_no_rank_ends(gang: Make) -> None:
    job = gang(nodes=2, spares=1, ranks=1)
    first, _, spare = start_whole_gang(job)
    pids = job.rank_pids()
    spare.signal(signal.SIGTERM)
    assert (spare.exit_code(), spare.read_last_word().outcome) == (143, PodOutcome.PREEMPTED)
    assert [ready(first).ranks[0].pid] == pids[:1]


def test_a_spare_stands_in_for_a_pod_that_was_asked_to_stop_once_all_have_saved(gang: Make) -> None:
    job = gang(nodes=2, spares=1, ranks=1)
    _, second, spare = start_whole_gang(job, "save_slowly_once")
    await_result(lambda: all((job.run_folder / f"listening-{rank}").exists() for rank in (0, 1)), "handlers")
    second.signal(signal.SIGTERM)
    await_result((job.run_folder / "stop-all").exists, "the stop")
    job.allow("saved")
    assert second.exit_code() == 143
    assert places(job, restart=1) == [0, 1]
    assert [beat.rank for beat in ready(spare).ranks] == [1]


def test_bad_configuration_ends_a_spare_with_the_word_of_the_others(gang: Make) -> None:
    job = gang(nodes=2, spares=1)
    launchers = start_whole_gang(job, "refuse_on_another_node")
    job.allow("go-0")
    assert [launcher.exit_code() for launcher in launchers] == [78, 78, 78]
    assert launchers[2].read_last_word() == launchers[0].read_last_word()
