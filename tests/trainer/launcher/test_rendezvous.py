"""Rendezvous of launchers by the store alone: two of them in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from moejob_api.contract.pod_environment import read_environment
from moejob_api.recovery.restarts import FailureCause
from moejob_trainer.launcher import rendezvous as rendezvous_module
from moejob_trainer.launcher.ending import Ending, FailureOrigin, Fault, ending_by_fault
from moejob_trainer.launcher.pod import TrainerPod
from moejob_trainer.launcher.rendezvous import Rendezvous, Round, poll_seconds
from moejob_trainer.launcher.stop import StopRequest
from moejob_trainer.launcher.store import LauncherStore, LostPeers, LostStore, is_listening
from moejob_trainer.runtime.loopback_store import loopback_store
from ports import free_port
from trainer.launcher.launchers import Gang

PATIENCE = timedelta(minutes=5)
Pair = tuple[Rendezvous, Rendezvous]


def rendezvous(gang: Gang, index: int) -> Rendezvous:
    return Rendezvous(read_environment(TrainerPod, pod_environment(gang, index)), StopRequest(), lost_seconds=30.0)


def pod_environment(gang: Gang, index: int) -> dict[str, str]:
    return gang.pod_environment(index, attempt=1) | {"MOEJOB_PROGRESS_PORT": "9400"}


@pytest.fixture
def pair() -> Pair:
    gang = Gang(Path("/nowhere"), nodes=2)
    first, second = rendezvous(gang, 0), rendezvous(gang, 1)
    first.host_store(0)
    second.join_store(20.0)
    return first, second


@pytest.fixture
def stores() -> list[TCPStore]:
    """Stores of ranks that were opened, one for each round."""
    return []


def gathered(pair: Pair, stores: list[TCPStore]) -> list[Round | Ending]:
    def prepare(_: int) -> int:
        stores.append(loopback_store(PATIENCE))
        port: int = stores[-1].port
        return port

    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda one: one.gather_pods(20.0, prepare), pair))


def ending(pod: int, cause: FailureCause = FailureCause.RANK_FAILED) -> Ending:
    return ending_by_fault(FailureOrigin(pod, f"token of {pod}"), Fault(cause, "why"), None)


def test_all_meet_in_the_next_round_once_one_has_ended(pair: Pair, stores: list[TCPStore]) -> None:
    assert [met.number for met in gathered(pair, stores) if isinstance(met, Round)] == [0, 0]
    pair[1].end_round(0, ending(1))
    assert [met.number for met in gathered(pair, stores) if isinstance(met, Round)] == [1, 1]


def test_a_pod_whose_connection_alone_was_lost_gives_its_place_up(pair: Pair, stores: list[TCPStore]) -> None:
    gathered(pair, stores)
    pair[1].leave_store()
    # Its peers still run the round: it can neither join nor end that, and the next pod of its index does.
    with pytest.raises(LostPeers, match="still has this pod's place"):
        pair[1].join_store(300.0)


def test_of_two_stores_that_begin_at_once_that_of_pod_0_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "_OTHER_STORE_SECONDS", 0.0)
    job = Gang(Path("/nowhere"), nodes=2, spares=1)
    first, spare = rendezvous(job, 0), rendezvous(job, 2)
    spare.host_store(1)
    first.host_store(2)
    with pytest.raises(LostStore, match="meet in the store of pod 0"):
        spare.gather_pods(20.0, lambda _: 0)
    spare.leave_store()
    assert not is_listening("127.0.0.3", job.rendezvous)
    with pytest.raises(LostPeers, match="pod 1 did not come back"):
        first.gather_pods(0.5, lambda _: 0)
    spare.join_store(20.0)
    assert (spare.is_spare, spare.is_host, first.is_host) == (True, False, True)


def test_a_host_that_no_pod_joins_yields_to_the_store_in_which_the_others_have_met(
    monkeypatch: pytest.MonkeyPatch, stores: list[TCPStore]
) -> None:
    monkeypatch.setattr(rendezvous_module, "_OTHER_STORE_SECONDS", 0.0)
    job = Gang(Path("/nowhere"), nodes=2, spares=1)
    first, second, spare = (rendezvous(job, index) for index in range(3))
    spare.host_store(1)
    second.join_store(20.0)
    met = gathered((spare, second), stores)
    assert [(one.number, one.place, one.master) for one in met if isinstance(one, Round)] == [
        (1, 0, "127.0.0.3"),
        (1, 1, "127.0.0.3"),
    ]
    first.host_store(2)
    with pytest.raises(LostStore, match="meet in the store of pod 2"):
        first.gather_pods(20.0, lambda _: 0)


def test_a_host_that_slept_while_the_others_met_in_a_later_store_yields_to_that(
    monkeypatch: pytest.MonkeyPatch, stores: list[TCPStore]
) -> None:
    job = Gang(Path("/nowhere"), nodes=2, spares=1)
    first, second, spare = (rendezvous(job, index) for index in range(3))
    first.host_store(0)
    second.join_store(20.0)
    gathered((first, second), stores)
    second.leave_store()
    spare.host_store(1)
    second.join_store(20.0)
    assert [one.number for one in gathered((spare, second), stores) if isinstance(one, Round)] == [1, 1]
    first.end_round(0, ending(1))
    monkeypatch.setattr(rendezvous_module, "_OTHER_STORE_SECONDS", 0.0)
    with pytest.raises(LostStore, match="meet in the store of pod 2"):
        first.gather_pods(20.0, lambda _: 0)


@pytest.mark.parametrize(
    ("nodes", "least", "expected"),
    [
        pytest.param(2, 0.02, 0.02, id="two pods look as often as they want"),
        pytest.param(50, 0.02, 0.1, id="fifty look less often"),
        pytest.param(1000, 0.02, 0.2, id="no pod waits for longer than before"),
    ],
)
def test_the_more_pods_look_at_the_store_the_less_often_each_does(nodes: int, least: float, expected: float) -> None:
    assert poll_seconds(nodes, least) == pytest.approx(expected)


def test_ranks_of_each_round_have_a_store_of_their_own(pair: Pair, stores: list[TCPStore]) -> None:
    for number in (0, 1):
        ports = [met.port for met in gathered(pair, stores) if isinstance(met, Round)]
        # Each pod's ranks come by a port of their own, and find the same store.
        one, other = (TCPStore("127.0.0.1", port, is_master=False) for port in ports)
        assert not other.check(["written"])
        one.set("written", str(number))
        assert other.get("written") == str(number).encode()
        pair[0].end_round(number, ending(0))


def test_a_late_pod_of_an_older_attempt_cannot_turn_pod_0_away_by_being_quicker() -> None:
    job = Gang(Path("/nowhere"), nodes=2)
    store = LauncherStore.host_store(
        "127.0.0.1", job.rendezvous, read_environment(TrainerPod, pod_environment(job, 0)).launcher_key
    )
    with ThreadPoolExecutor() as threads:
        late = threads.submit(rendezvous(job, 1).join_store, 20.0)
        with pytest.raises(FutureTimeout):
            late.result(timeout=0.5)
        store.put_first("gang", '{"uid": "1234", "attempt": 2}')
        with pytest.raises(LostPeers, match=r"'attempt': 1.* but the rendezvous to .*'attempt': 2"):
            late.result()


def test_the_first_ending_holds_for_all(pair: Pair, stores: list[TCPStore]) -> None:
    gathered(pair, stores)
    assert pair[1].end_round(0, ending(1)) == ending(1)
    assert pair[0].end_round(0, ending(0)) == ending(1)
    assert [one.find_ending(0) for one in pair] == [ending(1), ending(1)]


def test_a_final_ending_that_came_second_still_ends_the_job(pair: Pair, stores: list[TCPStore]) -> None:
    gathered(pair, stores)
    final = ending(1, FailureCause.BAD_CONFIGURATION)
    pair[0].end_round(0, ending(0))
    pair[1].end_for_good(0, final)
    assert gathered(pair, stores) == [final, final]


def test_a_checkpoint_that_pod_0_tells_is_known_to_all(pair: Pair) -> None:
    seen = [pair[1].newest_checkpoint()]
    for step in (None, 0, 10, 5, 20):
        pair[0].publish_checkpoint(step)
        seen.append(pair[1].newest_checkpoint())
    assert seen == [None, None, 0, 10, 10, 20]


def test_a_gang_of_another_size_is_turned_away() -> None:
    port = free_port()
    first = rendezvous(Gang(Path("/nowhere"), nodes=2, rendezvous=port), 0)
    first.host_store(0)
    with pytest.raises(LostPeers, match="'nodes': 3"):
        rendezvous(Gang(Path("/nowhere"), nodes=3, rendezvous=port), 1).join_store(20.0)
