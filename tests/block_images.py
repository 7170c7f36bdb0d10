"""Owns file systems on images that lose power or room: their state at any moment is a copy of the image.

A copy sees what the file system has sent to its device, and not what it holds in memory, as a machine does after a
loss of power. Processes that write are stopped meanwhile, so that the copy is of one moment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

_DEADLINE_SECONDS = 120.0
# Longer than the clock of a file's times ticks.
_QUIET_SECONDS = 0.02


class FileSystem(StrEnum):
    """A file system that volumes of clusters have."""

    EXT4 = "ext4"
    XFS = "xfs"


# XFS makes none that is smaller.
_BYTES = {FileSystem.EXT4: 192 * 2**20, FileSystem.XFS: 320 * 2**20}
_MAKE = {FileSystem.EXT4: ("mkfs.ext4", "-q", "-m", "0"), FileSystem.XFS: ("mkfs.xfs", "-q")}
# A copy has the name of the original, which is still mounted.
_OPTIONS = {FileSystem.EXT4: "loop", FileSystem.XFS: "loop,nouuid"}


@dataclass(frozen=True)
class Image:
    """A file system in a file."""

    path: Path
    kind: FileSystem

    @contextmanager
    def mount(self, place: Path) -> Iterator[Path]:
        """Mount it, after it has recovered from what happened to it."""
        place.mkdir(parents=True)
        _run("mount", "-t", self.kind, "-o", _OPTIONS[self.kind], self.path, place)
        try:
            yield place
        finally:
            _unmount_image(place)

    def cut(self, path: Path) -> Image:
        """Return the state that a loss of power would leave now. Nothing may write to it meanwhile."""
        until = time.monotonic() + _DEADLINE_SECONDS
        while time.monotonic() < until:
            before = self.path.stat().st_mtime_ns
            is_quiet = time.time_ns() - before > _QUIET_SECONDS * 1e9
            if is_quiet:
                _run("cp", "--sparse=always", self.path, path)
            # The kernel may have flushed in between.
            if is_quiet and self.path.stat().st_mtime_ns == before:
                return Image(path, self.kind)
            time.sleep(_QUIET_SECONDS)
        raise AssertionError(f"{self.path} was written to all the time")


def make_image(path: Path, kind: FileSystem) -> Image:
    """Make a file system, or skip the test by name where it cannot be made or mounted."""
    _skip_without(kind)
    with path.open("wb") as file:
        file.truncate(_BYTES[kind])
    _run(*_MAKE[kind], path)
    return Image(path, kind)


def _skip_without(kind: FileSystem) -> None:
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("needs root and loop devices")
    for program in (_MAKE[kind][0], "mount", "umount"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    if kind not in Path("/proc/filesystems").read_text().split():
        pytest.skip(f"this kernel has no {kind}")


def _unmount_image(place: Path) -> None:
    until = time.monotonic() + _DEADLINE_SECONDS
    while not _can_run("umount", place):
        if time.monotonic() > until:
            _run("umount", "--lazy", place)
            raise AssertionError(f"{place} was in use until the end")
        time.sleep(0.05)


def _can_run(*command: str | Path) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _run(*command: str | Path) -> None:
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, f"{' '.join(map(str, command))}: {ran.stderr}"
