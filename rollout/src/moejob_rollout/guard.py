"""The door of the server: it asks for a key of the job's secret, and answers probes.

vLLM's own --api-key guards some paths only, and anyone who can reach the others could put other weights in.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from moejob_api.contract import Environment, HttpPath, engine_key

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# The path of vLLM that takes and gives token ids.
GENERATE = "/inference/v1/generate"


class Guard:
    """An ASGI middleware, which vLLM puts in front of all of its paths."""

    def __init__(self, app: App) -> None:
        self._app = app
        secret = os.environ.get(Environment.SECRET)
        self._expected = None if secret is None else f"Bearer {engine_key(secret)}".encode()
        self._has_generated = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope.get("path") == HttpPath.READY:
            await self._ready(scope, send)
        elif self._is_refused(scope):
            await _answer(send, HTTPStatus.UNAUTHORIZED, "the key of this job is missing or wrong")
        else:
            await self._app(scope, receive, send)

    def _is_refused(self, scope: Scope) -> bool:
        if self._expected is None:
            return False
        given = dict(scope["headers"]).get(b"authorization", b"")
        return not hmac.compare_digest(given, self._expected)

    async def _ready(self, scope: Scope, send: Send) -> None:
        """Answer 200 once the engine has generated a token: /health does so before the first one can be had.

        One that is asleep or paused generates nothing and is ready all the same, so later only its life is asked for.
        """
        client = scope["app"].state.engine_client
        if client.errored:
            await _answer(send, HTTPStatus.SERVICE_UNAVAILABLE, "the engine has died")
            return
        if not self._has_generated:
            await _generate_one(client)
            self._has_generated = True
        await _answer(send, HTTPStatus.OK, "ready")


async def _generate_one(client: Any) -> None:
    from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415  # a program that only reads this has no vLLM

    sampling = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    async for _ in client.generate(TokensPrompt(prompt_token_ids=[0]), sampling, f"ready-{uuid4()}"):
        pass


async def _answer(send: Send, status: HTTPStatus, text: str) -> None:
    body = f"{text}\n".encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})
