"""Single jobs as a trace: each request and each wait of their way on a line, with when it began and how long it took.

Two clocks of one machine: the API server's audit log says when each request came and was answered, and the log of our
operator when it heard of the job, began to reconcile, and had its answers. What lies between two lines is a wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from benchmarks.contest.arena import Arena, median
from benchmarks.contest.audit import KUBELETS, PERSON, Tail
from benchmarks.contest.contenders import Contender

_QUIET_SECONDS = 0.3
_WHO = {PERSON: "person", KUBELETS: "kubelet"}


@dataclass(frozen=True, slots=True)
class Line:
    """One step: what it is called in every job, when it began and how long it took, in milliseconds."""

    what: str
    at: float
    took: float | None = None


async def trace_jobs(place: Arena, who: Contender, jobs: int, pods: int) -> list[str]:
    """Create jobs one after the other. Returns the lines of all of them together, and those of the middle one."""
    audit, log = Tail(place.plane.audit_log), Tail(who.process.log)
    list(audit.entries()), list(_log_entries(log))
    lives: list[tuple[float, list[Line]]] = []
    for _ in range(jobs):
        burst = await place.burst(who, 1, pods, _QUIET_SECONDS)
        [started] = burst.story.asked_at.values()
        lines = [*_requests(audit.entries(), who), *_of_operator(_log_entries(log))]
        [seconds] = burst.story.seconds_until_running()
        lives.append((1000 * seconds, sorted(_on_clock_of_job(started, lines), key=lambda line: line.at)))
    middle = sorted(lives, key=lambda life: life[0])[len(lives) // 2]
    return [
        "",
        f"{who.name}: {jobs} jobs of {pods} pods, one after the other; began (least to most) and took, in ms",
        *_common_steps([lines for _, lines in lives]),
        "",
        f"{who.name}: the middle one, which ran after {middle[0]:.1f} ms",
        *(_step_text(line.what, f"{line.at:8.1f}", line.took) for line in middle[1]),
    ]


def _common_steps(lives: Sequence[Sequence[Line]]) -> Iterator[str]:
    """Yield a line for each step that most of the jobs have, in the order of their medians."""
    steps: dict[str, list[Line]] = {}
    for lines in lives:
        for line in lines:
            steps.setdefault(line.what, []).append(line)
    usual = [(what, found) for what, found in steps.items() if 2 * len(found) > len(lives)]
    for what, found in sorted(usual, key=lambda step: median([line.at for line in step[1]])):
        begun = [line.at for line in found]
        took = [line.took for line in found if line.took is not None]
        when = f"{median(begun):8.1f} ({min(begun):6.1f} to {max(begun):6.1f})"
        yield _step_text(what, when, median(took) if took else None)


def _step_text(what: str, when: str, took: float | None) -> str:
    return f"{when} {'' if took is None else f'{took:.1f}':>7}  {what}"


def _requests(entries: Iterable[dict[str, Any]], who: Contender) -> Iterator[Line]:
    for entry in entries:
        about = entry.get("objectRef") or {}
        if about.get("namespace") != who.namespace or entry["verb"] == "watch":
            continue
        began, ended = (_seconds(entry[name]) for name in ("requestReceivedTimestamp", "stageTimestamp"))
        resource = "/".join(filter(None, (about.get("resource"), about.get("subresource"))))
        user = entry["user"]["username"]
        by = who.name if user == who.user else _WHO.get(user, user.rpartition(":")[2])
        yield Line(f"{by}: {entry['verb']} {resource}", began, 1000 * (ended - began))


def _log_entries(log: Tail) -> Iterator[dict[str, Any]]:
    """Yield what an operator of ours logs; the lines of others are no JSON."""
    try:
        yield from log.entries()
    except ValueError:
        return


def _of_operator(lines: Iterable[dict[str, Any]]) -> Iterator[Line]:
    """Yield what happens in our operator, whose lines are written when something has ended."""
    for line in lines:
        at, took = _seconds(line["time"]), line.get("seconds") or 0.0
        match line["event"]:
            case "request":
                what = f"  answered {line['verb']} {line['resource']}"
                yield Line(what, at - took, 1000 * took)
            case "event of a job":
                yield Line(f"  heard of the job{'' if line['is_news'] else ', which is no news'}", at)
            case "reconcile begins":
                yield Line("  reconcile begins", at)
            case "reconcile ends":
                yield Line("  reconcile", at - took, 1000 * took)
            case _:
                continue


def _on_clock_of_job(started: float, lines: Iterable[Line]) -> Iterator[Line]:
    """Yield them on the clock of a job that was asked for at a time, those of one name numbered."""
    count: Counter[str] = Counter()
    for line in sorted(lines, key=lambda line: line.at):
        count[line.what] += 1
        number = "" if count[line.what] == 1 else f" {count[line.what]}"
        yield Line(f"{line.what}{number}", 1000 * (line.at - started), line.took)


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
