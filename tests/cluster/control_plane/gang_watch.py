"""An independent witness: watches all trainer pods and says when two gangs of one job were there at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from cluster.control_plane.api import RefusedError
from cluster.control_plane.plane import ControlPlane
from moejob_api.contract.pods import Label, PodRole

_PODS = "/api/v1/pods?labelSelector=" + quote(f"{Label.ROLE}={PodRole.TRAINER}")


@dataclass
class GangWatch:
    """`doubled` holds a line for each pod that came while one of another attempt was still there."""

    plane: ControlPlane
    doubled: list[str] = field(default_factory=list)
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    _there: dict[str, dict[str, Any]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Watch until stopped, through any loss of the API server."""
        while not self._stop.is_set():
            try:
                version = self._list()
                for event in self.plane.api.watch(f"{_PODS}&resourceVersion={version}", self._stop):
                    self._told(event["type"], event["object"])
            except (OSError, RefusedError, ValueError):
                # Whatever happened meanwhile shows in the next list: no pod here ever comes back under its UID.
                time.sleep(0.05)

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()

    def _list(self) -> str:
        listed = self.plane.api.get(_PODS)
        self._there = {pod["metadata"]["uid"]: pod for pod in listed["items"]}
        for pod in listed["items"]:
            self._check(pod)
        version: str = listed["metadata"]["resourceVersion"]
        return version

    def _told(self, kind: str, pod: dict[str, Any]) -> None:
        if kind == "ERROR":
            raise ValueError(pod.get("message"))
        uid = pod["metadata"]["uid"]
        if kind == "DELETED":
            self._there.pop(uid, None)
            return
        self._there[uid] = pod
        self._check(pod)

    def _check(self, pod: dict[str, Any]) -> None:
        labels = pod["metadata"]["labels"]
        self.seen[pod["metadata"]["uid"]] = pod
        for other in self._there.values():
            theirs = other["metadata"]["labels"]
            if theirs[Label.JOB_UID] == labels[Label.JOB_UID] and theirs[Label.ATTEMPT] != labels[Label.ATTEMPT]:
                self.doubled.append(f"{pod['metadata']['name']} beside {other['metadata']['name']}")

    def pods_of(self, namespace: str) -> list[dict[str, Any]]:
        """Every trainer pod that has ever been seen in a namespace, each once."""
        return [pod for pod in list(self.seen.values()) if pod["metadata"]["namespace"] == namespace]


@contextmanager
def gang_watch(plane: ControlPlane) -> Iterator[GangWatch]:
    """A witness for as long as the block lasts."""
    watch = GangWatch(plane)
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        thread.join(5)
