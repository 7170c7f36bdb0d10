"""Faults of jobs that train, each a verb; knows nothing of their recovery."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.nodes.cluster import Cluster
from cluster.nodes.recovery import GangPod
from cluster.waiting import until

# Each pod has a /tmp of its own.
SHIFT_FILE = "/tmp/shift"


def kill_rank(member: GangPod) -> None:
    """Its process ends without a word."""
    os.kill(_rank_pid(member), signal.SIGKILL)


def pause_rank(member: GangPod) -> None:
    """Its process stands still: it does not end, it answers no request."""
    os.kill(_rank_pid(member), signal.SIGSTOP)


def kill_pod(nodes: Cluster, namespace: str, pod: str) -> None:
    """The pod goes at once; its processes are asked to end, and may still save."""
    nodes.plane.kubectl("delete", "pod", pod, f"--namespace={namespace}", "--grace-period=0", "--force")


def kill_processes(member: GangPod) -> None:
    """All of a pod's end without a word: the kernel ends those of a container with its first."""
    os.kill(member.launcher, signal.SIGKILL)


def damage_checkpoint(checkpoint: Path) -> None:
    """One byte of its largest file is another."""
    largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))


def _rank_pid(member: GangPod) -> int:
    if member.rank is None:
        raise AssertionError(f"{member.name} holds no rank")
    return member.rank


def kill_operator(nodes: Cluster, namespace: str) -> None:
    """Every replica goes at once."""
    nodes.plane.kubectl(
        "delete", "pods", "--selector=app.kubernetes.io/name=moejob", f"--namespace={namespace}", "--grace-period=0",
        "--force",
    )  # fmt: skip


def kill_operator_and_pod(nodes: Cluster, namespace: str, pod: str) -> None:
    """Both, so that no process answers for the pod until the operator is back."""
    kill_operator(nodes, namespace)
    kill_pod(nodes, namespace, pod)


def is_alive(pid: int) -> bool:
    """Return whether a process still runs, or would if it were let."""
    return Path(f"/proc/{pid}/exe").exists()


def hold_launcher(member: GangPod) -> None:
    """The launcher stands still, and so do those that it would end."""
    os.kill(member.launcher, signal.SIGSTOP)


def resume_rank(member: GangPod) -> None:
    """Let what was held continue, if it still exists."""
    for pid in (member.rank, member.launcher):
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def standing_still(member: GangPod) -> Iterator[None]:
    """Its rank does, and so do those that wait for it."""
    pause_rank(member)
    try:
        yield
    finally:
        resume_rank(member)


def exhaust_memory(nodes: Cluster, namespace: str, member: GangPod) -> None:
    """Memory runs out in its pod, and the kernel takes it from the rank."""
    Path(f"/proc/{_rank_pid(member)}/oom_score_adj").write_text("1000")
    # Many, none of which is as large as the rank: the kernel takes the largest.
    hog = "import os, time\nfor _ in range(4): os.fork()\nheld = bytes([1]) * (1 << 28)\ntime.sleep(600)"
    command = nodes.plane.kubectl_command("exec", member.name, f"--namespace={namespace}", "--", "python", "-c", hog)
    asking = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: not is_alive(_rank_pid(member)), waiting_for="the kernel to end the rank")
    finally:
        asking.kill()
        asking.wait()
        for pid in nodes.pids(namespace, member.name):
            if hog.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def fill_volume(folder: Path) -> None:
    """No byte is left on the volume that a folder is on."""
    with (folder / "filling").open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def drain_node(nodes: Cluster, node: str, job: str) -> None:
    """The pods of a job leave a node, which takes no others."""
    nodes.plane.kubectl("drain", node, f"--pod-selector=moejob.dev/job={job}", "--force", "--delete-emptydir-data")


def shift_clock(nodes: Cluster, namespace: str, pod: str, by: str) -> None:
    """The time is another one in a pod whose processes have loaded libfaketime."""
    nodes.plane.kubectl("exec", pod, f"--namespace={namespace}", "--", "sh", "-c", f"echo '{by}' >{SHIFT_FILE}")
