"""The log of one container, each line once over any number of connections.

The API server continues a log from a whole second, so a new connection repeats the last second of the old one. Those
lines are known by their text with its time of nanoseconds.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moejob_api import api_bodies
from moejob_api.api_bodies import Raw
from moejob_api.contract.names import Label
from moejob_client.errors import Forbidden, NotFound, Retryable
from moejob_client.log_lines import LogLine, parse_log_line

if TYPE_CHECKING:
    from moejob_client.api_client import ApiClient

_PAUSE_SECONDS = 1.0
_SECOND = re.compile(rb"([0-9T:-]{19})(?:\.\d+)?(Z|[+-]\d\d:\d\d)")
# Of a pod that still runs but whose node does not answer: a command that does not follow gives up.
_MOST_TRIES = 3


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod of a job, as the API server has it."""

    body: Raw

    @property
    def name(self) -> str:
        """Return its name, which a later pod may have again."""
        return api_bodies.as_text(api_bodies.object_metadata(self.body).get("name"))

    @property
    def uid(self) -> str:
        """Return its UID."""
        return api_bodies.as_text(api_bodies.object_metadata(self.body).get("uid"))

    @property
    def node(self) -> str:
        """Return the name of its node; empty before it has one."""
        return api_bodies.as_text(api_bodies.as_mapping(self.body.get("spec")).get("nodeName"))

    @property
    def role(self) -> str:
        """Return its role, which is the name of its main container as well."""
        return api_bodies.as_text(api_bodies.find_label(self.body, Label.ROLE))

    @property
    def attempt(self) -> int:
        """Return the number of its attempt."""
        return api_bodies.as_count(api_bodies.find_label(self.body, Label.ATTEMPT)) or 0

    @property
    def index(self) -> int:
        """Return its place among the pods of its role."""
        return api_bodies.as_count(api_bodies.find_label(self.body, Label.INDEX)) or 0

    @property
    def phase(self) -> str:
        """Return its phase."""
        return api_bodies.as_text(api_bodies.as_mapping(self.body.get("status")).get("phase"))

    @property
    def is_running(self) -> bool:
        """Return whether its container runs, and may be entered."""
        return "running" in self._container_state()

    @property
    def waiting_reason(self) -> str:
        """Return why its container waits, or why it has no node; empty when that is not known."""
        waiting = api_bodies.as_mapping(self._container_state().get("waiting"))
        unscheduled = api_bodies.find_condition(api_bodies.as_mapping(self.body.get("status")), "PodScheduled")
        return api_bodies.as_text(waiting.get("reason")) or api_bodies.as_text(unscheduled.get("message"))

    @property
    def starts(self) -> int:
        """Return how often its container has started."""
        return self._restart_count + (1 if self.is_running or self._has_ended() else 0)

    @property
    def ended_starts(self) -> int:
        """Return how many of these have ended."""
        return self._restart_count + (1 if self._has_ended() else 0)

    def _has_ended(self) -> bool:
        """Return whether the newest start has ended: while the kubelet waits to start again, the last state tells."""
        last_state = api_bodies.as_mapping(self._container_status().get("lastState"))
        return "terminated" in self._container_state() or (not self.is_running and "terminated" in last_state)

    @property
    def _restart_count(self) -> int:
        return api_bodies.as_integer(self._container_status().get("restartCount")) or 0

    def _container_state(self) -> Raw:
        return api_bodies.as_mapping(self._container_status().get("state"))

    def _container_status(self) -> Raw:
        statuses = api_bodies.as_mapping(self.body.get("status")).get("containerStatuses")
        entries = api_bodies.as_mappings(statuses)
        return next((entry for entry in entries if entry.get("name") == self.role), {})


class LogPosition:
    """The place that a reader has come to, and the lines that the next connection repeats."""

    def __init__(self, since: str | None = None) -> None:
        # As RFC 3339 in whole seconds.
        self._since = since
        self._second = b""
        self._recent: Counter[bytes] = Counter()
        self._repeated: Counter[bytes] = Counter()

    def begin_connection(self) -> dict[str, str]:
        """Return the query from which a new connection continues."""
        self._repeated = self._recent.copy()
        return {"sinceTime": self._since} if self._since else {}

    def is_new(self, line: bytes) -> bool:
        """Return whether a line has not come before, and remember it."""
        if self._repeated[line] > 0:
            self._repeated[line] -= 1
            return False
        second = _SECOND.match(line)
        if second is not None and second[1] > self._second:
            self._second = second[1]
            self._since = (second[1] + second[2]).decode()
            self._recent.clear()
        self._recent[line] += 1
        return True


class ContainerLog:
    """The log of one start of a pod's container, with each line once."""

    def __init__(self, http: ApiClient, pod: PodView, start: int, since: str | None) -> None:
        self._http = http
        self._pod = pod
        self._start = start
        self._position = LogPosition(since)
        self._is_complete = False
        namespace = api_bodies.as_text(api_bodies.object_metadata(pod.body).get("namespace"))
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod.name}"

    async def read_lines(self, *, is_followed: bool) -> AsyncIterator[LogLine]:
        """Yield each line once: until the container has ended if it is followed, else as far as it has come."""
        tries = 0
        while not self._is_complete:
            try:
                async for raw in self._read_new_lines(is_followed=is_followed):
                    line = parse_log_line(raw, self._pod.name, self._pod.node)
                    if line is not None:
                        yield line
            except NotFound:
                return
            except (Retryable, Forbidden) as error:
                tries += 1
                if not _is_passing(error) or (tries >= _MOST_TRIES and not is_followed):
                    raise
            if not self._is_complete:
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _read_new_lines(self, *, is_followed: bool) -> AsyncIterator[bytes]:
        """Yield over one connection what has not come before."""
        pod = PodView(await self._http.get(self._path))
        # A later pod may have the name again.
        if pod.uid != self._pod.uid:
            self._is_complete = True
            return
        # A connection that begins after the container's end has all of its log.
        is_last = not is_followed or pod.ended_starts >= self._start
        async for raw in self._open_stream(pod, is_followed=not is_last):
            if self._position.is_new(raw):
                yield raw
        self._is_complete = is_last

    def _open_stream(self, pod: PodView, *, is_followed: bool) -> AsyncIterator[bytes]:
        query = {"container": pod.role, "timestamps": "true", **self._position.begin_connection()}
        if is_followed:
            query["follow"] = "true"
        if pod.starts > self._start:
            query["previous"] = "true"
        return self._http.stream_log(f"{self._path}/log", query)


def _is_passing(error: Retryable | Forbidden) -> bool:
    """Return whether it helps to ask again: the kubelet refuses the log of a container that is being started."""
    return isinstance(error, Retryable) or "waiting to start" in str(error)
