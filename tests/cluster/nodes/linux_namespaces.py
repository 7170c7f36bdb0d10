"""Namespaces that live as long as their first process, which never outlives us; knows nothing of what runs in them.

All that is in them ends with that process, by the kernel's hand: processes, mounts, links, routes, packet filters.
There is nothing to undo, however we end.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster.processes import Process

# Of a switch, and of a node: a machine's own view of everything but files and users.
NETWORK = ("net",)
MACHINE = ("net", "mount", "uts", "pid")


class NamespaceError(Exception):
    """A command in namespaces failed; its words are the message."""


class LinuxNamespaces:
    """Namespaces of the given kinds; `first` is a program that does nothing and buries orphans."""

    def __init__(self, name: str, kinds: Sequence[str], first: Path, folder: Path) -> None:
        self._kinds = kinds
        self._first = first
        self._has_processes = "pid" in kinds
        flags = [f"--{kind}" for kind in kinds]
        if self._has_processes:
            flags += ["--fork", "--kill-child", "--mount-proc"]
        self._process = Process(f"{name}-first", ["unshare", *flags, "--", first], folder)

    def start(self) -> None:
        """Return when commands can run in it."""
        self._process.start()
        self._process.wait_until(lambda: self._find_first_pid() is not None)

    def stop(self) -> None:
        """End all that is in it."""
        self._process.stop()

    @property
    def pid(self) -> int:
        """The first process, as the machine numbers it."""
        first_pid = self._find_first_pid()
        if first_pid is None:
            raise NamespaceError(f"{self._process.name} does not run: it was not started, or something has ended it")
        return first_pid

    def wrap_command(self, *words: str | Path) -> list[str | Path]:
        """Return what runs a command in it."""
        return ["nsenter", f"--target={self.pid}", *(f"--{kind}" for kind in self._kinds), "--", *words]

    def run(self, *words: str | Path) -> str:
        """Return what a command prints that runs in it."""
        return run_command(*self.wrap_command(*words))

    def _find_first_pid(self) -> int | None:
        pid = self._process.pid
        if pid is None or not self._has_processes:
            return pid if pid is not None and self._is_first(pid) else None
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return next((int(child) for child in children if self._is_first(int(child))), None)

    def _is_first(self, pid: int) -> bool:
        """Return whether a process is past all that unshare does before it becomes the first."""
        try:
            return Path(f"/proc/{pid}/exe").samefile(self._first)
        except OSError:
            return False


def run_command(*words: str | Path) -> str:
    """Return what a command prints."""
    result = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    if result.returncode:
        raise NamespaceError(f"{' '.join(map(str, words))}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout
