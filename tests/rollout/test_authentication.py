"""The door of an engine: a key of the job's secret opens it, and the secret itself does not."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from moejob_api.contract.pods import Environment, engine_key
from moejob_rollout.authentication import AGAIN_SECONDS, FirstToken, KeyAuthentication
from moejob_rollout.listener import VISITOR, StrangerLimits, Strangers, Visitor
from rollout.served import Client

SECRET = "5" * 64


async def app(_: Any, __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def status(given: str | None) -> int:
    """The answer to a request with this authorization."""
    headers = [] if given is None else [(b"authorization", given.encode())]
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request"}

    state = {VISITOR: Visitor(Strangers(StrangerLimits()))}
    scope = {"type": "http", "path": "/v1/models", "headers": headers, "state": state}
    asyncio.run(KeyAuthentication(app)(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        pytest.param(f"Bearer {engine_key(SECRET)}", 200, id="the key"),
        pytest.param(f"Bearer {SECRET}", 401, id="the secret, which is never sent"),
        pytest.param(f"Bearer {engine_key('6' * 64)}", 401, id="the key of another job"),
        pytest.param("", 401, id="nothing"),
        pytest.param(None, 401, id="no header"),
    ],
)
def test_a_key_of_the_secret_opens_the_engine(given: str | None, answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Environment.SECRET, SECRET)
    assert status(given) == answer


def test_the_key_of_engines_does_not_tell_the_secret() -> None:
    assert SECRET not in engine_key(SECRET)
    assert len(engine_key(SECRET)) == 64


def test_a_first_token_that_fails_is_asked_for_again_after_a_while_and_not_by_each_caller() -> None:
    client, first = Client(), FirstToken()
    client.may_answer.set()
    client.failing = ValueError("no room")

    async def asked(now: float) -> int:
        for _ in range(20):
            first.request_token(client, now)
            await asyncio.sleep(0)
        while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return client.asked

    async def story() -> None:
        assert (await asked(1.0), first.is_generated) == (1, False)
        assert await asked(1.0 + AGAIN_SECONDS / 2) == 1
        assert await asked(1.0 + AGAIN_SECONDS) == 2
        client.failing = None
        assert (await asked(2.0 + 2 * AGAIN_SECONDS), first.is_generated) == (3, True)
        assert await asked(3.0 + 3 * AGAIN_SECONDS) == 3

    asyncio.run(story())
