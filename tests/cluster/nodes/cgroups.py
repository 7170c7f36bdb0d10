"""The cgroups under which a cluster's pods run, of either version of the kernel's interface; knows nothing of pods.

These are what outlives us when we are killed: folders without processes, which the next start removes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.waiting import until

ROOT = Path("/sys/fs/cgroup")
# What the kubelet asks for.
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "pids")
# cpuacct is a part of cpu since version 2.
OF_VERSION_2 = tuple(name for name in CONTROLLERS if name != "cpuacct")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One cgroup by its path: a folder for each hierarchy of version 1, or one in version 2."""

    path: str
    root: Path = ROOT

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return where it is."""
        return tuple(hierarchy / self.path for hierarchy in _find_hierarchies(self.root))

    def create(self) -> None:
        """Make it, and let it use what its parents may."""
        for hierarchy in _find_hierarchies(self.root):
            folder = hierarchy
            for part in Path(self.path).parts:
                _delegate_controllers(folder)
                folder /= part
                folder.mkdir(exist_ok=True)
                _inherit_processors(folder)
            _raise_weight(folder)

    def pids(self, name: str = "") -> set[int]:
        """All processes in it and below; of those below, in such as have a name in their path."""
        return {int(pid) for file in self._below("cgroup.procs") if name in str(file) for pid in _read_lines(file)}

    def remove(self) -> None:
        """End every process in it, and take it away."""

        def is_empty() -> bool:
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not self.pids()

        until(is_empty, waiting_for=lambda: f"the end of {sorted(self.pids())} in {self.path}")
        for folder in self.folders:
            for below, _, _ in os.walk(folder, topdown=False):
                Path(below).rmdir()

    def _below(self, file: str) -> Iterator[Path]:
        for folder in self.folders:
            yield from folder.rglob(file)


def is_version_2(root: Path = ROOT) -> bool:
    """Return whether there is one hierarchy for all controllers."""
    return (root / "cgroup.controllers").exists()


def missing_controllers() -> list[str]:
    """Those that the kubelet needs and this machine lacks."""
    if is_version_2():
        there = (ROOT / "cgroup.controllers").read_text().split()
        return [name for name in OF_VERSION_2 if name not in there]
    return [name for name in CONTROLLERS if not (ROOT / name).is_dir()]


def _find_hierarchies(root: Path) -> tuple[Path, ...]:
    if is_version_2(root):
        return (root,)
    # Links name one hierarchy twice: cpu and cpu,cpuacct.
    return tuple(sorted({found.resolve() for found in root.iterdir() if (found / "cgroup.procs").exists()}))


def _delegate_controllers(folder: Path) -> None:
    """In version 2, let the cgroups below use every controller that this one may."""
    if not is_version_2(folder):
        return
    for controller in (folder / "cgroup.controllers").read_text().split():
        (folder / "cgroup.subtree_control").write_text(f"+{controller}")


def _inherit_processors(folder: Path) -> None:
    """In version 1 a new cgroup may use no processor and no memory until they are assigned."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = folder / name
        if file.exists() and not is_version_2(folder) and not file.read_text().strip():
            file.write_text((folder.parent / name).read_text())


def _raise_weight(folder: Path) -> None:
    """Beside busy neighbours a cgroup gets no more time than one process of theirs; what is in here are many.

    Sixteen times as much starved the neighbours of `make test`, which are nice; twice leaves them about an eighth.
    """
    for name, weight in (("cpu.shares", "2048"), ("cpu.weight", "200")):
        if (folder / name).exists():
            (folder / name).write_text(weight)


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        # The cgroup has gone since it was listed.
        return []
