"""The HTTP session through which kopf watches jobs. It passes on only responses that kopf survives.

A refusal (401 to 410), a line that is cut or no JSON, and an error in the stream other than 410 each end a watch of
kopf 1.45, and with it the operator; a watch that ends at once is begun again without a pause. So trouble is waited out
here and handed on as a broken connection, after which kopf begins again. docs/decisions/kopf.md has the reports.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable

import aiohttp
import kopf

from moejob_api.job import GROUP, PLURAL
from moejob_operator.cluster import Conflict, Forbidden, Raw, Retryable
from moejob_operator.kube_api.api_client import (
    Absent,
    ApiClient,
    Exists,
    Expired,
    RequestMetrics,
    Verb,
    lines,
    listing_of,
    resource_of,
    understood,
    watch_event,
)
from moejob_operator.kube_api.informers import Pauses
from moejob_operator.kube_api.live_lists import JOBS
from moejob_operator.logs import Log
from moejob_operator.runtime.job_watch import JobWatch

log = Log(__name__)

_BROKEN = (Absent, Conflict, Exists, Forbidden, Retryable, aiohttp.ClientError, OSError, TimeoutError)
_EXPIRED = b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}\n'


class KopfSession:
    """Requests of kopf to the API server, with our credentials, which are read again for each of them."""

    def __init__(self, api: ApiClient, watches: Iterable[JobWatch], metrics: RequestMetrics) -> None:
        self._api = api
        self._metrics = metrics
        self._watches = {watch.path: watch for watch in watches}
        self._pauses = Pauses()

    def credentials(self) -> kopf.AiohttpSession:
        """Return the answer to kopf's login."""
        return kopf.AiohttpSession(server=self._api.host, aiohttp_session=self._api.session(self._ask))

    async def _ask(self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        watch = self._watches.get(request.url.path)
        if watch is None:
            return await self._discover(request, handler)
        watch.touch()
        ask = self._watch if "watch" in request.url.query else self._list
        try:
            return await ask(watch, request, handler)
        except _BROKEN as error:
            log.warning("jobs cannot be watched", part=watch.name, error=str(error) or repr(error))
            await watch.pauses.wait()
            # The one error after which kopf begins both a list and a watch again.
            raise aiohttp.ClientPayloadError(f"{watch.name}: {error!r}") from error

    async def _list(
        self, watch: JobWatch, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await self._sent(Verb.LIST, request, handler)
        page = _object(response, await response.read())
        try:
            listing, more = listing_of(page), page["metadata"].get("continue")
        except (KeyError, TypeError, AttributeError) as error:
            raise Retryable(f"no list of jobs: {error!r}") from error
        watch.take(listing, is_first="continue" not in request.url.query, is_last=not more)
        watch.pauses.reset()
        return response

    async def _watch(
        self, watch: JobWatch, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await self._sent(Verb.WATCH, request, handler)
        lines_of = _Events(response.content, watch)
        if response.status != 200:
            try:
                _object(response, await response.read())
            except Expired:
                # A line with the code 410 makes kopf list again; the status 410 would end kopf.
                response.status, lines_of = 200, _Events(None, watch)
        response.content = lines_of  # type: ignore[assignment]
        return response

    async def _discover(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Ask until jobs are served: kopf notices a later definition only with the right to watch all definitions."""
        path = request.url.path
        while True:
            for watch in self._watches.values():
                watch.touch()
            try:
                response = await self._sent(Verb.GET, request, handler)
                content = await response.read()
                if response.status == 404 and not path.startswith(f"/apis/{GROUP}/"):
                    return response
                lack = _lack(path, _object(response, content))
                if lack is None:
                    self._pauses.reset()
                    return response
            except _BROKEN as error:
                lack = str(error) or repr(error)
            log.warning("jobs cannot be watched yet", path=path, error=lack)
            await self._pauses.wait()

    async def _sent(
        self, verb: Verb, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        started, code = time.monotonic(), "unreachable"
        try:
            async with asyncio.timeout(self._api.seconds):
                response = await handler(request)
                if verb is not Verb.WATCH:
                    # The response keeps its body: a second read returns at once.
                    await response.read()
            code = str(response.status)
        finally:
            self._metrics.requested(verb, resource_of(request.url.path), code, time.monotonic() - started)
        return response


class _Events:
    """The content of a watch as kopf reads it: whole lines, each an event. None: the watch has expired."""

    def __init__(self, content: aiohttp.StreamReader | None, watch: JobWatch) -> None:
        self._content = content
        self._watch = watch

    async def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        """Yield line by line, until one is no event of a watch."""
        received = False
        try:
            async for line in self._lines():
                self._watch.touch()
                watch_event(line)
                received = True
                yield line + b"\n"
        except Expired:
            yield _EXPIRED
        except _BROKEN as error:
            log.info("the watch of jobs broke", part=self._watch.name, error=str(error) or repr(error))
        if received:
            self._watch.pauses.reset()
        else:
            await self._watch.pauses.wait()

    async def _lines(self) -> AsyncIterator[bytes]:
        if self._content is None:
            raise Expired("the version of the last list is too old")
        async for line in lines(self._content):
            yield line

    def exception(self) -> BaseException | None:
        """Return the reader's error: the response asks for it when it is released."""
        return None if self._content is None else self._content.exception()

    def set_exception(self, error: BaseException, *_: object) -> None:
        """Hand an error of the response on to its reader."""
        if self._content is not None:
            self._content.set_exception(error)


def _object(response: aiohttp.ClientResponse, content: bytes) -> Raw:
    if response.status == 200 and response.content_type != "application/json":
        raise Retryable(f"an answer of type {response.content_type}: {content[:500]!r}")
    return understood(str(response.status), content, f"{response.method} {response.url.path}")


def _lack(path: str, answer: Raw) -> str | None:
    """Return the missing API without which kopf never begins to watch jobs; None when it is served."""
    if path == "/apis" and not any(group["name"] == GROUP for group in answer["groups"]):
        return f"the API server knows no group {GROUP}: install the CustomResourceDefinition"
    if path == f"/apis/{JOBS}" and not any(resource["name"] == PLURAL for resource in answer["resources"]):
        return f"the API server knows no {PLURAL} of {JOBS}: install the CustomResourceDefinition"
    return None
