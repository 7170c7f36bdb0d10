"""One node: a machine's namespaces with containerd, kubelet and kube-proxy in them, each to be killed and started."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.nodes.cgroups import Cgroup
from cluster.nodes.kubelet import (
    Membership,
    health_url,
    kubelet_flags,
    proxy_flags,
    write_kubelet_settings,
    write_pod_network,
)
from cluster.nodes.linux_namespaces import MACHINE, LinuxNamespaces
from cluster.nodes.runtime import ProgramFolders, Runtime
from cluster.processes import Process

CNI_PROGRAMS = ("bridge", "host-local", "loopback")
# What the kubelet sets on a machine, and the values it wants: it finds them in files of its own, since there is one
# kernel for all.
TUNABLES = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


@dataclass(frozen=True, slots=True)
class Programs:
    """The folder of all programs of a node, and of the libraries that some need."""

    paths: Mapping[str, Path]
    libraries: tuple[Path, ...]

    @property
    def words(self) -> list[str]:
        """Return what makes a command find them."""
        search = ":".join([*sorted({str(path.parent) for path in self.paths.values()}), os.environ["PATH"]])
        return ["env", f"PATH={search}", f"LD_LIBRARY_PATH={':'.join(map(str, self.libraries))}"]


class Node:
    """A node of a cluster. `kept` is where containerd keeps its images between runs."""

    def __init__(self, joins: Membership, programs: Programs, folder: Path, kept: Path, registry: str) -> None:
        self.name = joins.name
        self.joins = joins
        self.namespaces = LinuxNamespaces(joins.name, MACHINE, programs.paths["pause"], folder)
        self._programs = programs
        self._folder = folder
        self._kept = kept
        self._cgroup = Cgroup(joins.cgroup)
        cni_programs = tuple(sorted({programs.paths[name].parent for name in CNI_PROGRAMS}))
        self._places = ProgramFolders(folder, cni_programs, folder / "cni", registry)

    def start_machine(self) -> None:
        """The namespaces alone: a machine that nothing runs on."""
        self._folder.mkdir()
        self._cgroup.create()
        self.namespaces.start()
        self._mount_folders()
        self.namespaces.run("hostname", self.name)
        for setting in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"):
            self.namespaces.run("sh", "-c", f"echo 1 >/proc/sys/{setting}")

    def start(self) -> None:
        """All that runs on the machine, once it is plugged in."""
        words = self._programs.words
        write_pod_network(self._folder / "cni", self.joins)
        self.runtime = Runtime(self.namespaces, self._places, self._programs.paths, words)
        self.runtime.start()
        settings = write_kubelet_settings(self._folder / "kubelet.json", self.joins)
        self.kubelet = self._process("kubelet", *kubelet_flags(settings, self.joins))
        self.proxy = self._process("kube-proxy", *proxy_flags(self.joins))
        self.proxy.start()
        self.start_kubelet()

    def stop(self) -> None:
        """End the machine with all that is on it."""
        self.namespaces.stop()
        self._cgroup.remove()

    def start_kubelet(self) -> None:
        """Return when it is well, which is before the API server knows."""
        self.kubelet.start()
        self.kubelet.wait_until(self._kubelet_is_well)

    def pids(self, pod_uid: str) -> set[int]:
        """The processes of a pod, as the machine numbers them."""
        return self._cgroup.pids(f"pod{pod_uid}")

    def filter_packets(self, rules: str) -> None:
        """Give the node's network these packet filters, all at once."""
        file = self._folder / "filters.nft"
        file.write_text(rules)
        self.namespaces.run(*self._programs.words, self._programs.paths["nft"], "--file", file)

    def process(self, name: str, *words: str | Path) -> Process:
        """A program that runs on the node beside all else, once it is started."""
        return Process(name, self.namespaces.wrap_command(*words), self._folder)

    def host_path(self, inside: Path) -> Path:
        """Return where the machine sees what the node sees at a path."""
        return Path(f"/proc/{self.namespaces.pid}/root{inside}")

    def _mount_folders(self) -> None:
        """The places where programs of a node write are the node's own; all else is seen as the machine has it."""
        own = self._folder / "own"
        for name in ("lib/containerd", "log", "tunables"):
            (own / name).mkdir(parents=True)
        self._kept.mkdir(parents=True, exist_ok=True)
        bound = {
            own / "lib" / "containerd": self._kept,
            Path("/var/lib"): own / "lib",
            Path("/var/log"): own / "log",
        }
        self.namespaces.run("mount", "--make-rshared", "/")
        self.namespaces.run("mount", "-t", "tmpfs", "run", "/run")
        for name, value in TUNABLES.items():
            file = own / "tunables" / Path(name).name
            file.write_text(value)
            bound[Path("/proc/sys") / name] = file
        for target, source in bound.items():
            self.namespaces.run("mount", "--rbind", source, target)

    def _process(self, name: str, *flags: str) -> Process:
        return self.process(name, *self._programs.words, self._programs.paths[name], *flags)

    def _kubelet_is_well(self) -> bool:
        try:
            with urllib.request.urlopen(health_url(self.joins), timeout=1) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except OSError:
            return False
