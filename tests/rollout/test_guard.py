"""The door of an engine: a key of the job's secret opens it, and the secret itself does not."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from moejob_api.contract import Environment, engine_key
from moejob_rollout.guard import Guard

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

    asyncio.run(Guard(app)({"type": "http", "path": "/v1/models", "headers": headers}, receive, send))
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
