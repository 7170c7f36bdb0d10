"""How fast and at what cost the operator makes jobs run, beside its peers; and whether it leaks.

    [JOBSET_BIN=MANAGER] PYTHONPATH=tests python -m benchmarks.operator [--quick | --all] [--only speed|soak]

All contenders stand on one control plane and are measured in turn, so that a busy machine is busy for all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.contest.arena import Arena, Burst, TooSlowError, arena, median, quantile
from benchmarks.contest.contenders import (
    OURS,
    RELEASED,
    UNLIMITED,
    Contender,
    define_pytorch_jobs,
    kubeflow,
    ours,
    served,
)
from benchmarks.contest.job_sets import define_job_sets, job_sets
from benchmarks.record import Better, Result, record
from cluster.binaries import KUBERNETES, found_or_built
from cluster.by_hand import say
from cluster.control_plane.components import Component
from cluster.control_plane.plane import PROGRAMS, ControlPlane, control_plane
from cluster.waiting import until

ROOT = Path(__file__).parent.parent
FLAGS: Mapping[Component, Mapping[str, object]] = {
    Component.API_SERVER: {"audit-policy-file": Path(__file__).parent / "contest" / "audit_policy.yaml"},
    # Nobody answers for the pods. Of these addresses the kernel says so at once; others may keep one waiting, and
    # Endpoints may hold none of loopback.
    Component.KWOK: {"cidr": "239.192.0.1/14"},
}
BENCH = "operator"
GANG = 100
# Until memory that is used again and again is there, each cycle adds some.
SOAK_JOBS, SOAK_WARM_UP, SOAK_CYCLES, SOAK_POINTS = 50, 10, 10, 5
# Ours asks pods how they are when they have run for 5, 35 and 65 seconds: in between it only looks.
_UNTIL_UNASKED_SECONDS = 35


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: how often one job, how often a hundred or a large gang, and of how many pods a thousand."""

    singles: int
    hundreds: int
    thousands: tuple[int, ...]


QUICK, USUAL, ALL = Size(3, 1, ()), Size(10, 2, (2,)), Size(15, 3, (2, 8))


def main() -> None:
    """Measure everything and write the page."""
    asked = _arguments()
    size = QUICK if asked.quick else ALL if asked.all else USUAL
    programs = found_or_built((*PROGRAMS, "training-operator"), say)
    loads = [os.getloadavg()[0]]
    results: list[Result] = []
    if asked.only != "soak":
        for pods in (2, 8):
            with tempfile.TemporaryDirectory(prefix="moejob-bench-") as folder:
                results += asyncio.run(speed(Path(folder), programs, pods, size))
            loads.append(os.getloadavg()[0])
    if asked.only != "speed":
        with tempfile.TemporaryDirectory(prefix="moejob-bench-") as folder:
            results += asyncio.run(soak(Path(folder), programs, SOAK_POINTS if asked.quick else SOAK_CYCLES))
        loads.append(os.getloadavg()[0])
    load = f"load average {min(loads):.1f} to {max(loads):.1f}"
    if asked.only is None and not asked.quick:
        record(results, ["kubernetes", "aiohttp", "pydantic"], f"Kubernetes {KUBERNETES.version}, {load}")
    say(load)


# --- speed ------------------------------------------------------------------------------------------------------------


async def speed(folder: Path, programs: Mapping[str, Path], pods: int, size: Size) -> list[Result]:
    """Jobs of so many pods: one alone, a hundred, a thousand; with pairs also looks at rest and a large gang."""
    with control_plane(folder, programs, 1, FLAGS) as plane:
        async with arena(plane) as place:
            with ended_after(contenders(plane, programs, with_released=pods == 2)) as everybody:
                # A thousand jobs take the one with its own limit a quarter of an hour.
                unlimited = tuple(who for who in everybody if who.name != RELEASED)
                results = await at_rest(place, unlimited) if pods == 2 else []
                results += await alone(place, everybody, pods, size.singles)
                results += await hundreds(place, everybody, pods, size.hundreds)
                if pods == 2:
                    results += await large_gang(place, unlimited, size.hundreds)
                if pods in size.thousands:
                    results += await thousand(place, unlimited, pods)
                return results


async def alone(place: Arena, those: Sequence[Contender], pods: int, times: int) -> list[Result]:
    """One job at a time."""
    bursts: dict[str, list[Burst]] = {who.name: [] for who in those}
    for who in those:
        # The first of a process waits for its start: a lead, a certificate, caches.
        await place.burst(who, 1, pods)
    for _ in range(times):
        for who in those:
            bursts[who.name].append(await place.burst(who, 1, pods))
    created = {name: [s for b in each for s in b.story.seconds_until_created()] for name, each in bursts.items()}
    running = {name: [s for b in each for s in b.story.seconds_until_running()] for name, each in bursts.items()}
    one = f"1 job of {pods} pods"
    return [
        *_rows(f"{one}, until all run, p50", "ms", {name: 1000 * median(v) for name, v in running.items()}),
        *_rows(f"{one}, until all run, p99", "ms", {name: 1000 * quantile(v, 0.99) for name, v in running.items()}),
        # From apply to pods; when they run is for kubelets, whose part kwok plays.
        *_rows(
            f"{one}, until all are created, p50",
            "ms",
            {name: 1000 * median(v) for name, v in created.items() if v},
            20.0,
        ),
    ]


async def hundreds(place: Arena, those: Sequence[Contender], pods: int, times: int) -> list[Result]:
    """A hundred jobs at once; who is slow by a limit of its own is measured once."""
    bursts: dict[str, list[Burst]] = {who.name: [] for who in those}
    for turn in range(times):
        for who in those:
            if who.name != RELEASED or turn == 0:
                bursts[who.name].append(await place.burst(who, 100, pods))
    for name, each in bursts.items():
        asked = ", ".join(f"{count} {what}" for what, count in each[-1].story.requests.most_common())
        say(f"{name} asks, for 100 jobs: {asked}")
    return _of_bursts(f"100 jobs of {pods} pods", bursts, None)


async def thousand(place: Arena, those: Sequence[Contender], pods: int) -> list[Result]:
    """A thousand jobs at once, and what their operator has grown to."""
    bursts: dict[str, list[Burst]] = {}
    for who in those:
        try:
            bursts[who.name] = [await place.burst(who, 1000, pods)]
        except TooSlowError as late:
            if who.name == OURS:
                raise
            say(f"left out: {late}")
    resident = {name: each[0].after.resident_mib for name, each in bursts.items()}
    return [
        *_of_bursts(f"1000 jobs of {pods} pods", bursts, 7.0 if pods == 2 else None),
        *_rows(f"1000 jobs of {pods} pods, resident memory", "MiB", resident, 150.0),
    ]


async def at_rest(place: Arena, those: Sequence[Contender]) -> list[Result]:
    """Looks at a hundred jobs of which nothing changed that an operator would care for."""
    bursts = [await place.burst(who, 100, 2) for who in those]
    await asyncio.sleep(_UNTIL_UNASKED_SECONDS)
    looks = {who.name: await place.idle_looks(who, 100) for who in those}
    for who, burst in zip(those, bursts, strict=True):
        await place.delete(who, tuple(burst.story.asked_at))
    return [
        *_rows("look at a job at rest, mean", "ms", {name: 1000 * seen.mean for name, seen in looks.items()}),
        *_rows("look at a job at rest, p99", "ms", {name: 1000 * seen.quantile(0.99) for name, seen in looks.items()}),
    ]


async def large_gang(place: Arena, those: Sequence[Contender], times: int) -> list[Result]:
    """A gang whose pods are all taken away; another each time, for who restarts again waits longer."""
    seconds: dict[str, list[float]] = {who.name: [] for who in those}
    for _ in range(times):
        for who in those:
            [name] = (await place.burst(who, 1, GANG)).story.asked_at
            seconds[who.name].append(await place.restart(who, name, GANG))
    medians = {name: median(each) for name, each in seconds.items()}
    return _rows(f"gang of {GANG} pods deleted, until {GANG} run again", "s", medians)


def _of_bursts(what: str, bursts: Mapping[str, Sequence[Burst]], target_seconds: float | None) -> list[Result]:
    def of(number: Callable[[Burst], float]) -> dict[str, float]:
        return {name: median([number(burst) for burst in each]) for name, each in bursts.items()}

    return [
        *_rows(f"{what}, in all", "s", of(lambda burst: burst.story.seconds_in_all()), target_seconds),
        *_rows(f"{what}, until all run, p50", "s", of(lambda burst: median(burst.story.seconds_until_running()))),
        *_rows(f"{what}, until all run, p99", "s", of(lambda b: quantile(b.story.seconds_until_running(), 0.99))),
        *_rows(
            f"{what}, until all are created, p99",
            "s",
            {name: median([quantile(c, 0.99) for c in each]) for name, each in _created(bursts).items()},
        ),
        *_rows(f"{what}, CPU of the operator a job", "ms", of(lambda burst: burst.cpu_ms_per_job), 2.0),
        *_rows(f"{what}, API requests a job", "", of(lambda burst: burst.requests_per_job)),
        *_rows(f"{what}, status writes, most of a job", "", of(lambda burst: burst.most_status_writes), 2.0),
    ]


def _created(bursts: Mapping[str, Sequence[Burst]]) -> dict[str, list[list[float]]]:
    """Of each burst, how long each job took to have its pods; of those contenders whose pods say whose they are."""
    each = {name: [b.story.seconds_until_created() for b in those] for name, those in bursts.items()}
    return {name: those for name, those in each.items() if all(those)}


def contenders(plane: ControlPlane, programs: Mapping[str, Path], *, with_released: bool) -> tuple[Contender, ...]:
    """All that are measured, ours first."""
    mine = alone_on(plane)
    define_pytorch_jobs(plane)
    program = programs["training-operator"]
    peers: list[Contender] = []
    if manager := os.environ.get("JOBSET_BIN"):
        define_job_sets(plane, Path(manager))
        peers.append(job_sets(plane, Path(manager), new_namespace(plane, "sets")))
    # Last: whoever came after one that is too slow would wait for its work.
    peers.append(kubeflow(plane, program, UNLIMITED, new_namespace(plane, "free")))
    if with_released:
        peers.append(kubeflow(plane, program, RELEASED, new_namespace(plane, "released")))
    return (mine, *peers)


@contextmanager
def ended_after(those: tuple[Contender, ...]) -> Iterator[tuple[Contender, ...]]:
    """End their processes: those of the next control plane are to have the machine for themselves."""
    try:
        yield those
    finally:
        for who in those:
            who.process.stop()


def alone_on(plane: ControlPlane) -> Contender:
    """Ours."""
    served(plane, ROOT / "crds" / "moetrainingjobs.yaml", "moetrainingjobs")
    return ours(plane, new_namespace(plane, "ours"))


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


async def soak(folder: Path, programs: Mapping[str, Path], cycles: int) -> list[Result]:
    """Half of the jobs come and go, the other half stays and is never touched."""
    with control_plane(folder, programs, 1, FLAGS) as plane:
        async with arena(plane) as place:
            with ended_after((alone_on(plane),)) as (mine,):
                await place.burst(mine, SOAK_JOBS, 2)
                stay = await place.pods(mine)
                await _soaked(place, mine, SOAK_WARM_UP)
                held = [await _soaked(place, mine, cycles // SOAK_POINTS) for _ in range(SOAK_POINTS)]
                first, last, replaced = held[0], held[-1], len(stay - await place.pods(mine))
                what = f"soak, {SOAK_JOBS} to {2 * SOAK_JOBS} jobs and back, {cycles} cycles:"
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


async def _soaked(place: Arena, mine: Contender, cycles: int) -> _Held:
    """Half of the jobs created and deleted so often, and what is held once idle connections have been closed."""
    for _ in range(cycles):
        burst = await place.burst(mine, SOAK_JOBS, 2)
        await place.delete(mine, tuple(burst.story.asked_at))
    rest = await place.at_rest(mine)
    return _Held(rest.resident_mib, rest.descriptors, mine.metric("moejob_tasks"))


# --- results ----------------------------------------------------------------------------------------------------------


def _rows(case: str, unit: str, values: Mapping[str, float], target: float | None = None) -> list[Result]:
    """Ours beside each peer; all are better when lower."""
    row = partial(Result, BENCH, case, values[OURS], unit, Better.LOWER, target)
    rows = [row(name, value) for name, value in values.items() if name != OURS]
    for name, value in values.items():
        say(f"{case:60} {value:10.4g} {unit:4} {name}")
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="two minutes: no thousand jobs")
    sizes.add_argument("--all", action="store_true", help="also a thousand jobs of eight pods")
    parser.add_argument("--only", choices=["speed", "soak"], help="one half of it, which is not recorded")
    return parser.parse_args()


if __name__ == "__main__":
    main()
