"""Seconds from `moejob submit` to the first loss on two real nodes, and the cost of verbs beside 200 jobs.

    make bench-steering [ARGS="--only watch|submit --times N --dry"]

`watch` needs a control plane alone; `submit` needs real nodes, hence root and Go.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.contest.arena import median
from benchmarks.record import Better, Result, record
from cluster.binaries import find_or_build
from cluster.by_hand import end_when_asked, say
from cluster.control_plane import jobs
from cluster.control_plane.plane import PROGRAMS, ControlPlane, control_plane
from cluster.nodes.cluster import Cluster, Settings, find_programs, run_cluster
from cluster.nodes.training import JOBS, SubmittedJob, install_release, over_two_nodes, read_example
from cluster.waiting import until
from documented import ROOT
from moejob_api.contract.pods import Label

BENCH = "steering"
WATCHED_JOBS = 200
NAMESPACE = "default"
# The operator writes the status of a running job this often (REPORT_SECONDS).
REPORT_SECONDS = 30.0
MEASURED_SECONDS = 60.0
CORE_SHARE = 5.0
START_SECONDS = 0.25
STARTS = 15
FIRST_LOSS_SECONDS = 30.0


def main() -> None:
    """Measure, and record unless `--dry`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("watch", "submit"))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    end_when_asked()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="moejob-") as folder:
        if options.only != "submit":
            results += measure_watch(Path(folder))
        if options.only != "watch":
            results += measure_submit(Path(folder), options.times)
    for result in results:
        say(f"{result.case}: {result.value:.3g} {result.unit} {result.spread or ''}")
    if not options.dry and options.only is None:
        record(results, ("aiohttp",))


def measure_watch(folder: Path) -> list[Result]:
    """CPU time of one `moejob watch` while the status of each job changes as the operator changes it."""
    programs = find_or_build(PROGRAMS, say)
    plane_folder = folder / "plane"
    plane_folder.mkdir()
    with control_plane(plane_folder, programs) as plane:
        plane.kubectl("apply", "--server-side=false", "-f", ROOT / "crds" / "moetrainingjobs.yaml")
        until(lambda: "moetrainingjobs" in plane.kubectl("api-resources"), waiting_for="the definition")
        for number in range(WATCHED_JOBS):
            plane.api.create(jobs.path(NAMESPACE), jobs.body(f"job-{number:03d}"))
            _write_step(plane, number, 0)
        starts = list(_measure_starts(plane))
        since = plane.audit_log.stat().st_size
        with _running_watch(plane, folder / "lines") as process:
            until(lambda: len((folder / "lines").read_text().splitlines()) > WATCHED_JOBS, waiting_for="all jobs")
            started = _cpu_seconds(process.pid)
            shares = [_cpu_share(plane, process.pid, seconds) for seconds in (REPORT_SECONDS, 4.0)]
        watches = {entry["auditID"] for entry in plane.audited(since) if _is_watch(entry)}
        lines = len((folder / "lines").read_text().splitlines())
    say(f"{lines} lines, {len(watches)} watch connection(s)")
    return [
        *starts,
        Result(BENCH, "watch of 200 jobs: connections", len(watches), "", Better.LOWER, 1),
        Result(BENCH, "watch of 200 jobs: start, and each job once", started, "s of CPU", Better.LOWER),
        Result(BENCH, "watch of 200 jobs, each changes every 30 s", shares[0], "% of a core", Better.LOWER, CORE_SHARE),
        Result(BENCH, "watch of 200 jobs, each changes every 4 s", shares[1], "% of a core", Better.LOWER),
    ]


def _measure_starts(plane: ControlPlane) -> Iterator[Result]:
    """Measure verbs on one job beside an empty Python, in turns: what a machine does otherwise hits all of them."""
    at, job = ("-n", NAMESPACE), "job-000"
    commands = {
        "an empty Python": ("-c", "pass"),
        **{f"moejob {verb}": ("-m", "moejob_cli", verb, job, *at) for verb in ("get", "why", "suspend", "resume")},
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(STARTS):
        for name, command in commands.items():
            taken[name].append(_run_for_cpu_seconds(plane, command))
    for name, seconds in taken.items():
        target = None if name == "an empty Python" else START_SECONDS
        spread = (min(seconds), max(seconds))
        yield Result(BENCH, f"start and end: {name}", median(seconds), "s of CPU", Better.LOWER, target, spread=spread)


def _run_for_cpu_seconds(plane: ControlPlane, command: Sequence[str]) -> float:
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"KUBECONFIG": str(plane.kubeconfig)},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {process.returncode}")
    return usage.ru_utime + usage.ru_stime


@contextmanager
def _running_watch(plane: ControlPlane, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as lines:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "moejob_cli", "watch", "-n", NAMESPACE],
            stdout=lines,
            env=os.environ | {"KUBECONFIG": str(plane.kubeconfig)},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _cpu_share(plane: ControlPlane, pid: int, every_seconds: float) -> float:
    """Return the share of a core that the process takes while each job changes this often, in percent."""
    begin, before, written = time.monotonic(), _cpu_seconds(pid), 0
    while (elapsed := time.monotonic() - begin) < MEASURED_SECONDS:
        if written < elapsed * WATCHED_JOBS / every_seconds:
            _write_step(plane, written % WATCHED_JOBS, 1 + written // WATCHED_JOBS)
            written += 1
        else:
            time.sleep(0.01)
    say(f"{written / elapsed:.1f} changes a second, {WATCHED_JOBS / every_seconds:.1f} wanted")
    return 100 * (_cpu_seconds(pid) - before) / elapsed


def _write_step(plane: ControlPlane, number: int, step: int) -> None:
    """Write a status as large as that of a running job."""
    progress = {"step": step, "totalSteps": 1000, "loss": 2.5 - step / 1000, "updatedAt": "2026-01-01T00:00:00Z"}
    display = {"step": f"{step}/1000", "score": f"{2.5 - step / 1000:.3f}", "speed": f"{5000 + step} tok/s"}
    condition = {"lastTransitionTime": "2026-01-01T00:00:00Z", "message": "all ranks train " * 8, "reason": "Running"}
    conditions = [{"type": kind, "status": "True", **condition} for kind in ("Accepted", "PodsCreated", "Running")]
    status = {"phase": "Running", "progress": progress, "display": display, "conditions": conditions}
    path = jobs.path(NAMESPACE, f"job-{number:03d}", part="status").partition("?")[0]
    plane.api.merge(path, {"status": status})


def _is_watch(entry: dict[str, Any]) -> bool:
    is_ours = entry.get("userAgent") == "moejob-client"
    return is_ours and entry["verb"] == "watch" and "moetrainingjobs" in entry["requestURI"]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_submit(folder: Path, times: int) -> list[Result]:
    """Seconds from the start of `moejob submit` to the first line of the step log, job after job."""
    nodes_folder = folder / "nodes"
    nodes_folder.mkdir()
    with run_cluster(nodes_folder, find_programs(say), Settings()) as nodes, install_release(nodes, folder) as home:
        seconds = [_first_loss(nodes, home.namespace, folder, number) for number in range(times + 1)]
    later = seconds[1:]
    return [
        Result(BENCH, "submit to first loss, images on the nodes, first job", seconds[0], "s", Better.LOWER),
        Result(
            BENCH,
            "submit to first loss, later jobs",
            median(later),
            "s",
            Better.LOWER,
            FIRST_LOSS_SECONDS,
            spread=(min(later), max(later)),
        ),
    ]


def _first_loss(nodes: Cluster, namespace: str, folder: Path, number: int) -> float:
    description = over_two_nodes(read_example())
    name = f"first-loss-{number}"
    description["metadata"]["name"] = name
    description["spec"]["training"] |= {"maxSteps": 6, "evalEvery": 6}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(description))
    begin = time.time()
    subprocess.run(
        [sys.executable, "-m", "moejob_cli", "submit", str(file), "-n", namespace],
        check=True,
        env=os.environ | {"KUBECONFIG": str(nodes.plane.kubeconfig)},
    )
    job = SubmittedJob(nodes, namespace, name)
    marks: dict[str, float] = {"submitted": time.time() - begin}
    stages: dict[str, Callable[[], bool]] = {
        "pods": lambda: len(job.list_pods()) == 2,
        "containers": lambda: all(pod["status"].get("phase") == "Running" for pod in job.list_pods()),
        "loss": lambda: job.run().last_step() >= 1,
    }
    for stage, is_reached in stages.items():
        until(is_reached, seconds=900, waiting_for=job.describe)
        marks[stage] = time.time() - begin
    say(f"{name}: {json.dumps({stage: round(seconds, 1) for stage, seconds in marks.items()})}")
    first_step = job.run().read_step_log()[0]
    say(json.dumps({key: value for key, value in first_step.items() if key.endswith("Seconds")}))
    job.await_end()
    nodes.plane.api.delete(f"{JOBS.format(namespace)}/{name}")
    query = f"/api/v1/namespaces/{namespace}/pods?labelSelector={Label.JOB}={name}"
    until(lambda: not nodes.plane.api.get(query)["items"], seconds=300, waiting_for="the end of its pods")
    return marks["loss"]


if __name__ == "__main__":
    main()
