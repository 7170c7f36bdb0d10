"""The rendezvous of an attempt's launchers: round by round, all pods or none, in the order of their indices.

A round is one start of all ranks. It begins when every pod has arrived, and ends when a launcher writes its ending; all
meet again in the next one. A pod takes the place of its index, and no other. (torch's own rendezvous orders
agents by address as text, compares the clocks of machines and does not know which pod ended a round.) A launcher with
another attempt or size is turned away, and so is a process whose pod was replaced. Knows nothing of processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from moejob_trainer.launcher.ending import Ending, FailureOrigin, ending_without
from moejob_trainer.launcher.log import LauncherLog
from moejob_trainer.launcher.pod import TrainerPod
from moejob_trainer.launcher.stop import StopRequest
from moejob_trainer.launcher.store import LostPeers, Store, is_listening

log = LauncherLog()

_POLL_SECONDS = 0.2
_HEARTBEAT_SECONDS = 1.0
# Of pods that come back between two rounds, when no rank trains.
_RETURN_POLL_SECONDS = 0.02
_RETURN_SECONDS = 5.0
# The pause grows by this for each pod: pod 0 answers all pods, a few hundred times a second.
_POLL_SECONDS_PER_POD = 0.002


@dataclass(frozen=True, slots=True)
class Round:
    """One start of all ranks; `number` counts from 0 in each attempt.

    Ranks of this pod reach the store of the round at `port` of their loopback, whichever pod hosts it.
    """

    number: int
    port: int


def poll_seconds(nodes: int, least: float) -> float:
    """Return the pause between two looks at the store, which is longer the more pods look; pure."""
    return min(_POLL_SECONDS, max(least, _POLL_SECONDS_PER_POD * nodes))


class Rendezvous:
    """One launcher's part in the rounds of its attempt."""

    def __init__(self, pod: TrainerPod, stop: StopRequest, lost_seconds: float) -> None:
        self._pod, self._stop = pod, stop
        self.token = f"{pod.host}/{os.getpid()}/{os.urandom(4).hex()}"
        self._heartbeats = _PodHeartbeats(pod, lost_seconds)
        self._opened: Store | None = None
        self._next = 0
        self._published_checkpoints = 0

    def open(self) -> None:
        """Host the store, or wait for the pod that does: it may be scheduled long after this one."""
        pod = self._pod
        if pod.is_first:
            self._opened = Store.hosted(pod.listens_on, pod.rendezvous_port, pod.key)
        else:
            while not is_listening(pod.rendezvous_host, pod.rendezvous_port):
                self._stop.check()
                self._stop.wait(_POLL_SECONDS)
            self._opened = Store.joined(pod.rendezvous_host, pod.rendezvous_port, pod.key)
        self._require_same_gang()

    def gather(self, wait_seconds: float | None, prepare: Callable[[int], int]) -> Round | Ending:
        """Wait until all pods have arrived in the same round; pod 0 prepares it before anybody may start ranks.

        prepare: returns the port of a new store of the round's ranks, on this pod's loopback.
        An Ending when there will be no other round. The wait has no limit for the first time: pods come when the
        cluster has room for them.
        """
        began = time.monotonic()
        until = None if wait_seconds is None else began + wait_seconds
        while True:
            number = self._arrived()
            if isinstance(number, Ending):
                return number
            while self._ending(number) is None:
                if self._store.count(_name(number, "arrived"), 0) == self._pod.nodes:
                    self._open_for_ranks(number, prepare)
                    found = self._round(number)
                    if found is not None:
                        self._heartbeats.begin()
                        return found
                self._stop.check()
                if until is not None and time.monotonic() >= until:
                    raise LostPeers(f"{self._absent(number)} did not come back within {wait_seconds:.0f} s")
                is_return = wait_seconds is not None and time.monotonic() < began + _RETURN_SECONDS
                self._stop.wait(poll_seconds(self._pod.nodes, _RETURN_POLL_SECONDS) if is_return else _POLL_SECONDS)

    def ending(self, number: int) -> Ending | None:
        """Return the ending of a round, None while it runs. Sends this pod's heartbeat meanwhile."""
        self._heartbeats.send(self._store, number)
        found = self._ending(number)
        if found is None and self._pod.is_first:
            found = self._ending_by_silence(number)
        return found

    def end(self, number: int, ending: Ending) -> Ending:
        """End a round; return the ending that counts, which is another pod's when that came first."""
        return Ending.model_validate_json(self._store.put_first(_name(number, "end"), ending.model_dump_json()))

    def end_for_good(self, number: int, ending: Ending) -> None:
        """Publish a final ending though another launcher has ended the round."""
        while self.end(number, ending) != ending:
            number += 1

    def before(self, number: int) -> Ending | None:
        """Return the ending of the round before."""
        return self._ending(number - 1) if number else None

    def publish_checkpoint(self, step: int | None) -> None:
        """Publish the newest checkpoint to all pods; rank 0 and with it pod 0 knows it."""
        if step is not None and step >= self._published_checkpoints:
            # A counter of steps plus one, since it starts at 0 and step 0 is a step.
            self._published_checkpoints = self._store.count("checkpoint", step + 1 - self._published_checkpoints)

    def checkpoint(self) -> int | None:
        """Return the newest checkpoint that pod 0 has published."""
        known = self._store.count("checkpoint", 0)
        return known - 1 if known else None

    def done(self, number: int) -> None:
        """Say that the ranks of this pod have ended well."""
        self._store.count(_name(number, "done"))

    def all_done(self, number: int) -> bool:
        """Return whether the ranks of every pod have ended well."""
        return self._store.count(_name(number, "done"), 0) >= self._pod.nodes

    def leave(self, number: int, within_seconds: float) -> None:
        """Go. Pod 0 goes last: the others still have to read that all are done."""
        name = _name(number, "left")
        if not self._pod.is_first:
            # Pod 0 may be gone already: nothing is left to exchange.
            with suppress(LostPeers):
                self._store.count(name)
            return
        until = time.monotonic() + within_seconds
        while self._store.count(name, 0) < self._pod.nodes - 1 and time.monotonic() < until:
            self._stop.wait(_POLL_SECONDS)

    # --- arriving -----------------------------------------------------------------------------------------------------

    def _arrived(self) -> int | Ending:
        """Arrive in the first round that has not ended; its number, or the ending of the last one there is."""
        while True:
            last = self._pass_ended()
            if last is not None:
                return last
            number, name = self._next, _name(self._next, f"arrived/{self._pod.index}")
            holder = self._store.put_first(name, self.token)
            if holder == self.token:
                self._store.count(_name(number, "arrived"))
                log.info("arrived", round=number, index=self._pod.index)
                return number
            # An older process of this pod has arrived here: this one ends that round, and joins the next.
            origin, message = FailureOrigin(self._pod.index, self.token), f"pod {self._pod.index} has been replaced"
            ended = ending_without(self._pod.index, origin, message, self.before(number))
            self.end(number, ended.model_copy(update={"pod_was_taken_over": True}))

    def _pass_ended(self) -> Ending | None:
        while (ended := self._ending(self._next)) is not None:
            is_replaced = ended.pod_was_taken_over and ended.pod == self._pod.index and ended.token != self.token
            if is_replaced and self._was_in(self._next):
                raise LostPeers(f"another process has taken the place of pod {self._pod.index}: {ended.token}")
            if ended.is_final:
                return ended
            self._next += 1
        return None

    def _was_in(self, number: int) -> bool:
        return self._store.get(_name(number, f"arrived/{self._pod.index}")) == self.token

    def _absent(self, number: int) -> str:
        indices = range(self._pod.nodes)
        absent = [str(index) for index in indices if self._store.get(_name(number, f"arrived/{index}")) is None]
        return f"pods {', '.join(absent)}" if len(absent) > 1 else f"pod {''.join(absent)}"

    def _require_same_gang(self) -> None:
        pod = self._pod
        mine = {"uid": pod.uid, "attempt": pod.attempt, "nodes": pod.nodes, "ranksPerNode": pod.ranks_per_node}
        if pod.is_first:
            # Only pod 0 may name the gang of the rendezvous: a late pod of an older attempt would turn this one away.
            self._store.put_first("gang", json.dumps(mine))
        while (theirs_text := self._store.get("gang")) is None:
            self._stop.check()
            self._stop.wait(_POLL_SECONDS)
        theirs = json.loads(theirs_text)
        if theirs != mine:
            raise LostPeers(f"pod {pod.index} belongs to {mine}, but the rendezvous to {theirs}")

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _open_for_ranks(self, number: int, prepare: Callable[[int], int]) -> None:
        if not self._pod.is_first:
            return
        port = prepare(number)
        # Before the other pods hear of the port: their ranks may connect at once.
        self._store.reach_ranks(port)
        self._store.put_first(_name(number, "ranks"), str(port))

    def _round(self, number: int) -> Round | None:
        place = self._store.get(_name(number, "ranks"))
        if place is None:
            return None
        return Round(number, self._store.reach_ranks(int(place)))

    def _ending(self, number: int) -> Ending | None:
        text = self._store.get(_name(number, "end"))
        return None if text is None else Ending.model_validate_json(text)

    def _ending_by_silence(self, number: int) -> Ending | None:
        silent = self._heartbeats.silent(self._store, number)
        if silent is None:
            return None
        origin = FailureOrigin(self._pod.index, self.token)
        message = f"pod {silent} has not been heard for {self._heartbeats.lost_seconds:.0f} s"
        return self.end(number, ending_without(silent, origin, message, self.before(number)))

    @property
    def _store(self) -> Store:
        if self._opened is None:
            raise AssertionError("the rendezvous was used before it was opened")
        return self._opened


class _PodHeartbeats:
    """Heartbeats of launchers. Each counts in the store; pod 0 checks that the counts move, by its own clock."""

    def __init__(self, pod: TrainerPod, lost_seconds: float) -> None:
        self._pod, self.lost_seconds = pod, lost_seconds
        self._sent_at = 0.0
        self._checked_at = 0.0
        self._moved: dict[int, tuple[int, float]] = {}

    def begin(self) -> None:
        """Forget the counts of the round before."""
        self._moved = {}

    def send(self, store: Store, number: int) -> None:
        """Count once more, when it is time."""
        if time.monotonic() - self._sent_at >= _HEARTBEAT_SECONDS:
            store.count(_name(number, f"pulse/{self._pod.index}"))
            self._sent_at = time.monotonic()

    def silent(self, store: Store, number: int) -> int | None:
        """A pod whose count has not moved for too long."""
        now = time.monotonic()
        if now - self._checked_at < _HEARTBEAT_SECONDS:
            return None
        self._checked_at = now
        for index in range(1, self._pod.nodes):
            count = store.count(_name(number, f"pulse/{index}"), 0)
            before, since = self._moved.get(index, (-1, now))
            if count != before:
                self._moved[index] = (count, now)
            elif now - since >= self.lost_seconds:
                return index
        return None


def _name(number: int, what: str) -> str:
    return f"round/{number}/{what}"
