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

from cluster.nodes.training import ENDS, Run, SubmittedJob
from cluster.nodes.watch_recorder import WatchedKind, WatchEvent, WatchRecorder
from cluster.waiting import TooLateError, until

Found = TypeVar("Found")


# --- what a job writes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One line of the step log; `start` is how the ranks came to it, in the first line after a start."""

    step: int
    loss: float
    time: float
    seconds: float
    claim: tuple[int, int]
    start: Mapping[str, float] | None


def _parse_logged_step(record: Mapping[str, Any]) -> LoggedStep:
    names = ("endingSeconds", "importSeconds", "meetingSeconds", "joiningSeconds", "loadingSeconds")
    start = {name: record[name] for name in names} if names[0] in record else None
    claim = (record["attempt"], record["restart"])
    return LoggedStep(record["step"], record["loss"], record["time"], record["seconds"], claim, start)


# --- who is there -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GangPod:
    """One pod of the gang, and its processes as the machine numbers them."""

    name: str
    uid: str
    node: str
    launcher: int
    rank: int | None


def find_gang_pods(job: SubmittedJob) -> dict[int, GangPod]:
    """The pods of a job that run, by index."""
    return {_pod_index(pod): member for pod in job.list_pods() if (member := _find_gang_pod(job, pod))}


def _find_gang_pod(job: SubmittedJob, pod: Any) -> GangPod | None:
    metadata = pod["metadata"]
    if pod["status"]["phase"] != "Running" or "deletionTimestamp" in metadata:
        return None
    node = pod["spec"]["nodeName"]
    leaders = _find_session_leaders(job.nodes.nodes[node].pids(metadata["uid"]))
    if 1 not in leaders:
        return None
    ranks = [pid for inside, pid in leaders.items() if inside != 1 and _is_rank(pid)]
    return GangPod(metadata["name"], metadata["uid"], node, leaders[1], ranks[0] if ranks else None)


@dataclass(frozen=True, slots=True)
class TargetJob:
    """A job in the cluster whose pods hold one rank each."""

    job: SubmittedJob
    recorder: WatchRecorder
    # What it writes, as the machine sees it.
    run: Run

    def read_steps(self) -> list[LoggedStep]:
        """Its step log."""
        return [_parse_logged_step(record) for record in self.run.read_step_log()]

    def await_checkpoint(self, step: int) -> Path:
        """A committed checkpoint of that step or a later one."""

        def find_committed() -> Path | None:
            return next((path for number, path in self.run.checkpoints().items() if number >= step), None)

        return self.await_result(find_committed, f"a checkpoint of step {step}")

    def await_risk(self, checkpoint: int, steps: int) -> None:
        """That many steps after a checkpoint, that step's or a later one, there is something to lose."""
        self.await_checkpoint(checkpoint)
        target_step = max(self.run.checkpoints()) + steps

        def find_reached_line() -> LoggedStep | None:
            last = self.read_steps()[-1]
            return last if last.step >= target_step else None

        self.await_result(find_reached_line, f"step {target_step}")

    def await_start(self, restart: int) -> None:
        """Ranks of that start have done a step. Asks the volume alone."""

        def has_stepped() -> bool:
            return any(line.claim[1] >= restart for line in self.read_steps())

        until(has_stepped, waiting_for=f"restart {restart}")

    def find_gang_pods(self) -> dict[int, GangPod]:
        """The pods that run, by index."""
        return find_gang_pods(self.job)

    def await_gang_pods(self, count: int) -> dict[int, GangPod]:
        """Return the pods that have their rank, once as many have one."""

        def find_full_gang() -> dict[int, GangPod] | None:
            try:
                gang = self.find_gang_pods()
            except (OSError, http.client.HTTPException):
                # Tests take the API server away.
                return None
            with_rank = {index: member for index, member in gang.items() if member.rank}
            return with_rank if len(with_rank) == count else None

        return self.await_result(find_full_gang, f"{count} pods with their ranks")

    def delete(self) -> None:
        """Delete it; its volume goes with it."""
        self.job.nodes.plane.kubectl("delete", "moetrainingjob", self.job.name, f"--namespace={self.job.namespace}")

    def await_result(self, find: Callable[[], Found | None], description: str) -> Found:
        """Return what is looked for, once it is there. A job that has ended will never have it."""

        def find_or_fail() -> Found | None:
            # Asked first: what comes before the end is there when the end is.
            has_ended = self._has_ended()
            result = find()
            if result is None and has_ended:
                raise TooLateError(f"the job has ended before {description}: {self.job.describe()}")
            return result

        result = until(find_or_fail, waiting_for=lambda: f"{description}: {self.job.describe()}")
        assert result is not None
        return result

    def _has_ended(self) -> bool:
        try:
            return self.job.phase in ENDS
        except (OSError, http.client.HTTPException):
            # Tests take the API server away.
            return False


def await_target_job(job: SubmittedJob, recorder: WatchRecorder) -> TargetJob:
    """A job that was just submitted, as soon as it has a volume."""
    claims, claim = f"/api/v1/namespaces/{job.namespace}/persistentvolumeclaims", f"{job.name}-storage"

    def is_bound() -> bool:
        items = job.nodes.plane.api.get(claims)["items"]
        return any(item["metadata"]["name"] == claim and item["status"].get("phase") == "Bound" for item in items)

    until(is_bound, waiting_for=f"a volume for {claim}")
    return TargetJob(job, recorder, Run(job.nodes.storage.volume_path(job.namespace, claim) / job.name))


def _pod_index(pod: Any) -> int:
    return int(pod["metadata"]["labels"]["moejob.dev/index"])


def _find_session_leaders(pids: set[int]) -> dict[int, int]:
    """The processes of a pod that lead a session, by number inside: the launcher is 1; ranks lead one, among others."""
    leaders = {}
    for pid in pids:
        status = _read_process_status(pid)
        inside = status.get("NSpid", "").split()[-1:]
        if (
            inside == status.get("NSsid", "").split()[-1:]
            and inside
            and status.get("Name") != "pause"
            and status["State"][0] != "Z"
        ):
            leaders[int(inside[0])] = pid
    return leaders


def _is_rank(pid: int) -> bool:
    """Return whether the leader of a session is a rank.

    Ranks and the store where they meet come from the fork server, which is of the launcher's session; processes that
    compute rewards come from a rank. The store writes where its parent does.
    """
    parent = _read_process_status(pid).get("PPid", "")
    if _read_process_status(parent).get("NSsid", "").split()[-1:] != ["1"]:
        return False
    try:
        return Path(f"/proc/{pid}/fd/1").readlink() != Path(f"/proc/{parent}/fd/1").readlink()
    except OSError:
        return False


def _read_process_status(pid: int | str) -> dict[str, str]:
    """Return what the kernel says of a process; nothing once it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


# --- what came of it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutageParts:
    """The seconds from the fault to the first step after it, by part."""

    detect: float
    decide: float
    schedule: float
    start: float
    imports: float
    load: float
    step: float

    @property
    def total_seconds(self) -> float:
        """All of them."""
        return self.detect + self.decide + self.schedule + self.start + self.imports + self.load + self.step


@dataclass(frozen=True, slots=True)
class Recovery:
    """From a fault to the first step after it."""

    fault_at: float
    last_before: LoggedStep
    first_after: LoggedStep
    newest_checkpoint: int
    before: Mapping[int, GangPod]
    after: Mapping[int, GangPod]
    split: OutageParts

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


def measure_recovery(target: TargetJob, fault: Callable[[Mapping[int, GangPod]], object]) -> Recovery:
    """Return the outage after a fault of a job's pods, as soon as ranks of another start have done a step."""
    before, newest = target.find_gang_pods(), max(target.run.checkpoints())
    old = target.read_steps()[-1].claim
    fault_at = time.time()
    fault(before)

    def find_first_new_line() -> LoggedStep | None:
        return next((line for line in target.read_steps() if line.claim > old and line.start is not None), None)

    first = target.await_result(find_first_new_line, "a step after the fault")
    last = max((line for line in target.read_steps() if line.claim <= old), key=lambda line: line.step)
    after = target.await_gang_pods(sum(member.rank is not None for member in before.values()))
    split = split_outage(fault_at, first, _new_uids(before, after), target.recorder)
    return Recovery(fault_at, last, first, newest, before, after, split)


def _new_uids(before: Mapping[int, GangPod], after: Mapping[int, GangPod]) -> set[str]:
    return {member.uid for index, member in after.items() if before[index].uid != member.uid}


def split_outage(fault_at: float, first: LoggedStep, new_uids: set[str], recorder: WatchRecorder) -> OutageParts:
    """Backwards from the first step, which says how its ranks came to it; what is before that, others have heard."""
    if first.start is None:
        raise ValueError(f"the line of step {first.step} does not say how its ranks started")
    start = first.start
    step_began_at = first.time - first.seconds
    ranks_met_at = step_began_at - start["loadingSeconds"] - start["joiningSeconds"]
    load = start["loadingSeconds"] + start["joiningSeconds"]
    if not new_uids:
        known_at = ranks_met_at - start["meetingSeconds"] - start["endingSeconds"]
        return OutageParts(known_at - fault_at, ranks_met_at - known_at, 0.0, 0.0, 0.0, load, first.seconds)
    launched_at = ranks_met_at - start["meetingSeconds"] - start["importSeconds"]
    created = max(_first_report(recorder, uid, lambda _: True) for uid in new_uids)
    scheduled = max(_first_report(recorder, uid, lambda event: event.body["spec"].get("nodeName")) for uid in new_uids)
    known_at = _detection_time(fault_at, created, recorder)
    return OutageParts(
        detect=known_at - fault_at,
        decide=created - known_at,
        schedule=scheduled - created,
        start=launched_at - scheduled,
        imports=start["importSeconds"],
        load=start["meetingSeconds"] + load,
        step=first.seconds,
    )


def _first_report(recorder: WatchRecorder, uid: str, holds: Any) -> float:
    reported_at = recorder.first_time(WatchedKind.POD, lambda event: event.uid == uid and holds(event))
    if reported_at is None:
        raise LookupError(f"nothing was heard of pod {uid}")
    return reported_at


def _detection_time(fault_at: float, created: float, recorder: WatchRecorder) -> float:
    """Return when the cluster first said that something was wrong: a pod that ends, a node that is lost."""
    signs: Sequence[float | None] = (
        recorder.first_time(WatchedKind.POD, _is_ending, fault_at),
        recorder.first_time(WatchedKind.NODE, _is_lost, fault_at),
    )
    return min((sign for sign in signs if sign is not None and sign < created), default=created)


def _is_ending(event: WatchEvent) -> bool:
    ended = event.body["status"].get("phase") in ("Failed", "Succeeded")
    return event.is_gone or ended or "deletionTimestamp" in event.body["metadata"]


def _is_lost(event: WatchEvent) -> bool:
    conditions = event.body["status"].get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] != "True" for condition in conditions)
