"""A record of watches: pods, jobs and nodes as the API server reports them, each with the moment of its event.

Its own times are whole seconds, and of much it keeps none.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.control_plane.api import Api, RefusedError

PAUSE_SECONDS = 0.1


class WatchedKind(StrEnum):
    """The kinds that are watched."""

    POD = "pods"
    JOB = "moetrainingjobs"
    NODE = "nodes"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One object as it was reported at a moment, in seconds since 1970."""

    at: float
    is_gone: bool
    body: Any

    @property
    def uid(self) -> str:
        """Of the object."""
        uid: str = self.body["metadata"]["uid"]
        return uid


class WatchRecorder:
    """Listens until it is stopped. An API server that is away is asked again."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._stopped = threading.Event()
        self._events: dict[WatchedKind, list[WatchEvent]] = {kind: [] for kind in WatchedKind}
        jobs = f"/apis/moejob.dev/v1alpha1/namespaces/{namespace}/moetrainingjobs"
        paths = {
            WatchedKind.POD: f"/api/v1/namespaces/{namespace}/pods",
            WatchedKind.JOB: jobs,
            WatchedKind.NODE: "/api/v1/nodes",
        }
        self._threads = [threading.Thread(target=self._record, args=pair, name=pair[0]) for pair in paths.items()]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Listen no more."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def events(self, kind: WatchedKind, since: float = 0.0) -> list[WatchEvent]:
        """Return what was heard from a moment on, in order."""
        return [event for event in self._events[kind] if event.at >= since]

    def first_time(self, kind: WatchedKind, holds: Callable[[WatchEvent], object], since: float = 0.0) -> float | None:
        """Return when something was heard for the first time from a moment on."""
        return next((event.at for event in self.events(kind, since) if holds(event)), None)

    def _record(self, kind: WatchedKind, path: str) -> None:
        while not self._stopped.is_set():
            with suppress(OSError, RefusedError, ValueError, http.client.HTTPException):
                for event in self._api.watch(f"{path}?resourceVersion=0", self._stopped):
                    if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                        watch_event = WatchEvent(time.time(), event["type"] == "DELETED", event["object"])
                        self._events[kind].append(watch_event)
            self._stopped.wait(PAUSE_SECONDS)


@contextmanager
def record_watches(api: Api, namespace: str) -> Iterator[WatchRecorder]:
    """A recorder that runs meanwhile."""
    recorder = WatchRecorder(api, namespace)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()
