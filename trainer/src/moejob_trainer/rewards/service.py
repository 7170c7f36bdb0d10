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
_AWAY_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
# Statuses that reject one batch. Every other status below 500 would reject all batches.
_BATCH_STATUSES = frozenset({400, 413, 422})
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 10.0
# More bytes than the scores of the largest batch take.
_MOST_REPLY_BYTES = 16 * 2**20


class RewardService:
    """The service of one reward. `environ` holds the values of its headers."""

    def __init__(self, reward: Reward, environ: Mapping[str, str]) -> None:
        self._reward, self._redacted_url = reward, redacted_url(reward.url or "")
        self._url, self._headers = _request_url(reward.url or ""), _request_headers(reward, environ)
        self._client = httpx.AsyncClient(timeout=float(reward.timeout_seconds))

    async def start(self) -> None:
        """Start nothing: the service runs elsewhere."""

    async def wait_until_ready(self) -> None:
        """Wait for nothing: each batch waits for a service that is away."""

    async def score_batch(self, completions: Sequence[Completion]) -> Sequence[object]:
        """Return the service's score of each; raises RewardFailed when its tries are spent or it stays away."""
        body = _request_body(completions)
        pause, tries, away_since = _FIRST_PAUSE_SECONDS, 0, None
        while True:
            try:
                async with asyncio.timeout(self._reward.timeout_seconds):
                    return await self._request_scores(body)
            except _PASSING_ERRORS as error:
                failure = _reward_failure(error, self._reward)
            if failure.kind is FailureKind.AWAY:
                away_since = self._track_absence(away_since, failure)
            elif tries == self._reward.retries:
                raise failure
            else:
                tries, away_since = tries + 1, None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def close(self) -> None:
        """Give up the connections."""
        await self._client.aclose()

    def _track_absence(self, away_since: float | None, failure: RewardFailed) -> float:
        """Return when the service was first away; raises RewardFailed after the longest wait."""
        limit = self._reward.unavailable_timeout_seconds
        if away_since is None:
            sys.stderr.write(f"{self._redacted_url} is away and is waited for, up to {limit} s: {failure}\n")
            return time.monotonic()
        if time.monotonic() - away_since > limit:
            message = f"{self._redacted_url} was away for more than {limit} s (unavailableTimeoutSeconds): {failure}"
            raise RewardFailed(FailureKind.AWAY, message) from failure
        return away_since

    async def _request_scores(self, body: bytes) -> Sequence[object]:
        async with self._client.stream("POST", self._url, content=body, headers=self._headers) as response:
            status = response.status_code
            if status in _AWAY_STATUSES:
                raise _ServiceAway(f"HTTP {status}")
            if status >= httpx.codes.INTERNAL_SERVER_ERROR:
                raise _ServerError(f"HTTP {status}")
            if status in _BATCH_STATUSES:
                raise RewardFailed(FailureKind.ERROR, f"{self._redacted_url} answered HTTP {status}")
            if status != httpx.codes.OK:
                raise RewardFailed(
                    FailureKind.REFUSED, f"{self._redacted_url} answered HTTP {status}{_suggest_fix(status)}"
                )
            return parse_scores(await _read_bounded(response))


class _ServiceAway(RuntimeError):
    """The reply of a proxy or balancer in front of a service."""


class _ServerError(RuntimeError):
    """An error of the service, perhaps over this batch."""


_PASSING_ERRORS = (httpx.TransportError, TimeoutError, _ServiceAway, _ServerError)


def _reward_failure(error: Exception, reward: Reward) -> RewardFailed:
    # A service that accepted the request and did not reply in time is slow, not away.
    if isinstance(error, TimeoutError | httpx.ReadTimeout | httpx.WriteTimeout | httpx.PoolTimeout):
        tries = f"in each of {reward.retries + 1} tries"
        return RewardFailed(FailureKind.TIMEOUT, f"it took longer than {reward.timeout_seconds} s {tries}")
    text = f"{type(error).__name__.lstrip('_')}: {error}"
    if isinstance(error, httpx.ReadError | httpx.WriteError | httpx.ProtocolError | _ServerError):
        return RewardFailed(FailureKind.ERROR, f"{text} (tries: {reward.retries + 1})")
    return RewardFailed(FailureKind.AWAY, text)


def _suggest_fix(status: int) -> str:
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return "; give its token in headersFrom"
    return "; a redirect is not followed, name its target" if status < httpx.codes.BAD_REQUEST else "; check url"


def redacted_url(url: str) -> str:
    """Return a URL as logs and metrics may show it: without user, password, query and fragment."""
    scheme, separator, location = url.partition("://")
    authority, slash, path = location.partition("/")
    for end in "?#":
        authority, path = authority.partition(end)[0], path.partition(end)[0]
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def _request_url(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RewardFailed(FailureKind.REFUSED, f"{redacted_url(url)} is no http:// or https:// URL")
    return parsed


def _request_headers(reward: Reward, environ: Mapping[str, str]) -> dict[str, str]:
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    for header_source in reward.headers_from:
        # Files that Secrets are made of often end with a newline.
        value = environ.get(header_source.variable, "").strip()
        if not value:
            raise RewardFailed(
                FailureKind.REFUSED,
                f"header {header_source.header} is in the variable {header_source.variable}, which is not set; take "
                "it from a Secret in resources.env, or set it in the shell of moejob run",
            )
        if not (value.isascii() and value.isprintable()):
            raise RewardFailed(
                FailureKind.REFUSED,
                f"the variable {header_source.variable} has characters that header {header_source.header} cannot have",
            )
        headers[header_source.header] = value
    return headers


def _request_body(completions: Sequence[Completion]) -> bytes:
    batch = {
        "prompts": [completion.prompt for completion in completions],
        "completions": [each.text for each in completions],
        "fields": [dict(each.fields) for each in completions],
    }
    try:
        return json.dumps(batch, default=str).encode()
    except (ValueError, RecursionError) as error:
        raise RewardFailed(FailureKind.RECORD, f"a record cannot be sent to the service: {error}") from error


async def _read_bounded(response: httpx.Response) -> bytes:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        # A few bytes may become gigabytes, and nothing was asked to be compressed.
        raise RewardFailed(FailureKind.UNREADABLE, f"its answer is encoded ({encoding[:50]}), which was not asked for")
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > _MOST_REPLY_BYTES:
            raise RewardFailed(FailureKind.UNREADABLE, f"its answer is longer than {_MOST_REPLY_BYTES} bytes")
    return bytes(content)


def parse_scores(body: bytes) -> list[Any]:
    """Return the list of scores in an answer; RewardFailed for what has none."""
    try:
        reply = from_json(body)
    except ValueError as error:
        raise RewardFailed(FailureKind.UNREADABLE, f"its answer is not JSON: {error}") from error
    if not isinstance(reply, dict) or not isinstance(reply.get("scores"), list):
        raise RewardFailed(FailureKind.UNREADABLE, "its answer has no list `scores`")
    scores: list[Any] = reply["scores"]
    return scores
