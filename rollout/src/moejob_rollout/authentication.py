"""Authentication of requests by a key of the job's secret, and replies to probes, before any other path.

vLLM's own --api-key guards some paths only, and a client that reaches the others could load other weights. A client
without the key gets one reply, for which nothing is computed, and its connection is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from moejob_api.contract.pods import Environment, HttpPath, engine_key
from moejob_rollout.answering import answer_request
from moejob_rollout.asgi import App, Receive, Reply, Scope, Send
from moejob_rollout.listener import VISITOR
from moejob_rollout.reporting import report_publication

# A failure may repeat, and every client of the probe would start a new try.
AGAIN_SECONDS = 5.0
_log = logging.getLogger(__name__)


class KeyAuthentication:
    """An ASGI middleware, which vLLM puts in front of all of its paths."""

    def __init__(self, app: App) -> None:
        self._app = app
        secret = os.environ.get(Environment.SECRET)
        self._expected = None if secret is None else f"Bearer {engine_key(secret)}".encode()
        self._first_token = FirstToken()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] == "lifespan":
            self._first_token.request_token(scope["app"].state.engine_client, time.monotonic())
            await self._app(scope, receive, send)
            return
        has_key = self._has_key(scope)
        if has_key:
            scope["state"][VISITOR].has_key()
        if scope.get("path") == HttpPath.READY:
            await self._reply_ready(scope, Reply(send, keeps_open=has_key))
        elif has_key and scope.get("path") == HttpPath.ANSWER:
            await answer_request(scope, receive, send)
        elif has_key and scope.get("path") == HttpPath.PUBLICATION:
            await report_publication(scope, send)
        elif has_key:
            await self._app(scope, receive, send)
        else:
            reply = Reply(send, keeps_open=False)
            await reply(HTTPStatus.UNAUTHORIZED, "the key of this job is missing or wrong")

    def _has_key(self, scope: Scope) -> bool:
        if self._expected is None:
            return True
        presented_key = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(presented_key, self._expected)

    async def _reply_ready(self, scope: Scope, reply: Reply) -> None:
        """Reply with 200 once the engine has generated a token: /health does so before the engine can generate.

        A sleeping or paused engine generates nothing and still is ready, so later only the engine's life is checked.
        """
        client = scope["app"].state.engine_client
        if client.errored:
            await reply(HTTPStatus.SERVICE_UNAVAILABLE, "the engine has died")
        elif self._first_token.is_generated:
            await reply(HTTPStatus.OK, "ready")
        else:
            self._first_token.request_token(client, time.monotonic())
            await reply(HTTPStatus.SERVICE_UNAVAILABLE, "the engine has generated no token yet")


class FirstToken:
    """The first token of an engine, generated once for all probes, and again a while after a failure."""

    def __init__(self) -> None:
        self.is_generated = False
        self._generation: asyncio.Task[None] | None = None
        self._not_before = 0.0

    def request_token(self, client: Any, now: float) -> None:
        """Generate it, unless it is there or under way, or was requested a moment ago."""
        if not self.is_generated and self._generation is None and now >= self._not_before:
            self._not_before = now + AGAIN_SECONDS
            self._generation = asyncio.create_task(_generate_one(client))
            self._generation.add_done_callback(self._note_result)

    def _note_result(self, generation: asyncio.Task[None]) -> None:
        self._generation = None
        if generation.cancelled():
            return
        self.is_generated = generation.exception() is None
        if not self.is_generated:
            _log.error("the engine cannot generate", exc_info=generation.exception())


async def _generate_one(client: Any) -> None:
    from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415  # a program that only reads this has no vLLM

    sampling = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    async for _ in client.generate(TokensPrompt(prompt_token_ids=[0]), sampling, f"ready-{uuid4()}"):
        pass
