"""`moejob logs -f` on two real nodes, held against the files of the containers while a pod is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from cluster.control_plane.releases import Release
from cluster.nodes.cluster import Cluster
from cluster.nodes.faults import kill_pod
from cluster.nodes.training import Job, over_two_nodes, read_example, submit_job
from cluster.waiting import until
from moejob_client.log_lines import parse_log_line

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 60
# Lines of a rank or launcher by their time in nanoseconds and their text.
Lines = Counter[tuple[int, str]]


class LogFiles:
    """The log files of all containers of a job, held open so that no deletion takes a line away."""

    def __init__(self, nodes: Cluster, namespace: str, job: str) -> None:
        self._roots = [node.host_path(Path("/var/log/pods")) for node in nodes.nodes.values()]
        self._pattern = f"{namespace}_{job}-*/trainer/*.log"
        self._opened: dict[Path, bytes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._collect, daemon=True)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def lines(self) -> Lines:
        """All whole lines so far, as the CRI writes them: time, stream, tag, text."""
        rows = (row.split(b" ", 3) for content in self._opened.values() for row in content.split(b"\n"))
        parsed = (parse_log_line(row[0] + b" " + row[3], "", "") for row in rows if len(row) == 4)
        return Counter((line.nanoseconds, line.text) for line in parsed if line is not None)

    def _collect(self) -> None:
        handles: dict[Path, IO[bytes]] = {}
        while True:
            is_last = self._stop.is_set()
            for path in [path for root in self._roots for path in root.glob(self._pattern)]:
                if path not in handles:
                    handles[path] = path.open("rb")
                    self._opened[path] = b""
            for path, handle in handles.items():
                self._opened[path] += handle.read()
            if is_last:
                return
            time.sleep(0.1)


def long_job() -> Job:
    job = over_two_nodes(read_example())
    job["metadata"]["name"] = "logged"
    job["spec"]["data"] |= {"maxLength": 64}
    job["spec"]["training"] |= {"maxSteps": STEPS, "evalEvery": STEPS}
    job["spec"]["checkpoint"] |= {"everySteps": 6}
    return job


def test_no_line_is_lost_or_doubled_while_a_pod_is_killed(nodes: Cluster, home: Release, tmp_path: Path) -> None:
    job = submit_job(nodes, home.namespace, long_job())
    arguments = ["logs", "-f", "logged", "-o", "json", "-n", home.namespace]
    command = [sys.executable, "-m", "moejob_cli", *arguments]
    files = LogFiles(nodes, home.namespace, "logged")
    with (tmp_path / "shown").open("w") as shown, files.collecting():
        process = subprocess.Popen(command, stdout=shown, env={"KUBECONFIG": str(nodes.plane.kubeconfig)})
        try:
            until(lambda: job.phase == "Running", seconds=600, waiting_for=job.describe)
            until(lambda: job.run().last_step() >= 8, seconds=600, waiting_for=job.describe)
            kill_pod(nodes, home.namespace, next(name for name in sorted(job.pod_nodes()) if name.endswith("1")))
            job.await_end()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    lines = [json.loads(line) for line in (tmp_path / "shown").read_text().splitlines()]
    printed = Counter(line["text"] for line in lines)
    written = Counter(text for _, text in files.lines().elements())
    assert printed == written
    assert {line["node"] for line in lines} == {"node-1", "node-2"}
