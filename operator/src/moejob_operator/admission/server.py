"""The server of kopf's admission webhook: over TLS, with bounds on what strangers may send, and with whole denials.

kopf's own server takes bodies of 1 MiB where etcd's largest objects make reviews of 4, has no bound on connections and
time, and its denials have neither a reason nor causes. kopf finds the handler, runs it and writes the answer.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import kopf
from aiohttp import web

from moejob_api.job import GROUP, PLURAL, VERSION
from moejob_operator.admission.listener import BoundedServer, ListenerLimits, open_listener
from moejob_operator.admission.review import HANDLER, PATH, CurrentReview, ReviewTurns, current_review

# Two objects of the most that etcd holds, as JSON in JSON.
BODY_BYTES = 4 * 1024 * 1024
# Every review may have this much, whatever others hold: jobs have a few kilobytes. Longer bodies share one bound.
OWN_BYTES = 64 * 1024
_ALL_BODIES_BYTES = 2 * BODY_BYTES
# Values in a body, counted by the marks before and between them. Python parses JSON in one go: this many take 20 ms, in
# which nothing else runs. A job with every field set, old and new with all metadata, has a tenth.
VALUES = 50_000
_RESOURCE = {"group": GROUP, "version": VERSION, "resource": PLURAL}


class AdmissionMetrics(Protocol):
    """The counters of answers."""

    def count_review(self, verdict: str, seconds: float) -> None:
        """Count a review that was answered with allowed, denied or unreadable."""


class InvalidReview(ValueError):
    """The body is no AdmissionReview of a job: its sender is no API server that the chart has set up."""


@dataclass
class AdmissionServer:
    """Serves once there is a certificate. `served_port` is the requested port; for 0, the one that the system chose."""

    context: ssl.SSLContext
    certified: asyncio.Event
    port: int
    metrics: AdmissionMetrics
    # All addresses of this machine.
    host: str | None = None
    limits: ListenerLimits = field(default_factory=ListenerLimits)
    body_seconds: float = 5.0
    turns: ReviewTurns = field(default_factory=ReviewTurns)
    served_port: int | None = field(default=None, init=False)
    # Of all bodies at hand.
    held_bytes: int = field(default=0, init=False)
    # Held by one large review at a time: a parsed body takes many times its bytes.
    _large_review_turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def __call__(self, fn: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        """Serve for as long as kopf iterates. `fn` answers a review."""
        await self.certified.wait()

        async def handle_request(request: web.BaseRequest) -> web.StreamResponse:
            return await self._handle_request(request, fn)

        server = BoundedServer(handle_request, self.limits)
        async with open_listener(server, self.host, self.port, self.context) as self.served_port:
            # The chart owns the webhook configuration: where the API server finds us is not for kopf to write.
            yield kopf.WebhookClientConfig()
            await asyncio.Event().wait()

    @property
    def is_serving(self) -> bool:
        """True from the first moment on at which a review would be answered."""
        return self.served_port is not None

    async def _handle_request(self, request: web.BaseRequest, fn: kopf.WebhookFn) -> web.StreamResponse:
        if (request.method, request.path) != ("POST", PATH):
            return web.Response(status=404, text=f"there is only POST {PATH} here\n")
        body, started, verdict = bytearray(), time.monotonic(), "unreadable"
        try:
            await self._read_body(request, body)
            async with self._large_review_turn if len(body) > OWN_BYTES else nullcontext():
                reply = await _run_handler(await asyncio.to_thread(read_review, body), fn, self.turns)
            verdict = "allowed" if reply["response"]["allowed"] else "denied"
            return web.json_response(reply)
        except InvalidReview as refusal:
            return web.Response(status=400, text=f"{refusal}\n")
        except _RefusedRequest as refusal:
            return web.Response(status=refusal.status, text=f"{refusal}\n")
        finally:
            self.held_bytes -= len(body)
            body.clear()
            self.metrics.count_review(verdict, time.monotonic() - started)

    async def _read_body(self, request: web.BaseRequest, body: bytearray) -> None:
        try:
            async with asyncio.timeout(self.body_seconds):
                async for chunk in request.content.iter_any():
                    body += chunk
                    self.held_bytes += len(chunk)
                    if len(body) > BODY_BYTES:
                        raise _RefusedRequest(413, f"the body has more than {BODY_BYTES} bytes")
                    if len(body) > OWN_BYTES and self.held_bytes > _ALL_BODIES_BYTES:
                        raise _RefusedRequest(503, "there is no room for another review now")
        except TimeoutError:
            raise _RefusedRequest(408, f"the body has not arrived within {self.body_seconds:g} s") from None
        if sum(map(body.count, (b",", b":", b"[", b"{"))) > VALUES:
            raise _RefusedRequest(413, f"the body has more than {VALUES} values")


class IdleServer:
    """No server, where an installation has no webhook: kopf insists on one because there is a handler."""

    is_serving = False

    async def __call__(self, _: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        """Serve nothing, for as long as kopf iterates."""
        yield kopf.WebhookClientConfig()
        await asyncio.Event().wait()


class _RefusedRequest(Exception):
    """A request that is not read to its end."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class JobReview:
    """The AdmissionReview of a job, and the part of it that kopf sees."""

    shown: Mapping[str, Any]
    old: Mapping[str, Any] | None
    new: Mapping[str, Any] | None


def read_review(body: bytes | bytearray) -> JobReview:
    """Return the AdmissionReview in a body; a body without one of a job is an error."""
    try:
        document = json.loads(body)
    # ValueError covers bytes that are not UTF-8, text that is not JSON, and numbers with too many digits for Python.
    except (ValueError, RecursionError) as error:
        raise InvalidReview(f"the body is not JSON: {error}") from None
    request = document.get("request") if isinstance(document, Mapping) else None
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise InvalidReview("the body is no AdmissionReview with a request and its uid")
    resource = request.get("resource")
    if resource != _RESOURCE or not isinstance(request.get("userInfo"), Mapping):
        raise InvalidReview(f"the review is not of a user's request about {_RESOURCE}, but about {str(resource)[:200]}")
    old, new = _reviewed_object(request.get("oldObject")), _reviewed_object(request.get("object"))
    if old is None and new is None:
        raise InvalidReview("the review is of no object")
    objects = {"oldObject": _shown_names(old), "object": _shown_names(new)}
    return JobReview({**document, "request": {**request, **objects}}, old, new)


def _reviewed_object(raw: object) -> Mapping[str, Any] | None:
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise InvalidReview("the object in the review is none")
    if not isinstance(raw.get("metadata", {}), Mapping | None):
        raise InvalidReview("the metadata of the object in the review are none")
    return raw


def _shown_names(raw: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return an object's names, which kopf logs. It gets no UID, for it keeps every UID that it sees in memory."""
    if raw is None:
        return None
    metadata = raw.get("metadata") or {}
    names = {name: metadata[name] for name in ("name", "namespace") if name in metadata}
    return {name: raw[name] for name in ("apiVersion", "kind") if name in raw} | {"metadata": names}


async def _run_handler(review: JobReview, fn: kopf.WebhookFn, turns: ReviewTurns) -> Any:
    """Return kopf's answer, with all of the denial's status."""
    current = CurrentReview(review.old, review.new, turns)
    token = current_review.set(current)
    try:
        reply: Any = await fn(review.shown, webhook=HANDLER)  # type: ignore[arg-type]  # it reads a mapping
    finally:
        current_review.reset(token)
    if current.status:
        reply["response"]["status"] = current.status
    return reply
