"""What is done to jobs that train, each a verb; knows nothing of what becomes of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from cluster.nodes.cluster import Cluster
from cluster.nodes.recovery import Member


def kill_rank(member: Member) -> None:
    """Its process ends without a word."""
    os.kill(_rank(member), signal.SIGKILL)


def hold_rank(member: Member) -> None:
    """Its process stands still: it does not end, it answers nobody."""
    os.kill(_rank(member), signal.SIGSTOP)


def kill_pod(nodes: Cluster, namespace: str, pod: str) -> None:
    """The pod goes at once, its processes with it."""
    nodes.plane.kubectl("delete", "pod", pod, f"--namespace={namespace}", "--grace-period=0", "--force")


def damage(checkpoint: Path) -> None:
    """One byte of its largest file is another."""
    largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))


def _rank(member: Member) -> int:
    if member.rank is None:
        raise AssertionError(f"{member.name} holds no rank")
    return member.rank


def kill_operator(nodes: Cluster, namespace: str) -> None:
    """Every replica goes at once."""
    nodes.plane.kubectl(
        "delete", "pods", "--selector=app.kubernetes.io/name=moejob", f"--namespace={namespace}", "--grace-period=0",
        "--force",
    )  # fmt: skip


def is_alive(pid: int) -> bool:
    """Whether a process still runs, or would if it were let."""
    return Path(f"/proc/{pid}/exe").exists()
