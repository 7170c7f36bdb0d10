"""The path of answers in front of an engine that does what the test wants. test_engine.py has those of a real one."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from itertools import islice

import pytest

from fuzzing import damage_sample, random_sources
from moejob_api.contract.answers import AnswerRequest
from moejob_api.contract.pods import HttpPath
from moejob_rollout.listener import StrangerLimits
from rollout.served import KEY, EngineServer, served
from rollout.test_listener import asked, connected, eventually

BODY = AnswerRequest(prompt=bytes(8), seed=1, temperature=1.0, top_p=1.0, max_tokens=4, stop_tokens=(1,))
TEXT = BODY.model_dump_json().encode()


@pytest.fixture
def server() -> Iterator[EngineServer]:
    with served(StrangerLimits(seconds=600.0)) as server:
        # Each server asks for a first token.
        eventually(lambda: server.client.asked == 1, "the server does not start")
        yield server


def request(body: bytes = TEXT) -> bytes:
    head = f"POST {HttpPath.ANSWER} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n".encode()
    return head + KEY + b"Connection: close\r\n\r\n" + body


def status(answer: bytes) -> int:
    return int(answer.split()[1])


def test_the_work_for_a_client_that_leaves_is_given_up(server: EngineServer) -> None:
    with connected(server) as client:
        client.sendall(request())
        eventually(lambda: server.client.asked == 2, "the engine is not asked")
    eventually(lambda: server.client.given_up == 1, "the engine computes all the same")


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        pytest.param(ValueError("the prompt is too long"), HTTPStatus.BAD_REQUEST, id="of the request"),
        pytest.param(RuntimeError("it is dead"), HTTPStatus.INTERNAL_SERVER_ERROR, id="of the engine"),
    ],
)
def test_a_failure_says_whose_it_is(server: EngineServer, failing: Exception, expected: HTTPStatus) -> None:
    server.client.failing = failing
    server.client.may_answer.set()
    answer = asked(server, request())
    assert status(answer) == expected
    if expected is HTTPStatus.BAD_REQUEST:
        assert b"too long" in answer


def test_a_damaged_request_is_answered_or_refused(server: EngineServer) -> None:
    server.client.failing = ValueError("nothing is computed here")
    server.client.may_answer.set()
    for draw in islice(random_sources(), 300):
        assert status(asked(server, request(damage_sample(draw, [TEXT])))) == HTTPStatus.BAD_REQUEST
