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
from moejob_operator.admission.listener import BoundedServer, ListenerLimits, listening
from moejob_operator.admission.review import HANDLER, PATH, ReviewAtHand, ReviewTurns, at_hand

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

    def reviewed(self, answer: str, seconds: float) -> None:
        """Count a review that was answered with allowed, denied or unreadable."""


class NotAReview(ValueError):
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
    _one_large: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def __call__(self, fn: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        """Serve for as long as kopf iterates. `fn` answers a review."""
        await self.certified.wait()

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await self._handle(request, fn)

        server = BoundedServer(handle, self.limits)
        async with listening(server, self.host, self.port, self.context) as self.served_port:
            # The chart owns the webhook configuration: where the API server finds us is not for kopf to write.
            yield kopf.WebhookClientConfig()
            await asyncio.Event().wait()

    @property
    def is_serving(self) -> bool:
        """True from the first moment on at which a review would be answered."""
        return self.served_port is not None

    async def _handle(self, request: web.BaseRequest, fn: kopf.WebhookFn) -> web.StreamResponse:
        if (request.method, request.path) != ("POST", PATH):
            return web.Response(status=404, text=f"there is only POST {PATH} here\n")
        held, started, answer = bytearray(), time.monotonic(), "unreadable"
        try:
            await self._read(request, held)
            async with self._one_large if len(held) > OWN_BYTES else nullcontext():
                answered = await _answered(await asyncio.to_thread(read_review, held), fn, self.turns)
            answer = "allowed" if answered["response"]["allowed"] else "denied"
            return web.json_response(answered)
        except NotAReview as refused:
            return web.Response(status=400, text=f"{refused}\n")
        except _Refused as refused:
            return web.Response(status=refused.status, text=f"{refused}\n")
        finally:
            self.held_bytes -= len(held)
            held.clear()
            self.metrics.reviewed(answer, time.monotonic() - started)

    async def _read(self, request: web.BaseRequest, held: bytearray) -> None:
        try:
            async with asyncio.timeout(self.body_seconds):
                async for chunk in request.content.iter_any():
                    held += chunk
                    self.held_bytes += len(chunk)
                    if len(held) > BODY_BYTES:
                        raise _Refused(413, f"the body has more than {BODY_BYTES} bytes")
                    if len(held) > OWN_BYTES and self.held_bytes > _ALL_BODIES_BYTES:
                        raise _Refused(503, "there is no room for another review now")
        except TimeoutError:
            raise _Refused(408, f"the body has not arrived within {self.body_seconds:g} s") from None
        if sum(map(held.count, (b",", b":", b"[", b"{"))) > VALUES:
            raise _Refused(413, f"the body has more than {VALUES} values")


class IdleServer:
    """No server, where an installation has no webhook: kopf insists on one because there is a handler."""

    is_serving = False

    async def __call__(self, _: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        """Serve nothing, for as long as kopf iterates."""
        yield kopf.WebhookClientConfig()
        await asyncio.Event().wait()


class _Refused(Exception):
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
        found = json.loads(body)
    # ValueError covers bytes that are not UTF-8, text that is not JSON, and numbers with too many digits for Python.
    except (ValueError, RecursionError) as error:
        raise NotAReview(f"the body is not JSON: {error}") from None
    request = found.get("request") if isinstance(found, Mapping) else None
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise NotAReview("the body is no AdmissionReview with a request and its uid")
    resource = request.get("resource")
    if resource != _RESOURCE or not isinstance(request.get("userInfo"), Mapping):
        raise NotAReview(f"the review is not of a user's request about {_RESOURCE}, but about {str(resource)[:200]}")
    old, new = _object(request.get("oldObject")), _object(request.get("object"))
    if old is None and new is None:
        raise NotAReview("the review is of no object")
    objects = {"oldObject": _shown(old), "object": _shown(new)}
    return JobReview({**found, "request": {**request, **objects}}, old, new)


def _object(raw: object) -> Mapping[str, Any] | None:
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise NotAReview("the object in the review is none")
    if not isinstance(raw.get("metadata", {}), Mapping | None):
        raise NotAReview("the metadata of the object in the review are none")
    return raw


def _shown(raw: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return an object's names, which kopf logs. It gets no UID, for it keeps every UID that it sees in memory."""
    if raw is None:
        return None
    metadata = raw.get("metadata") or {}
    names = {name: metadata[name] for name in ("name", "namespace") if name in metadata}
    return {name: raw[name] for name in ("apiVersion", "kind") if name in raw} | {"metadata": names}


async def _answered(found: JobReview, fn: kopf.WebhookFn, turns: ReviewTurns) -> Any:
    """Return kopf's answer, with all of the denial's status."""
    asked = ReviewAtHand(found.old, found.new, turns)
    token = at_hand.set(asked)
    try:
        answered: Any = await fn(found.shown, webhook=HANDLER)  # type: ignore[arg-type]  # it reads a mapping
    finally:
        at_hand.reset(token)
    if asked.status:
        answered["response"]["status"] = asked.status
    return answered
