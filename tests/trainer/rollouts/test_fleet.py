"""Answers of a fleet whose engines die, hang, lie and return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from builders import spec
from moejob_api.contract.answers import AnswerRequest, WeightSpan
from moejob_api.contract.pods import RunPhase
from moejob_trainer.rollouts.connection import EngineConnection, RequestRefused
from moejob_trainer.rollouts.fleet import AnswerFailed, EngineFleet, FleetGenerator, FleetLimits, NoEngineAvailable
from moejob_trainer.rollouts.interface import Answer, GenerationRequest, SamplingParams
from moejob_trainer.rollouts.sync import WeightSync
from moejob_trainer.rollouts.wire import WeightsLabel
from moejob_trainer.runtime.heartbeats import BOARD, Heartbeat, HeartbeatBoard
from moejob_trainer.setup.rollouts import engine_start_report, fleet_limits
from trainer.rollouts.stand_in import StandIn, until

LABEL = WeightsLabel(3, "here")
LIMITS = FleetLimits(start_seconds=120, silence_seconds=60, answer_seconds=120, look_seconds=0.02, in_flight=64)
NOT_A_NUMBER = np.array([np.nan], "<f4").tobytes()
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=8, stop_tokens=(1,))


class Served:
    """A fleet over stand-ins that hold the published weights."""

    def __init__(self, engines: list[StandIn], limits: FleetLimits) -> None:
        self.engines = engines
        self.connection = EngineConnection("secret")
        self.fleet = EngineFleet([engine.url for engine in engines], self.connection, limits)
        self.generator = FleetGenerator(self.fleet)
        self.fleet.label = LABEL

    def serve(self) -> Served:
        sync = WeightSync(self.fleet)
        engines = self.connection.run(sync.start_update(60))
        self.connection.run(sync.resume_serving(self.connection.run(sync.finish_update(engines, LABEL)), None))
        return self

    def answers(self, requests: list[GenerationRequest]) -> list[Answer]:
        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(*(self.generator.generate(one, SAMPLING) for one in requests))

        return asyncio.run(all_of_them())


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Served] = []

    def served(count: int = 2, limits: FleetLimits = LIMITS) -> Served:
        made.append(Served([StandIn() for _ in range(count)], limits))
        return made[-1]

    yield served
    for one in made:
        one.connection.run(one.fleet.stop_watching())
        one.connection.close()
        for engine in one.engines:
            engine.close()


def requests(groups: int, members: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(group, member, np.array([group, 2, 3], np.int32), seed=group * members + member)
        for group in range(groups)
        for member in range(members)
    ]


def test_an_engine_hangs_that_takes_much_longer_than_a_step_would_wait() -> None:
    given = spec(method="GRPO", grpo={"rollout": {"answerTimeoutSeconds": 90}})
    assert fleet_limits(given) == replace(FleetLimits(), answer_seconds=360)


def test_an_answer_that_no_step_waits_for_may_take_longer() -> None:
    given = spec(method="GRPO", grpo={"rollout": {"answerTimeoutSeconds": 90, "staleness": 1}})
    assert fleet_limits(given).answer_seconds > 3600


def test_a_run_that_is_asked_to_stop_waits_for_no_engine() -> None:
    requests_to_stop: list[str] = []
    connection = EngineConnection("secret")
    # No server listens there.
    fleet = EngineFleet(["http://127.0.0.1:9"], connection, LIMITS, lambda: bool(requests_to_stop))
    ready = threading.Thread(target=lambda: found.append(connection.run(fleet.wait_for_engines(600))), daemon=True)
    found: list[tuple[object, ...]] = []
    ready.start()
    until(lambda: bool(fleet.engines[0].problem), "a look at the engine")
    assert ready.is_alive()
    requests_to_stop.append("SIGTERM")
    ready.join(60)
    assert found == [()]
    connection.close()


def read_phase(board: HeartbeatBoard) -> tuple[RunPhase | None, float | None]:
    [row] = board.read()
    return row.phase, row.phase_share


@pytest.mark.parametrize(("away", "share"), [(1, 0.5), (2, 0.0)])
def test_the_share_of_engines_that_have_started_is_a_phase_of_the_rank(tmp_path: Path, away: int, share: float) -> None:
    board = HeartbeatBoard(tmp_path / "board", 1)
    heartbeat = Heartbeat.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "0"})
    heartbeat.enter_phase(RunPhase.FIRST_STEP)
    engines = [StandIn(), StandIn()]
    for engine in engines[:away]:
        engine.stop()
    connection = EngineConnection("secret")
    urls = [engine.url for engine in engines]
    fleet = EngineFleet(urls, connection, LIMITS, report_ready=engine_start_report(heartbeat))
    ready = threading.Thread(target=lambda: connection.run(fleet.wait_for_engines(600)), daemon=True)
    ready.start()
    until(lambda: read_phase(board) == (RunPhase.AWAITING_ENGINES, share), "the share of engines")
    for engine in engines[:away]:
        engine.start()
    ready.join(60)
    assert read_phase(board) == (RunPhase.FIRST_STEP, None)
    connection.close()
    for engine in engines:
        engine.close()


def test_of_one_engine_the_phase_has_no_share_and_a_later_wait_is_no_phase(tmp_path: Path) -> None:
    board = HeartbeatBoard(tmp_path / "board", 1)
    heartbeat = Heartbeat.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "0"})
    stopped: list[str] = []
    connection = EngineConnection("secret")
    # No server listens there.
    fleet = EngineFleet(
        ["http://127.0.0.1:9"], connection, LIMITS, lambda: bool(stopped), engine_start_report(heartbeat)
    )
    waiting = threading.Thread(target=lambda: connection.run(fleet.wait_for_engines(600)), daemon=True)
    waiting.start()
    until(lambda: read_phase(board) == (RunPhase.AWAITING_ENGINES, None), "the phase")
    stopped.append("SIGTERM")
    waiting.join(60)
    heartbeat.enter_phase(RunPhase.STEPPING)
    fleet.label = LABEL
    assert connection.run(fleet.wait_for_engines(600)) == ()
    assert read_phase(board) == (RunPhase.STEPPING, None)
    connection.close()


def test_each_request_gets_its_own_answer_with_the_version_of_each_token(serve: Serve) -> None:
    asked = requests(groups=20, members=4)
    answers = serve().serve().answers(asked)
    assert [answer.request for answer in answers] == asked
    assert all(answer.tokens.tolist() == answer.request.prompt.tolist() for answer in answers)
    assert {version for answer in answers for version in answer.versions.tolist()} == {3}
    assert answers[0].log_probabilities.tolist() == [-0.5, -0.5, -0.5]


def test_members_of_a_group_go_to_one_engine_and_groups_to_all(serve: Serve) -> None:
    served = serve(count=3).serve()
    served.answers(requests(groups=30, members=4))
    seen = [{prompt[0] for prompt in engine.prompts} for engine in served.engines]
    assert all(seen)
    assert sum(map(len, seen)) == len(set.union(*seen)) == 30


def test_no_engine_has_more_in_flight_than_it_may(serve: Serve) -> None:
    served = serve(limits=replace(LIMITS, in_flight=5)).serve()
    served.answers(requests(groups=40, members=2))
    assert all(0 < engine.most_in_flight <= 5 for engine in served.engines)


def test_what_a_lost_engine_had_not_answered_is_asked_elsewhere(serve: Serve) -> None:
    served = serve().serve()
    dying, living = served.engines
    dying.behaviour = dying.hang

    def stop_it_once_asked() -> None:
        until(lambda: dying.in_flight > 0, "nothing was asked")
        dying.stop()

    stopping = threading.Thread(target=stop_it_once_asked)
    stopping.start()
    answers = served.answers(requests(groups=10, members=2))
    stopping.join()
    assert len(answers) == 20
    assert len(living.prompts) == 20


def test_an_engine_that_says_nothing_is_lost_with_what_it_was_asked(serve: Serve) -> None:
    served = serve(limits=replace(LIMITS, silence_seconds=0.5)).serve()
    hung, living = served.engines
    hung.behaviour = hung.hang
    hung.failing["/weight_info"] = 503
    assert len(served.answers(requests(groups=10, members=2))) == 20
    assert len(living.prompts) == 20


def test_an_engine_that_hangs_delays_the_return_of_no_other(serve: Serve) -> None:
    # Longer than anything here takes.
    served = serve(limits=replace(LIMITS, silence_seconds=3600)).serve()
    hung, other = served.engines
    hung.silent.add("/weight_info")
    until(lambda: hung.asked[-1] == "/weight_info", "the engine is not looked at")
    other.failing["/weight_info"] = 503
    until(lambda: not served.fleet.engines[1].is_serving, "the other is not looked at")
    other.failing.clear()
    until(lambda: served.fleet.engines[1].is_serving, "the other does not serve again")


def test_a_publication_does_not_wait_for_the_silence_of_an_engine_that_is_known_to_hang(serve: Serve) -> None:
    served = serve(limits=replace(LIMITS, silence_seconds=3600, lost_seconds=0.5)).serve()
    hung, living = served.engines
    served.connection.run(served.fleet.stop_watching())
    served.connection.run(served.fleet.lose_engine(served.fleet.engines[0], "has not answered"))
    hung.silent |= {"/weight_info", "/ready"}
    served.serve()
    assert [engine.url for engine in served.fleet.serving_engines] == [living.url]


def test_an_engine_that_was_restarted_gets_no_work_before_it_has_the_weights(serve: Serve) -> None:
    served = serve().serve()
    restarted, other = served.engines
    restarted.version = "default"
    assert {version for one in served.answers(requests(4, 2)) for version in one.versions.tolist()} == {3}
    restarted.prompts.clear()
    served.answers(requests(4, 2))
    assert restarted.prompts == []
    assert other.prompts


def test_weights_of_another_start_of_the_trainer_are_other_weights(serve: Serve) -> None:
    served = serve().serve()
    served.engines[0].version = "3.before"
    served.answers(requests(4, 2))
    assert len(served.engines[1].prompts) == 8


def test_an_engine_that_was_lost_before_it_proved_the_weights_gets_no_work(serve: Serve) -> None:
    served = serve()
    unproven, other = served.engines
    unproven.failing["/resume"] = 500
    served.serve()
    del unproven.failing["/resume"]
    assert unproven.version == str(LABEL)
    until(lambda: "was lost before it proved them" in served.fleet.engines[0].reason, "it was not looked at")
    served.answers(requests(4, 2))
    assert unproven.prompts == []
    assert len(other.prompts) == 8


def test_an_engine_that_returns_is_brought_to_the_weights_and_serves(serve: Serve) -> None:
    served = serve().serve()
    lost, _ = served.engines
    sync = WeightSync(served.fleet)

    async def load(engine: Any) -> None:
        await sync.update(engine, {"paths": ["somewhere"]})

    async def catch_up(engine: Any) -> None:
        await sync.load_engine(engine, LABEL, load)

    served.fleet.catch_up = catch_up
    lost.stop()
    served.answers(requests(4, 2))
    lost.version = "default"
    lost.asked.clear()
    lost.start()
    until(lambda: len(served.fleet.serving_engines) == 2, "the engine does not serve again")
    order = [path for path in lost.asked if path != "/weight_info"]
    given = ["/update_weights", "/publication", "/finish_weight_update", "/reset_prefix_cache"]
    assert order == ["/pause?mode=keep", "/start_weight_update", *given, "/resume"]


def test_a_cancelled_request_ends_in_the_engine(serve: Serve) -> None:
    served = serve(count=1).serve()
    engine = served.engines[0]
    engine.behaviour = engine.hang

    async def cancelled() -> None:
        asking = asyncio.create_task(served.generator.generate(requests(1, 1)[0], SAMPLING))
        await asyncio.to_thread(until, lambda: engine.in_flight == 1, "nothing was asked")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(cancelled())
    until(lambda: engine.cancelled == 1, "the engine works on")
    assert served.fleet.engines[0].in_flight == 0


def test_without_any_engine_it_says_why(serve: Serve) -> None:
    served = serve(count=1, limits=replace(LIMITS, start_seconds=0.3)).serve()
    served.engines[0].stop()
    with pytest.raises(NoEngineAvailable, match=r"no engine has served .* cannot be reached"):
        served.answers(requests(1, 1))


def test_what_is_asked_of_engines_that_lost_the_weights_waits_for_the_next_publication(serve: Serve) -> None:
    served = serve().serve()
    gone, restarted = served.engines
    gone.stop()
    restarted.version = "default"
    until(lambda: not served.fleet.serving_engines, "an engine of other weights serves")

    async def answered() -> list[Answer]:
        asked = asyncio.gather(*(served.generator.generate(one, SAMPLING) for one in requests(4, 2)))
        await served.generator.wait_for_interruption()
        assert not asked.done()
        await asyncio.to_thread(served.serve)
        return await asked

    assert len(asyncio.run(answered())) == len(restarted.prompts) == 8


def test_engines_are_not_outdated_while_one_has_the_weights(serve: Serve) -> None:
    served = serve().serve()
    served.engines[0].version = "default"
    until(lambda: len(served.fleet.serving_engines) == 1, "an engine of other weights serves")

    async def is_outdated() -> bool:
        waiting = asyncio.create_task(served.generator.wait_for_interruption())
        await asyncio.gather(*(served.generator.generate(one, SAMPLING) for one in requests(4, 2)))
        try:
            return waiting.done()
        finally:
            waiting.cancel()

    assert not asyncio.run(is_outdated())


def test_only_the_first_publication_waits_for_all_engines_and_says_for_which(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    # No engine has been given weights before, so none is said to return.
    served = serve(limits=replace(LIMITS, return_seconds=0))
    late, _ = served.engines
    late.failing["/ready"] = 503
    starting = threading.Thread(target=served.serve)
    served.fleet.label = None
    starting.start()
    until(lambda: late.asked.count("/ready") >= 3, "nothing waits for the engine")
    del late.failing["/ready"]
    starting.join()
    assert len(served.fleet.serving_engines) == 2
    told = f"1 of 2 engines are ready; waiting for {late.url}/ready answered 503: told to fail\n"
    assert capsys.readouterr().err == told
    # It still says that it has these weights, for which it would serve again.
    late.failing["/ready"] = late.failing["/weight_info"] = 503
    served.serve()
    assert [engine.url for engine in served.fleet.serving_engines] == [served.engines[1].url]


@pytest.mark.parametrize(
    "known",
    [
        pytest.param("7.before", id="weights"),
        pytest.param("0.before", id="weights before the first step"),
        pytest.param("unfinished", id="weights that were not given to the end"),
    ],
)
def test_ranks_that_start_beside_engines_of_earlier_ones_go_on_without_those_that_are_gone(
    known: str, serve: Serve
) -> None:
    served = serve(limits=replace(LIMITS, return_seconds=0))
    gone, living = served.engines
    gone.stop()
    living.version = known
    served.fleet.label = None
    served.serve()
    assert [engine.url for engine in served.fleet.serving_engines] == [living.url]
    assert living.asked.count("/ready") == 1, "it waited for the other, though not for ever"
    assert "cannot be reached" in served.fleet.engines[0].reason


def test_ranks_that_start_beside_engines_of_earlier_ones_wait_a_while_for_the_others(serve: Serve) -> None:
    served = serve(limits=replace(LIMITS, return_seconds=60))
    returning, living = served.engines
    returning.failing["/ready"] = 503
    living.version = "7.before"
    served.fleet.label = None
    starting = threading.Thread(target=served.serve)
    starting.start()
    until(lambda: returning.asked.count("/ready") >= 3, "nothing waits for the engine")
    del returning.failing["/ready"]
    starting.join()
    assert len(served.fleet.serving_engines) == 2


def test_an_engine_that_does_not_say_which_weights_it_has_is_as_good_as_a_fresh_one(serve: Serve) -> None:
    served = serve(limits=replace(LIMITS, return_seconds=0))
    late, unclear = served.engines
    late.failing["/ready"] = unclear.failing["/weight_info"] = 503
    served.fleet.label = None
    starting = threading.Thread(target=served.serve)
    starting.start()
    until(lambda: unclear.asked.count("/weight_info") >= 3, "nothing asks the engine")
    del late.failing["/ready"], unclear.failing["/weight_info"]
    starting.join()
    assert len(served.fleet.serving_engines) == 2


def test_a_request_that_is_wrong_is_not_asked_again(serve: Serve) -> None:
    served = serve().serve()

    async def refuse(_: AnswerRequest) -> web.Response:
        return web.json_response({"error": "too long"}, status=400)

    for engine in served.engines:
        engine.behaviour = refuse
    with pytest.raises(RequestRefused, match="too long"):
        served.answers(requests(1, 1))
    assert sum(len(engine.prompts) for engine in served.engines) == 1


def test_a_request_that_every_engine_dies_of_is_given_up(serve: Serve) -> None:
    served = serve().serve()

    async def die(_: AnswerRequest) -> web.Response:
        return web.json_response({"error": "engine dead"}, status=500)

    for engine in served.engines:
        engine.behaviour = die
    with pytest.raises(AnswerFailed, match=r"failed 5 times: .*engine dead"):
        served.answers(requests(1, 1))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"finish_reason": "abort"}, id="aborted"),
        pytest.param({"log_probabilities": b""}, id="fewer log-probabilities than tokens"),
        pytest.param({"log_probabilities": bytes(7)}, id="half a log-probability"),
        pytest.param({"log_probabilities": NOT_A_NUMBER}, id="a log-probability that is no number"),
        pytest.param({"spans": ()}, id="tokens of no version"),
        pytest.param({"spans": (WeightSpan(weights="3.here", start=0, end=1),)}, id="some tokens of none"),
    ],
)
def test_an_answer_that_is_not_whole_is_asked_again(serve: Serve, changes: dict[str, Any]) -> None:
    served = serve().serve()
    odd, other = served.engines

    async def answer(asked: AnswerRequest) -> web.Response:
        return odd.answer(asked, **changes)

    odd.behaviour = answer
    assert len(served.answers(requests(2, 1))) == 2
    assert other.prompts


def test_an_engine_is_idle_while_nothing_is_asked_of_it_and_while_it_is_paused(serve: Serve) -> None:
    served = serve(count=2).serve()
    working, _ = served.fleet.engines
    engine = served.engines[0]
    engine.behaviour = engine.hang
    served.generator.measure_idle_share()

    async def share_of(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return served.generator.measure_idle_share()

    async def shares() -> tuple[float, float]:
        asking = asyncio.create_task(served.generator.generate(requests(1, 1)[0], SAMPLING))
        await asyncio.to_thread(until, lambda: working.in_flight == 1, "nothing was asked")
        served.generator.measure_idle_share()
        busy = await share_of(0.05)
        await asyncio.to_thread(served.connection.run, WeightSync(served.fleet).start_update(60))
        served.generator.measure_idle_share()
        paused = await share_of(0.05)
        asking.cancel()
        return busy, paused

    # One of two has nothing to compute, then both.
    assert asyncio.run(shares()) == (0.5, 1.0)
