"""The rendezvous of an attempt's launchers: round by round, all pods or none, in the order of their indices.

A round is one start of all ranks. It begins when every pod has arrived, and ends when a launcher writes its ending; all
meet again in the next one. A pod takes the place of its index. (torch's own rendezvous orders agents by address as
text, compares the clocks of machines and does not know which pod ended a round.) A launcher with another attempt or
size is turned away, and so is a process whose pod was replaced. Knows nothing of processes.

A spare has no place. It takes the place of a pod that does not come back, in the round after; a pod that finds its
place taken is a spare from then on. The first writer of a place has it for the round, so no rank runs twice.

Pod 0 hosts the store first. Where that is lost, a spare or the next pod 0 hosts an empty store, whose rounds have
higher numbers, and takes place 0; launchers that have lost the store join the first that they find. A round begins only
where all places of one store are filled, and after its host has taken the fence token: of two stores one is left.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from moejob_trainer.launcher.ending import Ending, FailureOrigin, ending_without_pod
from moejob_trainer.launcher.log import LauncherLog
from moejob_trainer.launcher.pod import TrainerPod
from moejob_trainer.launcher.stop import StopRequest
from moejob_trainer.launcher.store import LauncherStore, LostPeers, LostStore, is_listening

log = LauncherLog()

_POLL_SECONDS = 0.2
_HEARTBEAT_SECONDS = 1.0
# Of pods that come back between two rounds, when no rank trains.
_RETURN_POLL_SECONDS = 0.02
_RETURN_SECONDS = 5.0
# A host that leaves may take this long. A store that answers later has lost nothing but the connection to this pod.
_LEFT_STORE_SECONDS = 10.0
# A pod whose end was not noticed has this long to come back to its place before a spare takes it.
_EMPTY_PLACE_SECONDS = 10.0
# Spares beyond these host no store: launchers without a store look at all that may.
_MOST_SPARE_HOSTS = 7
# A pod that may host the next store waits this long for each that may before it.
_TURN_SECONDS = 3.0
# Between two looks of a host for another store, while pods are missing in its own.
_OTHER_STORE_SECONDS = 5.0
# The pause grows by this for each pod: the host answers all pods, a few hundred times a second.
_POLL_SECONDS_PER_POD = 0.002


@dataclass(frozen=True, slots=True)
class Round:
    """One start of all ranks; `number` grows within an attempt, from 0. `place` is this pod's, and decides its ranks.

    Ranks of this pod reach the store of the round at `port` of their loopback, whichever pod hosts it. `master` is the
    host of rank 0.
    """

    number: int
    place: int
    port: int
    master: str


def poll_seconds(nodes: int, least: float) -> float:
    """Return the pause between two looks at the store, which is longer the more pods look; pure."""
    return min(_POLL_SECONDS, max(least, _POLL_SECONDS_PER_POD * nodes))


class Rendezvous:
    """One launcher's part in the rounds of its attempt."""

    def __init__(self, pod: TrainerPod, stop: StopRequest, lost_seconds: float) -> None:
        self._pod, self._stop = pod, stop
        self.token = f"{pod.host}/{os.getpid()}/{os.urandom(4).hex()}"
        self._heartbeats = _PodHeartbeats(pod, lost_seconds)
        self._launcher_store: LauncherStore | None = None
        # Pods that may host the store, in order, and their addresses.
        spares = enumerate(pod.spare_hosts[:_MOST_SPARE_HOSTS], start=pod.nodes)
        self._addresses = {0: pod.rendezvous_host, **dict(spares)}
        # The process that hosts the store which this pod has entered, or had entered before it left, and its pod.
        self._entered_host: str | None = None
        self._entered_index = 0
        self._has_met_left_store = False
        self._is_host = self._has_opened_round = False
        self._looked_for_others_at = 0.0
        self._next = self._first = 0
        self._published_checkpoints = 0
        self._place = pod.index if pod.index < pod.nodes else None
        # When this pod stopped to be a spare, on the monotonic clock.
        self.place_taken_at = 0.0
        self._has_sought_former_place = False
        # The round in which pods gather, and when this spare saw it first.
        self._gathering_round: tuple[int, float] | None = None

    @property
    def is_spare(self) -> bool:
        """Return whether this pod has no place. May be read from any thread."""
        return self._place is None

    @property
    def is_host(self) -> bool:
        """Return whether this pod hosts the store, and with it has place 0. May be read from any thread."""
        return self._is_host

    def host_store(self, first_round: int) -> None:
        """Host the store; its rounds count from `first_round`. Other pods join it where they gather."""
        pod = self._pod
        self._launcher_store = LauncherStore.host_store(pod.listens_on, pod.rendezvous_port, pod.launcher_key)
        self._is_host, self._has_opened_round = True, False
        self._opened_store.put_first("first round", str(first_round))
        self._opened_store.put_first("host", self.token)
        # The last one: the others wait for it.
        self._opened_store.put_first("gang", json.dumps(self._gang_facts))
        self._enter_store(pod.index)

    def join_store(self, wait_seconds: float | None) -> None:
        """Join a store unless this pod has one, or host it where that is up to this pod.

        Pod 0 may be scheduled long after this one.
        """
        began = time.monotonic()
        while self._launcher_store is None:
            self._stop.raise_if_requested()
            waited = time.monotonic() - began
            if wait_seconds is not None and waited >= wait_seconds:
                raise LostPeers(f"pod 0 did not come back within {wait_seconds:.0f} s")
            if self.join_any_store():
                return
            if not self._has_met_left_store:
                self._host_next_store(waited)
            elif waited >= _LEFT_STORE_SECONDS:
                raise LostPeers(
                    f"the connection to pod {self._entered_index} was lost, and the store of that pod still has this "
                    "pod's place"
                )
            if self._launcher_store is None:
                self._stop.wait(_POLL_SECONDS)

    def join_any_store(self) -> bool:
        """Join the first store of another pod that answers; return false where none does."""
        self._has_met_left_store = False
        return any(self._has_joined_new_store(index) for index in self._other_hosts)

    def join_store_before_hosting(self) -> bool:
        """Join the store of another pod; return false where none answers, also after the turns of all spares.

        They are waited for once rounds have begun: a spare has its imports done, and this pod's run meanwhile.
        """
        spares = len(self._addresses) - 1
        turns = spares if spares and self._has_begun_rounds() else 0
        until = time.monotonic() + turns * _TURN_SECONDS
        while not self.join_any_store():
            if time.monotonic() >= until:
                return False
            self._stop.raise_if_requested()
            self._stop.wait(_POLL_SECONDS)
        return True

    def leave_store(self) -> None:
        """Leave a store that does not answer. `gather_pods` joins the next one."""
        if self._launcher_store is not None:
            self._launcher_store.close()
        self._launcher_store, self._is_host = None, False

    def gather_pods(self, wait_seconds: float | None, prepare: Callable[[int], int]) -> Round | Ending:
        """Wait until all pods have arrived in the same round; the host prepares it before anybody may start ranks.

        prepare: returns the port of a new store of the round's ranks, on this pod's loopback.
        An Ending when there will be no other round. The wait has no limit for the first time: pods come when the
        cluster has room for them.
        """
        began = time.monotonic()
        until = None if wait_seconds is None else began + wait_seconds
        self.join_store(wait_seconds)
        self._looked_for_others_at = time.monotonic()
        while True:
            number = self._arrive_in_round()
            if isinstance(number, Ending):
                return number
            if number is None:
                self._stop.raise_if_requested()
                self._stop.wait(_POLL_SECONDS)
                began = time.monotonic()
                until = None if wait_seconds is None else began + wait_seconds
                continue
            while self._read_ending(number) is None:
                if self._opened_store.add_to_counter(_round_key(number, "arrived"), 0) == self._pod.nodes:
                    self._open_for_ranks(number, prepare)
                    opened_round = self._opened_round(number)
                    if opened_round is not None:
                        self._heartbeats.forget_counts()
                        return opened_round
                self._stop.raise_if_requested()
                self._yield_to_other_store()
                if until is not None and time.monotonic() >= until:
                    raise LostPeers(f"{self._absent_pods(number)} did not come back within {wait_seconds:.0f} s")
                is_return = wait_seconds is not None and time.monotonic() < began + _RETURN_SECONDS
                self._stop.wait(poll_seconds(self._pod.nodes, _RETURN_POLL_SECONDS) if is_return else _POLL_SECONDS)

    def find_ending(self, number: int) -> Ending | None:
        """Return the ending of a round, None while it runs. Sends this pod's heartbeat meanwhile."""
        self._heartbeats.send(self._opened_store, _round_key(number, f"pulse/{self._place}"))
        ending = self._read_ending(number)
        if ending is None and self._is_host:
            ending = self._end_silent_round(number)
        return ending

    def end_round(self, number: int, ending: Ending) -> Ending:
        """End a round; return the ending that counts, which is another pod's when that came first."""
        return Ending.model_validate_json(
            self._opened_store.put_first(_round_key(number, "end"), ending.model_dump_json())
        )

    def end_for_good(self, number: int, ending: Ending) -> None:
        """Publish a final ending though another launcher has ended the round."""
        while self.end_round(number, ending) != ending:
            number += 1

    def ending_before(self, number: int) -> Ending | None:
        """Return the ending of the round before."""
        return self._read_ending(number - 1) if number > self._first else None

    def publish_checkpoint(self, step: int | None) -> None:
        """Publish the newest checkpoint to all pods; the pod of rank 0 knows it."""
        if step is not None and step >= self._published_checkpoints:
            # A counter of steps plus one, since it starts at 0 and step 0 is a step.
            self._published_checkpoints = self._opened_store.add_to_counter(
                "checkpoint", step + 1 - self._published_checkpoints
            )

    def newest_checkpoint(self) -> int | None:
        """Return the newest checkpoint that was published."""
        published = self._opened_store.add_to_counter("checkpoint", 0)
        return published - 1 if published else None

    def mark_done(self, number: int) -> None:
        """Say that the ranks of this pod have ended well."""
        # Before the count: once all are counted a pod may go, and is not missed.
        self._opened_store.put_first(_round_key(number, f"done/{self._place}"), self.token)
        self._opened_store.add_to_counter(_round_key(number, "done"))

    def are_all_done(self, number: int) -> bool:
        """Return whether the ranks of every pod have ended well."""
        return self._opened_store.add_to_counter(_round_key(number, "done"), 0) >= self._pod.nodes

    def leave_round(self, number: int, within_seconds: float) -> None:
        """Go. The host goes last: the others still have to read that all are done."""
        name = _round_key(number, "left")
        if not self._is_host:
            # The host may be gone already: nothing is left to exchange.
            with suppress(LostPeers):
                self._opened_store.add_to_counter(name)
            return
        until = time.monotonic() + within_seconds
        while self._opened_store.add_to_counter(name, 0) < self._pod.nodes - 1 and time.monotonic() < until:
            self._stop.wait(_POLL_SECONDS)

    # --- arriving -----------------------------------------------------------------------------------------------------

    def _arrive_in_round(self) -> int | Ending | None:
        """Arrive in the first round that has not ended; its number, or the ending of the last one there is.

        None for a spare while no place is empty.
        """
        while True:
            last = self._skip_ended_rounds()
            if last is not None:
                return last
            number, place = self._next, self._place if self._place is not None else self._find_place(self._next)
            if place is None:
                return None
            holder = self._opened_store.put_first(_round_key(number, f"arrived/{place}"), self.token)
            if holder == self.token:
                self._take_place(number, place)
                return number
            if _token_host(holder) != self._pod.host:
                if self._place is not None:
                    log.warning("a spare has taken the place", round=number, index=place, spare=_token_host(holder))
                self._place = None
                continue
            # An older process of this pod has arrived here: this one ends that round, and joins the next.
            self._place = place
            origin, message = FailureOrigin(place, self.token), f"pod {place} has been replaced"
            ending = ending_without_pod(place, origin, message, self.ending_before(number))
            self.end_round(number, ending.model_copy(update={"pod_was_taken_over": True}))

    def _take_place(self, number: int, place: int) -> None:
        if self._place is None:
            self._place, self.place_taken_at = place, time.monotonic()
        if place == 0:
            self._opened_store.put_first(_round_key(number, "master"), self._pod.host)
        self._opened_store.add_to_counter(_round_key(number, "arrived"))
        log.info("arrived", round=number, index=place)

    def _find_place(self, number: int) -> int | None:
        """Return the place for this spare in a round: an older process' own, or that of a pod that does not come back.

        None in the first round of an attempt, in which pods come when the cluster has room for them. The host of the
        store has place 0, and no other pod.
        """
        if self._is_host:
            return 0
        store = self._opened_store
        arrived = store.add_to_counter(_round_key(number, "arrived"), 0)
        if not self._has_sought_former_place:
            self._has_sought_former_place = True
            former = [place for place in range(1, self._pod.nodes) if self._is_held_by_this_host(number, place)]
            if former:
                return former[0]
        if number == 0 or arrived in (0, self._pod.nodes):
            return None
        if self._gathering_round is None or self._gathering_round[0] != number:
            self._gathering_round = number, time.monotonic()
        is_late = time.monotonic() - self._gathering_round[1] >= _EMPTY_PLACE_SECONDS
        places = range(1, self._pod.nodes)
        empty = (place for place in places if store.get(_round_key(number, f"arrived/{place}")) is None)
        return next((place for place in empty if is_late or self._has_lost_pod(number - 1, place)), None)

    def _is_held_by_this_host(self, number: int, place: int) -> bool:
        holder = self._opened_store.get(_round_key(number, f"arrived/{place}"))
        return holder is not None and _token_host(holder) == self._pod.host

    def _has_lost_pod(self, number: int, place: int) -> bool:
        """Return whether the pod that had a place in a round has left the store, or the round ended without it."""
        holder = self._opened_store.get(_round_key(number, f"arrived/{place}"))
        if holder is not None and self._opened_store.add_to_counter(_departure_key(holder), 0) > 0:
            return True
        ending = self._read_ending(number) if number >= self._first else None
        return ending is not None and ending.pod == place and ending.pod_leaves and not ending.pod_was_taken_over

    def _skip_ended_rounds(self) -> Ending | None:
        while (ending := self._read_ending(self._next)) is not None:
            is_replaced = ending.pod_was_taken_over and ending.pod == self._place and ending.token != self.token
            if is_replaced and self._has_arrived(self._next):
                raise LostPeers(f"another process has taken the place of pod {self._place}: {ending.token}")
            if ending.is_final:
                return ending
            self._next += 1
        return None

    def _has_arrived(self, number: int) -> bool:
        return self._opened_store.get(_round_key(number, f"arrived/{self._place}")) == self.token

    def _absent_pods(self, number: int) -> str:
        indices = range(self._pod.nodes)
        absent = [
            str(index) for index in indices if self._opened_store.get(_round_key(number, f"arrived/{index}")) is None
        ]
        return f"pods {', '.join(absent)}" if len(absent) > 1 else f"pod {''.join(absent)}"

    # --- the store ----------------------------------------------------------------------------------------------------

    @property
    def _gang_facts(self) -> dict[str, str | int]:
        pod = self._pod
        return {"uid": pod.uid, "attempt": pod.attempt, "nodes": pod.nodes, "ranksPerNode": pod.ranks_per_node}

    @property
    def _other_hosts(self) -> list[int]:
        """Return the other pods that may host the store, last the one whose store was lost: that may not answer."""
        lost = None if self._entered_host is None else self._entered_index
        return sorted((index for index in self._addresses if index != self._pod.index), key=lambda index: index == lost)

    def _has_joined_new_store(self, index: int) -> bool:
        """Join the store of a pod; return false where none answers, or the store that this pod left."""
        with suppress(LostStore):
            store = self._reach_store(index)
            if store is None:
                return False
            self._launcher_store = store
            self._require_same_gang()
            is_left_store = self._opened_store.get("host") == self._entered_host is not None
            self._has_met_left_store = self._has_met_left_store or is_left_store
            if not is_left_store:
                self._enter_store(index)
                return True
        self.leave_store()
        return False

    def _reach_store(self, index: int) -> LauncherStore | None:
        pod, address = self._pod, self._addresses[index]
        if not is_listening(address, pod.rendezvous_port):
            return None
        return LauncherStore.join_store(address, pod.rendezvous_port, pod.launcher_key)

    def _host_next_store(self, waited: float) -> None:
        """Host the store after the one that this pod has lost, if it is its turn: a spare, or pod 0 with any place.

        A wrong guess harms nothing: no round begins before all others have left the lost store, too.
        """
        pod = self._pod
        may_host = pod.index in self._addresses and (self._place is None or pod.index == 0)
        if self._entered_host is None or not may_host:
            return
        turns = [index for index in self._addresses if index != self._entered_index or index == pod.index]
        if waited < turns.index(pod.index) * _TURN_SECONDS:
            return
        try:
            newest = pod.fence.newest_token_of(pod.attempt)
        except OSError as error:
            log.warning("the run folder cannot be read; another pod has to host the store", error=str(error))
            return
        # No round has begun: pods come when the cluster has room for them, and no spare is needed.
        if newest is None:
            return
        self._place = None
        self.host_store(newest.restart + 1)
        log.warning("this pod hosts the store now", instead_of=self._entered_index)

    def _has_begun_rounds(self) -> bool:
        try:
            return self._pod.fence.newest_token_of(self._pod.attempt) is not None
        except OSError:
            # The process that hosts the store says what is wrong with the folder.
            return False

    def _yield_to_other_store(self) -> None:
        """Give the store of this pod up where another has the gang, or comes before it: LostStore.

        Two pods may have begun at once, and a host that slept for long finds that the others went on without it.
        """
        now = time.monotonic()
        if not self._is_host or now - self._looked_for_others_at < _OTHER_STORE_SECONDS:
            return
        rank = (not self._has_opened_round, -self._first, self._pod.index)
        better = [index for index in self._other_hosts if self._store_rank(index) < rank]
        self._looked_for_others_at = time.monotonic()
        if better:
            self._is_host, self._place = False, None
            raise LostStore(f"the other pods meet in the store of pod {better[0]}")

    def _store_rank(self, index: int) -> tuple[bool, int, int]:
        """Return the rank of the store of a pod: rounds were opened, it is later, the pod comes before; last: none."""
        with suppress(LostPeers):
            store = self._reach_store(index)
            if store is not None:
                has_opened_round, first = store.get("opened") is not None, int(store.get("first round") or 0)
                store.close()
                return not has_opened_round, -first, index
        return True, 1, index

    def _require_same_gang(self) -> None:
        # Only its host may name the gang of the rendezvous: a late pod of an older attempt would turn this one away.
        while (stored_text := self._opened_store.get("gang")) is None:
            self._stop.raise_if_requested()
            self._stop.wait(_POLL_SECONDS)
        stored_gang = json.loads(stored_text)
        if stored_gang != self._gang_facts:
            raise LostPeers(f"pod {self._pod.index} belongs to {self._gang_facts}, but the rendezvous to {stored_gang}")

    def _enter_store(self, index: int) -> None:
        """Begin with the first round of the store of a pod. Counts of an earlier store mean nothing here."""
        self._entered_host, self._entered_index = self._opened_store.get("host"), index
        if self._place == 0 and not self._is_host:
            self._place = None
        self._next = self._first = int(self._opened_store.get("first round") or 0)
        self._published_checkpoints = 0
        self._heartbeats.forget_counts()
        self._has_sought_former_place, self._gathering_round = False, None
        self._opened_store.count_at_end(_departure_key(self.token))

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _open_for_ranks(self, number: int, prepare: Callable[[int], int]) -> None:
        if not self._is_host:
            return
        port = prepare(number)
        self._has_opened_round = True
        self._opened_store.put_first("opened", self.token)
        # Before the other pods hear of the port: their ranks may connect at once.
        self._opened_store.reach_ranks(port)
        self._opened_store.put_first(_round_key(number, "ranks"), str(port))

    def _opened_round(self, number: int) -> Round | None:
        port_text = self._opened_store.get(_round_key(number, "ranks"))
        if port_text is None:
            return None
        master = self._opened_store.get(_round_key(number, "master"))
        if master is None:
            raise AssertionError(f"round {number} was opened before the pod of rank 0 arrived")
        if self._place is None:
            raise AssertionError(f"a spare without a place met others in round {number}")
        return Round(number, self._place, self._opened_store.reach_ranks(int(port_text)), master)

    def _read_ending(self, number: int) -> Ending | None:
        text = self._opened_store.get(_round_key(number, "end"))
        return None if text is None else Ending.model_validate_json(text)

    def _end_silent_round(self, number: int) -> Ending | None:
        loss = self._heartbeats.find_lost_pod(self._opened_store, number)
        if loss is None:
            return None
        index, message = loss
        origin = FailureOrigin(self._pod.index, self.token)
        return self.end_round(number, ending_without_pod(index, origin, message, self.ending_before(number)))

    @property
    def _opened_store(self) -> LauncherStore:
        if self._launcher_store is None:
            raise AssertionError("the rendezvous was used before it was opened")
        return self._launcher_store


class _PodHeartbeats:
    """Heartbeats of launchers. Each counts in the store; its host checks that the counts move, by its own clock."""

    def __init__(self, pod: TrainerPod, lost_seconds: float) -> None:
        self._pod, self.lost_seconds = pod, lost_seconds
        self._sent_at = 0.0
        self._checked_at = 0.0
        self._last_counts: dict[int, tuple[int, float]] = {}

    def forget_counts(self) -> None:
        """Forget the counts of the round before."""
        self._last_counts = {}

    def send(self, store: LauncherStore, counter: str) -> None:
        """Count once more, when it is time."""
        if time.monotonic() - self._sent_at >= _HEARTBEAT_SECONDS:
            store.add_to_counter(counter)
            self._sent_at = time.monotonic()

    def find_lost_pod(self, store: LauncherStore, number: int) -> tuple[int, str] | None:
        """Return a pod that has left the store amid the round, or whose count has not moved for too long; the reason.

        Peers of a lost pod may wait in a collective for minutes: nothing else ends the round for them.
        """
        now = time.monotonic()
        if now - self._checked_at < _HEARTBEAT_SECONDS:
            return None
        self._checked_at = now
        for index in range(1, self._pod.nodes):
            if _has_left_store(store, number, index):
                return index, f"pod {index} has left the rendezvous"
            count = store.add_to_counter(_round_key(number, f"pulse/{index}"), 0)
            before, since = self._last_counts.get(index, (-1, now))
            if count != before:
                self._last_counts[index] = (count, now)
            elif now - since >= self.lost_seconds:
                return index, f"pod {index} has not been heard for {self.lost_seconds:.0f} s"
        return None


def _has_left_store(store: LauncherStore, number: int, index: int) -> bool:
    """Return whether the connection of a pod has ended whose ranks had not ended well."""
    token = store.get(_round_key(number, f"arrived/{index}"))
    has_left = token is not None and store.add_to_counter(_departure_key(token), 0) > 0
    return has_left and store.get(_round_key(number, f"done/{index}")) is None


def _token_host(token: str) -> str:
    return token.partition("/")[0]


def _departure_key(token: str) -> str:
    return f"departed/{token}"


def _round_key(number: int, entry: str) -> str:
    return f"round/{number}/{entry}"
