"""A cluster leaves the machine as it found it, whatever ends it, and the next one starts on what a killed one left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from cluster.nodes.cgroups import Cgroup
from cluster.nodes.cluster import SPARE, remove_leftovers
from cluster.nodes.linux_namespaces import run_command
from cluster.nodes.node import TUNABLES, Programs
from cluster.nodes.pods import Shell, build_claim
from cluster.nodes.storage import StorageClass
from cluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TESTS = Path(__file__).parents[2]
END_SECONDS = 60
# Where programs of nodes write unless given another place.
HAUNTS = (
    "/etc/cni",
    "/run/containerd",
    "/run/netns",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/log/pods",
)
NODES_MOUNT_ON = ("/", "/run", "/var/lib", "/var/log")


def test_a_killed_cluster_leaves_cgroups_and_the_next_one_nothing(tmp_path: Path, node_programs: Programs) -> None:
    remove_leftovers(SPARE)
    before = find_traces(tmp_path)

    def left() -> set[tuple[str, str]]:
        return find_traces(tmp_path) - before

    def only_left(kinds: set[str]) -> bool:
        return {kind for kind, _ in left()} == kinds

    leaves: dict[signal.Signals, set[str]] = {signal.SIGKILL: {"cgroup"}, signal.SIGTERM: set()}
    for end, kinds in leaves.items():
        with start_owner(tmp_path / end.name) as process:
            run_pod(node_programs, tmp_path / end.name)
            assert {kind for kind, _ in left()} >= {"cgroup", "link", "loop", "namespace", "process", "route"}
            process.send_signal(end)
            process.wait(END_SECONDS)
        until(
            partial(only_left, kinds),
            waiting_for=lambda: f"the end of {sorted(left())}",
        )


@contextmanager
def start_owner(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has a cluster, from when the cluster is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.nodes", folder, "--spare"],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("export KUBECONFIG="), said + process.stdout.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def run_pod(programs: Programs, folder: Path) -> None:
    """A pod that runs, on a volume that is mounted."""
    volume = build_claim("volume", "16Mi", StorageClass.SIZED) | {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    pod = Shell("exec sleep 600", claim="volume").body("pod") | {"apiVersion": "v1", "kind": "Pod"}
    kubectl: list[str | Path] = [programs.paths["kubectl"], f"--kubeconfig={folder}/plane/admin.kubeconfig"]
    for body in (volume, pod):
        subprocess.run(
            [*kubectl, "create", "-f", "-"], input=json.dumps(body), text=True, check=True, capture_output=True
        )
    run_command(*kubectl, "wait", "--for=jsonpath={.status.phase}=Running", "--timeout=120s", "pod/pod")


def find_traces(folder: Path) -> set[tuple[str, str]]:
    """All of this machine that a cluster with files in a folder could change, each with its kind."""
    return {
        *(("mount", line) for line in Path("/proc/self/mounts").read_text().splitlines() if _is_ours(line, folder)),
        *_each("link", run_command("ip", "-brief", "link"), words=1),
        *_each("route", run_command("ip", "route")),
        *_each("loop", run_command("losetup", "--list", "--noheadings", "--output=BACK-FILE")),
        *(("namespace", name) for name in _list_namespaces()),
        *(("process", name) for name in _find_processes(folder)),
        *(("cgroup", str(found)) for found in Cgroup(SPARE.owner).folders if found.exists()),
        *(("tunable", f"{name}={Path('/proc/sys', name).read_text().strip()}") for name in TUNABLES),
        *(("haunt", name) for name in HAUNTS if Path(name).exists()),
    }


def _is_ours(mount: str, folder: Path) -> bool:
    """Return whether a cluster could have made a mount: by what it names, or by where it is."""
    target = mount.split()[1]
    is_named = any(name in mount for name in (str(folder), SPARE.owner, *HAUNTS))
    return is_named or target in NODES_MOUNT_ON or target.startswith("/proc/sys/")


def _each(kind: str, lines: str, words: int | None = None) -> Iterator[tuple[str, str]]:
    for line in lines.splitlines():
        yield kind, " ".join(line.split()[:words])


def _list_namespaces() -> Iterator[str]:
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        # The process has ended since it was listed.
        with suppress(OSError):
            yield str(link.readlink())


def _find_processes(folder: Path) -> Iterator[str]:
    """Those that name the folder, or are in the cgroups of pods."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            # Of a killed one an entry stays until its parent has read how it ended.
            if words and (str(folder) in words or SPARE.owner in (process / "cgroup").read_text()):
                yield f"{process.name} {words}"
