"""Measure hostile input: reviews that take long, and each listener under attack. Not while anything else runs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from benchmarks.hostile.attacks import (
    HOST,
    Answer,
    Attack,
    Target,
    attack_target,
    body_of_a_stranger,
    damaged_requests,
    dense,
    got,
    honest_review,
    pods_that_say,
    send_small_unfinished,
    send_unfinished,
    silent,
    without_end,
    worst,
)
from benchmarks.hostile.probe import Measured
from benchmarks.hostile.reviews import HostileReview, quantile, request, seconds_of, worst_reviews
from benchmarks.record import Better, Result, record
from moejob_api.contract.pods import HttpPath
from moejob_operator.admission.certificates import service_hosts
from moejob_operator.admission.server import VALUES

BENCH = "hostile"
ROOT = Path(__file__).parents[2]
# The Python and the module of each program that serves.
OPERATOR = (sys.executable, "benchmarks.hostile.operator_listeners")
LAUNCHER = (str(ROOT / ".venv/trainer/bin/python"), "benchmarks.hostile.launcher_listeners")
ENGINE = (str(ROOT / ".venv/rollout/bin/python"), "benchmarks.hostile.engine_listeners")
SECRET = "known to launchers alone"
REVIEW_MS, GAP_MS, MEMORY_MIB = 100.0, 100.0, 150.0
# An API server gives up on a webhook then.
ANSWER_MS = 10_000.0
_SECONDS = 10.0
_DRAWN, _CLIMBS, _STEPS = 300, 5, 80
_SEEDS = 3
_NO_HEADERS = b"HTTP/1.1 103 Early Hints\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One attack on one listener. `attack` of a client, or what hostile pods answer the operator."""

    name: str
    attack: Attack


def main(arguments: Sequence[str]) -> None:
    """Measure everything and write the page; with --quick for a second each, unrecorded."""
    is_quick = "--quick" in arguments
    seconds = 1.0 if is_quick else _SECONDS
    tried = search_reviews(1 if is_quick else _SEEDS, is_quick=is_quick)
    results = [*review_results(tried), *asyncio.run(listener_results(tried, seconds))]
    if not is_quick:
        record(results, ["kopf", "aiohttp", "pydantic"])
    for result in results:
        met = {None: "", True: "met", False: "MISSED"}[result.meets_target]
        print(f"{result.case:95} {result.value:10.4g} {result.unit:5} target {result.target or '-':>6} {met}")


def search_reviews(seeds: int, *, is_quick: bool) -> list[HostileReview]:
    """Search for the reviews that take longest, the worst first."""
    size = (60, 2, 10) if is_quick else (_DRAWN, _CLIMBS, _STEPS)
    found = [review for seed in range(seeds) for review in worst_reviews(random.Random(seed), *size)]
    return sorted(found, key=lambda one: -one.seconds)


def review_results(tried: Sequence[HostileReview]) -> list[Result]:
    """Take the time of the worst again, by a clock, and of all that were tried."""
    again = [1000 * min(seconds_of(request(one.genes)) for _ in range(3)) for one in tried[:20]]
    all_ms = [1000 * one.seconds for one in tried]
    what = f"a review, of {len(tried):,} drawn and climbed"
    return [
        _result(f"{what}: half take at most", quantile(all_ms, 0.5), "ms"),
        _result(f"{what}: 99 of 100 take at most", quantile(all_ms, 0.99), "ms", REVIEW_MS),
        _result("a review, the worst that was found", max(again), "ms"),
    ]


async def listener_results(tried: Sequence[HostileReview], seconds: float) -> list[Result]:
    """Attack each listener."""
    worst_genes = [one.genes for one in tried[:20]]
    with tempfile.TemporaryDirectory() as folder:
        authority = str(Path(folder, "authority.pem"))
        return [
            *await _attacks_on_webhook(authority, worst_genes, seconds),
            *await _attacks_on("metrics", OPERATOR, plain_cases("/metrics"), seconds),
            *await _attacks_by_pods(seconds),
            *await _attacks_on("/progress", LAUNCHER, plain_cases("/progress"), seconds),
            *await _attacks_on_store(seconds),
            *await _attacks_on("engine", ENGINE, engine_cases(), seconds, HttpPath.READY),
        ]


def plain_cases(path: str) -> list[Case]:
    """Attacks on a listener of plain HTTP."""
    asked = got(path)
    head = asked.partition(b"\r\n")[0] + b"\r\n"
    return [
        Case("connections that say nothing", silent),
        Case("damaged requests", damaged_requests([asked])),
        Case("headers without end", without_end(head, b"a: b\r\n" * 1000, 0.0)),
        Case("a byte now and then", without_end(head + b"a: ", b"a", 0.1)),
    ]


def store_cases() -> list[Case]:
    """Attacks on the rendezvous by those who know no secret."""
    return [
        Case("connections that say nothing", silent),
        Case("wrong proofs", damaged_requests([random.Random(0).randbytes(64)])),
        Case("bytes without end", without_end(b"", b"\xff" * 65_536, 0.0)),
        Case("a byte now and then", without_end(b"", b"a", 0.1)),
    ]


def engine_cases() -> list[Case]:
    """Attacks on the port of an engine by those who do not have its key."""
    body = without_end(body_of_a_stranger("/inference/v1/generate"), b" " * 65_536, 0.0)
    return [*plain_cases(HttpPath.READY), Case("bodies without end", body)]


def webhook_cases(worst_genes: Sequence[Mapping[tuple[str, ...], object]]) -> list[Case]:
    """Attacks on the webhook, all over TLS but the silent one."""
    genes = [dict(one) for one in worst_genes]
    return [
        Case("the reviews that take longest", worst(genes)),
        Case(
            "4 MiB of as many values as are read", dense(VALUES // 2, json.dumps({"spec": {"a": [1] * (VALUES // 5)}}))
        ),
        Case("4 MiB of values without end", dense(2_600_000, "null")),
        Case("bodies of 4 MiB that do not end", send_unfinished),
        Case("320 bodies of 8 KiB that do not end", send_small_unfinished),
        Case("damaged reviews", damaged_requests([honest_review()])),
        Case("connections that say nothing", silent),
    ]


async def _attacks_on_webhook(
    authority: str, genes: Sequence[Mapping[tuple[str, ...], object]], seconds: float
) -> list[Result]:
    results = list[Result]()
    for case in webhook_cases(genes):
        with serve_listener(*OPERATOR, "webhook", authority) as listener:
            trust = ssl.create_default_context(cafile=authority)
            name = service_hosts("moejob-webhook", "moejob-system")[0]
            target = Target(listener.port, trust, name)
            measured = await _measure_attack(listener, target, case, honest_review(), seconds)
            results += _results(f"webhook: {case.name}", measured, target.honest, is_operators=True)
    return results


async def _attacks_on(
    listens: str, program: tuple[str, str], cases: Sequence[Case], seconds: float, path: str | None = None
) -> list[Result]:
    results, name = list[Result](), listens.strip("/")
    for case in cases:
        with serve_listener(*program, name) as listener:
            target = Target(listener.port)
            measured = await _measure_attack(listener, target, case, got(path or f"/{name}"), seconds)
            results += _results(f"{listens}: {case.name}", measured, target.honest, is_operators=program is OPERATOR)
    return results


async def _attacks_on_store(seconds: float) -> list[Result]:
    results = list[Result]()
    for case in store_cases():
        with (
            serve_listener(*LAUNCHER, "store", SECRET) as listener,
            serve_listener(*LAUNCHER, "launcher", SECRET) as launcher,
        ):
            await asyncio.to_thread(launcher.ask, f"begin {listener.port}")
            measured = await _measure_attack(listener, Target(listener.port), case, None, seconds)
            waited = json.loads(await asyncio.to_thread(launcher.ask, "end"))
            results += _results(f"store: {case.name}", measured, waited, is_operators=False)
    return results


async def _attacks_by_pods(seconds: float) -> list[Result]:
    answers: Mapping[str, Answer] = {
        "interim answers without end": pods_that_say(b"", _NO_HEADERS * 1000, 0.0),
        "headers without end": pods_that_say(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 1000, 0.0),
        "a body without end": pods_that_say(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65_536, 0.0),
        "a byte now and then": pods_that_say(b"HTTP/1.1 200 OK\r\n\r\n", b" ", 0.1),
    }
    results = list[Result]()
    for name, answer in answers.items():
        server = await asyncio.start_server(answer, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        with serve_listener(*OPERATOR, "pods", str(port)) as listener:
            await asyncio.to_thread(listener.ask, "begin")
            await asyncio.sleep(seconds)
            measured = await asyncio.to_thread(listener.read_measurements)
            results += _results(f"64 pods that the operator asks: {name}", measured, (), is_operators=True)
        server.close()
    return results


async def _measure_attack(
    listener: Listener, target: Target, case: Case, honest: bytes | None, seconds: float
) -> Measured:
    await asyncio.to_thread(listener.ask, "begin")
    await attack_target(target, case.attack, honest, seconds)
    return await asyncio.to_thread(listener.read_measurements)


def _results(name: str, measured: Measured, honest: Sequence[float], *, is_operators: bool) -> list[Result]:
    # A launcher imports torch, which is larger than any attack, and an engine more.
    memory = (
        _result(f"{name}, memory", measured.peak_mib, "MiB", MEMORY_MIB)
        if is_operators
        else _result(f"{name}, memory more than before", measured.growth_mib, "MiB", MEMORY_MIB)
    )
    beside = [_result(f"{name}, an honest answer beside", 1000 * max(honest), "ms", ANSWER_MS)] if honest else []
    return [_result(f"{name}, largest gap", measured.gap_ms, "ms", GAP_MS), memory, *beside]


def _result(case: str, value: float, unit: str, target: float | None = None) -> Result:
    return Result(BENCH, case, value, unit, Better.LOWER, target)


class Listener:
    """A process that serves, and says what was measured in it."""

    def __init__(self, words: IO[str], answers: IO[str]) -> None:
        self._words, self._answers = words, answers
        self.port = int(answers.readline())

    def ask(self, word: str) -> str:
        """Return the answer to a word."""
        self._words.write(f"{word}\n")
        self._words.flush()
        return self._answers.readline()

    def read_measurements(self) -> Measured:
        """Return what was measured since the attack began."""
        return Measured(**json.loads(self.ask("end")))


@contextmanager
def serve_listener(*command: str) -> Iterator[Listener]:
    """Start the process of a listener: its Python, its module, and what it serves."""
    python, module, *arguments = command
    process = subprocess.Popen(
        [python, "-W", "ignore", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=os.environ,
    )
    try:
        yield Listener(cast("IO[str]", process.stdin), cast("IO[str]", process.stdout))
    finally:
        process.kill()
        # Closes the pipes, too.
        process.communicate()


if __name__ == "__main__":
    main(sys.argv[1:])
