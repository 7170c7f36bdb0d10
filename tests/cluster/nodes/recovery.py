"""A job that something is done to: its pods and ranks before and after, what was lost, and where the time went.

Times are those of one machine: all nodes here share a clock, which is what makes this simple.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cluster.nodes.training import ENDS, Run, Submitted
from cluster.nodes.watch_recorder import Kind, Witness, Word
from cluster.waiting import TooLateError, until

Found = TypeVar("Found")


# --- what a job writes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the step log; `start` is how the ranks came to it, in the first line after a start."""

    step: int
    loss: float
    time: float
    seconds: float
    claim: tuple[int, int]
    start: Mapping[str, float] | None


def _line(told: Mapping[str, Any]) -> Line:
    names = ("endingSeconds", "importSeconds", "meetingSeconds", "joiningSeconds", "loadingSeconds")
    start = {name: told[name] for name in names} if names[0] in told else None
    claim = (told["attempt"], told["restart"])
    return Line(told["step"], told["loss"], told["time"], told["seconds"], claim, start)


# --- who is there -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """One pod of the gang, and its processes as the machine numbers them."""

    name: str
    uid: str
    node: str
    launcher: int
    rank: int | None


def members(job: Submitted) -> dict[int, Member]:
    """The pods of a job that run, by index."""
    return {_index(pod): member for pod in job.pods_read() if (member := _member(job, pod))}


def _member(job: Submitted, pod: Any) -> Member | None:
    about = pod["metadata"]
    if pod["status"]["phase"] != "Running" or "deletionTimestamp" in about:
        return None
    node = pod["spec"]["nodeName"]
    leaders = _leaders(job.nodes.nodes[node].pids(about["uid"]))
    if 1 not in leaders:
        return None
    ranks = [pid for inside, pid in leaders.items() if inside != 1]
    return Member(about["name"], about["uid"], node, leaders[1], ranks[0] if ranks else None)


@dataclass(frozen=True, slots=True)
class Patient:
    """A job in the cluster whose pods hold one rank each."""

    job: Submitted
    witness: Witness
    # What it writes, as the machine sees it.
    run: Run

    def lines(self) -> list[Line]:
        """Its step log."""
        return [_line(told) for told in self.run.told()]

    def await_checkpoint(self, step: int) -> Path:
        """A committed checkpoint of that step or a later one."""

        def committed() -> Path | None:
            return next((path for number, path in self.run.checkpoints().items() if number >= step), None)

        return self.awaited(committed, f"a checkpoint of step {step}")

    def await_risk(self, checkpoint: int, steps: int) -> None:
        """That many steps after a checkpoint, that step's or a later one, there is something to lose."""
        self.await_checkpoint(checkpoint)
        wanted = max(self.run.checkpoints()) + steps

        def reached() -> Line | None:
            last = self.lines()[-1]
            return last if last.step >= wanted else None

        self.awaited(reached, f"step {wanted}")

    def await_start(self, restart: int) -> None:
        """Ranks of that start have done a step. Asks the volume alone."""

        def has_stepped() -> bool:
            return any(line.claim[1] >= restart for line in self.lines())

        until(has_stepped, waiting_for=f"restart {restart}")

    def members(self) -> dict[int, Member]:
        """The pods that run, by index."""
        return members(self.job)

    def all_members(self, count: int) -> dict[int, Member]:
        """The same, once that many pods have their rank."""

        def whole() -> dict[int, Member] | None:
            try:
                found = self.members()
            except (OSError, http.client.HTTPException):
                # Tests take the API server away.
                return None
            return found if len(found) == count and all(member.rank for member in found.values()) else None

        return self.awaited(whole, f"{count} pods with their ranks")

    def dismiss(self) -> None:
        """Delete it; its volume goes with it."""
        self.job.nodes.plane.kubectl("delete", "moetrainingjob", self.job.name, f"--namespace={self.job.namespace}")

    def awaited(self, find: Callable[[], Found | None], what: str) -> Found:
        """Return what is looked for, once it is there. A job that has ended will never have it."""

        def look() -> Found | None:
            # Asked first: what comes before the end is there when the end is.
            has_ended = self._has_ended()
            found = find()
            if found is None and has_ended:
                raise TooLateError(f"the job has ended before {what}: {self.job.told()}")
            return found

        found = until(look, waiting_for=lambda: f"{what}: {self.job.told()}")
        assert found is not None
        return found

    def _has_ended(self) -> bool:
        try:
            return self.job.phase in ENDS
        except (OSError, http.client.HTTPException):
            # Tests take the API server away.
            return False


def patient(job: Submitted, witness: Witness) -> Patient:
    """A job that was just submitted, as soon as it has a volume."""
    claims, claim = f"/api/v1/namespaces/{job.namespace}/persistentvolumeclaims", f"{job.name}-storage"

    def is_bound() -> bool:
        found = job.nodes.plane.api.get(claims)["items"]
        return any(one["metadata"]["name"] == claim and one["status"].get("phase") == "Bound" for one in found)

    until(is_bound, waiting_for=f"a volume for {claim}")
    return Patient(job, witness, Run(job.nodes.storage.path(job.namespace, claim) / job.name))


def _index(pod: Any) -> int:
    return int(pod["metadata"]["labels"]["moejob.dev/index"])


def _leaders(pids: set[int]) -> dict[int, int]:
    """The processes of a pod that lead a session, by their number inside: the launcher is 1, each rank leads one."""
    leaders = {}
    for pid in pids:
        status = _status(pid)
        inside = status.get("NSpid", "").split()[-1:]
        if (
            inside == status.get("NSsid", "").split()[-1:]
            and inside
            and status.get("Name") != "pause"
            and status["State"][0] != "Z"
        ):
            leaders[int(inside[0])] = pid
    return leaders


def _status(pid: int) -> dict[str, str]:
    """Return what the kernel says of a process; nothing once it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


# --- what came of it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """The seconds from the fault to the first step after it, by part."""

    detect: float
    decide: float
    schedule: float
    start: float
    imports: float
    load: float
    step: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.detect + self.decide + self.schedule + self.start + self.imports + self.load + self.step


@dataclass(frozen=True, slots=True)
class Recovery:
    """From a fault to the first step after it."""

    fault_at: float
    last_before: Line
    first_after: Line
    newest_checkpoint: int
    before: Mapping[int, Member]
    after: Mapping[int, Member]
    split: Split

    @property
    def lost_steps(self) -> int:
        """Steps that were done again."""
        return self.last_before.step - (self.first_after.step - 1)

    @property
    def steps_at_risk(self) -> int:
        """Steps since the checkpoint that was the newest when it happened."""
        return self.last_before.step - self.newest_checkpoint

    @property
    def seconds(self) -> float:
        """From the fault to the end of the first step after it."""
        return self.first_after.time - self.fault_at

    @property
    def new_pods(self) -> set[int]:
        """Return which pods were replaced."""
        return {index for index, member in self.after.items() if self.before[index].uid != member.uid}

    @property
    def new_launchers(self) -> set[int]:
        """Return whose launcher is another process."""
        return {index for index, member in self.after.items() if self.before[index].launcher != member.launcher}

    @property
    def new_ranks(self) -> set[int]:
        """Return which ranks are other processes."""
        return {index for index, member in self.after.items() if self.before[index].rank != member.rank}


def recovery(patient: Patient, fault: Callable[[Mapping[int, Member]], object]) -> Recovery:
    """Return the outage after a fault of a job's pods, as soon as ranks of another start have done a step."""
    before, newest = patient.members(), max(patient.run.checkpoints())
    old = patient.lines()[-1].claim
    fault_at = time.time()
    fault(before)

    def restarted() -> Line | None:
        return next((line for line in patient.lines() if line.claim > old and line.start is not None), None)

    first = patient.awaited(restarted, "a step after the fault")
    last = max((line for line in patient.lines() if line.claim <= old), key=lambda line: line.step)
    after = patient.all_members(len(before))
    split = split_of(fault_at, first, _new(before, after), patient.witness)
    return Recovery(fault_at, last, first, newest, before, after, split)


def _new(before: Mapping[int, Member], after: Mapping[int, Member]) -> set[str]:
    return {member.uid for index, member in after.items() if before[index].uid != member.uid}


def split_of(fault_at: float, first: Line, new_uids: set[str], witness: Witness) -> Split:
    """Backwards from the first step, which says how its ranks came to it; what is before that, others have heard."""
    if first.start is None:
        raise ValueError(f"the line of step {first.step} does not say how its ranks started")
    part = first.start
    begun = first.time - first.seconds
    met = begun - part["loadingSeconds"] - part["joiningSeconds"]
    load = part["loadingSeconds"] + part["joiningSeconds"]
    if not new_uids:
        known = met - part["meetingSeconds"] - part["endingSeconds"]
        return Split(known - fault_at, met - known, 0.0, 0.0, 0.0, load, first.seconds)
    launched = met - part["meetingSeconds"] - part["importSeconds"]
    created = max(_first(witness, uid, lambda _: True) for uid in new_uids)
    scheduled = max(_first(witness, uid, lambda word: word.body["spec"].get("nodeName")) for uid in new_uids)
    known = _known(fault_at, created, witness)
    return Split(
        detect=known - fault_at,
        decide=created - known,
        schedule=scheduled - created,
        start=launched - scheduled,
        imports=part["importSeconds"],
        load=part["meetingSeconds"] + load,
        step=first.seconds,
    )


def _first(witness: Witness, uid: str, holds: Any) -> float:
    found = witness.first(Kind.POD, lambda word: word.uid == uid and holds(word))
    if found is None:
        raise LookupError(f"nothing was heard of pod {uid}")
    return found


def _known(fault_at: float, created: float, witness: Witness) -> float:
    """Return when the cluster first said that something was wrong: a pod that ends, a node that is lost."""
    signs: Sequence[float | None] = (
        witness.first(Kind.POD, _is_ending, fault_at),
        witness.first(Kind.NODE, _is_lost, fault_at),
    )
    return min((sign for sign in signs if sign is not None and sign < created), default=created)


def _is_ending(word: Word) -> bool:
    ended = word.body["status"].get("phase") in ("Failed", "Succeeded")
    return word.is_gone or ended or "deletionTimestamp" in word.body["metadata"]


def _is_lost(word: Word) -> bool:
    conditions = word.body["status"].get("conditions", ())
    return any(said["type"] == "Ready" and said["status"] != "True" for said in conditions)
