"""What launchers agree on, by the store alone: two of them in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import pytest

from moejob_api.restarts import Cause
from moejob_trainer.launcher.ending import Author, Ending, Fault, ending_by
from moejob_trainer.launcher.meeting import Meeting, Round
from moejob_trainer.launcher.pod import pod_of
from moejob_trainer.launcher.stop import Stop
from moejob_trainer.launcher.store import LostPeers, Store
from trainer.launcher.launchers import Gang, free_port


def meeting(gang: Gang, index: int) -> Meeting:
    environment = gang.environment(index, attempt=1) | {"MOEJOB_PROGRESS_PORT": "9400"}
    return Meeting(pod_of(environment), Stop(), lost_seconds=30.0)


@pytest.fixture
def pair() -> tuple[Meeting, Meeting]:
    gang = Gang(Path("/nowhere"), nodes=2)
    first, second = meeting(gang, 0), meeting(gang, 1)
    first.open()
    second.open()
    return first, second


def gathered(pair: tuple[Meeting, Meeting]) -> list[Round | Ending]:
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda one: one.gather(20.0, lambda _: None), pair))


def ending(pod: int, cause: Cause = Cause.RANK_FAILED) -> Ending:
    return ending_by(Author(pod, f"token of {pod}"), Fault(cause, "why"), None)


def test_all_meet_in_the_next_round_once_one_has_ended(pair: tuple[Meeting, Meeting]) -> None:
    assert [met.number for met in gathered(pair) if isinstance(met, Round)] == [0, 0]
    pair[1].end(0, ending(1))
    assert [met.number for met in gathered(pair) if isinstance(met, Round)] == [1, 1]


def test_ranks_of_each_round_have_a_store_of_their_own(pair: tuple[Meeting, Meeting]) -> None:
    before = gathered(pair)
    pair[0].end(0, ending(0))
    after = gathered(pair)
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert before[0] != after[0]


def test_a_late_pod_of_an_older_attempt_cannot_turn_pod_0_away_by_being_quicker() -> None:
    job = Gang(Path("/nowhere"), nodes=2)
    store = Store.hosted("127.0.0.1", job.rendezvous)
    with ThreadPoolExecutor() as threads:
        late = threads.submit(meeting(job, 1).open)
        with pytest.raises(FutureTimeout):
            late.result(timeout=0.5)
        store.put_first("gang", '{"uid": "1234", "attempt": 2}')
        with pytest.raises(LostPeers, match=r"'attempt': 1.* but the rendezvous to .*'attempt': 2"):
            late.result()


def test_the_first_ending_holds_for_all(pair: tuple[Meeting, Meeting]) -> None:
    gathered(pair)
    assert pair[1].end(0, ending(1)) == ending(1)
    assert pair[0].end(0, ending(0)) == ending(1)
    assert [one.ending(0) for one in pair] == [ending(1), ending(1)]


def test_a_final_ending_that_came_second_still_ends_the_job(pair: tuple[Meeting, Meeting]) -> None:
    gathered(pair)
    final = ending(1, Cause.BAD_CONFIGURATION)
    pair[0].end(0, ending(0))
    pair[1].end_for_good(0, final)
    assert gathered(pair) == [final, final]


def test_a_checkpoint_that_pod_0_tells_is_known_to_all(pair: tuple[Meeting, Meeting]) -> None:
    seen = [pair[1].checkpoint()]
    for step in (None, 0, 10, 5, 20):
        pair[0].tell_checkpoint(step)
        seen.append(pair[1].checkpoint())
    assert seen == [None, None, 0, 10, 10, 20]


def test_a_gang_of_another_size_is_turned_away() -> None:
    port = free_port()
    first = meeting(Gang(Path("/nowhere"), nodes=2, rendezvous=port), 0)
    first.open()
    with pytest.raises(LostPeers, match="'nodes': 3"):
        meeting(Gang(Path("/nowhere"), nodes=3, rendezvous=port), 1).open()
