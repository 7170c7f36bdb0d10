"""Engines that misbehave as a real one cannot be made to: an HTTP server for each, driven by the test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.answers import AnswerRequest, EngineAnswer, WeightSpan
from moejob_api.contract.pods import HttpPath
from moejob_api.contract.publications import PublicationReport
from moejob_trainer.runtime.channel import BROKEN, prove_to_server, splice_streams
from moejob_trainer.runtime.loop_thread import LoopThread

# Says what to answer a request for tokens.
Behaviour = Callable[[AnswerRequest], Awaitable[web.Response]]

WHOLE = PublicationReport(missing=(), repeated=(), changed=())


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def carried(host: str, port: int, key: bytes) -> int:
    """Return a port of loopback, from where bytes reach one that asks for a proof of the key: as workers do it."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(*BROKEN):
            far = await asyncio.open_connection(host, port)
            await prove_to_server(*far, key)
            await splice_streams((reader, writer), far)

    server: asyncio.Server = LoopThread().run(asyncio.start_server(carry, LOOPBACK, 0), 60)
    found: int = server.sockets[0].getsockname()[1]
    return found


@dataclass
class StandIn:
    """One engine of a stand-in server; `asked` are the paths that were called, in order."""

    version: str = "default"
    behaviour: Behaviour | None = None
    asked: list[str] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    requests: list[AnswerRequest] = field(default_factory=list)
    cancelled: int = 0
    most_in_flight: int = 0
    in_flight: int = 0
    # Of each path, the status that it answers with instead of 200.
    failing: dict[str, int] = field(default_factory=dict)
    # The paths that it does not answer.
    silent: set[str] = field(default_factory=set)
    # Of what it was sent.
    report: PublicationReport = field(default=WHOLE)
    # Whether it can clear its cache, or nonsense.
    forgets: bool | str = True
    # Log-probability of every token of a probe.
    probe: float = -1.0
    # Works in a thread before the answer to a probe.
    probed: Callable[[], object] | None = None
    # Each works in a thread before the answer; given what is sent to join a group, and to receive a bucket.
    joined: Callable[[dict[str, Any]], None] | None = None
    updated: Callable[[dict[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        # Whether it generates, and whether it has to return what it has.
        self.runs, self.aborts = asyncio.Event(), asyncio.Event()
        self.runs.set()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._run(self._started())

    def stop(self) -> None:
        """Break all connections and listen no more."""
        if self._runner is not None:
            self._run(self._runner.cleanup())
            self._runner = None

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, asked: Any) -> None:
        asyncio.run_coroutine_threadsafe(asked, self._loop).result(60)

    async def _started(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        if request.path in self.failing.keys() | self.silent:
            return await self._failed(request.path)
        if request.path == HttpPath.PUBLICATION:
            return web.Response(text=self.report.model_dump_json())
        return await self._worked(request)

    async def _worked(self, request: web.Request) -> web.Response:
        match request.path:
            case "/weight_info":
                return web.json_response({"weight_version": self.version})
            case "/reset_prefix_cache":
                return web.json_response({"success": self.forgets})
            case HttpPath.ANSWER:
                return await self._generated(AnswerRequest.model_validate_json(await request.read()))
            case "/pause" | "/resume":
                self._paused(request.query.get("mode"))
            case _:
                body = await request.json() if request.method == "POST" and request.can_read_body else {}
                return await self._given(request.path, body)
        return web.json_response({})

    async def _given(self, path: str, body: dict[str, Any]) -> web.Response:
        match path:
            case "/init_weight_transfer_engine" if self.joined:
                await asyncio.to_thread(self.joined, body["init_info"])
            case "/update_weights" if self.updated:
                await asyncio.to_thread(self.updated, body["update_info"])
            case "/finish_weight_update":
                self.version = body["weight_version"]
            case "/inference/v1/generate":
                if self.probed:
                    await asyncio.to_thread(self.probed)
                return self._probed(body["token_ids"])
            case _:
                pass
        return web.json_response({})

    def _paused(self, mode: str | None) -> None:
        """Follow a pause with its mode, or a resumption, which has none."""
        for event, is_set in ((self.runs, mode is None), (self.aborts, mode == "abort")):
            if is_set:
                event.set()
            else:
                event.clear()

    async def _failed(self, path: str) -> web.Response:
        if path in self.silent:
            return await self.hang(None)
        return web.json_response({"error": "told to fail"}, status=self.failing[path])

    def _probed(self, tokens: list[int]) -> web.Response:
        rows = [None, *({str(token): {"logprob": self.probe}} for token in tokens[1:])]
        return web.json_response({"choices": [{}], "prompt_logprobs": rows})

    async def _generated(self, asked: AnswerRequest) -> web.Response:
        self.prompts.append(np.frombuffer(asked.prompt, "<i4").tolist())
        self.requests.append(asked)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.behaviour(asked) if self.behaviour else self.answer(asked)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    def answer(self, asked: AnswerRequest, **changes: Any) -> web.Response:
        """Return the answer of a healthy engine: the prompt once more."""
        count = len(asked.prompt) // 4
        answer = EngineAnswer(
            tokens=asked.prompt,
            log_probabilities=np.full(count, -0.5, "<f4").tobytes(),
            spans=(WeightSpan(weights=self.version, start=0, end=count),),
            finish_reason="stop",
        )
        return web.Response(text=answer.model_copy(update=changes).model_dump_json())

    async def hang(self, _: AnswerRequest | None) -> web.Response:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 600)
        return web.json_response({})
