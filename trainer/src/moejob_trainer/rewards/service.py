"""A reward that an HTTP service computes: POST {prompts, completions, fields} -> {scores}, in batches.

A service that does not answer at all is away, and the run waits for it. An error that it answers is a failure of the
reward; errors of the server and time-outs get further tries first.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from pydantic_core import from_json

from moejob_api.job.grpo import Reward
from moejob_trainer.rewards.completion import Completion, FailureKind, RewardFailed

# Statuses of a service that is away: they do not depend on the request.
_AWAY = frozenset({408, 425, 429, 502, 503, 504})
# Statuses that reject one batch. Every other status below 500 would reject all batches.
_OF_BATCH = frozenset({400, 413, 422})
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 10.0
# More bytes than the scores of the largest batch take.
_MOST_ANSWER_BYTES = 16 * 2**20


class Service:
    """The service of one reward. `environ` holds the values of its headers."""

    def __init__(self, reward: Reward, environ: Mapping[str, str]) -> None:
        self._reward, self._shown = reward, shown_url(reward.url or "")
        self._url, self._headers = _request_url(reward.url or ""), _headers(reward, environ)
        self._client = httpx.AsyncClient(timeout=float(reward.timeout_seconds))

    async def begin(self) -> None:
        """Nothing is started."""

    async def ready(self) -> None:
        """Nothing is imported."""

    async def scores(self, completions: Sequence[Completion]) -> Sequence[object]:
        """Return the service's score of each; raises RewardFailed when its tries are spent or it stays away."""
        body = _body(completions)
        pause, tries, away_since = _FIRST_PAUSE_SECONDS, 0, None
        while True:
            try:
                async with asyncio.timeout(self._reward.timeout_seconds):
                    return await self._response(body)
            except _PASSING as error:
                failed = _failure(error, self._reward)
            if failed.kind is FailureKind.AWAY:
                away_since = self._waits_since(away_since, failed)
            elif tries == self._reward.retries:
                raise failed
            else:
                tries, away_since = tries + 1, None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def close(self) -> None:
        """Give up the connections."""
        await self._client.aclose()

    def _waits_since(self, since: float | None, failed: RewardFailed) -> float:
        """Return when the service was first away; raises RewardFailed after the longest wait."""
        limit = self._reward.unavailable_timeout_seconds
        if since is None:
            sys.stderr.write(f"{self._shown} is away and is waited for, up to {limit} s: {failed}\n")
            return time.monotonic()
        if time.monotonic() - since > limit:
            message = f"{self._shown} was away for more than {limit} s (unavailableTimeoutSeconds): {failed}"
            raise RewardFailed(FailureKind.AWAY, message) from failed
        return since

    async def _response(self, body: bytes) -> Sequence[object]:
        async with self._client.stream("POST", self._url, content=body, headers=self._headers) as response:
            status = response.status_code
            if status in _AWAY:
                raise _Away(f"HTTP {status}")
            if status >= httpx.codes.INTERNAL_SERVER_ERROR:
                raise _ServerError(f"HTTP {status}")
            if status in _OF_BATCH:
                raise RewardFailed(FailureKind.ERROR, f"{self._shown} answered HTTP {status}")
            if status != httpx.codes.OK:
                raise RewardFailed(FailureKind.REFUSED, f"{self._shown} answered HTTP {status}{_fix(status)}")
            return scores_of(await _bounded(response))


class _Away(RuntimeError):
    """The reply of a proxy or balancer in front of a service."""


class _ServerError(RuntimeError):
    """An error of the service, perhaps over this batch."""


_PASSING = (httpx.TransportError, TimeoutError, _Away, _ServerError)


def _failure(error: Exception, reward: Reward) -> RewardFailed:
    # A service that accepted the request and did not reply in time is slow, not away.
    if isinstance(error, TimeoutError | httpx.ReadTimeout | httpx.WriteTimeout | httpx.PoolTimeout):
        tries = f"in each of {reward.retries + 1} tries"
        return RewardFailed(FailureKind.TIMEOUT, f"it took longer than {reward.timeout_seconds} s {tries}")
    text = f"{type(error).__name__.lstrip('_')}: {error}"
    if isinstance(error, httpx.ReadError | httpx.WriteError | httpx.ProtocolError | _ServerError):
        return RewardFailed(FailureKind.ERROR, f"{text} (tries: {reward.retries + 1})")
    return RewardFailed(FailureKind.AWAY, text)


def _fix(status: int) -> str:
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return "; give its token in headersFrom"
    return "; a redirect is not followed, name its target" if status < httpx.codes.BAD_REQUEST else "; check url"


def shown_url(url: str) -> str:
    """Return a URL as logs and metrics may show it: without user, password, query and fragment."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    for end in "?#":
        authority, path = authority.partition(end)[0], path.partition(end)[0]
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def _request_url(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RewardFailed(FailureKind.REFUSED, f"{shown_url(url)} is no http:// or https:// URL")
    return parsed


def _headers(reward: Reward, environ: Mapping[str, str]) -> dict[str, str]:
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    for given in reward.headers_from:
        # Files that Secrets are made of often end with a newline.
        value = environ.get(given.variable, "").strip()
        if not value:
            raise RewardFailed(
                FailureKind.REFUSED,
                f"header {given.header} is in the variable {given.variable}, which is not set; take it from a Secret "
                "in resources.env, or set it in the shell of moejob run",
            )
        if not (value.isascii() and value.isprintable()):
            raise RewardFailed(
                FailureKind.REFUSED,
                f"the variable {given.variable} has characters that header {given.header} cannot have",
            )
        headers[given.header] = value
    return headers


def _body(completions: Sequence[Completion]) -> bytes:
    batch = {
        "prompts": [each.prompt for each in completions],
        "completions": [each.text for each in completions],
        "fields": [dict(each.fields) for each in completions],
    }
    try:
        return json.dumps(batch, default=str).encode()
    except (ValueError, RecursionError) as error:
        raise RewardFailed(FailureKind.RECORD, f"a record cannot be sent to the service: {error}") from error


async def _bounded(response: httpx.Response) -> bytes:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        # A few bytes may become gigabytes, and nothing was asked to be compressed.
        raise RewardFailed(FailureKind.UNREADABLE, f"its answer is encoded ({encoding[:50]}), which was not asked for")
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > _MOST_ANSWER_BYTES:
            raise RewardFailed(FailureKind.UNREADABLE, f"its answer is longer than {_MOST_ANSWER_BYTES} bytes")
    return bytes(content)


def scores_of(body: bytes) -> list[Any]:
    """Return the list of scores in an answer; RewardFailed for what has none."""
    try:
        answer = from_json(body)
    except ValueError as error:
        raise RewardFailed(FailureKind.UNREADABLE, f"its answer is not JSON: {error}") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
        raise RewardFailed(FailureKind.UNREADABLE, "its answer has no list `scores`")
    scores: list[Any] = answer["scores"]
    return scores
