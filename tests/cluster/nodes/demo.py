"""moejob on two real nodes of this machine: `make cluster-demo`, without Docker.

A cluster, the chart, a job, a table that moves, and the finished model, which answers a question.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from cluster.binaries import MissingProgramError
from cluster.by_hand import end_when_asked, say
from cluster.nodes.cluster import Cluster, Settings, find_programs, run_cluster
from cluster.nodes.obstacles import find_obstacles
from cluster.nodes.training import (
    ENDS,
    ROOT,
    TRAINER_PYTHON,
    TRAINING_SECONDS,
    SubmittedJob,
    install_release,
    over_two_nodes,
    read_example,
    submit_job,
)
from cluster.waiting import until
from images import CannotBuildError

EXPORT = ROOT / "runs" / "cluster-demo"
QUESTION = "count from 2 to 5"


def main() -> int:
    """Show it. Says what is missing where it cannot be shown."""
    reasons = find_obstacles(Settings())
    if reasons:
        say(f"no real nodes on this machine: {'; '.join(reasons)}")
        return 1
    end_when_asked()
    try:
        with tempfile.TemporaryDirectory(prefix="moejob-") as folder, suppress(KeyboardInterrupt):
            _show(Path(folder))
    except (MissingProgramError, CannotBuildError) as missing:
        say(str(missing))
        return 1
    return 0


def _show(folder: Path) -> None:
    programs = find_programs(say)
    say("starting two nodes")
    with run_cluster(folder, programs) as nodes:
        say(f"export KUBECONFIG={nodes.plane.kubeconfig}\n{nodes.plane.kubectl('get', 'nodes')}")
        say("installing the chart; the first time the nodes pull the trainer, which takes minutes")
        with install_release(nodes, folder) as home:
            job = submit_job(nodes, home.namespace, over_two_nodes(read_example()))
            _watch(nodes, job)
            say(nodes.plane.kubectl("get", "pods", "--output=wide", f"--namespace={home.namespace}"))
            shutil.rmtree(EXPORT, ignore_errors=True)
            shutil.copytree(job.run().folder / "export", EXPORT)
    say(f"the model is in {EXPORT}")
    subprocess.run([TRAINER_PYTHON, ROOT / "examples" / "ask.py", EXPORT, QUESTION], check=True)


def _watch(nodes: Cluster, job: SubmittedJob) -> None:
    """The table of `kubectl get`: its head, and its row whenever more has changed than the job's age."""
    shown: list[str] = []

    def has_ended() -> bool:
        # Asked first: the row that is shown last is the one of the end.
        phase = job.phase
        head, row = nodes.plane.kubectl("get", "mtj", job.name, f"--namespace={job.namespace}").splitlines()
        *seen, _ = row.split()
        if seen != shown:
            say(row if shown else f"{head}\n{row}")
            shown[:] = seen
        return phase in ENDS

    until(has_ended, seconds=TRAINING_SECONDS, waiting_for=job.describe)
    if job.phase != "Succeeded":
        raise SystemExit(job.describe())


if __name__ == "__main__":
    sys.exit(main())
