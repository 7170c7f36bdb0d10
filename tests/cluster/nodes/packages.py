"""Finds the programs of a node that are not written in Go alone, and unpacks Debian's where the machine has none.

runc is Go, and needs a C compiler and the headers of libseccomp, without which it runs no pod of the restricted
standard; the others are C. Nothing is installed: what is unpacked lies in the cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.binaries import MissingProgramError, Report, alone, cache

# With the libraries that a bare system lacks.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "runc": ("runc", "libseccomp2"),
    "nft": (
        *("nftables", "libnftables1", "libnftnl11", "libmnl0", "libxtables12", "libjansson4"),
        *("libedit2", "libbsd0", "libmd0", "libtinfo6", "libgmp10"),
    ),
    # Not for nodes: what the images of tests are made of.
    "busybox": ("busybox-static",),
}
# Not for nodes either: what kube-router calls. The programs of iptables are links to one.
IPSET, IPTABLES = "ipset", "iptables"
FIREWALL: Mapping[str, tuple[str, ...]] = {
    IPSET: ("ipset", "libipset13", "libmnl0"),
    IPTABLES: ("iptables", "libxtables12", "libnftnl11", "libmnl0"),
}
_IPTABLES_PROGRAM = "xtables-nft-multi"
_IPTABLES_NAMES = ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore")
# What shifts the clock of a process that loads it.
FAKETIME = "libfaketime"
# Linked with nothing, or it would not run in an image of its own.
NOT_FROM_PATH = frozenset({"busybox"})
FOLDERS = ("usr/sbin", "usr/bin", "sbin", "bin")
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Programs, and where the libraries are that they need."""

    programs: Mapping[str, Path]
    libraries: tuple[Path, ...]


def find_or_unpack(report: Report) -> Unpacked:
    """Return where each program is."""
    installed = {name: path for name in PACKAGES.keys() - NOT_FROM_PATH if (path := shutil.which(name))}
    wanted = sorted(PACKAGES.keys() - installed)
    folders = {name: _unpack_if_missing(name, PACKAGES[name], report) for name in wanted}
    return Unpacked(
        {name: Path(path) for name, path in installed.items()}
        | {name: _find_program(folders[name], name) for name in wanted},
        tuple(folder / library for folder in folders.values() for library in LIBRARIES),
    )


def find_firewall(folder: Path, report: Report) -> list[str]:
    """Return the words that let a command find ipset and iptables; `folder`, which is made, gets their programs."""
    unpacked = {name: _unpack_if_missing(name, packages, report) for name, packages in FIREWALL.items()}
    folder.mkdir()
    (folder / IPSET).symlink_to(_find_program(unpacked[IPSET], IPSET))
    for name in _IPTABLES_NAMES:
        (folder / name).symlink_to(_find_program(unpacked[IPTABLES], _IPTABLES_PROGRAM))
    libraries = [str(root / library) for root in unpacked.values() for library in LIBRARIES]
    return [
        "env",
        f"PATH={folder}:{os.environ['PATH']}",
        f"LD_LIBRARY_PATH={':'.join(libraries)}",
        f"XTABLES_LIBDIR={unpacked[IPTABLES] / LIBRARIES[0] / 'xtables'}",
    ]


def find_faketime(report: Report) -> Path:
    """The library of that name."""
    folder = _unpack_if_missing(FAKETIME, (FAKETIME,), report)
    return folder / LIBRARIES[0] / "faketime" / "libfaketime.so.1"


def _unpack_if_missing(name: str, packages: Iterable[str], report: Report) -> Path:
    folder = cache() / "debian" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder, report):
        if not folder.exists():
            _unpack_packages(packages, folder)
            report(f"unpacked Debian's {name}")
    return folder


def _unpack_packages(packages: Iterable[str], target: Path) -> None:
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg-deb")
    if apt is None or dpkg is None:
        raise MissingProgramError(f"{target.name}: not in $PATH, and only Debian and its kin can fetch it; install it")
    with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
        downloads, root = Path(unfinished, "downloads"), Path(unfinished, "root")
        downloads.mkdir()
        _run_command(apt, "download", *packages, folder=downloads)
        for package in downloads.glob("*.deb"):
            _run_command(dpkg, "--extract", package, root, folder=downloads)
        root.rename(target)


def _find_program(folder: Path, name: str) -> Path:
    return next(path for below in FOLDERS if (path := folder / below / name).exists())


def _run_command(*command: str | Path, folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"}
    )
    if done.returncode:
        raise MissingProgramError(f"{' '.join(map(str, command[:2]))} failed: {done.stderr.strip()}")
