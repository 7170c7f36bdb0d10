"""Speed and cost of the operator beside its peers, and a search for leaks.

    [JOBSET_SRC=CHECKOUT] PYTHONPATH=tests python -m benchmarks.operator [--quick | --all] [--only PART]

All contenders stand on one control plane and are measured in turn, so that a busy machine is busy for all of them. What
takes seconds is measured in several runs, of which the page shows the median, the least and the most.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contest.arena import Arena, Burst, TooSlowError, arena, median, quantile
from benchmarks.contest.contenders import (
    OURS,
    RELEASED,
    UNLIMITED,
    Contender,
    define_pytorch_jobs,
    define_resource,
    kubeflow,
    ours,
)
from benchmarks.contest.job_sets import NAME as JOB_SET
from benchmarks.contest.job_sets import JobSetBuild, built_job_set, job_sets
from benchmarks.contest.trace import trace_jobs
from benchmarks.record import Better, Result, record
from cluster.binaries import KUBERNETES, find_or_build
from cluster.by_hand import say
from cluster.control_plane.components import Component
from cluster.control_plane.plane import PROGRAMS, ControlPlane, control_plane
from cluster.waiting import until

ROOT = Path(__file__).parent.parent
FLAGS: Mapping[Component, Mapping[str, object]] = {
    Component.API_SERVER: {"audit-policy-file": Path(__file__).parent / "contest" / "audit_policy.yaml"},
    # No pod answers. Of these addresses the kernel says so at once; others may keep one waiting, and
    # Endpoints may hold none of loopback.
    Component.KWOK: {"cidr": "239.192.0.1/14"},
}
BENCH = "operator"
GANG = 100
# Until memory that is used again and again is there, each cycle adds some.
SOAK_JOBS, SOAK_WARM_UP, SOAK_CYCLES, SOAK_POINTS = 50, 10, 10, 5
# Ours asks pods how they are when they have run for 5, 35 and 65 seconds: in between it only looks.
_UNTIL_UNASKED_SECONDS = 35
# Of one job no CPU is measured: nothing later than its pods is waited for.
_QUIET_AFTER_ONE_SECONDS = 0.3
_TRACED_JOBS = 40

# By the name of a contender, one number for each run.
Runs = Mapping[str, Sequence[float]]


class Part(StrEnum):
    """A part of the benchmark, on a control plane of its own."""

    PAIRS = "pairs"
    EIGHTS = "eights"
    THOUSANDS = "thousands"
    SOAK = "soak"
    TRACE = "trace"


# A trace is for people who look for the time: it measures nothing that is recorded.
RECORDED = tuple(part for part in Part if part is not Part.TRACE)


@dataclass(frozen=True, slots=True)
class Size:
    """The extent of a measurement: runs, single jobs in each, pods of each of a thousand jobs, and parts."""

    runs: int
    singles: int
    thousands: tuple[int, ...]
    parts: tuple[Part, ...]


QUICK = Size(1, 5, (), (Part.PAIRS, Part.EIGHTS))
USUAL, ALL = Size(5, 10, (2,), RECORDED), Size(5, 10, (2, 8), RECORDED)


@dataclass(frozen=True, slots=True)
class Peers:
    """The programs of all, and JobSet where its source is."""

    programs: Mapping[str, Path]
    job_set: JobSetBuild | None


Work = Callable[[Path, Peers], Coroutine[Any, Any, list[Result]]]


def main() -> None:
    """Measure everything and write the page."""
    asked = _arguments()
    size = QUICK if asked.quick else ALL if asked.all else USUAL
    parts = size.parts if asked.only is None else (Part(asked.only),)
    peers = Peers(find_or_build((*PROGRAMS, "training-operator"), say), _job_set())
    loads = [os.getloadavg()[0]]
    results: list[Result] = []
    try:
        for part in parts:
            results += measure_part(part, peers, size)
            loads.append(os.getloadavg()[0])
    except KeyboardInterrupt:
        say("interrupted: parts that were measured until now are recorded, if any")
    load = f"load average {min(loads):.1f} to {max(loads):.1f}"
    if results and asked.only is None and not asked.quick:
        beside = "" if peers.job_set is None else f", {JOB_SET} {peers.job_set.version}"
        record(results, ["kubernetes", "aiohttp", "pydantic"], f"Kubernetes {KUBERNETES.version}{beside}, {load}")
    say(load)


def measure_part(part: Part, peers: Peers, size: Size) -> list[Result]:
    """Measure one part, in folders of its own."""
    return [result for work in _works(part, size) for result in _in_folder(work, peers)]


def _works(part: Part, size: Size) -> list[Work]:
    match part:
        case Part.PAIRS:
            return [partial(pairs, size=size)]
        case Part.EIGHTS:
            return [partial(eights, size=size)]
        case Part.THOUSANDS:
            return [partial(thousand, pods=pods) for pods in size.thousands]
        case Part.SOAK:
            return [soak]
        case Part.TRACE:
            return [trace]


def _in_folder(work: Work, peers: Peers) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="moejob-bench-") as folder:
        return asyncio.run(work(Path(folder), peers))


def _job_set() -> JobSetBuild | None:
    source = os.environ.get("JOBSET_SRC")
    if not source:
        say(f"{JOB_SET} is left out: JOBSET_SRC names no checkout of it")
        return None
    return built_job_set(Path(source).resolve(), say)


# --- speed ------------------------------------------------------------------------------------------------------------


async def pairs(folder: Path, peers: Peers, size: Size) -> list[Result]:
    """Jobs of two pods at rest, one alone, a hundred; and a large gang."""
    async with contest(folder, peers, with_released=True) as (place, everybody):
        unlimited = _without_limits(everybody)
        return [
            *await at_rest(place, unlimited, size.runs),
            *await alone(place, everybody, 2, size),
            *await hundreds(place, everybody, 2, size.runs),
            *await large_gang(place, unlimited, size.runs),
        ]


async def eights(folder: Path, peers: Peers, size: Size) -> list[Result]:
    """Jobs of eight pods: one alone, a hundred."""
    async with contest(folder, peers) as (place, everybody):
        return [*await alone(place, everybody, 8, size), *await hundreds(place, everybody, 8, size.runs)]


async def thousand(folder: Path, peers: Peers, pods: int) -> list[Result]:
    """A thousand jobs at once, and what their operator has grown to. Once: it takes minutes for each contender."""
    bursts: dict[str, list[Burst]] = {}
    async with contest(folder, peers) as (place, everybody):
        for who in everybody:
            try:
                bursts[who.name] = [await place.burst(who, 1000, pods)]
            except TooSlowError as late:
                if who.name == OURS:
                    raise
                say(f"left out: {late}")
    resident = {name: [each[0].after.resident_mib] for name, each in bursts.items()}
    return [
        *_of_bursts(f"1000 jobs of {pods} pods", bursts, 7.0 if pods == 2 else None),
        *_rows(f"1000 jobs of {pods} pods, resident memory", "MiB", resident, 150.0),
    ]


async def alone(place: Arena, those: Sequence[Contender], pods: int, size: Size) -> list[Result]:
    """One job at a time."""
    for who in those:
        # The first of a process waits for its start: a lead, a certificate, caches.
        await place.burst(who, 1, pods)
    created: dict[str, list[list[float]]] = {who.name: [] for who in those}
    running: dict[str, list[list[float]]] = {who.name: [] for who in those}
    for _ in range(size.runs):
        for who in those:
            created[who.name].append([])
            running[who.name].append([])
        for _ in range(size.singles):
            for who in those:
                burst = await place.burst(who, 1, pods, _QUIET_AFTER_ONE_SECONDS)
                created[who.name][-1] += burst.story.seconds_until_created()
                running[who.name][-1] += burst.story.seconds_until_running()
    told = {name: runs for name, runs in created.items() if all(runs)}
    one = f"1 job of {pods} pods"
    return [
        *_rows(f"{one}, until all run, p50", "ms", _milliseconds(running, median)),
        *_rows(f"{one}, until all run, p99", "ms", _milliseconds(running, partial(quantile, share=0.99))),
        # From apply to pods; when they run is for kubelets, whose part kwok plays.
        *_rows(f"{one}, until all are created, p50", "ms", _milliseconds(told, median), 20.0),
    ]


def _milliseconds(
    runs: Mapping[str, Sequence[Sequence[float]]], number: Callable[[Sequence[float]], float]
) -> dict[str, list[float]]:
    return {name: [1000 * number(seconds) for seconds in each] for name, each in runs.items()}


async def hundreds(place: Arena, those: Sequence[Contender], pods: int, runs: int) -> list[Result]:
    """A hundred jobs at once; who is slow by a limit of its own is measured once."""
    bursts: dict[str, list[Burst]] = {who.name: [] for who in those}
    for run in range(runs):
        for who in those:
            if who.name != RELEASED or run == 0:
                bursts[who.name].append(await place.burst(who, 100, pods))
    for name, each in bursts.items():
        asked = ", ".join(f"{count} {what}" for what, count in each[-1].story.requests.most_common())
        say(f"{name} asks, for 100 jobs: {asked}")
    return _of_bursts(f"100 jobs of {pods} pods", bursts, None)


async def at_rest(place: Arena, those: Sequence[Contender], runs: int) -> list[Result]:
    """Looks at a hundred jobs of which nothing changed that an operator would care for."""
    bursts = [await place.burst(who, 100, 2) for who in those]
    await asyncio.sleep(_UNTIL_UNASKED_SECONDS)
    # Not in turn: ours comes first, before it asks its pods again.
    looks = {who.name: [await place.idle_looks(who, 100) for _ in range(runs)] for who in those}
    for who, burst in zip(those, bursts, strict=True):
        await place.delete(who, tuple(burst.story.asked_at))
    means = {name: [1000 * seen.mean for seen in each] for name, each in looks.items()}
    slowest = {name: [1000 * seen.quantile(0.99) for seen in each] for name, each in looks.items()}
    return [*_rows("look at a job at rest, mean", "ms", means), *_rows("look at a job at rest, p99", "ms", slowest)]


async def large_gang(place: Arena, those: Sequence[Contender], runs: int) -> list[Result]:
    """A gang whose pods are all taken away; another each time, for who restarts again waits longer."""
    seconds: dict[str, list[float]] = {who.name: [] for who in those}
    for _ in range(runs):
        for who in those:
            [name] = (await place.burst(who, 1, GANG)).story.asked_at
            seconds[who.name].append(await place.restart(who, name, GANG))
    return _rows(f"gang of {GANG} pods deleted, until {GANG} run again", "s", seconds)


async def trace(folder: Path, peers: Peers) -> list[Result]:
    """Every request and wait of single jobs of two pods, on a line each. Nothing of it is recorded."""
    async with contest(folder, peers, is_traced=True) as (place, everybody):
        for who in everybody:
            await place.burst(who, 1, 2)
        for who in everybody:
            for line in await trace_jobs(place, who, _TRACED_JOBS, 2):
                say(line)
    return []


def _of_bursts(what: str, bursts: Mapping[str, Sequence[Burst]], target_seconds: float | None) -> list[Result]:
    def runs_of(number: Callable[[Burst], float]) -> Runs:
        return {name: [number(burst) for burst in each] for name, each in bursts.items()}

    return [
        *_rows(f"{what}, in all", "s", runs_of(lambda burst: burst.story.seconds_in_all()), target_seconds),
        *_rows(f"{what}, until all run, p50", "s", runs_of(lambda burst: median(burst.story.seconds_until_running()))),
        *_rows(f"{what}, until all run, p99", "s", runs_of(lambda b: quantile(b.story.seconds_until_running(), 0.99))),
        *_rows(
            f"{what}, until all are created, p99",
            "s",
            {name: [quantile(c, 0.99) for c in each] for name, each in _creation_seconds(bursts).items()},
        ),
        *_rows(f"{what}, CPU of the operator a job", "ms", runs_of(lambda burst: burst.cpu_ms_per_job), 2.0),
        *_rows(
            f"{what}, CPU of operator and controller manager a job",
            "ms",
            runs_of(lambda burst: burst.whole_cpu_ms_per_job),
        ),
        *_rows(f"{what}, API requests a job", "", runs_of(lambda burst: burst.requests_per_job)),
        *_rows(f"{what}, status writes, most of a job", "", runs_of(lambda burst: burst.most_status_writes), 2.0),
    ]


def _creation_seconds(bursts: Mapping[str, Sequence[Burst]]) -> dict[str, list[list[float]]]:
    """Of each burst, how long each job took to have its pods; of those contenders whose pods say whose they are."""
    each = {name: [b.story.seconds_until_created() for b in those] for name, those in bursts.items()}
    return {name: those for name, those in each.items() if all(those)}


def _without_limits(those: Sequence[Contender]) -> tuple[Contender, ...]:
    """All but the one with its own limit, which takes minutes for what others do in seconds."""
    return tuple(who for who in those if who.name != RELEASED)


@asynccontextmanager
async def contest(
    folder: Path, peers: Peers, *, with_released: bool = False, is_traced: bool = False
) -> AsyncIterator[tuple[Arena, tuple[Contender, ...]]]:
    """A control plane with all contenders on it, ours first. A traced one of ours logs what it does."""
    with control_plane(folder, peers.programs, 1, FLAGS) as plane:
        async with arena(plane) as place:
            with ended_after(contenders(plane, peers, with_released=with_released, is_traced=is_traced)) as everybody:
                yield place, everybody


def contenders(plane: ControlPlane, peers: Peers, *, with_released: bool, is_traced: bool) -> tuple[Contender, ...]:
    """All that are measured, ours first."""
    mine = alone_on(plane, is_traced=is_traced)
    define_pytorch_jobs(plane)
    program = peers.programs["training-operator"]
    others: list[Contender] = []
    if peers.job_set is not None:
        others.append(job_sets(plane, peers.job_set, new_namespace(plane, "sets")))
    # Last: a contender after one that is too slow would wait for its work.
    others.append(kubeflow(plane, program, UNLIMITED, new_namespace(plane, "free")))
    if with_released:
        others.append(kubeflow(plane, program, RELEASED, new_namespace(plane, "released")))
    return (mine, *others)


@contextmanager
def ended_after(those: tuple[Contender, ...]) -> Iterator[tuple[Contender, ...]]:
    """End their processes: those of the next control plane are to have the machine for themselves."""
    try:
        yield those
    finally:
        for who in those:
            who.process.stop()


def alone_on(plane: ControlPlane, *, is_traced: bool = False) -> Contender:
    """Ours."""
    define_resource(plane, ROOT / "crds" / "moetrainingjobs.yaml", "moetrainingjobs")
    plane.kubectl("apply", "-f", ROOT / "crds" / "rules.yaml")
    return ours(plane, new_namespace(plane, "ours"), is_traced=is_traced)


def new_namespace(plane: ControlPlane, name: str) -> str:
    """One in which pods can be created."""
    plane.kubectl("create", "namespace", name)
    until(partial(plane.has_service_account, name), seconds=60, waiting_for=f"an account in {name}")
    return name


# --- leaks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    resident_mib: float
    descriptors: int
    tasks: float


async def soak(folder: Path, peers: Peers) -> list[Result]:
    """Half of the jobs come and go, the other half stays and is never touched."""
    with control_plane(folder, peers.programs, 1, FLAGS) as plane:
        async with arena(plane) as place:
            with ended_after((alone_on(plane),)) as (mine,):
                await place.burst(mine, SOAK_JOBS, 2)
                stay = await place.pods(mine)
                await _soak_jobs(place, mine, SOAK_WARM_UP)
                held = [await _soak_jobs(place, mine, SOAK_CYCLES // SOAK_POINTS) for _ in range(SOAK_POINTS)]
                first, last, replaced = held[0], held[-1], len(stay - await place.pods(mine))
                what = f"soak, {SOAK_JOBS} to {2 * SOAK_JOBS} jobs and back, {SOAK_CYCLES} cycles:"
                # What is free comes and goes by megabytes; what leaks is never free again.
                halves = (held[: SOAK_POINTS // 2], held[SOAK_POINTS // 2 :])
                least, later = (min(now.resident_mib for now in half) for half in halves)
                grown = {
                    f"{what} resident memory grown": (last.resident_mib - first.resident_mib, "MiB", None),
                    f"{what} its least in the second half above its least in the first": (later - least, "MiB", 2),
                    f"{what} file descriptors grown": (last.descriptors - first.descriptors, "", 0),
                    f"{what} tasks grown": (last.tasks - first.tasks, "", 0),
                    f"{what} pods of the jobs that stay that were replaced": (replaced, "", 0),
                }
                for case, (value, unit, _) in grown.items():
                    say(f"{case:90} {value:10.4g} {unit}")
                return [Result(BENCH, case, value, unit, Better.LOWER, to) for case, (value, unit, to) in grown.items()]


async def _soak_jobs(place: Arena, mine: Contender, cycles: int) -> _Held:
    """Half of the jobs created and deleted so often, and what is held once idle connections have been closed."""
    for _ in range(cycles):
        burst = await place.burst(mine, SOAK_JOBS, 2)
        await place.delete(mine, tuple(burst.story.asked_at))
    rest, tasks = await place.at_rest(mine, "moejob_tasks")
    return _Held(rest.resident_mib, rest.descriptors, tasks)


# --- results ----------------------------------------------------------------------------------------------------------


def _rows(case: str, unit: str, runs: Runs, target: float | None = None) -> list[Result]:
    """Ours beside each peer: medians of the runs; all are better when lower."""
    mine = runs[OURS]
    ours_of = partial(Result, BENCH, case, median(mine), unit, Better.LOWER, target, spread=_spread(mine))
    for name, each in runs.items():
        ends = "" if (spread := _spread(each)) is None else f"({spread[0]:.4g} to {spread[1]:.4g})"
        say(f"{case:60} {median(each):10.4g} {unit:4} {name} {ends}".rstrip())
    peers = {name: each for name, each in runs.items() if name != OURS}
    return [ours_of(peer=name, peer_value=median(each), peer_spread=_spread(each)) for name, each in peers.items()] or [
        ours_of()
    ]


def _spread(runs: Sequence[float]) -> tuple[float, float] | None:
    """Return the least and the most of several runs that differ."""
    return (min(runs), max(runs)) if min(runs) < max(runs) else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="one run, no thousand jobs and no soak; not recorded")
    sizes.add_argument("--all", action="store_true", help="also a thousand jobs of eight pods")
    parser.add_argument("--only", choices=list(Part), help="one part, which is not recorded; trace shows single jobs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
