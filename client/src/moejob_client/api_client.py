"""Requests to the API server as JSON, and what its refusals mean. Knows paths and verbs, no kinds and no jobs.

The generated models of Kubernetes' client library would parse every pod into objects, only to be dumped again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
import orjson

from moejob_api.api_bodies import Raw
from moejob_client.credentials import Credentials, CredentialsError
from moejob_client.errors import AlreadyExists, Conflict, Expired, Forbidden, NotFound, Retryable, Unauthorized

log = logging.getLogger(__name__)

PAGE = 250
JSON = "application/json"
# The name under which a record of the log carries its fields, for a format that prints them.
LOG_FIELDS = "moejob_fields"
_MERGE_PATCH = "application/merge-patch+json"
# A reply to our own write is needed for its metadata only; parsing all of it would cost more than the request.
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
# To find unknown fields the API server decodes an object a second time. Tests hold our fields against the published
# types instead.
_AS_GIVEN = "fieldValidation=Ignore"
_SHOWN_CHARACTERS = 500
# A watch ends at random after half of this time or more: not all watches of all replicas end at once.
_WATCH_SECONDS = 600.0
_SILENCE_SECONDS = 75.0
# An event of a watch is a whole object, of up to 1.5 MB.
_READ_AHEAD_BYTES = 2 * 1024 * 1024


class Verb(StrEnum):
    """The verb of a request, as RBAC calls it."""

    GET = "get"
    LIST = "list"
    WATCH = "watch"
    CREATE = "create"
    UPDATE = "update"
    PATCH = "patch"
    DELETE = "delete"


_METHODS = {
    Verb.GET: "GET",
    Verb.LIST: "GET",
    Verb.WATCH: "GET",
    Verb.CREATE: "POST",
    Verb.UPDATE: "PUT",
    Verb.PATCH: "PATCH",
    Verb.DELETE: "DELETE",
}


class RequestMetrics(Protocol):
    """The counters of requests."""

    def count_request(self, verb: str, resource: str, code: str, seconds: float) -> None:
        """Count one request, with the code of its response, or a word for the reason that there is none."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One page of a collection, and the version of the collection."""

    items: tuple[Raw, ...]
    version: str


def read_listing(page: Raw) -> Listing:
    """Return a page of a list. It adds API version and kind, which lists leave out of their items."""
    common = {"apiVersion": page["apiVersion"], "kind": page["kind"].removesuffix("List")}
    return Listing(tuple(common | item for item in page.get("items") or ()), page["metadata"]["resourceVersion"])


class ApiClient:
    """Sends requests, a bounded number at once, each with a deadline."""

    def __init__(
        self,
        credentials: Credentials,
        metrics: RequestMetrics,
        *,
        concurrency: int,
        seconds: float,
        user_agent: str = "moejob-client",
    ) -> None:
        self._credentials = credentials
        self._tls = credentials.make_tls_context()
        # The audit log of the API server tells programs apart by it.
        self._user_agent = user_agent
        # Without trust_env, which would look for a proxy in files and variables, in a thread, before every request.
        self._http = aiohttp.ClientSession(
            # The semaphore below bounds requests; a stream keeps its connection for hours.
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_AHEAD_BYTES,
        )
        self._metrics = metrics
        self.seconds = seconds
        self._patience = aiohttp.ClientTimeout(total=None)
        self._connections = asyncio.Semaphore(concurrency)

    async def close(self) -> None:
        """Close its connections."""
        await self._http.close()

    @property
    def host(self) -> str:
        """Return the address of the API server."""
        return self._credentials.host

    def new_session(self, middleware: aiohttp.ClientMiddlewareType) -> aiohttp.ClientSession:
        """Return another session with the same server and credentials; the caller closes it."""

        async def sign_request(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            authorization = await self._find_authorization()
            if authorization:
                request.headers["Authorization"] = authorization
            if self._credentials.server_name:
                request.server_hostname = self._credentials.server_name
            return await handler(request)

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_AHEAD_BYTES,
            headers={"User-Agent": self._user_agent},
            proxy=self._credentials.proxy,
            middlewares=(middleware, sign_request),
        )

    async def get(self, path: str) -> Raw:
        """Get the object at a path; it is an error when there is none."""
        return await self._send_request(_Request(Verb.GET, path))

    async def create(self, path: str, body: Raw, within: float | None = None) -> Raw:
        """Create an object in the collection at a path; a taken name is an error. Returns the metadata."""
        return await self._send_request(
            _Request(Verb.CREATE, _with_field_validation(path), body, accept=METADATA), within
        )

    async def post(self, path: str, body: Raw) -> Raw:
        """Post a question, as a review of access is, and return the answer."""
        return await self._send_request(_Request(Verb.CREATE, path, body))

    async def try_to_create(self, path: str, body: Raw) -> None:
        """Answer as `create` would, and add nothing: a dry run."""
        await self._send_request(
            _Request(Verb.CREATE, f"{_with_field_validation(path)}&dryRun=All", body, accept=METADATA)
        )

    async def replace(self, path: str, body: Raw, within: float | None = None) -> Raw:
        """Replace the object whose version the body carries, else Conflict. Returns the metadata."""
        return await self._send_request(
            _Request(Verb.UPDATE, _with_field_validation(path), body, accept=METADATA), within
        )

    async def patch(self, path: str, body: Raw, content_type: str = _MERGE_PATCH) -> Raw:
        """Patch the object at a path; Conflict when the body carries another resourceVersion."""
        return await self._send_request(_Request(Verb.PATCH, path, body, content_type))

    async def delete(self, path: str, options: Raw, within: float | None = None) -> Raw:
        """Delete the object at a path; Conflict when its UID is another. Returns the metadata, or a Status."""
        return await self._send_request(_Request(Verb.DELETE, path, options, accept=METADATA), within)

    async def list_pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Listing]:
        """The collection at a path as it is now, in pages of one version: 10,000 pods at once would fill our memory."""
        more = version = ""
        while True:
            parameters = dict(query) | {"limit": str(PAGE)} | ({"continue": more} if more else {})
            page = await self._send_request(_Request(Verb.LIST, f"{path}?{urlencode(parameters)}"))
            listing = read_listing(page)
            version = version or listing.version
            yield Listing(listing.items, version)
            more = page["metadata"].get("continue") or ""
            if not more:
                return

    async def watch(
        self, path: str, query: Mapping[str, str], version: str, on_open: Callable[[], object] | None = None
    ) -> AsyncIterator[Raw]:
        """Events of the collection at a path from a version on, until the connection ends; Expired if that is too old.

        A silence of more than a minute means a dead connection: a bookmark comes every minute.
        """
        watch_seconds = random.uniform(0.5, 1.0) * _WATCH_SECONDS
        parameters = dict(query) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": f"{watch_seconds:.0f}",
        }
        async for line in self._stream_lines(_Request(Verb.WATCH, f"{path}?{urlencode(parameters)}"), on_open):
            yield watch_event(line)

    async def stream_log(self, path: str, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Lines of a log until its end; a broken connection, or a minute of silence, is Retryable."""
        async for line in self._stream_lines(_Request(Verb.GET, f"{path}?{urlencode(query)}")):
            yield line

    @asynccontextmanager
    async def open_websocket(self, path: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket of Kubernetes' streams, as a program in a pod has."""
        resource = requested_resource(path)
        async with self.new_session(_pass_request) as session:
            try:
                socket = await session.ws_connect(
                    self._credentials.host + path, protocols=("v4.channel.k8s.io",), max_msg_size=0, heartbeat=30.0
                )
            except aiohttp.WSServerHandshakeError as error:
                # The refusal has no words: a handshake has no body.
                if error.status == 403:
                    raise Forbidden(f"{resource} is forbidden: this user cannot create {resource}") from error
                raise _refusal_error(error.status, "", f"{path.partition('?')[0]}: {error.status}") from error
            except (aiohttp.ClientError, OSError) as error:
                raise Retryable(f"the API server does not answer: {error!r}") from error
            async with socket:
                yield socket

    async def _stream_lines(
        self, request: _Request, on_open: Callable[[], object] | None = None
    ) -> AsyncIterator[bytes]:
        """Yield the lines of a response that may last for hours."""
        patience = aiohttp.ClientTimeout(total=None, sock_connect=self.seconds, sock_read=_SILENCE_SECONDS)
        name = f"{request.verb} {request.path.partition('?')[0]}"
        try:
            async with self._measure_request(request) as outcome:
                response = await self._open_response(request, patience)
                outcome.code = str(response.status)
            async with response:
                if response.status != 200:
                    parse_response(str(response.status), await response.read(), name)
                if on_open is not None:
                    on_open()
                async for line in read_lines(response.content):
                    yield line
        except (aiohttp.ClientError, OSError) as error:
            raise Retryable(f"{name} broke: {error!r}") from error

    async def _send_request(self, request: _Request, within: float | None = None) -> Raw:
        seconds = self.seconds if within is None else min(self.seconds, within)
        async with self._measure_request(request) as outcome:
            try:
                # The deadline covers the wait for a free connection, too.
                async with asyncio.timeout(seconds), self._connections:
                    outcome.code, content = await self._fetch_response(request)
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                outcome.code = "timeout" if isinstance(error, TimeoutError) else "unreachable"
                reason = str(error) or f"{seconds:g} s passed"
                raise Retryable(f"the API server does not answer: {reason}") from error
        return parse_response(outcome.code, content, f"{request.verb} {request.path.partition('?')[0]}")

    async def _find_authorization(self) -> str | None:
        try:
            return await self._credentials.find_authorization()
        except CredentialsError as error:
            raise Unauthorized(str(error)) from error

    async def _fetch_response(self, request: _Request) -> tuple[str, bytes]:
        async with await self._open_response(request) as response:
            return str(response.status), await response.read()

    async def _open_response(
        self, request: _Request, patience: aiohttp.ClientTimeout | None = None
    ) -> aiohttp.ClientResponse:
        headers = {"Content-Type": request.content_type, "Accept": request.accept, "User-Agent": self._user_agent}
        authorization = await self._find_authorization()
        if authorization:
            headers["Authorization"] = authorization
        return await self._http.request(
            _METHODS[request.verb],
            self._credentials.host + request.path,
            headers=headers,
            data=None if request.body is None else orjson.dumps(request.body),
            timeout=patience or self._patience,
            proxy=self._credentials.proxy,
            server_hostname=self._credentials.server_name,
        )

    @asynccontextmanager
    async def _measure_request(self, request: _Request) -> AsyncIterator[_RequestOutcome]:
        started, outcome = time.monotonic(), _RequestOutcome()
        try:
            yield outcome
        finally:
            seconds, resource = time.monotonic() - started, requested_resource(request.path)
            self._metrics.count_request(request.verb, resource, outcome.code, seconds)
            fields = {"verb": request.verb, "resource": resource, "code": outcome.code, "seconds": round(seconds, 6)}
            log.debug("request", extra={LOG_FIELDS: fields})


async def _pass_request(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    return await handler(request)


@dataclass(frozen=True, slots=True)
class _Request:
    verb: Verb
    path: str
    body: Raw | None = None
    content_type: str = JSON
    accept: str = JSON


@dataclass(slots=True)
class _RequestOutcome:
    code: str = "cancelled"


def requested_resource(path: str) -> str:
    """The plural in a path, with the subresource: pods, moetrainingjobs/status. Never a name: metrics live for ever."""
    parts = path.partition("?")[0].strip("/").split("/")
    # /api/v1 or /apis/GROUP/VERSION in front.
    segments = parts[2:] if parts[0] == "api" else parts[3:]
    if len(segments) > 2 and segments[0] == "namespaces":
        segments = segments[2:]
    return "/".join([*segments[:1], *segments[2:3]]) or "discovery"


async def read_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines of any length, which the reader's own method cannot. An unfinished last line is dropped."""
    incomplete = b""
    async for chunk in content.iter_any():
        *lines, incomplete = (incomplete + chunk).split(b"\n")
        for line in lines:
            yield line


def _with_field_validation(path: str) -> str:
    """Add the query of a write, unless the path has a query with a field validation already."""
    return path if "?" in path else f"{path}?{_AS_GIVEN}"


def watch_event(line: bytes) -> Raw:
    """Parse one line of a watch; an error in it is raised as Expired or another refusal."""
    try:
        event = orjson.loads(line)
        kind, raw = event["type"], event["object"]
        if kind == "ERROR":
            raise _refusal_error(raw.get("code") or 500, raw.get("reason") or "", str(raw.get("message")))
        int(raw["metadata"]["resourceVersion"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Retryable(f"no event of a watch: {line[:_SHOWN_CHARACTERS]!r}") from error
    return {"type": kind, "object": raw}


def parse_response(code: str, content: bytes, request_name: str) -> Raw:
    """Return the object in a response, or raise the error that its refusal means."""
    number = int(code)
    try:
        document = orjson.loads(content)
    except ValueError:
        document = None
    if number < 300 and isinstance(document, dict):
        return document
    status: Mapping[str, Any] = document if isinstance(document, dict) else {}
    message = status.get("message") or f"{request_name}: {code} {content[:_SHOWN_CHARACTERS].decode(errors='replace')}"
    raise _refusal_error(number, status.get("reason") or "", str(message))


def _refusal_error(code: int, reason: str, message: str) -> Exception:
    match code, reason:
        case 404, _:
            return NotFound(message)
        case 409, "AlreadyExists":
            return AlreadyExists(message)
        case 409, _:
            return Conflict(message)
        case 410, _:
            return Expired(message)
        case 401, _:
            return Unauthorized(message)
        case (408 | 429, _):
            return Retryable(message)
        case _ if code < 300 or code >= 500:
            return Retryable(message)
        case _:
            return Forbidden(message)
