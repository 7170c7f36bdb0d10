"""Owns an HTTP server on loopback that answers as an API server by a table, and remembers what it was asked.

For what the operator makes of answers; how a real API server answers is for tests/cluster.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from moejob_api.job import GROUP, PLURAL, VERSION
from moejob_client.api_client import ApiClient
from moejob_client.credentials import Credentials

# Status and body: without one the object that was sent comes back as an API server keeps it. A status below 0 answers
# 200 and then says nothing for ever.
Answer = tuple[int, Any]


@dataclass(frozen=True)
class RecordedRequest:
    """One request."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class RequestMetrics:
    """Metrics that remember."""

    seen: list[tuple[str, str, str]] = field(default_factory=list)

    def count_request(self, verb: str, resource: str, code: str, _seconds: float) -> None:
        self.seen.append((verb, resource, code))


@dataclass
class StandInServer:
    """The answers to "METHOD /path", or "METHOD /path?watch". Answers are given in turn, the last one for ever."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    requests: list[RecordedRequest] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    # Requests hang while this is cleared.
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    most_at_once: int = 0
    versions: int = 100
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)
    _at_once: int = 0

    def set_answers(self, request: str, *answers: Answer) -> None:
        self.answers[request] = list(answers)

    def serve_jobs(self) -> None:
        """Answer what kopf asks before it watches jobs."""
        self.set_answers("GET /api", (200, {"versions": ["v1"]}))
        self.set_answers("GET /api/v1", api_resources("namespaces"))
        self.set_answers("GET /apis", api_groups())
        self.set_answers(f"GET /apis/{GROUP}/{VERSION}", api_resources(PLURAL))

    @property
    def calls(self) -> list[str]:
        return [str(request) for request in self.requests]

    async def await_request(self, call: str, times: int = 1) -> None:
        """Wait for a request to have come so often."""
        async with asyncio.timeout(30), self._news:
            await self._news.wait_for(lambda: self.calls.count(call) >= times)

    async def handle(self, request: web.Request) -> web.Response:
        content = await request.text()
        recorded = RecordedRequest(
            request.method, request.path, dict(request.query), request.headers, json.loads(content) if content else None
        )
        self.requests.append(recorded)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        async with self._news:
            self._news.notify_all()
        try:
            await self.answering.wait()
        finally:
            self._at_once -= 1
        name = f"{recorded}?watch" if "watch" in recorded.query else str(recorded)
        answers = self.answers.get(name) or [refusal_answer(404, "NotFound", f"no answer to {name}")]
        code, body = answers.pop(0) if len(answers) > 1 else answers[0]
        if code < 0:
            return await self._stay_silent(request)
        if body is None:
            body = self._complete_body(recorded.body)
        return web.Response(
            status=code, text=body if isinstance(body, str) else json.dumps(body), content_type="application/json"
        )

    def _complete_body(self, body: Any) -> Any:
        self.versions += 1
        metadata = {"uid": f"uid-{self.versions}", **body["metadata"], "resourceVersion": str(self.versions)}
        return {**body, "metadata": metadata}

    async def _stay_silent(self, request: web.Request) -> web.Response:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        raise AssertionError


def api_groups(group: str = GROUP) -> Answer:
    """The groups that an API server says it serves."""
    version = {"groupVersion": f"{group}/{VERSION}", "version": VERSION}
    return 200, {"groups": [{"name": group, "versions": [version], "preferredVersion": version}]}


def api_resources(*names: str) -> Answer:
    """The resources of a group that an API server says it serves."""
    verbs = ["get", "list", "watch", "patch"]
    return 200, {
        "resources": [
            {"name": name, "singularName": "", "kind": "MoETrainingJob", "namespaced": True, "verbs": verbs}
            for name in names
        ]
    }


def refusal_answer(code: int, reason: str, message: str = "said the API server") -> tuple[int, Any]:
    """A refusal as an API server words it."""
    return code, {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}


def list_answer(
    *items: Any, kind: str = "PodList", api: str = "v1", version: str = "100", more: str = ""
) -> tuple[int, Any]:
    """A page of a list, its items without kind and apiVersion as in a real one."""
    return 200, {
        "kind": kind,
        "apiVersion": api,
        "metadata": {"resourceVersion": version, "continue": more},
        "items": list(items),
    }


def stored_object(kind: str, name: str, version: int = 1, **fields: Any) -> dict[str, Any]:
    """An object as an API server keeps it; labels and owners are given as such, the rest as it is."""
    labels, owner, metadata = fields.pop("labels", {}), fields.pop("owner", None), fields.pop("metadata", {})
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": labels,
            **({"ownerReferences": [_reference(owner)]} if owner else {}),
            **metadata,
        },
        **fields,
    }


def _reference(uid: str) -> dict[str, Any]:
    """The reference to a job that controls an object."""
    return {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "name": "job",
        "uid": uid,
        "controller": True,
    }


@asynccontextmanager
async def serve_stand_in(seconds: float = 5.0, concurrency: int = 4) -> AsyncIterator[tuple[StandInServer, ApiClient]]:
    """A server, and a client that speaks to it."""
    server = StandInServer()
    server.answering.set()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    credentials = Credentials(host=server.url)
    api = ApiClient(credentials, server.metrics, concurrency=concurrency, seconds=seconds)
    try:
        yield server, api
    finally:
        server.answering.set()
        await api.close()
        await runner.cleanup()
