"""The order in which engines take new weights, in the protocol of vLLM, and the probe that shows them there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from moejob_api.contract.pods import HttpPath
from moejob_trainer.rollouts.connection import EngineLost, RequestRefused
from moejob_trainer.rollouts.fleet import Fleet, RolloutEngine
from moejob_trainer.rollouts.interface import Floats, Tokens
from moejob_trainer.rollouts.wire import (
    PROBE,
    UNFINISHED,
    BadAnswer,
    WeightsLabel,
    probe_body,
    publication_problem,
    read_probe,
    read_publication,
)

T = TypeVar("T")
# Sends one engine its weights, between start and finish.
Load = Callable[[RolloutEngine], Awaitable[None]]


class WeightSync:
    """Steps of a synchronization over all engines; one that fails at a step is lost and takes no part in the next."""

    def __init__(self, fleet: Fleet, *, sleeps: bool = False) -> None:
        self._fleet, self._sleeps = fleet, sleeps

    def run(self, asked: Coroutine[Any, Any, T]) -> T:
        """Run requests to engines in their thread, and wait for the result."""
        return self._fleet.connection.run(asked)

    async def begin(self, seconds: float) -> tuple[RolloutEngine, ...]:
        """Pause all engines, with their requests in flight, and start an update. Returns the engines that take part."""
        await self._fleet.unwatch()
        # An engine that returns now waits: there are no weights yet that it could load.
        self._fleet.catch_up = None
        engines = await self._fleet.reached(seconds)
        for engine in {*self._fleet.engines} - {*engines}:
            # It may return in the middle of the update, with the previous weights.
            await self._fleet.lose(engine, engine.reason)
        return await self.each(engines, self._started)

    async def check(self, engines: Sequence[RolloutEngine]) -> tuple[tuple[RolloutEngine, ...], str | None]:
        """Return the engines that have all tensors, or a problem, after which all engines discard the update."""
        problems: list[str] = []

        async def checked(engine: RolloutEngine) -> None:
            problem = await self.find_problem(engine)
            if problem is not None:
                problems.append(problem)

        answered = await self.each(engines, checked)
        if not problems:
            return answered, None
        await self.discard(answered)
        return (), problems[0]

    async def find_problem(self, engine: RolloutEngine) -> str | None:
        """Return the problem of an engine that lacks tensors, else None. Call it before the weights get their label."""
        report = await self._fleet.post(engine, HttpPath.PUBLICATION, seconds=self._fleet.limits.update_seconds)
        return publication_problem(engine.url, read_publication(report))

    async def discard(self, engines: Sequence[RolloutEngine]) -> None:
        """Let engines end an update whose weights are no version, and sleep until the next one."""

        async def discarded(engine: RolloutEngine) -> None:
            await self._end_unfinished(engine)
            if self._sleeps:
                # An engine that has woken for weights only cannot be put to sleep.
                await self._fleet.post(engine, "/wake_up?tags=kv_cache")

        await self.rest(await self.each(engines, discarded))

    async def finish(self, engines: Sequence[RolloutEngine], label: WeightsLabel) -> tuple[RolloutEngine, ...]:
        """Label the loaded weights, and let engines generate."""
        self._fleet.label = label

        async def finished(engine: RolloutEngine) -> None:
            await self._loaded(engine, label)

        return await self.each(engines, finished)

    async def serve(self, engines: Sequence[RolloutEngine], catch_up: Load | None) -> None:
        """Send engines requests again, and watch them; `catch_up` loads these weights into an engine that was away."""
        self._fleet.catch_up = catch_up
        for engine in engines:
            await self._fleet.enlist(engine)
        await self._fleet.watch()

    async def each(self, engines: Sequence[RolloutEngine], step: Load) -> tuple[RolloutEngine, ...]:
        """Run a step on all engines at once; return those that did it. An engine that refuses our request is lost."""

        async def tried(engine: RolloutEngine) -> bool:
            try:
                await step(engine)
            except (EngineLost, RequestRefused, BadAnswer) as error:
                await self._fleet.lose(engine, str(error))
                return False
            return True

        worked = await asyncio.gather(*(tried(engine) for engine in engines))
        return tuple(engine for engine, has_worked in zip(engines, worked, strict=True) if has_worked)

    async def sleep(self) -> None:
        """Let engines give back their memory; the next publication brings weights, and room for keys and values."""
        await self.each(self._fleet.serving, self._asleep)

    async def rest(self, engines: Sequence[RolloutEngine]) -> None:
        """Let engines on the trainer's GPUs that woke and do not serve give back their memory."""
        if self._sleeps:
            await self.each([engine for engine in engines if not engine.serves], self._asleep)

    async def _asleep(self, engine: RolloutEngine) -> None:
        # Level 1 would copy weights to the host's memory; the trainer has them anyway.
        await self._fleet.post(engine, "/sleep?level=2")

    async def label_of(self, engine: RolloutEngine) -> str:
        """Return the name of the weights that an engine says it has."""
        return await self._fleet.label_of(engine)

    async def join(self, engine: RolloutEngine, where: Mapping[str, Any]) -> None:
        """Let one engine join the process group that carries its weights."""
        seconds = self._fleet.limits.update_seconds
        await self._fleet.post(engine, "/init_weight_transfer_engine", {"init_info": dict(where)}, seconds)

    async def update(self, engine: RolloutEngine, update: Mapping[str, Any]) -> None:
        """Let one engine read weights."""
        await self._fleet.post(
            engine, "/update_weights", {"update_info": dict(update)}, self._fleet.limits.update_seconds
        )

    async def whole(self, engine: RolloutEngine, label: WeightsLabel, load: Load) -> None:
        """Load weights into one engine: a whole update, from start to finish."""
        await self._started(engine)
        await load(engine)
        problem = await self.find_problem(engine)
        if problem is not None:
            raise EngineLost(problem)
        await self._loaded(engine, label)

    async def probed(self, engine: RolloutEngine, tokens: Tokens) -> Floats:
        """Return the log-probability of each token but the first."""
        return read_probe(tokens, await self._fleet.post(engine, PROBE, probe_body(tokens)))

    async def _started(self, engine: RolloutEngine) -> None:
        if self._sleeps:
            # Wake it before the pause: behind it, the wake-up of an engine that is awake anyway would let it generate.
            await self._fleet.post(engine, "/wake_up?tags=weights")
        await self._fleet.post(engine, "/pause?mode=keep")
        try:
            await self._fleet.post(engine, "/start_weight_update")
        except EngineLost:
            # The engine may still be in an update of a trainer that was killed. End it; its weights are no version.
            await self._end_unfinished(engine)
            await self._fleet.post(engine, "/start_weight_update")

    async def _end_unfinished(self, engine: RolloutEngine) -> None:
        seconds = self._fleet.limits.update_seconds
        await self._fleet.post(engine, "/finish_weight_update", {"weight_version": UNFINISHED}, seconds)

    async def _loaded(self, engine: RolloutEngine, label: WeightsLabel) -> None:
        seconds = self._fleet.limits.update_seconds
        await self._fleet.post(engine, "/finish_weight_update", {"weight_version": str(label)}, seconds)
        # Keys and values of a prompt are those of the weights that computed them.
        await self._fleet.post(engine, "/reset_prefix_cache")
        if self._sleeps:
            await self._fleet.post(engine, "/wake_up?tags=kv_cache")
        await self._fleet.post(engine, "/resume")
        found = await self._fleet.label_of(engine)
        if found != str(label):
            raise EngineLost(f"{engine.url} says that its weights are {found!r} after it was given {label}")
