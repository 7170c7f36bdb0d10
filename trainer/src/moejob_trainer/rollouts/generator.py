"""Answers from a fleet of engines. A lost engine costs its unfinished answers, which other engines generate again."""

from __future__ import annotations

from moejob_api.contract.pods import HttpPath
from moejob_trainer.rollouts.connection import EngineLost
from moejob_trainer.rollouts.fleet import Fleet, RolloutEngine
from moejob_trainer.rollouts.interface import Answer, Request, Sampling
from moejob_trainer.rollouts.wire import BadAnswer, answer_body, read_answer

# A request that has ended this many engines would end the others, too.
_TRIES = 5


class AnswerFailed(RuntimeError):
    """An answer that no engine could give."""


class FleetGenerator:
    """A Generator over HTTP. May be awaited in any event loop; cancelling it ends the work in the engine."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def generate(self, request: Request, sampling: Sampling) -> Answer:
        """Return an answer, from whichever engine has the least work and holds the published weights."""
        return await self._fleet.connection.within(self._answered(request, sampling))

    async def until_outdated(self) -> None:
        """Wait until no engine has the published weights any more, and one is there to take them again."""
        await self._fleet.connection.within(self._fleet.until_outdated())

    async def _answered(self, request: Request, sampling: Sampling) -> Answer:
        reasons = []
        for _ in range(_TRIES):
            engine = await self._fleet.take(request.group)
            try:
                return await self._fleet.until_lost(engine, self._asked(engine, request, sampling))
            except (EngineLost, BadAnswer) as error:
                reasons.append(str(error))
                # The fleet's watch lets it serve again once it reports the published weights.
                await self._fleet.lose(engine, str(error))
            finally:
                await self._fleet.give(engine, request.group)
        raise AnswerFailed(f"member {request.member} of group {request.group} failed {_TRIES} times: {reasons}")

    async def _asked(self, engine: RolloutEngine, request: Request, sampling: Sampling) -> Answer:
        label = self._fleet.label
        if label is None:
            raise EngineLost("no weights have been published")
        body = await self._fleet.post(
            engine, HttpPath.ANSWER, answer_body(request, sampling), self._fleet.limits.answer_seconds
        )
        return read_answer(request, sampling, body, label.run)
