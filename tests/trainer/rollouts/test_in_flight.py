"""Publications while answers are in flight, at engines that fail, lie and return; and answers of engines that stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from torch import Tensor

from moejob_api.contract.answers import AnswerRequest, WeightSpan
from moejob_api.contract.publications import PublicationReport
from moejob_trainer.rollouts.connection import EngineConnection
from moejob_trainer.rollouts.fleet import EngineFleet, FleetGenerator, FleetLimits
from moejob_trainer.rollouts.interface import (
    Answer,
    EnginesLost,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    WrongWeights,
)
from moejob_trainer.rollouts.publisher import EngineTerms, ProbeTerms, Publisher
from moejob_trainer.rollouts.transports.disk import DiskTransport
from trainer.rollouts.stand_in import WHOLE, StandIn, until

LIMITS = FleetLimits(
    start_seconds=120, silence_seconds=60, answer_seconds=120, lost_seconds=0.5, look_seconds=0.02, in_flight=64
)
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=6, stop_tokens=(1,))
PROMPT = [7, 2, 3]
# What stand-ins say of each token of a probe, and what one with other weights says.
RIGHT, WRONG = -1.0, -1.25
Behaviour = Callable[[AnswerRequest], Awaitable[web.Response]]


def weights() -> Iterator[tuple[str, Tensor]]:
    yield "first", torch.zeros(3)


class InFlight:
    """A trainer that publishes to stand-in engines, and asks them at the same time."""

    def __init__(self, folder: Path, count: int, limits: FleetLimits, terms: EngineTerms) -> None:
        self.engines = [StandIn(probe=RIGHT) for _ in range(count)]
        self.connection = EngineConnection("secret")
        self.fleet = EngineFleet([engine.url for engine in self.engines], self.connection, limits)
        self.publisher = Publisher(
            fleet=self.fleet,
            world=None,
            transport=DiskTransport(folder, None, 60),
            probe_terms=ProbeTerms(
                np.arange(8, dtype=np.int32), lambda text: np.full(len(text) - 1, RIGHT, np.float32), lambda: 0.001
            ),
            engine_terms=terms,
        )
        self.generator = FleetGenerator(self.fleet, salts_cache=terms.keeps_cache)
        self.run = ""
        self.publish(3)

    def publish(self, version: int) -> None:
        self.publisher.publish(version, weights())
        self.run = str(self.fleet.label).partition(".")[2]

    def label(self, version: int) -> str:
        return f"{version}.{self.run}"

    def ask(self, group: int = 0) -> Future[Answer]:
        """Ask for an answer; it is waited for elsewhere."""
        request = GenerationRequest(group, 0, np.array(PROMPT, np.int32), seed=5)
        future: Future[Answer] = Future()
        threading.Thread(target=lambda: self._await(request, future), daemon=True).start()
        return future

    def _await(self, request: GenerationRequest, future: Future[Answer]) -> None:
        try:
            future.set_result(asyncio.run(self.generator.generate(request, SAMPLING)))
        except BaseException as error:  # noqa: BLE001  # the test gets it
            future.set_exception(error)

    def ask_each(self) -> list[Future[Answer]]:
        """Ask each engine for an answer, which it has then in flight."""
        asked = []
        for number, engine in enumerate(self.engines):
            asked.append(self.ask(number))
            until(lambda: sum(one.in_flight for one in self.engines) == len(asked), "nothing was asked")
            assert engine.in_flight == 1
        return asked

    def in_background(self, version: int) -> Future[None]:
        """Publish in a thread."""
        future: Future[None] = Future()

        def published() -> None:
            try:
                self.publish(version)
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001  # the test gets it
                future.set_exception(error)

        threading.Thread(target=published, daemon=True).start()
        return future

    def reply(self, engine: StandIn, asked: AnswerRequest, versions: list[int], **changes: Any) -> web.Response:
        """Return an answer whose tokens are numbered, each of its version."""
        count = len(versions)
        spans = tuple(
            WeightSpan(weights=self.label(version), start=place, end=place + 1)
            for place, version in enumerate(versions)
        )
        numbers = {
            "tokens": np.arange(100, 100 + count, dtype="<i4").tobytes(),
            "log_probabilities": np.full(count, -0.5, "<f4").tobytes(),
            "spans": spans,
        }
        return engine.answer(asked, **(numbers | changes))

    def close(self) -> None:
        self.publisher.close()
        for engine in self.engines:
            engine.close()


Make = Callable[..., InFlight]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[InFlight] = []

    def run(count: int = 1, limits: FleetLimits = LIMITS, **terms: Any) -> InFlight:
        made.append(InFlight(tmp_path, count, limits, EngineTerms(**terms)))
        return made[-1]

    yield run
    for one in made:
        one.close()


def count_of(engine: StandIn, path: str) -> int:
    return sum(asked.startswith(path) for asked in engine.asked)


def hold_probe(engine: StandIn) -> tuple[threading.Event, threading.Event]:
    """Let the next probe wait; returns the events of its arrival, and of the leave to answer it."""
    is_probed, may_pass = threading.Event(), threading.Event()

    def wait() -> None:
        is_probed.set()
        may_pass.wait()

    engine.probed = wait
    return is_probed, may_pass


def behind_a_pause(run: InFlight, engine: StandIn) -> Behaviour:
    """Return the behaviour of an engine that chose one token, is paused with it, and continues when it is resumed."""

    async def answer(asked: AnswerRequest) -> web.Response:
        before, pauses = int(engine.version.partition(".")[0]), count_of(engine, "/pause")
        while count_of(engine, "/pause") == pauses:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await engine.runs.wait()
        return run.reply(engine, asked, [before, *[int(engine.version.partition(".")[0])] * 2])

    return answer


# --- publications ---------------------------------------------------------------------------------------------------


def test_an_answer_in_flight_waits_at_its_engine_and_goes_on_with_the_new_weights(make: Make) -> None:
    run = make()
    (engine,) = run.engines
    engine.behaviour = behind_a_pause(run, engine)
    (asked,) = run.ask_each()
    run.publish(4)
    assert asked.result(60).versions.tolist() == [3, 4, 4]
    assert len(engine.prompts) == 1
    assert engine.cancelled == 0


def leave_connection_silent(run: InFlight) -> Future[Answer]:
    """Ask the only engine, whose node is then cut off while a publication begins: no reply and no error will come."""
    (engine,) = run.engines
    engine.behaviour = engine.hang
    (asked,) = run.ask_each()
    run.connection.run(run.fleet.stop_watching())
    engine.behaviour = None
    return asked


def test_answers_of_an_engine_that_was_replaced_as_a_publication_began_are_asked_again(make: Make) -> None:
    run = make()
    asked = leave_connection_silent(run)
    run.engines[0].version = "default"
    run.publish(4)
    assert asked.result(60).versions.tolist() == [4, 4, 4]


def test_answers_of_an_engine_that_was_silent_as_a_publication_began_are_asked_again(make: Make) -> None:
    run = make(limits=replace(LIMITS, silence_seconds=0.5))
    asked = leave_connection_silent(run)
    (engine,) = run.engines
    engine.silent.add("/ready")
    publication = run.in_background(4)
    until(lambda: count_of(engine, "/ready") > 1, "the publication did not ask")
    until(lambda: "has not answered" in run.fleet.engines[0].reason, "the engine was not missed")
    engine.silent.clear()
    publication.result(60)
    assert asked.result(60).versions.tolist() == [4, 4, 4]


def test_what_is_asked_during_an_update_is_sent_once_the_probe_has_passed(make: Make) -> None:
    run = make()
    (engine,) = run.engines
    is_probed, is_proven = hold_probe(engine)
    publication = run.in_background(4)
    assert is_probed.wait(60)
    asked = run.ask()
    with pytest.raises(TimeoutError):
        asked.result(0.2)
    assert engine.prompts == []
    is_proven.set()
    publication.result(60)
    assert asked.result(60).versions.tolist() == [4, 4, 4]


def test_the_answers_of_an_engine_that_is_lost_in_an_update_are_asked_elsewhere(make: Make) -> None:
    run = make(count=2)
    for engine in run.engines:
        engine.behaviour = behind_a_pause(run, engine)
    dying, living = run.engines
    asked = run.ask_each()
    dying.failing["/update_weights"] = 500
    living.behaviour = None
    run.publish(4)
    assert [one.result(60).versions.tolist() for one in asked] == [[4, 4, 4], [3, 4, 4]]
    assert (len(dying.prompts), len(living.prompts)) == (1, 2)


def test_an_answer_with_tokens_of_new_weights_waits_for_their_probe(make: Make) -> None:
    run, is_proven = make(), threading.Event()
    (engine,) = run.engines
    engine.behaviour, engine.probed = behind_a_pause(run, engine), is_proven.wait
    (asked,) = run.ask_each()
    publication = run.in_background(4)
    until(lambda: not engine.in_flight, "the engine does not answer")
    with pytest.raises(TimeoutError):
        asked.result(0.2)
    is_proven.set()
    assert asked.result(60).versions.tolist() == [3, 4, 4]
    publication.result(60)


def test_an_answer_that_was_complete_before_is_not_held(make: Make) -> None:
    run, may_answer = make(), threading.Event()
    (engine,) = run.engines
    is_probed, is_proven = hold_probe(engine)

    async def answer_late(asked: AnswerRequest) -> web.Response:
        await asyncio.to_thread(may_answer.wait)
        return run.reply(engine, asked, [3, 3])

    engine.behaviour = answer_late
    (asked,) = run.ask_each()
    publication = run.in_background(4)
    assert is_probed.wait(60)
    may_answer.set()
    assert asked.result(60).versions.tolist() == [3, 3]
    assert not publication.done()
    is_proven.set()
    publication.result(60)


def test_answers_of_an_engine_whose_probe_fails_are_thrown_away_and_asked_again(make: Make) -> None:
    run = make(count=2)
    wrong, right = run.engines
    for engine in run.engines:
        engine.behaviour = behind_a_pause(run, engine)
    of_wrong, of_right = run.ask_each()
    wrong.probe = WRONG
    with pytest.raises(WrongWeights):
        run.publish(4)
    until(lambda: wrong.in_flight == right.in_flight == 0, "an engine does not answer")
    for asked in (of_wrong, of_right):
        with pytest.raises(TimeoutError):
            asked.result(0.1)
    wrong.probe = RIGHT
    wrong.behaviour = right.behaviour = None
    run.publish(4)
    # The first is what a second request got, the other what the right engine wrote from the start.
    assert of_wrong.result(60).tokens.tolist() == PROMPT
    assert of_right.result(60).versions.tolist() == [3, 4, 4]
    assert len(wrong.prompts) + len(right.prompts) == 3


def test_answers_in_flight_outlive_an_update_that_is_discarded(make: Make) -> None:
    run = make()
    (engine,) = run.engines
    engine.behaviour = behind_a_pause(run, engine)
    (asked,) = run.ask_each()
    engine.report = PublicationReport(missing=("model.norm.weight",), repeated=(), changed=())
    with pytest.raises(WrongWeights):
        run.publish(4)
    assert not engine.runs.is_set()
    assert engine.in_flight == 1
    engine.report = WHOLE
    run.publish(4)
    assert asked.result(60).versions.tolist() == [3, 4, 4]
    assert len(engine.prompts) == 1


def test_an_engine_that_returns_is_brought_to_the_weights_while_others_answer(make: Make) -> None:
    run, may_answer = make(count=2), threading.Event()
    away, other = run.engines

    async def answer_late(asked: AnswerRequest) -> web.Response:
        await asyncio.to_thread(may_answer.wait)
        return run.reply(other, asked, [3, 3])

    away.behaviour = other.behaviour = answer_late
    asked = run.ask_each()
    away.stop()
    until(lambda: other.in_flight == 2, "the other is not asked")
    away.version, away.behaviour, away.probe = "default", None, WRONG
    away.asked.clear()
    away.prompts.clear()
    away.start()
    until(lambda: away.asked.count("/resume") >= 2, "the engine is not brought to the weights")
    third = run.ask(7)
    until(lambda: other.in_flight == 3, "the engine with wrong weights is asked")
    away.probe = RIGHT
    until(lambda: len(run.fleet.serving_engines) == 2, "the engine does not serve again")
    assert other.in_flight == 3
    assert run.ask(8).result(60).tokens.tolist() == PROMPT
    may_answer.set()
    assert [one.result(60).versions.tolist() for one in (*asked, third)] == [[3, 3]] * 3
    assert len(away.prompts) == 1


def test_an_engine_that_returns_and_replies_nonsense_is_asked_again_later(make: Make) -> None:
    run = make(count=2)
    away, _ = run.engines
    away.stop()
    until(lambda: len(run.fleet.serving_engines) == 1, "the engine serves still")
    away.version, away.forgets = "default", "perhaps"
    away.start()
    until(lambda: "perhaps" in run.fleet.describe_problems(), "the engine is not brought to the weights")
    away.forgets = True
    until(lambda: len(run.fleet.serving_engines) == 2, "the engine does not serve again")


def test_an_engine_that_keeps_keys_of_older_weights_gets_no_work(make: Make) -> None:
    run = make()
    run.engines[0].forgets = False
    with pytest.raises(EnginesLost, match="keeps keys and values of older weights"):
        run.publish(4)


def test_weights_that_are_given_again_are_proven_again(make: Make) -> None:
    run, is_proven = make(), threading.Event()
    (engine,) = run.engines
    engine.behaviour, engine.probed = behind_a_pause(run, engine), is_proven.wait
    (asked,) = run.ask_each()
    publication = run.in_background(3)
    until(lambda: not engine.in_flight, "the engine does not answer")
    with pytest.raises(TimeoutError):
        asked.result(0.2)
    is_proven.set()
    publication.result(60)
    assert asked.result(60).versions.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda run: {"spans": (WeightSpan(weights=run.label(9), start=0, end=3),)}, id="not published yet"
        ),
        pytest.param(
            lambda run: {"spans": (WeightSpan(weights=run.label(3), start=-3, end=3),)}, id="before the first"
        ),
        pytest.param(lambda run: {"spans": (WeightSpan(weights=run.label(3), start=0, end=4),)}, id="behind the last"),
        pytest.param(lambda _: {"tokens": np.arange(9, dtype="<i4").tobytes()}, id="tokens without log-probabilities"),
        pytest.param(lambda _: {"finish_reason": "abort"}, id="ended by an engine that was not stopped"),
    ],
)
def test_an_answer_with_impossible_numbers_is_asked_again(
    make: Make, change: Callable[[InFlight], dict[str, Any]]
) -> None:
    run = make(count=2)
    odd, other = run.engines

    async def lie_once(asked: AnswerRequest) -> web.Response:
        return run.reply(odd, asked, [3, 3, 3], **change(run)) if len(odd.prompts) == 1 else odd.answer(asked)

    odd.behaviour = lie_once
    assert run.ask().result(60).tokens.tolist() == PROMPT
    assert len(odd.prompts) + len(other.prompts) == 2


def test_an_answer_that_takes_too_long_costs_no_engine_that_answers_others(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(limits=replace(LIMITS, answer_seconds=0.5))
    (engine,) = run.engines

    async def hang_once(asked: AnswerRequest) -> web.Response:
        first = len(engine.prompts) == 1
        return await engine.hang(asked) if first else engine.answer(asked)

    engine.behaviour = hang_once
    slow = run.ask()
    until(lambda: engine.in_flight == 1, "nothing was asked")
    assert run.ask(1).result(60).tokens.tolist() == PROMPT
    assert slow.result(60).tokens.tolist() == PROMPT
    assert "it gets no work" not in capsys.readouterr().err


# --- keys and values across versions --------------------------------------------------------------------------------


def test_keys_of_older_weights_are_kept_where_the_job_says_so_and_no_new_request_uses_them(make: Make) -> None:
    run = make(keeps_cache=True)
    (engine,) = run.engines
    run.ask().result(60)
    engine.asked.clear()
    run.publish(4)
    run.ask().result(60)
    assert "/pause?mode=keep&clear_cache=false" in engine.asked
    assert "/reset_prefix_cache" not in engine.asked
    assert [request.cache_salt for request in engine.requests] == [run.label(3), run.label(4)]


def test_keys_are_shared_by_all_requests_of_a_version_otherwise(make: Make) -> None:
    run = make()
    run.ask().result(60)
    assert run.engines[0].requests[0].cache_salt is None


# --- engines that stop ----------------------------------------------------------------------------------------------


def stopped_after(run: InFlight, engine: StandIn, counts: list[int], **changes: Any) -> Behaviour:
    """Return the behaviour of an engine that stops each request after the next of these counts, and then answers."""
    left = iter(counts)

    async def answer(asked: AnswerRequest) -> web.Response:
        count = next(left, None)
        version = int(engine.version.partition(".")[0])
        if count is None:
            return run.reply(engine, asked, [version] * asked.max_tokens, finish_reason="length")
        await engine.aborts.wait()
        return run.reply(engine, asked, [version] * count, **({"finish_reason": "abort"} | changes))

    return answer


def test_an_answer_of_an_engine_that_stops_goes_on_behind_its_tokens_with_the_next_weights(make: Make) -> None:
    run = make(is_colocated=True)
    (engine,) = run.engines
    engine.behaviour = stopped_after(run, engine, [2, 1])
    (asked,) = run.ask_each()
    for version in (4, 5):
        run.publisher.release()
        assert engine.in_flight == 0
        with pytest.raises(TimeoutError):
            asked.result(0.1)
        run.publish(version)
        until(lambda: engine.in_flight == 1 or asked.done(), "the answer does not go on")
    answer = asked.result(60)
    assert answer.tokens.tolist() == [100, 101, 100, 100, 101, 102]
    assert answer.versions.tolist() == [3, 3, 4, 5, 5, 5]
    assert answer.log_probabilities.tolist() == [-0.5] * 6
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.request.prompt.tolist() == PROMPT
    assert engine.prompts == [PROMPT, [*PROMPT, 100, 101], [*PROMPT, 100, 101, 100]]
    assert [request.max_tokens for request in engine.requests] == [6, 4, 3]
    assert len({request.seed for request in engine.requests}) == 3


def test_an_answer_without_a_token_is_asked_as_before(make: Make) -> None:
    run = make(is_colocated=True)
    (engine,) = run.engines
    engine.behaviour = stopped_after(run, engine, [0])
    (asked,) = run.ask_each()
    run.publisher.release()
    run.publish(4)
    assert asked.result(60).versions.tolist() == [4] * 6
    assert engine.requests[0] == engine.requests[1]


def test_what_is_asked_of_engines_that_have_stopped_waits_for_the_next_weights(make: Make) -> None:
    run = make(is_colocated=True)
    (engine,) = run.engines
    run.publisher.release()
    asked = run.ask()
    with pytest.raises(TimeoutError):
        asked.result(0.2)
    assert engine.prompts == []
    run.publish(4)
    assert asked.result(60).versions.tolist() == [4, 4, 4]


def test_engines_without_work_are_told_nothing_when_they_stop(make: Make) -> None:
    run = make(count=2, is_colocated=True)
    run.ask().result(60)
    asked = [engine.asked.copy() for engine in run.engines]
    run.publisher.release()
    run.connection.run(run.fleet.stop_watching())
    told = [engine.asked[len(before) :] for engine, before in zip(run.engines, asked, strict=True)]
    assert {path for paths in told for path in paths} <= {"/weight_info"}


class Room:
    """The memory of a GPU, and the order in which it is given and taken."""

    def __init__(self) -> None:
        self.engine: StandIn | None = None
        self.paths: list[str] = []

    def free_unused(self) -> None:
        """Nothing is unused."""

    def release(self) -> None:
        """Nothing is kept."""

    def acquire(self) -> None:
        """Note what the engine was asked before."""
        if self.engine is not None:
            self.paths = [path for path in self.engine.asked if path != "/weight_info"]


def test_engines_on_the_gpus_of_the_trainer_sleep_once_their_answers_have_returned(make: Make) -> None:
    room = Room()
    run = make(is_colocated=True, gpu_memory=room)
    (engine,) = run.engines
    engine.behaviour, room.engine = stopped_after(run, engine, [2]), engine
    (asked,) = run.ask_each()
    engine.asked.clear()
    run.publisher.release()
    assert room.paths == ["/pause?mode=abort", "/sleep?level=2"]
    assert engine.in_flight == 0
    run.publish(4)
    assert asked.result(60).versions.tolist() == [3, 3, 4, 4, 4, 4]
    # Without an unfinished answer they fall asleep at once.
    engine.asked.clear()
    run.publisher.release()
    assert room.paths == ["/sleep?level=2"]


def test_engines_with_gpus_of_their_own_do_not_stop(make: Make) -> None:
    run = make()
    (engine,) = run.engines
    run.publisher.release()
    assert run.ask().result(60).versions.tolist() == [3, 3, 3]
    assert "/pause?mode=abort" not in engine.asked


def test_a_request_that_was_on_its_way_when_the_engine_stopped_is_stopped_too(make: Make) -> None:
    run = make(is_colocated=True)
    (engine,) = run.engines

    async def miss_the_first(asked: AnswerRequest) -> web.Response:
        while engine.asked.count("/pause?mode=abort") < 3 and len(engine.prompts) == 1:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return run.reply(engine, asked, [3, 3], finish_reason="abort" if len(engine.prompts) == 1 else "stop")

    engine.behaviour = miss_the_first
    (asked,) = run.ask_each()
    run.publisher.release()
    assert engine.in_flight == 0
    run.publish(4)
    assert asked.result(60).tokens.tolist() == [100, 101, 100, 101]


def test_an_engine_that_does_not_stop_is_lost_and_the_parts_of_others_stay(make: Make) -> None:
    run = make(count=2, limits=replace(LIMITS, silence_seconds=0.5), is_colocated=True)
    hung, other = run.engines
    hung.behaviour, other.behaviour = hung.hang, stopped_after(run, other, [2])
    of_hung, of_other = run.ask_each()
    run.publisher.release()
    until(lambda: hung.cancelled == 1, "its request is not given up")
    hung.behaviour = stopped_after(run, hung, [])
    run.publish(4)
    assert of_hung.result(60).versions.tolist() == [4] * 6
    assert of_other.result(60).versions.tolist() == [3, 3, 4, 4, 4, 4]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"log_probabilities": b""}, id="without log-probabilities"),
        pytest.param({"spans": ()}, id="of no weights"),
        pytest.param({"tokens": np.array([100, 1], "<i4").tobytes()}, id="with an end"),
        pytest.param({"finish_reason": "error"}, id="with an error"),
    ],
)
def test_a_part_that_is_not_whole_is_thrown_away_and_asked_again(make: Make, changes: dict[str, Any]) -> None:
    run = make(count=2, is_colocated=True)
    for engine in run.engines:
        engine.behaviour = stopped_after(run, engine, [2], **(changes if engine is run.engines[0] else {}))
    lying, honest = run.ask_each()
    run.publisher.release()
    run.publish(4)
    assert lying.result(60).versions.tolist() == [4] * 6
    assert honest.result(60).versions.tolist() == [3, 3, 4, 4, 4, 4]


@pytest.mark.parametrize("count", [pytest.param(6, id="all tokens"), pytest.param(7, id="more tokens than asked for")])
def test_a_part_of_as_many_tokens_as_an_answer_may_have_is_a_lie(make: Make, count: int) -> None:
    run = make(is_colocated=True)
    (engine,) = run.engines
    engine.behaviour = stopped_after(run, engine, [count])
    (asked,) = run.ask_each()
    run.publisher.release()
    run.publish(4)
    assert asked.result(60).versions.tolist() == [4] * 6


def test_more_tokens_than_are_missing_are_a_lie(make: Make) -> None:
    run = make(count=2, is_colocated=True)
    lying, other = run.engines
    lying.behaviour = stopped_after(run, lying, [2])
    asked = run.ask()
    until(lambda: lying.in_flight == 1, "nothing was asked")
    run.publisher.release()

    async def add_one(request: AnswerRequest) -> web.Response:
        return run.reply(lying, request, [4] * (request.max_tokens + 1), finish_reason="length")

    lying.behaviour, other.behaviour = add_one, stopped_after(run, other, [])
    run.publish(4)
    assert asked.result(60).versions.tolist() == [3, 3, 4, 4, 4, 4]
    assert other.prompts == [[*PROMPT, 100, 101]]
