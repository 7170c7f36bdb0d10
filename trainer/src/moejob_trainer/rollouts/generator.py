"""Answers from a fleet of engines. A lost engine costs its unfinished answers, which other engines generate again."""

from __future__ import annotations

from moejob_api.contract.pods import HttpPath
from moejob_trainer.rollouts.connection import EngineLost
from moejob_trainer.rollouts.fleet import EngineFleet, RolloutEngine
from moejob_trainer.rollouts.interface import Answer, GenerationRequest, SamplingParams
from moejob_trainer.rollouts.wire import BadReply, answer_request_body, read_answer

# A request that has ended this many engines would end the others, too.
_TRIES = 5


class AnswerFailed(RuntimeError):
    """An answer that no engine could give."""


class FleetGenerator:
    """A Generator over HTTP. May be awaited in any event loop; cancelling it ends the work in the engine."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet

    async def generate(self, request: GenerationRequest, sampling: SamplingParams) -> Answer:
        """Return an answer, from whichever engine has the least work and holds the published weights."""
        return await self._fleet.connection.await_result(self._generate_answer(request, sampling))

    async def wait_until_outdated(self) -> None:
        """Wait until no engine has the published weights any more, and one is there to take them again."""
        await self._fleet.connection.await_result(self._fleet.wait_until_outdated())

    async def _generate_answer(self, request: GenerationRequest, sampling: SamplingParams) -> Answer:
        reasons = []
        for _ in range(_TRIES):
            engine = await self._fleet.acquire(request.group)
            try:
                return await self._fleet.await_unless_lost(engine, self._request_answer(engine, request, sampling))
            except (EngineLost, BadReply) as error:
                reasons.append(str(error))
                # The fleet's watch lets it serve again once it reports the published weights.
                await self._fleet.lose_engine(engine, str(error))
            finally:
                await self._fleet.release(engine, request.group)
        raise AnswerFailed(f"member {request.member} of group {request.group} failed {_TRIES} times: {reasons}")

    async def _request_answer(
        self, engine: RolloutEngine, request: GenerationRequest, sampling: SamplingParams
    ) -> Answer:
        label = self._fleet.label
        if label is None:
            raise EngineLost("no weights have been published")
        body = await self._fleet.post(
            engine, HttpPath.ANSWER, answer_request_body(request, sampling), self._fleet.limits.answer_seconds
        )
        return read_answer(request, sampling, body, label.run)
