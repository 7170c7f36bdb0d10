"""The engines of a run: which of them hold the published weights, which has the fewest requests, and their answers.

Rank 0 alone has a fleet. An engine serves while it replies and reports the newest published weights. An engine that was
away has to prove its weights again. Members of a group go to one engine, whose prefix cache computes their prompt once.
Answers may be in flight while engines take new weights, so an answer with tokens of weights that no probe has proven
waits here for the probe of its engine.
Knows neither how weights travel nor what answers are for.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moejob_api.contract.pods import HttpPath
from moejob_trainer.rollouts.carried_answers import AnswerSegment, complete_answer, continue_request, join_segments
from moejob_trainer.rollouts.connection import EngineConnection, EngineLost, RequestOverdue, RequestRefused
from moejob_trainer.rollouts.idle_time import IdleClock, mean_idle_share
from moejob_trainer.rollouts.interface import Answer, GenerationRequest, SamplingParams
from moejob_trainer.rollouts.wire import (
    BadReply,
    WeightInfo,
    WeightsLabel,
    answer_request_body,
    is_trainer_label,
    read_answer,
)
from moejob_trainer.runtime.heartbeats import ShareReport, ignore_share
from moejob_trainer.runtime.user_lines import to_stderr

T = TypeVar("T")
# A request that has ended this many engines would end the others, too.
_TRIES = 5


class NoEngineAvailable(RuntimeError):
    """No engine can be asked."""


class AnswerFailed(RuntimeError):
    """An answer that no engine could give."""


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Times and numbers of a fleet; the defaults suit models that take minutes to start and to answer."""

    # The longest wait for engines, at the start and when none is left.
    start_seconds: float = 1800.0
    # The longest wait of ranks that were restarted beside running engines. All engines have loaded the model before,
    # and in the middle of a run an engine that is silent for this long counts as lost, too.
    return_seconds: float = 120.0
    # An engine that has not reported its version for this long hangs.
    silence_seconds: float = 120.0
    # The longest wait of a publication for a lost engine: for an engine that hangs, every step waits this long.
    lost_seconds: float = 10.0
    # The longest time of one answer, from its request to its last token.
    answer_seconds: float = 7200.0
    # Loading of weights.
    update_seconds: float = 1800.0
    look_seconds: float = 1.0
    # Most requests at one engine; further ones wait here, where they can still go to another engine.
    in_flight: int = 512


@dataclass(eq=False)
class RolloutEngine:
    """One engine as this rank knows it."""

    url: str
    in_flight: int = 0
    is_serving: bool = False
    # Why it does not serve.
    reason: str = "has not been heard yet"
    # It replies, but has other weights, and cannot get the published ones before the next publication.
    is_outdated: bool = False
    # The weights that a probe has proven. An engine reports a new label earlier, before it is resumed and probed.
    proven_label: WeightsLabel | None = None
    # The weights that it was given later, until a probe has proven them.
    unproven_label: WeightsLabel | None = None
    # Set when the engine is lost, and with it every request in flight there.
    lost_event: asyncio.Event = field(default_factory=asyncio.Event)
    # It computes nothing: paused for new weights, or asleep.
    is_paused: bool = False
    # It has to reply with what it has, so answers may lack their end.
    is_stopped: bool = False
    # When its last answer came.
    answered_at: float = 0.0
    idle_clock: IdleClock = field(default_factory=lambda: IdleClock(time.monotonic()))

    def has_proven(self, version: int) -> bool:
        """Return whether tokens of this version are of weights that a probe has proven here."""
        return self.unproven_label is None or version < self.unproven_label.version

    def note_work(self) -> None:
        """Let the idle clock know of a change of the work; call it after each."""
        self.idle_clock.set_busy(time.monotonic(), is_busy=self.in_flight > 0 and not self.is_paused)

    def set_paused(self, *, is_paused: bool) -> None:
        """Note that the engine computes nothing, or that it computes again."""
        self.is_paused = is_paused
        self.note_work()

    @property
    def problem(self) -> str:
        """Return the reason with the engine's name in front; some reasons begin with it."""
        return self.reason if self.reason.startswith(self.url) else f"{self.url} {self.reason}"


# Brings an engine that was away to the published weights.
CatchUp = Callable[[RolloutEngine], Awaitable[None]]


class EngineFleet:
    """The engines, and the choice of the next one to ask."""

    def __init__(
        self,
        urls: Sequence[str],
        connection: EngineConnection,
        limits: FleetLimits,
        is_stopping: Callable[[], bool] = lambda: False,
        report_ready: ShareReport = ignore_share,
    ) -> None:
        # The run is asked to stop: no engine is waited for.
        self._is_stopping = is_stopping
        # Hears how many engines have started, of how many, before they have weights; at the end of the wait all count.
        self._report_ready = report_ready
        self.engines = tuple(RolloutEngine(url) for url in urls)
        self.connection, self.limits = connection, limits
        self.label: WeightsLabel | None = None
        self.catch_up: CatchUp | None = None
        self._group_engines: dict[int, RolloutEngine] = {}
        self._group_requests: Counter[int] = Counter()
        self._changed = asyncio.Condition()
        self._watch_task: asyncio.Task[None] | None = None
        self._none_since = time.monotonic()
        # Closed while engines take weights, and while they are stopped.
        self._is_open = True

    @property
    def serving_engines(self) -> tuple[RolloutEngine, ...]:
        """Engines that can be asked."""
        return tuple(engine for engine in self.engines if engine.is_serving)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def get(self, engine: RolloutEngine, path: str, seconds: float) -> bytes:
        """Read a page of an engine."""
        return await self.connection.get(engine.url + path, seconds)

    async def post(
        self, engine: RolloutEngine, path: str, body: dict[str, Any] | None = None, seconds: float = 0.0
    ) -> bytes:
        """Ask an engine."""
        return await self.connection.post(engine.url + path, body, seconds or self.limits.silence_seconds)

    async def acquire(self, group: int) -> RolloutEngine:
        """Return the engine for a group's member, once one has room; NoEngineAvailable when none has come for long."""
        async with self._changed:
            while not self._is_open or (engine := self._choose_engine(group)) is None:
                await self._wait_for_change()
            engine.in_flight += 1
            engine.note_work()
            self._group_requests[group] += 1
            self._group_engines[group] = engine
            return engine

    async def release(self, engine: RolloutEngine, group: int) -> None:
        """Count one request less at an engine."""
        async with self._changed:
            engine.in_flight -= 1
            engine.note_work()
            self._group_requests[group] -= 1
            if not self._group_requests[group]:
                del self._group_requests[group], self._group_engines[group]
            self._changed.notify_all()

    async def close_gate(self) -> None:
        """Let requests wait here; those in flight stay where they are."""
        async with self._changed:
            self._is_open = False

    async def open_gate(self) -> None:
        """Send requests to engines again."""
        async with self._changed:
            self._is_open, self._none_since = True, time.monotonic()
            self._changed.notify_all()

    async def await_proof(self, engine: RolloutEngine, version: int) -> None:
        """Wait until a probe of this engine has proven the weights of this version; for ever if it is lost before."""
        async with self._changed:
            while not engine.has_proven(version):
                await self._changed.wait()

    async def await_drained(self, engine: RolloutEngine, seconds: float) -> None:
        """Wait until no request is in flight at an engine, but no longer than this."""
        async with self._changed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: not engine.in_flight), seconds)

    async def measure_idle_share(self) -> float:
        """Return the mean share of time since the last call in which engines had nothing to compute."""
        return mean_idle_share([engine.idle_clock for engine in self.engines], time.monotonic())

    async def wait_for_interruption(self) -> None:
        """Wait until the run is asked to stop, or no engine serves and one replies that needs the weights again."""
        async with self._changed:
            while not self._is_stopping() and not self._needs_publication():
                # A signal asks for the stop, and a handler of signals can notify no task here.
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.limits.look_seconds):
                        await self._changed.wait()

    def _needs_publication(self) -> bool:
        return not self.serving_engines and any(engine.is_outdated for engine in self.engines)

    async def await_unless_lost(self, engine: RolloutEngine, request: Awaitable[T]) -> T:
        """Await a request to an engine; EngineLost as soon as the engine is lost."""
        request_task, loss_task = asyncio.ensure_future(request), asyncio.ensure_future(engine.lost_event.wait())
        try:
            await asyncio.wait({request_task, loss_task}, return_when=asyncio.FIRST_COMPLETED)
            if not request_task.done():
                raise EngineLost(engine.reason)
            return request_task.result()
        finally:
            request_task.cancel()
            loss_task.cancel()

    def _choose_engine(self, group: int) -> RolloutEngine | None:
        free_engines = [engine for engine in self.serving_engines if engine.in_flight < self.limits.in_flight]
        group_engine = self._group_engines.get(group)
        if group_engine in free_engines:
            return group_engine
        return min(free_engines, key=lambda engine: engine.in_flight, default=None)

    async def _wait_for_change(self) -> None:
        waited = time.monotonic() - self._none_since
        if self._is_open and not self.serving_engines and waited >= self.limits.start_seconds:
            raise NoEngineAvailable(f"no engine has served for {waited:.0f} s: {self.describe_problems()}")
        # A change wakes all waiting tasks, a deadline wakes none: so look at the clock now and then.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), self.limits.look_seconds)

    def describe_problems(self) -> str:
        """Return the reasons of engines that do not serve."""
        return "; ".join(engine.problem for engine in self.engines if not engine.is_serving)

    # --- who serves ---------------------------------------------------------------------------------------------------

    async def enlist_engine(self, engine: RolloutEngine) -> None:
        """Let an engine serve, whose probe has proven the published weights."""
        async with self._changed:
            if engine.proven_label is not None and not engine.is_serving:
                to_stderr(f"engine {engine.url} serves again, with weights {self.label}")
            engine.is_serving, engine.reason, engine.is_outdated = True, "", False
            engine.proven_label, engine.unproven_label = self.label, None
            engine.is_stopped = False
            engine.lost_event.clear()
            self._changed.notify_all()

    async def lose_engine(self, engine: RolloutEngine, reason: str, *, is_outdated: bool = False) -> None:
        """Send an engine no more requests, and give up those in flight there."""
        async with self._changed:
            if engine.is_serving and len(self.serving_engines) == 1:
                self._none_since = time.monotonic()
            was_serving = engine.is_serving
            engine.is_serving, engine.reason, engine.is_outdated = False, reason, is_outdated
            if was_serving:
                to_stderr(f"warning: engine {engine.problem}; it gets no work until it has proven the current weights")
            engine.lost_event.set()
            self._changed.notify_all()

    async def start_watching(self) -> None:
        """Begin to look after engines."""
        if self._watch_task is None:
            self._watch_task = asyncio.create_task(self._watch_all())

    async def stop_watching(self) -> None:
        """Leave engines alone: while they load weights they answer nothing else."""
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
            self._watch_task = None

    async def _watch_all(self) -> None:
        # One task for each engine: a silent engine does not delay the return of another.
        async with asyncio.TaskGroup() as tasks:
            for engine in self.engines:
                tasks.create_task(self._watch_engine(engine))

    async def _watch_engine(self, engine: RolloutEngine) -> None:
        while True:
            await self._check_engine(engine)
            await asyncio.sleep(self.limits.look_seconds)

    async def _check_engine(self, engine: RolloutEngine) -> None:
        try:
            label = await self.get_label(engine)
            if label == str(self.label) and engine.proven_label == self.label and engine.unproven_label is None:
                if not engine.is_serving:
                    await self.enlist_engine(engine)
            elif self.catch_up is None:
                await self.lose_engine(engine, self._unproven_reason(label), is_outdated=True)
            else:
                await self.lose_engine(engine, f"is brought from weights {label!r} to {self.label}")
                await self.catch_up(engine)
                await self.enlist_engine(engine)
        except (EngineLost, RequestRefused, BadReply) as error:
            await self.lose_engine(engine, str(error))

    def _unproven_reason(self, label: str) -> str:
        if label == str(self.label):
            return f"has been given the weights {label} and was lost before it proved them"
        return f"has weights {label!r} and not {self.label}"

    async def give_up_answers(self, engine: RolloutEngine) -> None:
        """Ask again for what was in flight at an engine whose process another one has replaced: no reply will come."""
        if not await self._has_been_given_weights(engine):
            await self.lose_engine(engine, "was started again, without the requests that were in flight")

    async def get_label(self, engine: RolloutEngine) -> str:
        """Return the name of the weights that an engine says it has."""
        body = await self.get(engine, "/weight_info", self.limits.silence_seconds)
        return WeightInfo.model_validate_json(body).weight_version

    # --- starting -----------------------------------------------------------------------------------------------------

    async def wait_for_engines(self, seconds: float) -> tuple[RolloutEngine, ...]:
        """Return the engines that are ready: at the start all of them, if they are within this time; later any.

        A run that is asked to stop waits for none.

        In the middle of a run an engine that is away may never return; if it does, it gets the weights then, or with
        the next publication. Ranks that are restarted in the middle of a run wait a while for all engines.
        """
        is_start = self.label is None
        try:
            return await self._look_for_engines(seconds, self._report_ready if is_start else ignore_share)
        finally:
            if is_start:
                self._report_ready(len(self.engines), len(self.engines))

    async def _look_for_engines(self, seconds: float, report_ready: ShareReport) -> tuple[RolloutEngine, ...]:
        began_at, reported = time.monotonic(), ""
        while True:
            ready = await _filter_engines(self.engines, self._is_ready)
            waited = time.monotonic() - began_at
            if len(ready) == len(self.engines) or self._is_stopping():
                return ready
            if ready and waited >= min(seconds, await self._waiting_limit(ready, seconds)):
                return ready
            if waited >= seconds:
                raise NoEngineAvailable(f"no engine is ready after {seconds:g} s: {self.describe_problems()}")
            report_ready(len(ready), len(self.engines))
            reported = self._report_waiting(reported, ready)
            await asyncio.sleep(self.limits.look_seconds)

    def _report_waiting(self, reported: str, ready: Sequence[RolloutEngine]) -> str:
        """Log the engines that are awaited and their problems, if these have changed; return the problems."""
        problems = "; ".join(engine.problem for engine in self.engines if engine not in ready)
        if problems != reported:
            to_stderr(f"{len(ready)} of {len(self.engines)} engines are ready; waiting for {problems}")
        return problems

    async def _waiting_limit(self, ready: Sequence[RolloutEngine], seconds: float) -> float:
        """Return the seconds for which ready engines wait for the others."""
        if self.label is not None:
            return 0.0
        return self.limits.return_seconds if await _filter_engines(ready, self._has_been_given_weights) else seconds

    async def _has_been_given_weights(self, engine: RolloutEngine) -> bool:
        """Return whether an engine has weights of earlier ranks: then the run has begun, with every engine."""
        try:
            return is_trainer_label(await self.get_label(engine))
        except (EngineLost, RequestRefused):
            return False

    async def _is_ready(self, engine: RolloutEngine) -> bool:
        is_lost = self.label is not None and not engine.is_serving
        seconds = self.limits.lost_seconds if is_lost else self.limits.silence_seconds
        try:
            await self.get(engine, HttpPath.READY, seconds)
        except (EngineLost, RequestRefused) as error:
            # Answers in flight there may never come: a node that is cut off breaks no connection.
            await self.lose_engine(engine, str(error))
            return False
        return True


async def _filter_engines(
    engines: Sequence[RolloutEngine], predicate: Callable[[RolloutEngine], Awaitable[bool]]
) -> tuple[RolloutEngine, ...]:
    """Return the engines that satisfy a predicate, all asked at once."""
    matches = await asyncio.gather(*(predicate(engine) for engine in engines))
    return tuple(engine for engine, is_match in zip(engines, matches, strict=True) if is_match)


class FleetGenerator:
    """Answers from a fleet. A lost engine costs its unfinished answers, which other engines generate again.

    A stopped engine costs none: the tokens that it returns are kept, and the next engine continues behind them. May be
    awaited in any event loop; cancelling a request ends its work in the engine.
    """

    def __init__(self, fleet: EngineFleet, *, salts_cache: bool = False) -> None:
        # With salts, no request uses keys and values that were computed for a request of older weights.
        self._fleet, self._salts_cache = fleet, salts_cache

    async def generate(self, request: GenerationRequest, sampling: SamplingParams) -> Answer:
        """Generate an answer in the loop of the fleet's thread."""
        return await self._fleet.connection.await_result(self._generate_answer(request, sampling))

    async def wait_for_interruption(self) -> None:
        """Wait in the loop of the fleet's thread."""
        await self._fleet.connection.await_result(self._fleet.wait_for_interruption())

    def measure_idle_share(self) -> float:
        """Read the clocks of engines in their thread, which moves them."""
        return self._fleet.connection.run(self._fleet.measure_idle_share())

    async def _generate_answer(self, request: GenerationRequest, sampling: SamplingParams) -> Answer:
        carried: AnswerSegment | None = None
        reasons: list[str] = []
        while len(reasons) < _TRIES:
            try:
                further = await self._generate_segment(*continue_request(request, sampling, carried))
            except (EngineLost, BadReply) as error:
                # What other engines have generated before stays.
                reasons.append(str(error))
                continue
            carried = join_segments(carried, further)
            if (answer := complete_answer(request, carried)) is not None:
                return answer
        raise AnswerFailed(f"member {request.member} of group {request.group} failed {_TRIES} times: {reasons}")

    async def _generate_segment(self, request: GenerationRequest, sampling: SamplingParams) -> AnswerSegment:
        """Return the tokens of one engine, which is lost if it returns none in order."""
        engine, asked_at = await self._fleet.acquire(request.group), time.monotonic()
        try:
            segment = await self._fleet.await_unless_lost(engine, self._request_segment(engine, request, sampling))
        except (EngineLost, BadReply) as error:
            # An engine that answers others works, however long this answer takes.
            if not (isinstance(error, RequestOverdue) and engine.answered_at > asked_at):
                # The fleet's watch lets it serve again once it reports the published weights.
                await self._fleet.lose_engine(engine, str(error))
            raise
        finally:
            await self._fleet.release(engine, request.group)
        engine.answered_at = time.monotonic()
        return segment

    async def _request_segment(
        self, engine: RolloutEngine, request: GenerationRequest, sampling: SamplingParams
    ) -> AnswerSegment:
        label = self._fleet.label
        if label is None:
            raise EngineLost("no weights have been published")
        request_body = answer_request_body(request, sampling, str(label) if self._salts_cache else None)
        reply = await self._fleet.post(engine, HttpPath.ANSWER, request_body, self._fleet.limits.answer_seconds)
        # The engine may have been given further weights since the request.
        newest_label = self._fleet.label or label
        segment = read_answer(request, sampling, reply, newest_label, is_stopped=engine.is_stopped)
        if segment.finish_reason is None and len(segment.tokens) and not engine.has_proven(int(segment.versions[-1])):
            raise BadReply(f"{engine.url} was stopped with tokens of weights that no probe has proven")
        if len(segment.tokens):
            await self._fleet.await_proof(engine, int(segment.versions[-1]))
        return segment
