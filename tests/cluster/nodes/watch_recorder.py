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


class Kind(StrEnum):
    """The kinds that are watched."""

    POD = "pods"
    JOB = "moetrainingjobs"
    NODE = "nodes"


@dataclass(frozen=True, slots=True)
class Word:
    """One object as it was reported at a moment, in seconds since 1970."""

    at: float
    is_gone: bool
    body: Any

    @property
    def uid(self) -> str:
        """Of the object."""
        uid: str = self.body["metadata"]["uid"]
        return uid


class Witness:
    """Listens until it is stopped. An API server that is away is asked again."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._stopped = threading.Event()
        self._words: dict[Kind, list[Word]] = {kind: [] for kind in Kind}
        jobs = f"/apis/moejob.dev/v1alpha1/namespaces/{namespace}/moetrainingjobs"
        paths = {Kind.POD: f"/api/v1/namespaces/{namespace}/pods", Kind.JOB: jobs, Kind.NODE: "/api/v1/nodes"}
        self._threads = [threading.Thread(target=self._listen, args=pair, name=pair[0]) for pair in paths.items()]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Listen no more."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def words(self, kind: Kind, since: float = 0.0) -> list[Word]:
        """Return what was heard from a moment on, in order."""
        return [word for word in self._words[kind] if word.at >= since]

    def first(self, kind: Kind, holds: Callable[[Word], object], since: float = 0.0) -> float | None:
        """Return when something was heard for the first time from a moment on."""
        return next((word.at for word in self.words(kind, since) if holds(word)), None)

    def _listen(self, kind: Kind, path: str) -> None:
        while not self._stopped.is_set():
            with suppress(OSError, RefusedError, ValueError, http.client.HTTPException):
                for event in self._api.watch(f"{path}?resourceVersion=0", self._stopped):
                    if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                        word = Word(time.time(), event["type"] == "DELETED", event["object"])
                        self._words[kind].append(word)
            self._stopped.wait(PAUSE_SECONDS)


@contextmanager
def witness(api: Api, namespace: str) -> Iterator[Witness]:
    """A recorder that runs meanwhile."""
    listening = Witness(api, namespace)
    listening.start()
    try:
        yield listening
    finally:
        listening.stop()
