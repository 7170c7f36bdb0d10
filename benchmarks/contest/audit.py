"""One contender's jobs in the API server's audit log: one clock and one counter for all contenders.

Pods are named after their job, whose name has no dash: `job-worker-0` belongs to `job`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

PERSON, KUBELETS = "admin", "kwok"
_READ_ONLY = ("get", "list", "watch")


@dataclass
class Tail:
    """The lines that were added to a growing file since it was last read."""

    path: Path
    _offset: int = 0

    def entries(self) -> Iterator[dict[str, Any]]:
        """Whole lines only: the last may still be written."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        for line in content[:whole].splitlines():
            yield json.loads(line)


@dataclass
class Story:
    """Events of one namespace since some moment: their times, in seconds, and their number."""

    namespace: str
    user: str
    asked_at: dict[str, float] = field(default_factory=dict)
    created_at: dict[str, list[float]] = field(default_factory=dict)
    running_at: dict[str, list[float]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    status_writes: Counter[str] = field(default_factory=Counter)
    last_request_at: float = 0.0

    def tell(self, entry: dict[str, Any]) -> None:
        """One entry of the log."""
        about = entry.get("objectRef") or {}
        if entry["user"]["username"] == self.user and entry["verb"] != "watch":
            self._count_request(entry, about)
        if about.get("namespace") != self.namespace or entry["responseStatus"].get("code", 500) >= 300:
            return
        name, resource = about.get("name", ""), about.get("resource")
        by, verb, part = entry["user"]["username"], entry["verb"], about.get("subresource")
        job = name.partition("-")[0]
        if by == PERSON and verb == "create" and resource != "pods":
            self.asked_at[job] = _seconds(entry["requestReceivedTimestamp"])
        elif verb == "create" and resource == "pods" and part is None and name:
            self.created_at.setdefault(job, []).append(_seconds(entry["stageTimestamp"]))
        elif by == KUBELETS and resource == "pods" and part == "status":
            self.running_at.setdefault(job, []).append(_seconds(entry["stageTimestamp"]))

    def _count_request(self, entry: dict[str, Any], about: dict[str, Any]) -> None:
        what = "/".join(filter(None, (about.get("resource"), about.get("subresource"))))
        self.requests[f"{entry['verb']} {what}"] += 1
        self.last_request_at = _seconds(entry["stageTimestamp"])
        if about.get("subresource") == "status" and entry["verb"] not in _READ_ONLY:
            self.status_writes[about.get("name", "")] += 1

    @property
    def pods_running(self) -> int:
        """Return how many pods have come to run."""
        return sum(map(len, self.running_at.values()))

    def seconds_until_created(self) -> list[float]:
        """Of each job, from asking for it to its last pod; none whose pods get their names from the API server."""
        return [max(times) - self.asked_at[job] for job, times in self.created_at.items()]

    def seconds_until_running(self) -> list[float]:
        """Of each job, from asking for it until its last pod ran."""
        return [max(times) - self.asked_at[job] for job, times in self.running_at.items()]

    def seconds_in_all(self) -> float:
        """From asking for the first job until the last pod of the last one ran."""
        return max(max(times) for times in self.running_at.values()) - min(self.asked_at.values())


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
