"""The order in which engines take new weights, in the protocol of vLLM, and the probe that shows them there.

Answers may be in flight. Engines with GPUs of their own keep them while they are paused, and continue with the
new weights. Engines that share GPUs or cores with the trainer are stopped before it trains, and return what they have.
objectives/grpo/objective.py says when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from moejob_api.contract.pods import HttpPath
from moejob_trainer.rollouts.connection import EngineLost, RequestRefused
from moejob_trainer.rollouts.fleet import EngineFleet, RolloutEngine
from moejob_trainer.rollouts.interface import Floats, Tokens
from moejob_trainer.rollouts.wire import (
    PROBE_PATH,
    UNFINISHED_LABEL,
    BadReply,
    WeightsLabel,
    probe_request_body,
    publication_problem,
    read_cache_reset,
    read_probe,
    read_publication,
)

T = TypeVar("T")
# Sends one engine its weights, between start and finish.
LoadWeights = Callable[[RolloutEngine], Awaitable[None]]


class WeightSync:
    """Steps of a synchronization over all engines; an engine that fails a step is lost, and has no part in the next."""

    def __init__(self, fleet: EngineFleet, *, sleeps: bool = False, keeps_cache: bool = False) -> None:
        # `keeps_cache`: unfinished answers continue with keys and values of older weights, and are not read again.
        self._fleet, self._sleeps, self._keeps_cache = fleet, sleeps, keeps_cache

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run requests to engines in their thread, and wait for the result."""
        return self._fleet.connection.run(coroutine)

    async def start_update(self, seconds: float) -> tuple[RolloutEngine, ...]:
        """Pause all engines, with their requests in flight, and start an update. Returns the engines that take part."""
        await self._fleet.stop_watching()
        # An engine that returns now waits: there are no weights yet that it could load.
        self._fleet.catch_up = None
        engines = await self._fleet.wait_for_engines(seconds)
        for engine in {*self._fleet.engines} - {*engines}:
            # It may return in the middle of the update, with the previous weights.
            await self._fleet.lose_engine(engine, engine.reason)
        await asyncio.gather(*(self._fleet.give_up_answers(engine) for engine in engines if engine.in_flight))
        # New requests wait for the probe: until then an engine may answer with wrong weights.
        await self._fleet.close_gate()
        return await self.run_on_each(engines, self._start_engine_update)

    async def check_engines(self, engines: Sequence[RolloutEngine]) -> tuple[tuple[RolloutEngine, ...], str | None]:
        """Return the engines that have all tensors, or a problem, after which all engines discard the update."""
        problems: list[str] = []

        async def check_engine(engine: RolloutEngine) -> None:
            problem = await self.find_problem(engine)
            if problem is not None:
                problems.append(problem)

        complete_engines = await self.run_on_each(engines, check_engine)
        if not problems:
            return complete_engines, None
        await self.discard_update(complete_engines)
        return (), problems[0]

    async def find_problem(self, engine: RolloutEngine) -> str | None:
        """Return the problem of an engine that lacks tensors, else None. Call it before the weights get their label."""
        report = await self._fleet.post(engine, HttpPath.PUBLICATION, seconds=self._fleet.limits.update_seconds)
        return publication_problem(engine.url, read_publication(report))

    async def discard_update(self, engines: Sequence[RolloutEngine]) -> None:
        """Let engines end an update whose weights are no version, and sleep until the next one."""

        async def discard_on_engine(engine: RolloutEngine) -> None:
            await self._end_unfinished(engine)
            if self._sleeps:
                # An engine that has woken for weights only cannot be put to sleep.
                await self._fleet.post(engine, "/wake_up?tags=kv_cache")

        await self.sleep_unused(await self.run_on_each(engines, discard_on_engine))

    async def finish_update(self, engines: Sequence[RolloutEngine], label: WeightsLabel) -> tuple[RolloutEngine, ...]:
        """Label the loaded weights, and let engines generate."""
        self._fleet.label = label

        async def finish_engine(engine: RolloutEngine) -> None:
            await self._finish_engine_update(engine, label)

        return await self.run_on_each(engines, finish_engine)

    async def resume_serving(self, engines: Sequence[RolloutEngine], catch_up: LoadWeights | None) -> None:
        """Send engines requests again, and watch them; `catch_up` loads these weights into an engine that was away."""
        self._fleet.catch_up = catch_up
        for engine in engines:
            await self._fleet.enlist_engine(engine)
        await self._fleet.open_gate()
        await self._fleet.start_watching()

    async def run_on_each(self, engines: Sequence[RolloutEngine], step: LoadWeights) -> tuple[RolloutEngine, ...]:
        """Run a step on all engines at once; return those that did it. An engine that refuses our request is lost."""

        async def try_step(engine: RolloutEngine) -> bool:
            try:
                await step(engine)
            except (EngineLost, RequestRefused, BadReply) as error:
                await self._fleet.lose_engine(engine, str(error))
                return False
            return True

        worked = await asyncio.gather(*(try_step(engine) for engine in engines))
        return tuple(engine for engine, has_worked in zip(engines, worked, strict=True) if has_worked)

    async def stop_answers(self) -> None:
        """Let engines return unfinished answers as they are, and compute nothing until the next publication."""
        await self._fleet.close_gate()
        busy_engines = [engine for engine in self._fleet.serving_engines if engine.in_flight]
        await self.run_on_each(busy_engines, self._stop_engine)

    async def _stop_engine(self, engine: RolloutEngine) -> None:
        engine.is_stopped = True
        limits, began_at = self._fleet.limits, time.monotonic()
        while engine.in_flight:
            if time.monotonic() - began_at > limits.silence_seconds:
                raise EngineLost(
                    f"has {engine.in_flight} answers in flight {limits.silence_seconds:g} s after it stopped"
                )
            # Again, for a request that was on its way: the engine keeps it until the next publication.
            await self._fleet.post(engine, "/pause?mode=abort")
            engine.set_paused(is_paused=True)
            await self._fleet.await_drained(engine, limits.look_seconds)

    async def sleep_serving(self) -> None:
        """Let engines give back their memory; the next publication brings weights, and room for keys and values."""
        await self.run_on_each(self._fleet.serving_engines, self._sleep_engine)

    async def sleep_unused(self, engines: Sequence[RolloutEngine]) -> None:
        """Let engines on the trainer's GPUs that woke and do not serve give back their memory."""
        if self._sleeps:
            await self.run_on_each([engine for engine in engines if not engine.is_serving], self._sleep_engine)

    async def _sleep_engine(self, engine: RolloutEngine) -> None:
        # Level 1 would copy weights to the host's memory; the trainer has them anyway.
        await self._fleet.post(engine, "/sleep?level=2")
        engine.set_paused(is_paused=True)

    async def get_label(self, engine: RolloutEngine) -> str:
        """Ask an engine for the name of its weights."""
        return await self._fleet.get_label(engine)

    async def join_group(self, engine: RolloutEngine, rendezvous: Mapping[str, Any]) -> None:
        """Let one engine join the process group that carries its weights."""
        seconds = self._fleet.limits.update_seconds
        await self._fleet.post(engine, "/init_weight_transfer_engine", {"init_info": dict(rendezvous)}, seconds)

    async def update(self, engine: RolloutEngine, update: Mapping[str, Any]) -> None:
        """Let one engine read weights."""
        await self._fleet.post(
            engine, "/update_weights", {"update_info": dict(update)}, self._fleet.limits.update_seconds
        )

    async def load_engine(self, engine: RolloutEngine, label: WeightsLabel, load: LoadWeights) -> None:
        """Load weights into one engine: a whole update, from start to finish."""
        await self._start_engine_update(engine)
        await load(engine)
        problem = await self.find_problem(engine)
        if problem is not None:
            raise EngineLost(problem)
        await self._finish_engine_update(engine, label)

    async def probe_engine(self, engine: RolloutEngine, tokens: Tokens) -> Floats:
        """Return the log-probability of each token but the first."""
        return read_probe(tokens, await self._fleet.post(engine, PROBE_PATH, probe_request_body(tokens)))

    async def _start_engine_update(self, engine: RolloutEngine) -> None:
        if self._sleeps:
            # Wake it before the pause: behind it, the wake-up of an engine that is awake anyway would let it generate.
            await self._fleet.post(engine, "/wake_up?tags=weights")
        await self._fleet.post(engine, f"/pause?mode=keep{'&clear_cache=false' if self._keeps_cache else ''}")
        engine.set_paused(is_paused=True)
        try:
            await self._fleet.post(engine, "/start_weight_update")
        except EngineLost:
            # The engine may still be in an update of a trainer that was killed. End it; its weights are no version.
            await self._end_unfinished(engine)
            await self._fleet.post(engine, "/start_weight_update")

    async def _end_unfinished(self, engine: RolloutEngine) -> None:
        seconds = self._fleet.limits.update_seconds
        await self._fleet.post(engine, "/finish_weight_update", {"weight_version": UNFINISHED_LABEL}, seconds)

    async def _finish_engine_update(self, engine: RolloutEngine, label: WeightsLabel) -> None:
        seconds = self._fleet.limits.update_seconds
        # Before the engine can generate with them.
        engine.unproven_label = label
        await self._fleet.post(engine, "/finish_weight_update", {"weight_version": str(label)}, seconds)
        if not self._keeps_cache:
            await self._clear_cache(engine)
        if self._sleeps:
            await self._fleet.post(engine, "/wake_up?tags=kv_cache")
        await self._fleet.post(engine, "/resume")
        engine.set_paused(is_paused=False)
        reported_label = await self._fleet.get_label(engine)
        if reported_label != str(label):
            raise EngineLost(f"{engine.url} says that its weights are {reported_label!r} after it was given {label}")

    async def _clear_cache(self, engine: RolloutEngine) -> None:
        """Let an engine forget keys and values, which are those of the weights that computed them."""
        if not read_cache_reset(await self._fleet.post(engine, "/reset_prefix_cache")):
            raise EngineLost(f"{engine.url} keeps keys and values of older weights")
