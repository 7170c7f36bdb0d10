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
from moejob_client.api_client import (
    ApiClient,
    RequestMetrics,
    Verb,
    parse_response,
    read_lines,
    read_listing,
    requested_resource,
    watch_event,
)
from moejob_client.errors import AlreadyExists, Expired, NotFound
from moejob_operator.cluster import Conflict, Forbidden, Raw, Retryable
from moejob_operator.kube_api.informers import RetryPauses
from moejob_operator.kube_api.live_lists import JOBS
from moejob_operator.logs import Log
from moejob_operator.runtime.job_watch import JobWatch

log = Log(__name__)

_BROKEN = (NotFound, Conflict, AlreadyExists, Forbidden, Retryable, aiohttp.ClientError, OSError, TimeoutError)
_EXPIRED = b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}\n'


class KopfSession:
    """Requests of kopf to the API server, with our credentials, which are read again for each of them."""

    def __init__(self, api: ApiClient, watches: Iterable[JobWatch], metrics: RequestMetrics) -> None:
        self._api = api
        self._metrics = metrics
        self._watches = {watch.path: watch for watch in watches}
        self._pauses = RetryPauses()

    def build_credentials(self) -> kopf.AiohttpSession:
        """Return the answer to kopf's login."""
        return kopf.AiohttpSession(server=self._api.host, aiohttp_session=self._api.new_session(self._handle_request))

    async def _handle_request(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        watch = self._watches.get(request.url.path)
        if watch is None:
            return await self._discover_resources(request, handler)
        watch.touch()
        forward = self._watch_jobs if "watch" in request.url.query else self._list_jobs
        try:
            return await forward(watch, request, handler)
        except _BROKEN as error:
            log.warning("jobs cannot be watched", part=watch.name, error=str(error) or repr(error))
            await watch.pauses.wait()
            # The one error after which kopf begins both a list and a watch again.
            raise aiohttp.ClientPayloadError(f"{watch.name}: {error!r}") from error

    async def _list_jobs(
        self, watch: JobWatch, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await self._send_request(Verb.LIST, request, handler)
        page = _response_object(response, await response.read())
        try:
            listing, more = read_listing(page), page["metadata"].get("continue")
        except (KeyError, TypeError, AttributeError) as error:
            raise Retryable(f"no list of jobs: {error!r}") from error
        watch.take_page(listing, is_first="continue" not in request.url.query, is_last=not more)
        watch.pauses.reset()
        return response

    async def _watch_jobs(
        self, watch: JobWatch, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await self._send_request(Verb.WATCH, request, handler)
        content = _WatchContent(response.content, watch)
        if response.status != 200:
            try:
                _response_object(response, await response.read())
            except Expired:
                # A line with the code 410 makes kopf list again; the status 410 would end kopf.
                response.status, content = 200, _WatchContent(None, watch)
        response.content = content  # type: ignore[assignment]
        return response

    async def _discover_resources(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Ask until jobs are served: kopf notices a later definition only with the right to watch all definitions."""
        path = request.url.path
        while True:
            for watch in self._watches.values():
                watch.touch()
            try:
                response = await self._send_request(Verb.GET, request, handler)
                content = await response.read()
                if response.status == 404 and not path.startswith(f"/apis/{GROUP}/"):
                    return response
                lack = _missing_part(path, _response_object(response, content))
                if lack is None:
                    self._pauses.reset()
                    return response
            except _BROKEN as error:
                lack = str(error) or repr(error)
            log.warning("jobs cannot be watched yet", path=path, error=lack)
            await self._pauses.wait()

    async def _send_request(
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
            self._metrics.count_request(verb, requested_resource(request.url.path), code, time.monotonic() - started)
        return response


class _WatchContent:
    """The content of a watch as kopf reads it: whole lines, each an event. None: the watch has expired."""

    def __init__(self, content: aiohttp.StreamReader | None, watch: JobWatch) -> None:
        self._content = content
        self._watch = watch

    async def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        """Yield line by line, until one is no event of a watch."""
        received = False
        try:
            async for line in self._read_content():
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

    async def _read_content(self) -> AsyncIterator[bytes]:
        if self._content is None:
            raise Expired("the version of the last list is too old")
        async for line in read_lines(self._content):
            yield line

    def exception(self) -> BaseException | None:
        """Return the reader's error: the response asks for it when it is released."""
        return None if self._content is None else self._content.exception()

    def set_exception(self, error: BaseException, *_: object) -> None:
        """Hand an error of the response on to its reader."""
        if self._content is not None:
            self._content.set_exception(error)


def _response_object(response: aiohttp.ClientResponse, content: bytes) -> Raw:
    if response.status == 200 and response.content_type != "application/json":
        raise Retryable(f"an answer of type {response.content_type}: {content[:500]!r}")
    return parse_response(str(response.status), content, f"{response.method} {response.url.path}")


def _missing_part(path: str, document: Raw) -> str | None:
    """Return the missing API without which kopf never begins to watch jobs; None when it is served."""
    if path == "/apis" and not any(group["name"] == GROUP for group in document["groups"]):
        return f"the API server knows no group {GROUP}: install the CustomResourceDefinition"
    if path == f"/apis/{JOBS}" and not any(resource["name"] == PLURAL for resource in document["resources"]):
        return f"the API server knows no {PLURAL} of {JOBS}: install the CustomResourceDefinition"
    return None
